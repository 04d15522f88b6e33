"""Class-conditional Gaussians with shared and shrunk covariances (RDA), alone and combined with the ridge classifier.

Friedman, "Regularized Discriminant Analysis", JASA 1989. A ridge classifier knows one covariance for all classes; the
statistics hold one for each. Combined, each classifier's scores are standardized over the classes and added.

State between tasks: the class statistics; the factors of the covariances follow from them.
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
from efcil.core.gaussian import gaussian_factors, log_densities, standardised
from efcil.errors import ConfigError


class GaussianOptions(Options):
    """Options of the Gaussians."""

    gaussian_shared: float = Field(default=0.9, ge=0, le=1)  # of a class's covariance is the one of all classes
    gaussian_ridge: float = Field(default=0.3, gt=0)  # added to it, a share of its trace / dim


class Gaussian(Classifier):
    """Log-densities of the classes' Gaussians."""

    options_type = GaussianOptions
    stats: ClassStats
    _factors: Tensor | None = None  # (classes, dim, dim), computed when they are first needed

    def fit(self, stats: ClassStats) -> None:  # type: ignore[override]
        """Keep the statistics; their factors take more memory than anything else and wait until they are needed."""
        self.stats, self._factors = stats, None

    def logits(self, features: Tensor) -> Tensor:
        """Return the log-density of each class, but for what is the same for all."""
        if self._factors is None:
            self._factors = gaussian_factors(self.stats, self.options.gaussian_shared, self.options.gaussian_ridge)
        return log_densities(features.to(self._factors), self.stats.mean, self._factors)

    @property
    def prototypes(self) -> Tensor:
        """The means."""
        return self.stats.mean


class RidgeAndGaussianOptions(RidgeOptions, GaussianOptions):
    """Options of both classifiers, and how their scores are combined."""

    gaussian: float = Field(default=1.0, ge=0)  # weight of the Gaussians beside the ridge classifier; 0: ridge alone
    moved_bonus: float = Field(default=0.0, ge=0)  # added to a class's standardized score for every shift of the class
    use_stages: int | None = Field(default=None, ge=0, le=3)  # of so many intermediate stages; None: of all extracted

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
    """The sum of the standardized scores of the ridge classifier and of the Gaussians.

    Every shift leaves a mean a little off, so old classes score less than they should; `moved_bonus` makes up for it.
    """

    options_type = RidgeAndGaussianOptions

    def __init__(self, options: Options | None = None, **values: object):
        super().__init__(options, **values)
        self.densities = Gaussian(self.options)

    @property
    def feature_maps(self) -> tuple[FeatureMap | None, ...]:
        """Features of fewer stages, where the options say so."""
        stages = self.options.use_stages
        return (None if stages is None else FewerStages(stages),)

    def fit(self, stats: ClassStats) -> None:  # type: ignore[override]
        """Fit both."""
        super().fit(stats)
        self.densities.fit(stats)

    def logits(self, features: Tensor) -> Tensor:
        """Add the standardized scores."""
        o = self.options
        features = features[:, : len(self.weight)]
        scores = super().logits(features)
        if o.gaussian or o.moved_bonus:
            scores = standardised(scores)
        if o.gaussian:
            scores = scores + o.gaussian * standardised(self.densities.logits(features))
        if o.moved_bonus:
            scores = scores + o.moved_bonus * self.densities.stats.moves
        return scores

    def load_state_dict(self, state: Mapping[str, Tensor], *stats: ClassStats) -> None:
        """Restore the ridge classifier; the Gaussians follow from the statistics."""
        super().load_state_dict(state, *stats)
        self.densities.fit(stats[0])
