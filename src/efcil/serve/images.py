"""Pictures as they come in: bytes to pixels within the limits, and names that can be shown."""

from __future__ import annotations

import base64
import binascii

import numpy as np
import numpy.typing as npt

from efcil.data.decode import read_image
from efcil.errors import DataError

ImageArray = npt.NDArray[np.uint8]
LONGEST_NAME = 200


def printable(name: str) -> str:
    """Return a name from outside as it may stand in an answer: printable, on one line, not endless.

    >>> printable("cat\\n\\x1b[31m.jpg")
    'cat??[31m.jpg'
    """
    clean = "".join(c if c.isprintable() else "?" for c in name)
    return clean if len(clean) <= LONGEST_NAME else clean[: LONGEST_NAME - 3] + "..."


def decode_image(data: bytes, size: int, max_pixels: int) -> ImageArray:
    """Decode one picture into uint8 (3, size, size); what cannot be read raises DataError with the reason alone."""
    try:
        return read_image(data, size, max_pixels=max_pixels, name="picture")
    except DataError as error:
        raise DataError(str(error).removeprefix("picture: ")) from None


def from_base64(text: str) -> bytes:
    """Return the bytes of base64 text, with or without the head of a data address.

    >>> from_base64("data:image/png;base64,aGk="), from_base64("aGk=")
    (b'hi', b'hi')
    """
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"not base64: {error}") from None
