"""Runs: a directory that holds everything, survives a kill at any moment, and can be taken up again.

`run` has one method in one directory. `compare` trains in OUT/trajectory and writes OUT/<method>/summary.json.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from efcil import data as datasets
from efcil.accel.execution import Execution
from efcil.config import Options, load_yaml
from efcil.core.metrics import AccuracyMatrix
from efcil.data.dataset import DataSet
from efcil.errors import CheckpointError, ConfigError, EfcilError, RunError
from efcil.experiment.checkpoints import Checkpoint, CheckpointStore
from efcil.experiment.reporters import Reporter
from efcil.experiment.run_directory import MetricsLog, differences, io_errors, run_lock
from efcil.experiment.specification import Experiment, commit, versions
from efcil.experiment.tracking import Tracker
from efcil.features import TaskFeatures
from efcil.files import atomic_write_text, read_json, remove_temporary_files, write_json
from efcil.learners import LEARNERS
from efcil.methods import FROZEN
from efcil.protocol import Evaluator, check_views, run_protocol
from efcil.report import html_page
from efcil.report.load import TIMING
from efcil.tasks import TaskStream, class_order
from efcil.tensor_files import save_tensors
from efcil.training.extraction import extract
from efcil.training.step import Optimizer
from efcil.training.trainer import EpochReport, MidEpochState, TrainingInterrupted
from efcil.trajectory import Trajectory

Summary = dict[str, Any]
STAGGER = 10  # of several runs at once each begins when the one before has this part of a task behind it
FEATURES_DIR = "features"  # directory of kept features, beside config.yaml


@contextmanager
def _checkpoint_errors(checkpoints: Path) -> Iterator[None]:
    """Tell in one line that sound checkpoints are of something else than this run."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, EfcilError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(f"{checkpoints} do not fit this run ({why}): start again in another --out") from error


class Run:
    """One trajectory and the methods read from it."""

    def __init__(
        self,
        experiment: Experiment,
        directory: Path | None,
        out: Path,
        execution: Execution,
        reporter: Reporter,
        *,
        command: str,
        checkpoint_seconds: float = 60.0,
        compare: bool = False,
        snapshots: Collection[str] = (),
        save_features: bool = False,
        trackers: Sequence[Tracker] = (),
        concurrent_runs: int = 1,
    ):
        """`snapshots` names methods whose statistics figures need, after the second task and the last one; with
        `save_features` other methods can be evaluated later on the saved features (`efcil.experiment.reevaluate`).
        """
        self.experiment, self.data_directory, self.out, self.execution, self.reporter = (
            experiment,
            directory,
            out,
            execution,
            reporter,
        )
        self.world = execution.world  # of several processes the first one reads and writes the directory
        self.command, self.checkpoint_seconds, self.compare = command, checkpoint_seconds, compare
        self.snapshots, self.save_features = snapshots, save_features
        self.concurrent_runs = concurrent_runs  # on the same device, itself included: its seconds depend on it
        self.home = out / "trajectory" if compare else out
        self.store = CheckpointStore(self.home / "checkpoints", reporter.note)
        self.log = MetricsLog(self.home / "metrics.jsonl", trackers)
        self.matrices: dict[str, AccuracyMatrix] = {}
        self.seconds = 0.0
        self.training = False  # from here on a signal waits for the end of a step
        self.stop = threading.Event()  # set from outside: the run ends after this step, and saves it
        self.started = threading.Event()  # of several at once: the next may begin

    # -- what others see ---------------------------------------------------------------------------------------------

    def execute(self, resume: bool) -> list[Summary]:
        """Run to the end, from the start or from where it stood; return the summaries."""
        config = self.home / "config.yaml"
        self.execution.start_lazy_init()
        with ExitStack() as held:
            with self.world.sync_errors():
                if self.world.is_main:
                    self._check_free(config, resume)
                    held.enter_context(run_lock(self.out))
                    held.callback(self.store.settle)  # the directory is let go when nothing is written there any more
                    remove_temporary_files(self.out)
            with self.world.sync_errors():
                with self.world.local_main_first():  # it fills the cache that the others read
                    data = self._load()
                self._prepare(data)
            if self.world.size > 1:
                self.world.check_equal("the data set's fingerprint", data.fingerprint())
            with self.world.sync_errors(), io_errors(self.out):
                if self.world.is_main:
                    self._write_or_check_config(config, data)
            with io_errors(self.out), closing(self.log):
                return self._learn(data)

    def _check_free(self, config: Path, resume: bool) -> None:
        if config.exists() and not resume:
            raise RunError(
                f"{self.out} already holds {self._describe_existing()}: pass --resume to go on, or choose another --out"
            )

    def _load(self) -> DataSet:
        data = datasets.load(
            self.experiment.dataset,
            self.data_directory,
            _resolve_aspect(self.experiment),
            lambda done, total: self.reporter.progress("decoding images", done, total),
        )
        for text in data.notes:
            self.reporter.note(text)
        return (
            data.split_validation(self.experiment.val_fraction, self.experiment.seed)
            if self.experiment.val_fraction
            else data
        )

    def _describe_existing(self) -> str:
        found = sorted(self.out.glob("summary.json")) or sorted(self.out.glob("*/summary.json"))
        try:
            names = [json.loads(path.read_text(encoding="utf-8")) for path in found]
            parts = [f"{s['method']} on {s['dataset']} ({s['tasks_done']} of {s['tasks']} tasks)" for s in names]
            return "a run of " + ", ".join(parts) if parts else "a run"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return "a run"

    def _write_or_check_config(self, config: Path, data: DataSet) -> None:
        """Write config.yaml, or check that the one that is there describes the same run."""
        order = hashlib.sha256(self.stream.order.tobytes()).hexdigest()[:16]  # a file's name is not its contents
        here = {**self.experiment.fingerprint(), "class_order": order, "fingerprint": data.fingerprint()}
        fingerprint = json.loads(json.dumps(here))
        if config.exists():
            try:
                tree = load_yaml(config.read_text(encoding="utf-8"))
                there, began_on = tree["run"], tree["machine"]
            except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError):
                raise RunError(
                    f"{config} cannot be read; choose another --out, or, if the run was begun with these very options, "
                    "delete that file and --resume"
                ) from None
            differing = differences(there, fingerprint)
            if differing:
                words = "; ".join(differing[:4])
                raise RunError(f"{self.out} holds another run ({words}): choose another --out or the same options")
            if began_on != self._execution():
                words = "; ".join(differences(began_on, self._execution()))
                self.reporter.note(f"the run began on another machine ({words}): its last digits may differ")
            return
        self.home.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(
            {
                "run": fingerprint,
                "machine": self._execution(),
                "versions": versions(),
                "commit": commit(),
                "command": self.command,
            },
            sort_keys=False,
            allow_unicode=True,
        )
        atomic_write_text(config, text)

    def _execution(self) -> dict[str, Any]:
        m = self.execution
        return {**m.description, "threads": torch.get_num_threads(), "compile": m.compile, "cuda_graphs": m.cuda_graphs}

    # -- the run itself ----------------------------------------------------------------------------------------------

    def _prepare(self, data: DataSet) -> None:
        """Build everything that can still be refused, before the directory is claimed."""
        self._began = time.perf_counter()
        experiment, execution = self.experiment, self.execution
        order = class_order(experiment.order, data.class_names)
        self.class_names = [data.class_names[label] for label in order]
        self.stream = TaskStream(data.train, order, experiment.sizes(len(data.class_names)))
        self.learner = LEARNERS[experiment.learner](
            experiment.training, data.channels, execution, experiment.seed, data.size
        )
        check_views(self.learner, self.learner.transform(data.size))
        self.learner.check(len(data.class_names))
        # A method with several classifiers is measured with each of them.
        self.trajectory = Trajectory(self.learner, experiment.methods, freezes=experiment.learner in FROZEN)

    def _learn(self, data: DataSet) -> list[Summary]:
        execution, stream, learner, trajectory = self.execution, self.stream, self.learner, self.trajectory
        self.evaluator = evaluator = Evaluator(data, stream, execution)
        self.matrices = {label: AccuracyMatrix(evaluator.totals()) for label in trajectory.parts}
        point = self._latest_checkpoint()
        finished = None
        with self.world.sync_errors():
            if self.world.is_main and point is not None and point.task == len(stream):
                finished = self._finished_summaries(point.meta)
        finished = self.world.broadcast_object(finished)
        if finished is not None:  # nothing to do, and nothing to claim anew
            self.reporter.note("this run is finished")
            self.reporter.on_finished(finished, str(self.out))
            return finished
        task, epoch, optimizer_state, mid_epoch, earlier = 0, 0, None, None, 0.0
        if point is not None:
            with _checkpoint_errors(self.store.directory):
                task, epoch, earlier = point.task, point.epoch or 0, float(point.meta["seconds"])
                self._restore(point.tensors, point.meta)
                if point.epoch is not None:
                    learner.load_state(_to_device(execution, point.partial))
                    optimizer_state = _strip_prefix(point.partial, "optimizer.")
                    if steps := int(point.meta.get("steps", 0)):
                        loop = _strip_prefix(point.partial, "loop.")
                        mid_epoch = MidEpochState(epoch, steps, loop["total"], loop.get("noise"))
        if self.world.is_main:
            self.log.truncate(task, epoch)
        self._clock = lambda: earlier + time.perf_counter() - self._began
        self._saved = time.monotonic()
        epochs = [sum(stage.epochs for stage in learner.stages(t)) for t in range(len(stream))]
        self._epochs_per_task = epochs[-1]  # of a task
        problem = f"{data.name}: {len(data.class_names)} classes in {len(stream)} tasks"
        title = f"{', '.join(self.experiment.methods)} on {problem}, {execution.name}"
        if point is not None:
            where = f", epoch {epoch} of task {task + 1}" if epoch else f", in task {task + 1}" if mid_epoch else ""
            self.reporter.note(f"going on after task {task}{where}")
        self.reporter.on_started(title, epochs, sum(epochs[:task]) + epoch)
        self.training = True
        run_protocol(
            stream,
            data,
            evaluator,
            trajectory,
            self.matrices,
            self,
            first_task=task,
            first_epoch=epoch,
            optimizer_state=optimizer_state,
            mid_epoch=mid_epoch,
            stop=self.stop.is_set,
            on_interrupt=self.on_interrupt,
            on_task_features=self._save_features if self.save_features else lambda features: None,
        )
        if not self.world.is_main:
            return []
        self.store.wait()
        self.seconds = self._clock()
        summaries = self._write_summaries()
        atomic_write_text(self.out / "report.html", html_page(summaries))
        self.reporter.on_finished(summaries, str(self.out))
        self.training = False
        return summaries

    def _latest_checkpoint(self) -> Checkpoint | None:
        """Return where the run stands: the first process reads it and gives it to the others."""
        world = self.world
        with world.sync_errors():
            point = self.store.latest() if world.is_main else None
        if world.size == 1:
            return point
        head = world.broadcast_object(None if point is None else {"at": [point.task, point.epoch], "meta": point.meta})
        if head is None:
            return None
        tensors, partial = (world.broadcast_tensors(getattr(point, name, {})) for name in ("tensors", "partial"))
        task, epoch = head["at"]
        return Checkpoint(task, epoch, tensors, head["meta"], partial)

    def _finished_summaries(self, meta: Mapping[str, Any]) -> list[Summary] | None:
        """Return the summaries of a finished run, if all are there and say what the last checkpoint says."""
        with _checkpoint_errors(self.store.directory):
            self.matrices = {
                label: AccuracyMatrix.from_json(meta["matrices"][label]) for label in self.trajectory.parts
            }
        found = []
        for label in self.experiment.methods:
            try:
                summary = read_json(self._summary_file(label))
            except EfcilError:
                return None
            known = json.loads(json.dumps(self._summary(label)))
            aside = dict.fromkeys((*TIMING, "commit", "command"))  # of when it was run
            if not isinstance(summary, dict) or {**summary, **aside} != {**known, **aside}:
                return None
            found.append(summary)
        return found

    def _restore(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        if not tensors:
            return
        self.learner.load_state(_to_device(self.execution, _strip_prefix(tensors, "learner.")))
        self.trajectory.load_state_dict(_to_device(self.execution, _strip_prefix(tensors, "trajectory.")))
        for label in self.trajectory.parts:
            self.matrices[label] = AccuracyMatrix.from_json(meta["matrices"][label])

    def after_epoch(self, report: EpochReport, optimizer: Optimizer) -> None:
        """Log the epoch; keep it when the last checkpoint is old enough."""
        if not self.world.is_main:
            return
        if report.task or (report.epoch + 1) * STAGGER >= self._epochs_per_task:
            self.started.set()
        self.log.add(task=report.task + 1, epoch=report.epoch + 1, loss=report.loss, lr=report.lr)
        self.reporter.on_epoch(report)
        now = time.monotonic()
        if now - self._saved >= self.checkpoint_seconds and report.epoch + 1 < report.epochs:
            tensors, meta = self._mid_task_state(optimizer), {"seconds": self._clock()}
            self.store.save_epoch(report.task + 1, report.epoch + 1, tensors, meta)
            self._saved = time.monotonic()

    def _mid_task_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        optimizer_state = {f"optimizer.{name}": value for name, value in optimizer.state_dict().items()}
        return self.learner.state(teacher=True) | optimizer_state

    def on_interrupt(self, task: int, mid_epoch: MidEpochState, optimizer: Optimizer) -> None:
        """Keep the middle of an epoch, and wait until it is on disk."""
        if not self.world.is_main:
            return
        tensors = self._mid_task_state(optimizer) | {"loop.total": mid_epoch.loss_sum}
        if mid_epoch.generator_state is not None:
            tensors["loop.noise"] = mid_epoch.generator_state
        self.store.save_epoch(task + 1, mid_epoch.epoch, tensors, {"seconds": self._clock(), "steps": mid_epoch.steps})
        self.store.wait()

    def on_training_end(self, task: int) -> None:
        """Tell that training is over."""
        self.reporter.on_solve(task)

    def after_task(self, task: int) -> None:
        """Log and keep everything; end here where a signal says so, in whichever process it was."""
        if self.snapshots and task in (1, len(self.stream) - 1):
            self._write_snapshot(task)
        if self.world.is_main:
            self._save_task(task)
        if self.world.any(self.stop.is_set()) and task + 1 < len(self.stream):
            self.store.wait()
            self.world.barrier()
            raise TrainingInterrupted

    def _save_task(self, task: int) -> None:
        accuracies = {label: matrix.A_t[-1] for label, matrix in self.matrices.items()}
        self.log.add(task=task + 1, A_t=accuracies)
        tensors = {f"learner.{k}": v for k, v in self.learner.state(teacher=False).items()}
        tensors |= {f"trajectory.{k}": v for k, v in self.trajectory.state_dict().items()}
        matrices = {label: matrix.to_json() for label, matrix in self.matrices.items()}
        self.seconds = self._clock()
        self.store.save_task(task + 1, tensors, {"seconds": self.seconds, "matrices": matrices})
        self._saved = time.monotonic()
        self._write_summaries()
        self.reporter.on_task(task, len(self.stream), accuracies)

    def _save_features(self, task: TaskFeatures) -> None:
        """Write a task's features and those of the test images seen so far, as methods see them."""
        seen, labels = self.evaluator.test_images(task.index)
        r = self.learner
        kept = {"labels": task.labels, "test_labels": labels, "new": task.new()}
        kept["test"] = extract(r.feature_extractor(r.backbone), seen, self.execution, r.options.crop)
        if task.index:
            kept["old"] = task.old()
            if task.has_pseudo_images:
                kept |= {"old_pseudo": task.old("pseudo"), "new_pseudo": task.new("pseudo")}
        if r.anchor is not None:
            kept["first"] = task.with_first_backbone().new()
            kept["test_first"] = extract(r.feature_extractor(r.first_backbone), seen, self.execution, r.options.crop)
        if not self.world.is_main:
            return
        path = self.home / FEATURES_DIR / f"task-{task.index + 1:02d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        meta = {
            "task": task.index + 1,
            "sizes": list(self.stream.sizes),
            "totals": self.evaluator.totals(),
            "layout": r.feature_layout,
        }
        save_tensors(path, kept, meta)

    def _write_snapshot(self, task: int) -> None:
        """Write test features under both backbones and statistics: before the checkpoint, so that none is missing."""
        seen, labels = self.evaluator.test_images(task)
        r, kept = self.learner, {}
        with self.execution.prevent_capture():
            for name, backbone in (("before", r.old_backbone), ("after", r.backbone)):
                kept[name] = extract(r.feature_extractor(backbone), seen, self.execution, r.options.crop)
        if not self.world.is_main:
            return
        for label in self.snapshots:
            stats = self.trajectory.stats(label)
            if stats is not None:
                kept |= {f"stats/{label}/{key}": tensor for key, tensor in stats.state().items()}
        path = self.out / "snapshots" / f"task-{task + 1:02d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_tensors(path, {**kept, "labels": labels}, {"task": task + 1, "class_names": self.class_names})

    def _summary_file(self, label: str) -> Path:
        return (self.out / label.replace("/", "_") if self.compare else self.out) / "summary.json"

    def _summary(self, label: str, commit: str = "") -> Summary:
        """Return what is known of a method; with several classifiers of each, the main one's numbers in front."""
        method, options = self.experiment.methods[label]
        about = (self.stream.sizes, self.seconds, self.execution, self.command, commit, self.concurrent_runs)
        own = summary_header(self.experiment, label, *about)
        heads = {head: self.matrices[f"{label}/{head}"].summary() for head in method.heads}
        if not heads:
            return own | self.matrices[label].summary()
        return own | heads[method.default_head(options)] | {"head": method.default_head(options), "heads": heads}

    def _write_summaries(self) -> list[Summary]:
        summaries, of = [], commit()
        for label in self.experiment.methods:
            summaries.append(summary := self._summary(label, of))
            self._summary_file(label).parent.mkdir(exist_ok=True)
            write_json(self._summary_file(label), summary)
        return summaries


def summary_header(
    experiment: Experiment,
    label: str,
    sizes: Sequence[int],
    seconds: float,
    execution: Execution,
    command: str,
    commit: str,
    concurrent_runs: int = 1,
) -> Summary:
    """Return what a summary says of a method beside its accuracies."""
    method, options = experiment.methods[label]
    return {
        "method": label,
        "title": method.title,
        "preset": experiment.preset,
        "dataset": experiment.eval_split,
        "tasks": len(sizes),
        "task_sizes": list(sizes),
        "order": experiment.order,
        "seed": experiment.seed,
        "seconds": round(seconds, 3),
        **execution.description,
        "concurrent_runs": concurrent_runs,
        "commit": commit,
        "command": command,
        "options": options.model_dump(mode="json"),
        "training": experiment.training.model_dump(mode="json"),
        "data": experiment.data.model_dump(mode="json"),
    }


def _resolve_aspect(experiment: Experiment) -> Options:
    """Return the options of the data: whole pictures where every way into a network begins with a crop of them."""
    data, training = experiment.data, experiment.training
    if not isinstance(data, datasets.FilesOptions):
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


def _strip_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _to_device(execution: Execution, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(execution.device) for name, tensor in tensors.items()}
