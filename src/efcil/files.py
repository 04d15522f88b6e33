"""Files that are there whole or not at all: every write goes to a sibling, is synced, then takes the name at once."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from efcil.errors import EfcilError

StrPath = str | os.PathLike[str]
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # from a file system without locks
_TEMPORARY = re.compile(r"\..*\.\d+-[0-9a-f]{12}\.tmp(\..*)?")  # the siblings that `atomic_replace` makes


@contextlib.contextmanager
def atomic_replace(path: StrPath) -> Iterator[Path]:
    """Yield a temporary sibling to write; on success it replaces `path` at once, on any exception it is removed.

    The sibling keeps the suffix, since several writers choose the format by it, and its name is unique, so that two
    processes may write the same file: the last one wins, whole. A symbolic link at `path` stays a link.
    """
    path = Path(os.path.realpath(path))
    # Not the whole stem: a long name plus the token may be longer than the file system allows.
    temporary = path.with_name(f".{path.stem[:64]}.{os.getpid()}-{secrets.token_hex(6)}.tmp{path.suffix}")
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def remove_temporary_files(directory: StrPath) -> None:
    """Remove what killed writers left at any depth of a directory; nobody else may be writing there."""
    for path in Path(directory).rglob(".*.tmp*"):
        if _TEMPORARY.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def exclusive_lock(path: StrPath, *, wait: bool = False, remove: bool = False) -> contextlib.ExitStack:
    """Lock a file for this process until the returned context ends; a process that dies releases it.

    Raise BlockingIOError when another process holds it, or wait for that process. The file stays, unless `remove` is
    set. On a file system without locks nobody is kept out.
    """
    from filelock import FileLock, Timeout  # imported here: it takes 45 ms

    def unlink() -> None:
        with contextlib.suppress(OSError):
            os.unlink(path)

    held = contextlib.ExitStack()
    # Never the fallback to a file whose existence is the lock: it would outlive a crash.
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        held.enter_context(lock.acquire(blocking=wait))
    except Timeout:
        raise BlockingIOError(errno.EAGAIN, "locked by another process", os.fspath(path)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    if remove:  # while it is locked: whoever opened it meanwhile finds that it has no name any more, and tries again
        held.callback(unlink)
    return held


def sync_directory(directory: StrPath) -> None:
    """Make renames in a directory survive a power cut, where the system can do that."""
    # Windows cannot open a directory and some network file systems refuse to sync one: the rename stands all the same.
    with contextlib.suppress(OSError):
        sync_file(directory)


def sync_file(path: StrPath) -> None:
    """Make what was written to a file survive a power cut."""
    # Windows syncs only what is open for writing; POSIX opens a directory only for reading.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write_bytes(path: StrPath, data: bytes | bytearray | memoryview) -> None:
    """Write a file whole or not at all."""
    with atomic_replace(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: StrPath, text: str) -> None:
    """Write a UTF-8 file whole or not at all; line ends are kept as they are."""
    atomic_write_bytes(path, text.encode("utf-8"))


def write_json(path: StrPath, value: Any, *, indent: int | None = 2) -> None:
    """Write a value as JSON, whole or not at all; arrays become lists, paths become strings.

    NaN and infinity are refused with ValueError, since no other reader would take them.
    """
    try:
        data = _json(value, indent, ascii_only=False).encode("utf-8")
    except UnicodeEncodeError:  # a file name that is not valid Unicode: escaped, it survives the round trip
        data = _json(value, indent, ascii_only=True).encode("ascii")
    atomic_write_bytes(path, data + b"\n")


def write_json_lines(path: StrPath, values: Iterable[Any]) -> None:
    """Write one JSON value per line, whole or not at all."""
    atomic_write_text(path, "".join(_json(value, None, ascii_only=False) + "\n" for value in values))


def _json(value: Any, indent: int | None, *, ascii_only: bool) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ascii_only, allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def read_json(path: StrPath, *, error: type[EfcilError] = EfcilError) -> Any:
    """Read a JSON file; a file that is missing, unreadable or damaged raises `error` with its name."""
    return _read(path, json.loads, error)


def read_json_lines(path: StrPath, *, error: type[EfcilError] = EfcilError) -> list[Any]:
    """Read a file with one JSON value per line; errors as in `read_json`."""
    # As one array: an error then names the line of the file.
    lines: list[Any] = _read(path, lambda data: json.loads(b"[" + b",\n".join(data.splitlines()) + b"]"), error)
    return lines


def _read(path: StrPath, parse: Callable[[bytes], Any], error: type[EfcilError]) -> Any:
    try:
        return parse(Path(path).read_bytes())
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror or problem}") from problem
    except (ValueError, RecursionError) as problem:  # not UTF-8, or not JSON
        raise error(f"{path}: not valid JSON: {problem}") from problem


def wait_for_end_of_input() -> None:
    """Return when standard input has ended: whoever started this process to work for it is gone."""
    with contextlib.suppress(OSError):
        while os.read(0, 1024):  # not sys.stdin: a thread that waits in it breaks the end of the interpreter
            pass
