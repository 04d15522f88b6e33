"""FeCAM: Mahalanobis distance with the shrunk correlation matrix of each class.

Goswami et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free Continual Learning",
NeurIPS 2023.

Idea: the backbone is frozen after the first task, so later classes have anisotropic feature distributions. An image is
assigned to the class with the smallest Mahalanobis distance. Features and means are transformed by Tukey's power and
L2-normalized; class covariances are shrunk and scaled to correlation matrices, which makes classes comparable.

State between tasks: per class its mean, dim numbers, and mean and Gram of the transformed features, dim (dim + 1)
/ 2 + dim numbers.

Differences from the released code, which the DPCR paper used: it predicts after the first task by cosine similarity to
the rows of the trained head, without Tukey's power; here every task uses the Mahalanobis distance, as in the paper's
text. It uses a pseudo-inverse of the shrunk matrix; here a class with an indefinite matrix gets less off-diagonal
shrinkage (`efcil.core.mahalanobis`). As in the released code, covariances are of transformed but unnormalized features
(the scale cancels in the correlation), means are computed before the transformation, and shrinkage is applied twice.
Features of vision transformers may be negative and have no Tukey power: with `power=null`, as in the released code for
them, means and covariances are of features of unit length.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from efcil.classifiers.base import Classifier, Needs
from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.core.feature_maps import FeatureMap, TukeyPower, UnitLength
from efcil.core.gram_storage import LowRankGrams
from efcil.core.mahalanobis import (
    LowRankMetric,
    correlation_factor,
    direction,
    low_rank_metric,
    mahalanobis_scores,
)


class MahalanobisOptions(Options):
    """Options of FeCAM; in brackets the names of the paper and of its code."""

    power: float | None = Field(default=0.1, gt=0)
    """Power of Tukey's transformation (paper: lambda; code: beta); null: none, but unit length (code for ViT)."""
    shrink_diagonal: float = Field(default=1.0, ge=0)
    """Shrinkage of the diagonal (paper: gamma 1; code: alpha1)."""
    shrink_off_diagonal: float = Field(default=2.0, ge=0)
    """Shrinkage off the diagonal (paper: gamma 2; code: alpha2)."""
    shrink_times: int = Field(default=2, ge=0)
    """How often shrinkage is applied: the paper's formula once, its code twice."""


class Mahalanobis(Classifier):
    """Mahalanobis classifier with a center and a correlation matrix per class.

    >>> import torch
    >>> from efcil.core.class_stats import ClassStats
    >>> features = torch.tensor([[4.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    >>> stats = ClassStats.from_features(features, torch.tensor([0, 0, 1, 1]))
    >>> fecam = Mahalanobis()
    >>> tukey = fecam.feature_maps[1]
    >>> powers = ClassStats.from_features(tukey(features, (2,)), torch.tensor([0, 0, 1, 1]))
    >>> fecam.fit(stats, powers)
    >>> fecam.logits(torch.tensor([[5.0, 1.0], [1.0, 5.0]])).argmax(1).tolist()
    [0, 1]
    """

    options_type = MahalanobisOptions
    pretrained_defaults: ClassVar = {"power": 0.5, "shrink_off_diagonal": 1.0, "shrink_times": 1}  # docs/classifiers.md
    centers: Tensor  # (classes, dim), L2-normalized
    factors: list[Tensor | LowRankMetric]  # of each class, (dim, dim), lower triangular, or of low rank

    @property
    def feature_maps(self) -> tuple[FeatureMap | None, ...]:
        """Identity for the means, Tukey's power for the covariances; without a power unit length for both."""
        power = self.options.power
        return (UnitLength(), UnitLength()) if power is None else (None, TukeyPower(power))

    @property
    def track_needs(self) -> tuple[Needs, ...]:
        """Means of features, Grams of transformed features."""
        return "mean", "gram"

    def fit(self, stats: ClassStats, spread: ClassStats) -> None:  # type: ignore[override]
        """Transform the means and factor the shrunk correlations."""
        o = self.options
        self.centers = stats.mean if o.power is None else direction(stats.mean, o.power)
        self.factors = [self._factor(spread, place) for place in range(len(spread))]

    def _factor(self, spread: ClassStats, place: int) -> Tensor | LowRankMetric:
        """Return the factor of a class's correlation, of low rank where its Gram is stored as a factor."""
        o = self.options
        own, how = spread.select(spread.classes[place : place + 1]), (o.shrink_diagonal, o.shrink_off_diagonal)
        (part,) = own.parts
        if isinstance(part, LowRankGrams):
            metric = low_rank_metric(part.rows, own.mean[0], int(own.count), *how, o.shrink_times)
            if metric is not None:
                return metric
        return correlation_factor(own.covariance(), own.gram, *how, o.shrink_times)[0]

    def logits(self, features: Tensor) -> Tensor:
        """Return negative squared distances."""
        power = self.options.power
        points = UnitLength()(features) if power is None else direction(features, power)
        return mahalanobis_scores(points, self.centers, self.factors)

    @property
    def prototypes(self) -> Tensor:
        """Return the centers."""
        return self.centers
