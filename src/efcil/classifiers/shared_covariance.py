"""SLDA: streaming linear discriminant analysis, with one covariance for all classes.

Hayes and Kanan, "Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis", CVPR Workshops 2020.

Idea: a nearest-mean classifier that discounts the directions in which images of one class differ. With few images the
covariance is shrunk towards a multiple of the identity, and so the classifier towards the nearest mean; OAS sets the
amount from the covariance and the number of images (`efcil.core.discriminant`). Features are L2-normalized and raised
to a power that makes them less skewed; power and shrinkage were chosen on training images of photo sets
(docs/classifiers.md).

State between tasks: per class its count and mean; one scatter for all classes, dim (dim + 1) / 2 numbers, 6.5 MB at
1,280 dimensions. Learning one class at a time, in any order, equals learning all at once.

Differences from the authors' code: there the shrinkage is 1e-4 for all data, and the covariance follows a running
mean; here it is the exact within-class covariance.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from efcil.classifiers.base import Classifier
from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.core.discriminant import NoveltyScores, SharedMetric
from efcil.core.feature_maps import FeatureMap, UnitPower


class SharedCovarianceOptions(Options):
    """Options of the discriminant analysis."""

    shrinkage: float | None = Field(default=None, ge=0, le=1)
    """Weight of the identity in the covariance; None chooses it from the statistics."""
    feature_power: float = Field(default=0.7, gt=0, le=1)
    """Power of the L2-normalized features; 1 leaves them unchanged."""


class SharedCovariance(Classifier):
    """Log-densities of Gaussians that share one covariance: features @ weight + bias.

    >>> import torch
    >>> from efcil.core.class_stats import ClassStats
    >>> features = torch.tensor([[4.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    >>> slda = SharedCovariance()
    >>> slda.fit(ClassStats.from_features(slda.feature_maps[0](features), torch.tensor([0, 0, 1, 1])))
    >>> slda.logits(torch.tensor([[5.0, 1.0], [1.0, 5.0]])).argmax(1).tolist()
    [0, 1]
    """

    needs = "shared"
    options_type = SharedCovarianceOptions
    weight: Tensor  # (dim, classes)
    bias: Tensor  # (classes,)
    means: Tensor
    _distances: Tensor | None = None  # of class means from their center, computed on first use

    @property
    def feature_maps(self) -> tuple[FeatureMap, ...]:
        """Return the power of the L2-normalized features."""
        return (UnitPower(self.options.feature_power),)

    def fit(self, stats: ClassStats) -> None:  # type: ignore[override]
        """Shrink the covariance and solve for the weight."""
        self.metric = SharedMetric.of(stats, self.options.shrinkage)
        self.weight, self.bias = self.metric.scores_of(stats)
        self.stats, self.means, self._distances = stats, stats.mean, None

    def logits(self, features: Tensor) -> Tensor:
        """Return class log-densities up to a constant."""
        return self.mapped_logits(self.feature_maps[0](features, ()))

    def mapped_logits(self, features: Tensor) -> Tensor:
        """Return the logits of features that are already mapped."""
        return features.to(self.weight) @ self.weight + self.bias

    def leave_one_out(
        self, features: Tensor, labels: Tensor, distances: Tensor | None = None
    ) -> tuple[Tensor, NoveltyScores]:
        """Return leave-one-out logits and novelty scores of mapped training features."""
        return self.metric.leave_one_out(self.stats, features, labels, distances)

    def novelty_scores(self, features: Tensor) -> NoveltyScores:
        """Return scores that tell unknown classes from known ones."""
        if self._distances is None:
            self._distances = self.metric.distances(self.stats)
        return self.metric.novelty_scores(self.stats, self.feature_maps[0](features, ()), self._distances)

    @property
    def prototypes(self) -> Tensor:
        """Return the means."""
        return self.means
