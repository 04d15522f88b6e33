"""DPCR's classifier: ridge-regression-based classifier reconstruction (RRCR) with category-wise normalization (CN).

He et al., "Semantic Shift Estimation via Dual-Projection and Classifier Reconstruction for Exemplar-Free
Class-Incremental Learning", ICML 2025, Eq. 11-22.

State between tasks: per class its count, mean and Gram matrix, dim (dim + 1) / 2 + dim + 1 numbers; with
`gram_storage=factors` the factor of a class of n < dim / 2 images, n dim numbers, instead of its Gram.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field
from torch import Tensor

from efcil.classifiers.base import Classifier
from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.core.ridge import normalize_columns, ridge_weight
from efcil.learners.base import ImageView


class RidgeOptions(Options):
    """Options of the reconstruction."""

    ridge: float = Field(default=200.0, ge=0)
    """Ridge of the reconstruction, gamma of Eq. 11."""
    normalize: bool = True
    """Normalize the columns of the weight (CN, Eq. 22)."""
    ridge_view: Literal["clean", "augmented"] = "clean"
    """Images of new classes in the reconstruction; what is stored is always clean."""


class Ridge(Classifier):
    """Linear classifier reconstructed from class statistics.

    >>> import torch
    >>> from efcil.core.class_stats import ClassStats
    >>> features = torch.tensor([[4.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    >>> stats = ClassStats.from_features(features, torch.tensor([0, 0, 1, 1]))
    >>> ridge = Ridge(ridge=1.0)
    >>> ridge.fit(stats)
    >>> ridge.logits(torch.tensor([[5.0, 1.0], [1.0, 5.0]])).argmax(1).tolist()
    [0, 1]
    """

    options_type = RidgeOptions
    weight: Tensor  # (dim, classes)
    means: Tensor

    @property
    def stats_view(self) -> ImageView:
        """View `ridge_view`."""
        view: ImageView = self.options.ridge_view
        return view

    def fit(self, stats: ClassStats) -> None:  # type: ignore[override]
        """Solve the ridge regression and normalize its columns."""
        weight = ridge_weight(stats, self.options.ridge)  # Eq. 18-21
        self.weight = normalize_columns(weight) if self.options.normalize else weight  # Eq. 22
        self.means = stats.mean

    def logits(self, features: Tensor) -> Tensor:
        """Return features @ weight."""
        return features.to(self.weight) @ self.weight

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weight, which with `ridge_view=augmented` cannot be recomputed from the stored statistics."""
        return {"weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Tensor], *stats: ClassStats) -> None:
        """Restore the weight."""
        self.weight, self.means = state["weight"], stats[0].mean

    @property
    def prototypes(self) -> Tensor:
        """Return the means."""
        return self.means
