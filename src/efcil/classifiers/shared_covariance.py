"""SLDA: linear discriminant analysis with one covariance for all classes, kept up to date as images come.

Hayes and Kanan, "Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis", CVPR Workshops 2020.

Idea: a nearest mean that knows in which directions images of a class differ anyway. With few images the covariance is
drawn towards a multiple of the identity, and the classifier towards the nearest mean; how far, OAS says from the
covariance itself and the number of images behind it (`efcil.core.discriminant`). Features are of length one, to a
power that makes them less skewed; power and shrinkage were chosen on training images of photo sets
(docs/classifiers.md).

State between tasks: per class its count and mean; one scatter for all classes, dim (dim + 1) / 2 numbers, 6.5 MB at
1,280 dimensions. One class at a time, in any order, is all at once.

Differences from the authors' code: there the shrinkage is 1e-4 whatever the data, and the covariance moves with a
running mean; here it is the exact one within classes.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from efcil.classifiers.base import Classifier
from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.core.discriminant import SharedMetric
from efcil.core.feature_maps import FeatureMap, UnitPower


class SharedCovarianceOptions(Options):
    """Options of the discriminant analysis."""

    shrinkage: float | None = Field(default=None, ge=0, le=1)
    """Share of the identity in the covariance; None chooses it from the statistics."""
    feature_power: float = Field(default=0.7, gt=0, le=1)
    """Power that features of length one are raised to; 1 leaves them unchanged."""


class SharedCovariance(Classifier):
    """Log-densities of Gaussians with one covariance: features @ weight + bias."""

    needs = "shared"
    options_type = SharedCovarianceOptions
    weight: Tensor  # (dim, classes)
    bias: Tensor  # (classes,)
    means: Tensor

    @property
    def feature_maps(self) -> tuple[FeatureMap, ...]:
        """Powers of features of length one."""
        return (UnitPower(self.options.feature_power),)

    def fit(self, stats: ClassStats) -> None:  # type: ignore[override]
        """Shrink the covariance, and solve."""
        self.metric = SharedMetric.of(stats, self.options.shrinkage)
        self.weight, self.bias = self.metric.scores_of(stats)
        self.stats, self.means = stats, stats.mean

    def logits(self, features: Tensor) -> Tensor:
        """Return the log-density of each class, but for what is the same for all."""
        return self.mapped_logits(self.feature_maps[0](features, ()))

    def mapped_logits(self, features: Tensor) -> Tensor:
        """Do the same for features behind the map."""
        return features.to(self.weight) @ self.weight + self.bias

    def leave_one_out(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and familiarity of learned features, behind the map, as if each had not been learned."""
        return self.metric.leave_one_out(self.stats, features, labels)

    def familiarity(self, features: Tensor) -> Tensor:
        """Return how much features look like those of one of the classes; about 1 for images of the classes."""
        return self.metric.familiarity(self.stats, self.feature_maps[0](features, ()))

    @property
    def prototypes(self) -> Tensor:
        """The means."""
        return self.means
