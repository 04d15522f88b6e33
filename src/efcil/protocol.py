"""The protocol of class-incremental learning: a stream of tasks through one trajectory, measured after each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from efcil.accel.machine import Machine
from efcil.core.metrics import AccuracyMatrix, count_correct
from efcil.data.augment import Transform
from efcil.data.dataset import DataSet
from efcil.errors import ConfigError
from efcil.features import TaskFeatures
from efcil.learners import Learner
from efcil.tasks import Task, TaskStream
from efcil.training.extraction import extract
from efcil.training.image_batches import Pixels
from efcil.training.image_store import first, stored
from efcil.training.step import Optimiser
from efcil.training.trainer import EpochReport, Middle, OnStop, train
from efcil.trajectory import Trajectory


class Observer(Protocol):
    """Who follows a run: progress, logs, checkpoints."""

    def after_epoch(self, report: EpochReport, optimiser: Optimiser) -> None:
        """An epoch is done and its loss is finite."""

    def on_training_end(self, task: int) -> None:
        """Training of a task is done; statistics are shifted and classifiers fitted now."""

    def after_task(self, task: int) -> None:
        """A task is learned and measured."""


class Evaluator:
    """The only one that holds test data: measures every readout on all classes seen so far."""

    def __init__(self, data: DataSet, stream: TaskStream, machine: Machine):
        positions = stream.positions(data.test.labels)
        rows = np.argsort(positions, kind="stable")  # in class order, so that the classes seen are a prefix
        self.pixels = Pixels(stored(data.test.images[rows], machine.device), data.mean, data.std, machine, data.short)
        self.labels = machine.tensor(positions[rows])
        self.ends = np.cumsum(np.bincount(positions, minlength=len(data.class_names)))[np.array(stream.ends) - 1]
        self.task_of_class = stream.task_of_class()
        self.machine = machine

    def totals(self) -> list[int]:
        """Test images of each task."""
        return np.diff(self.ends, prepend=0).tolist()

    def seen(self, task: int) -> tuple[Pixels, Tensor]:
        """Return the test images of the classes seen after a task, and their labels."""
        end = int(self.ends[task])
        return self.pixels.showing(first(self.pixels.images, end)), self.labels[:end]

    def rehearse(self, learner: Learner) -> None:
        """Look at an image before a run begins: what cuDNN tries out for it, the steps of no other run disturb."""
        if self.machine.branches and self.machine.group.size == 1:
            one = self.pixels.showing(first(self.pixels.images, 1))
            extract(learner.feature_extractor(learner.backbone), one, self.machine, learner.options.crop)

    def measure(self, task: int, trajectory: Trajectory) -> dict[str, tuple[list[int], list[int]]]:
        """Return (top-1, top-5) hits on each task's test images, for each classifier.

        Features of a backbone are computed once.
        """
        learner = trajectory.learner
        assert learner is not None
        seen, labels = self.seen(task)
        features: dict[bool, Tensor] = {}
        hits = {}
        for label, part in trajectory.parts.items():
            first = part.first_backbone
            if first not in features:
                extractor = learner.feature_extractor(learner.first_backbone if first else learner.backbone)
                features[first] = extract(extractor, seen, self.machine, learner.options.crop)
            correct, correct5, _ = count_correct(trajectory.logits(label, features[first]), labels, self.task_of_class)
            hits[label] = (correct[: task + 1].tolist(), correct5[: task + 1].tolist())
        return hits


def fit_task(
    learner: Learner,
    task: Task,
    pixels: Pixels,
    labels: Tensor,
    transform: Transform | None,
    *,
    first_epoch: int = 0,
    momenta: dict[str, Tensor] | None = None,
    middle: Middle | None = None,
    after_epoch: Callable[[EpochReport, Optimiser], None] = lambda report, optimiser: None,
    stop: Callable[[], bool] = lambda: False,
    on_stop: OnStop = lambda task, middle, optimiser: None,
) -> None:
    """Let the backbone learn one task, all stages of it; with `first_epoch` and `momenta` from the middle of it, with
    `middle` from the middle of that epoch. `stop` and `on_stop` are those of `train`.
    """
    options, index = learner.options, task.index
    if learner.views and transform is None:
        raise ConfigError(
            f"{type(learner).__name__} looks at {1 + learner.views} views of each image, and augment={options.augment} "
            "gives one: set augment=crop-flip or another augmentation"
        )
    stages, before = learner.stages(index), 0
    taken_up = first_epoch > 0 or middle is not None
    if stages and not taken_up:
        learner.before_task(task)
    learner.num_old_classes = task.first_class
    for stage, schedule in enumerate(stages):
        start = max(0, first_epoch - before)  # beyond the stage's end: it was over when the run was taken up
        if start < schedule.epochs:
            with learner.machine.uncaptured():
                data = learner.training_data(stage, pixels, labels)
            train(
                learner,
                learner.loss,
                *data,
                schedule=schedule,
                transform=transform,
                batch_size=options.batch_size,
                last_batch=options.last_batch,
                machine=learner.machine,
                seed=learner.seed,
                task=index,
                rule=options.optimiser,
                momentum=options.momentum,
                noise=learner.loss_generator,
                frozen=learner.frozen_forward(),
                views=learner.views,
                hand_over=learner.hand_over,
                before=before,
                epochs=sum(s.epochs for s in stages),
                start=start,
                momenta=momenta if start or middle is not None else None,
                middle=middle,
                after_epoch=after_epoch,
                stop=stop,
                on_stop=on_stop,
            )
            middle = None
        before += schedule.epochs


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
    momenta: dict[str, Tensor] | None = None,
    middle: Middle | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_stop: OnStop = lambda task, middle, optimiser: None,
    on_task_features: Callable[[TaskFeatures], None] = lambda features: None,
) -> None:
    """Learn the tasks from `first_task` on; with `first_epoch`, `momenta` and `middle` as `fit_task`.

    `on_task_features` sees every task once its classifiers are fitted, while its images can still be read.
    """
    learner = trajectory.learner
    assert learner is not None
    machine = learner.machine
    transform = learner.transform(data.size)
    machine.awake()
    with machine.uncaptured():
        evaluator.rehearse(learner)
    for index in range(first_task, len(stream)):
        task = stream.upto(index) if learner.all_data else stream[index]
        labels = machine.tensor(task.labels)
        pixels = Pixels(stored(task.images, machine.device), data.mean, data.std, machine, data.short)
        position = {"first_epoch": first_epoch, "momenta": momenta, "middle": middle}

        def fit(
            task: Task = task, pixels: Pixels = pixels, labels: Tensor = labels, position: dict[str, Any] = position
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
                on_stop=on_stop,
            )

        features = trajectory.learn_task(
            index, pixels, labels, transform, fit, partial(observer.on_training_end, index)
        )
        first_epoch, momenta, middle = 0, None, None
        with machine.uncaptured():
            on_task_features(features)
            hits = evaluator.measure(index, trajectory)
        for name, (correct, correct5) in hits.items():
            matrices[name].record(index, correct, correct5)
        task.close()
        observer.after_task(index)
