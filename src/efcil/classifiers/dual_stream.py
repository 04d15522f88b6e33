"""DS-AL: dual-stream analytic learning.

Zhuang et al., "DS-AL: A Dual-Stream Analytic Learning for Exemplar-Free Class-Incremental Learning", AAAI 2024.

Idea: ACIL's linear map underfits. A second ridge regression on the same random expansion, with tanh instead of ReLU,
fits the residue of the first for the classes of the task; residues of earlier classes are set to zero (previous label
cleansing). Scores are main + compensation * second.

State between tasks: twice ACIL's, two Grams of buffer (buffer + 1) / 2 numbers (800 MB on disk, 1.6 GB in memory at
10,000; while solving 0.8 GB more, 1.6 GB on CUDA), two X'Y and two classifiers of `buffer` numbers per class.

The residue is computed after the main stream has been fitted to the whole task, as in the paper's algorithm; the
released code computes it per batch (4,096 images), so its result depends on the batch size.

Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: `ds-al` T = 10 41.26 ± 1.22 / 55.17 ± 1.25 (36.83 / 51.47),
T = 20 34.90 ± 1.16 / 46.87 ± 2.28 (28.90 / 40.37).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from efcil.classifiers.random_features import ExpandedClassifier, RandomFeatureRidgeOptions
from efcil.core.class_stats import ClassStats
from efcil.core.recursive_ridge import ExpandedRidge
from efcil.features import TaskFeatures
from efcil.training.memory import memory_guard


class DualStreamRidgeOptions(RandomFeatureRidgeOptions):
    """Options of DS-AL: ACIL's for both streams, and the weight of the second."""

    compensation: float = Field(default=1.0, ge=0)
    """Weight of the second stream, C of Eq. 19."""


class DualStreamRidge(ExpandedClassifier):
    """Two ridge regressions, on ReLU and tanh of one expansion.

    >>> import torch
    >>> from efcil.features import TaskFeatures
    >>> features = torch.tensor([[4.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    >>> task = TaskFeatures.from_saved(0, 0, {"new": features, "labels": torch.tensor([0, 0, 1, 1])}, (2,))
    >>> ds_al = DualStreamRidge(buffer=100, compensation=1.5)
    >>> ds_al.fit_features(task)
    >>> ds_al.logits(features).argmax(1).tolist()
    [0, 0, 1, 1]
    """

    options_type = DualStreamRidgeOptions
    main: ExpandedRidge
    second: ExpandedRidge

    def begin(self, expansion: Tensor) -> None:
        """Start both streams."""
        self.main = ExpandedRidge(expansion, torch.relu_, self.options.ridge)
        self.second = ExpandedRidge(expansion, torch.tanh_, self.options.ridge)

    def fit_features(self, features: TaskFeatures) -> None:
        """Fit the main stream, then the second to its residue."""
        with memory_guard(f"solving two ridge regressions {self.options.buffer} wide, see --set buffer=..."):
            x, targets, first = self.prepare(features)
            self.main.learn(x, targets, first)  # Eq. 11, 12
            answer = self.main.scores(x, first)[:, : targets.shape[1]]
            residue = targets - answer  # Eq. 13; of the task's classes only: cleansed, Eq. 15
            self.second.learn(x, residue, first)  # Eq. 17, 18

    def logits(self, features: Tensor) -> Tensor:
        """Return the sum of both streams (Eq. 19)."""
        return self.main.scores(features) + self.options.compensation * self.second.scores(features)

    def state_dict(self) -> dict[str, Tensor]:
        """Return both streams and the seed of the expansion."""
        assert self.place is not None
        streams = {"main": self.main.state(), "second": self.second.state()}
        return {"expansion": self.place} | {
            f"{name}.{k}": v for name, stream in streams.items() for k, v in stream.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor], *stats: ClassStats) -> None:
        """Restore both streams."""
        self.begin(self.expansion(state["expansion"].cpu(), state["main.weight"].device))
        for name, stream in (("main.", self.main), ("second.", self.second)):
            stream.load_state({k.removeprefix(name): v for k, v in state.items() if k.startswith(name)})
