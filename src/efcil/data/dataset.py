"""Data sets: training and test images as uint8 arrays with labels and class names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from efcil.data.preprocessing import Preprocessing
from efcil.errors import DataError

COLORS = 3  # channels that pretrained networks have


def format_list(items: Sequence[str]) -> str:
    """Join up to five items and the number of further ones.

    >>> format_list(["a", "b", "c", "d", "e", "f", "g"])
    'a, b, c, d, e and 2 more'
    """
    more = f" and {len(items) - 5} more" if len(items) > 5 else ""
    return ", ".join(items[:5]) + more


@dataclass(frozen=True)
class Official:
    """Number of classes and images of the official data set, in total and per class; None where it varies."""

    classes: int
    train: int | None
    test: int
    train_each: int | None = None
    test_each: int | None = None

    def differences(self, names: Sequence[str], train: npt.NDArray[np.int64], test: npt.NDArray[np.int64]) -> list[str]:
        """Describe how a copy with these numbers of images per class differs.

        >>> Official(2, 4, 2, train_each=2).differences(["a", "b"], np.array([2, 1]), np.array([1, 1]))
        ['3 training images, the official set has 4', '1 class without 2 training images: b (1)']
        """
        messages = []
        if len(names) != self.classes:
            messages.append(f"{len(names):,} classes, the official set has {self.classes:,}")
        for part, counts, total, each in (
            ("training", train, self.train, self.train_each),
            ("test", test, self.test, self.test_each),
        ):
            if total is not None and counts.sum() != total:
                messages.append(f"{counts.sum():,} {part} images, the official set has {total:,}")
            odd = [f"{name} ({count})" for name, count in zip(names, counts, strict=True) if each not in (None, count)]
            if odd:
                classes = "class" if len(odd) == 1 else "classes"
                messages.append(f"{len(odd)} {classes} without {each} {part} images: {format_list(odd)}")
        return messages


def in_color(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return images (n, channels, height, width) with three channels.

    >>> in_color(np.zeros((5, 1, 8, 8), np.uint8)).shape
    (5, 3, 8, 8)
    """
    return images if images.shape[1] == COLORS else np.repeat(images, COLORS, axis=1)


@dataclass(frozen=True)
class ImageSet:
    """Images of equal size with labels; `images` may be a read-only memory map."""

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
    """Data set with training images and test images, which only the evaluation protocol accesses."""

    name: str
    class_names: tuple[str, ...]
    train: ImageSet
    test: ImageSet
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    notes: tuple[str, ...] = ()  # for the user, such as differences from the official files
    short: int | None = None  # short side for center crops; None: the stored size
    resize: Preprocessing | None = None  # what batches are resized to; None: the stored size

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
        """Number of color channels."""
        return self.train.images.shape[1]

    @property
    def size(self) -> int:
        """Height and width of the stored images."""
        return self.train.images.shape[2]

    def prepared(self, wanted: Preprocessing) -> DataSet:
        """Return the same images as a network wants them: in color, resized in batches, and normalized as it expects.

        >>> image = np.zeros((1, 1, 8, 8), np.uint8)
        >>> part = ImageSet(image, np.zeros(1, np.int64))
        >>> data = DataSet("dots", ("black",), part, part, (0.5,), (0.5,)).prepared(Preprocessing(224))
        >>> data.channels, data.size, data.resize.size
        (3, 8, 224)
        """
        train, test = (ImageSet(in_color(part.images), part.labels) for part in (self.train, self.test))
        resize = None if self.size == wanted.size else wanted
        return replace(self, train=train, test=test, mean=wanted.mean, std=wanted.std, resize=resize)

    def split_validation(self, share: float, seed: int) -> DataSet:
        """Replace the test images by a held-out fraction of the training images of each class.

        At least one image per class is held out and at least one remains; the split is deterministic in the seed.
        """
        draw = np.random.default_rng(seed)
        val_rows = []
        for label, name in enumerate(self.class_names):
            rows = np.flatnonzero(self.train.labels == label)
            if len(rows) < 2:
                raise DataError(
                    f"{self.name}: class {name} has one training image, so none can be held out; add images"
                )
            count = min(max(1, round(share * len(rows))), len(rows) - 1)
            val_rows.append(draw.choice(rows, count, replace=False))
        chosen = np.zeros(len(self.train), dtype=bool)
        chosen[np.concatenate(val_rows)] = True
        left, out = (ImageSet(self.train.images[rows], self.train.labels[rows]) for rows in (~chosen, chosen))
        return replace(self, train=left, test=out)

    def fingerprint(self) -> str:
        """Hash names, labels and a sample of pixels, so that a resumed run can check its data."""
        digest = hashlib.sha256(repr((self.class_names, self.train.images.shape, self.test.images.shape)).encode())
        for part in (self.train, self.test):
            digest.update(np.ascontiguousarray(part.labels).tobytes())
            digest.update(np.ascontiguousarray(part.images[:: max(1, len(part) // 64)]).tobytes())
        return digest.hexdigest()[:16]
