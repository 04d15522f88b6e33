"""Training data of a task, and the state of its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from efcil.data.augment import Transform
from efcil.tasks import Task
from efcil.training.image_batches import ImageBatches


@dataclass(frozen=True)
class TaskData:
    """Task with its images and labels on the device and their augmentation."""

    task: Task
    images: ImageBatches
    labels: Tensor  # (n,) positions in the class order
    transform: Transform | None = None


@dataclass
class TrainState:
    """State of training within a task, which a checkpoint stores besides the learner's state.

    Optimizer tensors are updated in place by training, so copy them before it continues.
    """

    task: int = 0  # current task
    stage: int = 0  # of the task
    epoch: int = 0  # completed epochs of the task, over all stages
    step: int = 0  # completed steps of the next epoch
    loss_sum: Tensor | None = None  # over those steps
    generator_state: Tensor | None = None  # of the loss's generator after those steps
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def has_started(self) -> bool:
        """Whether training of the task has started."""
        return self.epoch > 0 or self.step > 0

    def position(self) -> dict[str, int]:
        """Return the position in training as numbers."""
        return {"task": self.task, "stage": self.stage, "epoch": self.epoch, "step": self.step}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, the input of `from_tensors`."""
        tensors = {f"optimizer.{name}": tensor for name, tensor in self.optimizer.items()}
        if self.step and self.loss_sum is not None:
            tensors["loop.loss_sum"] = self.loss_sum
        if self.step and self.generator_state is not None:
            tensors["loop.generator_state"] = self.generator_state
        return tensors

    @classmethod
    def from_tensors(cls, position: Mapping[str, int], tensors: Mapping[str, Tensor]) -> TrainState:
        """Restore the state from `position` and `tensors`; other tensors are ignored."""
        prefix = "optimizer."
        return cls(
            **position,
            loss_sum=tensors.get("loop.loss_sum"),
            generator_state=tensors.get("loop.generator_state"),
            optimizer={k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)},
        )
