"""Evaluate other methods on a run whose backbones and images are gone, from the saved features of every task.

`efcil compare dpcr cifar100 ... --save-features` saves them; `efcil reevaluate RUN dpcr:ridge=2000,ldc` evaluates
other methods on the same trajectory, with results identical to a joint run. What needs images (ADC's
adversarial ones, augmented views) cannot be computed from features, and is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from efcil.accel.backend import Backend
from efcil.config import read_yaml
from efcil.core.metrics import AccuracyMatrix, count_correct
from efcil.errors import ConfigError, RunError
from efcil.experiment.run_directory import FEATURES, check_format
from efcil.experiment.specification import Experiment, ExperimentSpec, commit, resolve
from efcil.experiment.summaries import summary_header
from efcil.features import TaskFeatures
from efcil.files import atomic_write_text, claim_results, make_directory, write_json
from efcil.learners import LEARNERS
from efcil.methods import FROZEN, MOVABLE, find
from efcil.platform_support import file_name
from efcil.report import html_page, markdown_table
from efcil.tensor_files import load_tensors
from efcil.trajectory import Trajectory


def config_of(home: Path) -> dict[str, Any]:
    """Return what a run's config.yaml says: what is run, and the command that began it."""
    config = home / "config.yaml"
    check_format(config)
    try:
        found = read_yaml(config)
        return {"run": found["run"], "command": found.get("command", "")}
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError):
        raise RunError(f"{config} cannot be read: give the directory of a run or comparison") from None


def experiment_of(run: Mapping[str, Any], methods: Sequence[str], overrides: Sequence[str]) -> Experiment:
    """Resolve other methods as if they had been asked for with the run."""
    for name in methods:
        way = find(name.split(":")[0]).learner
        shared = MOVABLE if LEARNERS.find(run["learner"]).starts_pretrained else ("first-task",)
        if way not in (run["learner"], *shared):
            raise ConfigError(f"{name} trains its own way ({way}), the run is {run['learner']}: run it apart")
    given = {**run["training"], **{f"data.{key}": value for key, value in run["data"].items()}}
    frozen = LEARNERS.find(run["learner"]).starts_pretrained
    spec = ExperimentSpec(
        tuple(methods),
        run["dataset"],
        order=run["order"],
        seed=run["seed"],
        preset=run["preset"],
        overrides=(*(f"{key}={json.dumps(value)}" for key, value in given.items()), *overrides),
        val_fraction=run.get("val_fraction", 0.0),
        learner=run["learner"] if frozen else None,
        **run["split"],
    )
    return resolve(spec)


def _check_saved(trajectory: Trajectory, tensors: Mapping[str, Tensor]) -> None:
    """Refuse what the saved features cannot give, naming the method and the remedy."""
    for label, part in trajectory.parts.items():
        if part.classifier.needs == "learner":
            raise ConfigError(f"{label} needs the learner itself, which is not saved; run it anew")
        if part.method.shift is not None and part.method.shift.needs_images:
            raise ConfigError(f"{label} needs the training images, which are not saved; run it anew")
        if part.first_backbone and "first" not in tensors:
            raise ConfigError(
                f"{label} needs features of the backbone after the first task, which were not saved; compare it with "
                "acil, ds-al or fecam in one run"
            )


@dataclass(frozen=True)
class EvaluatedTask:
    """What methods say of the test images of all classes seen after a task."""

    sizes: list[int]  # classes of each task
    totals: list[int]  # test images of each task
    labels: Tensor  # (n,)
    scores: dict[str, Tensor]  # of each method, (n, classes seen)

    def hits(self, scores: Tensor) -> tuple[list[int], list[int]]:
        """Count top-1 and top-5 hits of each task seen."""
        of_class = torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes)).numpy()
        correct, correct5, _ = count_correct(scores, self.labels, of_class)
        seen = of_class[scores.shape[1] - 1] + 1
        return correct[:seen].tolist(), correct5[:seen].tolist()


def evaluated_tasks(home: Path, experiment: Experiment, trained: str, backend: Backend) -> Iterator[EvaluatedTask]:
    """Follow the statistics of the experiment's methods through the features in `home`, task by task."""
    files = sorted((home / FEATURES).glob("task-*.safetensors"))
    if not files:
        raise RunError(f"{home / FEATURES} holds no features: run it again with --save-features")
    trajectory = Trajectory(None, experiment.methods, freezes=trained in FROZEN)
    for index, file in enumerate(files):
        tensors, meta = load_tensors(file)
        if meta["task"] != index + 1:
            raise RunError(f"{home / FEATURES}: task {index + 1} is missing")
        tensors = {name: tensor.to(backend.device) for name, tensor in tensors.items()}
        _check_saved(trajectory, tensors)
        trajectory.update(TaskFeatures.from_saved(index, experiment.seed, tensors, meta["layout"]))
        scores = {
            label: trajectory.logits(label, tensors["test_first" if part.first_backbone else "test"])
            for label, part in trajectory.parts.items()
        }
        yield EvaluatedTask(meta["sizes"], meta["totals"], tensors["test_labels"], scores)


def reevaluate(
    home: Path, experiment: Experiment, trained: str, backend: Backend, command: str
) -> list[dict[str, Any]]:
    """Read the plan's methods from the features in `home`; return their summaries."""
    began = time.perf_counter()
    matrices: dict[str, AccuracyMatrix] = {}
    for index, task in enumerate(evaluated_tasks(home, experiment, trained, backend)):
        for label, scores in task.scores.items():
            matrices.setdefault(label, AccuracyMatrix(task.totals)).record(index, *task.hits(scores))
    about = (task.sizes, time.perf_counter() - began, backend, command, commit())
    return [summary_header(experiment, label, *about) | matrices[label].summary() for label in experiment.methods]


def home_of(source: Path) -> Path:
    """Return the directory with the features of a run or comparison."""
    return source / "trajectory" if (source / "trajectory" / "config.yaml").exists() else source


def execute(
    source: Path, methods: str, overrides: Sequence[str], out: Path | None, device: str, quiet: bool, command: str
) -> list[dict[str, Any]]:
    """Replay a run, write summaries and a page, and print the table."""
    names = [name.strip() for name in methods.split(",") if name.strip()]
    home = home_of(source)
    config = config_of(home)
    found = reevaluate(
        home,
        experiment_of(config["run"], names, overrides),
        config["run"]["learner"],
        Backend.choose(device),
        command,
    )
    summaries = [summary | {"reevaluated_from": config["command"]} for summary in found]
    write_results(summaries, source / "reevaluation" if out is None else out, quiet)
    return summaries


def write_results(summaries: Sequence[Mapping[str, Any]], out: Path, quiet: bool) -> None:
    """Write a summary for each method and a page, and print the table."""
    places = [f"{file_name(summary['method'])}/summary.json" for summary in summaries]
    claim_results(out, ["report.html", *places])
    for place, summary in zip(places, summaries, strict=True):
        make_directory(out, (out / place).parent)
        write_json(out / place, summary, root=out)
    atomic_write_text(out / "report.html", html_page(summaries))
    if not quiet:
        print(markdown_table(summaries))
        print(f"written to {out}")
