"""Incremental ridge regression and the random feature expansion in front of it.

W = (X'X + ridge I)^-1 X'Y needs only the sums X'X and X'Y, so any split of the rows in any order gives the joint
solution. The published recursion carries R = (X'X + ridge I)^-1 through Woodbury's identity instead; it is the same W
(tests/classifiers/test_frozen_backbone.py), but every step of it rounds, and sums can change their ridge later.

Memory in float64 at a width of 10,000: 800 MB for the Gram, another 800 MB for its factor while solving (twice that on
CUDA, which factors a copy), and `ROW_BYTES` of expanded rows while adding. No matrix is inverted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from efcil.core.linear_algebra import DTYPE, check_finite, pack_symmetric, symmetrize, unpack_symmetric
from efcil.errors import ConfigError, NotPositiveDefiniteError

STRIP = 1024
"""Strip width of the Gram: only its upper part is computed, strip by strip, and mirrored."""

ROW_BYTES = 1 << 28
"""Size in bytes of expanded rows in memory at a time: about 3,300 rows of 10,000 numbers."""

Activation = Callable[[Tensor], Tensor]


class RecursiveRidge:
    """Running sums X'X (exactly symmetric) and X'Y, and the ridge solution from them.

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
        """Return the sums of zero rows."""
        zeros = torch.zeros(width, width, dtype=DTYPE, device=device)
        return cls(zeros, zeros.new_zeros(width, 0))

    def add(self, rows: Tensor, targets: Tensor, first: int = 0) -> None:
        """Add rows (n, width) with targets (n, k) of classes `first` to `first + k`; other targets are zero."""
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

        In exact arithmetic every squared pivot is at least the ridge. A pivot below half of it is dominated by
        rounding, and W would be meaningless.
        """
        diagonal = self.gram.diagonal()
        original = check_finite(diagonal, "the Gram of expanded features").clone()
        check_finite(self.cross, "the sum of expanded features of each class")
        diagonal.add_(ridge)
        try:
            factor, info = torch.linalg.cholesky_ex(self.gram)
        finally:
            diagonal.copy_(original)  # exact, which subtracting would not be
        if int(info) != 0 or bool(factor.diagonal().square().min() < ridge / 2):
            raise NotPositiveDefiniteError(
                f"the Gram of expanded features + {ridge:g} I ({len(original)} x {len(original)}) is not positive "
                f"definite: the ridge is below rounding error for a diagonal of up to "
                f"{float(original.max()):.3g}; raise ridge"
            )
        return torch.cholesky_solve(self.cross, factor).contiguous()  # the layout of a loaded weight

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save, with the upper triangle of the Gram."""
        return {"gram_packed": pack_symmetric(self.gram), "cross": self.cross}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> RecursiveRidge:
        """Restore the result of `state`, bit for bit."""
        return cls(unpack_symmetric(state["gram_packed"]), state["cross"])


def expansion_matrix(dim: int, width: int, source: torch.Generator) -> Tensor:
    """Draw the random matrix (dim, width), uniform in +-1/sqrt(dim), in float64 on the CPU from `source`.

    It is the default initialization of a linear layer without bias, as in the released code.

    >>> matrix = expansion_matrix(4, 1000, torch.Generator().manual_seed(0))
    >>> tuple(matrix.shape), bool(matrix.abs().max() < 0.5), bool(matrix.abs().max() > 0.49)
    ((4, 1000), True, True)
    """
    return (torch.rand(dim, width, dtype=DTYPE, generator=source) * 2 - 1) / dim**0.5


class ExpandedRidge:
    """A classifier: activation(features @ expansion) @ weight, with the weight of a recursive ridge regression."""

    def __init__(self, expansion: Tensor, activation: Activation, ridge: float, sums: RecursiveRidge | None = None):
        self.expansion, self.activation, self.ridge = expansion, activation, ridge  # `activation` may be in-place
        width = expansion.shape[1]
        self.sums = RecursiveRidge.empty(width, expansion.device) if sums is None else sums
        self.weight = self.sums.cross.new_zeros(width, 0)

    def _expanded(self, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield expanded features (rows, width) in chunks of `ROW_BYTES`."""
        dim, width = self.expansion.shape
        if features.ndim != 2 or features.shape[1] != dim:
            raise ConfigError(f"features have shape {tuple(features.shape)}; wanted (n, {dim}), as in the first task")
        step = max(1, ROW_BYTES // (8 * max(dim, width)))
        for start in range(0, len(features), step):
            part = slice(start, start + step)
            yield part, self.activation(features[part].to(self.expansion) @ self.expansion)

    def learn(self, features: Tensor, targets: Tensor, first: int) -> None:
        """Add features (n, dim) with targets (n, k) for the classes from `first` on, and solve again."""
        check_finite(features, "features")
        for part, rows in self._expanded(features):
            self.sums.add(rows, targets[part], first)
        self.weight = self.sums.solve(self.ridge)

    def scores(self, features: Tensor, first: int = 0) -> Tensor:
        """Score features (n, dim) for the classes from `first` on."""
        weight = self.weight[:, first:]
        logits = [rows @ weight for _, rows in self._expanded(features)]
        return torch.cat(logits) if logits else weight.new_zeros(0, weight.shape[1])

    def state(self) -> dict[str, Tensor]:
        """Return the sums and the weight to save; the expansion is a function of the seed."""
        return {**self.sums.state(), "weight": self.weight}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`."""
        kept, wanted = state["cross"].shape[0], self.expansion.shape[1]
        if kept != wanted:
            raise ConfigError(f"the saved sums have width {kept}, not {wanted}; set buffer={kept}")
        self.sums, self.weight = RecursiveRidge.from_state(state), state["weight"]
