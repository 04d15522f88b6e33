"""Sufficient statistics of the estimators: weight and mean of each class, and the scatter of all rows.

`efcil.core.class_stats.ClassStats` stores a Gram per class, because the shift differs between classes. Precomputed
features do not shift, so one matrix for all classes suffices: 2 MB at 512 dimensions. The scatter is centered at the
mean of all rows: the uncentered Gram follows without cancellation, and an intercept stays accurate for features far
from zero. Weights are real numbers; a row of weight two counts as two rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from efcil.core.linear_algebra import DTYPE, gram_matrix

ROWS_AT_ONCE = 1 << 13
"""Rows converted to float64 at a time: 32 MB at 512 dimensions."""


@dataclass(frozen=True, eq=False)
class FeatureSums:
    """Sums over weighted rows of k classes, with the interface that `efcil.core.ridge.ridge_weight` needs.

    >>> x, label = np.array([[1.0], [3.0], [8.0]]), np.array([0, 0, 1])
    >>> sums = FeatureSums.from_rows(x, label, np.ones(3), classes=2)
    >>> sums.count.tolist(), sums.mean.tolist(), sums.scatter.tolist(), sums.gram_sum().tolist()
    ([2.0, 1.0], [[2.0], [8.0]], [[26.0]], [[74.0]])
    """

    count: Tensor  # (k,) float64: sum of the weights of each class
    mean: Tensor  # (k, dim); zero for classes without rows
    scatter: Tensor  # (dim, dim): sum of w (x - m)'(x - m) with the mean m of all rows; (0, 0) if not needed

    @classmethod
    def empty(cls, dim: int, classes: int, scatter: bool = True) -> FeatureSums:
        """Return the sums of zero rows."""
        zeros = torch.zeros(classes, dim, dtype=DTYPE)
        side = dim if scatter else 0
        return cls(zeros.new_zeros(classes), zeros, zeros.new_zeros(side, side))

    @classmethod
    def from_rows(
        cls,
        rows: NDArray[np.floating],
        index: NDArray[np.intp],
        weight: NDArray[np.float64],
        classes: int,
        scatter: bool = True,
    ) -> FeatureSums:
        """Sum rows (n, dim) of the classes `index` (n,), 0 to `classes` - 1, with their `weight` (n,).

        10,000 rows of 512 float64 take about 0.1 s on one core, mostly for the product X'X. Temporary memory is
        `ROWS_AT_ONCE` rows and two (dim, dim) matrices.
        """
        sums = cls.empty(rows.shape[1], classes, scatter)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            x = torch.from_numpy(np.array(rows[part], dtype=np.float64, order="C"))  # a copy for in-place operations
            w, at = torch.tensor(weight[part], dtype=DTYPE), torch.tensor(index[part], dtype=torch.int64)
            total = w.sum()
            if total == 0:
                continue
            center = (w @ x) / total
            x -= center
            count = w.new_zeros(classes).index_add_(0, at, w)
            plain = bool((w == 1).all())
            offset = x.new_zeros(classes, x.shape[1]).index_add_(0, at, x if plain else x * w[:, None])
            there = (count > 0)[:, None]
            mean = torch.where(there, center + offset / torch.where(there, count[:, None], 1.0), 0.0)
            if not plain:
                x *= w.sqrt()[:, None]
            sums = sums.merge(cls(count, mean, gram_matrix(x) if scatter else sums.scatter))
        return sums

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self.count.sum())

    @property
    def center(self) -> Tensor:
        """Mean of all rows, (dim,)."""
        return (self.count / self.count.sum().clamp_min(torch.finfo(DTYPE).tiny)) @ self.mean

    @property
    def cross(self) -> Tensor:
        """X'Y of one-hot labels, (dim, k)."""
        return self.mean.T * self.count

    def gram_sum(self) -> Tensor:
        """Return the uncentered X'X, (dim, dim): scatter + N m'm."""
        center = self.center
        return self.scatter + self.total * torch.outer(center, center)

    def centered(self) -> FeatureSums:
        """Return the sums of centered rows x - m: X'X is the scatter, and X'Y is also that of centered labels.

        >>> sums = FeatureSums.from_rows(np.array([[1.0], [5.0]]), np.array([0, 1]), np.ones(2), classes=2).centered()
        >>> sums.mean.tolist(), sums.gram_sum().tolist()
        ([[-2.0], [2.0]], [[8.0]])
        """
        return replace(self, mean=torch.where((self.count > 0)[:, None], self.mean - self.center, 0.0))

    def merge(self, other: FeatureSums) -> FeatureSums:
        """Return the sums of the rows of both; the scatter includes the difference of their means.

        >>> one, two = (FeatureSums.from_rows(np.array([[v]]), np.array([0]), np.ones(1), 1) for v in (1.0, 5.0))
        >>> one.merge(two).mean.tolist(), one.merge(two).scatter.tolist()
        ([[3.0]], [[8.0]])
        """
        if self.total == 0 or other.total == 0:
            return other if self.total == 0 else self
        count = self.count + other.count
        share = other.count / torch.where(count > 0, count, 1.0)
        mean = self.mean + share[:, None] * (other.mean - self.mean)
        apart = other.center - self.center
        scatter = self.scatter + other.scatter
        if len(scatter):
            scatter += self.total * other.total / (self.total + other.total) * torch.outer(apart, apart)
        return FeatureSums(count, mean, scatter)

    def spread(self, at: NDArray[np.intp], classes: int) -> FeatureSums:
        """Embed the sums into more classes: class i becomes class `at[i]` of `classes`."""
        index = torch.tensor(at, dtype=torch.int64)
        count, mean = self.count.new_zeros(classes), self.mean.new_zeros(classes, self.mean.shape[1])
        return replace(self, count=count.index_copy_(0, index, self.count), mean=mean.index_copy_(0, index, self.mean))
