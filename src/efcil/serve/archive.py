"""Zip files of class folders, read in memory; no entry is ever written to disk."""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import PurePosixPath
from typing import IO

from efcil.data.cache import IGNORED, SUFFIXES
from efcil.errors import DataError
from efcil.serve.images import printable
from efcil.serve.limits import MIB, Limits

CHUNK = MIB
NamedImage = tuple[str, str, Callable[[], bytes]]  # file name, class and a function to read it
_ENTRY = b"PK\x01\x02"  # signature of each entry of the central directory
_ARCHIVES = {".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"}
# Errors of an entry: wrong checksum or length, unknown compression, password, invalid name.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError, UnicodeDecodeError)


class LimitExceeded(DataError):
    """More files or bytes than the limits allow."""


class Entry:
    """Image in an archive."""

    def __init__(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, label: str):
        self._archive, self._info, self.label = archive, info, label
        self.name = printable(info.filename)

    def read(self, room: int) -> bytes:
        """Decompress the entry; more than `room` bytes raise LimitExceeded, whatever its header claims."""
        found = bytearray()
        try:
            with self._archive.open(self._info) as file:
                while chunk := file.read(min(CHUNK, room - len(found) + 1)):
                    found += chunk
                    if len(found) > room:
                        raise LimitExceeded(f"archive: {self.name} decompresses to more than the remaining limit")
        except (*_DAMAGED, ValueError, OverflowError, MemoryError) as error:
            raise DataError(f"cannot be decompressed: {error}") from None
        return bytes(found)


def open_archive(file: IO[bytes], limits: Limits) -> zipfile.ZipFile:
    """Open a zip file, limiting the number of directory entries."""
    # zipfile allocates about a kilobyte per directory entry, and 64 MiB can contain a million of them.
    file.seek(0)
    entries, tail = 0, b""
    while chunk := file.read(CHUNK):
        entries += (tail + chunk).count(_ENTRY)
        tail = chunk[-len(_ENTRY) + 1 :]
    if entries > 2 * limits.teach_files + 100:  # folders are entries too
        raise LimitExceeded(f"archive: {entries:,} entries; send at most {limits.teach_files:,} images at once")
    file.seek(0)
    try:
        return zipfile.ZipFile(file)
    except (*_DAMAGED, ValueError, IndexError, struct.error, OverflowError, MemoryError) as error:
        raise DataError(f"archive: not a readable zip file ({error})") from None


def entries_of(archive: zipfile.ZipFile, limits: Limits) -> tuple[list[Entry], list[tuple[str, str]]]:
    """Return the images of an archive with their classes, and (name, reason) of each other file.

    The class of an image is its first folder, ignoring a common top-level folder. An archive with a path outside
    itself, a link or a nested archive is refused completely.
    """
    found: list[tuple[zipfile.ZipInfo, tuple[str, ...]]] = []
    refused: list[tuple[str, str]] = []
    unpacked = 0
    for info in archive.infolist():
        parts = _parts(info)
        if info.is_dir() or any(p.startswith(".") or p.casefold() in IGNORED for p in parts):
            continue
        suffix = PurePosixPath(parts[-1]).suffix.lower()
        if suffix in _ARCHIVES:
            raise DataError(f"archive: {printable(info.filename)} is a nested archive; send its folders")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others take memory as the file says
            raise DataError(f"archive: {printable(info.filename)} is packed in a way that is not read; use deflate")
        unpacked += info.file_size
        if unpacked > limits.unpacked:
            raise LimitExceeded(f"archive: decompresses to more than {limits.unpacked:,} bytes; send it in parts")
        if suffix not in SUFFIXES:
            refused.append((printable(info.filename), "not an image"))
        elif len(parts) == 1:
            refused.append((printable(info.filename), "outside a class folder"))
        else:
            found.append((info, parts))
    if len(found) > limits.teach_files:
        raise LimitExceeded(f"archive: {len(found):,} images; send at most {limits.teach_files:,} at once")
    level = int(bool(found) and len({parts[0] for _, parts in found}) == 1 and all(len(p) > 2 for _, p in found))
    return [Entry(archive, info, parts[level]) for info, parts in found], refused


def _parts(info: zipfile.ZipInfo) -> tuple[str, ...]:
    """Return the path components of an entry; raise DataError for a path outside the archive."""
    name = info.orig_filename.replace("\\", "/")
    parts = tuple(p for p in name.split("/") if p not in ("", "."))
    if not parts or name.startswith("/") or ".." in parts or "\0" in name or parts[0].endswith(":"):
        raise DataError(
            f"archive: {printable(info.orig_filename)!r} is a path outside the archive; the archive is refused"
        )
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise DataError(f"archive: {printable(name)} is a link or a device, not a file; the archive is refused")
    return parts


def iter_images(archive: zipfile.ZipFile, limits: Limits, refused: list[tuple[str, str]]) -> Iterator[NamedImage]:
    """Yield images, limiting the decompressed bytes; append other files to `refused`."""
    entries, others = entries_of(archive, limits)
    refused += others
    room = limits.unpacked

    def read(entry: Entry) -> bytes:
        nonlocal room
        data = entry.read(room)
        room -= len(data)
        return data

    for entry in entries:
        yield entry.name, entry.label, partial(read, entry)
