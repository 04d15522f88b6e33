"""Choose options on training images that are held out; test images are not looked at.

`efcil tune dpcr cifar100 --tasks 10 --try ridge=200,2000 --try later.lr=0.05,0.01` tries every combination. Those that
differ only in how a classifier is read share one trajectory; each other way to train has its own. A share of every
class's training images is held out and takes the place of the test images, so `summary.json` and the tables say what
was measured on them, and nothing that is chosen here has seen a test image.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from efcil.config import keys, parse_overrides
from efcil.errors import ConfigError, nearest
from efcil.files import atomic_write_text, claim_results, write_json
from efcil.learners import LEARNERS
from efcil.methods import find
from efcil.platform_support import file_name
from efcil.report.groups import CAPTION, Value
from efcil.report.tables import md

TUNE_FILES = ("tune.md", "tune.json", "best.yaml")
MAX_TRIALS = 500
"""Combinations that are still taken for what the user meant."""


@dataclass(frozen=True)
class Trial:
    """One combination of settings: those of training, and those of what is read from the backbone."""

    training: tuple[str, ...]  # key=value
    label: str  # the method, with its own settings

    @property
    def overrides(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.training, *self.label.split(":")[1:])

    @property
    def directory(self) -> str:
        """Name of the directory of its trajectory."""
        return file_name(",".join(self.training) or "as-it-is")


def parse_grid(texts: Iterable[str]) -> dict[str, list[str]]:
    """Read `key=value,value`; a comma inside brackets belongs to the value.

    >>> parse_grid(["ridge=200,2000", "later.milestones=[45,90],[]"])
    {'ridge': ['200', '2000'], 'later.milestones': ['[45,90]', '[]']}
    """
    grid: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not key or not values:
            raise ConfigError(f"--try {text}: must be key=value,value, for example ridge=200,2000")
        if key in grid:
            raise ConfigError(f"--try {key} is given twice: name all of its values in one")
        grid[key] = _split_values(values)
        if len(set(grid[key])) < len(grid[key]):
            raise ConfigError(f"--try {text}: a value is named twice")
    return grid


def _split_values(values: str) -> list[str]:
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def trials(label: str, grid: Mapping[str, Sequence[str]]) -> list[Trial]:
    """Return every combination of the values that are tried for a method.

    >>> [t.label for t in trials("dpcr", {"ridge": ["200", "2000"]})]
    ['dpcr:ridge=200', 'dpcr:ridge=2000']
    >>> [t.training for t in trials("dpcr", {"later.lr": ["0.05"], "batch_size": ["64", "128"]})]
    [('later.lr=0.05', 'batch_size=64'), ('later.lr=0.05', 'batch_size=128')]
    """
    method = find(label.split(":")[0])
    own, training = keys(method.options), keys(LEARNERS[method.learner].options_type)
    for key in grid:
        if key not in (*own, *training):
            raise ConfigError(f"--try {key}: not an option of {method.name}: {nearest(key, (*own, *training))}")
        if key in method.overrides:
            raise ConfigError(f"--try {key}: {method.name} fixes {key}={method.overrides[key]}")
    found = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        of_method = [f"{key}={value}" for key, value in chosen.items() if key in own]
        trained = tuple(f"{key}={value}" for key, value in chosen.items() if key not in own)
        found.append(Trial(trained, ":".join([label, *of_method])))
    if len(found) > MAX_TRIALS:
        raise ConfigError(f"{len(found)} combinations are asked for, more than {MAX_TRIALS}: try fewer values at once")
    return found


@dataclass(frozen=True)
class TrialResult:
    """What a trial reached on the held-out images, over the class orders."""

    trial: Trial
    A_f: Value
    A_avg: Value
    orders: Mapping[str, tuple[float, float]]  # A_f and A_avg of each


def trial_results(summaries: Mapping[tuple[Trial, str], Mapping[str, Any]]) -> list[TrialResult]:
    """Put the summaries of each trial (and class order) together, the best mean A_f first."""
    found = []
    for trial in dict.fromkeys(trial for trial, _ in summaries):
        own = {order: s for (other, order), s in summaries.items() if other == trial}
        A_f, A_avg = (Value.over(s[metric] for s in own.values()) for metric in ("A_f", "A_avg"))
        assert A_f is not None
        assert A_avg is not None
        found.append(TrialResult(trial, A_f, A_avg, {order: (s["A_f"], s["A_avg"]) for order, s in own.items()}))
    return sorted(found, key=lambda outcome: -outcome.A_f.mean)


def table(found: Sequence[TrialResult], title: str) -> str:
    """Return the outcomes as a Markdown table."""
    names = [setting.partition("=")[0] for setting in found[0].trial.overrides]
    head = [*names, "A_f", "A_avg"]
    rows = [[s.partition("=")[2] for s in o.trial.overrides] + [o.A_f.text(), o.A_avg.text()] for o in found]
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join(
        [title, "", *("| " + " | ".join(line).replace("_", r"\_") + " |" for line in lines), "", md(CAPTION), ""]
    )


def write(found: Sequence[TrialResult], out: Path, title: str, best: Mapping[str, Any]) -> dict[str, Path]:
    """Write the table, the numbers of every order, and the best trial as a file for `--config`.

    `best` is what the file says beside the trial's settings; its `set` is a list of settings that all trials share.
    """
    claim_results(out, TUNE_FILES)
    overrides = parse_overrides([*best["set"], *found[0].trial.overrides])
    written = {name: out / name for name in TUNE_FILES}
    atomic_write_text(written["tune.md"], table(found, title))
    rows = [{"overrides": list(o.trial.overrides), "orders": dict(o.orders)} for o in found]
    write_json(written["tune.json"], {"title": title, "trials": rows})
    text = f"# {title}\n" + yaml.safe_dump({**best, "set": overrides}, sort_keys=False)
    atomic_write_text(written["best.yaml"], text)
    return written


def unused_order(orders: Iterable[str]) -> str:
    """Return a class order to report on: the first seed that was not used for the selection.

    >>> unused_order(["identity", "1", "02", "1993"])
    '3'
    """
    used = {int(order) for order in orders if order.isdigit()}
    return str(next(seed for seed in itertools.count(1) if seed not in used))
