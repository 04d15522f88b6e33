"""Storage of class Grams between tasks: as upper triangles, or as factors F with F'F = Gram.

==============  ===================  =====================  ========================================
form            numbers per class    cost of a shift        exact
==============  ===================  =====================  ========================================
`PackedGrams`   dim (dim + 1) / 2    3.25 dim^3             always
`LowRankGrams`  rank * dim           2 rank * dim^2         up to the sample count; else bounded error
==============  ===================  =====================  ========================================

The rows of a factor are sqrt(eigenvalue) * eigenvector of the Gram in descending order. The factor is a function of the
Gram and reveals no more about the images. A factor is stored only if it is smaller than the Gram. In mean-only storage
(`MEANS`) every class has a factor without rows.

A truncated factor starts with the row sqrt(count) * mean, followed by the leading eigenvectors of the scatter about the
mean. Gram and mean thus stay consistent, and the covariance stays positive semidefinite, also after shifts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from efcil.core.linear_algebra import (
    DTYPE,
    EPS,
    check_finite,
    concat_rows,
    empty_rows,
    gram_matrix,
    pack_symmetric,
    packed_congruence,
    packed_diagonal,
    packed_dim,
    symmetrize,
    unpack_symmetric,
)
from efcil.core.projection import RankRule, factor_space, positive_space, row_space
from efcil.errors import ConfigError

Form = Literal["gram", "factors", "mean", "shared"]


@dataclass(frozen=True)
class StorageSpec:
    """Form in which class Grams are stored; `rank` or `tolerance` truncate factors; `mean` stores no Gram.

    Factors have at most `rank` rows, or the fewest rows such that the discarded eigenvalues of the scatter sum to at
    most tolerance * trace(G), which bounds |G - F'F| in the nuclear norm and hence in the Frobenius and spectral norms.
    The row of the mean is always stored.
    `shared` has no Grams either, but one scatter for all classes (`efcil.core.shared_scatter`).

    >>> StorageSpec("gram", rank=3)
    Traceback (most recent call last):
    efcil.errors.ConfigError: storage of form 'gram' takes no rank and no tolerance; use form 'factors'
    """

    form: Form = "gram"
    rank: int | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.form != "factors" and not self.rank is self.tolerance is None:
            raise ConfigError(f"storage of form '{self.form}' takes no rank and no tolerance; use form 'factors'")
        if self.rank is not None and self.tolerance is not None:
            raise ConfigError(f"storage got rank={self.rank} and tolerance={self.tolerance}; give one of them")
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"storage rank is {self.rank}; wanted one or more")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise ConfigError(f"storage tolerance is {self.tolerance}; wanted a share of the trace between 0 and 1")

    @property
    def is_lossy(self) -> bool:
        """Whether stored Grams may differ from the exact ones."""
        return self.rank is not None or self.tolerance is not None


GRAMS = StorageSpec()
MEANS = StorageSpec("mean")
SHARED = StorageSpec("shared")


class PackedGrams:
    """Grams of k classes as upper triangles, (k, dim (dim + 1) / 2).

    >>> PackedGrams(torch.tensor([[1.0, 2.0, 3.0]])).dense().tolist()
    [[[1.0, 2.0], [2.0, 3.0]]]
    """

    __slots__ = ("packed",)

    def __init__(self, packed: Tensor) -> None:
        self.packed = packed.detach().to(DTYPE)

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def dim(self) -> int:
        """Dimension of the features."""
        return packed_dim(self.packed)

    @property
    def numel(self) -> int:
        """Number of stored values."""
        return self.packed.numel()

    @property
    def work(self) -> int:
        """Size of the largest temporary matrix per class during a shift."""
        return self.dim * self.dim

    def dense(self) -> Tensor:
        """Return dense Grams, (k, dim, dim)."""
        return unpack_symmetric(self.packed)

    def add_to(self, total: Tensor, triangle: Tensor) -> None:
        """Add all Grams to the upper triangle `triangle`; one by one on the CPU, so that blocking does not change
        rounding."""
        for packed in self.packed.sum(0, keepdim=True) if triangle.is_cuda else self.packed:
            triangle += packed

    def take(self, which: slice | Tensor) -> PackedGrams:
        """Select classes: a slice gives a view, indices (m,) a copy."""
        return PackedGrams(self.packed[which])

    def transform(self, shift: Tensor) -> PackedGrams:
        """Return P' G P, with one P (dim, dim_new) or one per class, Eq. (16)."""
        return PackedGrams(packed_congruence(self.packed, shift))

    def transform_projected(
        self, mean: Tensor, shift: Tensor, rule: RankRule, tolerance: float | None
    ) -> tuple[PackedGrams, Tensor]:
        """Return U_r U_r' P' G P U_r U_r' and mean U_r U_r', Eq. (7), (16), (17); `mean` (k, dim) is already
        shifted."""
        if rule == "positive" and tolerance is None:
            space = positive_space(packed_diagonal(self.packed))
        else:
            space = row_space(self.dense(), rule, tolerance)
        moved = packed_congruence(self.packed, shift)
        if space is not None:
            moved = pack_symmetric(space.project_gram(unpack_symmetric(moved)))
            mean = space.project_rows(mean[:, None, :])[:, 0]
        return PackedGrams(moved), mean

    def to(self, device: torch.device | str) -> PackedGrams:
        """Return a copy on another device."""
        return PackedGrams(self.packed.to(device))


class LowRankGrams:
    """Grams of k classes as factors: class i has `ranks[i]` of the `rows` (rows, dim), and its Gram is F'F.

    >>> LowRankGrams(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), [1, 1]).dense().tolist()
    [[[1.0, 2.0], [2.0, 4.0]], [[0.0, 0.0], [0.0, 1.0]]]
    """

    __slots__ = ("ends", "ranks", "rows")

    def __init__(self, rows: Tensor, ranks: Iterable[int]) -> None:
        self.rows, self.ranks = rows.detach().to(DTYPE), tuple(ranks)
        self.ends = tuple(itertools.accumulate(self.ranks))
        if rows.ndim != 2 or sum(self.ranks) != len(rows) or min(self.ranks, default=0) < 0:
            raise ConfigError(
                f"factors have rows of shape {tuple(rows.shape)} and ranks that sum to {sum(self.ranks)}; "
                f"wanted (sum of ranks, dim), no rank below zero"
            )

    @classmethod
    def zero(cls, classes: int, means: Tensor) -> LowRankGrams:
        """Return zero Grams for means (..., dim), which take no memory.

        >>> LowRankGrams.zero(3, torch.ones(3, 2)).dense().abs().sum().item()
        0.0
        """
        return cls(means.new_zeros(0, means.shape[-1]), [0] * classes)

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def dim(self) -> int:
        """Dimension of the features."""
        return self.rows.shape[1]

    @property
    def numel(self) -> int:
        """Number of stored values."""
        return self.rows.numel()

    @property
    def work(self) -> int:
        """Size of the largest factor."""
        return max(self.ranks, default=0) * self.dim

    def padded(self) -> Tensor:
        """Return all factors in one tensor (k, largest rank, dim), padded with zero rows."""
        most = max(self.ranks, default=0)
        if min(self.ranks, default=0) == most:
            return self.rows.view(len(self), most, self.dim)
        room = self.rows.new_zeros(len(self), most, self.dim)
        room[self._filled(most)] = self.rows
        return room

    def _filled(self, most: int) -> Tensor:
        """Return a mask (k, most) of the rows of `padded` that belong to a factor."""
        ranks = torch.tensor(self.ranks, device=self.rows.device)
        return torch.arange(most, device=self.rows.device) < ranks[:, None]

    def _unpadded(self, padded: Tensor) -> Tensor:
        """Invert `padded`."""
        return padded[self._filled(padded.shape[1])]

    def dense(self) -> Tensor:
        """Return dense Grams, (k, dim, dim)."""
        padded = self.padded()
        return symmetrize(padded.mT @ padded)

    def add_to(self, total: Tensor, triangle: Tensor) -> None:
        """Add all Grams to `total` (dim, dim); one by one on the CPU, so that blocking does not change rounding."""
        for _, piece in self._pieces():
            total.addmm_(piece.rows.T, piece.rows)

    def _rows_of(self, classes: slice) -> slice:
        """Return the slice of rows of consecutive classes."""
        chosen = range(len(self))[classes]
        return slice(self.ends[chosen[0]] - self.ranks[chosen[0]], self.ends[chosen[-1]]) if chosen else slice(0)

    def take(self, which: slice | Tensor) -> LowRankGrams:
        """Select classes: a slice gives a view, indices (m,) a copy."""
        if isinstance(which, slice):
            return LowRankGrams(self.rows[self._rows_of(which)], self.ranks[which])
        which = which.cpu()
        ranks = torch.tensor(self.ranks, dtype=torch.int64)[which]
        offsets = torch.tensor(self.ends, dtype=torch.int64)[which] - ranks.cumsum(0)  # of rows to their new places
        index = offsets.repeat_interleave(ranks) + torch.arange(int(ranks.sum()))
        return LowRankGrams(self.rows[index.to(self.rows.device)], ranks.tolist())

    def _pieces(self) -> Iterator[tuple[slice, LowRankGrams]]:
        """Yield all classes at once on a GPU and one by one on the CPU, so that blocking does not change rounding."""
        step = max(1, len(self)) if self.rows.is_cuda else 1
        for start in range(0, len(self), step):
            yield slice(start, start + step), self.take(slice(start, start + step))

    def transform(self, shift: Tensor) -> LowRankGrams:
        """Return F P, with one P (dim, dim_new) or one per class; its Gram is P' G P, Eq. (16)."""
        rows = empty_rows(self.rows, len(self.rows), shift.shape[-1])
        for block, piece in self._pieces():
            each = shift if shift.ndim == 2 else shift[block]
            own = piece.rows @ each if shift.ndim == 2 else piece._unpadded(piece.padded() @ each)
            rows[self._rows_of(block)] = own
        return LowRankGrams(rows, self.ranks)

    def transform_projected(
        self, mean: Tensor, shift: Tensor, rule: RankRule, tolerance: float | None
    ) -> tuple[LowRankGrams, Tensor]:
        """Return F P U_r U_r' and mean U_r U_r', Eq. (7), (16), (17); `mean` (k, dim) is already shifted."""
        rows, mean = empty_rows(self.rows, *self.rows.shape), mean.clone()
        for block, piece in self._pieces():
            moved, center = piece.transform(shift), mean[block]
            space = factor_space(piece.padded(), rule, tolerance)
            if space is not None:
                moved = LowRankGrams(moved._unpadded(space.project_rows(moved.padded())), moved.ranks)
                center = space.project_rows(center[:, None, :])[:, 0]
            rows[self._rows_of(block)], mean[block] = moved.rows, center
        return LowRankGrams(rows, self.ranks), mean

    def to(self, device: torch.device | str) -> LowRankGrams:
        """Return a copy on another device."""
        return LowRankGrams(self.rows.to(device), self.ranks)


GramBlock = PackedGrams | LowRankGrams


def coalesce(parts: Sequence[GramBlock]) -> list[GramBlock]:
    """Concatenate adjacent parts of the same form; single parts are not copied.

    >>> [len(part) for part in coalesce([PackedGrams(torch.ones(1, 3)), PackedGrams(torch.ones(2, 3))])]
    [3]
    """
    merged: list[GramBlock] = []
    runs: list[list[GramBlock]] = []
    for part in parts:
        if runs and type(runs[-1][0]) is type(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    for run in runs:
        grams = [part.packed for part in run if isinstance(part, PackedGrams)]
        factors = [part for part in run if isinstance(part, LowRankGrams)]
        if len(run) == 1:
            merged.append(run[0])
        elif grams:
            merged.append(PackedGrams(concat_rows(grams)))
        else:
            merged.append(LowRankGrams(concat_rows([p.rows for p in factors]), [r for p in factors for r in p.ranks]))
    return merged


# --- from features and Grams ------------------------------------------------------------------------------------------


def compress(features: Tensor, storage: StorageSpec = GRAMS) -> GramBlock:
    """Store one class of features (n, dim) in float64: as a Gram, or as a factor if that is smaller.

    Rows of factors may be passed only to lossless storage, as their mean is not that of the class.

    >>> type(compress(torch.ones(2, 4).double(), StorageSpec("factors"))).__name__
    'LowRankGrams'
    >>> type(compress(torch.eye(4).double(), StorageSpec("factors"))).__name__
    'PackedGrams'
    """
    count, dim = features.shape
    if storage.form in ("mean", "shared"):
        return LowRankGrams.zero(1, features)
    certain = storage.form == "gram" or (2 * min(count, dim) > dim and not storage.is_lossy)
    if certain:
        return compress_gram(gram_matrix(features))
    if not storage.is_lossy:
        return _factored(features, storage)
    mean = features.mean(0)
    return _factored(features - mean, storage, count**0.5 * mean)


def compress_sum(one: GramBlock, other: GramBlock, centers: Tensor, counts: Tensor, storage: StorageSpec) -> GramBlock:
    """Store the truncated sum of two Grams of one class; `centers` (2, dim) are sqrt(count) * mean of either side.

    The first rows of two truncated factors are rotated into sqrt(count) * mean of the union and the difference of the
    two means, so that no Gram has to be computed.

    >>> one, other = (LowRankGrams(torch.tensor([[x, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]), [2]) for x in (1.0, 3.0))
    >>> centers, counts = torch.stack([one.rows[0], other.rows[0]]), torch.tensor([1, 1])
    >>> compress_sum(one, other, centers, counts, StorageSpec("factors", rank=1)).dense()[0, 0, 0]
    tensor(8.0000, dtype=torch.float64)
    """
    share = (counts.to(DTYPE) / counts.sum().clamp_min(1)).sqrt()
    center = share @ centers
    spread = [
        part.rows[1:]
        for part, own in zip((one, other), centers, strict=True)
        if isinstance(part, LowRankGrams) and len(part.rows) and torch.allclose(part.rows[0], own, rtol=1e-9, atol=0.0)
    ]
    if len(spread) == 2:
        apart = share[1] * centers[0] - share[0] * centers[1]
        return _factored(torch.cat([apart[None], *spread]), storage, center)
    return compress_gram(one.dense()[0] + other.dense()[0], storage, center)


def _factored(spread: Tensor, storage: StorageSpec, center: Tensor | None = None) -> GramBlock:
    """Store the Gram of rows (n, dim) and `center`, as a factor if that is smaller."""
    count, dim = spread.shape
    if count <= dim:
        values, vectors = torch.linalg.eigh(symmetrize(spread @ spread.T))
        rows = _cut(vectors.T @ spread, values, storage, center)
        if 2 * len(rows) <= dim:
            return LowRankGrams(rows, [len(rows)])
    gram = gram_matrix(spread)
    if center is not None:
        gram = gram + center[:, None] * center
    return compress_gram(gram, GRAMS if count <= dim else storage, center)


def compress_gram(gram: Tensor, storage: StorageSpec = GRAMS, center: Tensor | None = None) -> GramBlock:
    """Store one Gram (dim, dim), as a factor if that is smaller; truncation keeps sqrt(count) * mean.

    >>> gram, center = torch.diag(torch.tensor([4.0, 9.0, 1.0, 0.0])), torch.tensor([0.0, 0.0, 1.0, 0.0])
    >>> compress_gram(gram, StorageSpec("factors", rank=2), center).dense()[0].diag()
    tensor([0., 9., 1., 0.], dtype=torch.float64)
    """
    gram = gram.to(DTYPE)
    if storage.form == "factors":
        spread = gram if center is None else gram - center[:, None] * center
        values, vectors = torch.linalg.eigh(check_finite(spread, "gram"))
        rows = _cut(vectors.T * values.clamp_min(0.0).sqrt()[:, None], values, storage, center)
        if 2 * len(rows) <= len(gram):
            return LowRankGrams(rows, [len(rows)])
    return PackedGrams(pack_symmetric(gram)[None])


def _cut(rows: Tensor, values: Tensor, storage: StorageSpec, center: Tensor | None) -> Tensor:
    """Select the rows of a factor, in descending order, from rows with ascending eigenvalues.

    Rows with eigenvalues up to dim * eps of the largest are dropped. The largest entry of each row is made positive, so
    that the factor is a function of the Gram.
    """
    rows, values = rows.flip(0), values.flip(0).clamp_min(0.0)
    first = rows.new_zeros(0, rows.shape[1]) if center is None else center.to(rows)[None]
    moment = first.square().sum()  # its contribution to the trace
    rank = int((values > rows.shape[1] * EPS * torch.maximum(values[:1], moment)).sum())
    if storage.rank is not None:
        rank = min(rank, storage.rank - len(first))
    if storage.tolerance is not None:
        left_out = values.flip(0).cumsum(0).flip(0)  # if the rows from here on are dropped
        rank = min(rank, int((left_out > storage.tolerance * (values.sum() + moment)).sum()))
    rows = rows[:rank]
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return torch.cat([first, rows * torch.where(largest < 0, -1.0, 1.0)])
