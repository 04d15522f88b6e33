"""Decoding of uploaded images within the limits, and printable file names."""

from __future__ import annotations

import base64
import binascii

import numpy as np
import numpy.typing as npt

from efcil.data.decode import read_image
from efcil.data.preprocessing import Preprocessing
from efcil.errors import DataError

ImageArray = npt.NDArray[np.uint8]
LONGEST_NAME = 200


def printable(name: str) -> str:
    """Sanitize an untrusted name for responses: printable, on one line, of limited length.

    >>> printable("cat\\n\\x1b[31m.jpg")
    'cat??[31m.jpg'
    """
    clean = "".join(c if c.isprintable() else "?" for c in name)
    return clean if len(clean) <= LONGEST_NAME else clean[: LONGEST_NAME - 3] + "..."


def decode_image(data: bytes, size: int | Preprocessing, max_pixels: int) -> ImageArray:
    """Decode an image into uint8 (3, size, size); raise DataError with only the reason if it is unreadable."""
    try:
        return read_image(data, size, max_pixels=max_pixels, name="picture")
    except DataError as error:
        raise DataError(str(error).removeprefix("picture: ")) from None


def from_base64(text: str) -> bytes:
    """Decode base64 text, with or without a data URL prefix.

    >>> from_base64("data:image/png;base64,aGk="), from_base64("aGk=")
    (b'hi', b'hi')
    """
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"not base64: {error}") from None
