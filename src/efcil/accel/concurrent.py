"""Run several jobs concurrently in one process, where one does not fill a GPU: a thread and a stream each."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from efcil.accel.device import run_stream

R = TypeVar("R")
SIGNAL_POLL_S = 0.5  # seconds until a signal is handled at the latest
SWITCH_INTERVAL_S = 0.001  # seconds that a thread which has something for the GPU waits for another at most


@dataclass(frozen=True)
class Job(Generic[R]):
    """Something to compute on a device, and the events that it shares with the other jobs."""

    call: Callable[[], R]
    device: torch.device
    started: threading.Event = field(default_factory=threading.Event)  # set by the job: the next may begin
    stop: threading.Event = field(default_factory=threading.Event)  # set where another failed: end soon


def run_concurrently(jobs: Sequence[Job[R]], limit: int) -> list[R]:
    """Run jobs, up to `limit` at once, and return what they return; the first error stops the others and is raised.

    Each begins when the one before has set `started` or has ended, so that not all come to a task's end at once: there
    the GPU has little to do. And whoever has something for it gets the interpreter soon. A job looks at `stop` itself.
    """
    with ThreadPoolExecutor(limit) as pool, _switch_interval(SWITCH_INTERVAL_S):
        futures = [pool.submit(_in_turn, job, before) for job, before in zip(jobs, [None, *jobs], strict=False)]
        try:
            going: Collection[Future[R]] = futures
            while going:  # a signal that came to another thread is handled when this one wakes
                ended, going = wait(going, SIGNAL_POLL_S, FIRST_COMPLETED)
                for future in ended:
                    future.result()  # raises what it raised
            return [future.result() for future in futures]
        except BaseException:
            for job, future in zip(jobs, futures, strict=True):
                job.stop.set()
                future.cancel()
            raise


def _in_turn(job: Job[R], before: Job[R] | None) -> R:
    if before is not None:
        before.started.wait()
    try:
        with run_stream(job.device):
            return job.call()
    finally:
        job.started.set()


@contextmanager
def _switch_interval(seconds: float) -> Iterator[None]:
    """Meanwhile, limit how long a thread waits for another."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
