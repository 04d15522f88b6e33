"""Literal implementation of DPCR, equation by equation, to read first and as reference for tests.

He et al., "Semantic Shift Estimation via Dual-Projection and Classifier Reconstruction for Exemplar-Free
Class-Incremental Learning", ICML 2025. Functions are in the order of Eq. 1 to 22; Algorithm 1 is `dpcr`, at the end.

It is literal and slow: loops over images and classes, full SVDs, explicit inverses, float64. Features are rows, so new
features are about `old @ P`; labels are integers. The misprints of the paper (N_1 in Eq. 3, the index of theta in Eq.
11, 13, 17 and 18, gamma missing in Eq. 19, the l1 norm in Eq. 22) are corrected. No other module of efcil imports this
one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Rank = Callable[[Tensor], int]
"""Rank rule: number of singular values (dim,), in descending order, that count as nonzero."""
Network = Callable[[Tensor], Tensor]
Known = Mapping[int, tuple[int, Tensor, Tensor]]
"""State per class: N_c, mu_c (dim,) and Phi_c (dim, dim). No image."""


def identity(dim: int) -> Tensor:
    """Return the identity matrix I."""
    return torch.eye(dim, dtype=torch.float64)


# --- representation learning, Eq. 1 and 2 -----------------------------------------------------------------------------


def representation_loss(
    logits: Tensor, labels: Tensor, old_logits: Tensor, alpha: float, temperature: float = 2.0
) -> Tensor:
    """Eq. (1): L_rep = L_ce(h_t(f_t(x)), y) + alpha L_kd.

    `logits` (n, classes) of the new network, `old_logits` (n, old classes) of the old one. As released, L_ce is over
    the new classes only. In the first task there are no old classes, and no L_kd.

    >>> float(representation_loss(torch.zeros(1, 4), torch.tensor([3]), torch.zeros(1, 2), alpha=0.0))  # log 2
    0.6931...
    """
    old = old_logits.shape[1]
    loss = torch.zeros((), dtype=torch.float64)
    for scores, label in zip(logits.double(), labels.tolist(), strict=True):
        loss = loss - torch.log(torch.softmax(scores[old:], 0)[label - old]) / len(labels)
    return loss + alpha * distillation_loss(logits[:, :old], old_logits, temperature) if old else loss


def distillation_loss(logits: Tensor, old_logits: Tensor, temperature: float = 2.0) -> Tensor:
    """Eq. (2): L_kd = L_ce(h_(t-1)(f_(t-1)(x)), h_t(f_t(x))), over the old classes.

    >>> float(distillation_loss(torch.zeros(1, 2), torch.tensor([[5.0, -5.0]])))  # log 2, whatever the old network says
    0.6931...
    """
    loss = torch.zeros((), dtype=torch.float64)
    for new, old in zip(logits.double(), old_logits.double(), strict=True):
        wanted = torch.softmax(old / temperature, 0)
        loss = loss - (wanted * torch.log(torch.softmax(new / temperature, 0))).sum() / len(logits)
    return loss


# --- dual projection: task-wise, Eq. 3 to 5 ---------------------------------------------------------------------------


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Eq. (3): X_t = [x_t,1; x_t,2; ...; x_t,N_t]."""
    return torch.stack([row.double() for row in rows])


def one_hot(labels: Tensor, classes: Sequence[int]) -> Tensor:
    """Eq. (3): Y_t = [onehot(y_t,1); onehot(y_t,2); ...; onehot(y_t,N_t)].

    >>> one_hot(torch.tensor([7, 4]), [4, 7]).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    return torch.tensor([[float(label == c) for c in classes] for label in labels.tolist()], dtype=torch.float64)


def shift_error(old: Tensor, new: Tensor, shift: Tensor) -> float:
    """Eq. (4): ||X_new - X_old P||_F^2, which P minimizes.

    >>> shift_error(torch.eye(2), 3 * torch.eye(2), identity(2))
    8.0
    """
    return float((stacked(list(new)) - stacked(list(old)) @ shift).square().sum())


def task_shift(old: Tensor, new: Tensor, ridge: float = 1e-9) -> Tensor:
    """Eq. (5): P = (X_old' X_old + epsilon I)^-1 X_old' X_new.

    >>> task_shift(torch.eye(2), torch.tensor([[0.0, 2.0], [2.0, 0.0]])).round(decimals=6).tolist()
    [[0.0, 2.0], [2.0, 0.0]]
    """
    x, y = stacked(list(old)), stacked(list(new))
    return torch.inverse(x.T @ x + ridge * identity(x.shape[1])) @ x.T @ y


# --- dual projection: category-wise, Eq. 6 to 10 ----------------------------------------------------------------------


def rank_positive(values: Tensor) -> int:
    """Count singular values above zero, as in the released code."""
    return sum(float(value) > 0 for value in values)


def rank_numerical(values: Tensor) -> int:
    """Count singular values above rounding error, as in the paper's text."""
    return sum(float(value) > len(values) * 2.0**-52 * float(values[0]) for value in values)


def rank_tolerance(share: float) -> Rank:
    """Count singular values above a fraction of the largest."""
    return lambda values: sum(float(value) > share * float(values[0]) for value in values)


def rank_energy(share: float) -> Rank:
    """Count the fewest leading singular values that sum to a fraction of the total.

    >>> rank_energy(0.9)(torch.tensor([8.0, 1.5, 0.5]))
    2
    """

    def rank(values: Tensor) -> int:
        total = float(values.sum())
        for r in range(len(values) + 1):
            if float(values[:r].sum()) >= share * total:
                return r
        return len(values)

    return rank


def row_projector(gram: Tensor, rank: Rank) -> Tensor:
    """Eq. (6): U, Sigma, U' = SVD(Phi_c), U = [U^r U^z]; gives U^r U^r'.

    >>> row_projector(torch.diag(torch.tensor([3.0, 0.0])), rank_numerical).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    u, sigma, _ = torch.linalg.svd(gram.double())
    kept = u[:, : rank(sigma)]
    return kept @ kept.T


def class_shift(shift: Tensor, gram: Tensor, rank: Rank) -> Tensor:
    """Eq. (7): P_c = P U^r U^r'."""
    return shift.double() @ row_projector(gram, rank)


def ladder(features: Tensor, shifts: Sequence[Tensor], rank: Rank) -> Tensor:
    """Eq. (8): X_c -> X_c P_c from task to task, through every `shifts` (dim, dim) since the class's own task.

    Eq. (9), (10): P_c = P U^r U^r' with U, Sigma, U' = SVD(X_c' X_c) of the shifted features.
    """
    moved = features.double()
    for shift in shifts:
        moved = moved @ class_shift(shift, moved.T @ moved, rank)
    return moved


# --- ridge regression-based classifier reconstruction, Eq. 11 to 21 ---------------------------------------------------


def ridge_error(features: Tensor, labels: Tensor, classes: Sequence[int], weight: Tensor, ridge: float) -> float:
    """Eq. (11): ||Y - X W||_F^2 + gamma ||W||_F^2 over the images of all tasks, which W minimizes."""
    residual = one_hot(labels, classes) - stacked(list(features)) @ weight
    return float(residual.square().sum() + ridge * weight.square().sum())


def ridge_joint(features: Tensor, labels: Tensor, classes: Sequence[int], ridge: float) -> Tensor:
    """Eq. (12): W = (X'X + gamma I)^-1 X'Y, from the images of all tasks.

    >>> ridge_joint(torch.eye(2), torch.tensor([0, 1]), [0, 1], ridge=1.0).tolist()
    [[0.5, 0.0], [0.0, 0.5]]
    """
    x, y = stacked(list(features)), one_hot(labels, classes)
    return torch.inverse(x.T @ x + ridge * identity(x.shape[1])) @ (x.T @ y)


def ridge_by_class(grams: Sequence[Tensor], crosses: Sequence[Tensor], ridge: float) -> Tensor:
    """Eq. (13): W = (sum_c Phi_c + gamma I)^-1 sum_c H_c."""
    return torch.inverse(sum(grams, ridge * identity(len(grams[0])))) @ torch.stack(list(crosses)).sum(0)


def cross(count: int, mean: Tensor, place: int, classes: int) -> Tensor:
    """Eq. (14): H_c = X_c' Y_c = N_c mu_c' y_c, with y_c the one-hot row of the class at `place`.

    >>> cross(3, torch.tensor([1.0, 2.0]), place=1, classes=2).tolist()
    [[0.0, 3.0], [0.0, 6.0]]
    """
    return count * torch.outer(mean, identity(classes)[place].to(mean))


def prototype(features: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. (15): mu_c = 1/N_c sum_j x_c,j and Phi_c = X_c' X_c, image by image.

    >>> mean, gram = prototype(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    >>> mean.tolist(), gram.tolist()
    ([2.0, 0.0], [[10.0, 0.0], [0.0, 0.0]])
    """
    dim = features.shape[1]
    mean, gram = torch.zeros(dim).double(), torch.zeros(dim, dim).double()
    for row in features.double():
        mean += row / len(features)
        gram += torch.outer(row, row)
    return mean, gram


def rectify(gram: Tensor, mean: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. (16): Phi_c -> P_c' Phi_c P_c. Eq. (17): mu_c -> mu_c P_c.

    >>> rectify(identity(1), identity(1)[0], 3 * identity(1))
    (tensor([[9.]], dtype=torch.float64), tensor([3.], dtype=torch.float64))
    """
    return shift.T @ gram @ shift, mean @ shift


def ridge_from_statistics(
    counts: Sequence[int], means: Sequence[Tensor], grams: Sequence[Tensor], ridge: float
) -> Tensor:
    """Eq. (18): H_c = N_c mu_c' y_c, also for shifted classes. Eq. (20), (21): Phi = sum_c Phi_c, H = sum_c H_c.

    Eq. (19): W = (Phi + gamma I)^-1 H.
    """
    pairs = zip(counts, means, strict=True)
    return ridge_by_class(grams, [cross(n, mu, c, len(counts)) for c, (n, mu) in enumerate(pairs)], ridge)


# --- category-wise normalization, Eq. 22 ------------------------------------------------------------------------------


def normalize_columns(weight: Tensor) -> Tensor:
    """Eq. (22): W' = [w_1 / ||w_1||_2, w_2 / ||w_2||_2, ...]; a column of zeros stays.

    >>> normalize_columns(torch.tensor([[3.0, 0.0], [4.0, 0.0]])).tolist()
    [[0.6000..., 0.0], [0.8000..., 0.0]]
    """
    columns = []
    for j in range(weight.shape[1]):
        norm = sum(float(w) ** 2 for w in weight[:, j]) ** 0.5
        columns.append(weight[:, j] / norm if norm > 0 else weight[:, j])
    return torch.stack(columns, dim=1)


# --- Algorithm 1 ------------------------------------------------------------------------------------------------------


def dpcr(
    known: Known,
    images: Sequence[Tensor],
    labels: Tensor,
    backbone: Network,
    learn: Callable[[Network], Network],
    ridge: float,
    shift_ridge: float = 1e-9,
    rank: Rank = rank_positive,
) -> tuple[dict[int, tuple[int, Tensor, Tensor]], Network, Tensor]:
    """Algorithm 1: learn one task, whose classes are new; return statistics of all classes, the new backbone and W'.

    `learn` minimizes Eq. (1), starting from the old `backbone`. A backbone maps an image to a feature (dim,).

    >>> images, labels = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])], torch.tensor([0, 1])
    >>> known, first, weight = dpcr({}, images, labels, torch.neg, lambda old: torch.square, ridge=1.0)
    >>> known[1][1].tolist(), weight.tolist()
    ([0.0, 1.0], [[1.0, 0.0], [0.0, 1.0]])
    >>> known, second, weight = dpcr(known, images, labels + 2, first, lambda old: lambda x: 3 * x, ridge=1.0)
    >>> known[1][1].round(decimals=6).tolist(), sorted(known)
    ([0.0, 3.0], [0, 1, 2, 3])
    """
    # Incremental representation learning
    new_backbone = learn(backbone)  # Eq. (1), (2)
    # Shift estimation via dual projection
    old, new = (stacked([network(image) for image in images]) for network in (backbone, new_backbone))  # Eq. (3)
    shift = task_shift(old, new, shift_ridge)  # Eq. (4), (5)
    everything = {}
    for c, (count, mean, gram) in known.items():
        own_shift = class_shift(shift, gram, rank)  # Eq. (6), (7)
        gram, mean = rectify(gram, mean, own_shift)  # Eq. (16), (17)
        everything[c] = count, mean, gram
    # Ridge regression-based classifier reconstruction
    for c in labels.unique().tolist():
        own = new[labels == c]
        everything[c] = len(own), *prototype(own)  # Eq. (15)
    counts, means, grams = zip(*(everything[c] for c in sorted(everything)), strict=True)
    weight = ridge_from_statistics(counts, means, grams, ridge)  # Eq. (18) to (21)
    return everything, new_backbone, normalize_columns(weight)  # Eq. (22)
