"""Ridge-regression-based classifier reconstruction (RRCR, Eq. 11-15, 18-21) and normalization (CN, Eq. 22)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from efcil.core.linear_algebra import DTYPE, _check_ridge, check_finite, cholesky


class Statistics(Protocol):
    """Class statistics that `ridge_weight` uses; implemented by `efcil.core.class_stats.ClassStats`."""

    @property
    def count(self) -> Tensor:
        """Number of images of each class, (classes,)."""

    @property
    def mean(self) -> Tensor:
        """Mean feature of each class, (classes, dim)."""

    def gram_sum(self) -> Tensor:
        """Return the sum of the uncentered Grams of all classes, (dim, dim)."""


def ridge_weight(stats: Statistics, ridge: float) -> Tensor:
    """Solve W = (sum_c Phi_c + ridge I)^-1 [N_c mu_c'], Eq. (13), (14) and (18) to (21).

    W is (dim, k), with columns in the order of `stats.classes`; scores are x @ W. It equals the joint ridge solution of
    Eq. (11) and (12) on all images. `ridge` is gamma, which is missing in Eq. (19).

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
    # Contiguous like a loaded weight: products may round differently in another memory layout.
    return torch.cholesky_solve(check_finite(cross, "N_c mu_c'"), factor).contiguous()


def normalize_columns(weight: Tensor) -> Tensor:
    """Apply category-wise normalization, Eq. (22): w_j / ||w_j||_2 for each column of (dim, classes).

    Each column is divided by its l2 norm (the l1 norm and the index in the first term of the paper are misprints); zero
    columns stay zero.

    >>> normalize_columns(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
    tensor([[0.6000, 0.0000],
            [0.8000, 0.0000]])
    """
    check_finite(weight, "weight")
    # Divide by the largest entry first, so that squares neither overflow nor underflow.
    largest = weight.abs().amax(0, keepdim=True) if len(weight) else weight.sum(0, keepdim=True)
    scaled = weight / torch.where(largest > 0, largest, torch.ones_like(largest))
    norm = torch.linalg.vector_norm(scaled, dim=0, keepdim=True)
    return scaled / torch.where(norm > 0, norm, torch.ones_like(norm))
