"""Features of images under a backbone at rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from efcil.accel.folded_resnet import rested
from efcil.accel.machine import Machine
from efcil.accel.prefetch import AT_REST
from efcil.training.image_batches import Pixels
from efcil.training.memory import memory_guard

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
    fast = rested(backbone, machine.device, machine.dtype) if machine.branches else None
    if fast is not None and centre is None:  # as many as the teacher sees: what cuDNN tried out for one holds for both
        size = max(1, AT_REST // math.prod(shape[1:]))
    rows = torch.arange(shape[0], device=pixels.images.device)[machine.group.shard(shape[0])]

    def looked() -> Tensor:
        found = []
        with machine.autocast():
            for batch in pixels.taken(rows.split(size)):
                count = len(batch)
                if on_gpu and count < size:  # cuDNN tries its algorithms for every new shape: longer than a full batch
                    batch = torch.cat([batch, batch[:1].expand(size - count, -1, -1, -1)])
                if centre is not None:
                    batch = centre.apply(batch, {})
                found.append((fast or backbone)(pixels.normalise(batch)).float()[:count])
        return torch.cat(found)

    with memory_guard("extracting features"):
        return machine.group.gathered(machine.convolving(looked), shape[0])
