"""Straightforward class update: float32, class by class, with SVD, projectors and `torch.inverse`.

The baseline of benchmarks/core.py, not imported by the package. It retains every singular value above zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def task_shift(old: Tensor, new: Tensor, ridge: float = 1e-9) -> Tensor:
    """Return P = (X'X + eps I)^-1 X'Y."""
    eye = torch.eye(old.shape[1], device=old.device)
    return torch.inverse(old.T @ old + ridge * eye) @ (old.T @ new)


def row_projector(gram: Tensor) -> Tensor:
    """Return U_r U_r' for all singular values above zero."""
    u, sigma, _ = torch.linalg.svd(gram)
    kept = u[:, sigma > 0]
    return kept @ kept.T


def update(
    grams: dict[int, Tensor],
    means: dict[int, Tensor],
    counts: dict[int, int],
    old: Tensor,
    new: Tensor,
    labels: Tensor,
    ridge: float,
) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
    """Run one task: shift of old classes, statistics of new ones, ridge weight, column normalization."""
    shift = task_shift(old, new)
    moved_grams, moved_means = {}, {}
    for c, gram in grams.items():
        class_shift = shift @ row_projector(gram)
        moved_grams[c] = class_shift.T @ gram @ class_shift
        moved_means[c] = means[c] @ class_shift
    counts = dict(counts)
    for c in labels.unique().tolist():
        x = new[labels == c]
        moved_grams[c], moved_means[c], counts[c] = x.T @ x, x.mean(0), len(x)
    dim = new.shape[1]
    phi = torch.zeros(dim, dim, device=new.device)
    h = torch.zeros(dim, len(moved_grams), device=new.device)
    for column, c in enumerate(sorted(moved_grams)):
        phi += moved_grams[c]
        h[:, column] = counts[c] * moved_means[c]
    weight = torch.inverse(phi + ridge * torch.eye(dim, device=new.device)) @ h
    return moved_grams, moved_means, weight / weight.norm(dim=0, keepdim=True)
