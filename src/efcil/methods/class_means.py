"""Nearest class mean on the LwF backbone: without a shift (LwF-NCM), and with the dual projection (DP-NCM).

LwF-NCM is what the paper's Table 1 calls LwF: its numbers match this classifier, not LwF's own head.
DP-NCM is the paper's Table 5 (He et al., ICML 2025): DPCR's moved means, read by cosine instead of ridge.

What survives a task: LwF-NCM mean and count of each class, dim + 1 numbers; DP-NCM mean and Gram, as DPCR.
Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: `dp-ncm` T = 10 49.56 ± 0.87 / 63.94 ± 0.60 (49.19 /
63.47), T = 20 37.11 ± 1.16 / 53.53 ± 1.15 (37.64 / 53.86); `lwf-ncm` T = 10 44.05 ± 0.35 / 58.94 ± 0.98 (42.60 /
58.51), T = 20 35.79 ± 0.70 / 51.23 ± 1.78 (36.34 / 51.52).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.core.gram_storage import LowRankGrams
from efcil.core.nearest_mean import cosine_scores
from efcil.features import TaskFeatures
from efcil.methods.base import State
from efcil.shift.dual_projection import DualProjectionOptions, dual_projection


class LwFNCM:
    """Means stay where they were when their class was learned."""

    adds = True

    def __init__(self, options: Options):
        self.means: Tensor | None = None  # (classes, dim)
        self.count: Tensor | None = None  # (classes,) images behind each mean

    def learn(self, task: TaskFeatures) -> None:
        """Add the means of the new classes."""
        self._add(task.stats())

    def _add(self, new: ClassStats) -> None:
        """Add the means of new classes; the mean of a class that comes again becomes that of all its images."""
        if self.means is None or self.count is None:
            self.means, self.count = new.mean, new.count
            return
        known = new.classes < len(self.means)
        if bool(known.any()):
            again, means, count = new.classes[known], self.means.clone(), self.count.clone()
            count[again] += new.count[known]
            means[again] += (new.count[known] / count[again])[:, None] * (new.mean[known] - means[again])
            self.means, self.count = means, count
        self.means = torch.cat([self.means, new.mean[~known].to(self.means)])
        self.count = torch.cat([self.count, new.count[~known]])

    def keep(self, positions: Tensor) -> None:
        """Keep some classes only."""
        assert self.means is not None
        assert self.count is not None
        self.means, self.count = self.means[positions], self.count[positions]

    def absorb(self, other: LwFNCM, positions: Tensor) -> None:
        """Add the means of another."""
        assert other.means is not None
        assert other.count is not None
        order = positions.argsort()
        none = LowRankGrams.zero(len(order), other.means)  # no Grams are kept
        self._add(ClassStats(positions[order], other.count[order], other.means[order], none))

    def scores(self, features: Tensor) -> Tensor:
        """Return the cosine to each mean."""
        assert self.means is not None
        return cosine_scores(features, self.means)

    def state(self) -> dict[str, Tensor]:
        """Return the means and how many images are behind each."""
        assert self.means is not None
        assert self.count is not None
        return {"means": self.means, "count": self.count}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take them up; runs of earlier versions did not count."""
        self.means = state["means"]
        self.count = state.get("count", torch.ones(len(self.means), dtype=torch.int64, device=self.means.device))


class DPNCM:
    """Means follow the dual projection."""

    adds = True

    def __init__(self, options: DualProjectionOptions):
        self.options = options
        self.stats: ClassStats | None = None

    def learn(self, task: TaskFeatures) -> None:
        """Move the old classes, add the new ones."""
        self.stats = task.merge(dual_projection(self.stats, task, self.options), memory=self.options.memory)

    def keep(self, positions: Tensor) -> None:
        """Keep some classes only."""
        assert self.stats is not None
        self.stats = self.stats.select(positions).relabel(range(len(positions)))

    def absorb(self, other: DPNCM, positions: Tensor) -> None:
        """Add the statistics of another."""
        assert self.stats is not None
        assert other.stats is not None
        self.stats = self.stats.merge(other.stats.relabel(positions), self.options.memory)

    def scores(self, features: Tensor) -> Tensor:
        """Return the cosine to each moved mean."""
        assert self.stats is not None
        return cosine_scores(features, self.stats.mean)

    def state(self) -> State:
        """Return the classes' statistics."""
        assert self.stats is not None
        return {"stats": self.stats}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take them up."""
        self.stats = state["stats"]
