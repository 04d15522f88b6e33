"""What every source of images delivers: two sets of uint8 images with labels, and the names of the classes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from efcil.errors import DataError


def format_list(items: Sequence[str]) -> str:
    """Name the first five of some things, and how many more there are.

    >>> format_list(["a", "b", "c", "d", "e", "f", "g"])
    'a, b, c, d, e and 2 more'
    """
    more = f" and {len(items) - 5} more" if len(items) > 5 else ""
    return ", ".join(items[:5]) + more


@dataclass(frozen=True)
class Official:
    """How many classes and images the official set has, in all and in each class; None where that varies."""

    classes: int
    train: int | None
    test: int
    train_each: int | None = None
    test_each: int | None = None

    def differences(self, names: Sequence[str], train: npt.NDArray[np.int64], test: npt.NDArray[np.int64]) -> list[str]:
        """Say in what a copy with so many images of each class differs.

        >>> Official(2, 4, 2, train_each=2).differences(["a", "b"], np.array([2, 1]), np.array([1, 1]))
        ['3 training images, the official set has 4', '1 class without 2 training images: b (1)']
        """
        found = []
        if len(names) != self.classes:
            found.append(f"{len(names):,} classes, the official set has {self.classes:,}")
        for part, counts, total, each in (
            ("training", train, self.train, self.train_each),
            ("test", test, self.test, self.test_each),
        ):
            if total is not None and counts.sum() != total:
                found.append(f"{counts.sum():,} {part} images, the official set has {total:,}")
            odd = [f"{name} ({count})" for name, count in zip(names, counts, strict=True) if each not in (None, count)]
            if odd:
                classes = "class" if len(odd) == 1 else "classes"
                found.append(f"{len(odd)} {classes} without {each} {part} images: {format_list(odd)}")
        return found


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
    short: int | None = None  # short side at which the center of an image is cut out; None: the stored one

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

    def split_validation(self, share: float, seed: int) -> DataSet:
        """Return the same problem without its test images: a share of each class's training images is in their place.

        At least one image of a class is held out and at least one is left, drawn by the seed; the same ones each time.
        """
        draw = np.random.default_rng(seed)
        held = []
        for label, name in enumerate(self.class_names):
            rows = np.flatnonzero(self.train.labels == label)
            if len(rows) < 2:
                raise DataError(f"{self.name}: class {name} has one training image, so none can be held out")
            count = min(max(1, round(share * len(rows))), len(rows) - 1)
            held.append(draw.choice(rows, count, replace=False))
        chosen = np.zeros(len(self.train), dtype=bool)
        chosen[np.concatenate(held)] = True
        left, out = (ImageSet(self.train.images[rows], self.train.labels[rows]) for rows in (~chosen, chosen))
        return replace(self, train=left, test=out)

    def fingerprint(self) -> str:
        """A short hash of names, labels and a sample of pixels: tells a resumed run that its data are the same."""
        digest = hashlib.sha256(repr((self.class_names, self.train.images.shape, self.test.images.shape)).encode())
        for part in (self.train, self.test):
            digest.update(np.ascontiguousarray(part.labels).tobytes())
            digest.update(np.ascontiguousarray(part.images[:: max(1, len(part) // 64)]).tobytes())
        return digest.hexdigest()[:16]
