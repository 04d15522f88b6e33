"""What a model has learned, as a value: a teaching makes a new one, and the old one stays as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from efcil.product.calibration import CalibrationOffset


@dataclass(frozen=True)
class ClassRecord:
    """A line of the class table."""

    name: str
    images: int  # learned from so far
    learned: str  # ISO date of its first teaching
    recall: float | None  # percent of its held-out pictures named rightly at that teaching


@dataclass(frozen=True, eq=False)
class State:
    """Classes in the order in which they were learned, weights, statistics."""

    classes: tuple[ClassRecord, ...]
    weights: Mapping[str, Tensor]  # "backbone. ..." and "head. ...", on the CPU
    statistics: Mapping[str, Tensor]  # tracks and classifier, on the CPU; empty before the first teaching
    temperature: float
    calibration_offset: CalibrationOffset
    backbone_updates: int  # how often the backbone has learned; weights that were given count as one
    updates: int
    frozen: bool
    previous: State | None  # before the last teaching; it has none itself

    @property
    def names(self) -> list[str]:
        """Class names."""
        return [record.name for record in self.classes]

    def with_previous(self, previous: State | None) -> State:
        """This state, with the one to go back to."""
        return replace(self, previous=None if previous is None else replace(previous, previous=None))

    def updated(self, **values: Any) -> State:
        """This state with other values."""
        return replace(self, **values)
