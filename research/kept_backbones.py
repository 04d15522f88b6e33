"""What the backbones of one trajectory say together.

    python research/kept_backbones.py train folder DIR --data DATA [--tasks 10] [--order 4] [--mirrored]
    python research/kept_backbones.py train digits DIR [--tasks 5] ...
    python research/kept_backbones.py measure DIR [--store "half scale"]

`train` learns LwF, keeps the backbone at four points of each task, and writes the features of all images under all of
them: of the half-scale problem of `half_scale.py` with the settings of the log's ten tasks (`folder`), or of a built-in
data set with its preset `quick`, a quarter of whose training images are held out and measured on. `measure` evaluates
on these features:

- the map made anew during training: chains of maps between the points of a task, against one from end to end;
- flip averaging alone: means over an image and its mirror image, for DPCR's classifier;
- a backbone that is frozen after each task in turn, with the statistics that were moved until then;
- a rule that freezes by cross-validation on the images of the current task alone;
- two backbones at once: standardized scores of a frozen one and of the one that moves, added.

Old images are never used but for the row that says so (true statistics). No test image is used.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efcil import data as datasets
from efcil.accel.backend import Backend
from efcil.core.class_stats import ClassStats
from efcil.core.metrics import AccuracyMatrix
from efcil.core.recursive_ridge import ExpandedRidge, expansion_matrix
from efcil.core.ridge import normalize_columns, ridge_weight
from efcil.experiment.ensemble import standardized
from efcil.experiment.specification import ExperimentSpec, commit, resolve
from efcil.features import TaskFeatures
from efcil.files import read_json_lines, write_json_lines
from efcil.freezing import Worth, estimate
from efcil.learners import LEARNERS, Learner
from efcil.methods import METHODS
from efcil.protocol import Evaluator, run_protocol
from efcil.shift.dual_projection import DualProjectionOptions, estimate_shift
from efcil.tasks import TaskStream, order_of
from efcil.tensor_files import load_tensors, save_tensors
from efcil.training.callbacks import Callback, EpochReport
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import to_device
from efcil.training.state import TrainState
from efcil.training.trainer import Trainer
from efcil.trajectory import Trajectory

STORED = Path(__file__).resolve().parent.parent / "results" / "research.jsonl"
SETTINGS = {  # the log's "LwF, distillation 10, AutoAugment"
    "data.short_side": 16,
    "stem": "cifar",
    "augment": "cifar-autoaugment",
    "batch_size": 64,
    "distill_weight": 10,
    "first.epochs": 60,
    "first.milestones": [20, 40, 50],
    "first.lr": 0.1,
    "first.weight_decay": 5e-4,
    "later.epochs": 40,
    "later.milestones": [18, 36],
    "later.lr": 0.05,
    "later.weight_decay": 2e-4,
    "backbone": "resnet10",
    "width": 16,
    "ridge": 100,
}
HELD_OUT, SEED = 0.25, 0
POINTS = 4  # of a task at which the backbone is kept, its end included
BUFFER, EXPANDED_RIDGE = 1000, 0.1  # of ACIL


# --- training ---------------------------------------------------------------------------------------------------------


class Keeper(Callback):
    """Keeps the backbone at the points of each task."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.kept: dict[tuple[int, int], dict[str, Tensor]] = {}  # (task, point from 1) -> weights

    def on_epoch_end(self, report: EpochReport, state: TrainState) -> None:
        """Copy the weights where a point is reached."""
        for point in range(1, POINTS + 1):
            if state.epoch == round(point * report.epochs / POINTS):
                weights = {name: value.clone() for name, value in self.learner.backbone.state_dict().items()}
                self.kept[report.task, point] = weights

    def on_task_end(self, task: int) -> None:
        """Say how far it is."""
        print(f"task {task + 1}", flush=True)


def train(name: str, source: Path | None, out: Path, tasks: int, order: str, mirrored: bool) -> None:
    """Learn the trajectory and write the features of all images under all backbones."""
    began = time.perf_counter()
    own = {"overrides": SETTINGS} if name == "folder" else {"preset": "quick"}
    experiment = resolve(ExperimentSpec(("dpcr", "lwf"), name, tasks=tasks, order=order, seed=SEED, **own))
    data = datasets.load(name, source, experiment.data)
    if name != "folder":
        data = data.split_validation(HELD_OUT, SEED)
    backend = Backend.choose("cpu")
    sizes = experiment.sizes(len(data.class_names))
    stream = TaskStream(data.train, order_of(order, data, sizes), sizes)
    learner = LEARNERS[experiment.learner](experiment.training, data.channels, backend, SEED, data.size)
    trajectory, evaluator = Trajectory(learner, experiment.methods), Evaluator(data, stream, backend)
    matrices = {label: AccuracyMatrix(evaluator.totals()) for label in trajectory.parts}
    keeper = Keeper(learner)
    run_protocol(stream, data, evaluator, trajectory, matrices, Trainer(learner, [keeper]))
    seconds = time.perf_counter() - began
    positions = stream.positions(data.train.labels)
    rows = np.argsort(positions, kind="stable")
    train_images = ImageBatches.of(to_device(data.train.images[rows], backend.device), data, backend)
    task_of = stream.task_of_class()[positions[rows]]
    tensors = {"labels": torch.from_numpy(positions[rows]), "test_labels": evaluator.labels}
    for (task, point), weights in keeper.kept.items():
        learner.backbone.load_state_dict(weights)
        look = partial(extract, learner.backbone, backend=backend)
        if point < POINTS:  # only the task's own images are needed
            own = train_images.images[torch.from_numpy(np.flatnonzero(task_of == task))]
            tensors[f"point/{task}/{point}"] = look(pixels=train_images.with_images(own))
            continue
        for part, pixels in (("train", train_images), ("test", evaluator.pixels)):
            tensors[f"{part}/{task}"] = look(pixels=pixels)
            if mirrored:
                tensors[f"{part}-mirrored/{task}"] = look(pixels=pixels.with_images(pixels.images.flip(-1)))
    meta: dict[str, Any] = {"sizes": list(sizes), "order": order, "seed": SEED, "seconds": seconds, "commit": commit()}
    options: Any = experiment.methods["dpcr"][1]
    meta |= {"dataset": name, "ridge": options.ridge, "shift_ridge": options.shift_ridge}
    meta["A_t"] = {label: matrix.summary()["A_t"] for label, matrix in matrices.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_tensors(out / "features.safetensors", tensors, meta)
    print({label: round(accuracies[-1], 2) for label, accuracies in meta["A_t"].items()}, f"{seconds:.0f} s")


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Kept:
    """Features of all images under the backbones of a trajectory."""

    tensors: dict[str, Tensor]
    sizes: list[int]
    ridge: float  # of DPCR's classifier
    mirrored: bool = False  # means over an image and its mirror image
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = np.cumsum(self.sizes).tolist()

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return len(self.sizes)

    def _features(self, part: str, backbone: int) -> Tensor:
        plain = self.tensors[f"{part}/{backbone}"]
        return (plain + self.tensors[f"{part}-mirrored/{backbone}"]) / 2 if self.mirrored else plain

    def rows(self, task: int) -> Tensor:
        """Places of a task's training images."""
        labels = self.tensors["labels"]
        return ((labels >= self.ends[task] - self.sizes[task]) & (labels < self.ends[task])).nonzero()[:, 0]

    def learned(self, backbone: int, task: int) -> Tensor:
        """Features of a task's training images under the backbone after a task."""
        return self._features("train", backbone)[self.rows(task)]

    def labels(self, task: int) -> Tensor:
        """Labels of a task's training images."""
        return self.tensors["labels"][self.rows(task)]

    def stats(self, backbone: int, task: int) -> ClassStats:
        """Statistics of a task's classes under a backbone."""
        return ClassStats.from_features(self.learned(backbone, task), self.labels(task))

    def points(self, task: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield features of a task's images before and after each of `count` equal parts of its training."""
        found = [self.learned(task - 1, task)]
        found += [self.tensors[f"point/{task}/{p}"] for p in range(POINTS // count, POINTS, POINTS // count)]
        found.append(self.learned(task, task))
        return pairwise(found)

    def accuracy(self, backbone: int, task: int, score: Callable[[Tensor], Tensor]) -> float:
        """Accuracy after a task, of test images under a backbone."""
        labels = self.tensors["test_labels"]
        seen = labels < self.ends[task]
        return percent(score(self._features("test", backbone)[seen]), labels[seen])


def percent(scores: Tensor, labels: Tensor) -> float:
    """Share of rows whose largest score is at their label."""
    return 100 * float((scores.argmax(1) == labels).double().mean())


def ridge_scores(stats: ClassStats, ridge: float) -> Callable[[Tensor], Tensor]:
    """DPCR's classifier of these statistics."""
    weight = normalize_columns(ridge_weight(stats, ridge))
    return lambda features: features.to(weight) @ weight


def moved(kept: Kept, stats: ClassStats, task: int, parts: int, options: DualProjectionOptions) -> ClassStats:
    """Statistics moved through a task, by the product of the maps of its parts."""
    shift = reduce(torch.matmul, [estimate_shift(old, new, options) for old, new in kept.points(task, parts)])
    return stats.transform(shift)


def moving(kept: Kept, parts: int, options: DualProjectionOptions) -> list[ClassStats]:
    """Statistics of all classes seen after each task, under its backbone."""
    found = [kept.stats(0, 0)]
    for task in range(1, kept.tasks):
        found.append(moved(kept, found[-1], task, parts, options).merge(kept.stats(task, task)))
    return found


def frozen_after(kept: Kept, history: list[ClassStats], last: int) -> list[float]:
    """A_t with the backbone frozen after a task: later classes have their true statistics under it."""
    accuracies = [kept.accuracy(task, task, ridge_scores(history[task], kept.ridge)) for task in range(last + 1)]
    stats = history[last]
    for task in range(last + 1, kept.tasks):
        stats = stats.merge(kept.stats(last, task))
        accuracies.append(kept.accuracy(last, task, ridge_scores(stats, kept.ridge)))
    return accuracies


def judged(kept: Kept, options: DualProjectionOptions) -> list[Worth | None]:
    """What each task from the second on is worth to DPCR, as the learner `lwf-self-freezing` estimates it."""
    method, found = METHODS["dpcr"], []
    own = method.options(ridge=kept.ridge, **{**options.model_dump(), "rank_rule": "none"})
    trajectory = Trajectory(None, {"dpcr": (method, own)})
    for task in range(kept.tasks):
        saved = {"labels": kept.labels(task), "new": kept.learned(task, task)}
        saved |= {"old": kept.learned(task - 1, task)} if task else {}
        features = TaskFeatures.from_saved(task, 0, saved, (saved["new"].shape[1],))
        if task:
            found.append(estimate(trajectory, "dpcr", features, kept.ends[task - 1]))
        trajectory.update(features)
    return found


def expanded(kept: Kept, backbone: int, seed: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield ACIL's classifier on a frozen backbone after each task."""
    source = torch.Generator().manual_seed(seed)
    dim = kept.learned(backbone, 0).shape[1]
    ridge = ExpandedRidge(expansion_matrix(dim, BUFFER, source), torch.relu_, EXPANDED_RIDGE)
    for task in range(kept.tasks):
        first = kept.ends[task] - kept.sizes[task]
        targets = torch.nn.functional.one_hot(kept.labels(task) - first).double()
        ridge.learn(kept.learned(backbone, task), targets, first)
        yield ridge.scores


def together(kept: Kept, history: list[ClassStats], seed: int) -> tuple[list[float], list[float]]:
    """A_t of ACIL on the first backbone, and of its standardized scores with those of the moving one added."""
    labels, alone, both = kept.tensors["test_labels"], [], []
    for task, score in enumerate(expanded(kept, 0, seed)):
        seen = labels < kept.ends[task]
        still = score(kept._features("test", 0)[seen])
        moves = ridge_scores(history[task], kept.ridge)(kept._features("test", task)[seen])
        alone.append(percent(still, labels[seen]))
        both.append(percent(standardized(still) + standardized(moves), labels[seen]))
    return alone, both


def measure(out: Path) -> Iterator[dict[str, Any]]:
    """Yield what was measured, line by line."""
    tensors, meta = load_tensors(out / "features.safetensors")
    kept = Kept(tensors, meta["sizes"], meta["ridge"])
    flipped = Kept(tensors, meta["sizes"], meta["ridge"], mirrored=True)

    def line(method: str, accuracies: list[float], **more: Any) -> dict[str, Any]:
        return {"method": method, "A_f": accuracies[-1], "A_avg": float(np.mean(accuracies)), "A_t": accuracies, **more}

    def followed(kept: Kept, history: list[ClassStats]) -> list[float]:
        return [kept.accuracy(task, task, ridge_scores(stats, kept.ridge)) for task, stats in enumerate(history)]

    plain = DualProjectionOptions(shift_ridge=meta["shift_ridge"])
    chosen = DualProjectionOptions(shift_ridge_rel="auto")
    for options, name in ((plain, ""), (chosen, ", ridge of the map chosen")):
        history = moving(kept, 1, options)
        yield line(f"dpcr{name}", followed(kept, history))
        for parts in (2, 4):
            yield line(f"dpcr, {parts} maps a task{name}", followed(kept, moving(kept, parts, options)))
        for last in range(kept.tasks - 1):
            yield line(f"dpcr, frozen after task {last + 1}{name}", frozen_after(kept, history, last))
        worths = judged(kept, options)
        stays = (task for task, worth in enumerate(worths) if worth is None or worth.stay >= worth.move)
        last = next(stays, kept.tasks - 1)
        yield line(f"dpcr, freezes itself{name}", frozen_after(kept, history, last), frozen=last + 1, judged=worths)
        alone, both = together(kept, history, meta["seed"])
        if options is plain:
            yield line("acil:buffer=1000", alone)
            if "test-mirrored/0" in tensors:
                yield line("dpcr, mirrored", followed(flipped, moving(flipped, 1, plain)))
            true = [[kept.stats(task, past) for past in range(task + 1)] for task in range(kept.tasks)]
            merged = [reduce(ClassStats.merge, stats) for stats in true]
            yield line("dpcr, true statistics", followed(kept, merged))
        yield line(f"dpcr and acil:buffer=1000 together{name}", both)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="do", required=True)
    training = parts.add_parser("train")
    training.add_argument("dataset", choices=("folder", "digits", "glyphs"))
    training.add_argument("out", type=Path)
    training.add_argument("--data", type=Path)
    training.add_argument("--tasks", type=int, default=10)
    training.add_argument("--order", default="4")
    training.add_argument("--mirrored", action="store_true", help="features of mirror images as well")
    measuring = parts.add_parser("measure")
    measuring.add_argument("out", type=Path)
    measuring.add_argument("--store", metavar="WHAT", help="add the lines to results/research.jsonl under this name")
    given = parser.parse_args()
    if given.do == "train":
        train(given.dataset, given.data, given.out, given.tasks, given.order, given.mirrored)
        return
    lines = []
    for found in measure(given.out):
        print(f"{found['A_f']:6.2f} {found['A_avg']:6.2f}  {found['method']}", found.get("frozen", ""), flush=True)
        lines.append(found)
    if given.store:
        _, meta = load_tensors(given.out / "features.safetensors")
        about = {"name": "kept-backbones", "what": given.store, "tasks": len(meta["sizes"])}
        about |= {key: meta[key] for key in ("dataset", "order", "seed", "seconds", "commit")}
        same = ("name", "what", "order")
        before = [s for s in read_json_lines(STORED) if any(s.get(key) != about[key] for key in same)]
        write_json_lines(STORED, [*before, *(about | found for found in lines)])


if __name__ == "__main__":
    main()
