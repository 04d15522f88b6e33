"""Class-conditional Gaussians with shared and shrunk covariances (RDA), alone and combined with the ridge classifier.

Friedman, "Regularized Discriminant Analysis", JASA 1989. A ridge classifier uses one covariance for all classes, while
the statistics contain one for each. To combine both, the scores of each are standardized over the classes and added.

State between tasks: the class statistics, from which the covariance factors are recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field
from torch import Tensor

from efcil.classifiers.base import Classifier
from efcil.classifiers.ridge import Ridge, RidgeOptions
from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.core.feature_maps import FeatureMap, FewerStages
from efcil.core.gaussian import gaussian_factors, log_densities, standardized
from efcil.errors import ConfigError


class GaussianOptions(Options):
    """Options of the Gaussians."""

    gaussian_shared: float = Field(default=0.9, ge=0, le=1)
    """Share of the covariance of all classes in that of a class."""
    gaussian_ridge: float = Field(default=0.3, gt=0)
    """Added to the covariance, a share of its trace / dim."""


class Gaussian(Classifier):
    """Class-conditional Gaussian log-densities as scores.

    >>> import torch
    >>> from efcil.core.class_stats import ClassStats
    >>> features = torch.tensor([[4.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    >>> gaussian = Gaussian()
    >>> gaussian.fit(ClassStats.from_features(features, torch.tensor([0, 0, 1, 1])))
    >>> gaussian.logits(torch.tensor([[5.0, 1.0], [1.0, 5.0]])).argmax(1).tolist()
    [0, 1]
    """

    options_type = GaussianOptions
    stats: ClassStats
    _factors: Tensor | None = None  # (classes, dim, dim), computed on first use

    def fit(self, stats: ClassStats) -> None:  # type: ignore[override]
        """Keep the statistics; the covariance factors, the largest part of memory, are computed on first use."""
        self.stats, self._factors = stats, None

    def logits(self, features: Tensor) -> Tensor:
        """Return class log-densities up to a constant."""
        if self._factors is None:
            self._factors = gaussian_factors(self.stats, self.options.gaussian_shared, self.options.gaussian_ridge)
        return log_densities(features.to(self._factors), self.stats.mean, self._factors)

    @property
    def prototypes(self) -> Tensor:
        """Return the means."""
        return self.stats.mean


class RidgeAndGaussianOptions(RidgeOptions, GaussianOptions):
    """Options of both classifiers, and how their scores are combined."""

    gaussian: float = Field(default=1.0, ge=0)
    """Weight of the Gaussians beside the ridge classifier; 0: ridge alone."""
    moved_bonus: float = Field(default=0.0, ge=0)
    """Added to a class's standardized score for every shift of the class."""
    use_stages: int | None = Field(default=None, ge=0, le=3)
    """Intermediate stages used; null: all that are extracted."""

    def check_training(self, training: Any) -> None:
        """Refuse to use more stages than are extracted."""
        super().check_training(training)
        extracted = getattr(training, "intermediate_stages", 0)
        if self.use_stages is not None and self.use_stages > extracted:
            raise ConfigError(
                f"use_stages={self.use_stages}: features of {extracted} intermediate stages are extracted; set "
                f"intermediate_stages={self.use_stages} or more"
            )


class RidgeAndGaussian(Ridge):
    """Sum of standardized scores of the ridge classifier and the Gaussians.

    Errors of the shift lower the scores of old classes; `moved_bonus` compensates for them.

    >>> import torch
    >>> from efcil.core.class_stats import ClassStats
    >>> features = torch.tensor([[4.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    >>> stats = ClassStats.from_features(features, torch.tensor([0, 0, 1, 1]))
    >>> classifier = RidgeAndGaussian(ridge=1.0)
    >>> classifier.fit(stats)
    >>> classifier.logits(torch.tensor([[5.0, 1.0], [1.0, 5.0]])).argmax(1).tolist()
    [0, 1]
    """

    options_type = RidgeAndGaussianOptions

    def __init__(self, options: Options | None = None, **values: object):
        super().__init__(options, **values)
        self.densities = Gaussian(self.options)

    @property
    def feature_maps(self) -> tuple[FeatureMap | None, ...]:
        """Fewer stages, if `use_stages` is set."""
        stages = self.options.use_stages
        return (None if stages is None else FewerStages(stages),)

    def fit(self, stats: ClassStats) -> None:  # type: ignore[override]
        """Fit both classifiers."""
        super().fit(stats)
        self.densities.fit(stats)

    def logits(self, features: Tensor) -> Tensor:
        """Return the sum of standardized scores."""
        o = self.options
        features = features[:, : len(self.weight)]
        scores = super().logits(features)
        if o.gaussian or o.moved_bonus:
            scores = standardized(scores)
        if o.gaussian:
            scores = scores + o.gaussian * standardized(self.densities.logits(features))
        if o.moved_bonus:
            scores = scores + o.moved_bonus * self.densities.stats.moves
        return scores

    def load_state_dict(self, state: Mapping[str, Tensor], *stats: ClassStats) -> None:
        """Restore the ridge classifier and refit the Gaussians to the statistics."""
        super().load_state_dict(state, *stats)
        self.densities.fit(stats[0])
