"""Nearest class mean on the LwF backbone: without a shift (LwF-NCM), and with the dual projection (DP-NCM).

LwF-NCM is what the paper's Table 1 calls LwF: its numbers match this classifier, not LwF's own head.
DP-NCM is the paper's Table 5 (He et al., ICML 2025): DPCR's moved means, read by cosine instead of ridge.

What survives a task: LwF-NCM the mean of each class, dim numbers; DP-NCM mean and Gram, as DPCR.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from efcil.config import Options
from efcil.features import TaskFeatures
from efcil.heads.ncm import cosine_scores
from efcil.methods.base import State
from efcil.shift.dual_projection import DualProjectionOptions, dual_projection
from efcil.stats import ClassStats


class LwFNCM:
    """Means stay where they were when their class was learned."""

    def __init__(self, options: Options):
        self.means: Tensor | None = None  # (classes, dim)

    def learn(self, task: TaskFeatures) -> None:
        """Add the means of the new classes."""
        new = task.stats().mean
        self.means = new if self.means is None else torch.cat([self.means, new])

    def scores(self, features: Tensor) -> Tensor:
        """Return the cosine to each mean."""
        assert self.means is not None
        return cosine_scores(features, self.means)

    def state(self) -> dict[str, Tensor]:
        """Return the means."""
        assert self.means is not None
        return {"means": self.means}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take them up."""
        self.means = state["means"]


class DPNCM:
    """Means follow the dual projection."""

    def __init__(self, options: DualProjectionOptions):
        self.options = options
        self.stats: ClassStats | None = None

    def learn(self, task: TaskFeatures) -> None:
        """Move the old classes, add the new ones."""
        self.stats = task.joined(dual_projection(self.stats, task, self.options))

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
