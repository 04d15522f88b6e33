"""Execute several runs, concurrently where one does not fill the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from efcil import accel
from efcil.experiment.interruption import stoppable
from efcil.experiment.run import Run
from efcil.experiment.summaries import Summary
from efcil.training.trainer import TrainingInterrupted

SIGNAL_POLL_S = 0.5  # seconds until a signal is heard at the latest


def execute_all(
    runs: Sequence[Run], resume: bool, concurrent_runs: int, remedy: str = "go on with the same command and --resume"
) -> list[list[Summary]]:
    """Execute runs, several at once in one process where a GPU is not filled by one: a thread and a stream each."""

    def one(run: Run) -> list[Summary]:
        with accel.run_stream(run.execution.device):
            return run.execute(resume)

    for run in runs:
        run.concurrent_runs = max(run.concurrent_runs, min(concurrent_runs, len(runs)))
    with stoppable(runs, remedy, force_on_second=all(run.world.size == 1 for run in runs)):
        if concurrent_runs <= 1:
            return [run.execute(resume) for run in runs]
        return _run_concurrently(one, runs, concurrent_runs)


def _run_concurrently(
    one: Callable[[Run], list[Summary]], runs: Sequence[Run], concurrent_runs: int
) -> list[list[Summary]]:
    """Let each begin when the one before has a part of a task behind it, so that not all come to a task's end at once.

    There the GPU has little to do. And whoever has something for it gets the interpreter soon.
    """

    def in_turn(run: Run, before: Run | None) -> list[Summary]:
        if before is not None:
            before.started.wait()
        try:
            if run.stop.is_set():
                raise TrainingInterrupted
            return one(run)
        finally:
            run.started.set()

    with ThreadPoolExecutor(concurrent_runs) as pool, _switch_interval(0.001):
        futures = [pool.submit(in_turn, *pair) for pair in zip(runs, [None, *runs], strict=False)]
        try:
            going: Collection[Future[list[Summary]]] = futures
            while going:  # a signal that came to another thread is heard when this one wakes
                ended, going = wait(going, SIGNAL_POLL_S, FIRST_COMPLETED)
                for future in ended:
                    future.result()  # raises what it raised
            return [future.result() for future in futures]
        except BaseException:
            for run, future in zip(runs, futures, strict=True):
                run.stop.set()
                future.cancel()
            raise


@contextmanager
def _switch_interval(seconds: float) -> Iterator[None]:
    """Meanwhile a thread that wants to go on waits for another no longer than this."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
