"""What a shift is: how the statistics of old classes follow a backbone that learns."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar, Literal

from efcil.components import Component
from efcil.core.class_stats import ClassStats
from efcil.core.feature_maps import FeatureMap
from efcil.features import TaskFeatures


class Shift(Component):
    """A function (statistics, task features) -> statistics. Shifts of one kind with equal options are one."""

    moves: ClassVar[Literal["gram", "mean"]] = "gram"  # what it can move: Grams and means, or means alone
    needs_images: ClassVar[bool] = False  # whether features are not enough
    needs_gram: ClassVar[bool] = False  # whether it looks at Grams even where no classifier does

    @property
    def feature_map(self) -> FeatureMap | None:
        """The map in front of the statistics, where the shift wants one."""
        return None

    @property
    def key(self) -> Hashable:
        """What makes two shifts the same."""
        return type(self), self.own_options()

    def __call__(self, stats: ClassStats, features: TaskFeatures) -> ClassStats:
        """Return `stats` of the backbone before the task as those of the backbone after it."""
        raise NotImplementedError
