"""Many runs at once, each in a process of its own: a failed one is tried again, and blocks none of the others.

`run_all` is the loop; where an attempt runs is the business of an `Executor`: processes here, or Ray (on_ray.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Protocol

import torch

from efcil import accel
from efcil.accel.execution import Execution
from efcil.data.workers import cores
from efcil.errors import ConfigError, RunsFailed, describe_exit
from efcil.experiment.interruption import stoppable
from efcil.experiment.reporters import Reporter
from efcil.reproduce.job import Job

WORKER = (sys.executable, "-m", "efcil.reproduce.worker")
LOG = "process.log"  # in the run's directory: all that its processes said
POLL = 0.1  # seconds between two looks at the processes
PAUSE = 2.0  # seconds before the first retry; each further one waits twice as long
TAIL_BYTES = 4096  # bytes of a log that are searched for its last line


class Attempt(Protocol):
    """A run under way."""

    def ended(self) -> str | None:
        """Return None while it goes on, nothing ("") when it is done, or why it failed."""

    def stop(self) -> None:
        """Let it finish its step and save; may be called again."""

    def kill(self) -> None:
        """End it at once."""


class Executor(Protocol):
    """Where attempts run."""

    def start(self, job: Job, number: int, exclusive: bool) -> Attempt | None:
        """Start an attempt, `exclusive` with a device to itself; None while there is no room."""

    def close(self) -> None:
        """Let go of everything."""


@dataclass
class _PendingAttempt:
    job: Job
    number: int = 1
    ready: float = 0.0  # when it may start, on the monotonic clock


class _Grid:
    """What a signal stops: all runs together."""

    training = True

    def __init__(self, reporter: Reporter):
        self.reporter, self.stop = reporter, threading.Event()


def run_all(jobs: Sequence[Job], executor: Executor, retries: int, reporter: Reporter) -> None:
    """Run all jobs to their end; raise `RunsFailed` at the end if one failed `retries` + 1 times.

    The last attempt of a run has a device to itself, after all others have begun: what fails only for want of memory
    beside its neighbors succeeds then. The first signal stops every run after its step, the second at once.
    """
    grid = _Grid(reporter)
    waiting = [_PendingAttempt(job) for job in jobs]
    running: dict[int, tuple[_PendingAttempt, Attempt]] = {}
    done: list[Job] = []
    failed: list[str] = []

    def over(one: _PendingAttempt, why: str) -> None:
        if grid.stop.is_set() and why:
            return
        if not why:
            done.append(one.job)
            reporter.progress("runs", len(done), len(jobs))
        elif one.number <= retries:
            pause = PAUSE * 2 ** (one.number - 1)
            reporter.note(f"{one.job.title}: {why}; attempt {one.number + 1} of {retries + 1} in {pause:.0f} s")
            waiting.append(_PendingAttempt(one.job, one.number + 1, time.monotonic() + pause))
        else:
            reporter.note(
                f"{one.job.title}: {why}; given up after {one.number} attempts, see {one.job.directory / LOG}"
            )
            failed.append(one.job.title)

    def begin() -> None:
        for one in list(waiting):
            exclusive = one.number > 1 and one.number > retries
            if one.ready > time.monotonic() or (exclusive and any(other.number <= retries for other in waiting)):
                continue
            try:
                attempt = executor.start(one.job, one.number, exclusive)
            except OSError as error:
                waiting.remove(one)
                over(one, f"cannot be started: {error}")
                continue
            if attempt is not None:
                waiting.remove(one)
                running[id(one)] = (one, attempt)

    with stoppable([grid], "go on with the same command"):
        try:
            while waiting or running:
                if grid.stop.is_set():
                    waiting.clear()
                    for _, attempt in running.values():
                        attempt.stop()
                else:
                    begin()
                for key, (one, attempt) in list(running.items()):
                    why = attempt.ended()
                    if why is not None:
                        del running[key]
                        over(one, why)
                time.sleep(POLL)
            if grid.stop.is_set():
                raise KeyboardInterrupt
        finally:
            for _, attempt in running.values():
                attempt.kill()
            executor.close()
    if failed:
        count = f"{len(failed)} of {len(jobs)} runs failed {retries + 1} time{'s' * (retries > 0)}"
        raise RunsFailed(f"{count}: {', '.join(failed)}; the same command tries them again")


# -- processes on this machine -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Room for one process: a GPU by the name that CUDA_VISIBLE_DEVICES knows, or none, and CPU threads."""

    gpu: str | None
    threads: int


def gpus(device: str) -> list[str]:
    """Return the names of the GPUs that --device allows; none for a CPU. No GPU is touched: they are the children's."""
    count = accel.device_count()
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or (kind == "auto" and not count):
        Execution.choose(device)  # refuses what is not there
        return []
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = named[:count] if named else [str(i) for i in range(count)]
    if not names or (index and not (index.isdigit() and int(index) < count)):
        have = ["cpu"] + [f"cuda:{i}" for i in range(count)]
        raise ConfigError(f"--device {device} is not usable here; there is {', '.join(have)}")
    return [names[int(index)]] if index else names


def slots(parallel: str, device: str, jobs: int) -> list[Slot]:
    """Return the room for processes: `parallel` is their number, or auto: as many as a GPU fits, or one per core."""
    found = gpus(device)
    if parallel == "auto":
        per_gpu = Execution(torch.device("cuda"), cuda_graphs=True).concurrent_runs
        count = len(found) * per_gpu if found else cores()
    elif parallel.isdigit() and int(parallel) > 0:
        count = int(parallel)
    else:
        raise ConfigError(f"--parallel {parallel}: must be auto, a number of processes, ray or ray://HOST:PORT")
    count = max(1, min(count, jobs))
    threads = max(1, cores() // count)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(threads, int(limit)) if limit.isdigit() and int(limit) else threads
    return [Slot(found[i % len(found)] if found else None, threads) for i in range(count)]


class Processes:
    """Processes on this machine: one per slot, those of a GPU side by side."""

    def __init__(self, room: Sequence[Slot], quiet: bool):
        self._room, self._quiet = room, quiet
        self._busy: dict[int, tuple[Process, bool]] = {}  # slot -> its process, and whether it has the device alone

    def start(self, job: Job, number: int, exclusive: bool) -> Process | None:
        """Start it on the GPU with the fewest neighbors, if a slot is free."""
        self._busy = {i: (p, a) for i, (p, a) in self._busy.items() if p.ended() is None}
        on: dict[str | None, list[bool]] = {slot.gpu: [] for slot in self._room}
        for i, (_, is_exclusive) in self._busy.items():
            on[self._room[i].gpu].append(is_exclusive)
        free = [
            (len(on[slot.gpu]), i)
            for i, slot in enumerate(self._room)
            if i not in self._busy and not (on[slot.gpu] if exclusive else any(on[slot.gpu]))
        ]
        if not free:
            return None
        _, i = min(free)
        slot = self._room[i]
        job = job.model_copy(update={"concurrent_runs": 1 if exclusive else sum(s.gpu == slot.gpu for s in self._room)})
        process = Process(job, number, slot.threads, slot.gpu, echo=not self._quiet)
        self._busy[i] = (process, exclusive)
        return process

    def close(self) -> None:
        """Nothing is held."""


class Process:
    """An attempt in a process of its own; its input is the line by which it is stopped."""

    def __init__(self, job: Job, number: int, threads: int, gpu: str | None = None, *, echo: bool):
        job.directory.mkdir(parents=True, exist_ok=True)
        self.log = job.directory / LOG
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        with self.log.open("ab") as log:
            log.write(f"--- attempt {number}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n".encode())
            log.flush()
            self._echoed, self._echo = log.tell(), echo
            # A session of its own: Ctrl-C in the terminal is the grid's business, which stops all of them once.
            self.process = subprocess.Popen(  # nosec B603 # this package's own module, no shell; the job is its input
                WORKER,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        with contextlib.suppress(BrokenPipeError):
            self._input.write(job.model_dump_json().encode() + b"\n")
            self._input.flush()

    @property
    def _input(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def ended(self) -> str | None:
        """Say how it ended, and tell what it has said meanwhile."""
        code = self.process.poll()
        self._echo_new_lines()
        if code is None:
            return None
        self.stop()
        return describe_exit(code, _tail(self.log)) if code else ""

    def stop(self) -> None:
        """Close its input."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def kill(self) -> None:
        """End it and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.stop()

    def _echo_new_lines(self) -> None:
        """Print the whole lines that the log has got."""
        if not self._echo:
            return
        with self.log.open("rb") as log:
            log.seek(self._echoed)
            new = log.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._echoed += len(whole)
        if whole:
            print(whole.decode("utf-8", "replace"), end="", flush=True)


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(-min(TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
        return file.read().decode("utf-8", "replace")
    return ""
