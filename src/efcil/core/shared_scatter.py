"""One scatter for all classes: where features do not move, or all move alike, no class needs a Gram of its own.

Linear discriminant analysis and ridge regression read no class's Gram, only their sum: the scatter of the images about
the means of their classes, dim (dim + 1) / 2 numbers however many classes there are, 6.5 MB for 1,280 dimensions, and
each class's count and mean. Scatters add.

A class cannot be taken out of the sum. Forgetting one drops its count and mean; how its images varied about that mean
stays in what all classes share, mixed with the others, and of the covariance nothing changes (docs/privacy.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from efcil.core.linear_algebra import (
    DTYPE,
    ROWS_AT_ONCE,
    gram_matrix,
    pack_symmetric,
    packed_congruence,
    unpack_symmetric,
)
from efcil.errors import ConfigError


@dataclass(frozen=True, eq=False)
class SharedScatter:
    """sum_c sum_i (x_i - mu_c)'(x_i - mu_c) as an upper triangle, of so many images of so many classes.

    >>> x = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]]).double()
    >>> means, count = torch.tensor([[2.0, 0.0], [0.0, 2.0]]).double(), torch.tensor([2, 1])
    >>> scatter = SharedScatter.from_rows(x, means, count)
    >>> scatter.dense().tolist(), scatter.freedom
    ([[2.0, 0.0], [0.0, 0.0]], 1)
    """

    packed: Tensor  # (dim (dim + 1) / 2,)
    images: int
    classes: int

    @classmethod
    def from_rows(cls, features: Tensor, means: Tensor, count: Tensor) -> SharedScatter:
        """Sum over features (n, dim), sorted by class, about their classes' means (k, dim); `count` (k,) rows each."""
        dim = means.shape[1]
        total = means.new_zeros(dim, dim, dtype=DTYPE)
        label = torch.arange(len(count), device=means.device).repeat_interleave(count)
        for start in range(0, len(features), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            apart = features[part].detach().to(DTYPE) - means[label[part]]
            total += gram_matrix(apart)
        return cls(pack_symmetric(total), len(features), len(count))

    @property
    def freedom(self) -> int:
        """How many independent deviations it is the sum of."""
        return self.images - self.classes

    def dense(self) -> Tensor:
        """The scatter as a matrix, (dim, dim)."""
        return unpack_symmetric(self.packed)

    def covariance(self, unbiased: bool = False) -> Tensor:
        """The covariance that all classes share, (dim, dim): scatter / images, or scatter / freedom."""
        return self.dense() / max(1, self.freedom if unbiased else self.images)

    def merge(self, other: SharedScatter, means: Tensor, counts: Tensor) -> SharedScatter:
        """Add another one; the classes that are on both sides have means (2, m, dim) and `counts` (2, m) there.

        n n' / (n + n') (mu - mu')'(mu - mu') is what separates the two parts of such a class.

        >>> sides = [torch.tensor([[1.0]]).double(), torch.tensor([[5.0]]).double()]
        >>> one, two = (SharedScatter.from_rows(x, x, torch.tensor([1])) for x in sides)
        >>> round(one.merge(two, torch.stack(sides), torch.ones(2, 1)).packed.item(), 9)
        8.0
        """
        one, two = counts.to(DTYPE)
        apart = (means[0] - means[1]) * (one * two / (one + two).clamp_min(1)).sqrt()[:, None]
        packed = self.packed + other.packed
        if len(apart):
            packed += pack_symmetric(gram_matrix(apart))
        both = int((counts > 0).all(0).sum())
        return SharedScatter(packed, self.images + other.images, self.classes + other.classes - both)

    def transform(self, shift: Tensor) -> SharedScatter:
        """P' S P for one P (dim, dim_new) that all classes share, as in Eq. (16)."""
        if shift.ndim != 2:
            raise ConfigError(
                "classes that share one scatter cannot each have a shift of its own; take one shift for all classes"
            )
        return SharedScatter(packed_congruence(self.packed[None], shift)[0], self.images, self.classes)

    def to(self, device: torch.device | str) -> SharedScatter:
        """The same on another device."""
        return SharedScatter(self.packed.to(device), self.images, self.classes)

    def state(self) -> dict[str, Tensor]:
        """Return tensors to write to a file."""
        size = torch.tensor([self.images, self.classes], device=self.packed.device)
        return {"shared_packed": self.packed, "shared_size": size}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> SharedScatter:
        """Read what `state` wrote, bit for bit."""
        images, classes = state["shared_size"].tolist()
        return cls(state["shared_packed"].to(DTYPE), images, classes)
