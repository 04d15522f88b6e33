"""Linear algebra for the closed forms: checks, Cholesky with typed errors, packed symmetric matrices."""

from __future__ import annotations

import functools
import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from efcil.errors import ConfigError, NotFiniteError, NotPositiveDefiniteError

DTYPE = torch.float64
EPS = torch.finfo(DTYPE).eps
CHOLESKY_MARGIN = 4.0
"""Safety factor of Cholesky tests on the smallest eigenvalue. The backward error of the factorization is below one dim
* eps * max, so a matrix that passes the test with four times the floor exceeds the floor."""
NOISE_RIDGE = 1e-8
"""Ridge for sampling, relative to trace / dim: a ten-thousandth of the typical standard deviation, and for up to 6,700
dimensions more than dim * eps of the trace, the rounding error of an eigenvalue."""
ROWS_AT_ONCE = 1 << 14
"""Rows converted to float64 at a time: 67 MB at 512 dimensions."""
OWN_PAGES_FROM = 1 << 22
"""Minimum size in bytes of a class-statistics buffer that is mapped separately and returned to the system when freed;
in the heap, such buffers cause fragmentation of half their total size."""
HUGE_FROM = 1 << 26
"""Minimum size in bytes of a mapping with huge pages: 64 classes of 512 dimensions."""
SYMMETRIC_STRIPS = 4
"""Number of strips when only the upper part of a symmetric product is computed: s strips cost (s + 1) / 2s of it."""
STRIPS_FROM = 1024
"""Minimum dimension from which X'X is computed in strips on the CPU: below, one product takes no longer."""


def check_finite(matrix: Tensor, name: str) -> Tensor:
    """Return `matrix`, or raise `NotFiniteError` if it contains NaN or infinity.

    >>> check_finite(torch.tensor([1.0, float("nan")]), "features")
    Traceback (most recent call last):
    efcil.errors.NotFiniteError: features holds 1 NaN and 0 infinite of 2 values; ...
    """
    if not bool(torch.isfinite(matrix).all()):
        nan, infinite = int(torch.isnan(matrix).sum()), int(torch.isinf(matrix).sum())
        raise NotFiniteError(
            f"{name} holds {nan} NaN and {infinite} infinite of {matrix.numel()} values; the backbone diverged or an "
            f"input was not finite: lower the learning rate, use bf16 or float32 rather than fp16, check the images"
        )
    return matrix


def _check_square(matrix: Tensor, name: str) -> None:
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ConfigError(f"{name} has shape {tuple(matrix.shape)}; wanted (..., dim, dim)")


def _check_ridge(ridge: float) -> None:
    if not (math.isfinite(ridge) and ridge >= 0):
        raise ConfigError(f"ridge is {ridge}; wanted a finite number, zero or more")


def cholesky(matrix: Tensor, name: str = "the matrix", remedy: str = "add a ridge", floor: float = 0.0) -> Tensor:
    """Factor A = L L' into lower triangular L, (..., dim, dim) -> (..., dim, dim), in float64.

    NaN and infinity raise `NotFiniteError`. A numerically singular matrix raises `NotPositiveDefiniteError` with the
    `remedy`, because its factorization may succeed but is meaningless: the smallest eigenvalue must exceed
    CHOLESKY_MARGIN * dim * eps of the norm after the diagonal is scaled to one, which removes the units of the
    channels. The test takes a second factorization. It is skipped if `floor`, a known lower bound of the eigenvalues
    (such as a ridge on a covariance), suffices: after scaling, no eigenvalue is below floor / max A_ii and the norm is
    at most dim.

    >>> cholesky(torch.tensor([[4.0, 2.0], [2.0, 2.0]]))
    tensor([[2., 0.],
            [1., 1.]], dtype=torch.float64)
    >>> cholesky(torch.ones(2, 2), "the sum of Grams", "use ridge > 0")
    Traceback (most recent call last):
    efcil.errors.NotPositiveDefiniteError: the sum of Grams (2 x 2) is not positive definite: ...; use ridge > 0
    """
    _check_square(matrix, name)
    matrix = check_finite(matrix.to(DTYPE), name)
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(matrix)
    bad, dim = info != 0, matrix.shape[-1]
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).abs()
    if not (floor > 0 and floor > CHOLESKY_MARGIN * dim**2 * EPS * float(diagonal.max())):
        scale = diagonal.clamp_min(torch.finfo(DTYPE).tiny).rsqrt()
        scaled = matrix * scale[..., :, None] * scale[..., None, :]
        bad = (info != 0) | ~_min_eigenvalue_exceeds(scaled, dim * EPS * torch.linalg.matrix_norm(scaled))
    if bool(bad.any()):
        where = "" if matrix.ndim == 2 else f" number {int(bad.reshape(-1).nonzero()[0, 0])}"
        raise NotPositiveDefiniteError(
            f"{name}{where} ({dim} x {dim}) is not positive definite: "
            f"its smallest eigenvalue is negative, zero or lost in rounding; {remedy}"
        )
    return factor


def _min_eigenvalue_exceeds(gram: Tensor, floor: Tensor) -> Tensor:
    """Return whether every eigenvalue of a Gram exceeds `floor` (...,): Cholesky of G - CHOLESKY_MARGIN floor I exists.

    It costs dim^3 / 3 operations; an eigendecomposition costs about 10 dim^3.
    """
    shifted = gram.clone()
    shifted.diagonal(dim1=-2, dim2=-1).sub_(CHOLESKY_MARGIN * floor[..., None])
    info: Tensor = torch.linalg.cholesky_ex(shifted)[1]
    return (info == 0) & (floor > 0)


def covariance_root(covariance: Tensor) -> Tensor:
    """Return lower triangular L (dim, dim) for sampling: if rows E are standard normal, E L' has covariance S.

    L L' = S + NOISE_RIDGE tr(S) / dim I, so S may be singular (dead channels, fewer images than dimensions) or zero. It
    costs dim^3 / 3 operations, where eigenvectors cost about 10 dim^3, and L has no sign ambiguity.

    >>> covariance_root(torch.tensor([[4.0, 2.0], [2.0, 1.0]])).round(decimals=3)  # of rank one
    tensor([[2., 0.],
            [1., 0.]], dtype=torch.float64)
    """
    _check_square(covariance, "covariance")
    ridged = check_finite(covariance, "the covariance to draw from").to(DTYPE, copy=True)
    ridged.diagonal().add_(max(relative_ridge(ridged, NOISE_RIDGE), torch.finfo(DTYPE).tiny))
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(ridged)
    if int(info):
        raise NotPositiveDefiniteError(
            f"the covariance to draw from ({len(ridged)} x {len(ridged)}) has a negative eigenvalue beyond rounding; "
            "give the covariance of features"
        )
    return factor


def relative_ridge(gram: Tensor, factor: float) -> float:
    """Return the ridge factor * trace(X'X) / dim, which scales with the size and number of features.

    >>> relative_ridge(torch.diag(torch.tensor([1.0, 3.0])), 0.1)
    0.2
    """
    _check_square(gram, "gram")
    return factor * float(gram.diagonal().sum(dtype=DTYPE)) / gram.shape[-1]


def symmetrize(matrix: Tensor) -> Tensor:
    """Return (A + A') / 2, (..., dim, dim), to remove the asymmetry of rounding from a symmetric product.

    >>> symmetrize(torch.tensor([[1.0, 2.0], [4.0, 1.0]])).tolist()
    [[1.0, 3.0], [3.0, 1.0]]
    """
    return (matrix + matrix.mT).mul_(0.5)


def gram_matrix(rows: Tensor) -> Tensor:
    """Return X'X, (n, dim) -> (dim, dim), exactly symmetric.

    >>> gram_matrix(torch.tensor([[1.0, 2.0], [0.0, 1.0]])).tolist()
    [[1.0, 2.0], [2.0, 5.0]]
    """
    dim = rows.shape[1]
    if rows.is_cuda or dim < STRIPS_FROM:
        return symmetrize(rows.T @ rows)
    product = rows.new_empty(dim, dim)
    step = -(-dim // SYMMETRIC_STRIPS)
    for start in range(0, dim, step):
        strip = slice(start, start + step)
        torch.mm(rows[:, strip].T, rows[:, start:], out=product[strip, start:])
        product[strip, strip] = symmetrize(product[strip, strip])
        product[start + step :, strip] = product[strip, start + step :].T
    return product


def empty_rows(like: Tensor, rows: int, numbers: int) -> Tensor:
    """Allocate (rows, numbers) for class statistics; large buffers on the CPU are mapped, on Linux with huge pages.

    >>> empty_rows(torch.zeros(1), 2, 3).shape
    torch.Size([2, 3])
    """
    size = rows * numbers * like.element_size()
    if like.device.type != "cpu" or size < OWN_PAGES_FROM:
        return like.new_empty(rows, numbers)
    pages = mmap.mmap(-1, size)
    if size >= HUGE_FROM and sys.platform == "linux":
        pages.madvise(mmap.MADV_HUGEPAGE)  # a hint only
    return torch.frombuffer(pages, dtype=like.dtype).view(rows, numbers)


def concat_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors (rows, numbers) in a buffer of `empty_rows`.

    >>> concat_rows([torch.ones(1, 2), torch.zeros(1, 2)]).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    return torch.cat(list(parts), out=empty_rows(parts[0], sum(map(len, parts)), parts[0].shape[1]))


def empty_grams(like: Tensor, classes: int, dim: int) -> Tensor:
    """Allocate the upper triangles of Grams, (classes, dim (dim + 1) / 2).

    >>> empty_grams(torch.zeros(1), 2, 3).shape
    torch.Size([2, 6])
    """
    return empty_rows(like, classes, dim * (dim + 1) // 2)


def congruence(gram: Tensor, shift: Tensor) -> Tensor:
    """Return P' G P of Eq. (16), exactly symmetric: `gram` (k, dim, dim), `shift` (dim, dim_new) or (k, dim, dim_new).

    It takes two batched products on a GPU, and `packed_congruence` on the CPU.

    >>> congruence(torch.eye(2)[None].double(), torch.tensor([[1.0, 1.0], [0.0, 1.0]]).double()).tolist()
    [[[1.0, 1.0], [1.0, 2.0]]]
    """
    if not gram.is_cuda:
        return unpack_symmetric(packed_congruence(pack_symmetric(gram), shift))
    dim, width = gram.shape[-1], shift.shape[-1]
    half = (gram.reshape(-1, dim) @ shift).view(-1, dim, width) if shift.ndim == 2 else gram @ shift
    return symmetrize(shift.mT @ half)


def packed_congruence(packed: Tensor, shift: Tensor) -> Tensor:
    """P' G P of Eq. (16) on upper triangles: (k, dim (dim + 1) / 2) -> (k, dim_new (dim_new + 1) / 2).

    On the CPU, classes are processed one at a time so that the four matrices stay in the cache, and only the upper part
    of the second product is computed, in strips: 3.25 dim^3 operations per class instead of 4.

    >>> packed_congruence(torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]])).tolist()
    [[1.0, 1.0, 2.0]]
    """
    if packed.is_cuda:
        return pack_symmetric(congruence(unpack_symmetric(packed), shift))
    dim, width = shift.shape[-2:]
    out = empty_grams(packed, len(packed), width)
    gram, half, product = (packed.new_empty(*shape) for shape in ((dim, dim), (dim, width), (width, width)))
    step = max(1, -(-width // SYMMETRIC_STRIPS))
    for index in range(len(packed)):
        right = shift if shift.ndim == 2 else shift[index]
        torch.index_select(packed[index], 0, _spread(dim, packed.device), out=gram.view(-1))
        torch.mm(gram, right, out=half)
        for start in range(0, width, step):
            torch.mm(right[:, start : start + step].T, half[:, start:], out=product[start : start + step, start:])
        torch.index_select(product.view(-1), 0, _upper(width, packed.device), out=out[index])
    return out


@functools.lru_cache(maxsize=4)
def _upper(dim: int, device: torch.device) -> Tensor:
    """Return indices of the upper triangle in a flat matrix (dim * dim), row by row."""
    row, column = torch.triu_indices(dim, dim, device=device)
    return row * dim + column


@functools.lru_cache(maxsize=4)
def _spread(dim: int, device: torch.device) -> Tensor:
    """Return the index in the upper triangle of each entry of a flat symmetric matrix."""
    place = torch.empty(dim, dim, dtype=torch.int64, device=device)
    row, column = torch.triu_indices(dim, dim, device=device)
    place[row, column] = place[column, row] = torch.arange(len(row), device=device)
    return place.view(-1)


def packed_diagonal(packed: Tensor) -> Tensor:
    """Return the diagonals of packed symmetric matrices: (..., dim (dim + 1) / 2) -> (..., dim).

    >>> packed_diagonal(torch.tensor([1.0, 2.0, 3.0])).tolist()
    [1.0, 3.0]
    """
    dim = packed_dim(packed)
    row = torch.arange(dim, device=packed.device)
    return packed[..., row * dim - row * (row - 1) // 2]


def packed_dim(packed: Tensor) -> int:
    """Return dim of packed matrices (..., dim (dim + 1) / 2).

    >>> packed_dim(torch.zeros(5, 6))
    3
    """
    dim = (math.isqrt(8 * packed.shape[-1] + 1) - 1) // 2
    if dim * (dim + 1) // 2 != packed.shape[-1]:
        raise ConfigError(f"packed has {packed.shape[-1]} numbers per matrix; wanted dim (dim + 1) / 2 of them")
    return dim


def pack_symmetric(matrix: Tensor) -> Tensor:
    """Return the upper triangles of symmetric matrices, row by row: (..., dim, dim) -> (..., dim (dim + 1) / 2).

    >>> pack_symmetric(torch.tensor([[1.0, 2.0], [2.0, 3.0]])).tolist()
    [1.0, 2.0, 3.0]
    """
    _check_square(matrix, "matrix")
    return matrix.flatten(-2).index_select(-1, _upper(matrix.shape[-1], matrix.device))


def unpack_symmetric(packed: Tensor) -> Tensor:
    """Undo `pack_symmetric`, bit for bit: (..., dim (dim + 1) / 2) -> (..., dim, dim).

    >>> unpack_symmetric(torch.tensor([1.0, 2.0, 3.0])).tolist()
    [[1.0, 2.0], [2.0, 3.0]]
    """
    dim = packed_dim(packed)
    return packed.index_select(-1, _spread(dim, packed.device)).unflatten(-1, (dim, dim))
