"""A zip of class folders, read in memory: no entry is ever written under its own name, or at all."""

from __future__ import annotations

import stat
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
NamedImage = tuple[str, str, Callable[[], bytes]]  # a file's name, its class and a way to read it
_ENTRY = b"PK\x01\x02"  # stands before every entry of a zip's directory
_ARCHIVES = {".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"}
# Of an entry: a wrong checksum or length, an unknown compression, a password, a second name that is no text.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError, UnicodeDecodeError)


class LimitExceeded(DataError):
    """More files or bytes than the limits allow."""


class Entry:
    """One picture of an archive."""

    def __init__(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, label: str):
        self._archive, self._info, self.label = archive, info, label
        self.name = printable(info.filename)

    def read(self, room: int) -> bytes:
        """Unpack the entry; more than `room` bytes raise TooMuch, whatever its header said."""
        found = bytearray()
        try:
            with self._archive.open(self._info) as file:
                while chunk := file.read(min(CHUNK, room - len(found) + 1)):
                    found += chunk
                    if len(found) > room:
                        raise LimitExceeded(f"archive: {self.name} unpacks to more than what is left of the limit")
        except _DAMAGED as error:
            raise DataError(f"cannot be unpacked: {error}") from None
        return bytes(found)


def open_archive(file: IO[bytes], limits: Limits) -> zipfile.ZipFile:
    """Open a zip whose directory is not too long to be read."""
    # zipfile keeps about a kilobyte for each entry of the directory, and 64 MiB have room for a million of them.
    file.seek(0)
    entries, tail = 0, b""
    while chunk := file.read(CHUNK):
        entries += (tail + chunk).count(_ENTRY)
        tail = chunk[-len(_ENTRY) + 1 :]
    if entries > 2 * limits.teach_files + 100:  # folders are entries too
        raise LimitExceeded(f"archive: {entries:,} entries; at most {limits.teach_files:,} pictures are taken at once")
    file.seek(0)
    try:
        return zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise DataError(f"archive: not a zip file that can be read ({error})") from None


def entries_of(archive: zipfile.ZipFile, limits: Limits) -> tuple[list[Entry], list[tuple[str, str]]]:
    """Return the pictures of an archive with their classes, and (name, reason) of each file that is none.

    The class of a picture is its first folder; one folder around all class folders does not count. A path that leads
    out, a link or an archive inside is refused with the whole archive: nobody makes one by mistake.
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
            raise DataError(f"archive: {printable(info.filename)} is an archive inside the archive; send its folders")
        unpacked += info.file_size
        if unpacked > limits.unpacked:
            raise LimitExceeded(f"archive: unpacks to more than {limits.unpacked:,} bytes; send it in parts")
        if suffix not in SUFFIXES:
            refused.append((printable(info.filename), "not an image"))
        elif len(parts) == 1:
            refused.append((printable(info.filename), "lies outside a class folder"))
        else:
            found.append((info, parts))
    if len(found) > limits.teach_files:
        raise LimitExceeded(f"archive: {len(found):,} pictures; at most {limits.teach_files:,} are taken at once")
    level = int(bool(found) and len({parts[0] for _, parts in found}) == 1 and all(len(p) > 2 for _, p in found))
    return [Entry(archive, info, parts[level]) for info, parts in found], refused


def _parts(info: zipfile.ZipInfo) -> tuple[str, ...]:
    """Return the parts of an entry's path; one that leads out of the archive raises DataError."""
    name = info.orig_filename.replace("\\", "/")
    parts = tuple(p for p in name.split("/") if p not in ("", "."))
    if not parts or name.startswith("/") or ".." in parts or "\0" in name or parts[0].endswith(":"):
        raise DataError(
            f"archive: {printable(info.orig_filename)!r} is not a path inside the archive; it is refused whole"
        )
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise DataError(f"archive: {printable(name)} is a link or a device, not a file; the archive is refused whole")
    return parts


def iter_images(archive: zipfile.ZipFile, limits: Limits, refused: list[tuple[str, str]]) -> Iterator[NamedImage]:
    """Yield each picture, counting what is really unpacked; add the files that are none to `refused`."""
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
