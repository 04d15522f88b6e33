"""Immutable state of a model; every update creates a new one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from efcil.product.calibration import CalibrationOffset


@dataclass(frozen=True)
class ClassRecord:
    """Row of the class table."""

    name: str
    images: int  # number of images learned
    learned: str  # ISO date when first learned
    recall: float | None  # percent, on held-out images of that update


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
    previous: State | None  # state before the last update, itself without previous
    identity: str = field(default_factory=lambda: secrets.token_hex(8))  # of the model, through all its updates

    @property
    def names(self) -> list[str]:
        """Class names in learning order."""
        return [record.name for record in self.classes]

    def with_previous(self, previous: State | None) -> State:
        """Return a copy with another previous state."""
        return replace(self, previous=None if previous is None else replace(previous, previous=None))

    def updated(self, **values: Any) -> State:
        """Return a copy with other values."""
        return replace(self, **values)
