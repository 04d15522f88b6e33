"""Ridge selection by generalized cross-validation (GCV) from sums, without the rows.

With H = X (X'X + r I)^-1 X' the score of a ridge r is (Golub, Heath and Wahba 1979)

    GCV(r) = n |(I - H) Y|^2 / trace(I - H)^2

Let X'X = V diag(l) V', and e_i = |v_i' X'Y|^2 / l_i the component of |Y|^2 along the i-th left singular vector of X. H
scales this component of Y by l_i / (l_i + r), so with rank p

    |(I - H) Y|^2 = |Y|^2 - sum_i e_i + sum_i e_i (r / (l_i + r))^2
    trace(I - H)  = n - p + sum_i r / (l_i + r)

Cancellation occurs only in the first difference, which does not depend on r. An intercept uses one more degree of
freedom (`free`), with centered X and Y. Y is one-hot: |Y|^2 = n, or n - sum_c n_c^2 / n when centered.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from efcil.core.class_stats import ClassStats
from efcil.core.linear_algebra import DTYPE, EPS, cholesky, gram_matrix, relative_ridge

LOWEST, HIGHEST = 1e-6, 1e3
"""Range of candidate ridges, relative to the mean eigenvalue of X'X."""

STEPS = 4
"""Candidates per decade, on a fixed grid so that rounding does not change the choice."""

NOTHING = 1e-9
"""Fraction of |Y|^2 below which the unexplained part is rounding error."""

AS_GOOD = 1e-6
"""Relative tolerance of scores; among ties, the largest ridge is selected."""


def gcv_scores(gram: Tensor, cross: Tensor, square: float, rows: float, ridges: Tensor, free: int = 0) -> Tensor:
    """Compute GCV scores (m,) of `ridges` (m,) from X'X (dim, dim), X'Y (dim, k), |Y|^2 and n; inf if n is too small.

    >>> gcv_scores(torch.eye(1).double(), torch.ones(1, 1).double(), 1.0, 2.0, torch.tensor([1.0])).tolist()
    [0.2222222222222222]
    """
    values, vectors = torch.linalg.eigh(gram)
    shown = values > len(gram) * EPS * values[-1]
    values = values[shown]
    explained = (vectors[:, shown].T @ cross).square().sum(1) / values
    unexplained = square - float(explained.sum())
    if unexplained <= NOTHING * square:
        unexplained = 0.0
    cut = ridges[:, None] / (values + ridges[:, None])  # (m, p)
    freedom = rows - free - len(values) + cut.sum(1)
    scores = rows * (unexplained + cut.square() @ explained) / freedom.square()
    return torch.where(freedom > 0, scores, math.inf)


def candidates(gram: Tensor) -> Tensor:
    """Return candidate ridges: powers 10^(j / STEPS) from LOWEST to HIGHEST times the mean eigenvalue, or 1 if it is
    zero.

    >>> found = candidates(torch.eye(3))
    >>> len(found), float(found[0]), float(found[-1])
    (37, 1e-06, 1000.0)
    """
    scale = relative_ridge(gram, 1.0)
    if not scale > 0:
        return torch.ones(1, dtype=DTYPE, device=gram.device)
    low, high = (STEPS * math.log10(scale * bound) for bound in (LOWEST, HIGHEST))
    return torch.tensor(
        [10.0 ** (j / STEPS) for j in range(math.ceil(low), math.floor(high) + 1)], dtype=DTYPE, device=gram.device
    )


def best_ridge(gram: Tensor, cross: Tensor, square: float, rows: float, free: int = 0) -> float:
    """Return the ridge with the smallest GCV score for the sums that `gcv_scores` takes, the largest of ties.

    >>> best_ridge(torch.eye(1).double(), torch.ones(1, 1).double(), 1.0, 2.0)  # the row explains its label: no ridge
    1e-06
    """
    ridges = candidates(gram)
    scores = gcv_scores(gram, cross, square, rows, ridges, free)
    return float(ridges[scores <= scores.min() * (1 + AS_GOOD)][-1])


def balanced_ridge(stats: ClassStats) -> tuple[Tensor, Tensor, float]:
    """Return weight (dim, k), bias (k,) and the ridge of least GCV of a centered regression on one-hot labels.

    Of N images of k classes each class counts as N / k images with the covariance that all classes share. So X'X is
    the scatter within classes and N / k of the scatter of their means, X'Y is N / k (mu_c - m) with the mean m of the
    means, and |Y|^2 = N (1 - 1 / k). With equally many images of each class it is the regression itself.

    >>> stats = ClassStats.from_features(torch.tensor([[0.0], [2.0], [9.0], [11.0]]), torch.tensor([0, 0, 1, 1]))
    >>> weight, bias, ridge = balanced_ridge(stats)
    >>> (torch.tensor([[5.5]]).double() @ weight + bias).round(decimals=6).tolist()
    [[0.5, 0.5]]
    """
    there = stats.count > 0
    images, classes = float(stats.count.sum()), max(1, int(there.sum()))
    center = stats.mean[there].mean(0) if bool(there.any()) else stats.mean.new_zeros(stats.dim)
    apart = torch.where(there[:, None], stats.mean - center, 0.0)
    gram = stats.scatter() + gram_matrix(apart) * (images / classes)
    cross = apart.T * (images / classes)
    ridge = best_ridge(gram, cross, images * (1 - 1 / classes), images, free=1)
    gram.diagonal().add_(ridge)
    weight = torch.cholesky_solve(cross, cholesky(gram, "X'X + ridge I", "add images")).contiguous()
    return weight, torch.where(there, 1 / classes, 0.0).to(weight) - center @ weight, ridge
