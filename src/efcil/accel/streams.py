"""CUDA streams by purpose, one of each per thread, and the lock for graph captures."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

STREAM_PRIORITY = {  # streams by purpose: on the GPU that of the lower number goes first; 0 where none is given
    "run": -3,  # the end of a task, for which its run waits: little work
    "capture": -2,  # a step: the next one waits for it
    "branch": -1,  # what is computed beside a step
}


class SharedExclusiveLock:
    """A lock that many threads share or one holds exclusively; a holder may enter it again as shared."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._shared_count, self._exclusive_thread = 0, 0  # holders that share it; the thread that holds it exclusively

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Enter unless another thread holds the lock exclusively."""
        with self._condition:
            self._condition.wait_for(lambda: self._exclusive_thread in (0, threading.get_ident()))
            self._shared_count += 1
        try:
            yield
        finally:
            with self._condition:
                self._shared_count -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Enter when no thread holds the lock."""
        with self._condition:
            self._condition.wait_for(lambda: not self._exclusive_thread and not self._shared_count)
            self._exclusive_thread = threading.get_ident()
        try:
            yield
        finally:
            with self._condition:
                self._exclusive_thread = 0
                self._condition.notify_all()


_local = threading.local()


def _thread_streams() -> dict[tuple[torch.device, str], torch.cuda.Stream]:
    """Return the streams of this thread, or of the thread on whose behalf it works."""
    found: dict[tuple[torch.device, str], torch.cuda.Stream] = _local.__dict__.setdefault("streams", {})
    return found


def thread_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return this thread's stream for a purpose, always the same one.

    torch hands out 32 streams in turn, so new ones each time would end up on one that another thread captures.
    """
    streams = _thread_streams()
    if (device, purpose) not in streams:
        streams[device, purpose] = torch.cuda.Stream(device, STREAM_PRIORITY.get(purpose, 0))
    return streams[device, purpose]
