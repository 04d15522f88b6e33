"""Turn stored uint8 images into batches of the network's input."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from efcil.accel.backend import Backend
from efcil.data import augment
from efcil.data.augment import CenterCrop, Parameters, Transform
from efcil.data.preprocessing import Preprocessing
from efcil.training.image_store import ImageStore, iter_rows


class Moments(Protocol):
    """What a data set says of its images."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel, of pixels in [0, 1]."""

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel."""

    @property
    def short(self) -> int | None:
        """Short side at which the center is cut out."""

    @property
    def resize(self) -> Preprocessing | None:
        """What batches are resized to."""


def resized(batch: Tensor, wanted: Preprocessing) -> Tensor:
    """Resize square images and cut out their center; pixels stay in 0 .. 255.

    >>> resized(torch.full((1, 3, 8, 8), 200, dtype=torch.uint8), Preprocessing(12, 0.75)).shape
    torch.Size([1, 3, 12, 12])
    """
    whole = wanted.size if wanted.squash else round(wanted.size / wanted.crop)
    smooth = wanted.interpolation != "nearest"
    mode = "bicubic" if wanted.interpolation == "lanczos" else wanted.interpolation
    larger = interpolate(batch.float(), (whole, whole), mode=mode, antialias=smooth).clamp(0, 255)
    margin = (whole - wanted.size) // 2
    return larger[..., margin : margin + wanted.size, margin : margin + wanted.size]


class ImageBatches:
    """uint8 images and their normalization and augmentation."""

    def __init__(
        self,
        images: ImageStore,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        backend: Backend,
        short: int | None = None,
        resize: Preprocessing | None = None,
    ):
        self.images = images  # (n, channels, height, width) uint8
        self.resize = resize  # what batches are resized to before they are normalized
        self.short = short  # short side at which their center is cut out; None: the stored one
        shape = (1, len(mean), 1, 1)
        self.scale = (1 / (255 * torch.tensor(std, dtype=torch.float64))).float().view(shape).to(backend.device)
        self.offset = (
            (torch.tensor(mean, dtype=torch.float64) / torch.tensor(std, dtype=torch.float64)).float().view(shape)
        ).to(backend.device)
        self.backend = backend
        self.augmentation: tuple[Transform, Parameters] | None = None  # applied when batches are made

    @classmethod
    def of(cls, images: ImageStore, data: Moments, backend: Backend) -> ImageBatches:
        """Return images of a data set, which says how they become the network's input."""
        return cls(images, data.mean, data.std, backend, data.short, data.resize)

    @property
    def input_numel(self) -> int:
        """Numbers in an image as the network sees it, or as it is stored if that is more."""
        channels, height, width = self.images.shape[1:]
        return channels * max(height * width, 0 if self.resize is None else self.resize.size**2)

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
        """Pixels 0 .. 255 -> (pixel / 255 - mean) / std, of the side that the network wants."""
        if self.resize is not None:
            batch = resized(batch, self.resize)
        return self.backend.normalize(batch, self.scale, self.offset)
