"""Base class of shifts, which update statistics of old classes after the backbone has changed."""

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
    """Options of shifts estimated from old and new features of the same images, in view `shift_view`."""

    def check_training(self, training: Any) -> None:
        """Raise ConfigError if the learner has no pseudo-images."""
        super().check_training(training)
        if getattr(self, "shift_view", "clean") == "pseudo" and not hasattr(training, "pseudo_ratio"):
            raise ConfigError("shift_view=pseudo needs the learner pseudo-replay; set clean or augmented")


class Shift(Component):
    """Function (statistics, task features) -> statistics. Methods with equal shifts and options share its result."""

    moves: ClassVar[Literal["gram", "mean"]] = "gram"  # what it updates: Grams and means, or means only
    needs_images: ClassVar[bool] = False  # whether it needs images besides features
    needs_gram: ClassVar[bool] = False  # whether it needs Grams even if no classifier does

    @property
    def feature_map(self) -> FeatureMap | None:
        """Feature map of the statistics that the shift requires, if any."""
        return None

    @property
    def key(self) -> Hashable:
        """Identity of the shift: type and options."""
        return type(self), self.own_options()

    def __call__(self, stats: ClassStats, features: TaskFeatures) -> ClassStats:
        """Convert `stats` of the old backbone to statistics of the new backbone."""
        raise NotImplementedError
