"""Dual projection: one linear map for the task (TSSP), then each class's own row space (CIP). Eq. 3-10, 16-17."""

from __future__ import annotations

from pydantic import Field, model_validator

from efcil.config import Options
from efcil.features import TaskFeatures, View
from efcil.linalg import RankRule, task_shift
from efcil.stats import ClassStats


class DualProjectionOptions(Options):
    """Options of the shift, shared by every method that uses it."""

    shift: bool = True  # TSSP; without it old statistics stay where they were
    shift_ridge: float = Field(default=1e-9, ge=0)  # epsilon of Eq. 5
    shift_images: View = "clean"
    rank_rule: RankRule = "positive"  # CIP; "none" leaves it out
    rank_tolerance: float | None = Field(default=None, gt=0, lt=1)  # of the rules `tolerance` and `energy`

    @model_validator(mode="after")
    def _tolerance_where_needed(self) -> DualProjectionOptions:
        needed = self.rank_rule in ("tolerance", "energy")
        if needed != (self.rank_tolerance is not None):
            raise ValueError(f"rank_rule={self.rank_rule} {'needs' if needed else 'takes no'} rank_tolerance")
        return self


def dual_projection(stats: ClassStats | None, task: TaskFeatures, options: DualProjectionOptions) -> ClassStats | None:
    """Move the statistics of old classes from the backbone before the task to the one after it."""
    if stats is None or not options.shift:
        return stats
    view, ridge = options.shift_images, options.shift_ridge

    def move() -> ClassStats:
        shared = task.once(("shift", view, ridge), lambda: task_shift(task.old(view), task.new(view), ridge))  # Eq. 5
        return stats.projected(shared, rule=options.rank_rule, tolerance=options.rank_tolerance)

    # Methods compared on one trajectory start from the same statistics and move them once.
    return task.once((stats, view, ridge, options.rank_rule, options.rank_tolerance), move)
