"""The learner's auxiliary head as classifier: LwF, finetuning and joint training as published.

Idea: predict with the head trained together with the backbone. State between tasks: the head; for LwF one row of `dim`
numbers per class, and a scale. Measured on CIFAR-100, A_f / A_avg, in brackets the paper's:
`foster:memory=1000/boosted` T = 10 58.07 / 71.54 (40.42 /
53.15), T = 20 52.61 / 67.20 (41.79 / 55.41); `foster:memory=1000/compressed` T = 10 56.08 / 70.23, T = 20 51.90 /
66.05; `foster:memory=500/boosted` T = 10 48.73 / 66.65 (37.15 / 49.18), T = 20 43.25 / 63.75 (30.85 / 40.06);
`foster:memory=500/compressed` T = 10 48.35 / 64.63, T = 20 43.27 / 62.49; `icarl:memory=1000/cnn` T = 10 33.79 / 56.33
(32.33 / 53.15), T = 20 27.13 / 52.07 (28.45 / 49.92); `icarl:memory=500/cnn` T = 10 25.38 / 49.19 (22.28 / 45.91), T =
20 16.51 / 42.30 (20.12 / 41.59); `lwf` T = 10 28.18 ± 1.12 / 49.00 ± 0.92, T = 20 23.98 ± 2.91 / 42.72 ± 3.18; `pass` T
= 10 43.16 / 56.56 (44.47 / 55.88), T = 20 33.88 / 47.90 (28.48 / 42.65); `podnet:memory=1000/cnn` T = 10 40.45 / 58.80
(35.57 / 55.00), T = 20 32.57 / 52.46 (28.71 / 49.09); `podnet:memory=500/cnn` T = 10 34.17 / 54.89 (31.90 / 51.17), T =
20 23.16 / 44.94 (23.44 / 42.42).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from efcil.classifiers.base import Classifier
from efcil.core.class_stats import ClassStats
from efcil.features import TaskFeatures
from efcil.learners.base import Learner
from efcil.learners.first_task import FirstTask
from efcil.learners.foster import FOSTER
from efcil.learners.pass_ import PASS, TURNS
from efcil.learners.self_freezing import SelfFreezing
from efcil.models.heads import CosineHead, GrowingHead, head_from_state


class LearnerHead(Classifier):
    """A copy of the auxiliary head after the task.

    >>> from efcil import LwF, Method, TaskStream
    >>> stream = TaskStream.from_dataset("digits", tasks=5)
    >>> Method(learner=LwF(epochs=1), classifier=LearnerHead).learn(stream[0]).evaluate(stream).shape
    (1,)
    """

    needs = "learner"
    supports = frozenset({"forget"})
    head: GrowingHead

    @classmethod
    def reads(cls, learner: type[Learner]) -> bool:
        """Return whether the head has one row per class on the evaluated features."""
        others = issubclass(learner, PASS | FOSTER | FirstTask | SelfFreezing)  # PASS and FOSTER have their own below
        return super().reads(learner) and (cls.learner_type is not Learner or not others)

    def head_of(self, learner: Learner) -> GrowingHead:
        """Return the head used for predictions."""
        return learner.head

    def fit_learner(self, features: TaskFeatures) -> None:
        """Copy the head."""
        self.head = copy.deepcopy(self.head_of(features.learner))

    def retain(self, positions: Tensor) -> None:
        """Keep only the rows of some classes."""
        assert isinstance(self.head, CosineHead)
        self.head.select_classes(positions)

    @torch.no_grad()
    def logits(self, features: Tensor) -> Tensor:
        """Return the head's logits."""
        logits: Tensor = self.head(features)
        return logits

    def state_dict(self) -> dict[str, Tensor]:
        """Return the head's tensors."""
        return dict(self.head.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor], *stats: ClassStats) -> None:
        """Restore the head."""
        self.head = head_from_state(state)

    @property
    def prototypes(self) -> Tensor | None:
        """Return the rows of the head."""
        weight: Tensor | None = getattr(self.head, "weight", None)
        return weight


class UnrotatedHead(LearnerHead):
    """PASS: rows of the trained head for unrotated images."""

    supports: ClassVar[frozenset[str]] = frozenset()
    learner_type = PASS

    def logits(self, features: Tensor) -> Tensor:
        """Return one logit per class."""
        return super().logits(features)[:, ::TURNS]


class CompressedHead(LearnerHead):
    """FOSTER: head of the student on its features, the trailing columns."""

    supports: ClassVar[frozenset[str]] = frozenset()
    learner_type = FOSTER

    @property
    def dim(self) -> int:
        """Number of input features of the head."""
        return self.state_dict()["weight"].shape[1]

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of features (n, 3 dim), or (n, dim) after the first task."""
        return super().logits(features[:, -self.dim :])


class BoostedHead(CompressedHead):
    """FOSTER: head of the boosted model on old and new features, the leading columns."""

    def head_of(self, learner: Learner) -> GrowingHead:
        """Return the boosted model's head."""
        assert isinstance(learner, FOSTER)
        return learner.boosted_head

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of features (n, 3 dim), or (n, dim) after the first task."""
        return LearnerHead.logits(self, features[:, : self.dim])
