"""Multipart forms, parsed from a complete body: every length and number is checked before anything is copied.

Nothing is written to disk. Boundaries are found by `bytearray.find`, so the time is that of one pass over the body,
whatever it holds; the service parses in a thread, never in its event loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.exceptions import HTTPException

from efcil.serve.images import printable

MAX_FIELD = 4096  # bytes of a field that is no file
MAX_FIELDS = 8  # fields that are no files
MAX_HEADER = 4096  # bytes of the headers of a part
MAX_BOUNDARY = 70  # RFC 2046
# Possessive, so that nothing is tried twice: the time is linear in the length whatever does not match.
_PARAMETER = re.compile(r';\s*+([A-Za-z0-9_-]++\*?+)\s*+=\s*+("(?:[^"\\]|\\.)*+"|[^;"\s]*+)\s*+(?=;|$)')


@dataclass(frozen=True)
class Upload:
    """A file of a form."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Form:
    """Fields and files by name, in the order sent."""

    texts: dict[str, str]
    files: dict[str, list[Upload]]


def parameters(header: str) -> dict[str, str]:
    """Return the parameters of a header field.

    >>> parameters('form-data; name="files"; filename="a\\\\"b;c.jpg"')
    {'name': 'files', 'filename': 'a"b;c.jpg'}
    """
    found: dict[str, str] = {}
    for match in _PARAMETER.finditer(header):
        value = match[2]
        if value.startswith('"'):
            value = value[1:-1].replace("\\\\", "\\").replace('\\"', '"')
        found.setdefault(match[1].lower(), value)
    return found


def boundary(content_type: str) -> bytes:
    """Return the boundary of a form; refuse one without, and every character set but UTF-8."""
    given = parameters(content_type)
    charset = given.get("charset", "utf-8").lower()
    if charset not in ("utf-8", "utf8"):
        raise HTTPException(415, f"charset {printable(charset)!r} of the form is not supported; send UTF-8")
    found = given.get("boundary", "")
    if not found or len(found) > MAX_BOUNDARY or not found.isascii():
        raise HTTPException(400, f"the form's boundary is missing or has more than {MAX_BOUNDARY} ASCII characters")
    return found.encode()


def parse(body: bytearray, mark: bytes, files: int, known: tuple[str, ...]) -> Form:
    """Parse a form with at most `files` files and the known fields; the first error is raised."""
    form = Form({}, {})
    count = 0
    for start, end in _parts(body, b"--" + mark):
        split = body.find(b"\r\n\r\n", start, min(end, start + MAX_HEADER + 4))
        if split < 0:
            raise HTTPException(400, f"a part of the form has no headers that end within {MAX_HEADER:,} bytes")
        name, filename = _names(bytes(body[start : split + 2]))
        if name not in known:
            raise HTTPException(422, f"unknown field {printable(name)!r}; known: {', '.join(known)}")
        split += 4
        if filename is not None:
            count += 1
            if count > files:
                raise HTTPException(413, f"more than {files:,} files; send at most {files:,} at once")
            form.files.setdefault(name, []).append(Upload(filename, bytes(memoryview(body)[split:end])))
            continue
        if end - split > MAX_FIELD:
            raise HTTPException(413, f"{name}: more than {MAX_FIELD:,} bytes; send a shorter value")
        if name in form.texts or len(form.texts) == MAX_FIELDS:
            raise HTTPException(422, f"{name}: given more than once")
        form.texts[name] = _text(bytes(body[split:end]), name)
    return form


def _parts(body: bytearray, mark: bytes) -> Iterator[tuple[int, int]]:
    """Yield where each part begins, after its boundary's line, and ends."""
    if not body.startswith(mark) and (begin := body.find(b"\r\n" + mark)) >= 0:
        place = begin + 2 + len(mark)
    elif body.startswith(mark):
        place = len(mark)
    else:
        raise HTTPException(400, "the form does not begin with its boundary")
    while not body.startswith(b"--", place):
        line = body.find(b"\r\n", place, place + MAX_BOUNDARY)
        if line < 0 or body[place:line].strip():  # white space may follow a boundary
            raise HTTPException(400, "the form's boundary is not followed by a new line")
        end = body.find(b"\r\n" + mark, line)
        if end < 0:
            raise HTTPException(400, "the form ends without its last boundary")
        yield line + 2, end
        place = end + 2 + len(mark)


def _names(headers: bytes) -> tuple[str, str | None]:
    """Return the name of a part, and its file name if it is a file."""
    for line in _text(headers, "headers of a part").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            given = parameters(value)
            if "name" in given:
                return given["name"], given.get("filename")
    raise HTTPException(400, "a part of the form has no Content-Disposition with a name")


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise HTTPException(422, f"{what}: not UTF-8") from None
