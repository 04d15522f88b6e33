"""Download a file once: resumable, checked against its checksum, unpacked without half-done states.

While bytes come, `<name>.part` grows; `<name>.part.json` beside it tells of which version of the file it is a part.
Only a part whose checksum is right becomes `<name>`, and only a whole unpacked folder gets its final name, each by one
rename. So whatever carries a final name is complete, however the process ended.
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
from typing import Any
from urllib.parse import urlsplit

from efcil.errors import DataError
from efcil.files import exclusive_lock

Progress = Callable[[int, int | None], None]  # bytes that are here, bytes in all (None: not known)

_CHUNK = 1 << 18
_DIGESTS = {"md5": 32, "sha256": 64}  # hexadecimal digits


@dataclass(frozen=True)
class Remote:
    """A file on a server, and what it must be once it is here."""

    url: str  # http or https
    name: str  # of the downloaded file
    checksum: str  # "md5:..." or "sha256:..."
    size: int | None = None  # bytes
    unpack: str | None = None  # the folder that this archive (tar, compressed or not) holds; None: a file as it is
    files: Mapping[str, str] = field(default_factory=dict)  # path inside that folder -> checksum

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise DataError(f"{self.url}: only http and https addresses can be fetched")
        for plain in (self.name, self.unpack):
            if plain is not None and (plain in ("", ".", "..") or re.search(r"[/\\]", plain)):
                raise DataError(f"{self.url}: '{plain}' must be a plain name, without a folder")
        for checksum in (self.checksum, *self.files.values()):
            algorithm, _, digest = checksum.partition(":")
            if len(digest) != _DIGESTS.get(algorithm, -1) or not re.fullmatch("[0-9a-f]+", digest):
                raise DataError(f"{self.url}: the checksum '{checksum}' must be md5:<32 digits> or sha256:<64 digits>")


def fetch(
    source: Remote, directory: str | os.PathLike[str], *, progress: Progress | None = None, timeout: float = 30.0
) -> Path:
    """Bring `source` into `directory` and return the path of the file, or of the folder when it is to be unpacked.

    What is complete is not downloaded again, a broken download goes on where it stopped, and nothing that lies there
    under a final name is overwritten. The archive stays beside the unpacked folder; it may be deleted. `timeout` is the
    longest silence of the server in seconds.
    """
    directory = Path(directory)
    with _writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    archive = directory / source.name
    if (target := directory / (source.unpack or source.name)).exists():  # nothing to write: it may be read-only
        return _fetched_before(source, target)
    with _writing(directory):
        try:
            lock = exclusive_lock(directory / ".lock", remove=True)
        except BlockingIOError:
            raise DataError(f"{directory}: another process is fetching into this folder; wait for it") from None
    with lock:
        if target.exists():  # another process has just finished
            return _fetched_before(source, target)
        if not archive.exists():
            _download(source, archive, progress, timeout)
        elif wrong := _wrong_archive(source, archive):
            raise wrong
        return archive if source.unpack is None else _unpack(source, archive, target)


# ------------------------------------------------------------------------------------------------------------ download


class _StaleError(Exception):
    """The part that is here is of no use for what the server has: start again."""


def _download(source: Remote, archive: Path, progress: Progress | None, timeout: float) -> None:
    part = archive.with_name(archive.name + ".part")
    label = part.with_name(part.name + ".json")
    for attempt in ("resume", "afresh"):
        if attempt == "afresh":
            with _writing(part):
                part.unlink(missing_ok=True)
        try:
            _continue(source, part, label, progress, timeout)
            break
        except _StaleError as error:
            if attempt == "afresh":
                raise DataError(f"{source.url}: {error}; try again later") from None
    if (got := _checksum(part, source.checksum)) != source.checksum:
        bad = archive.with_name(archive.name + ".bad")
        with _writing(bad):
            os.replace(part, bad)
            label.unlink(missing_ok=True)
        raise DataError(
            f"{source.url}: wrong checksum, expected {source.checksum}, got {got}; the bytes were moved to {bad}; "
            f"run the same command again to download afresh"
        )
    with _writing(archive):
        os.replace(part, archive)
        label.unlink(missing_ok=True)
        _sync(archive.parent)


def _continue(source: Remote, part: Path, label: Path, progress: Progress | None, timeout: float) -> None:
    """Fill `part` up to the whole file, with what lies there as its beginning if the server still has that version."""
    start = part.stat().st_size if part.exists() else 0
    known = _read_label(label) if start else {}
    if start and (known.get("url", source.url) != source.url or start > (source.size or start)):
        raise _StaleError("the part is of another file")
    if start and start == source.size:
        return  # stopped between the last byte and the rename
    headers = {"User-Agent": "efcil", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if known.get("version"):
            headers["If-Range"] = known["version"]  # a server whose file has changed then sends all of it
    with _network(source, part):
        request = urllib.request.Request(source.url, headers=headers)  # http or https: Remote refuses anything else
        response = urllib.request.urlopen(request, timeout=timeout)  # nosec B310 # checked, as the line above says
    with response:
        version = _version(response.headers)
        if response.status == 206:
            first, total = _content_range(response.headers)
            if first != start or (known.get("version") and version and version != known["version"]):
                raise _StaleError("the server sent another part than was asked for")
        else:  # the whole file: the first time, or the server does not resume, or its file has changed
            start, total = 0, _length(response.headers)
        if source.size is not None and total is not None and total != source.size:
            raise DataError(
                f"{source.url}: the server has {total:,} bytes, expected {source.size:,}; its file has changed"
            )
        with _writing(part), part.open("r+b" if start else "wb") as file:
            if not start:
                label.write_text(json.dumps({"url": source.url, "version": version}), encoding="utf-8")
            file.seek(start)
            done = _copy(source, response, file, part, start, total or source.size, progress)
            file.flush()
            os.fsync(file.fileno())
    wanted = total or source.size
    if wanted is not None and done < wanted:
        raise DataError(
            f"{source.url}: the connection ended after {done:,} of {wanted:,} bytes; they are kept in {part}, "
            f"and the same command resumes"
        )


def _copy(
    source: Remote, response: Any, file: Any, part: Path, done: int, total: int | None, progress: Progress | None
) -> int:
    """Append what the server sends and return how many bytes are here then."""
    if progress is not None:
        progress(done, total)
    while True:
        with _network(source, part):
            chunk = response.read1(_CHUNK)  # what has come: a broken connection loses nothing that arrived
        if not chunk:
            return done
        file.write(chunk)
        done += len(chunk)
        if total is not None and done > total:
            raise _StaleError(f"the server sent more than the {total:,} bytes of the file")
        if progress is not None:
            progress(done, total)


def _version(headers: http.client.HTTPMessage) -> str | None:
    """Tell what identifies this version of the file: a strong ETag, or the date of its last change."""
    tag = headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")


def _content_range(headers: http.client.HTTPMessage) -> tuple[int, int | None]:
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", "").strip())
    if match is None:
        raise _StaleError("the server did not say which part it sent")
    return int(match[1]), None if match[2] == "*" else int(match[2])


def _length(headers: http.client.HTTPMessage) -> int | None:
    text = headers.get("Content-Length", "")
    return int(text) if text.isdecimal() else None


def _read_label(label: Path) -> dict[str, str]:
    try:
        read = json.loads(label.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # without it the checksum alone tells whether the part was of the same file
    return {key: value for key, value in read.items() if isinstance(value, str)} if isinstance(read, dict) else {}


# -------------------------------------------------------------------------------------------------------------- unpack


# What reading an archive may end with; the last two where a header claims a length that no memory or number holds.
_DAMAGED = (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError, MemoryError, OverflowError)


def _unpack(source: Remote, archive: Path, target: Path) -> Path:
    working = target.with_name(f".{target.name}.unpacking")
    with _writing(target):
        if working.exists():
            shutil.rmtree(working)  # left by a process that was killed
        working.mkdir()
    try:
        with _writing(target):
            try:
                with tarfile.open(archive) as tar:
                    _extract(tar, working)
            except _DAMAGED as error:
                raise DataError(f"{archive} cannot be unpacked safely ({_line(error)}); nothing was unpacked") from None
            folder = working / target.name
            if not folder.is_dir():
                raise DataError(f"{archive} holds no folder {target.name}; nothing was unpacked")
            if wrong := _wrong_files(source, folder):
                raise DataError(f"{archive}: {wrong}; nothing was unpacked")
            for path in (*folder.rglob("*"), folder):
                _sync(path)
            os.rename(folder, target)
            _sync(target.parent)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return target


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    """Write the plain files and folders of an archive; TarError at anything else, and at what leads out of the folder.

    The library's own filter for this is missing in Python 3.11.2, which is Debian 12's.
    """
    for member in tar:
        place = Path(os.path.normpath(folder / member.name))
        if place != folder and folder not in place.parents:
            raise tarfile.TarError(f"{member.name!r} leads out of the folder")
        if member.isdir():
            place.mkdir(parents=True, exist_ok=True)
        elif member.isfile():
            place.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None  # it is a file
            with content, place.open("xb") as file:
                shutil.copyfileobj(content, file)
        else:
            raise tarfile.TarError(f"{member.name!r} is a link or a device")


def _wrong_archive(source: Remote, archive: Path) -> DataError | None:
    if (got := _checksum(archive, source.checksum)) == source.checksum:
        return None
    return DataError(
        f"{archive} is not the file that was to be fetched (expected {source.checksum}, got {got}); "
        f"remove it and run the same command again"
    )


def _fetched_before(source: Remote, target: Path) -> Path:
    if source.unpack is None:
        if error := _wrong_archive(source, target):
            raise error
    elif wrong := _wrong_files(source, target):
        raise DataError(
            f"{target} is there, but {wrong}; to fetch the official files move it away and run the same command again"
        )
    return target


def _wrong_files(source: Remote, folder: Path) -> str:
    """Say what is wrong with the unpacked files; empty when nothing is."""
    if not folder.is_dir():
        return "it is no folder"
    for name, checksum in source.files.items():
        path = folder / name
        if not path.is_file():
            return f"its file {name} is missing"
        if (got := _checksum(path, checksum)) != checksum:
            return f"its file {name} has {got}, expected {checksum}"
    return ""


# --------------------------------------------------------------------------------------------------------------- tools


def _checksum(path: Path, like: str) -> str:
    """Hash a file in the manner of the checksum it is to be compared with."""
    algorithm = like.partition(":")[0]
    with _writing(path), path.open("rb") as file:
        # md5 is what the makers of the data published: it tells damage, not malice
        digest = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{digest.hexdigest()}"


def _sync(path: Path) -> None:
    """Have a file or folder on the disk before anything is built upon it."""
    if path.is_symlink() or (os.name == "nt" and path.is_dir()):
        return  # Windows cannot open a folder
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _network(source: Remote, part: Path) -> Iterator[None]:
    """Tell what the network did in one line."""
    try:
        yield
        return
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:
            raise _StaleError("the server refuses to resume (HTTP 416)") from None
        what = f"the server answered HTTP {error.code} {error.reason}"
    except TimeoutError:
        what = "the server is silent"
    except urllib.error.URLError as error:
        what = f"no connection ({error.reason if isinstance(error.reason, str) else _line(error.reason)})"
    except (OSError, http.client.HTTPException) as error:
        what = f"the connection broke ({_line(error)})"
    remedy = "run the same command again later"
    if part.exists():
        remedy = f"what has come is kept in {part}, and the same command resumes"
    raise DataError(f"{source.url}: {what}; {remedy}")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Tell what the disk did in one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"{path}: the disk is full; make room and run the same command again, it resumes") from None
        raise DataError(
            f"{path}: {error.strerror or _line(error)}; make it readable and writable, and run again"
        ) from None


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
