"""Run a grid of experiments in parallel processes; failed runs are retried without blocking others.

`run_all` is the scheduling loop; an `Executor` starts attempts as local processes or on Ray (on_ray.py).
"""

from __future__ import annotations

import contextlib
import os
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
from efcil.accel.backend import Backend
from efcil.accel.cuda import Cuda
from efcil.errors import ConfigError, RunsFailed, describe_exit
from efcil.experiment.interruption import stoppable
from efcil.experiment.reporters import Reporter
from efcil.platform_support import cores, kill_group, own_group
from efcil.reproduce.job import Job

WORKER = (sys.executable, "-m", "efcil.reproduce.worker")
LOG = "process.log"  # output of all attempts, in the run directory
POLL = 0.1  # polling interval in seconds
PAUSE = 2.0  # seconds before the first retry, doubled for each further one
TAIL_BYTES = 4096  # bytes to search for the last line of a log


class Attempt(Protocol):
    """Running attempt."""

    def ended(self) -> str | None:
        """Return None while running, "" on success, or the reason of failure."""

    def stop(self) -> None:
        """Request to finish the step and save; may be called repeatedly."""

    def kill(self) -> None:
        """Kill it."""


class Executor(Protocol):
    """Starts attempts."""

    def start(self, job: Job, number: int, exclusive: bool) -> Attempt | None:
        """Start an attempt, with its own device if `exclusive`; return None if all slots are busy."""

    def close(self) -> None:
        """Release all resources."""


@dataclass
class _PendingAttempt:
    job: Job
    number: int = 1
    ready: float = 0.0  # earliest start on the monotonic clock


class _Grid:
    """All running attempts, stopped together by a signal."""

    training = True

    def __init__(self, reporter: Reporter):
        self.reporter, self.stop = reporter, threading.Event()


def run_all(jobs: Sequence[Job], executor: Executor, retries: int, reporter: Reporter) -> None:
    """Run all jobs; finally raise `RunsFailed` if one failed `retries` + 1 times.

    The last attempt of a run is exclusive, after all others have started, in case only shared memory was insufficient.
    The first signal stops every run after its step, the second kills them.
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
            reporter.note(f"{one.job.title}: {why}; failed {one.number} times, see {one.job.directory / LOG}")
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
                over(one, f"cannot start: {error}")
                continue
            if attempt is not None:
                waiting.remove(one)
                running[id(one)] = (one, attempt)

    with stoppable([grid], "resume with the same command"):
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
        raise RunsFailed(f"{count}: {', '.join(failed)}; run the same command to retry")


# -- processes on this machine -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Slot for one process: a GPU as in CUDA_VISIBLE_DEVICES, or None, and CPU threads."""

    gpu: str | None
    threads: int


def gpus(device: str) -> list[str]:
    """Return the GPUs that --device allows, empty for a CPU, without initializing CUDA in this process."""
    count = accel.device_count()
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cuda") or (kind == "auto" and not count):
        Backend.choose(device)  # raises ConfigError if not available
        return []
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = named[:count] if named else [str(i) for i in range(count)]
    if not names or (index and not (index.isdigit() and int(index) < count)):
        have = ["cpu"] + [f"cuda:{i}" for i in range(count)]
        raise ConfigError(f"--device {device} is not available; use {', '.join(have)}")
    return [names[int(index)]] if index else names


def slots(parallel: str, device: str, jobs: int) -> list[Slot]:
    """Return the slots: `parallel` is their number or auto, as many as fit a GPU or one per core."""
    devices = gpus(device)
    if parallel == "auto":
        per_gpu = Cuda(torch.device("cuda"), cuda_graphs=True).concurrent_runs
        count = len(devices) * per_gpu if devices else cores()
    elif parallel.isdigit() and int(parallel) > 0:
        count = int(parallel)
    else:
        raise ConfigError(f"--parallel {parallel}: wanted auto, a number of processes, ray or ray://HOST:PORT")
    count = max(1, min(count, jobs))
    threads = max(1, cores() // count)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(threads, int(limit)) if limit.isdigit() and int(limit) else threads
    return [Slot(devices[i % len(devices)] if devices else None, threads) for i in range(count)]


class Processes:
    """Executor with local processes, one per slot."""

    def __init__(self, room: Sequence[Slot], quiet: bool):
        self._room, self._quiet = room, quiet
        self._busy: dict[int, tuple[Process, bool]] = {}  # slot -> (process, exclusive)

    def start(self, job: Job, number: int, exclusive: bool) -> Process | None:
        """Start an attempt on the least loaded GPU, if a slot is free."""
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
        """Do nothing."""


class Process:
    """Attempt in a separate process, which stops when its input is closed."""

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
            # In a new session, so that Ctrl-C reaches only the grid, which stops all attempts.
            self.process = subprocess.Popen(  # nosec B603 # a module of this package, no shell, job on stdin
                WORKER,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                **own_group(),
            )
        with contextlib.suppress(BrokenPipeError):
            self._input.write(job.model_dump_json().encode() + b"\n")
            self._input.flush()

    @property
    def _input(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def ended(self) -> str | None:
        """Echo new output and return the status."""
        code = self.process.poll()
        self._echo_new_lines()
        if code is None:
            return None
        self.stop()
        return describe_exit(code, _tail(self.log)) if code else ""

    def stop(self) -> None:
        """Close the input of the process."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def kill(self) -> None:
        """Kill the process and its children."""
        kill_group(self.process)
        self.stop()

    def _echo_new_lines(self) -> None:
        """Print new complete lines of the log."""
        if not self._echo:
            return
        with self.log.open("rb") as log:
            log.seek(self._echoed)
            new = log.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._echoed += len(complete)
        if complete:
            print(complete.decode("utf-8", "replace"), end="", flush=True)


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(-min(TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
        return file.read().decode("utf-8", "replace")
    return ""
