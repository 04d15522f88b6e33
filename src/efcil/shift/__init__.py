"""Shifts, which update statistics of old classes after the backbone has changed: one short file per paper."""

from __future__ import annotations

from efcil.config import check_presets, keys
from efcil.plugins import Registry, subclass_of
from efcil.shift.adc import AdversarialDrift
from efcil.shift.base import Shift
from efcil.shift.dual_projection import DualProjection, TaskShift
from efcil.shift.ldc import LearnedMap
from efcil.shift.sdc import KernelDrift

__all__ = ["SHIFTS", "Shift", "register_shift"]

OWN: dict[str, type[Shift] | None] = {
    "none": None,
    "dual-projection": DualProjection,
    "tssp": TaskShift,
    "ldc": LearnedMap,
    "sdc": KernelDrift,
    "adc": AdversarialDrift,
}


def _check(name: str, kind: type[Shift]) -> None:
    check_presets(kind, keys(kind.options_type), f"shift '{name}'")


SHIFTS: Registry[type[Shift] | None] = Registry(
    "shift", "efcil.shifts", OWN, subclass_of(Shift), "a subclass of Shift", check=_check
)


def register_shift(name: str, kind: type[Shift]) -> type[Shift]:
    """Register a shift by name, like the entry points `efcil.shifts`; its attribute `presets` holds preset values.

    >>> from efcil.shift.base import Shift
    >>> class MeanDrift(Shift):
    ...     "Translate each mean by the average drift of the task's features."
    ...
    ...     moves = "mean"
    ...
    ...     def __call__(self, stats, features):
    ...         old, new = features.old_new_pairs("clean")
    ...         return stats.translate((new - old).mean(0).expand_as(stats.mean))
    >>> _ = register_shift("mean-drift", MeanDrift)
    >>> "mean-drift" in SHIFTS  # so that `efcil run lwf+mean-drift+ncm digits` works
    True
    >>> SHIFTS.reset()
    """
    SHIFTS.register(name, kind)
    return kind
