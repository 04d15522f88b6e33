"""The kernels of `efcil.accel.fused_lwf_loss`, which says what they compute; one program a row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
MIN_CLASSES = 128  # classes that a kernel is made for, at least: growing heads do not ask for a new one in each task


@triton.jit
def _unit_rows(x, unit, stretch, dim, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + row * dim + c, mask=c < dim, other=0.0).to(tl.float32)
    longer = 1.0 / tl.maximum(tl.sqrt(tl.sum(v * v, 0)), eps)
    tl.store(unit + row * dim + c, (v * longer).to(unit.dtype.element_ty), mask=c < dim)
    tl.store(stretch + row, longer)


@triton.jit
def _unit_rows_back(grad, x, stretch, dx, dim, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    g = tl.load(grad + row * dim + c, mask=c < dim, other=0.0).to(tl.float32)
    longer = tl.load(stretch + row)
    u = tl.load(x + row * dim + c, mask=c < dim, other=0.0).to(tl.float32) * longer
    along = tl.where(longer * eps < 1.0, tl.sum(u * g, 0), 0.0)
    tl.store(dx + row * dim + c, ((g - u * along) * longer).to(dx.dtype.element_ty), mask=c < dim)


@triton.jit
def _loss_and_grad(
    cosines,
    scale,
    labels,
    target,
    old_scale,
    loss,
    grad,
    of_scale,
    count,
    classes,
    old,
    alpha,
    temperature,
    OLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    cosine = tl.load(cosines + row * classes + c, mask=c < classes, other=0.0).to(tl.float32)
    s = tl.load(scale)
    z = cosine * s
    new = (c >= old) & (c < classes)
    own = c == tl.load(labels + row)
    top = tl.max(tl.where(new, z, float("-inf")), 0)
    e = tl.where(new, tl.exp(z - top), 0.0)
    total = tl.sum(e, 0)
    found = top + tl.log(total) - tl.sum(tl.where(own, z, 0.0), 0)
    g = e / total - tl.where(own, 1.0, 0.0)
    if OLD:
        before = c < old
        t = tl.load(target + row * old + c, mask=before, other=0.0).to(tl.float32) * tl.load(old_scale) / temperature
        p = tl.where(before, tl.exp(t - tl.max(tl.where(before, t, float("-inf")), 0)), 0.0)
        p = p / tl.sum(p, 0)
        soft = z / temperature
        top = tl.max(tl.where(before, soft, float("-inf")), 0)
        q = tl.where(before, tl.exp(soft - top), 0.0)
        total = tl.sum(q, 0)
        found -= alpha * tl.sum(tl.where(before, p * (soft - top - tl.log(total)), 0.0), 0)
        g = tl.where(before, alpha / temperature * (q / total - p), g)
    g = g / count
    tl.store(loss + row, found / count)
    tl.store(grad + row * classes + c, (g * s).to(grad.dtype.element_ty), mask=c < classes)
    tl.store(of_scale + row, tl.sum(tl.where(c < classes, g * cosine, 0.0), 0))


def _tiles(width: int, least: int = 16) -> dict[str, Any]:
    return {"BLOCK": max(least, triton.next_power_of_2(width)), "num_warps": WARPS}


def unit_rows(x: Tensor, dtype: torch.dtype, eps: float) -> tuple[Tensor, Tensor]:
    """See `efcil.accel.fused_lwf_loss.unit_rows`."""
    x = x.contiguous()
    unit, stretch = torch.empty_like(x, dtype=dtype), x.new_empty(len(x), dtype=torch.float32)
    _unit_rows[(len(x),)](x, unit, stretch, x.shape[1], eps, **_tiles(x.shape[1]))
    return unit, stretch


def unit_rows_back(grad: Tensor, x: Tensor, stretch: Tensor, eps: float) -> Tensor:
    """See `efcil.accel.fused_lwf_loss.unit_rows_back`."""
    grad, x = grad.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    _unit_rows_back[(len(x),)](grad, x, stretch, dx, x.shape[1], eps, **_tiles(x.shape[1]))
    return dx


def loss_and_grad(
    cosines: Tensor,
    scale: Tensor,
    labels: Tensor,
    target: Tensor | None,
    old_scale: Tensor | None,
    alpha: float,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `efcil.accel.fused_lwf_loss.loss_and_grad`."""
    cosines = cosines.contiguous()
    count, classes = cosines.shape
    loss, of_scale = (cosines.new_empty(count, dtype=torch.float32) for _ in range(2))
    grad = torch.empty_like(cosines)
    teacher, old = (cosines, scale), 0  # without a teacher any tensors will do: they are not read
    if target is not None and old_scale is not None:
        teacher, old = (target.contiguous(), old_scale), target.shape[1]
    sizes = (count, classes, old, float(alpha), float(temperature))
    found = (loss, grad, of_scale)
    _loss_and_grad[(count,)](
        cosines, scale, labels, *teacher, *found, *sizes, OLD=old > 0, **_tiles(classes, MIN_CLASSES)
    )
    return found
