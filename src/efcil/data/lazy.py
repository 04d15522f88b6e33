"""Lazily decoded images, for data sets too large for the cache.

Worker processes decode into slots, shared-memory files that the parent maps. Several requests are in flight, so that
decoding overlaps with computation.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from efcil.data.letterbox import stored_shape
from efcil.data.preprocessing import Preprocessing
from efcil.data.workers import CHANNELS, decode_chunk, own_cores, pool_of, starting
from efcil.errors import DataError
from efcil.platform_support import reserve, shared_memory

Images = npt.NDArray[np.uint8]
JOB = 16  # images per job of a worker


class Decoder:
    """Pool of processes that decode files to squares of `size` pixels or letterboxed images.

    Processes start on first use.
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        size: int | Preprocessing,
        workers: int | None = None,
        keep_aspect: bool = False,
    ):
        self.root, self.names, self.size, self.keep_aspect = os.fspath(root), list(names), size, keep_aspect
        self.shape = stored_shape(CHANNELS, Preprocessing.of(size).size, keep_aspect)
        self.workers = workers or own_cores()
        self._pool: ProcessPoolExecutor | None = None
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._free: list[tuple[int, Path]] = []  # slots: capacity in images, file
        self._slots = 0

    def _start_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._home = tempfile.TemporaryDirectory(prefix="efcil-", dir=shared_memory())
            self._pool = pool_of(self.workers)
            weakref.finalize(self, _shut_down, self._pool, self._home)
        return self._pool

    def submit(self, rows: Sequence[int]) -> DecodeRequest:
        """Start decoding rows of the list; see `DecodeRequest.wait`."""
        pool = self._start_pool()
        assert self._home is not None
        slot = next((s for s in self._free if s[0] >= len(rows)), None)
        row = int(np.prod(self.shape))
        if slot is None:
            self._slots += 1
            slot = (len(rows), Path(self._home.name) / f"slot-{self._slots}")
            try:
                with open(slot[1], "wb") as file:
                    reserve(file, max(1, len(rows) * row))
            except OSError as error:
                raise DataError(
                    f"{self._home.name}: no room for a batch of {len(rows) * row / 1e6:.0f} MB ({error.strerror}); "
                    "enlarge /dev/shm or lower batch_size"
                ) from error
        else:
            self._free.remove(slot)
        with starting(), _explain_dead_worker():
            jobs = [
                pool.submit(
                    decode_chunk,
                    self.root,
                    [self.names[r] for r in rows[i : i + JOB]],
                    os.fspath(slot[1]),
                    i * row,
                    self.size,
                    self.keep_aspect,
                )
                for i in range(0, len(rows), JOB)
            ]
        return DecodeRequest(self, slot, jobs, (len(rows), *self.shape))

    def release(self, slot: tuple[int, Path]) -> None:
        """Return a slot to the free list."""
        self._free.append(slot)


class DecodeRequest:
    """Pending decoding of some rows."""

    def __init__(
        self,
        decoder: Decoder,
        slot: tuple[int, Path],
        jobs: list[Future[tuple[int, dict[str, str]]]],
        shape: tuple[int, ...],
    ):
        self.decoder, self.slot, self.jobs, self.shape = decoder, slot, jobs, shape

    @contextlib.contextmanager
    def wait(self) -> Iterator[Images]:
        """Wait for the images, valid within the context; raise DataError for unreadable files."""
        with _explain_dead_worker():
            bad = [problem for job in self.jobs for problem in job.result()[1].values()]
        if bad:
            raise DataError(f"{bad[0]}; `efcil data verify` lists all such files")
        yield np.memmap(self.slot[1], np.uint8, "r+", shape=self.shape)
        self.decoder.release(self.slot)


@contextlib.contextmanager
def _explain_dead_worker() -> Iterator[None]:
    """Convert the death of a worker to DataError; the pool reports it for every later job too."""
    try:
        yield
    except BrokenProcessPool as error:
        raise DataError(
            "a decoding process died, perhaps out of memory; free memory and continue with --resume"
        ) from error


def _shut_down(pool: ProcessPoolExecutor, home: tempfile.TemporaryDirectory[str]) -> None:
    home.cleanup()  # makes the workers stop at the next image
    pool.shutdown(wait=True, cancel_futures=True)


class LazyImageFolder:
    """Rows of a `Decoder` with the interface of a uint8 array (n, channels, size, size), decoded on access."""

    ndim = 4
    dtype = np.dtype(np.uint8)

    def __init__(self, decoder: Decoder, rows: npt.NDArray[np.int64]):
        self.decoder, self.rows = decoder, rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return (len(self.rows), *self.decoder.shape)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> LazyImageFolder:
        return LazyImageFolder(self.decoder, np.atleast_1d(self.rows[key]))

    def submit(self, rows: npt.NDArray[np.int64]) -> DecodeRequest:
        """Start decoding some of the rows."""
        return self.decoder.submit(self.rows[rows].tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Decode all rows."""
        with self.submit(np.arange(len(self))).wait() as images:
            return np.array(images, dtype=dtype)
