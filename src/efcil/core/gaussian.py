"""Class-conditional Gaussian log-densities with class covariances shrunk towards the pooled covariance.

The covariance of a class with n images has rank at most n - 1; the pooled covariance supplies the other directions, and
a ridge those that no class has. Friedman, "Regularized Discriminant Analysis", JASA 1989.
"""

from __future__ import annotations

import torch
from torch import Tensor

from efcil.core.class_stats import ClassStats
from efcil.core.linear_algebra import DTYPE, EPS, cholesky
from efcil.core.mahalanobis import mahalanobis_scores

AT_ONCE = 16  # classes whose dense covariances are in memory at a time


def pooled_covariance(stats: ClassStats) -> Tensor:
    """Return the pooled within-class covariance, (dim, dim): (sum Phi_c - sum N_c mu_c mu_c') / sum N_c."""
    return stats.scatter() / stats.count.sum()


def gaussian_factors(stats: ClassStats, shared: float, ridge: float) -> Tensor:
    """Cholesky factors (k, dim, dim) of (1 - a) S_c + a S + r tr(S) / dim I: S_c the class covariance, S the pooled
    one.

    If no class has any variance (one image each, or copies of one), the metric is Euclidean.
    """
    within = pooled_covariance(stats)
    unit = torch.eye(stats.dim, dtype=DTYPE, device=within.device)
    spread = within.trace()
    moment = spread + (stats.cross.T * stats.mean).sum() / stats.count.sum()  # uncentered
    if bool(spread <= stats.dim * EPS * moment):
        return unit.repeat(len(stats), 1, 1)
    base = shared * within + ridge * spread / stats.dim * unit
    factors = base.new_empty(len(stats), stats.dim, stats.dim)
    floor = ridge * float(spread) / stats.dim
    for block in torch.arange(len(stats), device=within.device).split(AT_ONCE):
        covariance = stats.select(block).covariance()
        covariance.mul_(1 - shared).add_(base)
        factors[block] = cholesky(covariance, "the covariance of a class", "raise gaussian_ridge", floor)
    return factors


def log_densities(points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
    """Return class log-densities (n, classes) up to a constant: -|L^-1 (x - m)|^2 / 2 - log det L.

    >>> narrow, wide = torch.eye(2).double(), 2 * torch.eye(2).double()
    >>> log_densities(torch.tensor([[2.0, 0.0]]).double(), torch.zeros(2, 2).double(), torch.stack([narrow, wide]))
    tensor([[-2.0000, -1.8863]], dtype=torch.float64)
    """
    volumes = factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return mahalanobis_scores(points, means, factors) / 2 - volumes


def standardized(scores: Tensor) -> Tensor:
    """Standardize each row of scores to mean 0 and variance 1 over the classes, so that two heads can be added.

    >>> standardized(torch.tensor([[1.0, 3.0], [5.0, 5.0]])).tolist()
    [[-1.0, 1.0], [0.0, 0.0]]
    """
    centered = scores - scores.mean(1, keepdim=True)
    deviation = centered.square().mean(1, keepdim=True).sqrt()
    return centered / torch.where(deviation > 0, deviation, 1.0)
