"""Decoding of uploaded images within the limits, and printable file names."""

from __future__ import annotations

import base64
import binascii
import re

import numpy as np
import numpy.typing as npt

from efcil.data.decode import read_image
from efcil.data.preprocessing import Preprocessing
from efcil.errors import DataError
from efcil.errors import printable as escaped

ImageArray = npt.NDArray[np.uint8]
LONGEST_NAME = 200


def printable(name: str) -> str:
    """Sanitize an untrusted name for responses: printable, on one line, of limited length.

    >>> printable("cat\\n\\x1b[31m.jpg")
    'cat??[31m.jpg'
    """
    clean = "".join(c if c.isprintable() else "?" for c in name)
    return clean if len(clean) <= LONGEST_NAME else clean[: LONGEST_NAME - 3] + "..."


_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[/\\][^\s/\\:;,'\"()<>]+){2,}[/\\]?")
_OBJECT = re.compile(r"<[\w.]+ (?:object )?at 0x[0-9a-f]+>|\[Errno -?\d+\] |\b(?:Posix|Windows)Path\b")
LONGEST_REASON = 1000


def public(text: str, directory: str = "") -> str:
    """Return what an answer may say of an error: one line, without places on this machine or Python's names of things.

    >>> public("cannot save to /srv/my models/pets/x: [Errno 28] No space left on device", "/srv/my models/pets")
    'cannot save to the model/x: No space left on device'
    >>> public("/tmp/x1/y: an image of 3 x 2 at /predict")
    '(a file): an image of 3 x 2 at /predict'
    """
    text = text.replace(directory, "the model") if directory else text
    text = _OBJECT.sub("", text)
    if not text.startswith("archive: "):  # whose paths are the client's
        text = _PATH.sub("(a file)", text)
    return escaped(text[:LONGEST_REASON])


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
