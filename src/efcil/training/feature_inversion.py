"""Feature inversion: optimize images by gradient descent so that their features approach targets.

    X <- clip(X - step g / ||g||),    g = the gradient by X of ||backbone(X) - goal||^2

X is the network's input, normalized pixels. Only input gradients are computed, in float32 unless the caller enables
autocast.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH_NUMEL = 2**21  # pixels per pass with gradients: 500 CIFAR images (the limit), 13 of 224 x 224 x 3


def batch_size_for(inputs: Tensor) -> int:
    """Return the number of images per forward pass with gradients."""
    return max(1, min(500, BATCH_NUMEL // inputs[0].numel()))


def invert_features(
    backbone: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    step: float,
    iterations: int,
    bounds: tuple[Tensor, Tensor],
    group_size: int = 1,
) -> Tensor:
    """Optimize `inputs` (n, c, h, w) so that their features approach `targets` (n, dim).

    `bounds` are the minimum and maximum pixel value. Each `group_size` consecutive images share one gradient norm, so
    that an image moves by step / sqrt(group_size) on average.
    """
    targets, size = targets.float(), batch_size_for(inputs)
    tiny = torch.finfo(inputs.dtype).tiny  # avoids division by zero
    for _ in range(iterations):
        parts = []
        for x, target in zip(inputs.split(size), targets.split(size), strict=True):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                distance = (backbone(x) - target).square().sum()
            parts.append(torch.autograd.grad(distance, x)[0])
        gradient = torch.cat(parts).unflatten(0, (-1, group_size))  # (n / together, together, c, h, w)
        norm = torch.linalg.vector_norm(gradient, dim=(1, 2, 3, 4), keepdim=True).clamp_min(tiny)
        inputs = (inputs - (step * gradient / norm).flatten(0, 1)).clamp(*bounds)
    return inputs.detach()
