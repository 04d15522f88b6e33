"""Extract features with the backbone in eval mode."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from efcil.accel.backend import Backend
from efcil.training.image_batches import ImageBatches
from efcil.training.memory import memory_guard

BATCH_PIXELS = 2**24  # per forward pass: 1,024 images of 32 x 32 x 3 would be 2**21.6, one hundred of 224 x 224 x 3


@torch.no_grad()
def extract(backbone: nn.Module, pixels: ImageBatches, backend: Backend, crop: int | None = None) -> Tensor:
    """Return the features (n, dim) of all images, float32, with the backbone in eval mode; `crop` cuts out the center.

    With several processes, each computes its share of the rows and all of them receive all rows.
    """
    backbone.eval()
    shape, way = pixels.images.shape, backend.inference(backbone)
    size = max(1, min(1024, BATCH_PIXELS // pixels.input_numel))
    center = pixels.center_crop(crop)
    if way.batch_numel is not None and not way.full_batches:
        size = max(4, min(512, way.batch_numel // pixels.input_numel))
    elif way.batch_numel is not None and center is None:
        size = max(1, way.batch_numel // pixels.input_numel)
    rows = torch.arange(shape[0], device=pixels.images.device)[backend.world.shard(shape[0])]

    def forward() -> Tensor:
        found = []
        with backend.autocast():
            for batch in pixels.batches_of(rows.split(size)):
                count = len(batch)
                if way.full_batches and count < size:
                    batch = torch.cat([batch, batch[:1].expand(size - count, -1, -1, -1)])
                if center is not None:
                    batch = center.apply(batch, {})
                found.append(way.call(pixels.normalize(batch)).float()[:count])
        return torch.cat(found)

    with memory_guard("extracting features"):
        return backend.world.all_gather(backend.run_on_autotune_thread(forward), shape[0])
