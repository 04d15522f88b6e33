"""What every source of images delivers: two sets of uint8 images with labels, and the names of the classes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from efcil.errors import DataError


@dataclass(frozen=True)
class ImageSet:
    """Images of one size with their labels; `images` may be a read-only memory map."""

    images: npt.NDArray[np.uint8]  # (n, channels, height, width)
    labels: npt.NDArray[np.int64]  # (n,), 0 .. classes - 1

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != np.uint8:
            raise DataError(
                f"images must be uint8 (n, channels, height, width), got {self.images.dtype} {self.images.shape}"
            )
        if self.labels.shape != self.images.shape[:1]:
            raise DataError(f"{len(self.images)} images but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class DataSet:
    """A named problem: what may be learned from (`train`) and what only the protocol may look at (`test`)."""

    name: str
    class_names: tuple[str, ...]
    train: ImageSet
    test: ImageSet
    mean: tuple[float, ...]  # per channel, of pixels in 0 .. 1
    std: tuple[float, ...]
    notes: tuple[str, ...] = ()  # what the user should know, e.g. a copy whose hash differs from the official one

    def __post_init__(self) -> None:
        for part, name in ((self.train, "training"), (self.test, "test")):
            counts = np.bincount(part.labels, minlength=len(self.class_names))
            if len(counts) > len(self.class_names):
                raise DataError(
                    f"{self.name}: a {name} label is {len(counts) - 1}, but there are {len(self.class_names)} classes"
                )
            if (counts == 0).any():
                empty = [self.class_names[i] for i in np.flatnonzero(counts == 0)[:5]]
                raise DataError(
                    f"{self.name}: no {name} images for class {', '.join(empty)}; add images or remove the class"
                )

    @property
    def channels(self) -> int:
        """Colour channels of an image."""
        return self.train.images.shape[1]

    @property
    def size(self) -> int:
        """Height and width of the stored images."""
        return self.train.images.shape[2]

    def fingerprint(self) -> str:
        """A short hash of names, labels and a sample of pixels: tells a resumed run that its data are the same."""
        digest = hashlib.sha256(repr((self.class_names, self.train.images.shape, self.test.images.shape)).encode())
        for part in (self.train, self.test):
            digest.update(np.ascontiguousarray(part.labels).tobytes())
            digest.update(np.ascontiguousarray(part.images[:: max(1, len(part) // 64)]).tobytes())
        return digest.hexdigest()[:16]
