"""Fused losses in the place of plain ones, by the exact type of the object."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from efcil.accel.fused_lwf_loss import cosine_similarity, fused_lwf_loss, is_supported
from efcil.losses import Criterion, FeatureDistillLoss, LwFLoss, feature_distance
from efcil.models.heads import CosineHead


class FusedLwFLoss:
    """`LwFLoss` on cosine heads, loss and gradients in few kernels."""

    def __init__(self, plain: LwFLoss, dtype: torch.dtype):
        self.plain, self.dtype = plain, dtype

    def __call__(self, features: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        """Return the loss."""
        plain, target, old_scale = self.plain, None, None
        if teacher is not None:
            with torch.no_grad():
                weight, old_scale = _cosine(plain.teacher_head)
                target = cosine_similarity(teacher, weight, self.dtype)
        head = _cosine(plain.head)
        weights = (plain.distill_weight, plain.temperature)
        return fused_lwf_loss(features, labels, head, target, old_scale, *weights, self.dtype)


class FusedFeatureDistillLoss(FusedLwFLoss):
    """`FeatureDistillLoss` likewise."""

    plain: FeatureDistillLoss

    def __call__(self, features: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        """Return the loss."""
        loss = super().__call__(features, labels, teacher)
        if teacher is None:
            return loss
        mapped = linear(features, self.plain.projector.weight, self.plain.projector.bias)
        return loss + self.plain.feature_distill_weight * feature_distance(mapped, teacher)


FUSED: dict[type, type[FusedLwFLoss]] = {LwFLoss: FusedLwFLoss, FeatureDistillLoss: FusedFeatureDistillLoss}

_works = functools.cache(is_supported)


def accelerate(criterion: Criterion, device: torch.device, dtype: torch.dtype) -> Criterion:
    """Return the fused version of a criterion whose exact type has one, else the criterion itself."""
    fused = FUSED.get(type(criterion))
    if fused is None or type(criterion.head) is not CosineHead or not _works(device, dtype):  # type: ignore[attr-defined]
        return criterion
    return fused(criterion, dtype)  # type: ignore[arg-type]


def _cosine(head: Any) -> tuple[Tensor, Tensor]:
    """Return weight (classes, dim) and scale of a cosine head."""
    return head.weight, head.scale
