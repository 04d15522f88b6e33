"""ACIL: analytic class-incremental learning.

Zhuang et al., "ACIL: Analytic Class-Incremental Learning with Absolute Memorization and Privacy Protection",
NeurIPS 2022.

Idea: the backbone rests after the first task. Its features are widened by a fixed random matrix and a ReLU, and a ridge
regression onto one-hot labels is solved again after each task from sums over all images so far: nothing is forgotten,
the classifier equals the one that sees all tasks at once (Eq. 9 and 10 there, as sums: core/recursive_ridge.py).

What survives a task: the Gram of the expanded features, buffer (buffer + 1) / 2 numbers (400 MB on disk, 800 MB in
memory at 10,000), and per class `buffer` numbers of X'Y and as many of the classifier. The random matrix is a function
of the seed and is not kept.

Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: `acil` T = 10 40.58 ± 1.33 / 54.68 ± 1.37 (35.53 / 50.53),
T = 20 33.56 ± 1.27 / 45.94 ± 2.28 (27.22 / 39.58).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import one_hot

from efcil.config import Options
from efcil.core.linear_algebra import DTYPE
from efcil.core.recursive_ridge import ExpandedRidge, expansion_matrix
from efcil.features import TaskFeatures
from efcil.randomness import Purpose, generator
from efcil.training.memory import memory_guard


class ACILOptions(Options):
    """Options of ACIL."""

    buffer: int = Field(default=10_000, ge=1)  # width of the random expansion
    ridge: float = Field(default=0.1, gt=0)  # gamma


def random_expansion(place: Tensor, buffer: int, device: torch.device) -> Tensor:
    """Draw the expansion matrix (dim, buffer) anew from `place`: seed and dim, (2,) int64."""
    seed, dim = place.tolist()
    return expansion_matrix(dim, buffer, generator("cpu", Purpose.EXPANSION, seed)).to(device)


def expansion_place(task: TaskFeatures) -> Tensor:
    """What determines a run's expansion: the seed and the dimension of the features, (2,) int64."""
    return torch.tensor([task.learner.seed, task.new().shape[1]])


def one_hot_labels(task: TaskFeatures) -> tuple[Tensor, int]:
    """One-hot labels (n, k) over the classes of a task, and the position of the first of them."""
    first = int(task.labels.min())
    return one_hot(task.labels - first).to(DTYPE), first


class ACIL:
    """One stream: ReLU of the expansion."""

    adds = True

    def __init__(self, options: ACILOptions):
        self.options = options
        self.place: Tensor | None = None
        self.stream: ExpandedRidge | None = None

    def _begin(self, place: Tensor, device: torch.device) -> ExpandedRidge:
        o, self.place = self.options, place
        return ExpandedRidge(random_expansion(place, o.buffer, device), torch.relu_, o.ridge)

    def learn(self, task: TaskFeatures) -> None:
        """Add the task's images to the sums and solve."""
        features = task.new()
        with memory_guard(f"solving a ridge regression {self.options.buffer} wide, see --set buffer=..."):
            if self.stream is None:
                self.stream = self._begin(expansion_place(task), features.device)
            targets, first = one_hot_labels(task)
            self.stream.learn(features, targets, first)

    def scores(self, features: Tensor) -> Tensor:
        """Return the regression's answer for each class."""
        assert self.stream is not None
        return self.stream.scores(features)

    def state(self) -> dict[str, Tensor]:
        """Return the sums, the classifier, and what the expansion is drawn from."""
        assert self.stream is not None
        assert self.place is not None
        return {"expansion": self.place, **self.stream.state()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take them up."""
        self.stream = self._begin(state["expansion"].cpu(), state["weight"].device)
        self.stream.load_state(state)
