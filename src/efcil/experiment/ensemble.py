"""Ensembles: the same method trained with several seeds, its standardized scores added.

Each run is followed through its saved features (`efcil.experiment.reevaluate`), and for each test image the scores of a
run are brought to mean 0 and variance 1 over the classes seen before they are added (of two classes each run thus has
one vote, and two runs that disagree are a tie). An ensemble of k runs costs k training runs, k networks, k times the
class statistics, and k forward passes per image. It is a method of its own, `dpcr:ensemble=4`, and its summary has
the seeds, the seconds of all training runs and the accuracy of each run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from efcil.accel.backend import Backend
from efcil.core.gaussian import standardized
from efcil.core.metrics import AccuracyMatrix
from efcil.errors import ConfigError, RunError
from efcil.experiment.reevaluate import config_of, evaluated_tasks, experiment_of, home_of, write_results
from efcil.experiment.specification import commit
from efcil.experiment.summaries import summary_header
from efcil.report import load_summaries

DIFFERENT = ("seed", "methods")  # what may differ between the runs of an ensemble
DATA = ("class_order", "fingerprint")


def ensemble(
    sources: Sequence[Path], methods: str, overrides: Sequence[str], device: str, command: str
) -> list[dict[str, Any]]:
    """Return a summary of the ensemble for each method."""
    began = time.perf_counter()
    names = [name.strip() for name in methods.split(",") if name.strip()]
    homes = [home_of(source) for source in sources]
    configs = [config_of(home)["run"] for home in homes]
    check_members(sources, configs)
    backend = Backend.choose(device)
    experiments = [experiment_of(config, names, overrides) for config in configs]
    trained = configs[0]["learner"]
    together: dict[str, AccuracyMatrix] = {}
    alone: dict[str, list[AccuracyMatrix]] = {}
    sizes: list[int] = []
    followed = [evaluated_tasks(*member, trained, backend) for member in zip(homes, experiments, strict=True)]
    for index, tasks in enumerate(zip(*followed, strict=True)):
        first, sizes = tasks[0], tasks[0].sizes
        for label in first.scores:
            scores = [task.scores[label] for task in tasks]
            total = sum(standardized(one) for one in scores)
            together.setdefault(label, AccuracyMatrix(first.totals)).record(index, *first.hits(total))
            singles = alone.setdefault(label, [AccuracyMatrix(first.totals) for _ in tasks])
            for matrix, one in zip(singles, scores, strict=True):
                matrix.record(index, *first.hits(one))
    seconds = sum(map(_seconds, sources)) + time.perf_counter() - began
    about = (sizes, seconds, backend, command, commit())
    return [
        summary_header(replace(experiments[0], methods={label: part}), label, *about)
        | together[label].summary()
        | {
            "method": f"{label}{',' if ':' in label else ':'}ensemble={len(homes)}",
            "seed": ", ".join(str(config["seed"]) for config in configs),
            "ensemble": [
                {"seed": config["seed"], "A_f": one.summary()["A_f"], "A_avg": one.summary()["A_avg"]}
                for config, one in zip(configs, alone[label], strict=True)
            ],
        }
        for label, part in experiments[0].methods.items()
    ]


def check_members(sources: Sequence[Path], configs: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError unless the runs differ in their seeds and methods alone."""
    if len(sources) < 2:
        raise ConfigError("an ensemble needs at least two runs, with different --seed")
    first, *others = configs
    for source, other in zip(sources[1:], others, strict=True):
        for key in sorted({*first, *other} - {*DIFFERENT}):
            if first.get(key) != other.get(key):
                other_split = first.get("val_fraction") and key in DATA
                why = "every seed holds out other images" if other_split else "its runs may differ in --seed alone"
                raise ConfigError(f"no ensemble: {sources[0]} and {source} differ in {key}; {why}")
    seeds = [config["seed"] for config in configs]
    if len({*seeds}) < len(seeds):
        raise ConfigError(f"the seeds of the runs are {', '.join(map(str, seeds))}; an ensemble needs different ones")


def _seconds(source: Path) -> float:
    """Return how long a run took."""
    found = [s for s in load_summaries(source) if "reevaluated_from" not in s and s.get("tasks_done") == s.get("tasks")]
    if not found:
        raise RunError(f"{source}: not finished; resume it first")
    return max(float(summary["seconds"]) for summary in found)


def execute(
    sources: Sequence[Path], methods: str, overrides: Sequence[str], out: Path, device: str, quiet: bool, command: str
) -> list[dict[str, Any]]:
    """Evaluate an ensemble, write its summaries and a page, and print the table and what each run reaches alone."""
    summaries = ensemble(sources, methods, overrides, device, command)
    write_results(summaries, out, quiet)
    if not quiet:
        for summary in summaries:
            alone = ", ".join(f"{one['A_f']:.2f}" for one in summary["ensemble"])
            print(f"{summary['method']}: A_f of its runs alone {alone}; {summary['seconds']:.0f} s in all")
    return summaries
