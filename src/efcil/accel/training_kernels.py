"""Kernels of a training step: see `efcil.accel.optim` and `efcil.training.image_batches`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4


@triton.jit
def _sgd(weight, gradient, buffer, copy, lr, momentum, decay, count, COPY: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < count
    w = tl.load(weight + i, mask=here, other=0.0)
    b = tl.load(buffer + i, mask=here, other=0.0)
    g = tl.load(gradient + i, mask=here, other=0.0).to(tl.float32)
    b = momentum * b + (g + decay * w)
    tl.store(buffer + i, b, mask=here)
    w = w - tl.load(lr) * b
    tl.store(weight + i, w, mask=here)
    if COPY:
        tl.store(copy + i, w.to(copy.dtype.element_ty), mask=here)


def sgd(
    weight: Tensor,
    gradient: Tensor,
    buffer: Tensor,
    copy: Tensor | None,
    lr: Tensor,
    momentum: float,
    weight_decay: float,
) -> None:
    """Update `weight` and what is `buffer` in place, and a `copy`; all fill their memory in the same order."""
    count, tensors = weight.numel(), (weight, gradient, buffer, weight if copy is None else copy)
    tiles = {"COPY": copy is not None, "BLOCK": BLOCK, "num_warps": WARPS}
    _sgd[(triton.cdiv(count, BLOCK),)](*tensors, lr, momentum, weight_decay, count, **tiles)


@triton.jit
def _normalize(pixels, scale, offset, out, count, area, C: tl.constexpr, BLOCK: tl.constexpr):
    """(n, C, area) to (n, area, C)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < count
    image, place = i // area, i % area
    for c in tl.static_range(C):
        x = tl.load(pixels + image.to(tl.int64) * (C * area) + c * area + place, mask=here, other=0).to(tl.float32)
        tl.store(out + i.to(tl.int64) * C + c, x * tl.load(scale + c) - tl.load(offset + c), mask=here)


def normalize(batch: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """See `efcil.training.image_batches.ImageBatches.normalize`; the result has its channels last."""
    batch = batch.contiguous()
    out = torch.empty_like(batch, dtype=torch.float32, memory_format=torch.channels_last)
    channels, area = batch.shape[1], batch.shape[2] * batch.shape[3]
    count = len(batch) * area
    grid = (triton.cdiv(count, BLOCK),)
    _normalize[grid](batch, scale, offset, out, count, area, C=channels, BLOCK=BLOCK, num_warps=WARPS)
    return out
