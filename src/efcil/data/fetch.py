"""Resumable downloads with checksum verification and atomic extraction.

Data is downloaded to `<name>.part`; `<name>.part.json` identifies the version of the remote file. After the checksum is
verified the part is renamed to `<name>`, and an extracted folder is renamed when it is complete. Files with final names
are therefore always complete, even after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import http.client
import json
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
    lines = hashlib.sha256()
    for name in names:
        with (folder / name).open("rb") as file:
            lines.update(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n".encode())
    return f"tree:{lines.hexdigest()}"


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
    wrong = ""
    if path.name == source.unpack:
        wrong = _wrong_files(source, path)
    elif not source.is_tree and (wrong := _other_checksum(path, source.checksum)):
        wrong = f"it is another file (expected {source.checksum}, got {wrong})"
    if wrong:
        remedy = "move it away and run the same command again to fetch the official files"
        raise DataError(f"{path} exists, but {wrong}; {remedy}")
    return path


def _wrong_files(source: Remote, folder: Path) -> str:
    """Describe the first problem of the extracted files; empty if there is none."""
    if not folder.is_dir():
        return "it is not a folder"
    for name, checksum in source.files.items():
        if not (folder / name).is_file():
            return f"its file {name} is missing"
        if got := _other_checksum(folder / name, checksum):
            return f"its file {name} has {got}, expected {checksum}"
    if source.is_tree:
        with _disk(folder):
            got = tree_digest(folder)
        return "" if got == source.checksum else f"its files have {got}, expected {source.checksum}"
    return ""


def _other_checksum(path: Path, checksum: str) -> str:
    """Return the checksum of a file if it differs from the given one, else an empty string."""
    algorithm = checksum.partition(":")[0]
    with _disk(path), path.open("rb") as file:
        # The authors published md5, which detects damage but not tampering.
        digest = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    return "" if f"{algorithm}:{digest}" == checksum else f"{algorithm}:{digest}"


class _StaleError(Exception):
    """The partial file does not match the file on the server; restart the download."""


def _download(source: Remote, archive: Path, progress: Progress, timeout: float) -> None:
    part, bad = (archive.with_name(archive.name + suffix) for suffix in (".part", ".bad"))
    label = part.with_name(part.name + ".json")
    for attempt in (1, 2):
        try:
            _receive(source, part, label, progress, timeout)
            break
        except _StaleError as error:
            if attempt == 2:
                raise DataError(f"{source.url}: {error}; try again later") from None
            with _disk(part):
                part.unlink(missing_ok=True)
    got = "" if source.is_tree else _other_checksum(part, source.checksum)
    with _disk(archive):
        replace(part, bad if got else archive)
        label.unlink(missing_ok=True)
        sync_directory(archive.parent)
    if got:
        remedy = f"the file was moved to {bad}; run the same command again to download it anew"
        raise DataError(f"{source.url}: wrong checksum, expected {source.checksum}, got {got}; {remedy}")


def _receive(source: Remote, part: Path, label: Path, progress: Progress, timeout: float) -> None:
    """Download to `part`, resuming if the server still has the same version."""
    done = part.stat().st_size if part.exists() else 0
    known = _read_label(label) if done else {}
    size = None if source.is_tree else source.size
    if known.get("url", source.url) != source.url or done > (size or done):
        raise _StaleError("the partial file belongs to another file")
    if done and done == size:
        return  # interrupted before the rename
    headers = {"User-Agent": "efcil", "Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
        if "version" in known:
            headers["If-Range"] = known["version"]  # if the file has changed, the server sends all of it
    with _network(source, part):
        request = urllib.request.Request(source.url, headers=headers)  # Remote allows only http and https
        response = urllib.request.urlopen(request, timeout=timeout)  # nosec B310 # scheme checked, see above
    with response:
        tag = response.headers.get("ETag", "W/")
        version = response.headers.get("Last-Modified") if tag.startswith("W/") else tag
        if response.status == 206:
            span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
            if span is None or int(span[1]) != done or (version or "") != known.get("version", version or ""):
                raise _StaleError("the server sent another range than requested")
            length = span[2]
        else:  # full file: first attempt, no resume support, or the file has changed
            done, length = 0, response.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() else size
        if total is not None and size not in (None, total):
            what = f"the server has {total:,} bytes, expected {size:,}"
            raise DataError(f"{source.url}: {what}; its file has changed")
        with _disk(part), part.open("ab" if done else "wb") as file:
            if not done:
                label.write_text(json.dumps({"url": source.url, "version": version}), encoding="utf-8")
            progress(done, total)
            while True:
                with _network(source, part):
                    chunk = response.read1(_CHUNK)  # returns available bytes, so a broken connection loses none
                if not chunk:
                    break
                file.write(chunk)
                done += len(chunk)
                most = total if total is not None else None if source.size is None else 2 * source.size
                if most is not None and done > most:
                    raise _StaleError(f"the server sent more than the {most:,} bytes of the file")
                progress(done, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and done < total:
        what = f"the connection ended after {done:,} of {total:,} bytes"
        raise DataError(f"{source.url}: {what}; run the same command again to resume from {part}")


def _read_label(label: Path) -> dict[str, str]:
    try:
        read = json.loads(label.read_text(encoding="utf-8"))
        return {key: value for key, value in read.items() if isinstance(value, str)}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}  # the checksum of the finished file is still verified


# Errors of reading an archive; the last two occur if a header claims an excessive length.
_DAMAGED = (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError, MemoryError, OverflowError)


def _unpack(source: Remote, archive: Path, target: Path) -> Path:
    working = target.with_name(f".{target.name}.unpacking")
    folder = working / target.name
    with _disk(target):
        if working.exists():
            shutil.rmtree(working)  # from a killed process
        working.mkdir()
        try:
            with tarfile.open(archive) as tar:
                _extract(tar, working, source.size if source.is_tree else None)
            if wrong := _wrong_files(source, folder) if folder.is_dir() else f"it contains no folder {target.name}":
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
    """Extract regular files and folders of at most `most` bytes; raise TarError for more, other members and paths
    outside the folder.

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
        return
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:
            raise _StaleError("the server refuses to resume (HTTP 416)") from None
        what = f"the server answered HTTP {error.code} {error.reason}"
    except TimeoutError:
        what = "the server does not respond"
    except urllib.error.URLError as error:
        what = f"no connection ({error.reason!r})"
    except (OSError, http.client.HTTPException) as error:
        what = f"the connection broke ({error!r})"
    resume = f"run the same command again to resume from {part}"
    raise DataError(f"{source.url}: {what}; {resume if part.exists() else 'run the same command again later'}")


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
