"""The results ledger: from stored summaries and the paper's numbers to results/README.md and the tables elsewhere.

    python tools/results_tables.py            write results/README.md and the blocks in README.md and docs/
    python tools/results_tables.py --check    exit 1 and say what differs, when they are not what the summaries give
    python tools/results_tables.py --add DIR --name NAME
                                              first store the summaries of a run, a compare or several orders of one,
                                              or the record of a benchmark (a file)

results/<data set>.jsonl has a summary per line, with the name of its run; results/benchmarks.jsonl has what
benchmarks/ measured, and results/research.jsonl what docs/research-log.md stands on, each line with a name.
Every number printed is one of a summary, a mean, spread or median of them, or one of src/efcil/reproduce/paper.yaml.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shlex
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationError

from efcil.errors import EfcilError, RunError
from efcil.experiment import Request, resolve
from efcil.files import atomic_write_text, read_json, read_json_lines, write_json_lines
from efcil.methods import METHODS, Method
from efcil.report import load_summaries
from efcil.report.groups import NONE, Value, benchmarks_of
from efcil.report.load import TIMING, Run, asked_precision, runs_of
from efcil.report.tables import md as escaped
from efcil.report.tables import row as row_of
from efcil.reproduce.cells import paper as read_paper

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- ledger -->", "<!-- /ledger -->"
UNMEASURED = "not measured yet"
METRICS = ("A_f", "A_avg")
BENCHMARKS, OTHERS = "benchmarks.jsonl", ("benchmarks.jsonl", "research.jsonl")
ABLATION = "ablation"  # names of runs that begin so are of one trajectory, read with parts left out
ABLATED = {
    "gaussian=0": "no Gaussians",
    "shift_images=clean": "no made images in the map",
    "quarters=0": "no quarters",
    "quarters=1": "quarters of 1 stage",
    "quarters=2": "quarters of 2 stages",
}
# Removed options, each with the value that equals their absence: a run with it is the same experiment today.
REMOVED: dict[str, Any] = {
    "pseudo_from": "clean",
    "pseudo_rounds": 1,
    "first_decorrelation": 0.0,
    "still_stages": 0,
    "shift_views": 0,
    "shift_residual": False,
}
KEPT_BACK = ("1", "2", "3")  # class orders that no choice of ours has seen, and that the paper does not have

Config = tuple[tuple[str, str], ...]  # dotted key, value as JSON
Paper = Mapping[str, Mapping[int, Mapping[str, Mapping[str, Any]]]]  # data set -> tasks -> method -> numbers


@dataclass(frozen=True)
class Entry:
    """One classifier of one stored summary."""

    run: Run  # `method` is the label
    name: str  # of the run
    config: Config  # options, training, data and a precision that was asked for, flat
    usual: Config | None = None  # the same as the preset gives it; None if there is no such preset

    @property
    def unusual(self) -> bool:
        """Whether something was set by hand that the method's name does not say."""
        return self.usual is not None and self.config != self.usual

    @property
    def kept_back(self) -> bool:
        """Whether its class order is one of those that are kept for reports."""
        return self.run.order in KEPT_BACK

    @property
    def paper_key(self) -> str:
        """The method's name in paper.yaml: with the number of exemplars, where it keeps any."""
        method, slash, head = self.run.method.partition("/")
        memory = dict(self.config).get("memory")
        key = f"{method}:memory={memory}" if memory is not None and ":" not in method else method
        return key + slash + head


@dataclass(frozen=True)
class Row:
    """Complete runs of one method with one configuration; they differ in class order, seed, machine or commit."""

    label: str
    entries: tuple[Entry, ...]

    @cached_property
    def orders(self) -> dict[str, list[Run]]:
        """The runs of each class order."""
        found: dict[str, list[Run]] = {}
        for entry in self.entries:
            found.setdefault(entry.run.order or "?", []).append(entry.run)
        return found

    def value(self, metric: str) -> Value | None:
        """Mean and sample spread over class orders; repeats and seeds of one order are averaged first."""
        means = []
        for runs in self.orders.values():
            of_order = Value.over(getattr(run, metric) for run in runs)
            means.append(None if of_order is None else of_order.mean)
        return Value.over(means)

    @property
    def seconds(self) -> str:
        """Median time of a run on each device."""
        return "; ".join(f"{_time(value)} ({device})" for device, value in self._times().items()) or NONE

    @property
    def fastest(self) -> str:
        """The shortest of these times, with its device."""
        device, value = min(self._times().items(), key=lambda item: item[1], default=("", None))
        return NONE if value is None else f"{_time(value)} ({device})"

    def _times(self) -> dict[str, float]:
        times: dict[str, list[float]] = {}
        for entry in self.entries:
            if entry.run.seconds is not None:
                times.setdefault(entry.run.timed_on or "device unknown", []).append(entry.run.seconds)
        return {device: statistics.median(values) for device, values in times.items()}

    def each(self, get: Callable[[Run], str]) -> list[str]:
        """What the runs say, each once."""
        return list(dict.fromkeys(get(entry.run) or "?" for entry in self.entries))

    @property
    def variant(self) -> bool:
        """Whether it belongs into the table of ablations: a part left out, or options or a preset that are not ours."""
        entry = self.entries[0]
        return _is_variant(entry.run.method) or entry.unusual or entry.run.preset == "released_code"


@dataclass(frozen=True)
class Section:
    """A data set and a split: what the paper printed and what was measured."""

    title: str
    paper: Mapping[str, Mapping[str, Any]]
    rows: tuple[Row, ...]  # best A_f first
    partial: tuple[Entry, ...]

    @cached_property
    def commands(self) -> dict[str, int]:
        """The commands that its runs came from, numbered as they are listed below its tables."""
        each = dict.fromkeys(command for row in self.rows for command in row.each(lambda run: run.command))
        return {command: number for number, command in enumerate(each, 1)}

    def lines(self, variant: bool) -> Iterator[tuple[str, Mapping[str, Any] | None, Row | None]]:
        """(label, paper's entry, measured row): measured ones first, then what is still missing."""
        measured = [row for row in self.rows if row.variant == variant]
        for row in measured:
            entry = row.entries[0]
            yield row.label, None if entry.unusual or entry.kept_back else self.paper.get(entry.paper_key), row
        have = {e.paper_key for e in (row.entries[0] for row in measured) if not (e.unusual or e.kept_back)}
        missing = [key for key in self.paper if key not in have and _is_variant(key) == variant]
        for key in sorted(missing, key=lambda key: -self.paper[key]["A_f"]):
            yield key, self.paper[key], None


def _is_variant(label: str) -> bool:
    base, *settings = label.partition("/")[0].split(":")
    return base.startswith("rrcr") or any(not setting.startswith("memory=") for setting in settings)


def _time(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in tree.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: json.dumps(value)}
        found.update(inner)
    return found


# -- reading ---------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results; none where there is no file."""
    return read_json_lines(path, error=RunError) if path.is_file() else []


def key_of(summary: Mapping[str, Any]) -> tuple[int, str, str]:
    """What tells the lines of a data set apart, and how they are sorted."""
    return summary["tasks"], summary["run"], summary["method"]


def read_entries(results: Path) -> list[Entry]:
    """Every classifier of every stored summary."""
    entries = []
    for path in sorted(results.glob("*.jsonl")):
        for summary in [] if path.name in OTHERS else read_lines(path):
            place = "/".join(map(str, (path.stem, *key_of(summary))))
            summary = _as_preset(summary | {"run_dir": place})
            config, usual = _config(summary)
            entries += [Entry(run, summary["run"], config, usual) for run in runs_of([summary])]
    return entries


def _as_preset(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the summary under the name of its method's own preset, where its settings by hand are just that."""
    base, _, settings = str(summary["method"]).partition(":")
    own = METHODS[base].preset if base in METHODS else ""
    for method in (base, f"{base}:{settings}") if own and summary.get("preset") != own else ():
        config, usual = _config(summary | {"method": method, "preset": own})
        if config == usual:
            return summary | {"method": method, "preset": own}
    return summary


def _config(summary: Mapping[str, Any]) -> tuple[Config, Config | None]:
    """A summary's options, training and data, and what its preset gives; what was no option then has its default."""

    def flat_(options: Mapping[str, Any], training: Mapping[str, Any], data: Mapping[str, Any]) -> Config:
        kept = {key: value for key, value in data.items() if key != "stream"}  # it changes no pixel
        return tuple(sorted(_flat({**options, **training, "data": kept}).items()))

    asked = asked_precision(summary)
    apart = () if asked == "auto" else (("precision", asked),)
    given = [_without_removed(summary.get(key, {})) for key in ("options", "training", "data")]
    try:
        plan = resolve(Request((summary["method"],), summary["dataset"], preset=summary["preset"]))
        usual = (plan.methods[summary["method"]][1], plan.training, plan.data)
        filled = [type(o).model_validate(g).model_dump(mode="json") for o, g in zip(usual, given, strict=True)]
    except (KeyError, EfcilError, ValidationError):
        return (*flat_(*given), *apart), None
    return (*flat_(*filled), *apart), flat_(*(options.model_dump(mode="json") for options in usual))


def _without_removed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options less removed ones without effect; one that had an effect stays, and sets the run apart."""
    return {key: value for key, value in options.items() if key not in REMOVED or value != REMOVED[key]}


def sections_of(entries: Iterable[Entry], paper: Paper) -> list[Section]:
    """The paper's benchmarks in its order, then the others; without a measurement too."""
    found = {(entry.run.run_dir, entry.run.method): entry for entry in entries}
    made: dict[tuple[str, int, str], Section] = {
        (dataset, tasks, title := f"{dataset}, T = {tasks}"): Section(title, methods, (), ())
        for dataset, splits in paper.items()
        for tasks, methods in splits.items()
    }
    for benchmark in benchmarks_of(entry.run for entry in found.values()):
        own = [found[run.run_dir, run.method] for group in benchmark.groups for run in group.runs]
        even = len(set(benchmark.task_sizes)) <= 1
        numbers = paper.get(benchmark.dataset, {}).get(benchmark.tasks, {}) if even else {}
        rows = _rows([entry for entry in own if not entry.run.partial])
        partial = tuple(sorted((e for e in own if e.run.partial), key=lambda entry: entry.run.run_dir))
        made[benchmark.dataset, benchmark.tasks, benchmark.title] = Section(benchmark.title, numbers, rows, partial)
    return list(made.values())


def _rows(entries: list[Entry]) -> tuple[Row, ...]:
    together: dict[tuple[str, str], dict[tuple[tuple[str, str], ...], list[Entry]]] = {}
    for entry in sorted(entries, key=lambda entry: entry.run.run_dir):
        configurations = together.setdefault((entry.run.method, entry.run.preset), {})
        configurations.setdefault(entry.config, []).append(entry)
    rows = []
    for (method, preset), configurations in together.items():
        label = method if preset == "paper" else f"{method} ({preset or 'no preset'})"
        settings = [set(config) for config in configurations]
        shared = set.intersection(*settings)  # what tells configurations apart is the rest
        for config, members in configurations.items():
            usual = members[0].usual
            apart = ", ".join(f"{k}={v}" for k, v in config if (k, v) not in (shared if usual is None else usual))
            name = f"{label} [{apart}]" if apart else label
            parts = [tuple(m for m in members if m.kept_back is kept) for kept in (False, True)]
            if all(parts):  # orders of both kinds are two rows
                orders = sorted({member.run.order for member in parts[1]})
                apart = f"{name}, order{'s' * (len(orders) > 1)} {', '.join(orders)}"
                rows += [Row(name, parts[0]), Row(apart, parts[1])]
            else:
                rows.append(Row(name, tuple(members)))
    return tuple(sorted(rows, key=lambda row: (-(v.mean if (v := row.value("A_f")) else 0.0), row.label)))


# -- writing ---------------------------------------------------------------------------------------------------------


def _table(head: list[str], right: Iterable[int], rows: Iterable[list[str]]) -> list[str]:
    align = ["---:" if column in set(right) else "---" for column in range(len(head))]
    return [row_of(head), row_of(align), *map(row_of, rows)]


def _ours(row: Row | None, metric: str) -> str:
    value = row.value(metric) if row is not None else None
    return NONE if value is None else value.text()


def _papers(numbers: Mapping[str, Any] | None) -> str:
    if numbers is None:
        return NONE
    all_of_them = [numbers, *numbers.get("also", [])]
    return "; ".join(f"{n['A_f']:.2f} / {n['A_avg']:.2f} ({n['source']})" for n in all_of_them)


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`"


def _section_lines(section: Section, variant: bool) -> list[str]:
    lines = []
    for label, numbers, row in section.lines(variant):
        if row is None:
            lines.append([escaped(label), _papers(numbers), UNMEASURED, *[NONE] * 6])
            continue
        numbered = sorted(section.commands[command] for command in row.each(lambda run: run.command))
        lines.append(
            [
                escaped(label),
                _papers(numbers),
                *(_ours(row, metric) for metric in METRICS),
                escaped(", ".join(row.orders)),
                str(len(row.entries)),
                escaped(row.seconds),
                escaped(", ".join(row.each(lambda run: run.commit))),
                ", ".join(map(str, numbered)),
            ]
        )
    head = ["Method", "Paper A\\_f / A\\_avg", "A\\_f", "A\\_avg"]
    head += ["Orders", "Runs", "Seconds a run (median)", "Commit", "Command"]
    return _table(head, (2, 3, 5), lines) if lines else []


def _each_run(section: Section) -> list[str]:
    rows = []
    for row in section.rows:
        for entry in sorted(row.entries, key=lambda entry: (entry.run.order, entry.run.seed, entry.run.run_dir)):
            run = entry.run
            numbers = [f"{v:.2f}" if (v := getattr(run, metric)) is not None else NONE for metric in METRICS]
            seconds = NONE if run.seconds is None else _time(run.seconds)
            texts = (run.machine, run.commit)
            cells = [escaped(row.label), escaped(run.order), escaped(run.seed), *numbers, seconds]
            rows.append([*cells, *map(escaped, (*texts, entry.name)), str(section.commands[run.command or "?"])])
    head = ["Method", "Order", "Seed", "A\\_f", "A\\_avg", "Seconds", "Device", "Commit", "Run", "Command"]
    return ["<details><summary>Every run</summary>", "", *_table(head, (3, 4, 5), rows), "", "</details>", ""]


def _legend(paper: Paper) -> list[str]:
    orders: dict[str, str] = {}
    for splits in paper.values():
        for methods in splits.values():
            for numbers in methods.values():
                for n in (numbers, *numbers.get("also", [])):
                    orders[n["source"]] = ", ".join(n["orders"]) if n["orders"] else "orders not stated"
    return [f"- {source} of the paper: {text}" for source, text in sorted(orders.items())]


def full_text(sections: list[Section], paper: Paper) -> str:
    """results/README.md."""
    lines = [
        "# Results",
        "",
        "Written by `python tools/results_tables.py` from the summaries here and the paper's numbers; do not edit.",
        "",
        "Accuracies in percent: A\\_f after the last task over all classes, A\\_avg the mean over tasks.",
        "± is the sample standard deviation over class orders; repeats of an order are averaged first.",
        "Only complete runs count. Methods of one `efcil compare` are read from one trajectory:",
        "their seconds are those of the whole comparison.",
        "`lwf-ncm` is the paper's row LwF. Class orders of the paper's numbers:",
        "",
        *_legend(paper),
        "",
    ]
    if not any(section.rows for section in sections):
        lines += [f"Ours: {UNMEASURED}.", ""]
    for section in sections:
        lines += [f"## {escaped(section.title)}", "", *_section_lines(section, variant=False), ""]
        variants = _section_lines(section, variant=True)
        if variants:
            lines += ["### Ablations and variants", "", *variants, ""]
        if section.rows:
            lines += ["Commands:", ""]
            lines += [f"{number}. {_code(command)}" for command, number in section.commands.items()]
            lines += ["", *_each_run(section)]
        if section.partial:
            lines += ["Partial runs, not counted:", ""]
            lines += [
                f"- {escaped(e.run.method)}, order {escaped(e.run.order)}, {e.run.tasks_done} of {e.run.tasks} tasks: "
                f"{escaped(e.run.run_dir)}"
                for e in section.partial
            ]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def compact_text(sections: list[Section]) -> str:
    """The block of README.md, with its two marks."""
    lines = [BEGIN, ""]
    for section in sections:
        rows = [
            [
                escaped(label),
                *(NONE if numbers is None else f"{numbers[m]:.2f}" for m in METRICS),
                *(_ours(row, m) for m in METRICS),
                escaped(row.fastest),
            ]
            for label, numbers, row in section.lines(variant=False)
            if row is not None
        ]
        if rows:
            head = ["Method", "Paper A\\_f", "Paper A\\_avg", "A\\_f", "A\\_avg", "Seconds a run"]
            lines += [f"**{escaped(section.title)}**", "", *_table(head, range(1, 5), rows), ""]
    if len(lines) == 2:
        lines += [f"Results: {UNMEASURED}.", ""]
    lines += ["All runs, orders, commits and commands: [results/README.md](results/README.md).", "", END]
    return "\n".join(lines)


def variants_text(sections: list[Section]) -> str:
    """The block of docs/fidelity.md: DPCR's parts and rank rules, each measured split side by side."""
    measured = [s for s in sections if any(row.variant for row in s.rows)]
    labels = dict.fromkeys(row.label for s in measured for row in s.rows)  # best first
    head = ["Method"] + [f"{escaped(s.title)}: {m.replace('_', chr(92) + '_')}" for s in measured for m in METRICS]
    rows = []
    for label in labels:
        found = [next((row for row in s.rows if row.label == label), None) for s in measured]
        rows.append([escaped(label), *(_ours(row, m) for row in found for m in METRICS)])
    lines = _table(head, range(1, len(head)), rows) if measured else [f"Variants: {UNMEASURED}."]
    return "\n".join([BEGIN, "", *lines, "", END])


def _said(stored: Mapping[str, Any]) -> list[str]:
    """Where a stored benchmark comes from."""
    device = stored["raw"]["device"]
    return [f"`results/{BENCHMARKS}#{stored['name']}`: `{stored['command']}`, {device}, commit {stored['commit']}", ""]


def _rounds_lines(found: Mapping[str, Any]) -> list[str]:
    """Of benchmarks/rounds.py: a model taught in rounds against a run, and what forgetting did to the other classes."""
    rows = []
    for row in found["rows"]:
        gone = row["forgotten"]
        means = [statistics.mean(one[key] for one in gone) for key in ("before", "ruled_out", "after")]
        worst = min(one["after"] - one["before"] for one in gone)
        rows.append(
            [str(row["seed"]), str(row["pictures"]), f"{row['taught']:.2f}", f"{row['run']:.2f}"]
            + [f"{mean:.2f}" for mean in means]
            + [f"{worst:+.2f}"]
        )
    head = [f"{escaped(found['data'])}, {found['classes']} classes in five rounds: seed", "Test pictures"]
    head += ["`efcil evaluate`, %", "`efcil run`, %", "Others before a class is forgotten, %", "Its name struck out, %"]
    head += ["After `efcil forget`, %", "Worst change, points"]
    held, gone = f"{100 * found['held_out']:.0f} %", len(found["rows"][0]["forgotten"])
    words = f"Kept from training to measure recall: {held}. Accuracy of the others: mean over {gone} forgotten classes."
    return [*_table(head, range(1, 8), rows), "", words, ""]


def _latency(one: Mapping[str, float]) -> list[str]:
    return [f"{one['per_second']:.1f}", *(f"{one[f'p{q}_ms']:.0f}" for q in (50, 90, 99)), f"{one['errors']:.0f}"]


def _serve_lines(found: Mapping[str, Any]) -> list[str]:
    """Of benchmarks/serve.py: bare loops, many clients at once, one client while the model is taught."""
    median, meanwhile = found["median"], found["meanwhile"]
    rows = [
        ["bare loop over single JPEG files", f"{median['single']:.1f}", *[NONE] * 4],
        ["bare loop over ready batches of 32", f"{median['batch']:.1f}", *[NONE] * 4],
        [f"`efcil serve`, {found['clients']} clients", *_latency(median)],
        ["`efcil serve`, one client", *_latency(meanwhile["alone"])],
        ["`efcil serve`, one client, while it is taught", *_latency(meanwhile["teaching"])],
    ]
    what = f"{found['backbone']}, {found['threads']} threads, median of {len(found['rounds'])} rounds"
    ratios = f"{found['ratio']:.2f} of the loop over single pictures, {found['ratio_to_batches']:.2f} of ready batches"
    words = f"The service gives {ratios}; {median['size']:.1f} pictures a pass. The teaching: {meanwhile['job']}."
    head = [escaped(what), "Pictures a second", "p50, ms", "p90, ms", "p99, ms", "Errors"]
    return [*_table(head, range(1, 6), rows), "", words, ""]


def _soak_lines(found: Mapping[str, Any]) -> list[str]:
    """Of benchmarks/serve.py --soak."""
    sizes = found["mib"]
    words = (
        f"{found['seconds'] / 60:.0f} minutes, {found['clients']} clients, {found['backbone']}: "
        f"{found['per_second']:.1f} pictures a second, {found['errors']} errors, p99 {found['p99_ms']:.0f} ms. "
        f"Memory {min(sizes):.0f} to {max(sizes):.0f} MiB in "
        f"{len(sizes)} readings; from the first third to the last {found['growth']:+.2f} %."
    )
    return [words, ""]


SERVED: dict[str, tuple[str, Callable[[Mapping[str, Any]], list[str]]]] = {
    "serve": ("Throughput", _serve_lines),
    "soak": ("Soak", _soak_lines),
}


def serve_text(results: Path) -> str:
    """The block of docs/serve.md: what benchmarks/serve.py measured."""
    lines = []
    found = {one["name"]: one for one in read_lines(results / BENCHMARKS)}
    for key, (title, lines_of) in SERVED.items():
        if stored := found.get(f"cpu-{key}"):
            lines += [f"**{title}.** " + _said(stored)[0], "", *lines_of(stored["raw"][key])]
        else:
            lines += [f"**{title}**: {UNMEASURED}.", ""]
    return "\n".join([BEGIN, "", *lines, END])


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def beyond_text(sections: list[Section]) -> str:
    """The block of docs/dpcr-plus.md: all that was measured of `dpcr-plus`, and `dpcr` beside it, by data set."""
    lines = []
    for dataset in dict.fromkeys(s.title.partition(", ")[0] for s in sections):
        splits = [s for s in sections if s.title.startswith(f"{dataset}, T = ")]
        splits = [s for s in splits if any(row.label.startswith("dpcr-plus") for row in s.rows)]
        if splits:
            lines += [f"**{dataset}**", "", *_beyond(splits), "", *_ablation(dataset, splits)]
    return "\n".join([BEGIN, "", *(lines or [UNMEASURED + ".", ""]), END])


def _beyond(splits: list[Section]) -> list[str]:
    """The table of one data set: a row a setting, `dpcr` last, first in the orders that are kept back."""
    rows: dict[str, list[Row | None]] = {}
    for at, split in enumerate(splits):
        for row in split.rows:
            apart = all(entry.name.startswith(ABLATION) for entry in row.entries)  # in a table of their own
            if not apart and (row.label == "dpcr" or row.label.startswith(("dpcr, order", "dpcr-plus"))):
                rows.setdefault(row.label, [None] * len(splits))[at] = row
    titles = _titles(splits)
    cells = []
    for label, found in sorted(rows.items(), key=lambda item: (item[0] == "dpcr", item[0].startswith("dpcr,"))):
        orders = dict.fromkeys(order for row in found if row for order in row.each(lambda run: run.order))
        values = [_ours(row, m) for row in found for m in METRICS]
        cells.append([escaped(label), ", ".join(sorted(orders)), *values])
    return _table(["Method", "Orders", *titles], range(2, 2 + len(titles)), cells)


def _titles(splits: list[Section]) -> list[str]:
    return [f"{s.title.partition(', ')[2]}: {m.replace('_', chr(92) + '_')}" for s in splits for m in METRICS]


def _ablation(dataset: str, splits: list[Section]) -> list[str]:
    """What is lost without each part: rows of one trajectory a split, and DPCR in that order; [] if none was run."""
    found: dict[str, list[Row | None]] = {}
    for at, split in enumerate(splits):
        entries = [entry for row in split.rows for entry in row.entries]
        read = [entry for entry in entries if entry.name.startswith(ABLATION)]
        orders = {entry.run.order for entry in read}
        beside = [e for e in entries if e.run.method == "dpcr" and not e.unusual and e.run.order in orders]
        parts = [[entry] for entry in sorted(read, key=lambda entry: entry.run.method.count(":"))]
        for part in [*parts, beside] if beside else parts:
            label = _without(part[0].run.method)
            found.setdefault(label, [None] * len(splits))[at] = Row(label, tuple(part))
    titles = _titles(splits)
    cells = [[escaped(label), *(_ours(row, m) for row in rows for m in METRICS)] for label, rows in found.items()]
    known = sorted({order for rows in found.values() for row in rows if row for order in row.orders})
    title = f"**{dataset}, what each part gives**: order {', '.join(known)}; all but the last row from one training."
    return [title, "", *_table(["Method", *titles], range(1, 1 + len(titles)), cells), ""] if found else []


def _without(method: str) -> str:
    """A variant of `dpcr-plus` in words.

    >>> _without("dpcr-plus:quarters=1:memory_rank=84"), _without("dpcr-plus:ridge=3"), _without("dpcr-plus")
    ('quarters of 1 stage', 'dpcr-plus:ridge=3', 'dpcr-plus')
    """
    base, *settings = method.split(":")
    words = [ABLATED[setting] for setting in settings if setting in ABLATED]
    known = all(setting in ABLATED or setting.startswith("memory_") for setting in settings)
    return ", ".join(words) if words and known else "dpcr, trained as LwF" if base == "dpcr" else method


def _teacher(kind: bool | str) -> str:
    """How the teacher of a timed step looked at the images."""
    return kind if isinstance(kind, str) else "ahead" if kind else "none"


def benchmarks_text(results: Path) -> str:
    """The block of docs/performance.md: what benchmarks/ measured."""
    lines = []
    for stored in read_lines(results / BENCHMARKS):
        raw = stored.get("raw", {})
        if not raw or SERVED.keys() & raw.keys():  # a text without a table, or in docs/serve.md
            continue
        lines += _said(stored)
        if "rounds" in raw:
            lines += _rounds_lines(raw["rounds"])
        if "step" in raw:
            rows = [
                [row["variant"], "yes" if row["teacher"] else "no", f"{1e3 * row['seconds']['median']:.3f}"]
                + [f"{1e3 * row['seconds']['spread']:.3f}", f"{1e3 * row['ceiling_seconds']:.3f}"]
                for row in raw["step"]["rows"]
            ]
            lines += _table(["Step of 128 images", "Teacher", "ms", "Spread", "Ceiling, ms"], (2, 3, 4), rows) + [""]
        if "ways" in raw:
            rows = [
                [r["way"], _teacher(r["teacher"]), "all" if r.get("limit") == 0 else str(r.get("limit", 10))]
                + [f"{r['ms']:.3f}", f"{r['first_seconds']:.1f}", f"{r['race']:.1g}", f"{r['chance']:.1g}"]
                for r in raw["ways"]
            ]
            head = ["Way of a captured step", "Teacher", "cuDNN's trials", "ms", "First step, s"]
            lines += [*_table([*head, "Against in order", "Chance"], (3, 4, 5, 6), rows), ""]
        if "compiler" in raw:
            rows = [
                [r["variant"], str(r["compile_and_capture_seconds"]), f"{r['step_ms']:.3f}"] for r in raw["compiler"]
            ]
            lines += _table(["Compiler option", "Compile and capture, s", "Step with teacher, ms"], (1, 2), rows) + [""]
        if "augment" in raw:
            speed = raw["augment"]["images_per_second"]
            times = f", {raw['augment']['ratio']['median']:.1f} times Pillow's on one core"
            words = f"{speed['median']:,.0f} images a second (spread {speed['spread']:,.0f}){times}"
            lines += [f"Augmentation: {words}.", ""]
        if "stream" in raw:
            alone, streamed, ratio = (statistics.median(raw["stream"][key]) for key in ("alone", "streamed", "ratio"))
            words = f"{streamed:.0f} images a second, decoding alone {alone:.0f}, median ratio {ratio:.2f}"
            turns = f"{len(raw['stream']['ratio'])} turns, ratios {_range(raw['stream']['ratio'])}"
            lines += [f"Streaming JPEGs at {raw['size']} pixels with {raw['workers']} workers: {words} ({turns}).", ""]
        if "epoch" in raw and "share" in raw["epoch"]["teacher"]:
            rows = []
            for name in ("no_teacher", "teacher"):
                one = raw["epoch"][name]
                rates = [f"{one[key]:,.0f}" for key in ("images_per_second", "resident_images_per_second")]
                rows.append([f"{one['images']:,} images, {name.replace('_', ' ')}", *rates, f"{one['share']:.2f}"])
            heads = [f"An epoch at {raw['side']} pixels", "Images a second", "The step on one batch", "Share"]
            lines += _table(heads, (1, 2, 3), rows) + [""]
        if "distributed" in raw:
            found = raw["distributed"]
            together, alone = (found["images_per_second"][way] for way in ("together", "alone"))
            words = f"{together:.0f} images a second together, {alone:.0f} alone, median ratio {found['ratio']:.2f}"
            turns = f"{len(found['ratios'])} turns, ratios {_range(found['ratios'])}"
            lines += [f"{found['processes']} processes, {found['problem']}: {words} ({turns}).", ""]
        if "runs" in raw:
            rows = [[f"`{r['what']}`", f"{r['seconds']:.1f}", str(r.get("peak_gpu_mib", NONE))] for r in raw["runs"]]
            lines += _table(["From prompt to prompt", "Seconds", "GPU memory at most, MiB"], (1, 2), rows) + [""]
        if "startup" in raw:
            found = raw["startup"]
            rows = [
                [
                    cache,
                    *(
                        f"{found[cache][part]:.1f}"
                        for part in ("build_seconds", "first_step_seconds", "process_seconds")
                    ),
                ]
                for cache in ("cold", "warm")
            ]
            head = ["Compile cache", "Until the loop, s", "First step, s", "The whole process, s"]
            lines += [*_table(head, (1, 2, 3), rows), "", f"Imports: {found['import_seconds']['median']:.1f} s.", ""]
        if "naive_seconds" in raw:
            rows = [["SVD and inverse a class, float32", f"{1e3 * raw['naive_seconds']:.1f}", "1", NONE]]
            for rule in ("positive", "numerical"):
                numbers = (1e3 * raw[f"{rule}_seconds"], raw[f"{rule}_speedup"], raw[f"{rule}_deviation"])
                rows.append([f"ours, rule {rule}", *("{:.1f} {:.1f} {:.1e}".format(*numbers).split())])
            head = [f"Class update, {raw['classes']} + 10 classes, d = {raw['dim']}", "ms", "Times faster", "Deviation"]
            lines += _table(head, (1, 2, 3), rows)
            lines += ["", f"Ten times the classes take {raw['tenfold_growth']:.1f} times as long.", ""]
        if "scale" in raw:
            lines += [*_scale_lines(raw["scale"]), ""]
    return "\n".join([BEGIN, "", *(lines or [f"Benchmarks: {UNMEASURED}.", ""]), END])


ON_PAPER = (("ImageNet-1k", 1_000), ("ImageNet-21k", 21_841), ("a hundred thousand classes", 100_000))
ROWS_ON_PAPER = 64  # of a factor


def _scale_lines(raw: Mapping[str, Any]) -> list[str]:
    """Many classes: what was measured, and what follows for sizes that nobody has measured."""
    head = ["Classes", "d", "Images", "Kept as", "Update, s", "Processor, s", "Stored, MB", "Of the paper's", "Peak"]
    rows = [
        [f"{r['classes']:,}", f"{r['dim']:,}", str(r["images"]), r["form"], f"{r['seconds']:.2f}"]
        + [f"{r['processor_seconds']:.2f}", f"{r['stored_bytes'] / 1e6:,.1f}", f"{r['of_papers']:.3f}"]
        + [f"{r['peak_ratio']:.2f}" if r["classes"] >= 1000 else NONE]
        for r in (*raw["classes"], *raw["dimensions"])
    ]
    lines = _table(head, (0, 1, 2, 4, 5, 6, 7, 8), rows)
    growth, apart = f"{raw['tenfold_growth']:.1f}", f"{raw['factor_deviation']:.0e}"
    lines += ["", f"Ten times the classes take {growth} times the processor time; exact factors differ by {apart} from"]
    lines += ["Grams after an update. Peak: what the update takes beside one block, times what is stored after it."]
    rows = [[str(r["tasks"]), f"{r['class_moves']:,}", f"{r['processor_seconds']:.2f}"] for r in raw["tasks"]]
    first = raw["tasks"][0]
    words = f"Tasks ({first['classes']} classes, d = {first['dim']})"
    lines += ["", *_table([words, "Classes moved", "All updates, s"], (0, 1, 2), rows)]
    rows = [
        [f"{r['error']:g}", str(r["rows"]), f"{r['of_gram']:.3f}", f"{r['left_out']:.4f}"]
        + [f"{r['left_out_after_a_move']:.4f}", f"{r['weight_change']:.4f}"]
        for r in raw["compression"]
    ]
    first = raw["compression"][0]
    words = f"`memory_error` (d = {first['dim']}, {first['images']} images)"
    head = [words, "Rows", "Of a Gram", "Left out", "After a move", "Change of the classifier"]
    lines += ["", *_table(head, range(6), rows)]
    return [*lines, "", *_on_paper(raw)]


def _on_paper(raw: Mapping[str, Any]) -> list[str]:
    """Sizes that nobody has measured: bytes from the formulas, seconds from the rate of the largest measured update."""
    largest = {
        form: max((r for r in raw["classes"] if r["form"] == form), key=lambda r: r["classes"])
        for form in ("gram", "factors")
    }
    rate = {
        form: r["classes"] * _operations(form, r["dim"], r["images"]) / r["processor_seconds"]
        for form, r in largest.items()
    }
    rows = []
    for name, classes in ON_PAPER:
        for dim in (512, 2048):
            for form, own in (("gram", dim * (dim + 1) // 2), ("factors", ROWS_ON_PAPER * dim)):
                seconds = classes * _operations(form, dim, ROWS_ON_PAPER) / rate[form]
                kept = form if form == "gram" else f"factors, {ROWS_ON_PAPER} rows"
                size = f"{8 * classes * (own + dim) / 1e9:,.1f}"
                rows.append([f"{name}, {classes:,}", f"{dim:,}", kept, size, f"{seconds:,.0f}"])
    words = ", ".join(f"{form} {rate[form] / 1e9:.0f} GFLOP/s" for form in rate)
    head = ["On paper", "d", "Kept as", "Stored, GB", "Update, processor s"]
    return [*_table(head, (1, 3, 4), rows), "", f"At the rate of a core in the largest updates above: {words}."]


def _operations(form: str, dim: int, rows: int) -> float:
    """Operations of moving one class and adding its Gram to the sum."""
    return 3.25 * dim**3 if form == "gram" else 4.0 * rows * dim**2


def methods_text(sections: list[Section]) -> str:
    """The numbers that `efcil methods` shows: CIFAR-100 in ten tasks, the paper's and ours."""
    found: dict[str, dict[str, list[float] | None]] = {}
    for section in sections:
        if section.title == "cifar100, T = 10":
            for variant in (False, True):
                for label, numbers, row in section.lines(variant):
                    paper = [numbers[m] for m in METRICS] if numbers else None
                    ours = [round(v.mean, 2) for m in METRICS if (v := row.value(m))] if row else None
                    found[label] = {"paper": paper, "ours": ours}
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def measured_text(file: str, sections: list[Section]) -> str:
    """What a method's file says was measured: of each method whose classifier it holds, on CIFAR-100."""
    found: dict[str, list[str]] = {}
    for section in sections:
        if section.title not in ("cifar100, T = 10", "cifar100, T = 20"):
            continue
        for label, numbers, row in section.lines(False):
            name = re.split(r"[:/ ]", label)[0]  # settings, a classifier or a preset may follow
            key = row.entries[0].paper_key if row else label
            method = METHODS.get(name)
            if method is None or row is None or not _holds(file, method, key.partition("/")[2]):
                continue
            pair = " / ".join(v.text() for m in METRICS if (v := row.value(m)))
            paper = f" ({numbers['A_f']:.2f} / {numbers['A_avg']:.2f})" if numbers else ""
            found.setdefault(key, []).append(f"{section.title.partition(', ')[2]} {pair}{paper}")
    parts = [f"`{key}` {', '.join(values)}" for key, values in sorted(found.items())]
    text = (
        f"Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: {'; '.join(parts)}."
        if parts
        else "Measured: not yet."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)


def _holds(file: str, method: Method, head: str) -> bool:
    factory: Any = method.heads.get(head, method.readout)
    modules = {factory.__module__, method.options.__module__} if method.heads else {factory.__module__}
    return f"efcil.methods.{file}" in modules


def wanted_files(root: Path) -> tuple[dict[Path, str], list[str]]:
    """(what the files should hold, what a reader should know)."""
    results = root / "results"
    paper = read_paper()
    sections = sections_of(read_entries(results), paper)
    wanted = {results / "README.md": full_text(sections, paper)}
    measured = root / "src" / "efcil" / "presets" / "measured.json"
    if measured.parent.is_dir():
        wanted[measured] = methods_text(sections)
    notes = []
    blocks = {
        "README.md": compact_text(sections),
        "docs/fidelity.md": variants_text(sections),
        "docs/dpcr-plus.md": beyond_text(sections),
        "docs/performance.md": benchmarks_text(results),
        "docs/serve.md": serve_text(results),
    }
    for path in sorted((root / "src" / "efcil" / "methods").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if found := re.search(r"^Measured.*?\.$(?=\n\"\"\"|\n\n)", text, re.MULTILINE | re.DOTALL):
            wanted[path] = text[: found.start()] + measured_text(path.stem, sections) + text[found.end() :]
    for name, block in blocks.items():
        text = (root / name).read_text(encoding="utf-8") if (root / name).is_file() else ""
        if BEGIN not in text or END not in text.partition(BEGIN)[2]:
            notes.append(f"{name} has no block {BEGIN} ... {END}: left alone")
            continue
        before, _, rest = text.partition(BEGIN)
        wanted[root / name] = before + block + rest.partition(END)[2]
    return wanted, notes


# -- adding ----------------------------------------------------------------------------------------------------------


def public(command: str) -> str:
    """A command without the directories of the machine it ran on.

    >>> public("efcil run dpcr cifar100 --data /mnt/x/cifar --out=/tmp/a --order /home/me/order.txt")
    'efcil run dpcr cifar100 --data DATA --out=OUT --order order.txt'
    """
    words = []
    previous = ""
    for word in shlex.split(command):
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        named = option or previous
        if value and named in ("--data", "--out"):
            value = named.removeprefix("--").upper()
        elif value.startswith(("/", "~")) or re.match(r"[A-Za-z]:\\", value):
            value = re.split(r"[/\\]", value.rstrip("/\\"))[-1]
        words.append(f"{option}{equals}{value}" if equals else option or value)
        previous = word
    return shlex.join(words)


def add_benchmark(file: Path, name: str, results: Path) -> list[str]:
    """Store the record of a benchmark, in the place of an earlier one of that name."""
    record = read_json(file, error=RunError)
    if not isinstance(record, dict) or "raw" not in record:
        raise RunError(f"{file}: no record of a benchmark; give what --out of one wrote")
    lines = {one["name"]: one for one in read_lines(results / BENCHMARKS)}
    write_json_lines(results / BENCHMARKS, {**lines, name: {"name": name, **record}}.values())
    return [f"{BENCHMARKS}#{name}"]


def add(directory: Path, name: str, results: Path, concurrent_runs: int = 1) -> list[str]:
    """Store the summaries at or below `directory` in results/ under a run name; nothing is overwritten.

    Runs of other processes that shared the device make `concurrent_runs` more than the summary knows.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]*", name):
        raise RunError(f"--name {name}: want letters, digits and . _ + = - only")
    lines: dict[str, dict[tuple[int, str, str], dict[str, Any]]] = {}
    added = []
    for summary in load_summaries(directory):
        below = Path(summary.pop("run_dir")).relative_to(directory.resolve())
        summary.pop("config_text", None)
        for key in ("tasks", "tasks_done", "order", "seed", *TIMING, "commit", "command"):
            if key not in summary:
                raise RunError(f"{directory / below}: summary.json has no '{key}'; run it again")
        order = below.parts[0] if below.parts and below.parts[0].startswith("order-") else ""
        summary["command"] = public(summary["command"])
        summary["concurrent_runs"] = max(summary["concurrent_runs"], concurrent_runs)
        if isinstance(summary["order"], str):
            summary["order"] = PurePath(summary["order"]).name
        file, summary = f"{summary['dataset']}.jsonl", {"run": f"{name}-{order}" if order else name, **summary}
        if file not in lines:
            lines[file] = {key_of(one): one for one in read_lines(results / file)}
        place = f"{file}#{summary['run']}, {summary['method']}"
        if place in added:
            raise RunError(f"{directory}: two summaries of {summary['method']}; add them one by one with a --name each")
        if lines[file].setdefault(key_of(summary), summary) != summary:
            raise RunError(f"{place} is there and says something else; choose another --name")
        added.append(place)
    for file, found in lines.items():
        write_json_lines(results / file, [found[key] for key in sorted(found)])
    return added


def differences(wanted: Mapping[Path, str], root: Path) -> str:
    """What is on disk against what should be, as a diff; empty when all is well."""
    found = ""
    for path, text in wanted.items():
        there = path.read_text(encoding="utf-8") if path.is_file() else ""
        name = path.relative_to(root).as_posix()
        lines = difflib.unified_diff(there.splitlines(), text.splitlines(), f"{name} on disk", f"{name} wanted", n=0)
        found += "".join(f"{line.rstrip()}\n" for line in lines)
        if not found and there != text:
            found += f"{name}: line ends differ\n"
    return found


def main(arguments: list[str] | None = None) -> int:
    """Write, check or add; 0 when all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the files are out of date")
    parser.add_argument(
        "--add", type=Path, metavar="DIR", help="a run, a compare, a compare of several orders, or a benchmark's record"
    )
    parser.add_argument("--name", help="name of the run or benchmark in results/")
    parser.add_argument(
        "--concurrent-runs", type=int, default=1, help="runs of other processes too that shared its device, and itself"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args(arguments)
    if (options.add is None) != (options.name is None) or (options.add is not None and options.check):
        parser.error("--add and --name go together, and not with --check")
    root = options.root.resolve()
    try:
        if options.add is not None:
            if options.add.is_file() and options.add.name != "summary.json":
                added = add_benchmark(options.add, options.name, root / "results")
            else:
                added = add(options.add, options.name, root / "results", options.concurrent_runs)
            print("\n".join(f"added {place}" for place in added))
        wanted, notes = wanted_files(root)
    except EfcilError as error:
        print(f"results_tables: {error}", file=sys.stderr)
        return 1
    for note in notes:
        print(note)
    found = differences(wanted, root)
    if options.check:
        print(
            found + "out of date: run python tools/results_tables.py"
            if found
            else "the ledger is what the summaries give"
        )
        return 1 if found else 0
    for path, text in wanted.items():
        atomic_write_text(path, text)
        print(f"wrote {path.relative_to(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
