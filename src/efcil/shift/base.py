"""What a shift is: how the statistics of old classes follow a backbone that learns."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar, Literal

from efcil.components import Component
from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.core.feature_maps import FeatureMap
from efcil.errors import ConfigError
from efcil.features import TaskFeatures


class PairsOptions(Options):
    """Options of shifts that are estimated from old and new features of the same images, seen in `shift_view`."""

    def check_training(self, training: Any) -> None:
        """Refuse the pseudo-images of a learner that makes none."""
        super().check_training(training)
        if getattr(self, "shift_view", "clean") == "pseudo" and not hasattr(training, "pseudo_ratio"):
            raise ConfigError("shift_view=pseudo needs the learner pseudo-replay; set clean or augmented")


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
