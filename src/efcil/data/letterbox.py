"""Letterbox whole photographs into arrays of one shape, so that a random crop may fall on any part of them.

A picture with its short side at `size` lies in a frame of `size` x `size * 3 // 2`: upright ones are laid on their
side, ones longer than 3:2 lose their ends, and what a shorter one leaves is empty. One more column, the header, says
how wide the picture is and whether it was laid down: so it keeps its shape wherever its pixels are copied to,
into a cache, a stream, a batch or an exemplar memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor  # processes that decode do without torch


def max_width(size: int) -> int:
    """Return the width of the longest picture.

    >>> max_width(256)
    384
    """
    return size * 3 // 2


def stored_shape(channels: int, size: int, keep_aspect: bool) -> tuple[int, int, int]:
    """Return the shape of a stored image: a frame, or a square that was cut out of the middle.

    >>> stored_shape(3, 256, True), stored_shape(3, 256, False)
    ((3, 256, 385), (3, 256, 256))
    """
    return channels, size, max_width(size) + 1 if keep_aspect else size


def pad(picture: npt.NDArray[np.uint8], is_portrait: bool) -> npt.NDArray[np.uint8]:
    """Pad a landscape picture (channels, size, width) to the frame's width and write its header."""
    channels, size, width = picture.shape
    frame = np.zeros(stored_shape(channels, size, True), dtype=np.uint8)
    frame[:, :, :width] = picture
    frame[0, :3, -1] = width // 256, width % 256, is_portrait
    return frame


def is_letterboxed(images: Tensor) -> bool:
    """Whether images (n, channels, height, width) are frames: nothing else that is stored has their shape."""
    return images.shape[3] == max_width(images.shape[2]) + 1


def read_header(frames: Tensor) -> tuple[Tensor, Tensor]:
    """Read the width (n,) of each picture and whether it is a rotated portrait (n,)."""
    header = frames[:, 0, :3, -1].long()
    return header[:, 0] * 256 + header[:, 1], header[:, 2] == 1
