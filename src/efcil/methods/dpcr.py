"""DPCR: dual-projection shift estimation and classifier reconstruction.

He et al., "Semantic Shift Estimation via Dual-Projection and Classifier Reconstruction for Exemplar-Free
Class-Incremental Learning", ICML 2025.

Idea: the backbone keeps learning (LwF). How the old classes moved is estimated with a linear map from the old to the
new features of the current task (TSSP), projected onto each class's row space (CIP). The classifier is then solved
anew by ridge regression from all classes' moved statistics (RRCR), and each class's column is normalised (CN).

What survives a task: per class its count, mean and Gram matrix, dim (dim + 1) / 2 + dim + 1 numbers; with
`gram_storage=factors` the factor of a class of n < dim / 2 images, n dim numbers, instead of its Gram.
Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: `dpcr` T = 10 52.17 ± 0.78 / 65.01 ± 0.60 (50.24 / 63.21),
T = 20 39.64 ± 1.66 / 55.44 ± 0.86 (38.98 / 54.42).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field
from torch import Tensor

from efcil.core.class_stats import ClassStats
from efcil.core.ridge import normalize_columns, ridge_weight
from efcil.features import TaskFeatures, View
from efcil.methods.base import State
from efcil.shift.dual_projection import DualProjectionOptions, dual_projection


class DPCROptions(DualProjectionOptions):
    """Options of DPCR: the shift's, and the reconstruction's."""

    ridge: float = Field(default=200.0, ge=0)  # gamma of Eq. 11
    normalise: bool = True  # CN, Eq. 22
    ridge_view: View = "clean"  # of the new classes, in the reconstruction; what is stored is always clean


class DPCR:
    """The closed-form part of DPCR, Algorithm 1 from "Shift Estimation" on."""

    adds = True

    def __init__(self, options: DPCROptions):
        self.options = options
        self.stats: ClassStats | None = None
        self.weight: Tensor | None = None  # (dim, classes)

    def learn(self, task: TaskFeatures) -> None:
        """Move the old classes, add the new ones, solve."""
        o = self.options
        old = dual_projection(self.stats, task, o)  # Eq. 3-7, 16, 17
        self.stats = task.merge(old, memory=o.memory)  # Eq. 15
        self._solve(task.merge(old, o.ridge_view, o.memory))

    def _solve(self, stats: ClassStats) -> None:
        weight = ridge_weight(stats, self.options.ridge)  # Eq. 18-21
        self.weight = normalize_columns(weight) if self.options.normalise else weight  # Eq. 22

    def keep(self, positions: Tensor) -> None:
        """Keep some classes only, and solve again."""
        assert self.stats is not None
        self.stats = self.stats.select(positions).relabel(range(len(positions)))
        self._solve(self.stats)

    def absorb(self, other: DPCR, positions: Tensor) -> None:
        """Add the statistics of another, and solve again."""
        assert self.stats is not None
        assert other.stats is not None
        self.stats = self.stats.merge(other.stats.relabel(positions), self.options.memory)
        self._solve(self.stats)

    def scores(self, features: Tensor) -> Tensor:
        """Return features @ weight."""
        assert self.weight is not None
        return features.to(self.weight) @ self.weight

    def state(self) -> State:
        """Return the classes' statistics and the classifier."""
        assert self.stats is not None
        assert self.weight is not None
        return {"stats": self.stats, "weight": self.weight}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take them up."""
        self.stats, self.weight = state["stats"], state["weight"]
