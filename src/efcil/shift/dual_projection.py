"""Dual projection: one linear map for the task (TSSP), then each class's own row space (CIP). Eq. 3-10, 16-17."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.core.gram_storage import Form, StorageSpec
from efcil.core.linear_algebra import ROWS_AT_ONCE, relative_ridge
from efcil.core.projection import RankRule, cross_validated_ridge, feature_products, task_shift, task_shift_from_gram
from efcil.errors import OptionError
from efcil.features import TaskFeatures, View


def _share(value: object) -> object:
    if value == "auto" or (isinstance(value, int | float) and 0 <= value < math.inf):
        return value
    raise ValueError("should be auto, or a number of 0 or more")


Share = Annotated[float | Literal["auto"], BeforeValidator(_share)]
"""A ridge as a share of trace / dim, which follows the scale and number of features; or chosen for each task."""

FEW = 4
"""Images per dimension below which a task has few (docs/fidelity.md): the plain solution then fits their noise."""


class DualProjectionOptions(Options):
    """Options of the shift, shared by every method that uses it."""

    shift: bool = True  # TSSP; without it old statistics stay where they were
    shift_ridge: float = Field(default=1e-9, ge=0)  # epsilon of Eq. 5
    shift_view: View = "clean"
    shift_ridge_rel: Share = 0.0  # ridge towards the identity, of trace / dim; 0: Eq. 5; auto: by cross-validation
    small_task: Literal["plain", "identity"] = "plain"  # a task of fewer than 4 dim images: Eq. 5 as it is, or ...
    small_task_ridge: float = Field(
        default=0.1, gt=0
    )  # ... ridge towards the identity, this share of trace / dim at 4 dim
    rank_rule: RankRule = "positive"  # CIP; "none" leaves it out
    rank_tolerance: float | None = Field(default=None, gt=0, lt=1)  # of the rules `tolerance` and `energy`
    gram_storage: Form = "gram"  # how old classes are kept; "factors": those of fewer than dim / 2 images take less
    gram_rank: int | None = Field(default=None, ge=1)  # rows of a factor at most; exact no longer
    gram_tolerance: float | None = Field(default=None, gt=0, lt=1)  # or: share of a Gram's trace that may be left out

    @property
    def how(self) -> tuple[Hashable, ...]:
        """All that decides the map: methods compared on one trajectory that agree in it share the map."""
        return (self.shift_view, self.shift_ridge, self.shift_ridge_rel, self.small_task, self.small_task_ridge)

    def towards_identity(self, images: int, dim: int) -> Share | None:
        """Return the ridge towards the identity for so many images, as a share of trace / dim; None for Eq. 5 as it is.

        Of few images the trace grows with their number, a prior does not: the fewer they are the larger is the ridge's
        share of it. Fewer than dimensions are too few to choose by (tests/test_model.py), so `auto` has that share too.
        """
        fewness = FEW * dim / images
        if self.shift_ridge_rel and (self.shift_ridge_rel != "auto" or images > dim):
            return self.shift_ridge_rel
        plain = self.small_task == "plain" and self.shift_ridge_rel != "auto"
        return None if plain or fewness <= 1 else self.small_task_ridge * fewness

    @property
    def memory(self) -> StorageSpec:
        """In which form classes are kept."""
        return StorageSpec(self.gram_storage, self.gram_rank, self.gram_tolerance)

    @model_validator(mode="after")
    def _tolerance_where_needed(self) -> DualProjectionOptions:
        needed = self.rank_rule in ("tolerance", "energy")
        if needed != (self.rank_tolerance is not None):
            raise ValueError(f"rank_rule={self.rank_rule} {'needs' if needed else 'takes no'} rank_tolerance")
        try:
            _ = self.memory
        except OptionError as error:
            raise ValueError(str(error)) from None
        return self


def dual_projection(stats: ClassStats | None, task: TaskFeatures, options: DualProjectionOptions) -> ClassStats | None:
    """Move the statistics of old classes from the backbone before the task to the one after it.

    Where the task says that nobody else holds them, the old ones go block by block as they move (`release`).
    """
    if stats is None or not options.shift or task.rests:
        return stats

    def move() -> ClassStats:
        shared = task.once(("shift", options.how), lambda: _shift(*task.pairs(options.shift_view), options))
        rule, tolerance = options.rank_rule, options.rank_tolerance
        return stats.transform_projected(shared, rule=rule, tolerance=tolerance, release=task.alone(stats))

    # Methods compared on one trajectory start from the same statistics and move them once.
    return task.once((stats, options.how, options.rank_rule, options.rank_tolerance), move)


def _shift(old: Tensor, new: Tensor, options: DualProjectionOptions) -> Tensor:
    """Eq. 5, or with a ridge towards the identity: what the images do not show stays."""
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
