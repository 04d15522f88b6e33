"""Update jobs: one at a time, each in a separate process on a copy of the model."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import sys
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from efcil.errors import EfcilError, RunError, describe_exit, printable
from efcil.platform_support import own_group
from efcil.serve.images import public
from efcil.serve.metrics import Metrics
from efcil.serve.store import Conflict, ModelStore
from efcil.serve.uploads import UploadedImages

MAX_JOBS = 100  # number of jobs in the history
NICE = 10  # niceness of training, so that predictions have priority
log = logging.getLogger("efcil.serve")


class JobNotFound(EfcilError):
    """Unknown job."""


class _Cancelled(Exception):
    pass


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Job:
    """Update job with its progress."""

    id: str
    classes: list[str]
    status: str = "queued"  # then running, then done | failed | cancelled
    progress: float = 0.0
    message: str = "preparing"
    started: str = field(default_factory=_now)
    ended: str | None = None

    def __post_init__(self) -> None:
        self.stop = asyncio.Event()  # cancellation requested
        self.swapping = False  # the new model is being installed, too late to cancel
        self.task: asyncio.Task[None] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the public state."""
        names = ("id", "status", "progress", "message", "started", "ended", "classes")
        return {name: getattr(self, name) for name in names}


class Jobs:
    """Starts, tracks and cancels update jobs."""

    def __init__(self, store: ModelStore, metrics: Metrics, threads: int):
        self.store, self.metrics, self.threads = store, metrics, threads
        self._jobs: dict[str, Job] = {}

    @property
    def running(self) -> Job | None:
        """The running job, if any."""
        return next((job for job in self._jobs.values() if job.ended is None), None)

    def list(self) -> list[Job]:
        """Return the job history, newest first."""
        return list(self._jobs.values())[::-1]

    def find(self, name: str) -> Job:
        """Return a job by its id."""
        if name not in self._jobs:
            raise JobNotFound("no such job; GET /jobs lists them")
        return self._jobs[name]

    def start(self, upload: UploadedImages, epochs: int | None, budget: float | None) -> Job:
        """Start an update job; the store must have been claimed and is released when the job ends."""
        job = Job(secrets.token_hex(8), upload.classes)
        self._jobs[job.id] = job
        while len(self._jobs) > MAX_JOBS:
            del self._jobs[next(iter(self._jobs))]
        order = {"labels": upload.labels, "epochs": epochs, "budget": budget, "device": self.store.device}
        job.task = asyncio.create_task(self._run(job, upload, {**order, "threads": self.threads, "nice": NICE}))
        return job

    async def cancel(self, name: str) -> Job:
        """Cancel a job; the model is unchanged."""
        job = self.find(name)
        if job.ended is not None:
            raise Conflict(f"the job has already ended: {job.status}")
        if job.swapping:
            raise Conflict("the new model is being installed; use /undo to restore the previous one")
        job.stop.set()
        await self._wait(job)
        return job

    async def close(self) -> None:
        """Cancel the running job, or let it finish if it is past cancellation."""
        if (job := self.running) is not None:
            if not job.swapping:
                job.stop.set()
            await self._wait(job)

    @staticmethod
    async def _wait(job: Job) -> None:
        if job.task is not None:
            await asyncio.shield(job.task)

    async def _run(self, job: Job, upload: UploadedImages, order: dict[str, Any]) -> None:
        place = self.store.work / job.id
        log.info("job %s: %d pictures of %d classes", job.id, len(upload.labels), len(upload.classes))
        status, message = "failed", "internal error; see the service's log"
        try:
            await asyncio.to_thread(self._prepare, place, upload)
            del upload
            await self._teach(job, {**order, "model": str(place / "model"), "pixels": str(place / "pixels.npy")})
            job.swapping, job.message = True, "installing the new model"
            await asyncio.to_thread(self.store.replace_with, place / "model")
            status, message = "done", f"done; the model is now version {self.store.current.version}"
        except _Cancelled:
            status, message = "cancelled", "cancelled; the model is unchanged"
        except EfcilError as error:
            message = str(error)
        except OSError as error:
            message = f"{error.strerror or error}; the model is unchanged"
        except Exception:
            log.exception("job %s", job.id)
        finally:
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
            self.store.release()
            job.status, job.message, job.ended = (
                status,
                public(message.replace(str(place), "upload"), str(self.store.directory)),
                _now(),
            )
            job.progress = 1.0 if status == "done" else job.progress
            self.metrics.jobs.labels(status).inc()
            log.info("job %s: %s: %s", job.id, status, job.message)

    def _prepare(self, place: Path, upload: UploadedImages) -> None:
        place.mkdir()
        upload.save(place / "pixels.npy")
        self.store.copy(place / "model")

    async def _teach(self, job: Job, order: dict[str, Any]) -> None:
        """Run the process to its end; raise an error unless it succeeded."""
        pipe = asyncio.subprocess.PIPE
        # In a new session, so that Ctrl-C reaches only the service.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "efcil.serve.worker"), stdin=pipe, stdout=pipe, stderr=pipe, **own_group()
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        stopper = asyncio.create_task(_kill_on(job.stop, process))
        errors = asyncio.create_task(_tail(process.stderr))
        reason = None
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            job.status, job.message = "running", "starting"
            async for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "progress":
                    job.progress, job.message = max(job.progress, event["share"]), public(event["message"])
                elif event["event"] == "failed":
                    reason = event["reason"]
            code = await process.wait()
        finally:
            stopper.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()
            output = await errors
            process.stdin.close()
        if job.stop.is_set():
            raise _Cancelled
        if code:
            if reason is None:
                log.error("job %s: process output:\n%s", job.id, "\n".join(map(printable, output.splitlines())))
            raise RunError(reason or _why(code, output))


async def _kill_on(stop: asyncio.Event, process: asyncio.subprocess.Process) -> None:
    await stop.wait()
    if process.returncode is None:
        process.kill()  # it works on a copy, so no cleanup is needed


async def _tail(stream: asyncio.StreamReader) -> str:
    """Read a stream to its end and return its tail."""
    last: deque[bytes] = deque(maxlen=8)
    while chunk := await stream.read(1024):
        last.append(chunk)
    return b"".join(last).decode("utf-8", "replace").strip()


def _why(code: int, output: str) -> str:
    """Describe the exit of a process that reported no reason."""
    return f"the update process {describe_exit(code, output)}" + ("; the model is unchanged" if code < 0 else "")
