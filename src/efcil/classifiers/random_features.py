"""ACIL: analytic class-incremental learning.

Zhuang et al., "ACIL: Analytic Class-Incremental Learning with Absolute Memorization and Privacy Protection",
NeurIPS 2022.

Idea: the backbone is frozen after task 1. Its features are expanded by a fixed random matrix and a ReLU, and a ridge
regression onto one-hot labels is solved after each task from sums over all images so far. The classifier equals that of
joint training (Eq. 9 and 10 of the paper, with sums: core/recursive_ridge.py).

State between tasks: the Gram of the expanded features, buffer (buffer + 1) / 2 numbers (400 MB on disk, 800 MB in
memory at 10,000), and per class `buffer` numbers of X'Y and `buffer` weights. The random matrix is a function of the
seed and is not stored.

Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: `acil` T = 10 40.58 ± 1.33 / 54.68 ± 1.37 (35.53 / 50.53),
T = 20 33.56 ± 1.27 / 45.94 ± 2.28 (27.22 / 39.58).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import one_hot

from efcil.classifiers.base import Classifier
from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.core.linear_algebra import DTYPE
from efcil.core.recursive_ridge import ExpandedRidge, expansion_matrix
from efcil.features import TaskFeatures
from efcil.randomness import RngStream, generator
from efcil.training.memory import memory_guard


class RandomFeatureRidgeOptions(Options):
    """Options of ACIL."""

    buffer: int = Field(default=10_000, ge=1)
    """Width of the random expansion."""
    ridge: float = Field(default=0.1, gt=0)
    """Ridge of the classifier, gamma."""


class ExpandedClassifier(Classifier):
    """Base class of ACIL and DS-AL: a random expansion drawn from the seed, and one-hot targets."""

    needs = "features"
    supports = frozenset({"update"})
    place: Tensor | None = None  # seed and dim of the expansion, (2,) int64

    def expansion(self, place: Tensor, device: torch.device) -> Tensor:
        """Draw the expansion matrix (dim, buffer)."""
        self.place = place
        seed, dim = place.tolist()
        return expansion_matrix(dim, self.options.buffer, generator("cpu", RngStream.EXPANSION, seed)).to(device)

    def begin(self, expansion: Tensor) -> None:
        """Initialize the regressions on an expansion."""
        raise NotImplementedError

    def prepare(self, features: TaskFeatures) -> tuple[Tensor, Tensor, int]:
        """Return features, one-hot labels (n, k) over the classes of a task, and the position of its first class."""
        x = features.new()
        if self.place is None:
            self.begin(self.expansion(torch.tensor([features.seed, x.shape[1]]), x.device))
        first = int(features.labels.min())
        return x, one_hot(features.labels - first).to(DTYPE), first


class RandomFeatureRidge(ExpandedClassifier):
    """Ridge regression on the ReLU of the expansion.

    >>> import torch
    >>> from efcil.features import TaskFeatures
    >>> features = torch.tensor([[4.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    >>> task = TaskFeatures.from_saved(0, 0, {"new": features, "labels": torch.tensor([0, 0, 1, 1])}, (2,))
    >>> acil = RandomFeatureRidge(buffer=100)
    >>> acil.fit_features(task)
    >>> acil.logits(features).argmax(1).tolist()
    [0, 0, 1, 1]
    """

    options_type = RandomFeatureRidgeOptions
    stream: ExpandedRidge

    def begin(self, expansion: Tensor) -> None:
        """Initialize the regression."""
        self.stream = ExpandedRidge(expansion, torch.relu_, self.options.ridge)

    def fit_features(self, features: TaskFeatures) -> None:
        """Add the task's images to the sums and solve."""
        with memory_guard(f"solving a ridge regression {self.options.buffer} wide, see --set buffer=..."):
            x, targets, first = self.prepare(features)
            self.stream.learn(x, targets, first)

    def logits(self, features: Tensor) -> Tensor:
        """Return the predictions of the regression."""
        return self.stream.scores(features)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums, the weights and the seed of the expansion."""
        assert self.place is not None
        return {"expansion": self.place, **self.stream.state()}

    def load_state_dict(self, state: Mapping[str, Tensor], *stats: ClassStats) -> None:
        """Restore the regression."""
        self.begin(self.expansion(state["expansion"].cpu(), state["weight"].device))
        self.stream.load_state(state)
