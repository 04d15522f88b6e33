"""What a classifier is: how statistics become scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from efcil.components import Component
from efcil.core.class_stats import ClassStats
from efcil.core.feature_maps import FeatureMap
from efcil.features import TaskFeatures
from efcil.learners.base import ImageView, Learner

Needs = Literal["mean", "gram", "features", "learner"]


class Classifier(Component):
    """A function of class statistics: `fit(stats)`, then `logits(features)`.

    `needs` says what it is fitted to. `mean` and `gram`: the statistics of every class, so that classes can be added,
    forgotten and merged without it knowing. `features`: those of each task as it comes; what it keeps is in its state,
    and the backbone must be frozen. `learner`: the learner itself, its head or its exemplars.
    """

    needs: ClassVar[Needs] = "gram"
    supports: ClassVar[frozenset[str]] = frozenset({"update", "forget", "merge"})  # of a model that is kept
    learner_type: ClassVar[type[Any]] = Learner  # of which kind a learner must be that it can read

    @classmethod
    def reads(cls, learner: type[Learner]) -> bool:
        """Whether it can read a learner of this kind."""
        return issubclass(learner, cls.learner_type) and (learner.same_features or cls.needs == "learner")

    @property
    def feature_maps(self) -> tuple[FeatureMap | None, ...]:
        """The maps that it wants statistics behind, one for each argument of `fit`."""
        return (None,)

    @property
    def track_needs(self) -> tuple[Needs, ...]:
        """What it needs of a class behind each of its feature maps."""
        return (self.needs,) * len(self.feature_maps)

    @property
    def stats_view(self) -> ImageView:
        """The view of the task's images in the statistics that it is fitted to; what is stored is always clean."""
        return "clean"

    def fit(self, *stats: ClassStats) -> None:
        """Solve for the statistics of all classes."""
        raise NotImplementedError

    def fit_features(self, features: TaskFeatures) -> None:
        """Learn a task from its features, where `needs` is `features`."""
        raise NotImplementedError

    def fit_learner(self, features: TaskFeatures) -> None:
        """Take what is needed from the learner of a task, where `needs` is `learner`."""
        raise NotImplementedError

    def logits(self, features: Tensor) -> Tensor:
        """Score features (n, dim) for every class seen, (n, classes)."""
        raise NotImplementedError

    def retain(self, positions: Tensor) -> None:
        """Keep the classes at these positions (k,) only, where the classifier has a state of its own."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a saved run or model needs beside the statistics."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor], *stats: ClassStats) -> None:
        """Restore the state; `stats` are those that it was fitted to."""
        if stats:
            self.fit(*stats)

    @property
    def prototypes(self) -> Tensor | None:
        """A vector (classes, dim) that stands for each class, where there is one: which classes are alike."""
        return None
