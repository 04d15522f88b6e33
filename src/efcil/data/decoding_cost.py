"""Estimate from the head of an image file how long it takes to decode, without decoding it and without Pillow."""

from __future__ import annotations

UNKNOWN = 3600.0  # seconds: a format or a file that cannot be judged
_MARKERS = 64  # JPEG markers before the image, PNG chunks beside those that hold 4 KiB
_CHUNK = 4096
_DEFLATED = (b"zTXt", b"iTXt", b"iCCP")  # PNG chunks that Pillow inflates, each to at most ...
_MOST_INFLATED, _DEFLATE = 2**20, 1032  # ... so many bytes, and to at most so many times its length
_PIXEL_JPEG, _PIXEL_SCAN, _PIXEL, _SAMPLE, _BYTE = 4e-9, 0.3e-9, 10e-9, 10e-9, 10e-9  # seconds of one core, rounded up
_INFLATED = 4e-9


def decoding_seconds(data: bytes) -> float:
    """Return about how long decoding takes at most; `UNKNOWN` unless the head of the file says so.

    >>> decoding_seconds(b"GIF89a")
    3600.0
    """
    if data[:2] == b"\xff\xd8":
        return _jpeg(data)
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return _png(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    return UNKNOWN


def _jpeg(data: bytes) -> float:
    """Walk over the size of the image to its first scan; each scan goes over all blocks, even where it holds nothing.

    A file with many markers before that, or with bytes between them, costs Pillow time for each.
    """
    at, pixels = 2, 0
    for _ in range(_MARKERS):
        if at + 9 > len(data) or data[at] != 0xFF:
            break
        kind = data[at + 1]
        if kind == 0xDA:
            scans = data.count(b"\xff\xda")
            return pixels * (_PIXEL_JPEG + _PIXEL_SCAN * scans) + len(data) * _BYTE
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            found = int.from_bytes(data[at + 5 : at + 7]) * int.from_bytes(data[at + 7 : at + 9])
            pixels = max(pixels, found)
        at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return UNKNOWN


def _png(data: bytes) -> float:
    """Multiply the pixels by the bytes of one; walk over the chunks, since each costs time, however short it is."""
    if data[12:16] != b"IHDR" or data.count(b"IHDR") > 1:  # Pillow believes the last one
        return UNKNOWN
    pixels = int.from_bytes(data[16:20]) * int.from_bytes(data[20:24])
    depth, channels = data[24:25], {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(data[25] if len(data) > 25 else -1, 4)
    at, room, inflated = 8, _MARKERS + len(data) // _CHUNK, 0
    while at < len(data) and room:
        length = int.from_bytes(data[at : at + 4])
        if data[at + 4 : at + 8] in _DEFLATED:
            inflated += min(length * _DEFLATE, _MOST_INFLATED)
        at, room = at + 12 + length, room - 1
    if at < len(data):
        return UNKNOWN
    samples = channels * (2 if depth == b"\x10" else 1)
    return pixels * (_PIXEL + _SAMPLE * samples) + len(data) * _BYTE + inflated * _INFLATED


def _webp(data: bytes) -> float:
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X" and len(body) == 10:
        width, height = 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    elif kind == b"VP8 " and len(body) == 10:
        width, height = (int.from_bytes(body[i : i + 2], "little") & 0x3FFF for i in (6, 8))
    elif kind == b"VP8L" and len(body) >= 5:
        bits = int.from_bytes(body[1:5], "little")
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        return UNKNOWN
    return width * height * (_PIXEL + 2 * _SAMPLE) + len(data) * _BYTE
