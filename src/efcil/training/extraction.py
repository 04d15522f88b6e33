"""Features of images under a backbone at rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from efcil.training.loop import Pixels
from efcil.training.machine import Machine, memory_guard

BATCH_PIXELS = 2**24  # per forward pass: 1,024 images of 32 x 32 x 3 would be 2**21.6, one hundred of 224 x 224 x 3


@torch.no_grad()
def extract(backbone: nn.Module, pixels: Pixels, machine: Machine, crop: int | None = None) -> Tensor:
    """Return the features (n, dim) of all images, float32, with the backbone at rest; `crop` cuts out the centre.

    Of several processes each computes its share of the rows, and all get all of them.
    """
    backbone.eval()
    shape, on_gpu = pixels.images.shape, machine.device.type == "cuda"
    size = max(1, min(1024, BATCH_PIXELS // math.prod(shape[1:])))
    centre = pixels.centre(crop)
    rows = torch.arange(shape[0], device=pixels.images.device)[machine.group.shard(shape[0])]
    found = []
    with memory_guard("extracting features"), machine.autocast():
        for batch in pixels.taken(rows.split(size)):
            count = len(batch)
            if (
                on_gpu and count < size
            ):  # cuDNN tries its algorithms for every new shape: longer than a full batch takes
                batch = torch.cat([batch, batch[:1].expand(size - count, -1, -1, -1)])
            if centre is not None:
                batch = centre.apply(batch, {})
            found.append(backbone(pixels.normalise(batch)).float()[:count])
    return machine.group.gathered(torch.cat(found), shape[0])
