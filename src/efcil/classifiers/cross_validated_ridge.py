"""Ridge regression on one-hot labels whose strength is found by generalized cross-validation, from statistics alone.

Golub, Heath and Wahba, "Generalized Cross-Validation as a Method for Choosing a Good Ridge Parameter", Technometrics
1979. RanPAC: McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual Learning", NeurIPS
2023.

Idea: with a frozen backbone the sums of a regression only grow, and the best strength changes with them. It is chosen
again after each task by a score that needs the eigenvalues of X'X, X'Y and |Y|^2 (`efcil.core.gcv`), but no image.
RanPAC applies the same regression to a random projection with a ReLU, which adds nonlinear features.

Features and labels are centered. Classes are weighted equally, whatever their number of images, and share one
covariance, so small classes are not under-predicted (for classes of equal size this changes nothing).

State between tasks: per class its count and mean; for all classes together one scatter, dim (dim + 1) / 2 numbers: for
RanPAC's expansion 2.0 million (16 MB) at 2,000 and 50 million (400 MB) at 10,000. Learning one class at a time, in any
order, equals learning all at once. The projection is a function of `projection_seed`; models with the same seed merge.

Difference from RanPAC's code: there the strength is chosen on a fifth of a task's images, from powers of ten.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from efcil.classifiers.base import Classifier
from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.core.feature_maps import FeatureMap, RandomReLU, UnitLength
from efcil.core.gcv import balanced_ridge
from efcil.randomness import RngStream, derive_seed


class CrossValidatedRidge(Classifier):
    """Ridge regression on L2-normalized features, with the strength chosen by generalized cross-validation.

    >>> import torch
    >>> from efcil.core.class_stats import ClassStats
    >>> features = torch.tensor([[4.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    >>> ridge = CrossValidatedRidge()
    >>> ridge.fit(ClassStats.from_features(ridge.feature_maps[0](features), torch.tensor([0, 0, 1, 1])))
    >>> ridge.logits(torch.tensor([[5.0, 1.0], [1.0, 5.0]])).argmax(1).tolist()
    [0, 1]
    """

    needs = "shared"
    weight: Tensor  # (dim, classes)
    bias: Tensor  # (classes,)
    means: Tensor
    ridge: float  # the chosen strength

    @property
    def feature_maps(self) -> tuple[FeatureMap, ...]:
        """L2 normalization, so that the contrast of an image does not matter."""
        return (UnitLength(),)

    def fit(self, stats: ClassStats) -> None:  # type: ignore[override]
        """Choose the strength and solve the regression."""
        self.weight, self.bias, self.ridge = balanced_ridge(stats)
        self.means = stats.mean

    def logits(self, features: Tensor) -> Tensor:
        """Return features @ weight + bias of the mapped features."""
        return self.mapped_logits(self.feature_maps[0](features, ()))

    def mapped_logits(self, features: Tensor) -> Tensor:
        """Return the logits of features that are already mapped."""
        return features.to(self.weight) @ self.weight + self.bias

    @property
    def prototypes(self) -> Tensor:
        """Return the means."""
        return self.means


class RandomProjectionOptions(Options):
    """Options of RanPAC."""

    expansion: int = Field(default=2_000, ge=1)
    """Width of the random projection; 10,000 in the paper."""
    projection_seed: int = Field(default=0, ge=0)
    """Seed of the projection; only models with the same seed can be merged."""


class RandomProjection(CrossValidatedRidge):
    """RanPAC: the cross-validated ridge on a random projection with a ReLU.

    >>> import torch
    >>> from efcil.core.class_stats import ClassStats
    >>> features = torch.tensor([[4.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    >>> ranpac = RandomProjection(expansion=100)
    >>> ranpac.fit(ClassStats.from_features(ranpac.feature_maps[0](features), torch.tensor([0, 0, 1, 1])))
    >>> ranpac.logits(torch.tensor([[5.0, 1.0], [1.0, 5.0]])).argmax(1).tolist()
    [0, 1]
    """

    options_type = RandomProjectionOptions

    @property
    def feature_maps(self) -> tuple[FeatureMap, ...]:
        """Return the random projection."""
        seed = derive_seed(RngStream.EXPANSION, self.options.projection_seed)
        return (RandomReLU(self.options.expansion, seed),)
