"""Atomic file writes: data goes to a temporary file in the same directory, is synced, then renamed."""

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
from efcil.platform_support import NO_LOCKS, StrPath, lock_type, replace, sync_directory, sync_file

_TEMPORARY = re.compile(r"\..*\.\d+-[0-9a-f]{12}\.tmp(\..*)?")  # temporary files of `atomic_replace`


@contextlib.contextmanager
def atomic_replace(path: StrPath) -> Iterator[Path]:
    """Yield a temporary file to write; it replaces `path` atomically on success and is removed on an exception.

    The temporary file has the suffix of `path`, from which some writers choose the format. Its name is unique, so two
    processes may write the same file; the last one wins. A symbolic link at `path` stays a link.
    """
    path = Path(os.path.realpath(path))
    # Truncate the stem: the full name plus the token may exceed the limit of the file system.
    temporary = path.with_name(f".{path.stem[:64]}.{os.getpid()}-{secrets.token_hex(6)}.tmp{path.suffix}")
    try:
        yield temporary
        sync_file(temporary)
        replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def remove_temporary_files(directory: StrPath) -> None:
    """Remove temporary files of killed writers recursively; no other process may be writing there."""
    for path in Path(directory).rglob(".*.tmp*"):
        if _TEMPORARY.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def exclusive_lock(path: StrPath, *, wait: bool = False, remove: bool = False) -> contextlib.ExitStack:
    """Lock a file for this process until the returned context exits or the process dies.

    If another process holds the lock, wait for it or raise BlockingIOError. The file is kept unless `remove` is set. On
    a system or file system without locks this has no effect.
    """

    def unlink() -> None:
        with contextlib.suppress(OSError):
            os.unlink(path)

    stack = contextlib.ExitStack()
    kind = lock_type()
    if kind is None:
        return stack
    from filelock import Timeout

    lock = kind(path, thread_local=False, fallback_to_soft=False)
    try:
        stack.enter_context(lock.acquire(blocking=wait))
    except Timeout:
        raise BlockingIOError(errno.EAGAIN, "locked by another process", os.fspath(path)) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    if remove:  # while locked: a process that has opened it sees that it was unlinked, and retries
        stack.callback(unlink)
    return stack


def atomic_write_bytes(path: StrPath, data: bytes | bytearray | memoryview) -> None:
    """Write a file atomically."""
    with atomic_replace(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: StrPath, text: str) -> None:
    """Write a UTF-8 file atomically, without translating line ends."""
    atomic_write_bytes(path, text.encode("utf-8"))


def write_json(path: StrPath, value: Any, *, indent: int | None = 2) -> None:
    """Write a value as JSON atomically; arrays become lists, paths become strings.

    NaN and infinity raise ValueError, as other JSON parsers reject them.
    """
    try:
        data = _json(value, indent, ascii_only=False).encode("utf-8")
    except UnicodeEncodeError:  # a file name that is not valid Unicode can be written escaped
        data = _json(value, indent, ascii_only=True).encode("ascii")
    atomic_write_bytes(path, data + b"\n")


def write_json_lines(path: StrPath, values: Iterable[Any]) -> None:
    """Write JSON Lines atomically."""
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
    """Read a JSON file; raise `error` with its name if it is missing, unreadable or damaged."""
    return _read(path, json.loads, error)


def read_json_lines(path: StrPath, *, error: type[EfcilError] = EfcilError) -> list[Any]:
    """Read JSON Lines; errors as in `read_json`."""
    # Parse one array, so that errors name the line of the file.
    lines: list[Any] = _read(path, lambda data: json.loads(b"[" + b",\n".join(data.splitlines()) + b"]"), error)
    return lines


def _read(path: StrPath, parse: Callable[[bytes], Any], error: type[EfcilError]) -> Any:
    try:
        return parse(Path(path).read_bytes())
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}") from problem
    except (ValueError, RecursionError) as problem:  # not UTF-8, or not JSON
        raise error(f"{path}: not valid JSON: {problem}") from problem


def wait_for_end_of_input() -> None:
    """Block until standard input is closed, that is, until the parent process has ended."""
    with contextlib.suppress(OSError):
        while os.read(0, 1024):  # not sys.stdin: a thread blocked in it breaks interpreter shutdown
            pass
