"""Turn stored uint8 images into batches of the network's input."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from efcil.accel.machine import Machine
from efcil.data.augment import CentreCrop, Parameters, Transform
from efcil.training.image_store import Store, fetched


class Pixels:
    """uint8 images and how they become the network's input."""

    def __init__(
        self,
        images: Store,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        machine: Machine,
        short: int | None = None,
    ):
        self.images = images  # (n, channels, height, width) uint8
        self.short = short  # short side at which their centre is cut out; None: the stored one
        shape = (1, len(mean), 1, 1)
        self.scale = (1 / (255 * torch.tensor(std, dtype=torch.float64))).float().view(shape).to(machine.device)
        self.offset = (
            (torch.tensor(mean, dtype=torch.float64) / torch.tensor(std, dtype=torch.float64)).float().view(shape)
        ).to(machine.device)
        self.format = torch.channels_last if machine.device.type == "cuda" else torch.contiguous_format
        self.at_once = machine.branches  # normalised by one kernel
        self.view: tuple[Transform, Parameters] | None = None  # how they are changed when they are taken

    def centre(self, crop: int | None) -> CentreCrop | None:
        """Return how the `crop` x `crop` in their middle are cut out, None where there is nothing to cut."""
        if crop is None or crop == self.images.shape[-1]:
            return None
        return CentreCrop(crop, self.short)

    def showing(self, images: Store) -> Pixels:
        """Return other images with the same normalisation."""
        other = copy.copy(self)
        other.images, other.view = images, None
        return other

    def changed(self, transform: Transform, source: torch.Generator) -> Pixels:
        """Return the same images augmented, each in one way that is drawn now; the work is done when they are taken."""
        other = copy.copy(self)
        other.view = (transform, transform.draw(len(self.images), source))
        return other

    def taken(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the uint8 images of each part's rows."""
        parts = list(parts)
        for rows, batch in zip(parts, fetched(self.images, parts), strict=True):
            if self.view is not None:
                transform, drawn = self.view
                batch = transform.apply(batch, {name: value[rows] for name, value in drawn.items()})
            yield batch

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield all images, `size` at a time."""
        return self.taken(torch.arange(len(self.images), device=self.images.device).split(size))

    def normalise(self, batch: Tensor) -> Tensor:
        """Pixels 0 .. 255 -> (pixel / 255 - mean) / std."""
        if self.at_once and batch.is_cuda:
            from efcil.accel import training_kernels

            return training_kernels.normalised(batch, self.scale, self.offset)
        return (batch.float() * self.scale - self.offset).contiguous(memory_format=self.format)
