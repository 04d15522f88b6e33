"""CUDA streams by purpose, one of each per thread, and the lock that keeps captures apart."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

GOES_FIRST = {  # streams by purpose: on the GPU that of the lower number goes first; 0 where none is given
    "run": -3,  # the end of a task, for which its run waits: little work
    "capture": -2,  # a step: the next one waits for it
    "branch": -1,  # what is computed beside a step
}


class Gate:
    """Either any number of threads are inside together, or one is alone; who is inside may come in again together."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside, self._alone = 0, 0  # how many are together; the thread that is alone

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Come in when nobody else is alone."""
        with self._changed:
            self._changed.wait_for(lambda: self._alone in (0, threading.get_ident()))
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Come in when nobody is inside."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._inside)
            self._alone = threading.get_ident()
        try:
            yield
        finally:
            with self._changed:
                self._alone = 0
                self._changed.notify_all()


_streams = threading.local()


def _own_streams() -> dict[tuple[torch.device, str], torch.cuda.Stream]:
    """Return the streams of this thread, or of the one that it works for."""
    found: dict[tuple[torch.device, str], torch.cuda.Stream] = _streams.__dict__.setdefault("known", {})
    return found


def own_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return this thread's stream for a purpose, always the same one.

    torch hands out 32 streams in turn: who makes new ones all the time ends up on one that another thread captures.
    """
    streams = _own_streams()
    if (device, purpose) not in streams:
        streams[device, purpose] = torch.cuda.Stream(device, GOES_FIRST.get(purpose, 0))
    return streams[device, purpose]
