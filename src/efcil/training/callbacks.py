"""What follows training: progress, logs, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from efcil.training.state import TrainState


@dataclass(frozen=True)
class EpochReport:
    """Summary of an epoch for progress and logs."""

    task: int
    epoch: int  # 0 is the first of the task
    epochs: int  # of the task, all stages together
    loss: float
    lr: float


class Callback:
    """Follows a run; a subclass overrides the events that concern it.

    A callback must not change what it is given. With several processes every process calls its own.
    """

    def on_step_end(self, state: TrainState, steps: int) -> None:
        """A step of an epoch of `steps` is done."""

    def on_epoch_end(self, report: EpochReport, state: TrainState) -> None:
        """An epoch is done and its loss is finite."""

    def on_interrupt(self, state: TrainState) -> None:
        """Training ends after this step, and is to go on from here."""

    def on_training_end(self, task: int) -> None:
        """The backbone has learned a task; statistics are shifted and classifiers fitted now."""

    def on_features(self, features: Any) -> None:
        """The classifiers are fitted to a task's `efcil.features.TaskFeatures`; its images can still be read."""

    def on_task_end(self, task: int) -> None:
        """A task is learned and measured."""
