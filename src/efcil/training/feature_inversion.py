"""Images changed until a backbone sees something else in them: their pixels follow the gradient towards a goal.

    X <- clip(X - step g / ||g||),    g = the gradient by X of ||backbone(X) - goal||^2

X is the network's input, normalised pixels. Nothing but the gradient by the input is computed, in float32 unless the
caller has autocast on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH_NUMBERS = 2**21  # pixels in one pass with gradient: 500 CIFAR images (the limit), 13 of 224 x 224 x 3


def in_parts(inputs: Tensor) -> int:
    """Return how many images go through a backbone at once when gradients are needed."""
    return max(1, min(500, BATCH_NUMBERS // inputs[0].numel()))


def towards(
    backbone: nn.Module,
    inputs: Tensor,
    goals: Tensor,
    step: float,
    iterations: int,
    bounds: tuple[Tensor, Tensor],
    together: int = 1,
) -> Tensor:
    """Change `inputs` (n, c, h, w) so that their features approach the `goals` (n, dim), each its own.

    `bounds` are the least and the largest number a pixel may be; `together` images after another share one norm of the
    gradient, so that the average one of them moves by step / sqrt(together).
    """
    goals, size = goals.float(), in_parts(inputs)
    tiny = torch.finfo(inputs.dtype).tiny  # a gradient of zero is a step of zero
    for _ in range(iterations):
        parts = []
        for x, goal in zip(inputs.split(size), goals.split(size), strict=True):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                distance = (backbone(x) - goal).square().sum()
            parts.append(torch.autograd.grad(distance, x)[0])
        gradient = torch.cat(parts).unflatten(0, (-1, together))  # (n / together, together, c, h, w)
        norm = torch.linalg.vector_norm(gradient, dim=(1, 2, 3, 4), keepdim=True).clamp_min(tiny)
        inputs = (inputs - (step * gradient / norm).flatten(0, 1)).clamp(*bounds)
    return inputs.detach()
