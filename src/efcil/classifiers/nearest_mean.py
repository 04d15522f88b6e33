"""Nearest class mean by cosine (the field's NCM or NME), on whatever shift moves the means.

Without a shift on the LwF backbone it is LwF-NCM, which the paper's Table 1 calls LwF: its numbers match this
classifier, not LwF's own head. With the dual projection it is DP-NCM of the paper's Table 5.

State between tasks: mean and count of each class, dim + 1 numbers; DP-NCM's Gram as well, which its shift needs.
"""

from __future__ import annotations

from torch import Tensor

from efcil.classifiers.base import Classifier
from efcil.core.class_stats import ClassStats
from efcil.core.nearest_mean import cosine_scores


class NearestMean(Classifier):
    """The class whose mean points most like the feature."""

    needs = "mean"
    means: Tensor  # (classes, dim)

    def fit(self, stats: ClassStats) -> None:  # type: ignore[override]
        """Take the means."""
        self.means = stats.mean

    def logits(self, features: Tensor) -> Tensor:
        """Return the cosine to each mean."""
        return cosine_scores(features, self.means)

    @property
    def prototypes(self) -> Tensor:
        """The means."""
        return self.means
