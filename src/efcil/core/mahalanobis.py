"""Mahalanobis distance with a covariance per class: Tukey's transformation, shrinkage, correlation, distance.

Formulas of FeCAM (Goswami et al., NeurIPS 2023). A class is represented by its center and the Cholesky factor of its
shrunk correlation matrix; distances are computed by triangular solves, without inverses or n x n products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from efcil.core.linear_algebra import DTYPE, EPS, ROWS_AT_ONCE, cholesky

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0)
"""Fractions of the off-diagonal shrinkage, tried in this order for a class whose shrunk matrix is indefinite."""

DEFINITE = 1e-8
"""Lower bound on the eigenvalues of a valid correlation matrix."""


def tukey(features: Tensor, power: float) -> Tensor:
    """Apply Tukey's ladder of powers, x^power, in float64, which makes skewed features more Gaussian.

    It expects non-negative features, as after a ReLU; negative values are set to zero.

    >>> tukey(torch.tensor([4.0, 0.0, -9.0]), 0.5).tolist()
    [2.0, 0.0, 0.0]
    """
    return features.to(DTYPE).clamp_min(0.0).pow(power)


def direction(features: Tensor, power: float) -> Tensor:
    """Transform and L2-normalize features or class means, the inputs of the distance.

    >>> direction(torch.tensor([[9.0, 16.0]]), 0.5)
    tensor([[0.6000, 0.8000]], dtype=torch.float64)
    """
    return normalize(tukey(features, power), dim=-1)


def shrunk(covariance: Tensor, diagonal: float, off_diagonal: float) -> Tensor:
    """Return S + a V1 I + b V2 (1 - I) for each S (k, dim, dim); V1 is the mean variance, V2 the mean covariance.

    As released, V2 is the mean over nonzero entries, which excludes dead channels.

    >>> shrunk(torch.tensor([[[2.0, 1.0], [1.0, 4.0]]]), 1.0, 2.0).tolist()
    [[[5.0, 3.0], [3.0, 7.0]]]
    """
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    apart = covariance - torch.diag_embed(variances)
    mean = apart.sum((-2, -1)) / (apart != 0).sum((-2, -1)).clamp_min(1)
    result = covariance + off_diagonal * mean[:, None, None]
    result.diagonal(dim1=-2, dim2=-1).copy_(variances + diagonal * variances.mean(-1, keepdim=True))
    return result


def correlation(covariance: Tensor) -> Tensor:
    """Return S_ij / sqrt(S_ii S_jj); a constant channel is correlated only with itself.

    >>> correlation(torch.tensor([[[4.0, 2.0, 0.0], [2.0, 4.0, 0.0], [0.0, 0.0, 0.0]]])).tolist()
    [[[1.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 1.0]]]
    """
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(variances > 0, variances, torch.ones_like(variances)).rsqrt()
    result = covariance * scale[..., :, None] * scale[..., None, :]
    result.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return result


def correlation_factor(covariance: Tensor, gram: Tensor, diagonal: float, off_diagonal: float, times: int) -> Tensor:
    """Return Cholesky factors (k, dim, dim) of the correlations of covariances shrunk `times` times.

    If the covariance of a class is only rounding error relative to its uncentered second moment `gram` (one image, or
    copies of one), its correlation is the identity and the distance to it Euclidean. If covariances are shrunk more
    than variances, the matrix can have a negative eigenvalue; that class is then shrunk with the largest of `SHARES` of
    `off_diagonal` that gives a positive definite matrix. If all fail, `NotPositiveDefiniteError` is raised.
    """
    total, moment = (m.diagonal(dim1=-2, dim2=-1).sum(-1) for m in (covariance, gram))
    covariance = covariance * (total > gram.shape[-1] * EPS * moment)[:, None, None]
    result = torch.empty_like(covariance)
    undecided = torch.arange(len(covariance), device=covariance.device)
    for share in SHARES:
        metric = covariance[undecided]
        for _ in range(times):
            metric = shrunk(metric, diagonal, share * off_diagonal)
        result[undecided] = correlation(metric)
        margin = result[undecided] - DEFINITE * torch.eye(gram.shape[-1], dtype=DTYPE, device=gram.device)
        undecided = undecided[torch.linalg.cholesky_ex(margin)[1] != 0]
        if len(undecided) == 0:
            break
    return cholesky(
        result, "the shrunk correlation matrix of the task's class", "raise shrink_diagonal (alpha1) or shrink_times"
    )


class LowRankMetric(NamedTuple):
    """A correlation D^-1/2 (c I + U' diag(a) U) D^-1/2 of a class of few images, with orthonormal rows U."""

    scale: Tensor  # (dim,) diagonal of D^1/2
    floor: Tensor  # c
    rows: Tensor  # U, (rank + 1, dim)
    gains: Tensor  # a, (rank + 1,)

    def along(self, points: Tensor, center: Tensor) -> Tensor:
        """Return, (n,), by how much D^1/2 (x - m) is shorter than it is long: the part in the span of U."""
        own = points @ (self.rows * self.scale).T - self.rows @ (self.scale * center)
        return own.square() @ (self.gains / (self.floor + self.gains))


def low_rank_distances(points: Tensor, centers: Tensor, metrics: Sequence[LowRankMetric]) -> Tensor:
    """Return the squared distances (n, classes): products of matrices, no pass over the points for each class."""
    weights = torch.stack([metric.scale.square() for metric in metrics])
    whole = points.square() @ weights.T - 2 * points @ (weights * centers).T + (weights * centers.square()).sum(1)
    along = [metric.along(points, center) for metric, center in zip(metrics, centers, strict=True)]
    return (whole - torch.stack(along, 1)) / torch.stack([metric.floor for metric in metrics])


def low_rank_metric(
    factor: Tensor, mean: Tensor, count: int, diagonal: float, off_diagonal: float, times: int
) -> LowRankMetric | None:
    """Return the metric of `correlation_factor` from a factor F (rank, dim) of a class's Gram; None if it is unsound.

    Each shrinkage adds a multiple of the identity and one of the matrix of ones, so all but rank + 1 eigenvalues stay
    equal: rank^2 dim operations instead of dim^3.
    """
    dim, scatter = factor.shape[1], factor.square().sum()
    basis, corner = torch.linalg.qr(factor.T)  # F' = Q R
    inner = basis.T @ mean
    values, vectors = torch.linalg.eigh(corner @ corner.T / count - torch.outer(inner, inner))
    values, rows = values.clamp_min(0.0), (basis @ vectors).T
    if values.sum() <= dim * EPS * scatter:
        return LowRankMetric(factor.new_ones(dim), factor.new_ones(()), factor.new_zeros(0, dim), factor.new_zeros(0))
    variances = (rows.square() * values[:, None]).sum(0)
    live = int((factor != 0).any(0).sum())
    total, trace = (rows.sum(1).square() * values).sum(), variances.sum()
    rest = 1 - rows.T @ rows.sum(1)
    rows = torch.cat([rows, rest[None] / rest.norm().clamp_min(EPS)])
    within, inside = rows.sum(1), torch.diag(torch.cat([values, values.new_zeros(1)]))
    for share in SHARES:
        level, ones = _added(total, trace, (live, dim), diagonal, share * off_diagonal, times)
        gains, turn = torch.linalg.eigh(inside + ones * torch.outer(within, within))
        scale = variances + level + ones
        if min(level, level + gains.min()) > DEFINITE * scale.max() and scale.min() > 0:
            return LowRankMetric(scale.sqrt(), level, turn.T @ rows, gains)
    return None


def _added(
    total: Tensor, trace: Tensor, channels: tuple[int, int], diagonal: float, off_diagonal: float, times: int
) -> tuple[Tensor, Tensor]:
    """Return what `shrunk` adds to the diagonal alone and everywhere, of a matrix with a sum and a trace.

    `channels` are those with a nonzero row, and all of them.
    """
    live, dim = channels
    level, ones, entries = torch.zeros_like(total), torch.zeros_like(total), live * (live - 1)
    for _ in range(times):
        added = off_diagonal * (total - trace) / max(1, entries)
        more = diagonal * trace / dim - added
        level, ones = level + more, ones + added
        trace, total = trace + dim * (more + added), total + dim * more + dim * dim * added
        entries = dim * (dim - 1)
    return level, ones


def mahalanobis_scores(points: Tensor, centers: Tensor, factors: Sequence[Tensor | LowRankMetric] | Tensor) -> Tensor:
    """Return -|L_c^-1 (x - m_c)|^2, (n, classes), for points (n, dim), centers (classes, dim), factors (classes, dim,
    dim), or a metric of low rank in the place of a factor.

    >>> factor = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]]).double()
    >>> mahalanobis_scores(torch.tensor([[4.0, 3.0]]).double(), torch.zeros(1, 2).double(), factor).tolist()
    [[-13.0]]
    """
    scores = points.new_empty(len(points), len(centers))
    small = [place for place, factor in enumerate(factors) if isinstance(factor, LowRankMetric)]
    for start in range(0, len(points), ROWS_AT_ONCE):
        rows, found = points[start : start + ROWS_AT_ONCE], scores[start : start + ROWS_AT_ONCE]
        for index, (center, factor) in enumerate(zip(centers, factors, strict=True)):
            if isinstance(factor, Tensor):
                white = torch.linalg.solve_triangular(factor, (rows - center).T, upper=False)
                found[:, index] = -white.square().sum(0)
        if small:
            metrics = [factor for factor in factors if isinstance(factor, LowRankMetric)]
            found[:, small] = -low_rank_distances(rows, centers[small], metrics)
    return scores
