"""Choose options on training images that are held out; test images are not looked at.

`efcil tune dpcr cifar100 --tasks 10 --try ridge=200,2000 --try later.lr=0.05,0.01` tries every combination. Those that
differ only in how a classifier is read share one trajectory; each other way to train has its own. A share of every
class's training images is held out and takes the place of the test images, so `summary.json` and the tables say what
was measured on them, and nothing that is chosen here has seen a test image.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from efcil.config import keys, parse_settings
from efcil.errors import OptionError, nearest
from efcil.experiment.reporters import Lines, Quiet, reporter
from efcil.experiment.run import Run, execute_all
from efcil.files import atomic_write_text, write_json
from efcil.learners import LEARNERS
from efcil.methods import find
from efcil.report.groups import Value
from efcil.training.distributed import joined

MOST = 500
"""Combinations that are still taken for what the user meant."""


@dataclass(frozen=True)
class Trial:
    """One combination of settings: those of training, and those of what is read from the backbone."""

    training: tuple[str, ...]  # key=value
    label: str  # the method, with its own settings

    @property
    def settings(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.training, *self.label.split(":")[1:])

    @property
    def place(self) -> str:
        """Name of the directory of its trajectory."""
        return ",".join(self.training).replace("/", "_") or "as-it-is"


def parse(texts: Iterable[str]) -> dict[str, list[str]]:
    """Read `key=value,value`; a comma inside brackets belongs to the value.

    >>> parse(["ridge=200,2000", "later.milestones=[45,90],[]"])
    {'ridge': ['200', '2000'], 'later.milestones': ['[45,90]', '[]']}
    """
    tried: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not key or not values:
            raise OptionError(f"--try {text}: must be key=value,value, for example ridge=200,2000")
        if key in tried:
            raise OptionError(f"--try {key} is given twice: name all of its values in one")
        tried[key] = _apart(values)
        if len(set(tried[key])) < len(tried[key]):
            raise OptionError(f"--try {text}: a value is named twice")
    return tried


def _apart(values: str) -> list[str]:
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def trials(label: str, tried: Mapping[str, Sequence[str]]) -> list[Trial]:
    """Return every combination of the values that are tried for a method.

    >>> [t.label for t in trials("dpcr", {"ridge": ["200", "2000"]})]
    ['dpcr:ridge=200', 'dpcr:ridge=2000']
    >>> [t.training for t in trials("dpcr", {"later.lr": ["0.05"], "batch_size": ["64", "128"]})]
    [('later.lr=0.05', 'batch_size=64'), ('later.lr=0.05', 'batch_size=128')]
    """
    method = find(label.split(":")[0])
    own, training = keys(method.options), keys(LEARNERS[method.learner].options_type)
    for key in tried:
        if key not in (*own, *training):
            raise OptionError(f"--try {key}: not an option of {method.name}: {nearest(key, (*own, *training))}")
        if key in method.overrides:
            raise OptionError(f"--try {key}: {method.name} fixes {key}={method.overrides[key]}")
    found = []
    for values in itertools.product(*tried.values()):
        chosen = dict(zip(tried, values, strict=True))
        readout = [f"{key}={value}" for key, value in chosen.items() if key in own]
        trained = tuple(f"{key}={value}" for key, value in chosen.items() if key not in own)
        found.append(Trial(trained, ":".join([label, *readout])))
    if len(found) > MOST:
        raise OptionError(f"{len(found)} combinations are asked for, more than {MOST}: try fewer values at once")
    return found


@dataclass(frozen=True)
class Outcome:
    """What a trial reached on the held-out images, over the class orders."""

    trial: Trial
    A_f: Value
    A_avg: Value
    orders: Mapping[str, tuple[float, float]]  # A_f and A_avg of each


def outcomes(summaries: Mapping[tuple[Trial, str], Mapping[str, Any]]) -> list[Outcome]:
    """Put the summaries of each trial (and class order) together, the best mean A_f first."""
    found = []
    for trial in dict.fromkeys(trial for trial, _ in summaries):
        own = {order: s for (other, order), s in summaries.items() if other == trial}
        A_f, A_avg = (Value.over(s[metric] for s in own.values()) for metric in ("A_f", "A_avg"))
        assert A_f is not None
        assert A_avg is not None
        found.append(Outcome(trial, A_f, A_avg, {order: (s["A_f"], s["A_avg"]) for order, s in own.items()}))
    return sorted(found, key=lambda outcome: -outcome.A_f.mean)


def table(found: Sequence[Outcome], title: str) -> str:
    """Return the outcomes as a Markdown table."""
    names = [setting.partition("=")[0] for setting in found[0].trial.settings]
    head = [*names, "A_f", "A_avg"]
    rows = [[s.partition("=")[2] for s in o.trial.settings] + [o.A_f.text(), o.A_avg.text()] for o in found]
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join([title, "", *("| " + " | ".join(line).replace("_", r"\_") + " |" for line in lines), ""])


def write(found: Sequence[Outcome], out: Path, title: str, best: Mapping[str, Any]) -> dict[str, Path]:
    """Write the table, the numbers of every order, and the best trial as a file for `--config`.

    `best` is what the file says beside the trial's settings; its `set` is a list of settings that all trials share.
    """
    settings = parse_settings([*best["set"], *found[0].trial.settings])
    written = {name: out / name for name in ("tune.md", "tune.json", "best.yaml")}
    atomic_write_text(written["tune.md"], table(found, title))
    rows = [{"settings": list(o.trial.settings), "orders": dict(o.orders)} for o in found]
    write_json(written["tune.json"], {"title": title, "trials": rows})
    text = f"# {title}\n" + yaml.safe_dump({**best, "set": settings}, sort_keys=False)
    atomic_write_text(written["best.yaml"], text)
    return written


def execute(options: Mapping[str, Any], tried: Sequence[str], make: Callable[..., Run]) -> list[Outcome]:
    """Run every trial that is missing in every class order, write and print the table; `make` makes one run."""
    method, dataset = options["method"], options["dataset"]
    orders = [order.strip() for order in options["orders"].split(",") if order.strip()]
    if not orders or len(set(orders)) < len(orders):
        raise OptionError(f"--orders {options['orders']}: must be class orders with commas between them, each once")
    each = trials(method, parse(tried))
    split = "".join(f"-{key}{options[key]}" for key in ("tasks", "init_cls", "increment") if options[key] is not None)
    out = options["out"] or Path("runs") / f"tune-{method.replace(':', '-')}-{dataset}{split}-seed{options['seed']}"
    silent = options["quiet"] or options["json"]
    voice = reporter(options["quiet"], options["json"])
    for text in options.get("notes", ()):
        voice.note(text)
    shared: dict[tuple[str, ...], list[Trial]] = {}
    for trial in each:
        shared.setdefault(trial.training, []).append(trial)
    where, runs = [], []
    with joined() as group:
        for (training, members), order in itertools.product(shared.items(), orders):
            place = out / members[0].place / f"order-{Path(order).stem}"
            own = {**options, "order": order, "out": place, "settings": [*options["settings"], *training]}
            lines = Quiet() if silent else Lines(" ".join([f"order {order}", *training]))
            runs.append(make([trial.label for trial in members], dataset, own, True, lines, group))
            where.append((members, order))
        found = execute_all(
            runs, True, options["at_once"] or runs[0].machine.runs_at_once, "go on with the same command"
        )
    summaries = {
        (trial, order): summary
        for (members, order), own in zip(where, found, strict=True)
        for trial, summary in zip(members, own, strict=True)
    }
    result = outcomes(summaries)
    title = f"{method} on {runs[0].plan.measured_on}, orders {', '.join(orders)}"
    best = {"method": method, "dataset": dataset, "preset": runs[0].plan.preset, **runs[0].plan.tasks}
    best["set"] = options["settings"]
    written = write(result, out, title, best)
    if not silent:
        print(table(result, title))
        print("written: " + ", ".join(str(path) for path in written.values()))
        print(f"on test images, in orders not used for choosing: efcil run --config {written['best.yaml']} --order 1")
    return result
