"""What operating systems do differently, in one place: each function works on Linux, macOS and Windows.

A system call that a system lacks is looked for when it is needed, so that the tests can take it away. Nothing here
imports torch: the command asks for the settings of threads before torch is loaded.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import functools
import os
import re
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from filelock import FileLock

StrPath = str | os.PathLike[str]
WINDOWS = os.name == "nt"
# A process in the foreground is stopped by these; SIGBREAK is Ctrl-Break, the only one that Windows can send to others.
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name))
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # what a lock fails with where there are none
REPLACE_TRIES = 40  # of 50 ms: a virus scanner or an indexer of Windows holds a file that long
_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


# --- files ------------------------------------------------------------------------------------------------------------


def file_name(text: str) -> str:
    """Return text as the name of a file or directory that every system takes.

    >>> file_name("dpcr:rank_rule=none"), file_name("nul"), file_name("ends with a dot.")
    ('dpcr-rank_rule=none', '_nul', 'ends with a dot')
    """
    name = _FORBIDDEN.sub("-", text).rstrip(". ") or "_"
    return f"_{name}" if _RESERVED.fullmatch(name) else name


def replace(source: StrPath, target: StrPath) -> None:
    """Give a file the name of another one, which is gone then; on Windows wait for whoever reads that one."""
    for left in reversed(range(REPLACE_TRIES if WINDOWS else 1)):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if not left:
                raise
            time.sleep(0.05)


def sync_directory(directory: StrPath) -> None:
    """Make renames in a directory survive a power cut, where the system can do that."""
    # Windows cannot open a directory and some network file systems refuse to sync one: the rename stands all the same.
    with contextlib.suppress(OSError):
        sync_file(directory)


def sync_file(path: StrPath) -> None:
    """Make what was written to a file survive a power cut."""
    try:  # Windows syncs only what is open for writing; POSIX opens a directory only for reading.
        descriptor = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    except PermissionError:
        if WINDOWS and os.path.isfile(path):  # read-only, as archives may say: it cannot be synced there
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@functools.cache
def lock_type() -> type[FileLock] | None:
    """Return the lock that ends with its process; None where the system has none.

    Never a file whose existence is the lock, to which the library falls back there: it would outlive a crash.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "only soft file lock")
        from filelock import FileLock, SoftFileLock  # imported here: it takes 45 ms

    return None if issubclass(FileLock, SoftFileLock) else FileLock


def reserve(file: IO[bytes], size: int) -> None:
    """Make a file `size` bytes long; where the system can, a disk that has no room for them is an OSError now."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:  # macOS, Windows: a full disk shows when the bytes are written
        file.truncate(size)


class HeldDirectory:
    """An open directory, in which entries are looked up by name and links are never followed.

    What happens to its path meanwhile changes nothing. Where the system cannot open directories (Windows), the identity
    of what is at the path is compared before and after each step; a directory that was replaced is an OSError.
    """

    def __init__(self, path: StrPath, parent: HeldDirectory | None = None):
        """Open a directory; with `parent`, the entry `path` of it."""
        self.path: Path = Path(path) if parent is None else parent.path / path
        self._descriptor: int | None = None
        self._parent = parent  # stays what it is while this one is used
        if _can_open_directories():
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            where = self.path if parent is None else path
            self._descriptor = os.open(where, flags, dir_fd=None if parent is None else parent._descriptor)
            self.identity = identity(os.fstat(self._descriptor))
        else:
            found = os.lstat(self.path)
            if not stat.S_ISDIR(found.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "is a link or no directory", os.fspath(self.path))
            self.identity = identity(found)

    def __enter__(self) -> HeldDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @contextlib.contextmanager
    def _at(self, name: str) -> Iterator[tuple[StrPath, int | None]]:
        """Yield what to pass as path and dir_fd for an entry."""
        if self._descriptor is not None:
            yield name, self._descriptor
            return
        self.check()
        yield self.path / name, None
        self.check()

    def check(self) -> None:
        """Raise OSError if another directory is at the path now."""
        if identity(os.lstat(self.path)) != self.identity:
            raise OSError(errno.ESTALE, "was replaced by another directory meanwhile", os.fspath(self.path))

    @property
    def mode(self) -> int:
        """Its permissions."""
        return stat.S_IMODE((os.lstat(self.path) if self._descriptor is None else os.fstat(self._descriptor)).st_mode)

    def names(self) -> list[str]:
        """Return the names of the entries, sorted."""
        if self._descriptor is not None:
            return sorted(os.listdir(self._descriptor))
        with self._at("."):
            return sorted(os.listdir(self.path))

    def status(self, name: str) -> os.stat_result | None:
        """Return what an entry is, itself and not what it links to; None where there is none."""
        with contextlib.suppress(FileNotFoundError), self._at(name) as (path, descriptor):
            return os.stat(path, dir_fd=descriptor, follow_symlinks=False)
        return None

    def directory(self, name: str) -> HeldDirectory:
        """Open a directory in it; a link to one is an OSError."""
        return HeldDirectory(name, self)

    def make_directory(self, name: str, mode: int = 0o777) -> None:
        """Make a directory in it."""
        with self._at(name) as (path, descriptor):
            os.mkdir(path, mode, dir_fd=descriptor)

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Open a regular file in it; a link, a FIFO or a device is an OSError."""
        more = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        if self._descriptor is None and (found := self.status(name)) is not None and not stat.S_ISREG(found.st_mode):
            raise OSError(errno.ELOOP, "is not a regular file", name)
        with contextlib.ExitStack() as held:
            with self._at(name) as (path, descriptor):
                opened = os.open(path, flags | more, mode, dir_fd=descriptor)
                held.callback(os.close, opened)
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise OSError(errno.ELOOP, "is not a regular file", name)
            held.pop_all()
        return opened

    def open_to_read(self, name: str) -> BufferedReader:
        """Open a file in it, or what a link in it leads to; a directory, a FIFO or a device is an OSError."""
        with contextlib.ExitStack() as opened:
            with self._at(name) as (path, descriptor):
                file = opened.enter_context(open_regular(path, descriptor))
            opened.pop_all()
        return file

    def set_mode(self, mode: int, name: str | None = None) -> None:
        """Set the permissions of a file in it, or its own, where the system has such permissions."""
        if self._descriptor is None:
            return
        if name is None:
            os.fchmod(self._descriptor, mode)
            return
        opened = self.open(name, os.O_RDONLY)
        try:
            os.fchmod(opened, mode)
        finally:
            os.close(opened)

    def rename(self, name: str, new: str) -> None:
        """Give an entry the name of another one, which is gone then."""
        if self._descriptor is not None:
            os.replace(name, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            return
        with self._at(name):
            replace(self.path / name, self.path / new)

    def remove(self, name: str) -> None:
        """Remove an entry that is no directory; of a link, the link."""
        with self._at(name) as (path, descriptor):
            os.unlink(path, dir_fd=descriptor)

    def remove_directory(self, name: str) -> None:
        """Remove an empty directory."""
        with self._at(name) as (path, descriptor):
            os.rmdir(path, dir_fd=descriptor)

    def sync(self) -> None:
        """Make renames in it survive a power cut, where the system can do that."""
        with contextlib.suppress(OSError):
            os.fsync(self._descriptor) if self._descriptor is not None else sync_file(self.path)


def open_regular(path: StrPath, directory: int | None = None) -> BufferedReader:
    """Open a file to read it; a directory, a FIFO or a device is an OSError, and nothing waits for a writer."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return os.fdopen(descriptor, "rb")


def _can_open_directories() -> bool:
    return not WINDOWS and os.open in os.supports_dir_fd and hasattr(os, "O_DIRECTORY") and hasattr(os, "O_NOFOLLOW")


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return what tells a file or directory from every other one while it exists."""
    return status.st_dev, status.st_ino


def new_file_mode() -> int:
    """Return the permissions that a new file gets."""
    with (
        contextlib.suppress(OSError, ValueError),
        open("/proc/self/status", encoding="ascii", errors="replace") as file,
    ):
        for line in file:
            if line.startswith("Umask:"):
                return 0o666 & ~int(line.split()[1], 8)
    mask = os.umask(0o077)  # the only other way to read it; what another thread makes now is private, not public
    os.umask(mask)
    return 0o666 & ~mask


def exchange(one: StrPath, other: StrPath) -> bool:
    """Exchange two directories in one step (Linux, renameat2 with RENAME_EXCHANGE), or say that it cannot be done."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    here, flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), flag) == 0)


def shared_memory() -> str | None:
    """Return a directory in memory for temporary files, None where there is none."""
    place = "/dev/shm"  # nosec B108 # callers make a directory of a random name in it that only its owner can enter
    return place if os.access(place, os.W_OK) else None


def user_cache() -> Path:
    """Return the system's directory for caches of this user."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG rules say to ignore a relative one
        return Path(base)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if WINDOWS:
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / ".cache"


# --- processes and signals --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def blocked_interrupt() -> Iterator[None]:
    """Start processes deaf to Ctrl-C, which reaches the whole group, where the system has signal masks."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit it; here it comes later
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def own_group() -> dict[str, Any]:
    """Return the arguments of subprocess.Popen for a process that Ctrl-C in this terminal does not reach."""
    if WINDOWS:
        return {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    return {"start_new_session": True}


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process started with `own_group` at once, and what it has started, where the system has process groups."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended already
        if hasattr(os, "killpg") and hasattr(signal, "SIGKILL"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()  # its decoding processes end with it by themselves
    process.wait()


def stop_this_process() -> None:
    """Send SIGTERM to the main thread of this process, from any thread; a handler of it runs."""
    if WINDOWS:  # there os.kill ends the process without asking the handler
        _thread.interrupt_main(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def lower_priority(by: int) -> None:
    """Let other processes go first, where the system has priorities of this kind."""
    if hasattr(os, "nice"):
        with contextlib.suppress(OSError):
            os.nice(by)


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number where it has none here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def tolerate_any_text() -> None:
    """Let standard output and error take every character: consoles and pipes of Windows may have 256 of them."""
    for stream in (sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        if encoding.lower().replace("-", "") != "utf8" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


# --- the machine ------------------------------------------------------------------------------------------------------


def cores() -> int:
    """Return how many cores this process may use: those it may run on, and no more than its container is given."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return count if quota is None else max(1, min(count, int(quota)))


def _quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the cores that a container's limit amounts to (Linux, cgroup version 2 or 1); None without a limit."""
    try:
        if (root / "cpu.max").exists():
            limit, period = (root / "cpu.max").read_text(encoding="ascii").split()
        else:
            files = (root / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            limit, period = (file.read_text(encoding="ascii").strip() for file in files)
        return int(limit) / int(period) if limit.isdigit() and int(period) else None
    except (OSError, ValueError):
        return None


THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # variables by which a user sets how many threads there are
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # and how a thread waits for the others


@dataclass
class ThreadChoice:
    """What the command has set before torch is imported, and why."""

    variables: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    fixed: bool = False  # by --threads


thread_choice = ThreadChoice()  # of this process


def choose_threads() -> ThreadChoice:
    """Set how threads wait, and in a container their number, unless the user has; torch reads it when imported.

    By default threads spin while they wait for each other. Beside another busy process that takes away the core on
    which the others would get done, and an epoch takes ten times as long.
    """
    chosen = ThreadChoice()
    if own := _given(WAITING):
        chosen.reasons.append(f"waiting threads: {own}, as set by you")
    else:
        chosen.variables["OMP_WAIT_POLICY"] = "PASSIVE"
        chosen.reasons.append("waiting threads sleep (OMP_WAIT_POLICY=PASSIVE): they leave the cores to other programs")
    quota = _quota()
    if own := _given(THREADS):
        chosen.reasons.append(f"number of threads: {own}, as set by you")
    elif quota is not None and cores() == max(1, int(quota)):
        chosen.variables["OMP_NUM_THREADS"] = str(cores())
        chosen.reasons.append(f"number of threads: {cores()}, which is what this container is given")
    else:
        chosen.reasons.append("number of threads: torch's default; one where a training step is small")
    os.environ.update(chosen.variables)
    vars(thread_choice).update(vars(chosen))
    return chosen


def may_choose_threads() -> bool:
    """Whether the number of threads is the command's to choose: not in a notebook, nor where the user has set it."""
    theirs = [name for name in THREADS if name not in thread_choice.variables]
    return bool(thread_choice.reasons) and not thread_choice.fixed and not _given(theirs)


def _given(names: Iterable[str]) -> str:
    return " ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))


def memory() -> int | None:
    """Return the bytes of memory of this machine; None where they cannot be asked for."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return _windows_memory() if WINDOWS else None


def _windows_memory() -> int | None:
    kilobytes = ctypes.c_ulonglong()
    library: Any = getattr(ctypes, "windll", None)
    if library is None or not library.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes)):
        return None
    return kilobytes.value * 1024


def open_files() -> int | None:
    """Return how many files this process may have open; None where there is no such limit."""
    try:
        import resource
    except ImportError:
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def command_beside_python(name: str) -> bool:
    """Whether a command was installed beside this Python, whatever its file is called there."""
    place = Path(sys.executable)
    return any(place.with_name(name + ending).exists() for ending in ("", ".exe", "-script.py", ".cmd"))
