"""Resumable downloads with checksum verification and atomic extraction.

Data is downloaded to `<name>.part`, which is renamed to `<name>` when its checksum is verified; an extracted folder is
renamed when it is complete. Files with final names are therefore always complete, even after a crash. The checksum is
known beforehand, so it alone decides whether a resumed file is the right one; if not, it is downloaded from the start.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import http.client
import os
import re
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from efcil.errors import DataError
from efcil.files import exclusive_lock
from efcil.platform_support import replace, sync_directory, sync_file

Progress = Callable[[int, int | None], None]  # bytes downloaded, total bytes (None: unknown)

_CHUNK = 1 << 18
_DIGESTS = {"md5": 32, "sha256": 64, "tree": 64}  # number of hexadecimal digits


@dataclass(frozen=True)
class Remote:
    """Remote file with its expected checksum, size and contents."""

    url: str  # http or https
    name: str  # of the downloaded file
    checksum: str  # "md5:..." or "sha256:..."; of an archive that servers pack anew, "tree:..." (`tree_digest`)
    size: int | None = None  # bytes; with "tree:..." of all files together
    unpack: str | None = None  # folder inside the tar archive; None: do not extract
    files: Mapping[str, str] = field(default_factory=dict)  # path in that folder -> checksum

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise DataError(f"{self.url}: only http and https URLs are supported")
        for plain in (self.name, self.unpack):
            if plain is not None and (plain in ("", ".", "..") or re.search(r"[/\\]", plain)):
                raise DataError(f"{self.url}: '{plain}' must be a file name without a folder")
        for checksum in (self.checksum, *self.files.values()):
            algorithm, _, digest = checksum.partition(":")
            if len(digest) != _DIGESTS.get(algorithm, -1) or not re.fullmatch("[0-9a-f]+", digest):
                raise DataError(f"{self.url}: the checksum '{checksum}' must be md5:<32 digits> or sha256:<64 digits>")
        if self.is_tree and (self.unpack is None or self.size is None):
            raise DataError(f"{self.url}: a checksum of a tree needs the folder to unpack and the size of its files")

    @property
    def is_tree(self) -> bool:
        """Whether the files inside the archive are checked together, and not the archive."""
        return self.checksum.startswith("tree:")


def tree_digest(folder: Path) -> str:
    """Return "tree:..." of all files below a folder: SHA-256 of the lines "SHA-256  path", sorted by path.

    The archive of a commit may be packed differently from day to day; its files may not.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    lines = (f"{_digest(folder / name, 'sha256').removeprefix('sha256:')}  {name}\n" for name in names)
    return f"tree:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def fetch(
    source: Remote, directory: str | os.PathLike[str], *, progress: Progress | None = None, timeout: float = 30.0
) -> Path:
    """Download `source` into `directory` and return the path of the file or of the extracted folder.

    Complete files are not downloaded again, interrupted downloads are resumed, and existing files are never
    overwritten. The archive is kept beside the extracted folder and may be deleted. `timeout` is that of the
    connection, in seconds.
    """
    directory = Path(directory)
    archive, target = directory / source.name, directory / (source.unpack or source.name)
    with _disk(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if target.exists():  # before locking: the folder may be read-only
            return _checked(source, target)
        try:
            lock = exclusive_lock(directory / ".lock", remove=True)
        except BlockingIOError:
            raise DataError(f"{directory}: another process is downloading into this folder; wait for it") from None
        with lock:
            if target.exists():  # finished by another process
                return _checked(source, target)
            if archive.exists():
                _checked(source, archive)
            else:
                _download(source, archive, progress or (lambda done, total: None), timeout)
            return archive if source.unpack is None else _unpack(source, archive, target)


def _checked(source: Remote, path: Path) -> Path:
    """Return an existing complete file or folder; raise DataError if it is something else."""
    if wrong := _problem(source, path):
        remedy = "move it away and run the same command again to fetch the official files"
        raise DataError(f"{path} exists, but {wrong}; {remedy}")
    return path


def _problem(source: Remote, path: Path) -> str:
    """Describe what is wrong with a downloaded file or an extracted folder; empty if nothing is."""
    wanted = {"": source.checksum}
    if path.name == source.unpack:
        if not path.is_dir():
            return "it is not a folder"
        wanted = dict(source.files) | (wanted if source.is_tree else {})
    elif source.is_tree:
        return ""
    for name, checksum in wanted.items():
        if name and not (path / name).is_file():
            return f"its file {name} is missing"
        got = _digest(path / name, checksum.partition(":")[0])
        if got != checksum:
            return f"{f'its file {name}' if name else path.name} has {got}, expected {checksum}"
    return ""


def _digest(path: Path, algorithm: str) -> str:
    if algorithm == "tree":
        return tree_digest(path)
    with path.open("rb") as file:
        # The authors published md5, which detects damage but not tampering.
        digest = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{digest.hexdigest()}"


def _download(source: Remote, archive: Path, progress: Progress, timeout: float) -> None:
    part, bad = (archive.with_name(archive.name + suffix) for suffix in (".part", ".bad"))
    done = part.stat().st_size if part.exists() else 0
    resumed = 0 < done <= (source.size or done) and not source.is_tree  # a tree's archive has no checksum
    with _disk(part):
        if not (resumed and done == source.size):  # else interrupted before the rename
            resumed = _receive(source, part, done if resumed else 0, progress, timeout)
        wrong = _problem(source, part)
        if wrong and resumed:
            _receive(source, part, 0, progress, timeout)
            wrong = _problem(source, part)
        replace(part, bad if wrong else archive)
        sync_directory(archive.parent)
    if wrong:
        remedy = f"the file was moved to {bad}; run the same command again to download it anew"
        raise DataError(f"{source.url}: {wrong}; {remedy}")


def _receive(source: Remote, part: Path, done: int, progress: Progress, timeout: float) -> bool:
    """Download to `part`, after the `done` bytes that it has; return whether they were kept."""
    headers = {"User-Agent": "efcil", "Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    with _network(source, part):
        request = urllib.request.Request(source.url, headers=headers)  # Remote allows only http and https
        try:
            response = urllib.request.urlopen(request, timeout=timeout)  # nosec B310 # scheme checked, see above
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 416 or not done:
                raise
            return _receive(source, part, 0, progress, timeout)  # the part is longer than the server's file
    with response:
        done = done if response.status == 206 else 0
        kept, size = done > 0, None if source.is_tree else source.size
        length = response.headers.get("Content-Length", "")
        total = done + int(length) if length.isdecimal() else size
        if total is not None and size not in (None, total):
            if kept:  # it sends another part than asked for, or of another file
                return _receive(source, part, 0, progress, timeout)
            what = f"the server has {total:,} bytes, expected {size:,}"
            raise DataError(f"{source.url}: {what}; its file has changed")
        most = 2 * source.size if total is None and source.size is not None else total
        with part.open("ab" if kept else "wb") as file:
            progress(done, total)
            while chunk := _read(response, source, part):
                file.write(chunk)
                done += len(chunk)
                if most is not None and done > most:
                    raise DataError(f"{source.url}: the server sent more than {most:,} bytes; try again later")
                progress(done, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and done < total:
        what = f"the connection ended after {done:,} of {total:,} bytes"
        raise DataError(f"{source.url}: {what}; run the same command again to resume from {part}")
    return kept


def _read(response: http.client.HTTPResponse, source: Remote, part: Path) -> bytes:
    with _network(source, part):
        return response.read1(_CHUNK)  # what has come, so that a broken connection loses nothing


# Errors of reading an archive; the last two occur if a header claims an excessive length.
_DAMAGED = (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError, MemoryError, OverflowError)


def _unpack(source: Remote, archive: Path, target: Path) -> Path:
    working = target.with_name(f".{target.name}.unpacking")
    folder = working / target.name
    with _disk(target):
        shutil.rmtree(working, ignore_errors=True)  # from a killed process
        working.mkdir()
        try:
            with tarfile.open(archive) as tar:
                _extract(tar, working, source.size if source.is_tree else None)
            if wrong := _problem(source, folder):
                remedy = "; remove it and run the same command again" if source.is_tree else ""
                raise DataError(f"{archive}: {wrong}; nothing was extracted{remedy}")
            for path in (*folder.rglob("*"), folder):
                (sync_directory if path.is_dir() else sync_file)(path)
            os.rename(folder, target)
            sync_directory(target.parent)
        except _DAMAGED as error:
            raise DataError(f"{archive} cannot be unpacked safely ({error!r}); nothing was extracted") from None
        finally:
            shutil.rmtree(working, ignore_errors=True)
    return target


def _extract(tar: tarfile.TarFile, folder: Path, most: int | None) -> None:
    """Extract regular files and folders of at most `most` bytes; raise TarError for anything else.

    The standard extraction filter is missing in Python 3.11.2 of Debian 12.
    """
    tar.extraction_filter = lambda member, path: member
    done = 0
    for member in tar:
        done += member.size
        if most is not None and done > most:
            raise tarfile.TarError(f"its files have more than {most:,} bytes")
        place = Path(os.path.normpath(folder / member.name))
        if place != folder and folder not in place.parents:
            raise tarfile.TarError(f"{member.name!r} is outside the folder")
        if member.isdir():
            place.mkdir(parents=True, exist_ok=True)
        elif member.isfile():
            tar.extract(member, folder, set_attrs=False)
        else:
            raise tarfile.TarError(f"{member.name!r} is a link or a device")


@contextlib.contextmanager
def _network(source: Remote, part: Path) -> Iterator[None]:
    """Convert network errors to one-line DataErrors."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        what = str(error) if isinstance(error, urllib.error.HTTPError) else f"no connection ({error!r})"
        resume = f"to resume from {part}" if part.exists() else "later"
        raise DataError(f"{source.url}: {what}; run the same command again {resume}") from None


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Convert disk errors to one-line DataErrors."""
    try:
        yield
    except OSError as error:
        what, remedy = error.strerror or repr(error), "make it readable and writable, and run again"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what, remedy = "the disk is full", "free some space and run the same command again to resume"
        raise DataError(f"{path}: {what}; {remedy}") from None
