"""How the statistics of old classes follow a backbone that learns: one short file per paper."""

from __future__ import annotations

from efcil.shift.adc import AdversarialDrift
from efcil.shift.base import Shift
from efcil.shift.dual_projection import DualProjection, TaskShift
from efcil.shift.ldc import LearnedMap
from efcil.shift.sdc import KernelDrift

__all__ = ["SHIFTS", "Shift"]

SHIFTS: dict[str, type[Shift] | None] = {
    "none": None,
    "dual-projection": DualProjection,
    "tssp": TaskShift,
    "ldc": LearnedMap,
    "sdc": KernelDrift,
    "adc": AdversarialDrift,
}
