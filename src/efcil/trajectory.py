"""Run a stream of tasks through one learner and any number of readouts: train once, compare all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from efcil.accel.machine import Machine
from efcil.core.metrics import AccuracyMatrix, count_correct
from efcil.data.augment import Transform
from efcil.data.dataset import DataSet
from efcil.features import TaskFeatures
from efcil.learners import Learner
from efcil.methods.base import Readout
from efcil.tasks import Task, TaskStream
from efcil.training.extraction import extract
from efcil.training.image_batches import Pixels
from efcil.training.image_store import first, stored
from efcil.training.step import Optimiser
from efcil.training.trainer import EpochReport, Middle, OnStop, train


class Observer(Protocol):
    """Who is told how a run goes: progress, logs, checkpoints."""

    def after_epoch(self, report: EpochReport, optimiser: Optimiser) -> None:
        """An epoch is done and its loss is finite."""

    def before_readouts(self, task: int) -> None:
        """Training of a task is done; statistics move and heads are solved now."""

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

    def measure(
        self,
        task: int,
        learner: Learner,
        readouts: Mapping[str, Readout],
        frozen: Collection[str] = (),
    ) -> dict[str, tuple[list[int], list[int]]]:
        """Return (top-1, top-5) hits on each task's test images, for each readout; those in `frozen` see the first
        backbone. Features of a backbone are computed once.
        """
        seen, labels = self.seen(task)
        features: dict[bool, Tensor] = {}
        hits = {}
        for name, readout in readouts.items():
            first = name in frozen
            if first not in features:
                backbone = learner.first_backbone if first else learner.backbone
                reading = learner.feature_extractor(backbone)
                features[first] = extract(reading, seen, self.machine, learner.options.crop)
            correct, correct5, _ = count_correct(readout.scores(features[first]), labels, self.task_of_class)
            hits[name] = (correct[: task + 1].tolist(), correct5[: task + 1].tolist())
        return hits


def train_task(
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
    stages, before = learner.stages(index), 0
    taken_up = first_epoch > 0 or middle is not None
    if stages and not taken_up:
        learner.begin(task)
    learner.num_old_classes = task.first_class
    for stage, schedule in enumerate(stages):
        start = max(0, first_epoch - before)  # beyond the stage's end: it was over when the run was taken up
        if start == 0 and middle is None:
            with learner.machine.uncaptured():
                learner.before_stage(stage, pixels, labels)
        if start < schedule.epochs:
            learner.set_stage(stage)
            train(
                learner,
                learner.loss,
                *learner.training_data(stage, pixels, labels),
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
                resting=learner.resting(),
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


def learn_stream(
    stream: TaskStream,
    data: DataSet,
    evaluator: Evaluator,
    learner: Learner,
    readouts: Mapping[str, Readout],
    matrices: Mapping[str, AccuracyMatrix],
    observer: Observer,
    *,
    frozen: Collection[str] = (),
    first_task: int = 0,
    first_epoch: int = 0,
    momenta: dict[str, Tensor] | None = None,
    middle: Middle | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_stop: OnStop = lambda task, middle, optimiser: None,
    learned: Callable[[TaskFeatures], None] = lambda task: None,
) -> None:
    """Learn the tasks from `first_task` on; with `first_epoch`, `momenta` and `middle` as `train_task`.

    `learned` sees every task once its readouts have learned it, while its images can still be read. The readouts named
    in `frozen` learn and are measured with the backbone as it was after the first task.
    """
    machine = learner.machine
    transform = learner.transform(data.size)
    machine.awake()
    with machine.uncaptured():
        evaluator.rehearse(learner)
    for index in range(first_task, len(stream)):
        task = stream.upto(index) if learner.all_data else stream[index]
        labels = machine.tensor(task.labels)
        pixels = Pixels(stored(task.images, machine.device), data.mean, data.std, machine, data.short)
        train_task(
            learner,
            task,
            pixels,
            labels,
            transform,
            first_epoch=first_epoch,
            momenta=momenta,
            middle=middle,
            after_epoch=observer.after_epoch,
            stop=stop,
            on_stop=on_stop,
        )
        if frozen and index == 0:
            learner.keep_first()
        first_epoch, momenta, middle = 0, None, None
        observer.before_readouts(index)
        features = TaskFeatures(index, learner, pixels, labels, transform)
        features.holders = tuple(id(getattr(readout, "stats", None)) for readout in readouts.values())
        with machine.uncaptured():
            learner.after_task(features)
            at_first = features.at_first()
            for name, readout in readouts.items():
                readout.learn(at_first if name in frozen else features)
            learned(features)
            hits = evaluator.measure(index, learner, readouts, frozen)
        for name, (correct, correct5) in hits.items():
            matrices[name].record(index, correct, correct5)
        task.close()
        observer.after_task(index)
