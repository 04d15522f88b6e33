"""What follows a run: progress and log, checkpoints, saved features, snapshots for figures."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from efcil.core.metrics import AccuracyMatrix
from efcil.errors import CheckpointError, EfcilError
from efcil.experiment.checkpoints import Checkpoint, CheckpointStore
from efcil.experiment.reporters import Reporter
from efcil.experiment.run_directory import MetricsLog, RunDirectory
from efcil.features import TaskFeatures
from efcil.learners import Learner
from efcil.protocol import Evaluator
from efcil.tensor_files import save_tensors
from efcil.training.callbacks import Callback, EpochReport
from efcil.training.extraction import extract
from efcil.training.state import TrainState
from efcil.trajectory import Trajectory


class Clock:
    """Seconds of a run, those before it was resumed included."""

    def __init__(self) -> None:
        self.earlier, self._began = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds until now."""
        return self.earlier + time.perf_counter() - self._began


class ProgressLog(Callback):
    """Writes the metrics log, and reports progress to the user."""

    def __init__(
        self,
        log: MetricsLog,
        reporter: Reporter,
        matrices: Mapping[str, AccuracyMatrix],
        tasks: int,
        batch_size: int,
    ):
        self.log, self.reporter, self.matrices, self.tasks = log, reporter, matrices, tasks
        self.batch_size = batch_size  # images of a step

    def on_step_end(self, state: TrainState, steps: int) -> None:
        """Report a step."""
        self.reporter.on_step(state.task, state.epoch, state.step, steps, self.batch_size)

    def on_epoch_end(self, report: EpochReport, state: TrainState) -> None:
        """Log and report an epoch."""
        self.log.add(task=report.task + 1, epoch=report.epoch + 1, loss=report.loss, lr=report.lr)
        self.reporter.on_epoch(report)

    def on_training_end(self, task: int) -> None:
        """Report that training is over."""
        self.reporter.on_solve(task)

    def on_task_end(self, task: int) -> None:
        """Log and report the accuracies after a task."""
        accuracies = {label: matrix.A_t[-1] for label, matrix in self.matrices.items()}
        self.log.add(task=task + 1, A_t=accuracies)
        self.reporter.on_task(task, self.tasks, accuracies)


class Checkpointer(Callback):
    """Saves a run after each task, within a task every `seconds`, and where it is interrupted; restores it.

    Of several processes the first one writes; all of them restore.
    """

    def __init__(
        self,
        store: CheckpointStore,
        run: str,
        trajectory: Trajectory,
        matrices: dict[str, AccuracyMatrix],
        clock: Clock,
        seconds: float,
    ):
        """`run` is the identity of the run that every checkpoint carries."""
        assert trajectory.learner is not None
        self.store, self.run, self.trajectory, self.matrices = store, run, trajectory, matrices
        self.learner: Learner = trajectory.learner
        self.clock, self.seconds, self._saved = clock, seconds, time.monotonic()

    # --- saving -------------------------------------------------------------------------------------------------------

    def _meta(self, state: TrainState) -> dict[str, Any]:
        return {"run": self.run, "position": state.position(), "seconds": self.clock.seconds}

    def _save_middle(self, state: TrainState) -> None:
        tensors = self.learner.state(teacher=True) | state.tensors()
        self.store.save_epoch(state.task + 1, state.epoch, tensors, self._meta(state))
        self._saved = time.monotonic()

    def on_epoch_end(self, report: EpochReport, state: TrainState) -> None:
        """Save the middle of a task when the last checkpoint is old enough."""
        if time.monotonic() - self._saved >= self.seconds and state.epoch < report.epochs:
            self._save_middle(state)

    def on_interrupt(self, state: TrainState) -> None:
        """Save the middle of an epoch, and wait until it is on disk."""
        if state.has_started:
            self._save_middle(state)
        self.store.wait()

    def on_task_end(self, task: int) -> None:
        """Save everything."""
        tensors = {f"learner.{k}": v for k, v in self.learner.state(teacher=False).items()}
        tensors |= {f"trajectory.{k}": v for k, v in self.trajectory.state_dict().items()}
        matrices = {label: matrix.to_json() for label, matrix in self.matrices.items()}
        self.store.save_task(task + 1, tensors, self._meta(TrainState(task + 1)) | {"matrices": matrices})
        self._saved = time.monotonic()

    # --- restoring ----------------------------------------------------------------------------------------------------

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint of this run: the first process reads it and gives it to the others."""
        world = self.learner.backend.world
        with world.sync_errors():
            point = self.store.latest(self.run) if world.is_main else None
        if world.size == 1:
            return point
        head = world.broadcast_object(None if point is None else {"at": [point.task, point.epoch], "meta": point.meta})
        if head is None:
            return None
        tensors, partial = (world.broadcast_tensors(getattr(point, name, {})) for name in ("tensors", "partial"))
        task, epoch = head["at"]
        return Checkpoint(task, epoch, tensors, head["meta"], partial)

    def read_matrices(self, point: Checkpoint) -> None:
        """Restore the accuracies."""
        with checkpoint_errors(self.store):
            for label in self.trajectory.parts:
                self.matrices[label] = AccuracyMatrix.from_json(point.meta["matrices"][label])

    def restore(self, point: Checkpoint | None) -> TrainState:
        """Restore learner, trajectory and accuracies; return where training stands."""
        if point is None:
            return TrainState()
        with checkpoint_errors(self.store):
            self.clock.earlier = float(point.meta["seconds"])
            device = self.learner.backend.device
            if point.tensors:
                tensors = {name: tensor.to(device) for name, tensor in point.tensors.items()}
                self.learner.load_state(_strip_prefix(tensors, "learner."))
                self.trajectory.load_state_dict(_strip_prefix(tensors, "trajectory."))
                self.read_matrices(point)
            if point.epoch is None:
                return TrainState(point.task)
            self.learner.load_state({name: tensor.to(device) for name, tensor in point.partial.items()})
            return TrainState.from_tensors(point.meta["position"], point.partial)


class FeatureWriter(Callback):
    """Saves each task's features and those of the test images, so that other methods can be evaluated later."""

    def __init__(self, directory: RunDirectory, learner: Learner, evaluator: Evaluator, sizes: tuple[int, ...]):
        self.directory, self.learner, self.evaluator, self.sizes = directory, learner, evaluator, sizes

    def on_features(self, features: TaskFeatures) -> None:
        """Write a file for the task."""
        learner, backend = self.learner, self.learner.backend
        images, labels = self.evaluator.test_images(features.index)
        kept = {"labels": features.labels, "test_labels": labels, "new": features.new()}
        kept["test"] = learner.features_of(learner.backbone, images, learner.options.crop)
        if features.index:
            kept["old"] = features.old()
            if features.has_pseudo_images:
                kept |= {"old_pseudo": features.old("pseudo"), "new_pseudo": features.new("pseudo")}
        if learner.anchor is not None:
            kept["first"] = features.with_first_backbone().new()
            first = learner.feature_extractor(learner.first_backbone)
            kept["test_first"] = extract(first, images, backend, learner.options.crop)
        if not backend.world.is_main:
            return
        path = self.directory.features / f"task-{features.index + 1:02d}.safetensors"
        meta = {
            "task": features.index + 1,
            "sizes": list(self.sizes),
            "totals": self.evaluator.totals(),
            "layout": learner.feature_layout,
        }
        save_tensors(path, kept, meta, self.directory.out)


class SnapshotWriter(Callback):
    """Saves what figures need after the second task and the last one: test features and methods' statistics."""

    def __init__(
        self,
        directory: RunDirectory,
        trajectory: Trajectory,
        evaluator: Evaluator,
        class_names: list[str],
        labels: Collection[str],
    ):
        self.directory, self.trajectory, self.evaluator = directory, trajectory, evaluator
        self.class_names, self.labels = class_names, labels

    def on_task_end(self, task: int) -> None:
        """Write the test features under both backbones, and the statistics."""
        if task not in (1, len(self.evaluator.ends) - 1):
            return
        learner = self.trajectory.learner
        assert learner is not None
        images, targets = self.evaluator.test_images(task)
        kept: dict[str, Tensor] = {"labels": targets}
        with learner.backend.prevent_capture():
            for name, backbone in (("before", learner.old_backbone), ("after", learner.backbone)):
                extractor = learner.feature_extractor(backbone)
                kept[name] = extract(extractor, images, learner.backend, learner.options.crop)
        if not learner.backend.world.is_main:
            return
        for label in self.labels:
            stats = self.trajectory.stats(label)
            if stats is not None:
                kept |= {f"stats/{label}/{key}": tensor for key, tensor in stats.state().items()}
        path = self.directory.snapshots / f"task-{task + 1:02d}.safetensors"
        meta = {"task": task + 1, "class_names": self.class_names}
        save_tensors(path, kept, meta, self.directory.out)


class Started(Callback):
    """Sets an event when a part of the first task is done: then the next of several concurrent runs may begin."""

    PARTS = 10  # of a later task, which is the shorter one

    def __init__(self, event: threading.Event, epochs: int):
        """`epochs` is the number of epochs of a later task."""
        self.event, self.epochs = event, epochs

    def on_epoch_end(self, report: EpochReport, state: TrainState) -> None:
        """Set the event after a tenth of a task's epochs."""
        if report.task or (report.epoch + 1) * self.PARTS >= self.epochs:
            self.event.set()


@contextmanager
def checkpoint_errors(store: CheckpointStore) -> Iterator[None]:
    """Report in one line that intact checkpoints do not belong to this run."""
    try:
        yield
    except (torch.OutOfMemoryError, CheckpointError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, EfcilError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(f"{store.directory} do not fit this run ({why}): start again in another --out") from error


def _strip_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
