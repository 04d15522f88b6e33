"""Reconstruct the classifier by ridge regression (RRCR, Eq. 11-15, 18-21) and normalize it (CN, Eq. 22)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from efcil.core.linear_algebra import DTYPE, _check_ridge, check_finite, cholesky


class Statistics(Protocol):
    """What `ridge_weight` asks of class statistics; `efcil.core.class_stats.ClassStats` has it."""

    @property
    def count(self) -> Tensor:
        """Images of each class, (classes,)."""

    @property
    def mean(self) -> Tensor:
        """Mean feature of each class, (classes, dim)."""

    def gram_sum(self) -> Tensor:
        """Sum of the uncentred Grams of all classes, (dim, dim)."""


def ridge_weight(stats: Statistics, ridge: float) -> Tensor:
    """Reconstruct the classifier: W = (sum_c G_c + ridge I)^-1 [N_c mu_c'], Eq. (13), (14) and (18) to (21).

    From `stats` of k classes, W is (dim, k) with the columns in the order of `stats.classes`; scores are x @ W. It is
    the joint ridge solution of Eq. (11) and (12) on all images. gamma, which Eq. (19) leaves out, is here.

    >>> from efcil.core.class_stats import ClassStats
    >>> stats = ClassStats.from_features(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1]))
    >>> ridge_weight(stats, ridge=1.0)
    tensor([[0.5000, 0.0000],
            [0.0000, 0.3000]], dtype=torch.float64)
    """
    _check_ridge(ridge)
    total = stats.gram_sum().to(DTYPE).clone()
    total.diagonal().add_(ridge)
    factor = cholesky(
        total, f"the sum of Grams + {ridge:g} I", "raise ridge (gamma; the paper uses 200 and 2000), or add images"
    )
    cross = stats.mean.to(DTYPE).T * stats.count
    # Row by row, as a saved one is read again: the product with features may round differently in another layout.
    return torch.cholesky_solve(check_finite(cross, "N_c mu_c'"), factor).contiguous()


def normalize_columns(weight: Tensor) -> Tensor:
    """Category-wise normalisation, Eq. (22): w_j / ||w_j||_2 for each column of (dim, classes).

    Every column by its own l2 norm (the l1 norm and the index in the paper's first term are misprints); a zero column
    stays zero.

    >>> normalize_columns(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
    tensor([[0.6000, 0.0000],
            [0.8000, 0.0000]])
    """
    check_finite(weight, "weight")
    # Divided by the largest entry first, so that no square over- or underflows.
    largest = weight.abs().amax(0, keepdim=True) if len(weight) else weight.sum(0, keepdim=True)
    scaled = weight / torch.where(largest > 0, largest, torch.ones_like(largest))
    norm = torch.linalg.vector_norm(scaled, dim=0, keepdim=True)
    return scaled / torch.where(norm > 0, norm, torch.ones_like(norm))
