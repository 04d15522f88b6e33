"""Runs required for the paper's tables and figures, and their results; each trajectory is trained once."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import ValidationError

from efcil.config import flat
from efcil.errors import RunError
from efcil.experiment.specification import Experiment, ExperimentSpec, resolve
from efcil.files import read_json, read_json_lines
from efcil.methods import METHODS
from efcil.report.load import TIMING, Run, Summary, requested_precision, split_heads
from efcil.shift.dual_projection import DualProjectionOptions

ORDERS = ("identity", "1992", "1993")
PRESET, SEED = "paper", 0
SNAPSHOTS = "snapshots"

# All methods on an LwF trajectory or its first backbone run together, as backbones are not saved. CIP under the rank
# rule `positive` is the identity on CIFAR-100 (docs/fidelity.md), so exact-rank variants are included.
_TRAJECTORY = (
    *("dpcr", "dp-ncm", "ldc", "adc", "sdc", "lwf-ncm", "lwf", "acil", "ds-al", "fecam"),
    *("rrcr", "rrcr+tssp", "rrcr+tssp+cn", "rrcr+tssp+cip"),
    *("dpcr:rank_rule=numerical", "rrcr+tssp+cip:rank_rule=numerical", "dp-ncm:rank_rule=numerical"),
)
EXEMPLARS = tuple(f"{name}:memory={memory}" for memory in (500, 1000) for name in ("icarl", "podnet", "foster"))
SNAPSHOT_GROUPS = ("dpcr", "dpcr-rrcr", "trajectory")  # keep what figures draw, each for all before it
GROUPS: dict[str, tuple[str, ...]] = {
    "trajectory": _TRAJECTORY,
    "dpcr": ("dpcr",),
    "dpcr-rrcr": ("dpcr", "rrcr"),
    "pass": ("pass",),
    **{label.replace(":", "-"): (label,) for label in EXEMPLARS},
}


@dataclass(frozen=True)
class RunKey:
    """Identity of a run: data set, split, class order and methods on one training run."""

    dataset: str
    tasks: int
    order: str
    group: str

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods evaluated in the run."""
        return GROUPS[self.group]

    @property
    def directory(self) -> PurePath:
        """Path relative to the output directory."""
        return PurePath("runs", self.dataset, f"T{self.tasks}", f"order-{self.order}", self.group)

    def experiment(self, overrides: Sequence[str] = ()) -> Experiment:
        """Resolve the experiment with the preset `paper`."""
        spec = ExperimentSpec(
            self.methods,
            self.dataset,
            tasks=self.tasks,
            order=self.order,
            seed=SEED,
            preset=PRESET,
            overrides=tuple(overrides),
        )
        return resolve(spec)

    @property
    def snapshots(self) -> tuple[str, ...]:
        """The methods whose statistics it keeps for figures."""
        return tuple(m for m in ("dpcr", "rrcr") if m in self.methods) if self.group in SNAPSHOT_GROUPS else ()

    @property
    def larger(self) -> tuple[RunKey, ...]:
        """The runs that measure and keep all that this one does, and more."""
        place = SNAPSHOT_GROUPS.index(self.group) + 1 if self.group in SNAPSHOT_GROUPS else len(SNAPSHOT_GROUPS)
        return tuple(replace(self, group=group) for group in SNAPSHOT_GROUPS[place:])

    def snapshot(self, out: Path, task: int) -> Path:
        """Return the path of the snapshot after a task (1 is the first)."""
        return out / self.directory / SNAPSHOTS / f"task-{task:02d}.safetensors"


@cache
def paper() -> Mapping[str, Mapping[int, Mapping[str, Mapping[str, Any]]]]:
    """Return published results: data set -> tasks -> method -> A_f, A_avg, source, orders."""
    text = resources.files("efcil.reproduce").joinpath("paper.yaml").read_text(encoding="utf-8")
    loaded: Mapping[str, Mapping[int, Mapping[str, Mapping[str, Any]]]] = yaml.safe_load(text)
    return loaded


def published(dataset: str, tasks: int, method: str, source: str) -> Mapping[str, Any] | None:
    """Return the published result of a method in a table, or None."""
    entry = paper().get(dataset, {}).get(tasks, {}).get(method)
    if entry is None:
        return None
    return next((e for e in (entry, *entry.get("also", ())) if e["source"] == source), None)


_NUMBERS = ("A_f", "A_avg", "A_t", "A5_t", "matrix", "old", "new", "forgetting", "bwt")


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, or elementwise of lists; None where a value is missing.

    >>> _mean([[1.0, [2.0, None]], [3.0, [4.0, None]]])
    [2.0, [3.0, None]]
    """
    if all(isinstance(value, list) for value in values):
        return [_mean(place) for place in zip(*values, strict=True)]
    return None if None in values else statistics.fmean(values)


class ResultIndex:
    """Complete summaries by experiment; summaries with other options are excluded.

    Repetitions of an experiment are averaged.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, str, str], list[Summary]] = {}
        self._excluded: dict[tuple[str, str], list[str]] = {}  # excluded summaries by (comparison, reason)

    @property
    def excluded(self) -> list[str]:
        """Descriptions of excluded summaries with reasons."""
        texts = []
        for (comparison, difference), paths in self._excluded.items():
            what = f"{len(paths)} summaries in {comparison}" if len(paths) > 1 else paths[0]
            texts.append(f"excluded {what}: measured with other options ({difference})")
        return texts

    def get(self, dataset: str, tasks: int, order: str, method: str) -> Run | None:
        """Return the result of a method in a class order, or None."""
        summary = self.summary(dataset, tasks, order, method)
        return None if summary is None else Run.of(summary)

    def summary(self, dataset: str, tasks: int, order: str, method: str) -> Summary | None:
        """Return its summary; for repetitions the mean, with time and device of the fastest."""
        repeats = self._found.get((dataset, tasks, order, method), [])
        if not repeats:
            return None
        several = len(repeats) > 1
        means = {key: _mean([r[key] for r in repeats]) for key in _NUMBERS if several and key in repeats[0]}
        fastest = min(repeats, key=lambda repeat: repeat["seconds"])
        return {**repeats[0], **means, **{key: fastest.get(key) for key in TIMING}}

    def read(self, places: Iterable[Path], cells: Iterable[RunKey], overrides: Sequence[str]) -> None:
        """Add summaries at or below `places` that belong to one of `cells`, without duplicates."""
        requested = {(c.dataset, c.tasks, c.order, label): c for c in cells for label in c.methods}
        plans: dict[RunKey, Experiment] = {}
        for comparison, name, summary in (found for place in places for found in _values(place)):
            if not isinstance(summary, dict) or not {"method", "dataset", "A_t", "training"} <= summary.keys():
                continue
            key = (summary["dataset"], summary.get("tasks"), str(summary.get("order")), summary["method"])
            if key not in requested or summary.get("status") != "complete":
                continue
            cell = requested[key]
            experiment = plans.setdefault(cell, cell.experiment(overrides))
            if difference := _difference(summary, experiment):
                self._excluded.setdefault((comparison, difference), []).append(name)
                continue
            for one in split_heads(summary):
                found = self._found.setdefault((*key[:3], one["method"]), [])
                if not any((one["A_t"], one["seconds"]) == (other["A_t"], other["seconds"]) for other in found):
                    found.append({**one, "run_dir": name})


def _values(place: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield comparison, name and content of each JSON file below a directory and each line of stored results."""
    for path in sorted(place.rglob("*.json")):
        comparison = path.parent.parent if path.name == "summary.json" else path.parent
        yield str(comparison), str(path), read_json(path, error=RunError)
    for path in sorted(place.glob("*.jsonl")):
        if path.name != "metrics.jsonl":  # the log of a run, whose last line may be truncated
            for number, line in enumerate(read_json_lines(path, error=RunError), 1):
                run = line.get("run") if isinstance(line, dict) else None
                yield f"{path}#{run}", f"{path}:{number}", line


def _difference(summary: Summary, experiment: Experiment) -> str:
    """Describe how a summary differs from the requested experiment; empty if it does not.

    Options missing in a summary did not exist then and count as the default.
    """
    _, options = experiment.methods[summary["method"]]
    if (summary.get("preset"), summary.get("seed")) != (experiment.preset, experiment.seed):
        return f"preset {summary.get('preset')}, seed {summary.get('seed')}"
    if (asked := requested_precision(summary)) != "auto":
        return f"--precision {asked}"
    stated = {**summary, "options": own_options(summary)}
    for given, wanted in (("options", options), ("training", experiment.training), ("data", experiment.data)):
        try:
            found = type(wanted).model_validate(stated.get(given, {}))
        except ValidationError:
            return f"its {given} are invalid"
        a, b = flat(found), flat(wanted)
        b.pop("lazy", None)  # does not affect pixels
        if words := [f"{key} {json.dumps(a[key])}, not {json.dumps(b[key])}" for key in b if a[key] != b[key]]:
            return "; ".join(words)
    return ""


def own_options(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a summary without those that stored ones have in excess.

    They had a switch `shift`, and shift options for methods without a shift.

    >>> own_options({"method": "rrcr", "options": {"shift": False, "rank_rule": "positive", "ridge": 200.0}})
    {'ridge': 200.0}
    >>> own_options({"method": "dpcr", "options": {"shift": False, "ridge": 200.0}})
    {'shift': False, 'ridge': 200.0}
    """
    options = dict(summary.get("options", {}))
    method = METHODS.get(re.split("[:/]", str(summary["method"]))[0])
    if method is None or options.get("shift") is not (method.shift is not None):
        return options
    gone = {"shift"} | (set() if method.shift else set(DualProjectionOptions.model_fields))
    return {key: value for key, value in options.items() if key not in gone}
