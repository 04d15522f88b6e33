"""Atomic file writes: data goes to a temporary file in the same directory, is synced, then renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from efcil import platform_support
from efcil.errors import EfcilError, FileRefusedError
from efcil.platform_support import NO_LOCKS, HeldDirectory, StrPath, lock_type, open_regular

JSON_LIMIT = 1 << 26  # bytes of a JSON file
MARKER = ".efcil.json"  # of a directory that efcil has made for itself and may remove
_RESULTS = "efcil results"  # kind of a directory with tables and pages of runs
JSON_VALUES = 4_000_000  # in one JSON file: some 400 MB as objects
_TEMPORARY = re.compile(r"\..*\.\d+-[0-9a-f]{12}\.tmp(\..*)?")  # temporary files of `atomic_replace`


@contextlib.contextmanager
def atomic_replace(path: StrPath, *, root: StrPath | None = None) -> Iterator[Path]:
    """Yield a temporary file to write; it replaces `path` atomically on success and is removed on an exception.

    The temporary file has the suffix of `path`, from which some writers choose the format. Its name is unique, so two
    processes may write the same file; the last one wins. A link, a FIFO or a device at `path` is refused, and with
    `root`, a directory of ours that `path` is in, links on the way from there as well.
    """
    path = Path(path)
    with _folder_of(path, root) as folder:
        check_regular(folder, path.name)
        # Truncate the stem: the full name plus the token may exceed the limit of the file system.
        name = f".{path.stem[:64]}.{os.getpid()}-{secrets.token_hex(6)}.tmp{path.suffix}"
        temporary = folder.path / name
        try:
            yield temporary
            _settle(folder, name)
            folder.check()
            check_regular(folder, path.name)
            folder.rename(name, path.name)
        except BaseException:
            with contextlib.suppress(OSError):
                folder.remove(name)
            raise
        folder.sync()


def _settle(folder: HeldDirectory, name: str) -> None:
    """Give a file that was written the usual permissions, and sync it."""
    descriptor = folder.open(name, os.O_RDWR)
    try:
        if hasattr(os, "fchmod"):  # some writers make private files
            os.fchmod(descriptor, platform_support.new_file_mode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder_of(path: Path, root: StrPath | None) -> HeldDirectory:
    """Open the directory of a file; links on the way there are the user's choice, but not below `root`."""
    if root is None:
        return HeldDirectory(os.path.realpath(path.parent))
    return open_below(root, path.parent)


def open_below(root: StrPath, path: StrPath, *, create: bool = False) -> HeldDirectory:
    """Open the directory `path` at or below `root`, a directory of ours; a link on the way is refused with its name."""
    if create:
        Path(root).mkdir(parents=True, exist_ok=True)
    folder = HeldDirectory(os.path.realpath(root))
    for name in Path(path).relative_to(root).parts:
        with folder:
            found = folder.status(name)
            if found is None and create:
                with contextlib.suppress(FileExistsError):
                    folder.make_directory(name)
                found = folder.status(name)
            if found is not None and not stat.S_ISDIR(found.st_mode):
                raise FileRefusedError(f"{folder.path / name} is {_kind(found)}, not a directory; move it away")
            folder = folder.directory(name)
    return folder


def make_directory(root: StrPath, path: StrPath) -> None:
    """Make `path` and the directories between `root` and it; a link among them is refused."""
    open_below(root, path, create=True).__exit__()


def check_regular(folder: HeldDirectory, name: str) -> None:
    """Refuse an entry that is there and is no regular file: a link is not followed, a FIFO or device never opened."""
    found = folder.status(name)
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise FileRefusedError(
            f"{folder.path / name} is {_kind(found)}, which is not written to; move it away or give another name"
        )


def _kind(status: os.stat_result) -> str:
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(status.st_mode), "a file" if stat.S_ISREG(status.st_mode) else "a device")


def append_text(path: StrPath, text: str, *, root: StrPath | None = None) -> None:
    """Append to a UTF-8 file, or make one; what is refused and `root` as in `atomic_replace`."""
    path = Path(path)
    with _folder_of(path, root) as folder:
        check_regular(folder, path.name)
        with os.fdopen(folder.open(path.name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
            file.write(text.encode("utf-8"))


def remove_file(path: StrPath, *, root: StrPath | None = None) -> None:
    """Remove a file, or of a link the link; `root` as in `atomic_replace`."""
    with _folder_of(Path(path), root) as folder:
        folder.remove(Path(path).name)


def rename_file(path: StrPath, name: str, *, root: StrPath | None = None) -> None:
    """Give a file another name in its directory; `root` as in `atomic_replace`."""
    with _folder_of(Path(path), root) as folder:
        folder.rename(Path(path).name, name)


def check_path(root: StrPath, path: StrPath) -> None:
    """Refuse a file to be written below `root` that is no regular file, or behind a link; nothing need be there."""
    with contextlib.suppress(FileNotFoundError), _folder_of(Path(path), root) as folder:
        check_regular(folder, Path(path).name)


def check_known(folder: HeldDirectory, name: str, known: re.Pattern[str], below: str = "") -> None:
    """Refuse a directory that holds anything but regular files whose paths in it, and theirs alone, are `known`."""
    with folder.directory(name) as inner:
        for entry in inner.names():
            found, path = inner.status(entry), f"{below}{entry}"
            if found is not None and stat.S_ISDIR(found.st_mode):
                check_known(inner, entry, known, f"{path}/")
            elif found is not None and not (stat.S_ISREG(found.st_mode) and known.fullmatch(path)):
                raise FileRefusedError(f"{inner.path / entry} is not efcil's and would be deleted; move it away")


@contextlib.contextmanager
def working_directory(path: StrPath, kind: str) -> Iterator[HeldDirectory]:
    """Claim a directory for temporary files with a marker, and remove it with all that is in it at the end.

    What a killed process left there is removed first. A link, or a directory that has anything in it but no marker of
    this kind, is refused with its name.
    """
    path = Path(path)
    with HeldDirectory(os.path.realpath(path.parent)) as parent:
        found = parent.status(path.name)
        if found is None:
            parent.make_directory(path.name)
        elif not stat.S_ISDIR(found.st_mode):
            raise FileRefusedError(f"{path} is {_kind(found)}, and needed for temporary files; move it away")
        with parent.directory(path.name) as folder:
            own = [name for name in folder.names() if name not in (MARKER, f"{MARKER}.lock")]
            if own and not _has_marker(folder, kind):
                raise FileRefusedError(
                    f"{path} is needed for temporary files, and what is in it is not efcil's ({own[0]}); move it away"
                )
            try:
                lock = exclusive_lock(folder.path / f"{MARKER}.lock")
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    raise
                raise OSError(error.errno, error.strerror, os.fspath(path)) from None
            with lock:
                write_json(folder.path / MARKER, {"kind": kind}, root=folder.path)
                for name in own:
                    _remove(folder, name)
                try:
                    yield folder
                finally:
                    for name in folder.names():
                        with contextlib.suppress(OSError):
                            _remove(folder, name)
        with contextlib.suppress(OSError):
            parent.remove_directory(path.name)


def check_results(path: StrPath, names: Iterable[str]) -> None:
    """Refuse to write results into a directory that has files of these names and no marker of ours."""
    with contextlib.suppress(FileNotFoundError), HeldDirectory(os.path.realpath(path)) as folder:
        if not _has_marker(folder, _RESULTS):
            for name in names:
                if os.path.lexists(folder.path / name):
                    raise FileRefusedError(
                        f"{folder.path / name} is there already, and nothing says that efcil wrote it; move it away or "
                        "choose another --out"
                    )


def claim_results(path: StrPath, names: Iterable[str]) -> None:
    """Create and mark a directory for results; refuse one without the mark that has files of these names."""
    Path(path).mkdir(parents=True, exist_ok=True)
    check_results(path, names)
    write_json(Path(path) / MARKER, {"kind": _RESULTS})


def _has_marker(folder: HeldDirectory, kind: str) -> bool:
    found = folder.status(MARKER)
    if found is None or not stat.S_ISREG(found.st_mode):
        return False
    with contextlib.suppress(OSError, EfcilError):
        content = read_json(folder.path / MARKER, limit=1000)
        return isinstance(content, dict) and content.get("kind") == kind
    return False


def _remove(folder: HeldDirectory, name: str) -> None:
    found = folder.status(name)
    if found is not None and stat.S_ISDIR(found.st_mode):
        remove_tree(folder, name)
    elif found is not None:
        folder.remove(name)


def remove_tree(folder: HeldDirectory, name: str) -> None:
    """Remove a directory of ours and all that is in it; of links, the link alone."""
    with folder.directory(name) as inner:
        for entry in inner.names():
            _remove(inner, entry)
    folder.remove_directory(name)


def remove_temporary_files(directory: StrPath) -> None:
    """Remove temporary files of killed writers recursively; no other process may be writing there."""

    def clean(folder: HeldDirectory) -> None:
        for name in folder.names():
            found = folder.status(name)
            if found is not None and stat.S_ISDIR(found.st_mode):
                with folder.directory(name) as inner:
                    clean(inner)
            elif found is not None and stat.S_ISREG(found.st_mode) and _TEMPORARY.fullmatch(name):
                folder.remove(name)

    with contextlib.suppress(OSError), HeldDirectory(os.path.realpath(directory)) as folder:
        clean(folder)


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


def atomic_write_bytes(path: StrPath, data: bytes | bytearray | memoryview, *, root: StrPath | None = None) -> None:
    """Write a file atomically; `root` as in `atomic_replace`."""
    with atomic_replace(path, root=root) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: StrPath, text: str, *, root: StrPath | None = None) -> None:
    """Write a UTF-8 file atomically, without translating line ends."""
    atomic_write_bytes(path, text.encode("utf-8"), root=root)


def write_json(path: StrPath, value: Any, *, indent: int | None = 2, root: StrPath | None = None) -> None:
    """Write a value as JSON atomically; arrays become lists, paths become strings.

    NaN and infinity raise ValueError, as other JSON parsers reject them.
    """
    try:
        data = _json(value, indent, ascii_only=False).encode("utf-8")
    except UnicodeEncodeError:  # a file name that is not valid Unicode can be written escaped
        data = _json(value, indent, ascii_only=True).encode("ascii")
    atomic_write_bytes(path, data + b"\n", root=root)


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


def read_bytes(path: StrPath, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes; a longer one is an OSError before it is read."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= limit:
            data = file.read(limit + 1)
            size = len(data)
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than the {limit:,} that such a file may have")
        return data


def read_text(path: StrPath, limit: int, *, errors: str = "strict") -> str:
    """Read a regular UTF-8 file of at most `limit` bytes."""
    return read_bytes(path, limit).decode("utf-8", errors)


def read_json(path: StrPath, *, error: type[EfcilError] = EfcilError, limit: int = JSON_LIMIT) -> Any:
    """Read a JSON file; raise `error` with its name if it is missing, unreadable, damaged or too large."""
    return _read(path, parse_json, error, limit)


def read_json_lines(path: StrPath, *, error: type[EfcilError] = EfcilError, limit: int = JSON_LIMIT) -> list[Any]:
    """Read JSON Lines; errors as in `read_json`."""
    # Parse one array, so that errors name the line of the file.
    lines: list[Any] = _read(path, lambda data: parse_json(b"[" + b",\n".join(data.splitlines()) + b"]"), error, limit)
    return lines


def parse_json(data: bytes) -> Any:
    """Parse JSON of a bounded number of values: a byte of text can stand for a hundred bytes of memory.

    >>> parse_json(b'{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    count = sum(map(data.count, (b",", b"[", b"{")))
    if count > JSON_VALUES:
        raise ValueError(f"{count:,} values, more than the {JSON_VALUES:,} that such a file may have")
    return json.loads(data)


def _read(path: StrPath, parse: Callable[[bytes], Any], error: type[EfcilError], limit: int) -> Any:
    try:
        return parse(read_bytes(path, limit))
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
