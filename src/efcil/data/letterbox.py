"""Letterbox uncropped photographs into arrays of one shape, for random crops.

An image with short side `size` is stored in a frame of `size` x `size * 3 // 2`: portraits are rotated, images longer
than 3:2 are cropped, shorter ones are padded. An additional column, the header, encodes the width and whether the image
was rotated, so that this information is copied with the pixels to caches, batches and exemplars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor  # decoding processes do not import torch


def max_width(size: int) -> int:
    """Return the width of a frame without its header.

    >>> max_width(256)
    384
    """
    return size * 3 // 2


def stored_shape(channels: int, size: int, keep_aspect: bool) -> tuple[int, int, int]:
    """Return the shape of a stored image: a frame or a center crop.

    >>> stored_shape(3, 256, True), stored_shape(3, 256, False)
    ((3, 256, 385), (3, 256, 256))
    """
    return channels, size, max_width(size) + 1 if keep_aspect else size


def pad(picture: npt.NDArray[np.uint8], is_portrait: bool) -> npt.NDArray[np.uint8]:
    """Pad a landscape image (channels, size, width) to the frame width and write its header."""
    channels, size, width = picture.shape
    frame = np.zeros(stored_shape(channels, size, True), dtype=np.uint8)
    frame[:, :, :width] = picture
    frame[0, :3, -1] = width // 256, width % 256, is_portrait
    return frame


def is_letterboxed(images: Tensor) -> bool:
    """Return whether images (n, channels, height, width) are frames, which have a unique shape."""
    return images.shape[3] == max_width(images.shape[2]) + 1


def read_header(frames: Tensor) -> tuple[Tensor, Tensor]:
    """Return the width (n,) of each image and whether it is a rotated portrait (n,)."""
    header = frames[:, 0, :3, -1].long()
    return header[:, 0] * 256 + header[:, 1], header[:, 2] == 1
