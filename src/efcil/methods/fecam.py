"""FeCAM: feature covariance-aware metric.

Goswami et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions in Exemplar-Free Continual Learning",
NeurIPS 2023.

Idea: the backbone rests after the first task, so classes learned later spread unevenly around their means. An image
goes to the class whose mean is nearest in the Mahalanobis distance of that class: features and means to a power (Tukey)
and to length one, the class's covariance shrunk and scaled to a correlation matrix, so that classes can be compared.

What survives a task: per class its centre, dim numbers, and the factor of its correlation, dim (dim + 1) / 2 numbers.

Differences from the authors' code, which the DPCR paper ran: there the first task alone is answered by the cosine to
the rows of the trained head, without Tukey; here every task by the Mahalanobis distance, as in the paper's text. It
takes a pseudo-inverse of whatever the shrinkage leaves; here a class whose matrix is not positive definite is shrunk
less off the diagonal (core/mahalanobis.py). Taken over from it: covariances of the powers of features that were not
normalised (their scale cancels in the correlation); means before the power; the shrinkage applied twice.

Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: `fecam` T = 10 27.04 ± 2.31 / 42.86 ± 1.93 (34.82 / 49.14),
T = 20 15.83 ± 0.85 / 30.18 ± 1.22 (25.77 / 41.21).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.core.linear_algebra import pack_symmetric, unpack_symmetric
from efcil.core.mahalanobis import correlation_factor, direction, mahalanobis_scores, tukey
from efcil.features import TaskFeatures


class FeCAMOptions(Options):
    """Options of FeCAM; in brackets the names of the paper and of its code."""

    power: float = Field(default=0.1, gt=0)  # of Tukey's transformation (lambda, beta)
    shrink_diagonal: float = Field(default=1.0, ge=0)  # (gamma 1, alpha1)
    shrink_off_diagonal: float = Field(default=2.0, ge=0)  # (gamma 2, alpha2)
    shrink_times: int = Field(default=2, ge=0)  # the paper's formula once, its code twice


class FeCAM:
    """A centre and a metric for each class."""

    def __init__(self, options: FeCAMOptions):
        self.options = options
        self.centres: Tensor | None = None  # (classes, dim), of length one
        self.factors: Tensor | None = None  # (classes, dim, dim), lower triangular

    def learn(self, task: TaskFeatures) -> None:
        """Add the new classes; the old ones stay as they are."""
        o = self.options
        centres = direction(task.stats().mean, o.power)
        spread = ClassStats.from_features(tukey(task.new(), o.power), task.labels)
        factors = correlation_factor(
            spread.covariance(), spread.gram, o.shrink_diagonal, o.shrink_off_diagonal, o.shrink_times
        )
        if self.centres is not None and self.factors is not None:
            centres, factors = torch.cat([self.centres, centres]), torch.cat([self.factors, factors])
        self.centres, self.factors = centres, factors

    def keep(self, positions: Tensor) -> None:
        """Keep some classes only."""
        assert self.centres is not None
        assert self.factors is not None
        self.centres, self.factors = self.centres[positions], self.factors[positions]

    def scores(self, features: Tensor) -> Tensor:
        """Return minus the squared distance to each class."""
        assert self.centres is not None
        assert self.factors is not None
        return mahalanobis_scores(direction(features, self.options.power), self.centres, self.factors)

    def state(self) -> dict[str, Tensor]:
        """Return centres and factors; of a factor, whose upper triangle is zero, the other one."""
        assert self.centres is not None
        assert self.factors is not None
        return {"centres": self.centres, "factors_packed": pack_symmetric(self.factors.mT)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take them up."""
        self.centres, self.factors = state["centres"], unpack_symmetric(state["factors_packed"]).tril()
