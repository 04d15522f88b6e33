"""Ridge regression that takes its rows as they come, and the random expansion of features that stands before it.

W = (X'X + ridge I)^-1 X'Y needs only the sums X'X and X'Y, so any split of the rows in any order gives the joint
solution. The published recursion carries R = (X'X + ridge I)^-1 through Woodbury's identity instead; it is the same W
(tests/classifiers/test_frozen_backbone.py), but every step of it rounds, and sums can change their ridge later.

Memory, in float64 for a width of 10,000: the Gram 800 MB for good; while solving its factor, 800 MB (twice that on
CUDA, which factors a copy); while adding, `ROW_BYTES` of expanded rows. Nothing is ever inverted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from efcil.core.linear_algebra import DTYPE, check_finite, pack_symmetric, symmetrize, unpack_symmetric
from efcil.errors import ConfigError, NotPositiveDefiniteError

STRIP = 1024
"""Columns of a strip of the Gram: only its upper part is computed, strip by strip, and mirrored."""

ROW_BYTES = 1 << 28
"""Expanded rows in memory at a time: about 3,300 rows of 10,000 numbers."""

Activation = Callable[[Tensor], Tensor]


class RecursiveRidge:
    """The sums X'X and X'Y of all rows so far, exactly symmetric, and the ridge solution from them.

    >>> sums = RecursiveRidge.empty(2)
    >>> sums.add(torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[1.0]]).double())
    >>> sums.add(torch.tensor([[0.0, 3.0]]).double(), torch.tensor([[1.0]]).double(), first=1)
    >>> sums.solve(ridge=1.0)
    tensor([[0.5000, 0.0000],
            [0.0000, 0.3000]], dtype=torch.float64)
    """

    def __init__(self, gram: Tensor, cross: Tensor):
        self.gram = gram  # (width, width)
        self.cross = cross  # (width, classes)

    @classmethod
    def empty(cls, width: int, device: torch.device | str = "cpu") -> RecursiveRidge:
        """Sums of no row."""
        zeros = torch.zeros(width, width, dtype=DTYPE, device=device)
        return cls(zeros, zeros.new_zeros(width, 0))

    def add(self, rows: Tensor, targets: Tensor, first: int = 0) -> None:
        """Add rows (n, width) with the targets (n, k) of the classes `first` to `first + k`; other targets are zero."""
        width, classes = len(self.gram), first + targets.shape[1]
        if rows.ndim != 2 or rows.shape[1] != width or len(rows) != len(targets):
            raise ConfigError(
                f"rows and targets have shapes {tuple(rows.shape)} and {tuple(targets.shape)}; "
                f"wanted (n, {width}) and (n, classes)"
            )
        if classes > self.cross.shape[1]:
            self.cross = torch.cat([self.cross, self.cross.new_zeros(width, classes - self.cross.shape[1])], 1)
        self.cross[:, first:classes].addmm_(rows.T, targets)
        for start in range(0, width, STRIP):
            stop = start + STRIP
            strip = self.gram[start:stop]
            strip[:, start:].addmm_(rows[:, start:stop].T, rows[:, start:])
            strip[:, start:stop] = symmetrize(strip[:, start:stop])
            self.gram[stop:, start:stop] = strip[:, stop:].T

    def solve(self, ridge: float) -> Tensor:
        """W = (X'X + ridge I)^-1 X'Y, (width, classes), by one Cholesky factor.

        Every squared pivot is at least the ridge in exact arithmetic: one below half of it is rounding, and W would
        mean nothing.
        """
        diagonal = self.gram.diagonal()
        kept = check_finite(diagonal, "the Gram of expanded features").clone()
        check_finite(self.cross, "the sum of expanded features of each class")
        diagonal.add_(ridge)
        try:
            factor, info = torch.linalg.cholesky_ex(self.gram)
        finally:
            diagonal.copy_(kept)  # to the bit, as subtracting would not be
        if int(info) != 0 or bool(factor.diagonal().square().min() < ridge / 2):
            raise NotPositiveDefiniteError(
                f"the Gram of expanded features + {ridge:g} I ({len(kept)} x {len(kept)}) is not positive definite: "
                f"the ridge is lost in rounding beside a diagonal of up to {float(kept.max()):.3g}; raise ridge"
            )
        return torch.cholesky_solve(self.cross, factor).contiguous()  # as it is when it is read from a file

    def state(self) -> dict[str, Tensor]:
        """Tensors to write to a file; of the Gram the upper triangle."""
        return {"gram_packed": pack_symmetric(self.gram), "cross": self.cross}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> RecursiveRidge:
        """Read what `state` wrote, bit for bit."""
        return cls(unpack_symmetric(state["gram_packed"]), state["cross"])


def expansion_matrix(dim: int, width: int, source: torch.Generator) -> Tensor:
    """Draw the fixed random matrix (dim, width), uniform in +-1/sqrt(dim), float64, on the CPU from `source`.

    As in the authors' code, where it is a linear layer with torch's default weights and no bias.

    >>> matrix = expansion_matrix(4, 1000, torch.Generator().manual_seed(0))
    >>> tuple(matrix.shape), bool(matrix.abs().max() < 0.5), bool(matrix.abs().max() > 0.49)
    ((4, 1000), True, True)
    """
    return (torch.rand(dim, width, dtype=DTYPE, generator=source) * 2 - 1) / dim**0.5


class ExpandedRidge:
    """A classifier: activation(features @ expansion) @ weight, with the weight of a recursive ridge regression."""

    def __init__(self, expansion: Tensor, activation: Activation, ridge: float, sums: RecursiveRidge | None = None):
        self.expansion, self.activation, self.ridge = expansion, activation, ridge  # `activation` may work in place
        width = expansion.shape[1]
        self.sums = RecursiveRidge.empty(width, expansion.device) if sums is None else sums
        self.weight = self.sums.cross.new_zeros(width, 0)

    def _expanded(self, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the expanded features (rows, width), as many rows at a time as memory allows."""
        dim, width = self.expansion.shape
        if features.ndim != 2 or features.shape[1] != dim:
            raise ConfigError(f"features have shape {tuple(features.shape)}; wanted (n, {dim}), as in the first task")
        step = max(1, ROW_BYTES // (8 * max(dim, width)))
        for start in range(0, len(features), step):
            part = slice(start, start + step)
            yield part, self.activation(features[part].to(self.expansion) @ self.expansion)

    def learn(self, features: Tensor, targets: Tensor, first: int) -> None:
        """Take up features (n, dim) with targets (n, k) of the classes from `first` on, and solve again."""
        check_finite(features, "features")
        for part, rows in self._expanded(features):
            self.sums.add(rows, targets[part], first)
        self.weight = self.sums.solve(self.ridge)

    def scores(self, features: Tensor, first: int = 0) -> Tensor:
        """Score features (n, dim) for the classes from `first` on."""
        weight = self.weight[:, first:]
        found = [rows @ weight for _, rows in self._expanded(features)]
        return torch.cat(found) if found else weight.new_zeros(0, weight.shape[1])

    def state(self) -> dict[str, Tensor]:
        """Return the sums and the weight; the expansion is a function of the seed."""
        return {**self.sums.state(), "weight": self.weight}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take them up."""
        kept, wanted = state["cross"].shape[0], self.expansion.shape[1]
        if kept != wanted:
            raise ConfigError(f"the saved sums are {kept} wide, not {wanted}: set buffer={kept}")
        self.sums, self.weight = RecursiveRidge.from_state(state), state["weight"]
