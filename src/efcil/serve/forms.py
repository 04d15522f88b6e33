"""Parsing of multipart and JSON request bodies within the limits."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from efcil.serve.images import from_base64, printable
from efcil.serve.limits import Limits
from efcil.serve.schemas import Images
from efcil.serve.uploads import UploadedImages, from_archive, from_files

B = TypeVar("B", bound=BaseModel)
NamedImage = tuple[str | None, Callable[[], bytes]]  # name and function to read the bytes
_FIELDS = 8  # maximum number of form fields


def content_type(request: Request) -> str:
    """Return the content type of a request."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def json_body(request: Request, model: type[B]) -> B:
    """Parse a JSON body."""
    if content_type(request) != "application/json":
        raise HTTPException(415, "send application/json")
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise HTTPException(422, format_errors(error.errors())) from None


def format_errors(errors: Iterable[Mapping[str, Any]]) -> str:
    """Format pydantic errors on one line."""
    lines = []
    for error in errors:
        place = ".".join(str(part) for part in error["loc"] if part not in ("query", "path", "body"))
        lines.append(f"{place}: {error['msg']}" if place else str(error["msg"]))
    return printable("; ".join(lines))


@asynccontextmanager
async def read_form(request: Request, files: int, known: tuple[str, ...]) -> AsyncIterator[FormData]:
    """Parse a multipart form with at most `files` files and the given fields."""
    if content_type(request) != "multipart/form-data":
        raise HTTPException(415, "send multipart/form-data")
    try:
        fields = await request.form(max_files=files, max_fields=_FIELDS)
    except HTTPException as error:
        if error.status_code == 400 and "Too many files" in error.detail:
            raise HTTPException(413, f"more than {files:,} files; send at most {files:,} at once") from None
        raise
    try:
        if unknown := sorted(set(fields) - set(known)):
            raise HTTPException(422, f"unknown field {printable(unknown[0])!r}; known: {', '.join(known)}")
        yield fields
    finally:
        await fields.close()


def _uploads(fields: FormData, name: str) -> list[UploadFile]:
    files = fields.getlist(name)
    if any(not isinstance(value, UploadFile) for value in files):
        raise HTTPException(422, f"{name}: wanted files with a file name")
    return [value for value in files if isinstance(value, UploadFile)]


@asynccontextmanager
async def read_images(request: Request, limits: Limits) -> AsyncIterator[list[NamedImage]]:
    """Read the images of a prediction request."""
    if content_type(request) == "application/json":
        given = (await json_body(request, Images)).images
        if len(given) > limits.predict_files:
            most = limits.predict_files
            raise HTTPException(413, f"{len(given):,} images; send at most {most:,} at once")
        yield [(None, lambda text=text: from_base64(text)) for text in given]  # type: ignore[misc]
        return
    if content_type(request) != "multipart/form-data":
        raise HTTPException(415, "send multipart/form-data with files, or application/json with images in base64")
    async with read_form(request, limits.predict_files, ("files",)) as fields:
        uploads = _uploads(fields, "files")
        if not uploads:
            raise HTTPException(422, f"files: no images; send 1 to {limits.predict_files} files")
        yield [(printable(upload.filename or "") or None, upload.file.read) for upload in uploads]


@dataclass(frozen=True)
class TeachRequest:
    """Parsed update request."""

    upload: Callable[[], UploadedImages]  # reads the upload
    epochs: int | None
    budget: float | None


@asynccontextmanager
async def read_teaching(
    request: Request, size: int, limits: Limits, known: Sequence[str]
) -> AsyncIterator[TeachRequest]:
    """Parse an update request: a zip, or images of one class."""
    names = ("archive", "label", "files", "epochs", "budget")
    async with read_form(request, limits.teach_files, names) as fields:
        archives, files, label = _uploads(fields, "archive"), _uploads(fields, "files"), fields.get("label")
        if bool(archives) == bool(files) or len(archives) > 1 or bool(files) != isinstance(label, str):
            raise HTTPException(422, "send either one `archive`, a zip of class folders, or `label` and `files`")
        epochs = _number(fields, "epochs", 1, 10_000)
        budget = _number(fields, "budget", 0.1, 86_400.0)
        if epochs is not None and epochs != int(epochs):
            raise HTTPException(422, "epochs: wanted an integer")
        if epochs is not None and budget is not None:
            raise HTTPException(422, "give either epochs or budget")

        def upload() -> UploadedImages:
            if archives:
                return from_archive(archives[0].file, size, limits, known)
            return from_files(((f.filename or "file", f.file) for f in files), str(label), size, limits, known)

        yield TeachRequest(upload, None if epochs is None else int(epochs), budget)


def _number(fields: FormData, name: str, least: float, most: float) -> float | None:
    text = fields.get(name)
    if text is None or text == "":
        return None
    try:
        value = float(text) if isinstance(text, str) else math.nan
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise HTTPException(422, f"{name}: wanted a number from {least:g} to {most:g}")
    return value
