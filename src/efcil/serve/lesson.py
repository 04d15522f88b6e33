"""What a teaching brings: pictures decoded at the model's size, their classes, and what could not be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from efcil.data.dataset import listed
from efcil.errors import DataError
from efcil.serve.archive import open_archive, pictures
from efcil.serve.limits import Limits
from efcil.serve.pictures import Pixels, pixels_of, shown

LONGEST_LABEL = 200


@dataclass(frozen=True)
class Lesson:
    """Pictures to learn from. Only these pixels are kept for the job; names of files are not."""

    pixels: Pixels  # (n, 3, size, size)
    labels: list[str]
    refused: list[tuple[str, str]]  # (file, reason)

    @property
    def classes(self) -> list[str]:
        """The classes taught, in the order in which they came."""
        return list(dict.fromkeys(self.labels))

    def save(self, path: Path) -> None:
        """Write the pixels for the job's process."""
        np.save(path, self.pixels, allow_pickle=False)


def from_archive(file: IO[bytes], size: int, limits: Limits) -> Lesson:
    """Read a zip of class folders."""
    refused: list[tuple[str, str]] = []
    with open_archive(file, limits) as archive:
        return _lesson(pictures(archive, limits, refused), refused, size, limits)


def from_files(files: Iterable[tuple[str, IO[bytes]]], label: str, size: int, limits: Limits) -> Lesson:
    """Read the pictures of one class."""

    def opened() -> Iterator[tuple[str, str, bytes]]:
        for name, file in files:
            file.seek(0)
            yield shown(name), label, file.read()

    return _lesson(opened(), [], size, limits)


def _lesson(
    given: Iterable[tuple[str, str, bytes]], refused: list[tuple[str, str]], size: int, limits: Limits
) -> Lesson:
    found: list[Pixels] = []
    labels: list[str] = []
    named: list[str] = []  # every class there is a picture of, readable or not
    for name, label, data in given:
        if label not in named:
            check_label(label)
            named.append(label)
        try:
            found.append(pixels_of(data, size, limits.pixels))
        except DataError as error:
            refused.append((name, str(error)))
        else:
            labels.append(label)
    empty = [name for name in named if name not in labels]
    if empty or not found:
        whose = "no picture to learn from" if not named else f"no readable picture of {listed(empty)}"
        raise DataError(whose + (": " + "; ".join(f"{name}: {why}" for name, why in refused[:3]) if refused else ""))
    return Lesson(np.stack(found), labels, refused)


def check_label(label: str) -> None:
    """Refuse a class name that nobody could see or type."""
    if not label.strip():
        raise DataError("label is empty; give the class a name")
    if len(label) > LONGEST_LABEL or not label.isprintable():
        raise DataError(f"label {shown(label)!r}: at most {LONGEST_LABEL} printable characters")
