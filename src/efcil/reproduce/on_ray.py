"""Runs on the machines of a Ray cluster (extra `ray`).

A task of Ray starts the same process as a grid on one machine (parallel.py) and returns how it ended. Machines need the
same version of efcil and the data sets at the same paths. Where they share the output directory, a run that lost its
machine goes on elsewhere; where they do not, it begins anew, and what it wrote, checkpoints aside, is sent back.
"""

from __future__ import annotations

import logging
import platform
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from efcil import __version__
from efcil.accel.execution import Execution
from efcil.errors import ConfigError
from efcil.files import atomic_write_bytes
from efcil.reproduce.job import Job
from efcil.reproduce.parallel import POLL, Process

NOT_RETURNED = ("checkpoints", ".lock")  # what is not sent back: large, or of no use elsewhere


@dataclass(frozen=True)
class Resources:
    """What an attempt takes of a cluster."""

    num_cpus: float
    num_gpus: float


def attempt_resources(nodes: Sequence[Mapping[str, float]], device: str, jobs: int) -> tuple[Resources, Resources]:
    """Return what an attempt takes, and what one takes that has a device alone, given the resources of the machines.

    >>> attempt_resources([{"CPU": 16.0, "GPU": 2.0}], "auto", jobs=10)
    (Resources(num_cpus=1, num_gpus=0.33), Resources(num_cpus=1, num_gpus=1))
    >>> attempt_resources([{"CPU": 8.0}, {"CPU": 4.0}], "auto", jobs=6)
    (Resources(num_cpus=2, num_gpus=0), Resources(num_cpus=8, num_gpus=0))
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device}: Ray chooses the GPU; give auto, cpu or cuda")
    have = [node.get("GPU", 0.0) for node in nodes]
    if device == "cuda" and not any(have):
        raise ConfigError("--device cuda: no machine of the Ray cluster has a GPU")
    if any(have) and device != "cpu":
        per_gpu = Execution(torch.device("cuda"), cuda_graphs=True).concurrent_runs
        return Resources(1, int(100 / per_gpu) / 100), Resources(1, 1)
    counts = [int(node["CPU"]) for node in nodes if node.get("CPU", 0.0) >= 1]
    if not counts:
        raise ConfigError("--parallel ray: no machine of the Ray cluster has a CPU to spare")
    return Resources(max(1, min(*counts, sum(counts) // max(1, jobs))), 0), Resources(max(counts), 0)


class RayTasks:
    """Attempts as tasks of Ray, which decides where each runs and when."""

    def __init__(self, address: str, device: str, jobs: int, quiet: bool):
        """`address` is `ray` (the cluster of RAY_ADDRESS or of this machine, or a new local one) or ray://HOST:PORT."""
        self._ray = _ray()
        self._own = not self._ray.is_initialized()
        if self._own:
            # A client's server refuses options of a local Ray.
            given = {"logging_level": logging.WARNING} if address == "ray" else {"address": address}
            try:
                self._ray.init(**given, log_to_driver=not quiet)
            except (ConnectionError, ImportError, RuntimeError, ValueError) as error:
                raise ConfigError(f"--parallel {address}: Ray cannot be reached: {_line(error)}") from None
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self._share, self._exclusive = attempt_resources(nodes, device, jobs)
        self._quiet = quiet

    def start(self, job: Job, number: int, exclusive: bool) -> RayTask:
        """Hand it over; Ray starts it when there is room."""
        share = self._exclusive if exclusive else self._share
        device, sharing = ("cuda", round(1 / share.num_gpus)) if share.num_gpus else ("cpu", 1)
        job = job.model_copy(update={"device": device, "concurrent_runs": sharing})
        return RayTask(self._ray, job, number, share, self._quiet)

    def close(self) -> None:
        """Leave the cluster; a local one that was started here ends."""
        if self._own:
            self._ray.shutdown()


class RayTask:
    """An attempt somewhere in the cluster."""

    def __init__(self, ray: Any, job: Job, number: int, share: Resources, quiet: bool):
        self._ray, self._job, self._stopped = ray, job, False
        job.directory.mkdir(parents=True, exist_ok=True)
        for left in job.directory.glob(".driver-*"):  # by a command that was killed
            left.unlink(missing_ok=True)
        self._mark = job.directory / f".driver-{secrets.token_hex(8)}"  # who sees it shares the directory
        self._mark.touch()
        options = {"num_cpus": share.num_cpus, "num_gpus": share.num_gpus, "max_retries": 0}
        task = ray.remote(**options)(attempt)
        threads = max(1, int(share.num_cpus))
        self._result = task.remote(job.model_dump_json(), number, threads, self._mark.name, __version__, quiet)

    def ended(self) -> str | None:
        """Ask Ray; take over what the run wrote elsewhere."""
        ready, _ = self._ray.wait([self._result], timeout=0)
        if not ready:
            return None
        self._mark.unlink(missing_ok=True)
        try:
            why, files = self._ray.get(self._result)
        except self._ray.exceptions.RayError as error:  # the worker or its machine died
            return f"was lost by Ray: {_line(error)}"
        try:
            receive(self._job.directory, files)
        except OSError as error:
            return f"was not taken over: {error}"
        return str(why)

    def stop(self) -> None:
        """Cancel it: a KeyboardInterrupt in the task, which stops its process."""
        if not self._stopped:
            self._stopped = True
            self._ray.cancel(self._result, force=False)

    def kill(self) -> None:
        """End the worker; its process sees its input end."""
        self._mark.unlink(missing_ok=True)
        self._ray.cancel(self._result, force=True)


def attempt(text: str, number: int, threads: int, mark: str, version: str, quiet: bool) -> tuple[str, dict[str, bytes]]:
    """Run a job on this machine of the cluster; return why it failed, if it did, and its files if nobody sees them."""
    if version != __version__:
        return f"cannot run on {platform.node()}: efcil is {__version__} there and {version} here", {}
    job = Job.model_validate_json(text)
    try:
        process = Process(job, number, threads, echo=not quiet)
    except OSError as error:
        return f"cannot be started on {platform.node()}: {error}", {}
    while True:
        try:
            why = process.ended()
            if why is not None:
                break
            time.sleep(POLL)
        except KeyboardInterrupt:  # cancelled
            process.stop()
    why = why and f"{why} (on {platform.node()})"
    return why, {} if (job.directory / mark).exists() else returned_files(job.directory)


def returned_files(place: Path) -> dict[str, bytes]:
    """Return the files of a run directory that are sent back, by their relative paths."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place)
        if path.is_file() and not any(part in NOT_RETURNED or part.startswith(".driver-") for part in name.parts):
            found[name.as_posix()] = path.read_bytes()
    return found


def receive(place: Path, files: Mapping[str, bytes]) -> None:
    """Write files of a run that another machine sent, inside its directory and nowhere else."""
    for name, content in files.items():
        path = place / name
        if not path.resolve().is_relative_to(place.resolve()):
            raise ConfigError(f"a machine of the Ray cluster sent a file outside of the run's directory: {name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, content)


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError:
        raise ConfigError("--parallel ray needs the extra `ray`: pip install 'efcil[ray]'") from None


def _line(error: BaseException) -> str:
    """Return the first and the last line of an error: what, and for errors from another process, why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else type(error).__name__
