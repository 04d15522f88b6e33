"""The one training loop: every learner trains through `Trainer.fit`.

Randomness of an epoch is a function of (seed, task, epoch), so that a run resumed from a checkpoint sees the batches of
one that was never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from efcil.accel.backend import Backend
from efcil.data.augment import Transform
from efcil.errors import ConfigError, TrainingError
from efcil.randomness import RngStream, derive_seed, generator
from efcil.tasks import Task
from efcil.training.batch import Batch, FrozenForward
from efcil.training.callbacks import Callback, EpochReport
from efcil.training.distributed import running_statistics
from efcil.training.image_batches import ImageBatches
from efcil.training.loader import StoredBatch, batch_slices, epoch_batches, padded_count, several_epochs
from efcil.training.memory import memory_guard
from efcil.training.schedule import Schedule
from efcil.training.state import TaskData, TrainState
from efcil.training.step import Optimizer, Step


class TrainingInterrupted(KeyboardInterrupt):
    """Training was interrupted after a step, and the callbacks have seen its state."""


class Trainable(Protocol):
    """What the trainer asks of a learner (`efcil.learners.base.Learner`), which is an `nn.Module` as well."""

    options: Any
    backend: Backend
    seed: int
    views: int
    num_old_classes: int
    loss_generator: torch.Generator

    def before_task(self, task: Task) -> None:
        """Prepare for a task."""

    def stages(self, task: int) -> tuple[Schedule, ...]:
        """Return the schedule of each training stage."""
        ...

    def training_data(self, stage: int, pixels: ImageBatches, labels: Tensor) -> tuple[ImageBatches, Tensor]:
        """Return the training images and labels of a stage."""
        ...

    def frozen_forward(self) -> FrozenForward | None:
        """Return the frozen network whose outputs the loss needs."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        ...


class Trainer:
    """Trains a learner on one task after another.

    `stop` is asked after each step; when it returns True, the callbacks get the state with `on_interrupt`, and
    `TrainingInterrupted` is raised. `fit` with that state finishes the task as if nothing had happened.
    """

    def __init__(
        self, learner: Trainable, callbacks: Sequence[Callback] = (), stop: Callable[[], bool] = lambda: False
    ):
        self.learner, self.callbacks, self.stop = learner, callbacks, stop

    def fit(self, data: TaskData, state: TrainState | None = None) -> None:
        """Train on all stages of a task, from where `state` stands; it follows the training."""
        learner, task = self.learner, data.task
        state = TrainState(task.index) if state is None else state
        check_views(learner, data.transform)
        stages = learner.stages(task.index)
        if stages and not state.has_started:
            learner.before_task(task)
        learner.num_old_classes = task.first_class
        epochs, end = sum(schedule.epochs for schedule in stages), 0
        for stage, schedule in enumerate(stages):
            begin, end = end, end + schedule.epochs
            if (state.epoch, state.step) == (begin, 0):
                state.optimizer = {}
            if state.epoch < end:
                state.stage = stage
                _Stage(self, data, schedule, begin, state).fit(epochs)


class _Stage:
    """One training stage of a task: its data, its optimizer, its step."""

    def __init__(self, trainer: Trainer, data: TaskData, schedule: Schedule, begin: int, state: TrainState):
        """`begin` is the number of the stage's first epoch among those of the task."""
        self.trainer, self.learner, self.schedule, self.state = trainer, trainer.learner, schedule, state
        self.begin, self.end = begin, begin + schedule.epochs
        learner, module = trainer.learner, cast(nn.Module, trainer.learner)
        self.backend, self.module = learner.backend, module
        with self.backend.prevent_capture():
            images, labels = learner.training_data(state.stage, data.images, data.labels)
        self.optimizer = Optimizer(module, schedule, self.backend, learner.options.optimizer, learner.options.momentum)
        if state.optimizer:
            self.optimizer.load_state_dict(dict(state.optimizer))
        state.optimizer = self.optimizer.state_dict()
        self.backend.world.broadcast_([*module.state_dict().values(), *state.optimizer.values()])
        module.train()
        self.frozen = learner.frozen_forward()
        self.eager = Step(
            learner.loss, self.optimizer, images, self.backend, running_statistics(module), self.frozen, learner.views
        )
        self.eager.before_update = getattr(module, "before_update", None)
        self.step = self.backend.step(self.eager, module, learner.loss_generator)
        batch_size, last_batch = learner.options.batch_size, learner.options.last_batch
        self.epoch_data = (images.images, labels, data.transform, batch_size, last_batch)
        count = padded_count(len(labels), batch_size, last_batch)
        self.slices = list(batch_slices(count, min(batch_size, len(labels)), last_batch))
        self.loader = self.backend.loader(self._load_epoch, self._load_epochs, images, self.end, self.frozen)

    # --- batches ------------------------------------------------------------------------------------------------------

    def _generator(self, epoch: int) -> torch.Generator:
        return generator(self.backend.device, RngStream.EPOCH, self.learner.seed, self.state.task, epoch)

    def _load_epoch(self, epoch: int) -> Iterable[StoredBatch]:
        return epoch_batches(*self.epoch_data, self._generator(epoch), self.backend.world, self.learner.views)

    def _load_epochs(self, epochs: range) -> Sequence[Sequence[StoredBatch]]:
        generators = [self._generator(epoch) for epoch in epochs]
        return several_epochs(*self.epoch_data, generators, self.backend.world, self.learner.views)

    # --- training -----------------------------------------------------------------------------------------------------

    def fit(self, epochs: int) -> None:
        """Train the epochs of this stage that are left; the task has `epochs` in all."""
        state = self.state
        updating = self.backend.optimizer_in_backward(self.module, self.optimizer)
        with memory_guard(f"training task {state.task + 1}"), updating:
            while state.epoch < self.end:
                lr = self.schedule.lr_at(state.epoch - self.begin)
                self.optimizer.lr.fill_(lr)
                loss = self._fit_epoch()
                if not loss < float("inf"):
                    raise TrainingError(
                        f"the loss is {loss} in task {state.task + 1}, epoch {state.epoch + 1} (learning rate {lr:g}): "
                        "the last good checkpoint is kept; lower the rate (--set first.lr=... or later.lr=...) in a "
                        "new --out"
                    )
                report = EpochReport(state.task, state.epoch, epochs, loss, lr)
                state.epoch, state.step = state.epoch + 1, 0
                for callback in self.trainer.callbacks:
                    callback.on_epoch_end(report, state)

    def _fit_epoch(self) -> float:
        """Train what is left of an epoch; return its mean loss."""
        state, world, eager = self.state, self.backend.world, self.eager
        loss_generator, done = self.learner.loss_generator, state.step
        loss_generator.manual_seed(derive_seed(RngStream.NOISE, self.learner.seed, state.task, state.epoch))
        if done:
            if world.is_main and state.loss_sum is not None:  # the sum over all processes
                eager.loss_sum.copy_(state.loss_sum)
            if state.generator_state is not None:
                loss_generator.set_state(state.generator_state.cpu())
        for number, (rows, batch) in enumerate(zip(self.slices, self.loader.get(state.epoch), strict=True)):
            if number < done:
                continue
            eager.weight = world.begin_batch(rows.stop - rows.start)
            self.step(*batch)
            state.step = number + 1
            for callback in self.trainer.callbacks:
                callback.on_step_end(state, len(self.slices))
            if world.any(self.trainer.stop()):
                self._interrupt()
        self.loader.prefetch(state.epoch + 1)
        mean = world.all_reduce_(eager.loss_sum).item() / len(self.slices)
        eager.loss_sum.zero_()
        return mean

    def _interrupt(self) -> None:
        """Give the callbacks the state in the middle of an epoch, and end."""
        state, world = self.state, self.backend.world
        state.generator_state = self.learner.loss_generator.get_state()
        state.loss_sum = world.all_reduce_(self.eager.loss_sum.clone())
        for callback in self.trainer.callbacks:
            callback.on_interrupt(state)
        world.barrier()  # no process ends, and ends the others, before the state is saved
        raise TrainingInterrupted


def check_views(learner: Trainable, transform: Transform | None) -> None:
    """Refuse a learner that asks for several views of an image where there is no augmentation to make them."""
    if learner.views and transform is None:
        raise ConfigError(
            f"{type(learner).__name__} looks at {1 + learner.views} views of each image, and "
            f"augment={learner.options.augment} gives one: set augment=crop-flip or another augmentation"
        )
