"""Reproduction of the paper's tables and figures by name: required runs, results and output files.

    OUT/runs/<data set>/T<tasks>/order-<order>/<group>/   the runs, shared by all tables and figures
    OUT/<name>.md .tex .csv .png .svg .json               the results

Completed runs are reused, missing ones are shown as not measured, and summaries with other options are never mixed in.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from efcil.config import preset_values
from efcil.errors import ConfigError, nearest
from efcil.files import atomic_write_bytes, atomic_write_text, claim_results
from efcil.report.figures import curve_figure, figure_bytes
from efcil.report.groups import Value
from efcil.reproduce import complexity, figures
from efcil.reproduce.result_index import EXEMPLARS, ORDERS, PRESET, ResultIndex, RunKey
from efcil.reproduce.snapshots import Snapshot, gamma_grid
from efcil.reproduce.tables import Benchmark, Table

__all__ = ["NAMES", "ReproduceRequest", "Reproduction", "ResultIndex", "RunKey", "find"]

Files = dict[str, str | bytes]  # suffix -> contents
CIFAR, TINY, IN100 = "cifar100", "tiny-imagenet", "imagenet100"

_PASS = dict.fromkeys(["pass"], "PASS")  # written this way because bandit mistakes "pass" for a password
_MAIN = {
    **{"lwf-ncm": "LwF", "sdc": "SDC", **_PASS, "acil": "ACIL", "fecam": "FeCAM", "ds-al": "DS-AL"},
    **{"adc": "ADC", "ldc": "LDC", "dpcr": "DPCR"},
}
_ABLATION = {
    "rrcr": "RRCR",
    "rrcr+tssp": "RRCR + TSSP",
    "rrcr+tssp+cip:rank_rule=numerical": "RRCR + TSSP + CIP (exact rank)",
    "rrcr+tssp+cip": "RRCR + TSSP + CIP (as released)",
    "rrcr+tssp+cn": "RRCR + TSSP + CN",
    "dpcr:rank_rule=numerical": "RRCR + TSSP + CIP + CN (exact rank)",
    "dpcr": "RRCR + TSSP + CIP + CN (as released)",
}
_EXEMPLARS = {
    **{
        f"icarl:memory={m}/{head}": f"iCaRL-{word}, {m}"
        for m in (500, 1000)
        for head, word in (("cnn", "CNN"), ("nme", "NCM"))
    },
    **{f"podnet:memory={m}/cnn": f"PODNet, {m}" for m in (500, 1000)},
    **{f"foster:memory={m}/boosted": f"FOSTER, {m}" for m in (500, 1000)},
    "dpcr": "DPCR",
}
_CIP = {"rrcr+tssp+cn": "without CIP", "dpcr": "CIP as released", "dpcr:rank_rule=numerical": "CIP, exact rank"}
_BALANCE = {**_PASS, "ldc": "LDC", "dp-ncm": "DP-NCM", "dpcr": "DPCR"}


@dataclass(frozen=True)
class ReproduceRequest:
    """User request: data sets or methods (default: all), orders, splits, output."""

    out: Path
    orders: tuple[str, ...] = ()
    tasks: tuple[int, ...] = ()
    only: tuple[str, ...] = ()
    command: str = "efcil reproduce"
    device: str = "cpu"
    overrides: tuple[str, ...] = ()

    def command_line(self, r: Reproduction) -> str:
        """Return the command for one table or figure, without local directories."""
        parts = ["efcil", "reproduce", r.name]
        for option, values in (("orders", self.orders), ("tasks", self.tasks), ("only", self.only)):
            parts += [f"--{option}", ",".join(map(str, values))] if values else []
        for setting in self.overrides:
            parts += ["--set", setting]
        return shlex.join([*parts, *(word for name in r.grid for word in ("--data", f"{name}=DIR"))])


@dataclass(frozen=True)
class Reproduction:
    """Table or figure of the paper: data sets, splits, class orders and the function that creates it."""

    name: str
    description: str
    grid: Mapping[str, tuple[int, ...]]  # data set -> splits
    orders: tuple[str, ...]
    groups: tuple[str, ...]
    make: Callable[[Reproduction, ResultIndex, ReproduceRequest], Files]

    def splits(self, request: ReproduceRequest) -> list[Benchmark]:
        """Return the selected data sets and splits."""
        return [
            Benchmark(d, t)
            for d, splits in self.grid.items()
            for t in splits
            if not request.tasks or t in request.tasks
        ]

    def chosen_orders(self, request: ReproduceRequest) -> tuple[str, ...]:
        """Return the selected class orders."""
        return request.orders or self.orders

    def run_keys(self, request: ReproduceRequest) -> list[RunKey]:
        """Return the required runs, ignoring `only`."""
        return [
            RunKey(benchmark.dataset, benchmark.tasks, order, group)
            for order in self.chosen_orders(request)
            for benchmark in self.splits(request)
            for group in self.groups
        ]

    def to_run(self, request: ReproduceRequest) -> list[RunKey]:
        """Return the required runs for the data sets or methods in `only`."""
        names = set(request.only)
        cells = self.run_keys(request)
        known = {c.dataset for c in cells} | {m for c in cells for m in (c.group, *c.methods)}
        for name in request.only:
            if known and name not in known:  # without required runs there is nothing to filter
                raise ConfigError(f"--only {name}: not a data set or method of {self.name}: {nearest(name, known)}")
        sets = {c.dataset for c in cells} & names
        methods = names - sets
        return [
            c for c in cells if (not sets or c.dataset in sets) and (not methods or methods & {c.group, *c.methods})
        ]

    def write(self, index: ResultIndex, request: ReproduceRequest) -> dict[str, Path]:
        """Create the output files; return their paths by suffix."""
        files = self.make(self, index, request)
        claim_results(request.out, [f"{self.name}.{suffix}" for suffix in files])
        written = {}
        for suffix, content in files.items():
            path = request.out / f"{self.name}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                atomic_write_bytes(path, content)
            else:
                atomic_write_text(path, content)
            written[suffix] = path
        return written


# -- renderers ---------------------------------------------------------------------------------------------------------


def _table(methods: Mapping[str, str], source: str) -> Callable[[Reproduction, ResultIndex, ReproduceRequest], Files]:
    def make(r: Reproduction, index: ResultIndex, request: ReproduceRequest) -> Files:
        table = Table(r.name, r.description, source, tuple(r.splits(request)), methods, r.chosen_orders(request))
        return {
            "md": table.markdown(index, request.command_line(r)),
            "tex": table.latex(index),
            "csv": table.csv(index),
        }

    return make


def _figure_files(
    r: Reproduction, request: ReproduceRequest, figure: Any, numbers: Any, missing: Sequence[str]
) -> Files:
    """Return the files of a figure, with a page that lists its command and missing results."""
    lines = [f"# {r.description}", "", f"`{request.command_line(r)}`", ""]
    files: Files = {"json": json.dumps(numbers, indent=1) + "\n"}
    if figure is not None:
        lines += [f"![{r.description}]({r.name}.png)", ""]
        files |= {kind: figure_bytes(figure, kind) for kind in ("png", "svg")}
    if missing:
        lines += ["Not measured:", "", *(f"- {what}" for what in missing)]
    return {"md": "\n".join(lines).rstrip() + "\n", **files}


def _describe_missing(benchmark: Benchmark, names: Sequence[str], of: Mapping[str, str]) -> list[str]:
    """List the missing results of a data set and split."""
    if not names:
        return []
    return [f"{benchmark.title}: {'all of it' if list(names) == list(of) else ', '.join(names)}"]


def _curves(r: Reproduction, index: ResultIndex, request: ReproduceRequest) -> Files:
    summaries, missing = [], []
    for benchmark in r.splits(request):
        absent = []
        for method in _MAIN:
            found = [index.summary(benchmark.dataset, benchmark.tasks, o, method) for o in r.chosen_orders(request)]
            summaries += [s for s in found if s is not None]
            if None in found:
                some = f" ({found.count(None)} of {len(found)} orders)" if any(found) else ""
                absent.append(method + some)
        missing += _describe_missing(benchmark, absent, _MAIN)
    numbers = [{k: s[k] for k in ("method", "dataset", "tasks", "order", "A_t")} for s in summaries]
    return _figure_files(r, request, curve_figure(summaries) if summaries else None, numbers, missing)


def _cip(r: Reproduction, index: ResultIndex, request: ReproduceRequest) -> Files:
    numbers: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    missing = []
    for benchmark in r.splits(request):
        orders = r.chosen_orders(request)
        old, new = (
            figures.by_task(index, benchmark.dataset, benchmark.tasks, orders, list(_CIP), k) for k in ("old", "new")
        )
        if old:
            numbers[benchmark.title] = {name: {"old": old[name], "new": new[name]} for name in old}
        missing += _describe_missing(benchmark, [name for name in _CIP if name not in old], _CIP)
    return _figure_files(r, request, figures.cip_figure(numbers, _CIP) if numbers else None, numbers, missing)


def _balance(r: Reproduction, index: ResultIndex, request: ReproduceRequest) -> Files:
    numbers: dict[str, dict[str, dict[str, Value]]] = {}
    missing = []
    for benchmark in r.splits(request):
        absent = []
        for method in _BALANCE:
            runs = [
                run
                for o in r.chosen_orders(request)
                if (run := index.get(benchmark.dataset, benchmark.tasks, o, method))
            ]
            values = {key: Value.over(getattr(run, key) for run in runs) for key in ("old", "new", "A_f")}
            whole = {key: value for key, value in values.items() if value is not None}
            if len(whole) == len(values):
                numbers.setdefault(benchmark.title, {})[method] = whole
            else:
                absent.append(method)
        missing += _describe_missing(benchmark, absent, _BALANCE)
    plain = {t: {m: {k: v.mean for k, v in own.items()} for m, own in ms.items()} for t, ms in numbers.items()}
    return _figure_files(r, request, figures.balance_figure(numbers, _BALANCE) if numbers else None, plain, missing)


def _snapshots(
    r: Reproduction, request: ReproduceRequest, last: bool
) -> tuple[dict[str, tuple[Snapshot, list[str]]], list[str]]:
    """Load existing snapshots after the second or last task, title -> (snapshot, class names), and list missing
    ones."""
    found: dict[str, tuple[Snapshot, list[str]]] = {}
    missing = []
    for cell in r.run_keys(request):
        paths = [one.snapshot(request.out, one.tasks if last else 2) for one in (cell, *cell.larger)]
        title = f"{cell.dataset}, T = {cell.tasks}, order {cell.order}"
        path = next((path for path in paths if path.exists()), None)
        if path is not None:
            found[title] = Snapshot.read(path)
        else:
            missing.append(title)
    return found, missing


def _gamma(r: Reproduction, index: ResultIndex, request: ReproduceRequest) -> Files:
    found, missing = _snapshots(r, request, last=True)
    numbers = {}
    for title, (snapshot, _) in found.items():
        chosen = float(preset_values(PRESET, title.split(",")[0], "dpcr")["ridge"])
        numbers[title] = gamma_grid(snapshot, chosen)
    return _figure_files(r, request, figures.gamma_figure(numbers) if numbers else None, numbers, missing)


def _boundaries(r: Reproduction, index: ResultIndex, request: ReproduceRequest) -> Files:
    found, missing = _snapshots(r, request, last=False)
    figure, numbers = None, {}
    for title, (snapshot, names) in list(found.items())[:1]:
        half = len(names) // 2
        shown = [*range(min(3, half)), *range(half, half + min(3, len(names) - half))]  # a few classes, for readability
        rows = torch.isin(snapshot.labels, torch.tensor(shown))
        features, labels = snapshot.after[rows], snapshot.labels[rows]
        place = {c: i for i, c in enumerate(shown)}
        ridge = float(preset_values(PRESET, title.split(",")[0], "dpcr")["ridge"])
        guesses = {}
        for words, method in (("without DP", "rrcr"), ("with DP", "dpcr")):
            scores = features.double() @ snapshot.weight(method, ridge, normalize=True)[:, shown]
            guesses[words] = scores.argmax(1).numpy()
        points = figures.embed(features.double().numpy(), "umap")
        own = np.array([place[int(c)] for c in labels])
        figure = figures.boundaries_figure(points, own, guesses, [names[c] for c in shown], min(3, half))
        right = {words: 100 * float((guess == own).mean()) for words, guess in guesses.items()}
        numbers[title] = {"classes": [names[c] for c in shown], "right": right}
    return _figure_files(r, request, figure, numbers, missing)


def _confusion_shares(
    guesses: Mapping[str, torch.Tensor], labels: torch.Tensor, rows: torch.Tensor, half: int
) -> dict[str, dict[str, float]]:
    """Return the fractions of rows classified as their own class, other old classes and new classes."""
    shares = {}
    for words, guess in guesses.items():
        right, new = (guess == labels)[rows], (guess >= half)[rows]
        parts = {"own class": right, "other old classes": ~right & ~new, "new classes": new}
        shares[words] = {part: 100 * float(mask.double().mean()) for part, mask in parts.items()}
    return shares


def _shift(r: Reproduction, index: ResultIndex, request: ReproduceRequest) -> Files:
    """Plot the old class that loses most without DP; the JSON file has the numbers of all old classes."""
    found, missing = _snapshots(r, request, last=False)
    figure, numbers = None, {}
    for title, (snapshot, names) in list(found.items())[:1]:
        half, ridge = len(names) // 2, float(preset_values(PRESET, title.split(",")[0], "dpcr")["ridge"])
        old = snapshot.labels < half
        labels, before, after = snapshot.labels[old], snapshot.before[old].double(), snapshot.after[old].double()
        then = Snapshot(before, before, labels, {"old": snapshot.stats["rrcr"].select(range(half))})
        guesses = {
            "before the task": (before @ then.weight("old", ridge, True)).argmax(1),
            "after, without DP": (after @ snapshot.weight("rrcr", ridge, True)).argmax(1),
            "after, with DP": (after @ snapshot.weight("dpcr", ridge, True)).argmax(1),
        }
        of_class = [_confusion_shares(guesses, labels, labels == c, half) for c in range(half)]
        lost = [s["before the task"]["own class"] - s["after, without DP"]["own class"] for s in of_class]
        shown = max(range(half), key=lost.__getitem__)
        start, end = before[labels == shown], after[labels == shown]
        moved = snapshot.stats["dpcr"].mean[shown]
        flat = figures.embed(torch.cat([start, end, moved[None]]).numpy(), "pca")
        figure = figures.shift_figure(
            flat[: len(start)], flat[len(start) : -1], flat[-1], of_class[shown], names[shown]
        )
        distance = {
            "mean moves by": float((end.mean(0) - start.mean(0)).norm()),
            "left after DP": float((end.mean(0) - moved).norm()),
        }
        numbers[title] = {
            "class": names[shown],
            "classified as": of_class[shown],
            "distance": distance,
            "all old classes": _confusion_shares(guesses, labels, labels >= 0, half),
        }
    return _figure_files(r, request, figure, numbers, missing)


def _complexity(r: Reproduction, index: ResultIndex, request: ReproduceRequest) -> Files:
    numbers: dict[str, dict[str, list[float]]] = {}
    for number, (axis, points) in enumerate(complexity.AXES.items()):
        found: dict[str, list[float]] = {"x": [float(point[number]) for point in points]}
        for point in points:
            for part, seconds in complexity.measure(*point, torch.device(request.device)).items():
                found.setdefault(part, []).append(seconds)
                found.setdefault(f"{part} formula", []).append(complexity.operation_count(part, *point))
        numbers[axis] = found
    return _figure_files(r, request, figures.complexity_figure(numbers), numbers, [])


# -- the names ---------------------------------------------------------------------------------------------------------

_TWO, _ONE = (10, 20), ("1993",)
NAMES = {
    r.name: r
    for r in (
        Reproduction(
            "table1",
            "Table 1: final and average accuracy on three data sets",
            {CIFAR: _TWO, TINY: _TWO, IN100: _TWO},
            ORDERS,
            ("trajectory", "pass"),
            _table(_MAIN, "Table 1"),
        ),
        Reproduction(
            "table-cub",
            "Table 2: CUB-200 in five tasks",
            {"cub200": (5,)},
            _ONE,
            ("trajectory",),
            _table({k: v for k, v in _MAIN.items() if k not in ("pass", "fecam")}, "Table 2"),
        ),
        Reproduction(
            "table-imagenet1k",
            "Table 3: ImageNet-1k in ten tasks",
            {"imagenet1k": (10,)},
            _ONE,
            ("trajectory",),
            _table({k: v for k, v in _MAIN.items() if k not in ("pass", "fecam", "sdc")}, "Table 3"),
        ),
        Reproduction(
            "ablation",
            "Table 4: the parts of DPCR",
            {CIFAR: (10,)},
            ORDERS,
            ("trajectory",),
            _table(_ABLATION, "Table 4"),
        ),
        Reproduction(
            "table-ncm",
            "Table 5: class means moved in three ways on the same backbones",
            {CIFAR: _TWO, TINY: _TWO},
            ORDERS,
            ("trajectory",),
            _table({"adc": "ADC", "ldc": "LDC", "dp-ncm": "DP-NCM"}, "Table 5"),
        ),
        Reproduction(
            "table-ebcil",
            "Table 6: methods that keep 500 or 1,000 exemplars",
            {CIFAR: _TWO, IN100: _TWO},
            _ONE,
            (*(label.replace(":", "-") for label in EXEMPLARS), "trajectory"),
            _table(_EXEMPLARS, "Table 6"),
        ),
        Reproduction(
            "curves",
            "Accuracy after each task on three data sets",
            {CIFAR: _TWO, TINY: _TWO, IN100: _TWO},
            ORDERS,
            ("trajectory", "pass"),
            _curves,
        ),
        Reproduction(
            "cip",
            "Old and new classes by task, with and without CIP",
            {CIFAR: (10,), TINY: (10,)},
            ORDERS,
            ("trajectory",),
            _cip,
        ),
        Reproduction(
            "balance",
            "Old, new and all classes after the last task",
            {CIFAR: (10,), TINY: (10,)},
            ORDERS,
            ("trajectory", "pass"),
            _balance,
        ),
        Reproduction(
            "boundaries",
            "Decision regions after two tasks, without and with the dual projection",
            {CIFAR: (10,)},
            _ONE,
            ("dpcr-rrcr",),
            _boundaries,
        ),
        Reproduction(
            "gamma",
            "Final accuracy against gamma, with and without CN",
            {CIFAR: (10,), TINY: (10,), IN100: (10,)},
            _ONE,
            ("dpcr",),
            _gamma,
        ),
        Reproduction(
            "shift",
            "Figure 1: an old class before and after a task, and how it is then classified",
            {CIFAR: (10,)},
            _ONE,
            ("dpcr-rrcr",),
            _shift,
        ),
        Reproduction(
            "complexity",
            "Cost of the dual projection and of the reconstruction against the paper's formulas",
            {},
            (),
            (),
            _complexity,
        ),
    )
}


def find(name: str) -> Reproduction:
    """Return a table or figure by name, or raise ConfigError with the nearest name."""
    if name not in NAMES:
        raise ConfigError(f"'{name}' is not a table or figure of the paper: {nearest(name, NAMES)}")
    return NAMES[name]
