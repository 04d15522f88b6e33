"""LwF whose auxiliary head has fixed targets that are orthogonal or nearly so, as learners for any command of efcil.

    python research/fixed_targets.py compare lwf-orthogonal+dual-projection+ridge,lwf-sparse+dual-projection+ridge ...

The rows of the cosine classifier do not learn; its scale does. `lwf-orthogonal`: the rows of one random orthogonal
matrix, of both signs. `lwf-sparse`: each row has an eighth of the channels, drawn at random, and is positive there, as
features after a ReLU are; two rows share an eighth of theirs. All targets depend on the seed alone, so they are the
same in every task.
"""

from __future__ import annotations

import torch
from torch import Tensor

from efcil.cli import main
from efcil.errors import ConfigError
from efcil.learners import register_learner
from efcil.learners.lwf import LwF
from efcil.models.heads import CosineHead, GrowingHead

SHARE = 8  # a sparse target has one of so many channels


class FixedHead(CosineHead):
    """Cosine classifier with the first rows of a table as weights."""

    def __init__(self, table: Tensor) -> None:
        super().__init__(table.shape[1])
        self.table = table
        self.weight.requires_grad_(False)

    def add_classes(self, classes: int, source: torch.Generator) -> None:
        """Take the next rows of the table."""
        known = len(self.weight)
        if known + classes > len(self.table):
            raise ConfigError(f"{known + classes} classes, but only {len(self.table)} targets; use a wider backbone")
        self.append_weights(self.table[known : known + classes])
        self.weight.requires_grad_(False)


def orthogonal(dim: int, source: torch.Generator) -> Tensor:
    """Draw an orthogonal matrix."""
    return torch.linalg.qr(torch.randn(dim, dim, generator=source))[0]


def sparse(dim: int, source: torch.Generator) -> Tensor:
    """Draw rows of ones and zeros, as many as channels."""
    size = max(1, dim // SHARE)
    rows = torch.zeros(dim, dim)
    for row in rows:
        row[torch.randperm(dim, generator=source)[:size]] = 1.0
    return rows


class OrthogonalLwF(LwF):
    """LwF with orthogonal targets."""

    draw = staticmethod(orthogonal)

    def new_head(self, dim: int) -> GrowingHead:
        """Return a head with targets of the learner's seed."""
        return FixedHead(self.draw(dim, torch.Generator().manual_seed(self.seed)))


class SparseLwF(OrthogonalLwF):
    """LwF with sparse targets of one sign."""

    draw = staticmethod(sparse)


def register() -> None:
    """Make both known to efcil."""
    register_learner("lwf-orthogonal", OrthogonalLwF)
    register_learner("lwf-sparse", SparseLwF)


if __name__ == "__main__":
    register()
    main()
