"""The protocol of class-incremental learning: a stream of tasks through one trajectory, measured after each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from efcil.accel.execution import Execution
from efcil.core.metrics import AccuracyMatrix, count_correct
from efcil.data.augment import Transform
from efcil.data.dataset import DataSet
from efcil.errors import ConfigError
from efcil.features import TaskFeatures
from efcil.learners import Learner
from efcil.tasks import Task, TaskStream
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import head, to_device
from efcil.training.step import Optimizer
from efcil.training.trainer import EpochReport, MidEpochState, OnInterrupt, train
from efcil.trajectory import Trajectory


class Observer(Protocol):
    """Who follows a run: progress, logs, checkpoints."""

    def after_epoch(self, report: EpochReport, optimizer: Optimizer) -> None:
        """An epoch is done and its loss is finite."""

    def on_training_end(self, task: int) -> None:
        """Training of a task is done; statistics are shifted and classifiers fitted now."""

    def after_task(self, task: int) -> None:
        """A task is learned and measured."""


class Evaluator:
    """The only one that holds test data: measures every readout on all classes seen so far."""

    def __init__(self, data: DataSet, stream: TaskStream, execution: Execution):
        positions = stream.positions(data.test.labels)
        rows = np.argsort(positions, kind="stable")  # in class order, so that the classes seen are a prefix
        self.pixels = ImageBatches(
            to_device(data.test.images[rows], execution.device), data.mean, data.std, execution, data.short
        )
        self.labels = execution.tensor(positions[rows])
        self.ends = np.cumsum(np.bincount(positions, minlength=len(data.class_names)))[np.array(stream.ends) - 1]
        self.task_of_class = stream.task_of_class()
        self.execution = execution

    def totals(self) -> list[int]:
        """Test images of each task."""
        return np.diff(self.ends, prepend=0).tolist()

    def test_images(self, task: int) -> tuple[ImageBatches, Tensor]:
        """Return the test images of the classes seen after a task, and their labels."""
        end = int(self.ends[task])
        return self.pixels.with_images(head(self.pixels.images, end)), self.labels[:end]

    def warm_up_cudnn(self, learner: Learner) -> None:
        """Let the machine warm up with one image."""

        def look() -> None:
            one = self.pixels.with_images(head(self.pixels.images, 1))
            extract(learner.feature_extractor(learner.backbone), one, self.execution, learner.options.crop)

        self.execution.warm_up_cudnn(look)

    def measure(self, task: int, trajectory: Trajectory) -> dict[str, tuple[list[int], list[int]]]:
        """Return (top-1, top-5) hits on each task's test images, for each classifier.

        Features of a backbone are computed once.
        """
        learner = trajectory.learner
        assert learner is not None
        seen, labels = self.test_images(task)
        features: dict[bool, Tensor] = {}
        hits = {}
        for label, part in trajectory.parts.items():
            first = part.first_backbone
            if first not in features:
                extractor = learner.feature_extractor(learner.first_backbone if first else learner.backbone)
                features[first] = extract(extractor, seen, self.execution, learner.options.crop)
            correct, correct5, _ = count_correct(trajectory.logits(label, features[first]), labels, self.task_of_class)
            hits[label] = (correct[: task + 1].tolist(), correct5[: task + 1].tolist())
        return hits


def check_views(learner: Learner, transform: Transform | None) -> None:
    """Refuse a learner that looks at several views of an image where there is no augmentation to make them."""
    if learner.views and transform is None:
        raise ConfigError(
            f"{type(learner).__name__} looks at {1 + learner.views} views of each image, and "
            f"augment={learner.options.augment} gives one: set augment=crop-flip or another augmentation"
        )


def fit_task(
    learner: Learner,
    task: Task,
    pixels: ImageBatches,
    labels: Tensor,
    transform: Transform | None,
    *,
    first_epoch: int = 0,
    optimizer_state: dict[str, Tensor] | None = None,
    mid_epoch: MidEpochState | None = None,
    after_epoch: Callable[[EpochReport, Optimizer], None] = lambda report, optimizer: None,
    stop: Callable[[], bool] = lambda: False,
    on_interrupt: OnInterrupt = lambda task, mid_epoch, optimizer: None,
) -> None:
    """Train the backbone on one task, all stages of it; with `first_epoch` and `optimizer_state` from the middle of it,
    with `mid_epoch` from the middle of that epoch. `stop` and `on_interrupt` are those of `train`.
    """
    options, index = learner.options, task.index
    check_views(learner, transform)
    stages, epoch_offset = learner.stages(index), 0
    resumed = first_epoch > 0 or mid_epoch is not None
    if stages and not resumed:
        learner.before_task(task)
    learner.num_old_classes = task.first_class
    for stage, schedule in enumerate(stages):
        start = max(0, first_epoch - epoch_offset)  # beyond the stage's end: it was over when the run was resumed
        if start < schedule.epochs:
            with learner.execution.prevent_capture():
                data = learner.training_data(stage, pixels, labels)
            train(
                learner,
                learner.loss,
                *data,
                schedule=schedule,
                transform=transform,
                batch_size=options.batch_size,
                last_batch=options.last_batch,
                execution=learner.execution,
                seed=learner.seed,
                task=index,
                rule=options.optimizer,
                momentum=options.momentum,
                loss_generator=learner.loss_generator,
                frozen=learner.frozen_forward(),
                views=learner.views,
                set_gradient_sink=learner.set_gradient_sink,
                epoch_offset=epoch_offset,
                epochs=sum(s.epochs for s in stages),
                first_epoch=start,
                optimizer_state=optimizer_state if start or mid_epoch is not None else None,
                mid_epoch=mid_epoch,
                after_epoch=after_epoch,
                stop=stop,
                on_interrupt=on_interrupt,
            )
            mid_epoch = None
        epoch_offset += schedule.epochs


def run_protocol(
    stream: TaskStream,
    data: DataSet,
    evaluator: Evaluator,
    trajectory: Trajectory,
    matrices: Mapping[str, AccuracyMatrix],
    observer: Observer,
    *,
    first_task: int = 0,
    first_epoch: int = 0,
    optimizer_state: dict[str, Tensor] | None = None,
    mid_epoch: MidEpochState | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_interrupt: OnInterrupt = lambda task, mid_epoch, optimizer: None,
    on_task_features: Callable[[TaskFeatures], None] = lambda features: None,
) -> None:
    """Learn the tasks from `first_task` on; with `first_epoch`, `optimizer_state` and `mid_epoch` as `fit_task`.

    `on_task_features` sees every task once its classifiers are fitted, while its images can still be read.
    """
    learner = trajectory.learner
    assert learner is not None
    execution = learner.execution
    transform = learner.transform(data.size)
    execution.wait_lazy_init()
    with execution.prevent_capture():
        evaluator.warm_up_cudnn(learner)
    for index in range(first_task, len(stream)):
        task = stream.upto(index) if learner.all_data else stream[index]
        labels = execution.tensor(task.labels)
        pixels = ImageBatches(to_device(task.images, execution.device), data.mean, data.std, execution, data.short)
        position = {"first_epoch": first_epoch, "optimizer_state": optimizer_state, "mid_epoch": mid_epoch}

        def fit(
            task: Task = task,
            pixels: ImageBatches = pixels,
            labels: Tensor = labels,
            position: dict[str, Any] = position,
        ) -> None:
            fit_task(
                learner,
                task,
                pixels,
                labels,
                transform,
                **position,
                after_epoch=observer.after_epoch,
                stop=stop,
                on_interrupt=on_interrupt,
            )

        features = trajectory.learn_task(
            index, pixels, labels, transform, fit, partial(observer.on_training_end, index)
        )
        first_epoch, optimizer_state, mid_epoch = 0, None, None
        with execution.prevent_capture():
            on_task_features(features)
            hits = evaluator.measure(index, trajectory)
        for name, (correct, correct5) in hits.items():
            matrices[name].record(index, correct, correct5)
        task.close()
        observer.after_task(index)
