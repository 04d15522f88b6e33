"""One thread where a training step is so small that several would wait for each other longer than they compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from efcil.platform_support import may_choose_threads

# Multiply-adds of a batch's forward pass; `efcil run dpcr digits` has 0.3 billion. For so few, a second
# thread gains nothing on idle cores, and beside other programs two are several times slower (docs/dev/performance.md).
SMALL_BATCH = 500_000_000


@torch.no_grad()
def multiply_adds(network: nn.Module, shape: Sequence[int]) -> int:
    """Count the multiply-adds of convolutions and linear layers for one image of `shape` (channels, height, width).

    >>> multiply_adds(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 10)), (3, 4, 4))
    4736
    """
    count = 0

    def add(module: nn.Module, given: Any, found: Tensor) -> None:
        nonlocal count
        weight = module.weight
        assert isinstance(weight, Tensor)
        count += found.numel() * weight[0].numel()

    layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(add) for layer in layers]
    training = [module for module in network.modules() if module.training]
    try:
        network.eval()(torch.zeros(1, *shape, device=next(network.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    return count


@contextlib.contextmanager
def fitting_threads(network: nn.Module, shape: Sequence[int], batch: int) -> Iterator[None]:
    """Use one thread inside the block if a batch of such images is small, unless the user has chosen their number.

    It depends on the network and the images, never on how busy the machine is: the same command gives the same bits.
    """
    before = torch.get_num_threads()
    if before > 1 and may_choose_threads() and next(network.parameters()).device.type == "cpu":
        torch.set_num_threads(1 if batch * multiply_adds(network, shape) < SMALL_BATCH else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
