"""Decoding of uploaded pictures in processes with limits: one that takes long or much memory delays no other one.

Pictures wait in lanes by how long they take, estimated from their heads. Quick ones come first; those that take long
have a process of their own, which leaves the processor to the others.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from efcil.data.decoding_cost import decoding_seconds
from efcil.data.preprocessing import Preprocessing
from efcil.errors import DataError
from efcil.platform_support import own_group
from efcil.process_limits import has_process_limits, resident_memory
from efcil.serve.decoder import ANSWER
from efcil.serve.images import ImageArray
from efcil.serve.limits import Limits

QUICK, MEDIUM, SLOW = LANES = range(3)
_UP_TO = (0.03, 0.3)  # estimated seconds of the first two lanes
_SECONDS = 2  # of one core that a picture of the first two lanes may take, whatever was estimated
_PATIENCE = 3  # how much longer it may take on a busy machine
_WATCH = 0.1  # seconds between looks at processes
_NICE = 10  # of the process for the slow lane
_START = 60  # seconds that the start of a process may take


def lane_of(data: bytes) -> int:
    """Return the lane for an image file.

    >>> lane_of(b"GIF89a") == SLOW
    True
    """
    return sum(decoding_seconds(data) > most for most in _UP_TO)


@dataclass(frozen=True)
class _Picture:
    read: Callable[[], bytes]
    preprocessing: Preprocessing
    lane: int
    pixels: Future[ImageArray]


class Decoders:
    """Decoding processes, `quick` of them for the first two lanes and one for the slow lane."""

    def __init__(self, limits: Limits, quick: int):
        self._limits = limits
        self._lanes: tuple[deque[_Picture], ...] = tuple(deque() for _ in LANES)
        lock = threading.Lock()
        self._changed, self._changed_slow = threading.Condition(lock), threading.Condition(lock)
        self._closed = threading.Event()
        own = [_Process(limits, 0) for _ in range(quick)]
        self._processes = [*own, _Process(limits, _NICE)]
        self._threads = [
            *(threading.Thread(target=self._work, args=(one, (QUICK, MEDIUM)), daemon=True) for one in own),
            threading.Thread(target=self._work, args=(self._processes[-1], (SLOW,)), daemon=True),
            threading.Thread(target=self._watch, daemon=True),
        ]

    def start(self) -> None:
        """Start the processes."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the processes; what is still waiting is cancelled."""
        with self._changed:
            self._closed.set()
            for lane in self._lanes:
                while lane:
                    lane.popleft().pixels.cancel()
            self._changed.notify_all()
            self._changed_slow.notify_all()
        for process in self._processes:
            process.kill("the service is stopping")
        for thread in self._threads:
            thread.join()

    def submit(self, read: Callable[[], bytes], size: int | Preprocessing, lane: int) -> Future[ImageArray]:
        """Decode what `read` returns; the future raises DataError for an unreadable picture."""
        picture = _Picture(read, Preprocessing.of(size), lane, Future())
        with self._changed:
            if self._closed.is_set():
                picture.pixels.cancel()
            else:
                self._lanes[lane].append(picture)
                (self._changed_slow if lane == SLOW else self._changed).notify()
        return picture.pixels

    def decode(self, data: bytes, size: int | Preprocessing) -> ImageArray:
        """Decode a picture after the quick ones of others, and wait for it."""
        return self.submit(lambda: data, size, max(MEDIUM, lane_of(data))).result()

    @property
    def resident_memory(self) -> int:
        """Bytes of memory of all processes."""
        return sum(process.resident_memory for process in self._processes)

    def _next(self, lanes: tuple[int, ...]) -> _Picture | None:
        """Wait for a picture of the first lane that has one; None at the end."""
        with self._changed:
            while not self._closed.is_set():
                for lane in lanes:
                    while self._lanes[lane]:
                        picture = self._lanes[lane].popleft()
                        if picture.pixels.set_running_or_notify_cancel():  # else its client has gone
                            return picture
                (self._changed_slow if lanes == (SLOW,) else self._changed).wait()
        return None

    def _work(self, process: _Process, lanes: tuple[int, ...]) -> None:
        with contextlib.suppress(OSError, DataError):  # tried again for the first picture
            process.start()
        while (picture := self._next(lanes)) is not None:
            seconds = min(_SECONDS, self._limits.decode_seconds) if picture.lane < SLOW else self._limits.decode_seconds
            try:
                picture.pixels.set_result(process.decode(picture.read(), picture.preprocessing, seconds))
            except Exception as error:  # returned to the request; the thread must survive
                picture.pixels.set_exception(error)
        process.close()

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH):
            for process in self._processes:
                process.watch()


@lru_cache(16)
def _order(seconds: int, max_pixels: int, preprocessing: Preprocessing) -> str:
    """Return all of an order but the length of the file."""
    return json.dumps({"seconds": seconds, "max_pixels": max_pixels, "preprocessing": preprocessing.to_dict()})


class _Process:
    """A decoding process, started again when it has ended."""

    def __init__(self, limits: Limits, nice: int):
        self._limits, self._nice = limits, nice
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # between who uses it and who kills it
        self._deadline: float | None = None
        self._most = 0  # bytes of memory
        self._why: str | None = None

    def start(self) -> None:
        """Start the process and wait until it is ready: its start counts for no picture."""
        memory = self._limits.decode_memory
        command = [sys.executable, "-m", "efcil.serve.decoder", str(self._nice), str(memory)]
        process = subprocess.Popen(  # nosec B603 # a module of this package; libtiff would fill the log with warnings
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **own_group()
        )
        assert process.stdout is not None
        with self._lock:
            self._process, self._why = process, None
        self._most = sys.maxsize
        self._deadline = time.monotonic() + _START
        try:
            ready = process.stdout.read(ANSWER.size)
        finally:
            self._deadline = None
        if len(ready) < ANSWER.size:
            raise DataError(self._end(process))
        self._most = (resident_memory(process.pid) or 0) + memory

    def kill(self, why: str) -> None:
        """End it immediately; whoever waits for a picture gets the reason."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._why = why
                self._process.kill()

    def close(self) -> None:
        """End it and close its pipes."""
        if self._process is not None:
            self._end(self._process)

    def watch(self) -> None:
        """Kill the process if it takes too long, or too much memory where the system has no limit."""
        deadline = self._deadline
        if deadline is None:
            return
        if time.monotonic() > deadline:
            self.kill(_TOO_LONG)
        elif not has_process_limits() and self.resident_memory > self._most:
            self.kill(_TOO_MUCH)

    @property
    def resident_memory(self) -> int:
        """Bytes of memory of the process."""
        process = self._process
        return 0 if process is None or process.poll() is not None else resident_memory(process.pid) or 0

    def decode(self, data: bytes, preprocessing: Preprocessing, seconds: int) -> ImageArray:
        """Decode one picture; raise DataError if it is unreadable or takes more than it may."""
        if self._process is not None and self._process.poll() is not None:
            self._end(self._process)
        if self._process is None:
            self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        order = f"{len(data)} {_order(seconds, self._limits.pixels, preprocessing)}\n"
        self._deadline = time.monotonic() + _PATIENCE * seconds
        try:
            process.stdin.write(order.encode())
            process.stdin.write(data)
            process.stdin.flush()
            head = process.stdout.read(ANSWER.size)
            done, length = ANSWER.unpack(head) if len(head) == ANSWER.size else (False, 0)
            answer = process.stdout.read(length)
            if not length or len(answer) < length:
                raise OSError("the process has ended")
        except OSError:
            raise DataError(self._end(process)) from None
        finally:
            self._deadline = None
        if not done:
            raise DataError(answer.decode("utf-8", "replace"))
        return np.frombuffer(answer, np.uint8).reshape(3, preprocessing.size, preprocessing.size)

    def _end(self, process: subprocess.Popen[bytes]) -> str:
        """Return why the process has ended."""
        process.kill()
        code = process.wait()
        self._process = None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._why is not None:
            return self._why
        return _TOO_LONG if code == -getattr(signal, "SIGXCPU", 0) else "it could not be decoded: the decoder failed"


_TOO_LONG = "it takes too long to decode; save it again as a plain JPEG or PNG"
_TOO_MUCH = "it takes too much memory to decode; make it smaller"
