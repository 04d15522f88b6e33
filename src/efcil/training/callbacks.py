"""Training callbacks: progress, logs, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from efcil.training.state import TrainState


@dataclass(frozen=True)
class EpochReport:
    """Summary of an epoch for progress and logs."""

    task: int
    epoch: int  # within the task, from 0
    epochs: int  # of the task, over all stages
    loss: float
    lr: float


class Callback:
    """Base class of callbacks; subclasses override the events that they need.

    A callback must not modify its arguments. In distributed training every process calls its own callbacks.
    """

    def on_step_end(self, state: TrainState, steps: int) -> None:
        """Called after each step of an epoch of `steps`."""

    def on_epoch_end(self, report: EpochReport, state: TrainState) -> None:
        """Called after each epoch with a finite loss."""

    def on_interrupt(self, state: TrainState) -> None:
        """Called when training is interrupted after a step, to be resumed from here."""

    def on_training_end(self, task: int) -> None:
        """Called when the backbone is trained on a task, before statistics are shifted and classifiers fitted."""

    def on_features(self, features: Any) -> None:
        """Called with a task's `efcil.features.TaskFeatures`, whose images are still accessible."""

    def on_task_end(self, task: int) -> None:
        """Called after a task is learned and evaluated."""
