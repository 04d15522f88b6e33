"""FeCAM: the Mahalanobis distance to each class, in the metric of its own shrunk correlation matrix.

Goswami et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free Continual Learning",
NeurIPS 2023.

Idea: the backbone is frozen after the first task, so classes learned later spread unevenly around their means. An image
goes to the class whose mean is nearest in the Mahalanobis distance of that class: features and means to a power (Tukey)
and to length one, the class's covariance shrunk and scaled to a correlation matrix, so that classes can be compared.

State between tasks: per class its mean, dim numbers, and mean and Gram of the transformed features, dim (dim + 1)
/ 2 + dim numbers.

Differences from the authors' code, which the DPCR paper ran: there the first task alone is answered by the cosine to
the rows of the trained head, without Tukey; here every task by the Mahalanobis distance, as in the paper's text. It
takes a pseudo-inverse of whatever the shrinkage leaves; here a class whose matrix is not positive definite is shrunk
less off the diagonal (`efcil.core.mahalanobis`). Taken over from it: covariances of the powers of features that were
not normalized (their scale cancels in the correlation); means before the power; the shrinkage applied twice.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from efcil.classifiers.base import Classifier, Needs
from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.core.feature_maps import FeatureMap, TukeyPower
from efcil.core.mahalanobis import correlation_factor, direction, mahalanobis_scores


class MahalanobisOptions(Options):
    """Options of FeCAM; in brackets the names of the paper and of its code."""

    power: float = Field(default=0.1, gt=0)  # of Tukey's transformation (lambda, beta)
    shrink_diagonal: float = Field(default=1.0, ge=0)  # (gamma 1, alpha1)
    shrink_off_diagonal: float = Field(default=2.0, ge=0)  # (gamma 2, alpha2)
    shrink_times: int = Field(default=2, ge=0)  # the paper's formula once, its code twice


class Mahalanobis(Classifier):
    """A center and a metric for each class."""

    options_type = MahalanobisOptions
    centers: Tensor  # (classes, dim), of length one
    factors: Tensor  # (classes, dim, dim), lower triangular

    @property
    def feature_maps(self) -> tuple[FeatureMap | None, ...]:
        """Means of features, covariances of transformed ones."""
        return None, TukeyPower(self.options.power)

    @property
    def track_needs(self) -> tuple[Needs, ...]:
        """Means of the features, Grams of the transformed ones."""
        return "mean", "gram"

    def fit(self, stats: ClassStats, spread: ClassStats) -> None:  # type: ignore[override]
        """Transform the means, factor the shrunk correlations."""
        o = self.options
        self.centers = direction(stats.mean, o.power)
        self.factors = correlation_factor(
            spread.covariance(), spread.gram, o.shrink_diagonal, o.shrink_off_diagonal, o.shrink_times
        )

    def logits(self, features: Tensor) -> Tensor:
        """Return minus the squared distance to each class."""
        return mahalanobis_scores(direction(features, self.options.power), self.centers, self.factors)

    @property
    def prototypes(self) -> Tensor:
        """The centers."""
        return self.centers
