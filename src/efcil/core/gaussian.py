"""Log-density of an image under each class's Gaussian, its covariance drawn towards the one that all classes share.

A class of n images shows at most n - 1 directions of its covariance; the others come from all classes together, and
what none shows from a ridge. Friedman, "Regularized Discriminant Analysis", JASA 1989.
"""

from __future__ import annotations

import torch
from torch import Tensor

from efcil.core.class_stats import ClassStats
from efcil.core.linear_algebra import DTYPE, EPS, cholesky
from efcil.core.mahalanobis import mahalanobis_scores

AT_ONCE = 16  # classes whose covariances are there as whole matrices


def pooled_covariance(stats: ClassStats) -> Tensor:
    """Return the covariance within classes, (dim, dim): (sum Phi_c - sum N_c mu_c mu_c') / sum N_c."""
    return (stats.gram_sum() - stats.cross @ stats.mean) / stats.count.sum()


def gaussian_factors(stats: ClassStats, shared: float, ridge: float) -> Tensor:
    """Cholesky factors (k, dim, dim) of (1 - a) S_c + a S + r tr(S) / dim I: S_c a class's covariance, S that of all.

    Where classes do not vary at all (one image each, or copies of one) the metric is Euclidean.
    """
    within = pooled_covariance(stats)
    unit = torch.eye(stats.dim, dtype=DTYPE, device=within.device)
    spread = within.trace()
    moment = spread + (stats.cross.T * stats.mean).sum() / stats.count.sum()  # uncentred
    if bool(spread <= stats.dim * EPS * moment):
        return unit.repeat(len(stats), 1, 1)
    base = shared * within + ridge * spread / stats.dim * unit
    factors = base.new_empty(len(stats), stats.dim, stats.dim)
    least = ridge * float(spread) / stats.dim
    for block in torch.arange(len(stats), device=within.device).split(AT_ONCE):
        own = stats.select(block).covariance()
        own.mul_(1 - shared).add_(base)
        factors[block] = cholesky(own, "the covariance of a class", "raise gaussian_ridge", least)
    return factors


def log_densities(points: Tensor, means: Tensor, factors: Tensor) -> Tensor:
    """Log of each class's density, (n, classes), without what is the same for all: -|L^-1 (x - m)|^2 / 2 - log det L.

    >>> narrow, wide = torch.eye(2).double(), 2 * torch.eye(2).double()
    >>> log_densities(torch.tensor([[2.0, 0.0]]).double(), torch.zeros(2, 2).double(), torch.stack([narrow, wide]))
    tensor([[-2.0000, -1.8863]], dtype=torch.float64)
    """
    volumes = factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return mahalanobis_scores(points, means, factors) / 2 - volumes


def standardised(scores: Tensor) -> Tensor:
    """Scores of an image (a row) with mean 0 and variance 1 over the classes, so that two heads can be added.

    >>> standardised(torch.tensor([[1.0, 3.0], [5.0, 5.0]])).tolist()
    [[-1.0, 1.0], [0.0, 0.0]]
    """
    centred = scores - scores.mean(1, keepdim=True)
    deviation = centred.square().mean(1, keepdim=True).sqrt()
    return centred / torch.where(deviation > 0, deviation, 1.0)
