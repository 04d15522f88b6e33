"""Ridge regression on one-hot labels whose strength is found by generalized cross-validation, from statistics alone.

Golub, Heath and Wahba, "Generalized Cross-Validation as a Method for Choosing a Good Ridge Parameter", Technometrics
1979. RanPAC: McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual Learning", NeurIPS
2023.

Idea: the backbone is frozen, so the sums of a regression only grow, and with them the strength that is right. It is
chosen anew after each task by a score that needs the eigenvalues of X'X, X'Y and |Y|^2 (`efcil.core.gcv`), no image.
RanPAC does the same behind a random projection and a ReLU, which makes room for what is not linear in the features.

Features and labels are centered. Classes of few images are not drowned: every class counts as one of equally many, with
the covariance that all share (for classes of equal size this changes nothing).

State between tasks: per class its count and mean; for all classes together one scatter, dim (dim + 1) / 2 numbers, of
RanPAC's expansion 2.0 million (16 MB) at 2,000 and 50 million (400 MB) at 10,000. One class at a time, in any order,
is all at once. The projection is a function of `projection_seed`, so models with the same one merge.

Differences from RanPAC's code: the strength is chosen there on a fifth of a task's images, from powers of ten.
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
    """features @ weight + bias, of features of length one."""

    needs = "shared"
    weight: Tensor  # (dim, classes)
    bias: Tensor  # (classes,)
    means: Tensor
    ridge: float  # that was chosen

    @property
    def feature_maps(self) -> tuple[FeatureMap, ...]:
        """Features of length one: an image of strong contrast counts like any other."""
        return (UnitLength(),)

    def fit(self, stats: ClassStats) -> None:  # type: ignore[override]
        """Choose the strength, and solve."""
        self.weight, self.bias, self.ridge = balanced_ridge(stats)
        self.means = stats.mean

    def logits(self, features: Tensor) -> Tensor:
        """Return the regression's answer for each class."""
        return self.mapped_logits(self.feature_maps[0](features, ()))

    def mapped_logits(self, features: Tensor) -> Tensor:
        """Do the same for features behind the map."""
        return features.to(self.weight) @ self.weight + self.bias

    @property
    def prototypes(self) -> Tensor:
        """The means."""
        return self.means


class RandomProjectionOptions(Options):
    """Options of RanPAC."""

    expansion: int = Field(default=2_000, ge=1)
    """Width of the random projection; 10,000 in the paper."""
    projection_seed: int = Field(default=0, ge=0)
    """Seed of the projection; only models with the same one can be merged."""


class RandomProjection(CrossValidatedRidge):
    """The same behind a random projection and a ReLU: RanPAC."""

    options_type = RandomProjectionOptions

    @property
    def feature_maps(self) -> tuple[FeatureMap, ...]:
        """The projection."""
        seed = derive_seed(RngStream.EXPANSION, self.options.projection_seed)
        return (RandomReLU(self.options.expansion, seed),)
