"""Logging of metrics.jsonl to TensorBoard and W&B.

A tracker receives every line, on a resume first the existing ones, so it shows the full run without duplicate steps.
Both packages are optional and imported on demand.
"""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from efcil.errors import ConfigError, nearest
from efcil.files import atomic_write_text, make_directory, remove_file

Event = Mapping[str, Any]


class Tracker(ABC):
    """Tracker of a run's events. A step is an epoch, counted over the run; a task without epochs counts as one."""

    def __init__(self) -> None:
        self.step, self._trained = 0, 0  # _trained: last task with an epoch

    def begin(self, events: Iterable[Event]) -> None:
        """Restart with the events so far."""
        self.step, self._trained = 0, 0
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Log an event: loss and learning rate of an epoch, or A_t of each method after a task."""
        if "epoch" in event:
            self.step, self._trained = self.step + 1, event["task"]
            self.write({"train/loss": event["loss"], "train/lr": event["lr"]})
        elif "A_t" in event:
            if event["task"] != self._trained:
                self.step += 1
            self.write({f"A_t/{method}": value for method, value in event["A_t"].items()})

    @abstractmethod
    def write(self, values: Mapping[str, float]) -> None:
        """Log values at `step`."""

    @abstractmethod
    def close(self) -> None:
        """Flush pending values."""


class TensorBoard(Tracker):
    """Event files in OUT/tensorboard, rewritten when a run is resumed."""

    def __init__(self, out: Path, config: Mapping[str, Any]):
        super().__init__()
        self.directory = out / "tensorboard"
        self._module = _import_optional("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = None

    def begin(self, events: Iterable[Event]) -> None:
        """Replace the event files of an earlier process."""
        make_directory(self.directory.parent, self.directory)
        for file in self.directory.glob("events.out.tfevents.*"):
            remove_file(file, root=self.directory.parent)
        self._writer = self._module.SummaryWriter(str(self.directory), flush_secs=10)
        super().begin(events)

    def write(self, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, self.step)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class WandB(Tracker):
    """W&B run, continued when a run is resumed; respects WANDB_PROJECT and WANDB_MODE."""

    def __init__(self, out: Path, config: Mapping[str, Any]):
        super().__init__()
        self.out, self.about = out, config
        self._module = _import_optional("wandb", "wandb")
        self._run: Any = None
        self._lines, self._logged = 0, 0  # number of lines received, and of lines already logged

    def begin(self, events: Iterable[Event]) -> None:
        """Start a W&B run, or resume the one of this directory."""
        file = self.out / "wandb-id"
        if not file.exists():
            atomic_write_text(file, secrets.token_hex(4))
        self._run = self._module.init(
            project=os.environ.get("WANDB_PROJECT", "efcil"),
            id=file.read_text(encoding="utf-8"),
            name=self.out.name,
            dir=str(self.out),
            config=dict(self.about),
            resume="allow",
            reinit="create_new",  # concurrent class orders are runs of one process
        )
        self._run.define_metric("epoch")
        self._run.define_metric("*", step_metric="epoch")
        self._lines, self._logged = 0, self._run.step
        super().begin(events)

    def write(self, values: Mapping[str, float]) -> None:
        """Log values not logged before; W&B steps must increase, so they are line numbers."""
        if self._lines >= self._logged:
            self._run.log({"epoch": self.step, **values}, step=self._lines)
        self._lines += 1

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()


TRACKERS: dict[str, type[TensorBoard] | type[WandB]] = {"tensorboard": TensorBoard, "wandb": WandB}


def trackers(names: Sequence[str], out: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """Create the trackers with these names, without duplicates; they write nothing before `begin`."""
    created: list[Tracker] = []
    for name in dict.fromkeys(names):
        if name not in TRACKERS:
            raise ConfigError(f"unknown --log {name}: {nearest(name, TRACKERS)}")
        created.append(TRACKERS[name](out, config))
    return created


def _import_optional(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(f"--log {package} is not installed: pip install 'efcil[{package}]'") from None
