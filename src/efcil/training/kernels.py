"""The kernel of `efcil.training.updates`, which says what it computes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4


@triton.jit
def _sgd(weight, gradient, remembered, rate, momentum, decay, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < count
    w = tl.load(weight + i, mask=here, other=0.0)
    b = tl.load(remembered + i, mask=here, other=0.0)
    g = tl.load(gradient + i, mask=here, other=0.0).to(tl.float32)
    b = momentum * b + (g + decay * w)
    tl.store(remembered + i, b, mask=here)
    tl.store(weight + i, w - tl.load(rate) * b, mask=here)


def sgd(
    weight: Tensor, gradient: Tensor, remembered: Tensor, rate: Tensor, momentum: float, weight_decay: float
) -> None:
    """Update `weight` and what is `remembered` in place; all three fill their memory in the same order."""
    count = weight.numel()
    _sgd[(triton.cdiv(count, BLOCK),)](
        weight, gradient, remembered, rate, momentum, weight_decay, count, BLOCK=BLOCK, num_warps=WARPS
    )
