"""Slow, literal transcriptions of the paper's equations in float64: test-only, what production code must match.

Loops, SVD and explicit inverses, as printed; the misprints listed in docs (theta and N indices, gamma missing in
Eq. (19), the l1 norm in Eq. (22)) are corrected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Rank = Callable[[Tensor], int]


def task_shift(old: Tensor, new: Tensor, ridge: float = 1e-9) -> Tensor:
    """Eq. (3) to (5): rows stacked, P = (X'X + eps I)^-1 X'Y."""
    x = torch.stack([row.double() for row in old])
    y = torch.stack([row.double() for row in new])
    return torch.inverse(x.T @ x + ridge * torch.eye(x.shape[1]).double()) @ x.T @ y


def left_out_error(old: Tensor, new: Tensor, ridge: float) -> float:
    """Golub, Heath and Wahba, 1979: |(I - H) D|^2 / n over (tr(I - H) / n)^2, H = X (X'X + r I)^-1 X', D = Y - X."""
    x, d, n = old.double(), new.double() - old.double(), len(old)
    hat = x @ torch.inverse(x.T @ x + ridge * torch.eye(x.shape[1]).double()) @ x.T
    left = torch.eye(n).double() - hat
    return float((left @ d).square().sum() / n / (left.trace() / n) ** 2)


def rank_positive(values: Tensor) -> int:
    return sum(float(value) > 0 for value in values)


def rank_numerical(values: Tensor) -> int:
    return sum(float(value) > len(values) * 2.0**-52 * float(values[0]) for value in values)


def rank_tolerance(share: float) -> Rank:
    return lambda values: sum(float(value) > share * float(values[0]) for value in values)


def rank_energy(share: float) -> Rank:
    def rank(values: Tensor) -> int:
        total = float(values.sum())
        for r in range(len(values) + 1):
            if float(values[:r].sum()) >= share * total:
                return r
        return len(values)

    return rank


def row_projector(gram: Tensor, rank: Rank) -> Tensor:
    """Eq. (6): U, Sigma, U' = SVD(Phi); U_r U_r'."""
    u, sigma, _ = torch.linalg.svd(gram.double())
    kept = u[:, : rank(sigma)]
    return kept @ kept.T


def class_shift(shift: Tensor, gram: Tensor, rank: Rank) -> Tensor:
    """Eq. (7): P U_r U_r'."""
    return shift.double() @ row_projector(gram, rank)


def ladder(features: Tensor, shifts: Sequence[Tensor], rank: Rank) -> Tensor:
    """Eq. (8) to (10): the features of one class carried from its own task through every later one."""
    moved = features.double()
    for shift in shifts:
        moved = moved @ class_shift(shift, moved.T @ moved, rank)
    return moved


def ridge_joint(features: Tensor, labels: Tensor, classes: Sequence[int], ridge: float) -> Tensor:
    """Eq. (11) and (12): W = (X'X + gamma I)^-1 X'Y with one-hot Y, from all features at once."""
    x = features.double()
    y = torch.stack([(labels == c).double() for c in classes], dim=1)
    return torch.inverse(x.T @ x + ridge * torch.eye(x.shape[1]).double()) @ (x.T @ y)


def prototype(features: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. (15): mu and Phi of one class, image by image."""
    dim = features.shape[1]
    mean, gram = torch.zeros(dim).double(), torch.zeros(dim, dim).double()
    for row in features.double():
        mean += row / len(features)
        gram += torch.outer(row, row)
    return mean, gram


def rectify(gram: Tensor, mean: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. (16) and (17): P_c' Phi P_c and mu P_c."""
    return shift.T @ gram @ shift, mean @ shift


def ridge_from_statistics(
    counts: Sequence[int], means: Sequence[Tensor], grams: Sequence[Tensor], ridge: float
) -> Tensor:
    """Eq. (13), (14), (18) to (21): sums over classes, H_c = N_c mu_c' y_c with y_c one-hot."""
    dim, classes = len(means[0]), len(counts)
    phi, h = torch.zeros(dim, dim).double(), torch.zeros(dim, classes).double()
    for c in range(classes):
        one_hot = torch.zeros(classes).double()
        one_hot[c] = 1.0
        phi += grams[c]
        h += counts[c] * torch.outer(means[c], one_hot)
    return torch.inverse(phi + ridge * torch.eye(dim).double()) @ h


def normalize_columns(weight: Tensor) -> Tensor:
    """Eq. (22): every column by its own l2 norm."""
    columns = []
    for j in range(weight.shape[1]):
        norm = sum(float(w) ** 2 for w in weight[:, j]) ** 0.5
        columns.append(weight[:, j] / norm if norm > 0 else weight[:, j])
    return torch.stack(columns, dim=1)
