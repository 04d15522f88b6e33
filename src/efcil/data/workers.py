"""Image decoding processes that do not re-run the user's script, ignore Ctrl-C and exit with their parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from efcil.data.decode import read_image
from efcil.data.letterbox import stored_shape
from efcil.data.preprocessing import Preprocessing
from efcil.errors import DataError
from efcil.platform_support import blocked_interrupt, cores

CHANNELS = 3
_starting = threading.Lock()


def own_cores() -> int:
    """Return the number of cores per process, if torchrun started several on this machine."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def pool_of(processes: int) -> ProcessPoolExecutor:
    """Return a pool of decoding processes, which start in `submit`, inside a `starting` context."""
    context = multiprocessing.get_context("spawn")  # fork is unsafe with CUDA and threads
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Context for every `submit`, which may start a process."""
    # One thread at a time: __main__ is global. Ctrl-C is blocked in workers: the parent stops them.
    with _starting, _hidden_main(), blocked_interrupt():
        yield


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep spawned workers from running the user's script again if it has no main guard."""
    # multiprocessing reads __main__ when `submit` starts a process; the workers do not need it.
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for systems without signal masks
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # returns when the parent has died, for any reason
        os._exit(1)


def decode_chunk(
    root: str, names: Sequence[str], target: str, offset: int, size: int | Preprocessing, keep_aspect: bool
) -> tuple[int, dict[str, str]]:
    """Decode consecutive rows into the array file; unreadable ones stay black and are reported."""
    rows = np.zeros((len(names), *stored_shape(CHANNELS, Preprocessing.of(size).size, keep_aspect)), dtype=np.uint8)
    bad: dict[str, str] = {}
    for row, name in zip(rows, names, strict=True):
        if not os.path.exists(target):
            return 0, {}  # the build was aborted
        try:
            row[:] = read_image(os.path.join(root, name), size, CHANNELS, name=name, keep_aspect=keep_aspect)
        except DataError as error:
            bad[name] = str(error)
    with open(target, "r+b") as file:
        file.seek(offset)
        file.write(rows.data)
    return len(names), bad


def problem(root: Path, name: str, size: int | Preprocessing, keep_aspect: bool = False) -> str | None:
    """Return why an image cannot be decoded, or None."""
    try:
        read_image(root / name, size, CHANNELS, name=name, keep_aspect=keep_aspect)
    except DataError as error:
        return str(error)
    return None
