"""The directory of a run: its lock, its log."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from efcil.errors import RunError
from efcil.experiment.tracking import Tracker
from efcil.files import atomic_write_text, exclusive_lock


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Hold the run directory; refuse a second process."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = exclusive_lock(directory / ".lock")
    except BlockingIOError:
        raise RunError(f"{directory} is in use by another process; wait for it or choose another --out") from None
    except OSError as error:
        raise RunError(f"--out {directory} cannot be written: {error.strerror}") from None
    with lock:
        yield


@contextmanager
def io_errors(directory: Path) -> Iterator[None]:
    """Tell what the disk did in one line."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or directory} cannot be written: {error.strerror or error}"
        raise RunError(f"{what}; make room or make it writable, then --resume") from error


class MetricsLog:
    """metrics.jsonl: a line an epoch and a line a task; after a kill cut back to where the run goes on.

    Trackers are told every line.
    """

    def __init__(self, path: Path, trackers: Sequence[Tracker] = ()):
        self.path, self.trackers = path, trackers

    def truncate(self, task: int, epoch: int) -> None:
        """Keep `task` whole tasks and `epoch` epochs of the next."""
        kept = []
        there = self.path.exists()
        lines = self.path.read_text(encoding="ascii", errors="replace").split("\n") if there else []
        for line in lines:
            try:
                event = json.loads(line.encode("ascii"))
                where = (int(event["task"]), int(event.get("epoch", 0)))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                continue  # damaged, or being written when the process died
            if where[0] <= task or (where[0] == task + 1 and 0 < where[1] <= epoch):
                kept.append(line + "\n")
        atomic_write_text(self.path, "".join(kept))
        for tracker in self.trackers:
            tracker.begin(map(json.loads, kept))

    def add(self, **event: Any) -> None:
        """Append an event."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")
        for tracker in self.trackers:
            tracker.add(event)

    def close(self) -> None:
        """Let the trackers finish."""
        for tracker in self.trackers:
            tracker.close()


def differences(there: Any, here: Any, prefix: str = "") -> list[str]:
    """Return a line for each value in which two nested mappings differ."""
    if isinstance(there, dict) and isinstance(here, dict):
        found: list[str] = []
        for key in sorted({*there, *here}):
            found += differences(there.get(key, "nothing"), here.get(key, "nothing"), f"{prefix}{key}.")
        return found
    return [] if there == here else [f"{prefix.rstrip('.')} is {there} there and {here} here"]
