"""Find images that are there more than once: copies of a file, and the same picture resized or compressed again."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

SIDE = 16  # pixels of the thumbnails that are compared
# Correlation of thumbnails from which two images are the same picture. Among 700 photos each of pets, flowers, birds,
# cars and clothing, different ones reach 0.972; a copy at 60 % of the size and JPEG quality 50 has at least 0.995.
SIMILARITY = 0.99
MIN_CONTRAST = 4.0  # standard deviation (of 0 to 255) of a thumbnail below which there is no content to compare
_ROWS = 1024  # rows of images and of the correlation matrix that are in memory at a time

Images = npt.NDArray[np.uint8]
Thumbnails = npt.NDArray[np.float32]


def find_duplicates(images: Images) -> list[list[int]]:
    """Return groups of rows of `images` (n, channels, height, width) that are the same picture, in order.

    Images are compared as color thumbnails of 16 x 16 pixels: a copy that was resized or compressed again is found, a
    mirrored or cropped one is not. Images without content, such as a single color, must be equal in all pixels.

    >>> noise = np.random.default_rng(0).integers(0, 256, (3, 3, 16, 16), dtype=np.uint8)
    >>> find_duplicates(noise[[0, 1, 0, 2]])
    [[0, 2]]
    """
    found = Duplicates()
    for begin in range(0, len(images), _ROWS):
        found.add(images[begin : begin + _ROWS])
    return found.groups()


class Duplicates:
    """`find_duplicates` of images that come in batches and are not kept."""

    def __init__(self) -> None:
        self._place: dict[bytes, int] = {}  # pixels -> first row
        self._same: list[int] = []  # row -> an earlier row of the same picture, or itself
        self._rows: list[int] = []  # rows of the thumbnails
        self._thumbnails: list[Thumbnails] = []

    def add(self, images: Images) -> None:
        """Take up further images."""
        begin = len(self._same)
        for row, image in enumerate(images, begin):
            self._same.append(self._place.setdefault(hashlib.sha256(image.tobytes()).digest(), row))
        new = sorted({row - begin for row in self._same[begin:] if row >= begin})
        rows, thumbnails = _thumbnails(images[new])
        self._rows += [begin + new[row] for row in rows]
        self._thumbnails.append(thumbnails)

    def groups(self) -> list[list[int]]:
        """Return groups of rows, in the order in which the images came."""
        same, rows = list(self._same), self._rows
        thumbnails = np.concatenate(self._thumbnails) if rows else np.zeros((0, 1), np.float32)
        for begin in range(0, len(rows), _ROWS):
            similar = np.triu(thumbnails[begin : begin + _ROWS] @ thumbnails[begin:].T >= SIMILARITY, 1)
            for one, other in np.argwhere(similar).tolist():
                earlier, later = sorted((_first(same, rows[begin + one]), _first(same, rows[begin + other])))
                same[later] = earlier
        groups: dict[int, list[int]] = {}
        for row in range(len(same)):
            groups.setdefault(_first(same, row), []).append(row)
        return [group for group in groups.values() if len(group) > 1]


def _first(same: list[int], row: int) -> int:
    """Return the first row of a group."""
    while same[row] != row:
        row = same[row]
    return row


def _thumbnails(images: Images) -> tuple[list[int], Thumbnails]:
    """Return the rows with content and their thumbnails, flat, with mean 0 and length 1."""
    height, width = (np.arange(min(SIDE, side)) * side // min(SIDE, side) for side in images.shape[2:])
    sums = np.add.reduceat(np.add.reduceat(images, height, axis=2, dtype=np.uint32), width, axis=3)
    areas = np.diff(height, append=images.shape[2])[:, None] * np.diff(width, append=images.shape[3])
    flat = (sums / areas).reshape(len(images), images.shape[1] * len(height) * len(width)).astype(np.float32)
    flat -= flat.mean(axis=1, keepdims=True)
    contrast = flat.std(axis=1)
    flat = flat[contrast >= MIN_CONTRAST]
    return np.flatnonzero(contrast >= MIN_CONTRAST).tolist(), flat / np.linalg.norm(flat, axis=1, keepdims=True)
