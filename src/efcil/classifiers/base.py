"""Base class of classifiers, which compute scores from class statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from efcil.components import Component
from efcil.core.class_stats import ClassStats
from efcil.core.feature_maps import FeatureMap
from efcil.features import TaskFeatures
from efcil.learners.base import ImageView, Learner

Needs = Literal["mean", "shared", "gram", "features", "learner"]


class Classifier(Component):
    """Classifier on class statistics: `fit(stats)`, then `logits(features)`.

    `needs` is what it is fitted to. `mean` and `gram`: statistics of every class; adding, forgetting and merging
    classes only changes these. `shared`: the same, where one scatter for all classes is enough. `features`: the
    features of each task in turn, with a frozen backbone and its own state. `learner`: the head or exemplars of the
    learner.
    """

    needs: ClassVar[Needs] = "gram"
    supports: ClassVar[frozenset[str]] = frozenset({"update", "forget", "merge"})  # operations of a saved model
    pretrained_defaults: ClassVar[Mapping[str, Any]] = {}  # of options, for features of pretrained weights
    learner_type: ClassVar[type[Any]] = Learner  # required base class of the learner

    @classmethod
    def reads(cls, learner: type[Learner]) -> bool:
        """Return whether it supports a learner of this type."""
        return issubclass(learner, cls.learner_type) and (learner.same_features or cls.needs == "learner")

    @property
    def feature_maps(self) -> tuple[FeatureMap | None, ...]:
        """Feature maps of the statistics, one for each argument of `fit`."""
        return (None,)

    @property
    def track_needs(self) -> tuple[Needs, ...]:
        """Required statistics for each feature map."""
        return (self.needs,) * len(self.feature_maps)

    @property
    def stats_view(self) -> ImageView:
        """View of the task's images for the statistics it is fitted to; stored statistics are always clean."""
        return "clean"

    def fit(self, *stats: ClassStats) -> None:
        """Fit to the statistics of all classes."""
        raise NotImplementedError

    def fit_features(self, features: TaskFeatures) -> None:
        """Fit to the features of a task, if `needs` is `features`."""
        raise NotImplementedError

    def fit_learner(self, features: TaskFeatures) -> None:
        """Fit to the learner of a task, if `needs` is `learner`."""
        raise NotImplementedError

    def logits(self, features: Tensor) -> Tensor:
        """Return scores (n, classes) of features (n, dim) for all classes so far."""
        raise NotImplementedError

    def mapped_logits(self, features: Tensor) -> Tensor:
        """Score features (n, dim) that are behind its first feature map already, as draws from its statistics are."""
        return self.logits(features)

    def retain(self, positions: Tensor) -> None:
        """Keep only the classes at these positions (k,), if the classifier has its own state."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state to save besides the statistics."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor], *stats: ClassStats) -> None:
        """Restore the state; `stats` are the arguments of `fit`."""
        if stats:
            self.fit(*stats)

    @property
    def prototypes(self) -> Tensor | None:
        """Return a vector (classes, dim) per class to compare classes by, or None."""
        return None
