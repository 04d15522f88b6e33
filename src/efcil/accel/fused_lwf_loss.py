"""LwF's loss of a batch with cosine heads, and its gradients, in a few kernels.

With unit rows u of the features, w of the head's weights, and scale s, logits are z = s u w'; the teacher's over the
old classes are t. Of an image with label y, p = softmax(t / T) and q = softmax(z / T) over the old classes, r =
softmax(z) over the new ones, Eq. 1 of n images and its gradient are

    L = 1/n sum of  -log r_y - alpha sum of p log q
    dL/dz = 1/n (r - 1_y)  of new classes,  alpha / (n T) (q - p)  of old ones
    dL/ds = sum of dL/dz u w',  dL/du = s dL/dz w,  dL/dw = s (dL/dz)' u
    and for x = u |x|:  dL/dx = (dL/du - u (u . dL/du)) / |x|

Written as torch has it, forward and backward, this is sixty launches of next to no work: 0.13 of a captured step's
2 ms. On a GPU these are the kernels of `efcil.accel.loss_kernels`; elsewhere the lines below.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

EPS = 1e-12  # below this length a row is not stretched further, as torch.nn.functional.normalize has it


def unit_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows (n, dim) of length one in a given precision, and what each was multiplied with (n,)."""
    if x.is_cuda:
        from efcil.accel import loss_kernels

        return loss_kernels.unit_rows(x, dtype, EPS)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    stretch = 1 / wide.norm(dim=1).clamp_min(EPS)
    return (wide * stretch[:, None]).to(dtype), stretch


def unit_rows_back(grad: Tensor, x: Tensor, stretch: Tensor) -> Tensor:
    """Gradient of rows x (n, dim), for that of the unit rows."""
    if x.is_cuda:
        from efcil.accel import loss_kernels

        return loss_kernels.unit_rows_back(grad, x, stretch, EPS)
    grad, unit = grad.to(stretch.dtype), x.to(stretch.dtype) * stretch[:, None]
    along = (unit * grad).sum(1, keepdim=True)
    along = torch.where(stretch[:, None] < 1 / EPS, along, 0)  # a row that was too short was only multiplied
    return ((grad - unit * along) * stretch[:, None]).to(x.dtype)


def loss_and_grad(
    cosines: Tensor,
    scale: Tensor,
    labels: Tensor,
    target: Tensor | None,
    old_scale: Tensor | None,
    alpha: float,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each image's part in the loss (n,), the gradient of the cosines (n, classes), each image's part in the scale's.

    Cosines are u w'; `target` (n, old) those of the teacher with its head, of the classes before the task.
    """
    if cosines.is_cuda:
        from efcil.accel import loss_kernels

        return loss_kernels.loss_and_grad(cosines, scale, labels, target, old_scale, alpha, temperature)
    wide = cosines.to(scale.dtype)
    count, old = len(wide), 0 if target is None else target.shape[1]
    z = scale * wide
    log_r = z[:, old:].log_softmax(1)
    own = (labels - old)[:, None]
    loss = -log_r.gather(1, own)[:, 0]
    grad = torch.zeros_like(z)
    grad[:, old:] = log_r.exp().scatter_add(1, own, -torch.ones_like(z[:, :1]))
    if target is not None and old_scale is not None:
        p = (old_scale * target.to(scale.dtype) / temperature).softmax(1)
        log_q = (z[:, :old] / temperature).log_softmax(1)
        loss = loss - alpha * (p * log_q).sum(1)
        grad[:, :old] = alpha / temperature * (log_q.exp() - p)
    grad = grad / count
    return loss / count, (grad * scale).to(cosines.dtype), (grad * wide).sum(1)


class _FusedLwFLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype, *given: Any) -> Tensor:
        u, stretch = unit_rows(features, dtype)
        w, stretch_w = unit_rows(weight, dtype)
        loss, of_cosines, of_scale = loss_and_grad(u @ w.T, scale, *given)
        ctx.save_for_backward(features, stretch, weight, stretch_w, u, w, of_cosines, of_scale)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        features, stretch, weight, stretch_w, u, w, of_cosines, of_scale = ctx.saved_tensors
        of_cosines = of_cosines * grad.to(of_cosines.dtype)
        of_features = unit_rows_back(of_cosines @ w, features, stretch)
        of_weight = unit_rows_back(of_cosines.T @ u, weight, stretch_w)
        return of_features, of_weight, of_scale.sum() * grad, *[None] * 6


@torch.no_grad()
def cosine_similarity(features: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, classes) of features (n, dim) with a head's weight (classes, dim); products in `dtype`."""
    with torch.autocast(features.device.type, enabled=False):
        return unit_rows(features, dtype)[0] @ unit_rows(weight, dtype)[0].T


def fused_lwf_loss(
    features: Tensor,
    labels: Tensor,
    head: tuple[Tensor, Tensor],
    target: Tensor | None,
    old_scale: Tensor | None,
    alpha: float,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Eq. 1 of features (n, dim) for a head (weight, scale), products in `dtype`; see `loss_and_grad`."""
    with torch.autocast(features.device.type, enabled=False):
        found: Tensor = _FusedLwFLoss.apply(features, *head, dtype, labels, target, old_scale, alpha, temperature)
    return found


@functools.cache
def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU computes the loss in this way, and the right one; tried once."""
    return device.type == "cuda" and is_correct_on(device, dtype)


def is_correct_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a small batch has the loss and the gradients here that it has on a CPU."""
    found = []
    for place in (torch.device("cpu"), device):
        draw = torch.Generator().manual_seed(0)
        tensors = [torch.randn(size, generator=draw).to(place) for size in ((6, 40), (7, 40), (6, 40), (4, 40))]
        features, weight, before, old = tensors
        scale = torch.tensor(3.0, device=place)
        learned = [tensor.requires_grad_() for tensor in (features, weight, scale)]
        labels = torch.tensor([4, 5, 6, 4, 5, 6], device=place)
        try:
            with torch.enable_grad():
                target = (cosine_similarity(before, old, dtype), scale.detach())
                loss = fused_lwf_loss(features, labels, (weight, scale), *target, 10.0, 2.0, dtype)
                found.append([loss.detach().cpu(), *(g.cpu() for g in torch.autograd.grad(loss, learned))])
        except Exception:  # a kernel that cannot be built or started raises what it likes
            return False
    within = 0.05 if dtype == torch.bfloat16 else 1e-3
    return all(bool((mine - theirs).norm() <= within * theirs.norm()) for theirs, mine in zip(*found, strict=True))
