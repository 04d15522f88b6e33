"""Turn stored uint8 images into batches of the network's input."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from efcil.accel.backend import Backend
from efcil.data import augment
from efcil.data.augment import CenterCrop, Parameters, Transform
from efcil.training.image_store import ImageStore, iter_rows


class ImageBatches:
    """uint8 images and their normalization and augmentation."""

    def __init__(
        self,
        images: ImageStore,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        backend: Backend,
        short: int | None = None,
    ):
        self.images = images  # (n, channels, height, width) uint8
        self.short = short  # short side at which their center is cut out; None: the stored one
        shape = (1, len(mean), 1, 1)
        self.scale = (1 / (255 * torch.tensor(std, dtype=torch.float64))).float().view(shape).to(backend.device)
        self.offset = (
            (torch.tensor(mean, dtype=torch.float64) / torch.tensor(std, dtype=torch.float64)).float().view(shape)
        ).to(backend.device)
        self.backend = backend
        self.augmentation: tuple[Transform, Parameters] | None = None  # applied when batches are made

    def center_crop(self, crop: int | None) -> CenterCrop | None:
        """Return the transform that cuts out the central `crop` x `crop`, None where there is nothing to cut."""
        if crop is None or crop == self.images.shape[-1]:
            return None
        return CenterCrop(crop, self.short)

    def with_images(self, images: ImageStore) -> ImageBatches:
        """Return a copy with other images."""
        other = copy.copy(self)
        other.images, other.augmentation = images, None
        return other

    def augmented(self, transform: Transform, source: torch.Generator) -> ImageBatches:
        """Return the same images, augmented by random numbers drawn now and applied when batches are made."""
        other = copy.copy(self)
        other.augmentation = (transform, augment.draw(transform, len(self.images), source))
        return other

    def batches_of(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the uint8 images of each part's rows."""
        parts = list(parts)
        for rows, batch in zip(parts, iter_rows(self.images, parts), strict=True):
            if self.augmentation is not None:
                transform, drawn = self.augmentation
                batch = augment.apply(transform, batch, {name: value[rows] for name, value in drawn.items()})
            yield batch

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield all images, `size` at a time."""
        return self.batches_of(torch.arange(len(self.images), device=self.images.device).split(size))

    def normalize(self, batch: Tensor) -> Tensor:
        """Pixels 0 .. 255 -> (pixel / 255 - mean) / std."""
        return self.backend.normalize(batch, self.scale, self.offset)
