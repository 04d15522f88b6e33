"""What a task is trained on, and where its training stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from efcil.data.augment import Transform
from efcil.tasks import Task
from efcil.training.image_batches import ImageBatches


@dataclass(frozen=True)
class TaskData:
    """A task, its images and labels on the device, and their augmentation while training."""

    task: Task
    images: ImageBatches
    labels: Tensor  # (n,) positions in the class order
    transform: Transform | None = None


@dataclass
class TrainState:
    """Where training stands: all that a checkpoint in the middle of a task holds beside the learner's own state.

    The optimizer's tensors are those that training updates; copy them before training goes on.
    """

    task: int = 0  # the one in training
    stage: int = 0  # of the task
    epoch: int = 0  # epochs of the task that are done, all stages together
    step: int = 0  # steps of the next epoch that are done
    loss_sum: Tensor | None = None  # of those steps
    generator_state: Tensor | None = None  # of the loss's random source after those steps
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def has_started(self) -> bool:
        """Whether training of the task has begun."""
        return self.epoch > 0 or self.step > 0

    def position(self) -> dict[str, int]:
        """Return the numbers that say where training stands."""
        return {"task": self.task, "stage": self.stage, "epoch": self.epoch, "step": self.step}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors, by name; `from_tensors` reads them."""
        tensors = {f"optimizer.{name}": tensor for name, tensor in self.optimizer.items()}
        if self.step and self.loss_sum is not None:
            tensors["loop.loss_sum"] = self.loss_sum
        if self.step and self.generator_state is not None:
            tensors["loop.generator_state"] = self.generator_state
        return tensors

    @classmethod
    def from_tensors(cls, position: Mapping[str, int], tensors: Mapping[str, Tensor]) -> TrainState:
        """Return the state that `position` and `tensors` describe; other tensors are ignored."""
        prefix = "optimizer."
        return cls(
            **position,
            loss_sum=tensors.get("loop.loss_sum"),
            generator_state=tensors.get("loop.generator_state"),
            optimizer={k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)},
        )
