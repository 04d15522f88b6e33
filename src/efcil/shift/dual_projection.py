"""Dual projection: one linear map for the task (TSSP), then each class's own row space (CIP). Eq. 3-10, 16-17."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.core.linear_algebra import ROWS_AT_ONCE, relative_ridge
from efcil.core.projection import RankRule, cross_validated_ridge, feature_products, task_shift, task_shift_from_gram
from efcil.features import TaskFeatures
from efcil.learners.base import ImageView
from efcil.shift.base import PairsOptions, Shift


def _relative_ridge(value: object) -> object:
    if value == "auto" or (isinstance(value, int | float) and 0 <= value < math.inf):
        return value
    raise ValueError("should be auto, or a number of 0 or more")


RelativeRidge = Annotated[float | Literal["auto"], BeforeValidator(_relative_ridge)]
"""Ridge relative to trace / dim, or `auto`: chosen for each task."""

FEW = 4
"""Images per dimension below which a task is small (docs/fidelity.md): the unregularized solution then overfits."""


class DualProjectionOptions(PairsOptions):
    """Options of the shift, shared by every method that uses it."""

    shift_ridge: float = Field(default=1e-9, ge=0)
    """Ridge of the task-wise shift, epsilon of Eq. 5."""
    shift_view: ImageView = "clean"
    """Images whose old and new features the shift is estimated from."""
    shift_ridge_rel: RelativeRidge = 0.0
    """Ridge towards the identity, a share of trace / dim; 0: Eq. 5; auto: by cross-validation."""
    small_task: Literal["plain", "identity"] = "plain"
    """Tasks of fewer than 4 dim images: Eq. 5 as it is (plain), or a ridge towards the identity."""
    small_task_ridge: float = Field(default=0.1, gt=0)
    """That ridge for a task of 4 dim images, a share of trace / dim."""
    rank_rule: RankRule = "positive"
    """Rank of the class-wise projection (CIP); none leaves it out."""
    rank_tolerance: float | None = Field(default=None, gt=0, lt=1)
    """Tolerance of the rank rules `tolerance` and `energy`."""

    @property
    def cache_key(self) -> tuple[Hashable, ...]:
        """Options that determine the linear map; methods on one trajectory with equal keys share it."""
        return (self.shift_view, self.shift_ridge, self.shift_ridge_rel, self.small_task, self.small_task_ridge)

    def towards_identity(self, images: int, dim: int) -> RelativeRidge | None:
        """Return the ridge towards the identity relative to trace / dim; None for Eq. 5 unchanged.

        Of few images the trace grows with their number, a prior does not: the fewer they are the larger is the ridge's
        share of it. Fewer than dimensions are too few to choose by (tests/product/test_classifier.py), so `auto` has
        that share too.
        """
        fewness = FEW * dim / images
        if self.shift_ridge_rel and (self.shift_ridge_rel != "auto" or images > dim):
            return self.shift_ridge_rel
        plain = self.small_task == "plain" and self.shift_ridge_rel != "auto"
        return None if plain or fewness <= 1 else self.small_task_ridge * fewness

    @model_validator(mode="after")
    def _tolerance_where_needed(self) -> DualProjectionOptions:
        needed = self.rank_rule in ("tolerance", "energy")
        if needed != (self.rank_tolerance is not None):
            raise ValueError(f"rank_rule={self.rank_rule} {'needs' if needed else 'takes no'} rank_tolerance")
        return self


class DualProjection(Shift):
    """Transform statistics by the task's linear map (TSSP), projected onto the row space of each class (CIP).

    >>> import torch
    >>> from efcil.core.class_stats import ClassStats
    >>> from efcil.features import TaskFeatures
    >>> old = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])  # the task's images, before it was learned
    >>> new = old @ torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # and after it: the axes have changed places
    >>> task = TaskFeatures.from_saved(1, 0, {"old": old, "new": new, "labels": torch.tensor([1, 1, 1, 1])}, (2,))
    >>> stats = ClassStats.from_features(torch.tensor([[4.0, 0.0], [2.0, 1.0]]), torch.tensor([0, 0]))
    >>> DualProjection(rank_rule="numerical")(stats, task).mean.round(decimals=3).tolist()
    [[0.5, 3.0]]
    """

    options_type: ClassVar[type[Options]] = DualProjectionOptions
    needs_gram = True  # to compute the row space

    def __call__(self, stats: ClassStats, features: TaskFeatures) -> ClassStats:
        """Return the shifted statistics (Eq. 5-7, 16, 17)."""
        o = self.options
        pairs = features.old_new_pairs(o.shift_view)
        shift = features.cached(("shift", o.cache_key), lambda: estimate_shift(*pairs, o))  # Eq. 5
        return stats.transform_projected(shift, rule=o.rank_rule, tolerance=o.rank_tolerance)  # Eq. 6, 7, 16, 17


class TaskShiftOptions(DualProjectionOptions):
    """Options of the linear map."""

    rank_rule: Literal["none"] = "none"
    """Always none: no class-wise projection."""


class TaskShift(DualProjection):
    """Transform statistics by the task's linear map only (TSSP).

    >>> import torch
    >>> from efcil.core.class_stats import ClassStats
    >>> from efcil.features import TaskFeatures
    >>> old = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])  # the task's images, before it was learned
    >>> new = old @ torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # and after it: the axes have changed places
    >>> task = TaskFeatures.from_saved(1, 0, {"old": old, "new": new, "labels": torch.tensor([1, 1, 1, 1])}, (2,))
    >>> stats = ClassStats.from_features(torch.tensor([[4.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 0]))
    >>> TaskShift()(stats, task).mean.round(decimals=3).abs().tolist()
    [[0.0, 3.0]]
    """

    options_type = TaskShiftOptions
    needs_gram = False


def estimate_shift(old: Tensor, new: Tensor, options: DualProjectionOptions) -> Tensor:
    """Solve Eq. 5, with a ridge towards zero or towards the identity."""
    share = options.towards_identity(*old.shape)
    if share is None:
        return task_shift(old, new, options.shift_ridge)
    gram, cross = feature_products(old, new)
    if share == "auto":
        parts = zip(old.split(ROWS_AT_ONCE), new.split(ROWS_AT_ONCE), strict=True)
        squares = sum(float((y.to(gram) - x.to(gram)).square().sum()) for x, y in parts)
        ridge = cross_validated_ridge(gram, cross, squares, len(old))
    else:
        ridge = relative_ridge(gram, share)
    return task_shift_from_gram(gram, cross, ridge, "identity")
