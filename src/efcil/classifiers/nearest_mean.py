"""Nearest class mean with cosine similarity (NCM), for any shift.

With an LwF backbone and no shift it is LwF-NCM. The row LwF in Table 1 of the paper matches this classifier, not LwF's
own head. With dual projection it is DP-NCM of Table 5.

State between tasks: mean and count of each class, dim + 1 numbers; for DP-NCM also the Gram, which its shift needs.
"""

from __future__ import annotations

from torch import Tensor

from efcil.classifiers.base import Classifier
from efcil.core.class_stats import ClassStats
from efcil.core.nearest_mean import cosine_scores


class NearestMean(Classifier):
    """Cosine similarity to class means.

    >>> import torch
    >>> from efcil.core.class_stats import ClassStats
    >>> features = torch.tensor([[4.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    >>> stats = ClassStats.from_features(features, torch.tensor([0, 0, 1, 1]))
    >>> nearest = NearestMean()
    >>> nearest.fit(stats)
    >>> nearest.logits(torch.tensor([[5.0, 1.0], [1.0, 5.0]])).argmax(1).tolist()
    [0, 1]
    """

    needs = "mean"
    means: Tensor  # (classes, dim)

    def fit(self, stats: ClassStats) -> None:  # type: ignore[override]
        """Store the means."""
        self.means = stats.mean

    def logits(self, features: Tensor) -> Tensor:
        """Return cosine similarities to the means."""
        return cosine_scores(features, self.means)

    @property
    def prototypes(self) -> Tensor:
        """Return the means."""
        return self.means
