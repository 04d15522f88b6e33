"""The protocol of class-incremental learning: a stream of tasks through one trajectory, measured after each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efcil.accel.backend import Backend
from efcil.core.metrics import AccuracyMatrix, count_correct
from efcil.data.dataset import DataSet
from efcil.learners import Learner
from efcil.tasks import TaskStream
from efcil.training.callbacks import Callback
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import head, select, to_device
from efcil.training.state import TaskData, TrainState
from efcil.training.trainer import Trainer, TrainingInterrupted
from efcil.trajectory import Trajectory


class Evaluator:
    """Hold the test images, alone, and measure every classifier on all classes seen so far."""

    def __init__(self, data: DataSet, stream: TaskStream, backend: Backend):
        positions = stream.positions(data.test.labels)
        rows = np.argsort(positions, kind="stable")  # in class order, so that the classes seen are a prefix
        self.pixels = ImageBatches.of(to_device(data.test.images[rows], backend.device), data, backend)
        self.labels = backend.tensor(positions[rows])
        self.ends = np.cumsum(np.bincount(positions, minlength=len(data.class_names)))[np.array(stream.ends) - 1]
        self.task_of_class = stream.task_of_class()
        self.backend = backend
        self._constant: Tensor | None = None  # features of images seen, of a backbone that is never trained

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
            extract(learner.feature_extractor(learner.backbone), one, self.backend, learner.options.crop)

        self.backend.warm_up_cudnn(look)

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
                features[first] = self._features(learner, first, seen)
            correct, correct5, _ = count_correct(trajectory.logits(label, features[first]), labels, self.task_of_class)
            hits[label] = (correct[: task + 1].tolist(), correct5[: task + 1].tolist())
        return hits

    def _features(self, learner: Learner, first: bool, seen: ImageBatches) -> Tensor:
        backbone, crop = learner.first_backbone if first else learner.backbone, learner.options.crop
        if learner.trains:
            return learner.features_of(backbone, seen, crop)
        done = 0 if self._constant is None else len(self._constant)
        later = seen.with_images(select(seen.images, torch.arange(done, len(seen.images), device=self.backend.device)))
        new = learner.features_of(backbone, later, crop)
        self._constant = new if self._constant is None else torch.cat([self._constant, new])
        return self._constant


def run_protocol(
    stream: TaskStream,
    data: DataSet,
    evaluator: Evaluator,
    trajectory: Trajectory,
    matrices: Mapping[str, AccuracyMatrix],
    trainer: Trainer,
    state: TrainState | None = None,
) -> None:
    """Learn the tasks of a stream from where `state` stands, and record the accuracies after each of them."""
    learner = trajectory.learner
    assert learner is not None
    state = state or TrainState()
    backend, callbacks, transform = learner.backend, trainer.callbacks, learner.transform(data.size)
    backend.wait_lazy_init()
    with backend.prevent_capture():
        evaluator.warm_up_cudnn(learner)
    for index in range(state.task, len(stream)):
        task = stream.upto(index) if learner.all_data else stream[index]
        state = state if state.task == index else TrainState(index)
        images = ImageBatches.of(to_device(task.images, backend.device), data, backend)
        task_data = TaskData(task, images, backend.tensor(task.labels), transform)
        on_training_end = partial(_notify, callbacks, "on_training_end", index)
        features = trajectory.learn_task(task_data, partial(trainer.fit, task_data, state), on_training_end)
        with backend.prevent_capture():
            _notify(callbacks, "on_features", features)
            hits = evaluator.measure(index, trajectory)
        for name, (correct, correct5) in hits.items():
            matrices[name].record(index, correct, correct5)
        task.close()
        _notify(callbacks, "on_task_end", index)
        if index + 1 < len(stream) and backend.world.any(trainer.stop()):
            _notify(callbacks, "on_interrupt", TrainState(index + 1))
            backend.world.barrier()
            raise TrainingInterrupted


def _notify(callbacks: Sequence[Callback], event: str, value: Any) -> None:
    for callback in callbacks:
        getattr(callback, event)(value)
