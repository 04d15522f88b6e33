"""Execute runs on a Ray cluster (extra `ray`).

A Ray task starts the same process as parallel.py and returns its result. Machines need the same efcil version and the
data sets at the same paths. With a shared output directory, a run that lost its machine is resumed on another one;
otherwise it restarts, and its files except checkpoints are sent back.
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
from efcil.accel.cuda import Cuda
from efcil.errors import ConfigError
from efcil.files import atomic_write_bytes
from efcil.reproduce.job import Job
from efcil.reproduce.parallel import POLL, Process

NOT_RETURNED = ("checkpoints", ".lock")  # not sent back: large or useless elsewhere


@dataclass(frozen=True)
class Resources:
    """Ray resources of an attempt."""

    num_cpus: float
    num_gpus: float


def attempt_resources(nodes: Sequence[Mapping[str, float]], device: str, jobs: int) -> tuple[Resources, Resources]:
    """Return the resources of a shared and of an exclusive attempt, given those of the machines.

    >>> attempt_resources([{"CPU": 16.0, "GPU": 2.0}], "auto", jobs=10)
    (Resources(num_cpus=1, num_gpus=0.33), Resources(num_cpus=1, num_gpus=1))
    >>> attempt_resources([{"CPU": 8.0}, {"CPU": 4.0}], "auto", jobs=6)
    (Resources(num_cpus=2, num_gpus=0), Resources(num_cpus=8, num_gpus=0))
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device}: Ray assigns GPUs; use auto, cpu or cuda")
    have = [node.get("GPU", 0.0) for node in nodes]
    if device == "cuda" and not any(have):
        raise ConfigError("--device cuda: no machine of the Ray cluster has a GPU; use --device cpu")
    if any(have) and device != "cpu":
        per_gpu = Cuda(torch.device("cuda"), cuda_graphs=True).concurrent_runs
        return Resources(1, int(100 / per_gpu) / 100), Resources(1, 1)
    counts = [int(node["CPU"]) for node in nodes if node.get("CPU", 0.0) >= 1]
    if not counts:
        raise ConfigError("--parallel ray: no machine of the Ray cluster has free CPUs")
    return Resources(max(1, min(*counts, sum(counts) // max(1, jobs))), 0), Resources(max(counts), 0)


class RayTasks:
    """Executor that submits attempts as Ray tasks."""

    def __init__(self, address: str, device: str, jobs: int, quiet: bool):
        """Connect to `ray` (the cluster of RAY_ADDRESS or this machine, or a new local one) or ray://HOST:PORT."""
        self._ray = _ray()
        self._own = not self._ray.is_initialized()
        if self._own:
            # Ray client servers reject options of a local Ray.
            given = {"logging_level": logging.WARNING} if address == "ray" else {"address": address}
            try:
                self._ray.init(**given, log_to_driver=not quiet)
            except (ConnectionError, ImportError, RuntimeError, ValueError) as error:
                raise ConfigError(f"--parallel {address}: cannot connect to Ray: {_line(error)}") from None
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self._share, self._exclusive = attempt_resources(nodes, device, jobs)
        self._quiet = quiet

    def start(self, job: Job, number: int, exclusive: bool) -> RayTask:
        """Submit a job; Ray starts it when resources are free."""
        share = self._exclusive if exclusive else self._share
        device, sharing = ("cuda", round(1 / share.num_gpus)) if share.num_gpus else ("cpu", 1)
        job = job.model_copy(update={"device": device, "concurrent_runs": sharing})
        return RayTask(self._ray, job, number, share, self._quiet)

    def close(self) -> None:
        """Disconnect; a local cluster started here is shut down."""
        if self._own:
            self._ray.shutdown()


class RayTask:
    """Attempt in the cluster."""

    def __init__(self, ray: Any, job: Job, number: int, share: Resources, quiet: bool):
        self._ray, self._job, self._stopped = ray, job, False
        job.directory.mkdir(parents=True, exist_ok=True)
        for left in job.directory.glob(".driver-*"):  # left by killed commands
            left.unlink(missing_ok=True)
        self._mark = job.directory / f".driver-{secrets.token_hex(8)}"  # visible to machines that share the directory
        self._mark.touch()
        options = {"num_cpus": share.num_cpus, "num_gpus": share.num_gpus, "max_retries": 0}
        task = ray.remote(**options)(attempt)
        threads = max(1, int(share.num_cpus))
        self._result = task.remote(job.model_dump_json(), number, threads, self._mark.name, __version__, quiet)

    def ended(self) -> str | None:
        """Poll Ray; receive files that the run wrote elsewhere."""
        ready, _ = self._ray.wait([self._result], timeout=0)
        if not ready:
            return None
        self._mark.unlink(missing_ok=True)
        try:
            why, files = self._ray.get(self._result)
        except self._ray.exceptions.RayError as error:  # worker or machine died
            return f"was lost by Ray: {_line(error)}"
        try:
            receive(self._job.directory, files)
        except OSError as error:
            return f"could not receive its files: {error}"
        return str(why)

    def stop(self) -> None:
        """Cancel the task with a KeyboardInterrupt, which stops its process."""
        if not self._stopped:
            self._stopped = True
            self._ray.cancel(self._result, force=False)

    def kill(self) -> None:
        """Kill the worker, which closes the input of its process."""
        self._mark.unlink(missing_ok=True)
        self._ray.cancel(self._result, force=True)


def attempt(text: str, number: int, threads: int, mark: str, version: str, quiet: bool) -> tuple[str, dict[str, bytes]]:
    """Run a job on this machine; return the reason of a failure, and its files if the directory is not shared."""
    if version != __version__:
        return f"cannot run on {platform.node()}: it has efcil {__version__}, this machine {version}", {}
    job = Job.model_validate_json(text)
    try:
        process = Process(job, number, threads, echo=not quiet)
    except OSError as error:
        return f"cannot start on {platform.node()}: {error}", {}
    while True:
        try:
            why = process.ended()
            if why is not None:
                break
            time.sleep(POLL)
        except KeyboardInterrupt:  # canceled
            process.stop()
    why = why and f"{why} (on {platform.node()})"
    return why, {} if (job.directory / mark).exists() else returned_files(job.directory)


def returned_files(place: Path) -> dict[str, bytes]:
    """Return the files of a run directory to send back, by relative path."""
    files = {}
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place)
        if path.is_file() and not any(part in NOT_RETURNED or part.startswith(".driver-") for part in name.parts):
            files[name.as_posix()] = path.read_bytes()
    return files


def receive(place: Path, files: Mapping[str, bytes]) -> None:
    """Write files sent by another machine, only inside the run directory."""
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
    """Return the first and last line of an error; the last one is the cause in a remote process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else type(error).__name__
