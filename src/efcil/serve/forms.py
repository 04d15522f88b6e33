"""Request bodies, multipart and JSON, parsed within the limits and outside the event loop."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from efcil.serve import multipart
from efcil.serve.images import from_base64, printable
from efcil.serve.limits import MIB, Limits
from efcil.serve.multipart import Form, Upload
from efcil.serve.schemas import Images
from efcil.serve.uploads import Decode, UploadedImages, from_archive, from_files

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")
NamedImage = tuple[str | None, Callable[[], bytes], int]  # name, function to read the bytes, about how many
MAX_JSON = 16 * MIB  # bytes of a JSON body, which takes several times that when parsed
MAX_ELEMENTS = 20_000  # of a JSON body: values, keys, lists and objects
# One large body is parsed at a time, which bounds the memory that it takes; small ones do not wait for it.
_LARGE = MIB
_parsers = {large: ThreadPoolExecutor(1, f"efcil-parse-{'large' if large else 'small'}") for large in (True, False)}


def content_type(request: Request) -> str:
    """Return the content type of a request."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _read(request: Request, most: int | None = None) -> bytearray:
    """Return a body of at most `most` bytes; the guard limits every body."""
    body = bytearray()
    if most is not None and request.headers.get("content-length", "").isdecimal():
        _check_length(int(request.headers["content-length"]), most)
    try:
        async for chunk in request.stream():
            body += chunk
            _check_length(len(body), most)
    except ClientDisconnect:  # nobody is left to read this answer
        raise HTTPException(400, "the request ended before its body was complete") from None
    return body


def _check_length(length: int, most: int | None) -> None:
    if most is not None and length > most:
        raise HTTPException(413, f"more than {most:,} bytes of JSON; send fewer images, or a form with files")


async def _parse(body: bytearray, how: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_parsers[len(body) > _LARGE], how)


async def json_body(request: Request, model: type[B]) -> B:
    """Parse a JSON body; the first error is raised."""
    if content_type(request) != "application/json":
        raise HTTPException(415, "send application/json")
    body = await _read(request, MAX_JSON)

    def validated() -> B:
        _check_structure(body)
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise HTTPException(422, format_errors(error.errors(include_url=False, include_input=False))) from None

    return await _parse(body, validated)


def _check_structure(body: bytearray) -> None:
    """Bound the elements of JSON text before it is parsed; the parser bounds the depth.

    >>> _check_structure(bytearray(b"[1," * 20_000))
    Traceback (most recent call last):
    starlette.exceptions.HTTPException: 413: more than 20,000 elements of JSON; send fewer at once
    """
    if sum(body.count(mark) for mark in (b"[", b"{", b",", b":")) > MAX_ELEMENTS:  # inside of strings, too
        raise HTTPException(413, f"more than {MAX_ELEMENTS:,} elements of JSON; send fewer at once")


def format_errors(errors: Iterable[Mapping[str, Any]]) -> str:
    """Format the first of pydantic's errors on one line."""
    lines = []
    for error in islice(errors, 3):
        place = ".".join(str(part) for part in error["loc"] if part not in ("query", "path", "body"))
        lines.append(f"{place}: {error['msg']}" if place else str(error["msg"]))
    return printable("; ".join(lines))


async def read_form(request: Request, files: int, known: tuple[str, ...]) -> Form:
    """Parse a multipart form with at most `files` files and the given fields."""
    if content_type(request) != "multipart/form-data":
        raise HTTPException(415, "send multipart/form-data")
    mark = multipart.boundary(request.headers["content-type"])
    body = await _read(request)
    return await _parse(body, lambda: multipart.parse(body, mark, files, known))


def _uploads(form: Form, name: str) -> list[Upload]:
    if name in form.texts:
        raise HTTPException(422, f"{name}: wanted files with a file name")
    return form.files.get(name, [])


async def read_images(request: Request, limits: Limits) -> list[NamedImage]:
    """Read the images of a prediction request."""
    if content_type(request) == "application/json":
        given = (await json_body(request, Images)).images
        if len(given) > limits.predict_files:
            most = limits.predict_files
            raise HTTPException(413, f"{len(given):,} images; send at most {most:,} at once")
        return [(None, partial(from_base64, text), len(text)) for text in given]
    if content_type(request) != "multipart/form-data":
        raise HTTPException(415, "send multipart/form-data with files, or application/json with images in base64")
    uploads = _uploads(await read_form(request, limits.predict_files, ("files",)), "files")
    if not uploads:
        raise HTTPException(422, f"files: no images; send 1 to {limits.predict_files} files")
    return [(printable(upload.name) or None, partial(bytes, upload.data), len(upload.data)) for upload in uploads]


@dataclass(frozen=True)
class TeachRequest:
    """Parsed update request."""

    upload: Callable[[Decode], UploadedImages]  # reads the upload
    epochs: int | None
    budget: float | None


async def read_teaching(request: Request, limits: Limits, known: Sequence[str]) -> TeachRequest:
    """Parse an update request: a zip, or images of one class."""
    names = ("archive", "label", "files", "epochs", "budget")
    form = await read_form(request, limits.teach_files, names)
    archives, files, label = _uploads(form, "archive"), _uploads(form, "files"), form.texts.get("label")
    if bool(archives) == bool(files) or len(archives) > 1 or bool(files) != (label is not None):
        raise HTTPException(422, "send either one `archive`, a zip of class folders, or `label` and `files`")
    epochs = _number(form, "epochs", 1, 10_000)
    budget = _number(form, "budget", 0.1, 86_400.0)
    if epochs is not None and epochs != int(epochs):
        raise HTTPException(422, "epochs: wanted an integer")
    if epochs is not None and budget is not None:
        raise HTTPException(422, "give either epochs or budget")

    def upload(decode: Decode) -> UploadedImages:
        if archives:
            return from_archive(io.BytesIO(archives[0].data), decode, limits, known)
        return from_files(((f.name or "file", f.data) for f in files), str(label), decode, known)

    return TeachRequest(upload, None if epochs is None else int(epochs), budget)


def _number(form: Form, name: str, least: float, most: float) -> float | None:
    if name in form.files:
        raise HTTPException(422, f"{name}: wanted a number from {least:g} to {most:g}, not a file")
    text = form.texts.get(name, "")
    if text == "":
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise HTTPException(422, f"{name}: wanted a number from {least:g} to {most:g}")
    return value
