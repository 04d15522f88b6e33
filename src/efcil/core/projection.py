"""Semantic shift estimation: task-wise (TSSP, Eq. 3-5) and category-wise (CIP, Eq. 6, 7, 9, 10) projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from efcil.core.linear_algebra import (
    CHOLESKY_MARGIN,
    DTYPE,
    EPS,
    ROWS_AT_ONCE,
    _check_ridge,
    _check_square,
    _min_eigenvalue_exceeds,
    check_finite,
    relative_ridge,
    symmetrize,
)
from efcil.errors import ConfigError, nearest

SHIFT_RIDGE = 1e-9
"""epsilon of Eq. (5)."""
STRONG_RIDGE = 1e-6
"""Minimum ridge, relative to the norm of X'X, for an accurate Cholesky solve (1e-10) of a singular X'X."""
SMALL_NULL_SPACE = 32
"""Largest null space found by inverse iteration (500 images in 512 dimensions: 12) instead of eigendecomposition."""
INVERSE_ITERATIONS = 3
"""Steps of inverse iteration; classes that have not converged by then are decomposed."""
RankRule = Literal["positive", "numerical", "tolerance", "energy", "none"]
Target = Literal["zero", "identity"]


def feature_products(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return X'X (dim, dim) and X'Y (dim, dim_new) of Eq. (5) for a batch of features X (n, dim), Y (n, dim_new).

    The products add over batches, so features need not be in memory at once.

    >>> gram, cross = feature_products(torch.eye(2), torch.tensor([[0.0, 3.0], [3.0, 0.0]]))
    >>> gram.tolist(), cross.tolist()
    ([[1.0, 0.0], [0.0, 1.0]], [[0.0, 3.0], [3.0, 0.0]])
    """
    if old.ndim != 2 or new.ndim != 2 or len(old) != len(new):
        raise ConfigError(
            f"old and new features have shapes {tuple(old.shape)} and {tuple(new.shape)}; "
            f"wanted (n, dim) and (n, dim_new) of the same n images"
        )
    gram = old.new_zeros(old.shape[1], old.shape[1], dtype=DTYPE)
    cross = old.new_zeros(old.shape[1], new.shape[1], dtype=DTYPE)
    for start in range(0, len(old), ROWS_AT_ONCE):
        x = old[start : start + ROWS_AT_ONCE].to(DTYPE)
        y = new[start : start + ROWS_AT_ONCE].to(DTYPE)
        gram.addmm_(x.T, x)
        cross.addmm_(x.T, y)
    return symmetrize(gram), cross


def task_shift(old: Tensor, new: Tensor, ridge: float = SHIFT_RIDGE, towards: Target = "zero") -> Tensor:
    """Estimate the shift of features P = (X'X + ridge I)^-1 X'Y, Eq. (3) to (5), so that new is about old @ P.

    `old` X (n, dim) and `new` Y (n, dim_new) are features of the same images before and after the task; P is (dim,
    dim_new). See `task_shift_from_gram` for small tasks, dead channels and `towards`.

    >>> old = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> task_shift(old, old @ torch.tensor([[0.0, 1.0], [1.0, 0.0]])).round(decimals=6)
    tensor([[0., 1.],
            [1., 0.]], dtype=torch.float64)
    """
    if len(old) == 0:
        raise ConfigError("task_shift got no images: old and new have 0 rows; pass features of the new task")
    gram, cross = feature_products(old, new)
    return task_shift_from_gram(gram, cross, ridge, towards)


def task_shift_from_gram(gram: Tensor, cross: Tensor, ridge: float = SHIFT_RIDGE, towards: Target = "zero") -> Tensor:
    """Solve Eq. (5) from the products `gram` X'X (dim, dim) and `cross` X'Y (dim, dim_new) of `feature_products`.

    - ``towards="zero"``: P = (X'X + r I)^-1 X'Y, as in the paper.
    - ``towards="identity"``: P = (X'X + r I)^-1 (X'Y + r I): directions without data are left unchanged. Much more
      accurate for few images (n < 4 dim); take r from `relative_ridge`.

    X'X of real features has a condition number of 1e4 to 1e5, which gives an error of about 1e-11 in float64; in
    float32, adding 1e-9 to the diagonal has no effect. If every eigenvalue of X'X exceeds dim * eps * max, or r is at
    least STRONG_RIDGE of the norm, one Cholesky solve suffices. Otherwise (fewer images than dimensions, dead channels)
    eigenvalues up to dim * eps * max are rounding errors, which r = 1e-9 would amplify, and are treated as zero: their
    directions map to 0 under "zero", so P is the minimum-norm solution X^+ Y for r -> 0 as in the paper, and stay
    unchanged under "identity".

    >>> task_shift_from_gram(torch.diag(torch.tensor([4.0, 0.0])), torch.diag(torch.tensor([2.0, 0.0])))
    tensor([[0.5000, 0.0000],
            [0.0000, 0.0000]], dtype=torch.float64)
    >>> task_shift_from_gram(torch.diag(torch.tensor([4.0, 0.0])), torch.zeros(2, 2), ridge=4.0, towards="identity")
    tensor([[0.5000, 0.0000],
            [0.0000, 1.0000]], dtype=torch.float64)
    """
    _check_ridge(ridge)
    _check_square(gram, "gram")
    if towards not in get_args(Target):
        raise ConfigError(f"towards is '{towards}': {nearest(towards, get_args(Target))}")
    dim = gram.shape[-1]
    if cross.shape[0] != dim or (towards == "identity" and cross.shape[1] != dim):
        wanted = f"({dim}, {dim})" if towards == "identity" else f"({dim}, dim_new)"
        raise ConfigError(f"cross has shape {tuple(cross.shape)}; wanted {wanted} beside a gram of {tuple(gram.shape)}")
    gram = check_finite(gram.to(DTYPE), "X'X of the old features")
    cross = check_finite(cross.to(DTYPE), "X'Y of the old and new features")
    ridged = gram.clone()
    ridged.diagonal().add_(ridge)
    if towards == "identity":
        cross = cross.clone()
        cross.diagonal().add_(ridge)
    norm = torch.linalg.matrix_norm(gram)
    if ridge >= STRONG_RIDGE * float(norm) > 0 or bool(_min_eigenvalue_exceeds(gram, dim * EPS * norm)):
        return torch.cholesky_solve(cross, torch.linalg.cholesky_ex(ridged)[0])
    values, vectors = torch.linalg.eigh(gram)
    shown = values > dim * EPS * values[-1]
    seen, unseen = vectors[:, shown], vectors[:, ~shown]
    shift: Tensor = seen @ ((seen.T @ cross) / (values[shown] + ridge)[:, None])
    return shift + unseen @ unseen.T if towards == "identity" else shift


def cross_validated_ridge(gram: Tensor, cross: Tensor, squares: float, images: int) -> float:
    """Choose the ridge of `task_shift_from_gram` towards the identity by generalized cross-validation.

    With the drift D = Y - X and the hat matrix H(r) = X (X'X + r I)^-1 X', it minimizes

        |(I - H) D|^2 / n  /  (tr(I - H) / n)^2

    (Golub, Heath and Wahba, Technometrics 1979): the residual corrected for degrees of freedom, an estimate of the
    leave-one-out error. No labels are used. It is computed from `gram` X'X, `cross` X'Y, `squares` |D|^2 and `images` n
    with one eigendecomposition: with eigenvalues l and s = r / (l + r), |(I - H) D|^2 is the part of D outside the
    column space of X plus sum s^2 |v'X'D|^2 / l, and tr(I - H) is n - dim + sum s. Ridges from 1e-6 to 100 times trace
    / dim are compared, 20 per decade.

    >>> x = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    >>> drift = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])  # independent of x
    >>> cross_validated_ridge(*feature_products(x, x + drift), squares=4.0, images=4)
    400.0
    """
    _check_square(gram, "gram")
    if cross.shape != gram.shape:
        raise ConfigError(f"cross has shape {tuple(cross.shape)}; wanted that of gram, {tuple(gram.shape)}")
    if images < 1:
        raise ConfigError(f"images is {images}; wanted one or more")
    gram, cross = gram.to(DTYPE), cross.to(DTYPE)
    values, vectors = torch.linalg.eigh(check_finite(gram, "X'X of the old features"))
    shown = values > gram.shape[-1] * EPS * values[-1]
    values, vectors = values[shown], vectors[:, shown]
    moved = (vectors.T @ (cross - gram)).square().sum(1) / values  # |D|^2 along each left singular vector of X
    outside = max(squares - float(moved.sum()), 0.0)
    ridges = relative_ridge(gram, 1.0) * torch.logspace(-6, 2, 161, dtype=DTYPE, device=gram.device)
    shrinkage = ridges[:, None] / (values + ridges[:, None])
    error = (outside + shrinkage.square() @ moved) / (images - len(values) + shrinkage.sum(1)).square()
    return float(ridges[int(error.argmin())])


@dataclass(frozen=True, eq=False)
class RowSpace:
    """Row spaces of k classes: projectors U_r U_r' (k, dim, dim) stored in the cheaper of two forms.

    With `keep` (k, dim), ones and zeros, the projector is diagonal. With `basis` B (k, dim, m), orthonormal columns
    padded with zero columns where ranks differ, it is B B', or I - B B' if `complement`.

    >>> space = RowSpace(keep=torch.tensor([[1.0, 0.0]]))
    >>> space.projector().tolist(), space.project_rows(torch.ones(1, 2)).tolist()
    ([[[1.0, 0.0], [0.0, 0.0]]], [[[1.0, 0.0]]])
    """

    keep: Tensor | None = None
    basis: Tensor | None = None
    complement: bool = False

    def projector(self) -> Tensor:
        """Return U_r U_r' as a matrix, (k, dim, dim), exactly symmetric."""
        if self.basis is None:
            assert self.keep is not None
            return torch.diag_embed(self.keep)
        inner = symmetrize(self.basis @ self.basis.mT)
        return torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device) - inner if self.complement else inner

    def project_rows(self, rows: Tensor) -> Tensor:
        """Return rows @ U_r U_r', Eq. (7): (m, dim) or (k, m, dim) -> (k, m, dim)."""
        if self.basis is None:
            assert self.keep is not None
            return rows * self.keep[:, None, :]
        inner = (rows @ self.basis) @ self.basis.mT
        return rows - inner if self.complement else inner

    def project_gram(self, gram: Tensor) -> Tensor:
        """Return U_r U_r' @ gram @ U_r U_r', (k, dim, dim), the outer half of Eq. (16) as P_c = P U_r U_r'."""
        if self.basis is not None and self.complement:
            # (I - BB') G (I - BB') = G - BC' - CB' with C = GB - B (B'GB) / 2: one thin product
            image = gram @ self.basis
            half = image - self.basis @ (self.basis.mT @ image).mul_(0.5)
            left, right = torch.cat([self.basis, half], -1), torch.cat([half, self.basis], -1)
            return symmetrize(torch.baddbmm(gram, left, right.mT, alpha=-1.0))
        return symmetrize(self.project_rows(self.project_rows(gram).mT))


def _check_rule(rule: str, tolerance: float | None) -> None:
    if rule not in get_args(RankRule):
        raise ConfigError(f"unknown rank rule '{rule}': {nearest(rule, get_args(RankRule))}")
    if rule in ("tolerance", "energy"):
        if tolerance is None or not 0 < tolerance <= 1:
            raise ConfigError(f"rank rule '{rule}' got tolerance={tolerance}; wanted a share above 0 and at most 1")
    elif tolerance is not None:
        raise ConfigError(f"rank rule '{rule}' takes no tolerance, got {tolerance}; use rule 'tolerance' or 'energy'")


def _retained(values: Tensor, rule: str, tolerance: float | None) -> Tensor:
    """Return a mask of the ascending eigenvalues (k, dim) that the rule retains."""
    values = values.clamp_min(0.0)
    if rule == "energy":
        assert tolerance is not None
        ahead = values.flip(-1).cumsum(-1).roll(1, -1)
        ahead[..., 0] = 0.0  # sum of all larger eigenvalues
        total = values.sum(-1, keepdim=True)
        # Rounding errors carry no energy, so a share of 1 gives the numerical rank.
        real = values > values.shape[-1] * EPS * values[..., -1:]
        return (ahead < tolerance * total).flip(-1) & real
    share = values.shape[-1] * EPS if rule == "numerical" else tolerance
    assert share is not None
    return values > share * values[..., -1:]


def _small_null_space(gram: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Find eigenvectors of eigenvalues up to share * largest, if they are few and clearly separated from the others.

    Returns an orthonormal basis (m, dim, thin), padded with zero columns, for the m classes of (k, dim, dim) where the
    result is verified, and a mask (k,) of these classes. The cost is about three Cholesky factorizations instead of an
    eigendecomposition. Block inverse iteration finds the directions. They are verified if their Ritz values lie below
    the cutoff, their residuals are rounding errors, and after deflation a Cholesky test shows that all other
    eigenvalues lie above it.
    """
    dim = gram.shape[-1]
    width = min(SMALL_NULL_SPACE, dim // 4)
    norm = torch.linalg.matrix_norm(gram)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    floor = share * norm  # norm^2 / trace <= largest eigenvalue <= norm
    ridged = gram.clone()
    ridged.diagonal(dim1=-2, dim2=-1).add_(floor[:, None])
    factor, info = torch.linalg.cholesky_ex(ridged)
    sound = (info == 0) & (floor > 0)
    factor = torch.where(sound[:, None, None], factor, torch.eye(dim, dtype=DTYPE, device=gram.device))
    start = torch.randn(dim, width, dtype=DTYPE, generator=torch.Generator().manual_seed(0)).to(gram.device)
    block = start.expand(len(gram), dim, width)
    for _ in range(INVERSE_ITERATIONS):
        block = torch.linalg.qr(torch.cholesky_solve(block, factor))[0]
    image = gram @ block
    values, turn = torch.linalg.eigh(symmetrize(block.mT @ image).nan_to_num(0.0, 0.0, 0.0))
    cut = values * CHOLESKY_MARGIN <= (share * norm.square() / trace)[:, None]
    basis = (block @ turn) * cut[:, None, :]
    residual = torch.linalg.matrix_norm(image @ turn * cut[:, None, :] - basis * values[:, None, :])
    found = sound & cut.any(-1) & (residual <= dim * EPS * norm)
    lifted = torch.baddbmm(gram, basis, basis.mT * norm[:, None, None])
    found &= _min_eigenvalue_exceeds(lifted, floor)
    return basis[found][..., : int(cut[found].sum(-1).max()) if bool(found.any()) else 0], found


def row_space(gram: Tensor, rule: RankRule = "numerical", tolerance: float | None = None) -> RowSpace | None:
    """Find the row spaces of Grams (k, dim, dim), Eq. (6) and (10); None if every class has full rank.

    `rule` decides which eigenvalues of a Gram count as nonzero:

    - ``positive``: every singular value above zero, as released. Only dead channels (zero on the diagonal) have an
      exact zero, so no decomposition is needed. The released float32 SVD agrees if no channel is dead, as in every
      class measured; for a dead channel LAPACK returns rounding noise instead of zero, which is not reproduced here;
    - ``numerical``: eigenvalue > dim * eps * largest, eps of float64: the paper's text;
    - ``tolerance``: eigenvalue > tolerance * largest;
    - ``energy``: the fewest leading eigenvalues whose sum reaches the share `tolerance` of the trace;
    - ``none``: the identity.

    Under ``numerical`` and ``tolerance`` a Cholesky test detects classes of full rank, and verified inverse iteration
    handles classes that lose few directions; only the others are decomposed.

    >>> row_space(torch.eye(3)[None], "numerical") is None
    True
    """
    _check_rule(rule, tolerance)
    _check_square(gram, "gram")
    if rule == "none" or gram.numel() == 0:
        return None
    dim = gram.shape[-1]
    if rule == "positive":
        return positive_space(gram.diagonal(dim1=-2, dim2=-1))
    gram = check_finite(gram.to(DTYPE), "gram")
    if rule == "energy":
        which, most = torch.arange(len(gram), device=gram.device), 0
    else:
        share = max(tolerance or 0.0, dim * EPS)
        unsure = ~_min_eigenvalue_exceeds(gram, share * torch.linalg.matrix_norm(gram))
        which = unsure.nonzero()[:, 0]
        if len(which) == 0:
            return None
        thin, found = _small_null_space(gram[which], share)
        thin_of, which = which[found], which[~found]
        most = thin.shape[-1]
    if len(which) == 0:
        values = vectors = retained = gram.new_zeros(0)
    else:
        values, vectors = torch.linalg.eigh(gram[which])
        retained = _retained(values, rule, tolerance)
        if len(which) == len(gram):
            if bool(retained.all()):
                return None
            if int((~retained).sum(-1).max()) > dim // 2:  # the retained space has the smaller basis
                return RowSpace(basis=(vectors * retained[:, None, :])[..., dim - int(retained.sum(-1).max()) :])
        most = max(most, int((~retained).sum(-1).max()))
    # Basis of the complement; zero columns for classes of full rank.
    basis = gram.new_zeros(len(gram), dim, most)
    if rule != "energy":
        basis[thin_of, :, : thin.shape[-1]] = thin
    if len(which):
        basis[which] = (vectors * (~retained)[:, None, :])[..., :most]
    return RowSpace(basis=basis, complement=True) if most else None


def positive_space(diagonal: Tensor) -> RowSpace | None:
    """Apply the rule `positive` of `row_space`, which needs only the diagonals (k, dim) of the Grams.

    >>> positive_space(torch.ones(2, 3)) is None
    True
    """
    alive = check_finite(diagonal, "the diagonal of gram") > 0
    return None if bool(alive.all()) else RowSpace(keep=alive.to(DTYPE))


def factor_space(factor: Tensor, rule: RankRule = "numerical", tolerance: float | None = None) -> RowSpace | None:
    """Return the `row_space` of Grams F'F from factors (k, rank, dim), rank <= dim, without computing the Grams.

    With F' = Q R, F'F = Q (R R') Q': eigenvectors of the rank x rank matrix R R', multiplied by Q, are those of F'F.
    Its other dim - rank eigenvalues are zero. Q is orthonormal for any rank of F, so zero rows are allowed.

    >>> factor_space(torch.tensor([[[2.0, 0.0, 0.0]]]).double()).projector().diagonal(dim1=1, dim2=2).tolist()
    [[1.0, 0.0, 0.0]]
    """
    _check_rule(rule, tolerance)
    if rule == "none" or factor.numel() == 0:
        return None if rule == "none" or len(factor) == 0 else RowSpace(keep=factor.new_zeros(*factor.shape[::2]))
    if rule == "positive":
        return positive_space(factor.square().sum(1))
    turn, triangle = torch.linalg.qr(check_finite(factor, "factor").mT)
    values, vectors = torch.linalg.eigh(symmetrize(triangle @ triangle.mT))
    rank, dim = factor.shape[1:]
    retained = _retained(torch.nn.functional.pad(values, (dim - rank, 0)), rule, tolerance)
    return None if bool(retained.all()) else RowSpace(basis=(turn @ vectors) * retained[:, None, dim - rank :])


def _batched(gram: Tensor) -> Tensor:
    _check_square(gram, "gram")
    return gram.reshape(-1, *gram.shape[-2:])


def row_projector(gram: Tensor, rule: RankRule = "numerical", tolerance: float | None = None) -> Tensor:
    """Return U_r U_r' of Eq. (6) and (10), the orthogonal projector onto the row space of a Gram, (..., dim, dim).

    The rank rules are those of `row_space`.

    >>> row_projector(torch.diag(torch.tensor([3.0, 0.0, 1.0])))
    tensor([[1., 0., 0.],
            [0., 0., 0.],
            [0., 0., 1.]], dtype=torch.float64)
    """
    space = row_space(_batched(gram), rule, tolerance)
    if space is None:
        return torch.eye(gram.shape[-1], dtype=DTYPE, device=gram.device).expand(gram.shape).clone()
    return space.projector().reshape(gram.shape)


def row_rank(gram: Tensor, rule: RankRule = "numerical", tolerance: float | None = None) -> Tensor:
    """Return r of Eq. (6), the rank under the rule, (..., dim, dim) -> (...) of int64.

    >>> gram = torch.diag(torch.tensor([96.0, 3.0, 1.0, 0.0]))
    >>> [int(row_rank(gram, *rule)) for rule in (("numerical",), ("tolerance", 0.02), ("energy", 0.9), ("none",))]
    [3, 2, 1, 4]
    """
    space = row_space(_batched(gram), rule, tolerance)
    shape = gram.shape[:-2]
    if space is None:
        return torch.full(shape, gram.shape[-1], dtype=torch.int64, device=gram.device)
    if space.basis is None:
        assert space.keep is not None
        return space.keep.sum(-1).to(torch.int64).reshape(shape)
    columns = space.basis.square().sum(-2).round().sum(-1).to(torch.int64)
    return (gram.shape[-1] - columns if space.complement else columns).reshape(shape)


def class_shift(
    task_shift: Tensor, gram: Tensor, rule: RankRule = "numerical", tolerance: float | None = None
) -> Tensor:
    """Return P_c = P U_r U_r', Eq. (7) and (9), for Grams (classes, dim, dim) of the old backbone.

    Returns `task_shift` (dim, dim) itself if every class has full rank, else (classes, dim, dim). The projector acts on
    the output side, so P must be square.

    >>> shift = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    >>> class_shift(shift, torch.eye(2).expand(5, 2, 2)) is shift
    True
    >>> class_shift(shift, torch.diag(torch.tensor([1.0, 0.0]))[None])
    tensor([[[1., 0.],
             [3., 0.]]], dtype=torch.float64)
    """
    if gram.ndim != 3 or task_shift.shape != gram.shape[1:]:
        raise ConfigError(
            f"task_shift has shape {tuple(task_shift.shape)} and gram {tuple(gram.shape)}; "
            f"wanted (dim, dim) and (classes, dim, dim)"
        )
    space = row_space(gram, rule, tolerance)
    return task_shift if space is None else space.project_rows(task_shift.to(DTYPE))
