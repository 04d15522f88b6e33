"""Uploaded images decoded at the model's size, with classes and refused files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from efcil.data.dataset import format_list
from efcil.errors import DataError
from efcil.product.names import check_names
from efcil.serve.archive import LimitExceeded, NamedImage, iter_images, open_archive
from efcil.serve.images import ImageArray, printable, public
from efcil.serve.limits import Limits

Decode = Callable[[bytes], ImageArray]  # raises DataError for an unreadable picture


@dataclass(frozen=True)
class UploadedImages:
    """Decoded training images of an upload; file names are not kept."""

    pixels: ImageArray  # (n, 3, size, size)
    labels: list[str]
    refused: list[tuple[str, str]]  # (file, reason)

    @property
    def classes(self) -> list[str]:
        """Classes in upload order."""
        return list(dict.fromkeys(self.labels))

    def save(self, path: Path) -> None:
        """Save the pixels for the worker process."""
        np.save(path, self.pixels, allow_pickle=False)


def from_archive(file: IO[bytes], decode: Decode, limits: Limits, known: Sequence[str]) -> UploadedImages:
    """Read a zip of class folders."""
    refused: list[tuple[str, str]] = []
    with open_archive(file, limits) as archive:
        return _decode_images(iter_images(archive, limits, refused), refused, decode, known)


def from_files(files: Iterable[tuple[str, bytes]], label: str, decode: Decode, known: Sequence[str]) -> UploadedImages:
    """Read the images of one class."""
    return _decode_images(((printable(name), label, partial(bytes, data)) for name, data in files), [], decode, known)


def _decode_images(
    given: Iterable[NamedImage], refused: list[tuple[str, str]], decode: Decode, known: Sequence[str]
) -> UploadedImages:
    """Decode images; new names must be distinguishable from `known`, the classes of the model."""
    found: list[ImageArray] = []
    labels: list[str] = []
    named: dict[str, None] = {}  # all classes, with readable images or not
    for name, label, read in given:
        if label not in named:
            check_names([label], [*known, *named])
            named[label] = None
        try:
            found.append(decode(read()))
        except LimitExceeded:
            raise
        except DataError as error:
            refused.append((name, public(str(error))))
        else:
            labels.append(label)
    readable = set(labels)
    empty = [name for name in named if name not in readable]
    if empty or not found:
        whose = "no image to learn from" if not named else f"no readable image of {format_list(empty)}"
        raise DataError(whose + (": " + "; ".join(f"{name}: {why}" for name, why in refused[:3]) if refused else ""))
    return UploadedImages(np.stack(found), labels, refused)
