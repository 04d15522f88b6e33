"""The runs that the paper's tables and figures stand on. A trajectory is trained once and serves all of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from efcil.report.load import TIMING, Run, Summary, requested_precision, split_heads

ORDERS = ("identity", "1992", "1993")
PRESET, SEED = "paper", 0
SNAPSHOTS = "snapshots"

# Everything that reads an LwF trajectory or its first backbone: asked for together, since a backbone is gone after its
# task. CIP under the rank rule `positive` is the identity on CIFAR-100 (docs/fidelity.md): the exact rank is here too.
_TRAJECTORY = (
    *("dpcr", "dp-ncm", "ldc", "adc", "sdc", "lwf-ncm", "lwf", "acil", "ds-al", "fecam"),
    *("rrcr", "rrcr+tssp", "rrcr+tssp+cn", "rrcr+tssp+cip"),
    *("dpcr:rank_rule=numerical", "rrcr+tssp+cip:rank_rule=numerical", "dp-ncm:rank_rule=numerical"),
)
EXEMPLARS = tuple(f"{name}:memory={memory}" for memory in (500, 1000) for name in ("icarl", "podnet", "foster"))
GROUPS: dict[str, tuple[str, ...]] = {
    "trajectory": _TRAJECTORY,
    "pass": ("pass",),
    **{label.replace(":", "-"): (label,) for label in EXEMPLARS},
}


@dataclass(frozen=True)
class RunKey:
    """One run: a data set, a split, a class order, and methods that share a training."""

    dataset: str
    tasks: int
    order: str
    group: str

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods it measures."""
        return GROUPS[self.group]

    @property
    def directory(self) -> PurePath:
        """Where it lies below the output directory."""
        return PurePath("runs", self.dataset, f"T{self.tasks}", f"order-{self.order}", self.group)

    def experiment(self, overrides: Sequence[str] = ()) -> Experiment:
        """Resolve it with the paper's preset."""
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

    def snapshot(self, out: Path, task: int) -> Path:
        """Where its features and statistics after a task (1 is the first) are kept for figures."""
        return out / self.directory / SNAPSHOTS / f"task-{task:02d}.safetensors"


@cache
def paper() -> Mapping[str, Mapping[int, Mapping[str, Mapping[str, Any]]]]:
    """Return the paper's numbers: data set -> tasks -> method -> A_f, A_avg, source, orders."""
    text = resources.files("efcil.reproduce").joinpath("paper.yaml").read_text(encoding="utf-8")
    loaded: Mapping[str, Mapping[int, Mapping[str, Mapping[str, Any]]]] = yaml.safe_load(text)
    return loaded


def published(dataset: str, tasks: int, method: str, source: str) -> Mapping[str, Any] | None:
    """Return what a table of the paper prints for a method, or None."""
    entry = paper().get(dataset, {}).get(tasks, {}).get(method)
    if entry is None:
        return None
    return next((e for e in (entry, *entry.get("also", ())) if e["source"] == source), None)


_NUMBERS = ("A_f", "A_avg", "A_t", "A5_t", "matrix", "old", "new", "forgetting", "bwt")


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, or of lists of them place by place; None where one is missing.

    >>> _mean([[1.0, [2.0, None]], [3.0, [4.0, None]]])
    [2.0, [3.0, None]]
    """
    if all(isinstance(value, list) for value in values):
        return [_mean(place) for place in zip(*values, strict=True)]
    return None if None in values else statistics.fmean(values)


class ResultIndex:
    """Complete summaries by what was measured; one that was measured in another way is not among them.

    Repeats of one experiment are averaged.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, str, str], list[Summary]] = {}
        self._excluded: dict[tuple[str, str], list[str]] = {}  # what was left out: by comparison, and why

    @property
    def excluded(self) -> list[str]:
        """What was left out, and why, in words; the methods of a comparison together."""
        texts = []
        for (comparison, difference), paths in self._excluded.items():
            many = len(paths) > 1
            what = f"{len(paths)} summaries in {comparison} were" if many else f"{paths[0]} was"
            texts.append(f"{what} measured in another way ({difference}) and {'are' if many else 'is'} left out")
        return texts

    def get(self, dataset: str, tasks: int, order: str, method: str) -> Run | None:
        """Return a method's run in a class order, if it was measured."""
        summary = self.summary(dataset, tasks, order, method)
        return None if summary is None else Run.of(summary)

    def summary(self, dataset: str, tasks: int, order: str, method: str) -> Summary | None:
        """Return it as it was written; of repeats the mean, and the time of the fastest and on what it was."""
        repeats = self._found.get((dataset, tasks, order, method), [])
        if not repeats:
            return None
        several = len(repeats) > 1
        means = {key: _mean([r[key] for r in repeats]) for key in _NUMBERS if several and key in repeats[0]}
        fastest = min(repeats, key=lambda repeat: repeat["seconds"])
        return {**repeats[0], **means, **{key: fastest.get(key) for key in TIMING}}

    def read(self, places: Iterable[Path], cells: Iterable[RunKey], overrides: Sequence[str]) -> None:
        """Take up the summaries at or below the places that belong to one of the cells; of copies one."""
        wanted = {(c.dataset, c.tasks, c.order, label): c for c in cells for label in c.methods}
        plans: dict[RunKey, Experiment] = {}
        for comparison, name, summary in (found for place in places for found in _values(place)):
            if not isinstance(summary, dict) or not {"method", "dataset", "A_t", "training"} <= summary.keys():
                continue
            key = (summary["dataset"], summary.get("tasks"), str(summary.get("order")), summary["method"])
            if key not in wanted or summary.get("status") != "complete":
                continue
            cell = wanted[key]
            experiment = plans.setdefault(cell, cell.experiment(overrides))
            if difference := _difference(summary, experiment):
                self._excluded.setdefault((comparison, difference), []).append(name)
                continue
            for one in split_heads(summary):
                found = self._found.setdefault((*key[:3], one["method"]), [])
                if not any((one["A_t"], one["seconds"]) == (other["A_t"], other["seconds"]) for other in found):
                    found.append({**one, "run_dir": name})


def _values(place: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield comparison, name and content of each JSON file below a directory, and of each line of stored results."""
    for path in sorted(place.rglob("*.json")):
        comparison = path.parent.parent if path.name == "summary.json" else path.parent
        yield str(comparison), str(path), read_json(path, error=RunError)
    for path in sorted(place.glob("*.jsonl")):
        if path.name != "metrics.jsonl":  # a run's log, whose last line may be cut
            for number, line in enumerate(read_json_lines(path, error=RunError), 1):
                run = line.get("run") if isinstance(line, dict) else None
                yield f"{path}#{run}", f"{path}:{number}", line


def _difference(summary: Summary, experiment: Experiment) -> str:
    """Say in what a summary differs from what is asked for; nothing if it is the same experiment.

    What a summary does not mention was not an option then: it counts as the default.
    """
    _, options = experiment.methods[summary["method"]]
    if (summary.get("preset"), summary.get("seed")) != (experiment.preset, experiment.seed):
        return f"preset {summary.get('preset')}, seed {summary.get('seed')}"
    if (asked := requested_precision(summary)) != "auto":
        return f"--precision {asked}"
    for given, wanted in (("options", options), ("training", experiment.training), ("data", experiment.data)):
        try:
            found = type(wanted).model_validate(summary.get(given, {}))
        except ValidationError:
            return f"its {given} are not ours"
        a, b = flat(found), flat(wanted)
        b.pop("lazy", None)  # decoded once or as needed: the same pixels
        if words := [f"{key} {json.dumps(a[key])}, not {json.dumps(b[key])}" for key in b if a[key] != b[key]]:
            return "; ".join(words)
    return ""
