"""A run: one trajectory and its methods, in a directory that survives a kill at any moment and can be resumed."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from efcil import data as datasets
from efcil.accel.backend import Backend
from efcil.config import Options
from efcil.core.metrics import AccuracyMatrix
from efcil.data.dataset import DataSet
from efcil.errors import ConfigError
from efcil.experiment.callbacks import Checkpointer, Clock, FeatureWriter, ProgressLog, SnapshotWriter, Started
from efcil.experiment.checkpoints import Checkpoint, CheckpointStore
from efcil.experiment.reporters import ProgressOnly, Reporter
from efcil.experiment.run_directory import MetricsLog, RunDirectory, io_errors
from efcil.experiment.specification import Experiment, commit
from efcil.experiment.summaries import Summary, same_result, summary_header, with_accuracies
from efcil.experiment.tracking import Tracker
from efcil.files import atomic_write_text
from efcil.learners import LEARNERS
from efcil.learners.lwf import LwF
from efcil.methods import FROZEN
from efcil.protocol import Evaluator, run_protocol
from efcil.report import html_page
from efcil.tasks import BY_SIMILARITY, TaskStream, order_of
from efcil.training.callbacks import Callback
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import on_demand
from efcil.training.threads import fitting_threads
from efcil.training.trainer import Trainer, check_views
from efcil.trajectory import Trajectory


@dataclass(frozen=True)
class RunOptions:
    """How a run is kept and followed; none of it changes its metrics."""

    command: str = ""  # that began it, for config.yaml and the summaries
    compare: bool = False  # several methods, each with a directory of its own
    checkpoint_seconds: float = 60.0  # between two checkpoints within a task
    save_features: bool = False  # so that other methods can be evaluated later (`efcil.experiment.reevaluate`)
    snapshots: Collection[str] = ()  # methods whose statistics figures need, after the second task and the last one
    trackers: Sequence[Tracker] = ()
    concurrent_runs: int = 1  # on the same device, this one included: its seconds depend on it


class Run(Callback):
    """One trajectory and the methods that are evaluated on it."""

    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        backend: Backend,
        reporter: Reporter,
        options: RunOptions | None = None,
        data: Path | DataSet | TaskStream | None = None,
    ):
        """`data` is the dataset directory, or a data set in memory."""
        self.experiment, self.out, self.backend, self.reporter = experiment, out, backend, reporter
        self.options, self.data = options or RunOptions(), data
        self.world = backend.world  # of several processes the first one reads and writes the directory
        self.concurrent_runs = self.options.concurrent_runs
        self.directory = RunDirectory(out, self.options.compare)
        self.store = CheckpointStore(self.directory.checkpoints, reporter.note, out)
        self.log = MetricsLog(self.directory.metrics, self.options.trackers, out)
        self.matrices: dict[str, AccuracyMatrix] = {}
        self.training = False  # from here on a signal waits for the end of a step
        self.stop = threading.Event()  # set from outside: the run ends after this step, and saves it
        self.frozen = False  # whether the learner had frozen its backbone after the task before
        self.started = threading.Event()  # of several concurrent runs the next may begin

    @property
    def has_begun(self) -> bool:
        """Whether there is something to resume."""
        return self.directory.config.exists()

    def check(self) -> None:
        """Raise the errors that `execute` raises before training; write nothing.

        Networks are built on the CPU, and an order by similarity, which has to be computed, is taken as given.
        """
        by_similarity = self.experiment.order in BY_SIMILARITY
        experiment = replace(self.experiment, order="identity") if by_similarity else self.experiment
        backend = Backend(torch.device("cpu"), world=self.world)
        trial = Run(experiment, self.out, backend, ProgressOnly(self.reporter), self.options, self.data)
        with self.world.sync_errors():
            with self.world.local_main_first():
                data = trial._load()
            trial._prepare(data)

    def execute(self, resume: bool) -> list[Summary]:
        """Run to the end, from the start or from the last checkpoint; return the summaries."""
        self.backend.start_lazy_init()
        with ExitStack() as held:
            with self.world.sync_errors():
                if self.world.is_main:
                    held.enter_context(self.directory.hold(resume))
                    held.callback(self.store.settle)  # the directory is released when nothing is written any more
            with self.world.sync_errors():
                with self.world.local_main_first():  # it fills the cache that the others read
                    data = self._load()
                self._prepare(data)
            side = self.experiment.training.crop or data.size
            shape, batch = (data.channels, side, side), self.experiment.training.batch_size
            held.enter_context(fitting_threads(self.learner.backbone, shape, batch))
            if self.world.size > 1:
                self.world.check_equal("the data set's fingerprint", data.fingerprint())
                self.world.check_equal("the class order", self._order_digest())
            identity = ""
            with self.world.sync_errors(), io_errors(self.out):
                if self.world.is_main:
                    what = {"class_order": self._order_digest(), "fingerprint": data.fingerprint()}
                    run = {**self.experiment.fingerprint(), **what}
                    about = (self._machine(), self.options.command, self.reporter.note)
                    lost = resume and not self.directory.config.exists()  # the checkpoints still say whose they are
                    identity = self.directory.claim(run, *about, self.store.run_identity() if lost else None)
            with io_errors(self.out), closing(self.log):
                return self._learn(data, self.world.broadcast_object(identity))

    def _load(self) -> DataSet:
        experiment, data = self.experiment, self.data
        wanted = experiment.training.preprocessing()
        if isinstance(data, TaskStream):
            assert data.dataset is not None, "a stream without test images cannot be measured"
            data = data.dataset
        if not isinstance(data, DataSet):
            data = datasets.load(
                experiment.dataset,
                data,
                _resolve_aspect(experiment),
                lambda done, total: self.reporter.progress("decoding images", done, total),
                wanted,
            )
        elif wanted is not None:
            data = data.prepared(wanted)
        for text in data.notes:
            self.reporter.note(text)
        return data.split_validation(experiment.val_fraction, experiment.seed) if experiment.val_fraction else data

    def _order_digest(self) -> str:
        """Hash the class order itself: a file may change under its name."""
        return hashlib.sha256(self.stream.order.tobytes()).hexdigest()[:16]

    def _machine(self) -> dict[str, Any]:
        e = self.backend
        return {**e.description, "threads": torch.get_num_threads(), "compile": e.compile, "cuda_graphs": e.cuda_graphs}

    def _prepare(self, data: DataSet) -> None:
        """Build everything that can still be refused, before the directory is claimed."""
        self.clock, experiment = Clock(), self.experiment
        if isinstance(self.data, TaskStream):
            self.stream = self.data if data is self.data.dataset else self.data.on(data)
        else:
            sizes = experiment.sizes(len(data.class_names))
            self.stream = TaskStream(data.train, order_of(experiment.order, data, sizes), sizes)
        self.class_names = [data.class_names[label] for label in self.stream.order]
        self.learner = LEARNERS[experiment.learner](
            experiment.training, data.channels, self.backend, experiment.seed, data.size
        )
        self.learner.load_weights()
        check_views(self.learner, self.learner.transform(data.size))
        self.learner.check(len(data.class_names))
        trained = [size for task, size in enumerate(self.stream.sizes) if self.learner.stages(task)]
        if isinstance(self.learner, LwF) and 1 in trained:
            self.reporter.note(
                f"a task of one class teaches the backbone nothing: {experiment.learner} only tells new classes of a "
                "task apart; take more classes per task, --init-cls or a pretrained backbone"
            )
        # A method with several classifiers is measured with each of them.
        self.trajectory = Trajectory(self.learner, experiment.methods, freezes=experiment.learner in FROZEN)

    def _learn(self, data: DataSet, identity: str) -> list[Summary]:
        self.evaluator = Evaluator(data, self.stream, self.backend)
        self.matrices |= {label: AccuracyMatrix(self.evaluator.totals()) for label in self.trajectory.parts}
        checkpointer = Checkpointer(
            self.store, identity, self.trajectory, self.matrices, self.clock, self.options.checkpoint_seconds
        )
        point = checkpointer.latest()
        summaries = self._finished(checkpointer, point)
        if summaries is not None:  # nothing is left to do
            self.reporter.note("this run is finished")
            self.reporter.on_finished(summaries, str(self.out))
            return summaries
        state = checkpointer.restore(point)
        self.frozen = self.learner.frozen
        epochs = [sum(stage.epochs for stage in self.learner.stages(task)) for task in range(len(self.stream))]
        if self.world.is_main:
            self.log.truncate(state.task, state.epoch)
        for part in (data.train, data.test):
            images = on_demand(part.images, self.backend.device)
            pixels = ImageBatches.of(images, data, self.backend)
            self.learner.prepare(pixels, partial(self.reporter.progress, "computing features"))
        self._announce(data, epochs, state.task, state.epoch, point is not None)
        self.training = True
        trainer = Trainer(self.learner, self._callbacks(checkpointer, epochs[-1]), self.stop.is_set)
        run_protocol(self.stream, data, self.evaluator, self.trajectory, self.matrices, trainer, state)
        if not self.world.is_main:
            return []
        self.store.wait()
        summaries = self._write_summaries()
        atomic_write_text(self.directory.report, html_page(summaries), root=self.out)
        self.reporter.on_finished(summaries, str(self.out))
        self.training = False
        return summaries

    def _announce(self, data: DataSet, epochs: Sequence[int], task: int, epoch: int, resumed: bool) -> None:
        if resumed:
            where = f", epoch {epoch} of task {task + 1}" if epoch else ""
            self.reporter.note(f"resuming after task {task}{where}")
        problem = f"{data.name}: {len(data.class_names)} classes in {len(self.stream)} tasks"
        title = f"{', '.join(self.experiment.methods)} on {problem}, {self.backend.name}"
        self.reporter.on_started(title, epochs, sum(epochs[:task]) + epoch)

    def _callbacks(self, checkpointer: Checkpointer, later_epochs: int) -> list[Callback]:
        """Return what follows the run; snapshots come before the checkpoint that says that the task is done."""
        options, callbacks = self.options, list[Callback]()
        if options.save_features:
            callbacks.append(FeatureWriter(self.directory, self.learner, self.evaluator, self.stream.sizes))
        if options.snapshots:
            callbacks.append(
                SnapshotWriter(self.directory, self.trajectory, self.evaluator, self.class_names, options.snapshots)
            )
        if self.world.is_main:
            size = self.experiment.training.batch_size
            log = ProgressLog(self.log, self.reporter, self.matrices, len(self.stream), size)
            callbacks += [Started(self.started, later_epochs), log, checkpointer, self]
        return callbacks

    def on_task_end(self, task: int) -> None:
        """Write the summaries of the tasks so far, and say where the learner froze."""
        self._write_summaries()
        if self.learner.frozen and not self.frozen:
            self.reporter.note(f"the backbone stays as it was before task {task + 1}, which cost more than it gained")
        self.frozen = self.learner.frozen

    def _finished(self, checkpointer: Checkpointer, point: Checkpoint | None) -> list[Summary] | None:
        """Return the summaries of a finished run, if all exist and agree with the last checkpoint."""
        summaries: list[Summary] | None = None
        with self.world.sync_errors():
            if self.world.is_main and point is not None and point.task == len(self.stream):
                checkpointer.read_matrices(point)
                stored = {label: self.directory.read_summary(label) for label in self.experiment.methods}
                if all(same_result(summary, self._summary(label)) for label, summary in stored.items()):
                    summaries = list(stored.values())
        found: list[Summary] | None = self.world.broadcast_object(summaries)
        return found

    def _summary(self, label: str, of: str = "") -> Summary:
        """Return what is known of a method at commit `of`."""
        about = (self.stream.sizes, self.clock.seconds, self.backend, self.options.command, of, self.concurrent_runs)
        header = summary_header(self.experiment, label, *about)
        return with_accuracies(header, self.experiment, label, self.matrices)

    def _write_summaries(self) -> list[Summary]:
        of = commit()
        summaries = {label: self._summary(label, of) for label in self.experiment.methods}
        for label, summary in summaries.items():
            self.directory.write_summary(label, summary)
        return list(summaries.values())


def _resolve_aspect(experiment: Experiment) -> Options:
    """Return the options of the data: whole pictures where every way into a network begins with a crop of them."""
    data, training = experiment.data, experiment.training
    if not isinstance(data, datasets.FilesOptions):
        return data
    if training.preprocessing() is not None:
        if data.keep_aspect or data.train_short_side is not None:
            raise ConfigError(
                f"data.keep_aspect, data.train_short_side: {training.backbone} was trained on squares of its own; "
                "leave them out"
            )
        return data
    if data.train_short_side is not None and (training.augment != "resized-crop" or training.crop is None):
        raise ConfigError(
            "data.train_short_side is for training with random crops: set augment=resized-crop and a crop"
        )
    if data.keep_aspect is False:
        return data
    wrong = [
        text
        for text, holds in (
            (f"augment={training.augment} (resized-crop draws a box)", training.augment != "resized-crop"),
            ("no crop (the side of the network's input)", training.crop is None),
            (
                "pseudo images, which are made of squares (pseudo_ratio=0 makes none)",
                getattr(training, "pseudo_ratio", 0) > 0,
            ),
        )
        if holds
    ]
    if wrong and data.keep_aspect:
        raise ConfigError(f"data.keep_aspect=true does not go with {' and '.join(wrong)}; leave it out to have squares")
    return data.model_copy(update={"keep_aspect": not wrong})
