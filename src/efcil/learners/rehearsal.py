"""Base class of learners with exemplars, which train on new images and stored old ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from efcil.accel.backend import Backend
from efcil.errors import ConfigError
from efcil.learners.base import LearnedTask, Learner, TrainingOptions
from efcil.learners.exemplars import Exemplars
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import concat


class RehearsalOptions(TrainingOptions):
    """Training options and the size of the memory."""

    memory: int = Field(default=2000, ge=1)
    """Total number of exemplars, split equally among the classes seen."""
    memory_per_class: int | None = Field(default=None, ge=1)
    """Exemplars per class, instead of `memory`."""


class Rehearsal(Learner):
    """Learner that trains on new images and exemplars and herds new exemplars after each task."""

    options_type: type[RehearsalOptions] = RehearsalOptions

    def __init__(self, options: Any, channels: int, backend: Backend, seed: int, size: int | None = None):
        super().__init__(options, channels, backend, seed, size)
        self.exemplars: Exemplars | None = None

    def quota(self, seen: int) -> int:
        """Return the number of exemplars per class after `seen` classes."""
        of_each: int | None = self.options.memory_per_class
        return int(self.options.memory) // seen if of_each is None else of_each

    def check(self, classes: int) -> None:
        """Reject a memory too small for one exemplar per class."""
        if not self.quota(classes):
            raise ConfigError(
                f"memory={self.options.memory} is less than one exemplar for each of {classes} classes; raise it, "
                "set memory_per_class, or use an exemplar-free method (dpcr)"
            )

    def training_data(self, stage: int, pixels: ImageBatches, labels: Tensor) -> tuple[ImageBatches, Tensor]:
        """Return the new images and the exemplars."""
        exemplars = self.exemplars
        if exemplars is None:
            return pixels, labels
        return pixels.with_images(concat(pixels.images, exemplars.images)), torch.cat([labels, exemplars.labels])

    def after_task(self, task: LearnedTask) -> None:
        """Truncate the exemplars of old classes and herd those of new ones."""
        num_classes = int(task.labels.max()) + 1
        new = Exemplars.select(task.new(), task.pixels(), task.labels, self.quota(num_classes))
        self.exemplars = new if self.exemplars is None else self.exemplars.truncate(self.quota(num_classes)).merge(new)

    def state(self, teacher: bool) -> dict[str, Tensor]:
        """Return the tensors of the networks, and the exemplars."""
        tensors = self.exemplars.state() if self.exemplars is not None else {}
        return super().state(teacher) | {f"exemplars.{k}": v for k, v in tensors.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        super().load_state(state)
        tensors = {k.removeprefix("exemplars."): v for k, v in state.items() if k.startswith("exemplars.")}
        if tensors:
            self.exemplars = Exemplars.from_state(tensors)
