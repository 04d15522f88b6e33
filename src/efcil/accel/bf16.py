"""Whether bf16 is worth it on a CPU: many compute its convolutions slowly, and some versions of torch wrongly."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Convolve = Callable[[Tensor, Tensor], Tensor]
TOLERANCE = 0.02  # relative; bf16 has 8 bits, an error of 0.002 in a sum of products


def _convolve(images: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(images, weight, padding=1)


@functools.cache
def bf16_problem(convolve: Convolve = _convolve) -> str | None:
    """Say what is wrong with bf16 on this CPU: a trial of some milliseconds; None if it is right and faster.

    >>> bf16_problem(lambda images, weight: _convolve(images, weight) * (1 + (images.dtype == torch.bfloat16)))
    'its results are wrong on this CPU'
    """
    source = torch.Generator().manual_seed(0)
    images = torch.randn(8, 32, 16, 16, generator=source)
    weight = torch.randn(32, 32, 3, 3, generator=source)
    found, seconds = [], []
    for dtype in (torch.float32, torch.bfloat16):
        fast = torch.channels_last
        inputs = images.to(dtype, memory_format=fast)
        weights = weight.to(dtype, memory_format=fast).requires_grad_()
        best = float("inf")
        for _ in range(4):  # the first prepares kernels
            began = time.perf_counter()
            output = convolve(inputs, weights)
            (gradient,) = torch.autograd.grad(output.float().square().mean(), weights)
            best = min(best, time.perf_counter() - began)
        found.append((output.detach().float(), gradient.float()))
        seconds.append(best)
    for exact, rounded in zip(*found, strict=True):
        if not (rounded - exact).norm() < TOLERANCE * exact.norm():  # NaN, too
            return "its results are wrong on this CPU"
    ratio = seconds[1] / seconds[0]
    return None if ratio < 1 else f"a convolution takes {ratio:.1f} times as long as in fp32 on this CPU"
