"""Immutable state of a model; every update creates a new one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from efcil.product.calibration import CalibrationOffset
from efcil.product.evidence import NO_EVIDENCE, Evidence

UNDO_STEPS, UNDO_BYTES = 3, 2**24  # earlier states that are kept, at most


@dataclass(frozen=True)
class ClassRecord:
    """Row of the class table."""

    name: str
    images: int  # number of images learned
    learned: str  # ISO date when first learned
    recall: float | None  # percent, of images of that update that were held out
    checked: int = 0  # number of these images


@dataclass(frozen=True, eq=False)
class State:
    """Classes in learning order, weights and statistics."""

    classes: tuple[ClassRecord, ...]
    weights: Mapping[str, Tensor]  # "backbone. ..." and "head. ...", on the CPU
    statistics: Mapping[str, Tensor]  # tracks and classifier, on the CPU; empty before the first update
    temperature: float
    calibration_offset: CalibrationOffset
    backbone_updates: int  # number of times the backbone was trained; given weights count as one
    updates: int
    frozen: bool
    previous: State | None  # state before the last change, with those before it
    evidence: Evidence = NO_EVIDENCE  # of images scored as if they had not been learned
    identity: str = field(default_factory=lambda: secrets.token_hex(8))  # of the model, through all its updates

    @property
    def names(self) -> list[str]:
        """Class names in learning order."""
        return [record.name for record in self.classes]

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(t.numel() * t.element_size() for part in (self.weights, self.statistics) for t in part.values())

    def with_previous(self, previous: State | None) -> State:
        """Return a copy that can go back to a state, and from there to as many earlier ones as are small enough.

        At most `UNDO_STEPS`, in `UNDO_BYTES` together; one in any case.
        """
        chain: list[State] = []
        while previous is not None and len(chain) < UNDO_STEPS:
            if chain and sum(one.size for one in chain) + previous.size > UNDO_BYTES:
                break
            chain.append(previous)
            previous = previous.previous
        kept: State | None = None
        for one in reversed(chain):
            kept = replace(one, previous=kept)
        return replace(self, previous=kept)

    def updated(self, **values: Any) -> State:
        """Return a copy with other values."""
        return replace(self, **values)
