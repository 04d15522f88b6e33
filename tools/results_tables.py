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

    def seconds(self, fastest: bool = False) -> str:
        """Median time of a run on each machine, or on the fastest one."""
        times: dict[str, list[float]] = {}
        for run in (entry.run for entry in self.entries):
            if run.seconds is not None:
                times.setdefault(run.timed_on or "device unknown", []).append(run.seconds)
        medians = [(statistics.median(values), machine) for machine, values in times.items()]
        chosen = sorted(medians)[:1] if fastest else medians
        return "; ".join(f"{_time(seconds)} ({machine})" for seconds, machine in chosen) or NONE

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


def _time(seconds: float | None) -> str:
    return NONE if seconds is None else f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"


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


def check_complete(summary: Mapping[str, Any], where: str) -> None:
    """Refuse a summary of a run that is not finished: no table counts it."""
    if (done := summary["tasks_done"]) < (tasks := summary["tasks"]):
        raise RunError(f"{where}: {summary['method']} has {done} of {tasks} tasks; finish it with --resume")


def read_entries(results: Path) -> list[Entry]:
    """Every classifier of every stored summary."""
    entries = []
    for path in sorted(results.glob("*.jsonl")):
        for summary in [] if path.name in OTHERS else read_lines(path):
            place = "/".join(map(str, (path.stem, *key_of(summary))))
            check_complete(summary, place)
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
        (dataset, tasks, title := f"{dataset}, T = {tasks}"): Section(title, methods, ())
        for dataset, splits in paper.items()
        for tasks, methods in splits.items()
    }
    for benchmark in benchmarks_of(entry.run for entry in found.values()):
        own = [found[run.run_dir, run.method] for group in benchmark.groups for run in group.runs]
        even = len(set(benchmark.task_sizes)) <= 1
        numbers = paper.get(benchmark.dataset, {}).get(benchmark.tasks, {}) if even else {}
        made[benchmark.dataset, benchmark.tasks, benchmark.title] = Section(benchmark.title, numbers, _rows(own))
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


def _table(head: str, rows: Iterable[list[str]]) -> list[str]:
    """A table; columns whose head begins with > stand right."""
    heads = head.split(" | ")
    align = ["---:" if cell.startswith(">") else "---" for cell in heads]
    return [row_of(cell.removeprefix(">") for cell in heads), row_of(align), *map(row_of, rows)]


def _filled(head: str, cells: str, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A table of one format, with an empty line after it."""
    return [*_table(head, (cells.format(**row).split(" | ") for row in rows)), ""]


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
        cells = [UNMEASURED, *[NONE] * 6]
        if row is not None:
            numbered = sorted(section.commands[command] for command in row.each(lambda run: run.command))
            commits = ", ".join(row.each(lambda run: run.commit))
            cells = [*(_ours(row, metric) for metric in METRICS), escaped(", ".join(row.orders)), str(len(row.entries))]
            cells += [escaped(row.seconds()), escaped(commits), ", ".join(map(str, numbered))]
        lines.append([escaped(label), _papers(numbers), *cells])
    head = "Method | Paper A\\_f / A\\_avg | >A\\_f | >A\\_avg | Orders | >Runs"
    head += " | Seconds a run (median) | Commit | Command"
    return _table(head, lines) if lines else []


def _each_run(section: Section) -> list[str]:
    rows = []
    for row in section.rows:
        for entry in sorted(row.entries, key=lambda entry: (entry.run.order, entry.run.seed, entry.run.run_dir)):
            run = entry.run
            cells = [*map(escaped, (row.label, run.order, run.seed)), f"{run.A_f:.2f}", f"{run.A_avg:.2f}"]
            cells += [_time(run.seconds), *map(escaped, (run.machine, run.commit, entry.name))]
            rows.append([*cells, str(section.commands[run.command or "?"])])
    head = "Method | Order | Seed | >A\\_f | >A\\_avg | >Seconds | Device | Commit | Run | Command"
    return ["<details><summary>Every run</summary>", "", *_table(head, rows), "", "</details>", ""]


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
    for section in sections:
        lines += [f"## {escaped(section.title)}", "", *_section_lines(section, variant=False), ""]
        variants = _section_lines(section, variant=True)
        if variants:
            lines += ["### Ablations and variants", "", *variants, ""]
        if section.rows:
            lines += ["Commands:", ""]
            lines += [f"{number}. {_code(command)}" for command, number in section.commands.items()]
            lines += ["", *_each_run(section)]
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
                escaped(row.seconds(fastest=True)),
            ]
            for label, numbers, row in section.lines(variant=False)
            if row is not None
        ]
        if rows:
            head = "Method | >Paper A\\_f | >Paper A\\_avg | >A\\_f | >A\\_avg | Seconds a run"
            lines += [f"**{escaped(section.title)}**", "", *_table(head, rows), ""]
    lines += ["All runs, orders, commits and commands: [results/README.md](results/README.md).", "", END]
    return "\n".join(lines)


def variants_text(sections: list[Section]) -> str:
    """The block of docs/fidelity.md: DPCR's parts and rank rules, each measured split side by side."""
    measured = [s for s in sections if any(row.variant for row in s.rows)]
    labels = dict.fromkeys(row.label for s in measured for row in s.rows)  # best first
    rows = []
    for label in labels:
        found = [next((row for row in s.rows if row.label == label), None) for s in measured]
        rows.append([escaped(label), *(_ours(row, m) for row in found for m in METRICS)])
    head = f"Method{_titles(s.title for s in measured)}"
    return "\n".join([BEGIN, "", *_table(head, rows), "", END])


def beyond_text(sections: list[Section]) -> str:
    """The block of docs/dpcr-plus.md: all that was measured of `dpcr-plus`, and `dpcr` beside it, by data set."""
    lines = []
    for dataset in dict.fromkeys(s.title.partition(", ")[0] for s in sections):
        splits = [s for s in sections if s.title.startswith(f"{dataset}, T = ")]
        splits = [s for s in splits if any(row.label.startswith("dpcr-plus") for row in s.rows)]
        if splits:
            lines += [f"**{dataset}**", "", *_beyond(splits), "", *_ablation(dataset, splits)]
    return "\n".join([BEGIN, "", *lines, END])


def _beyond(splits: list[Section]) -> list[str]:
    """The table of one data set: a row a setting, `dpcr` last, first in the orders that are kept back."""
    rows: dict[str, list[Row | None]] = {}
    for at, split in enumerate(splits):
        for row in split.rows:
            apart = all(entry.name.startswith(ABLATION) for entry in row.entries)  # in a table of their own
            if not apart and (row.label == "dpcr" or row.label.startswith(("dpcr, order", "dpcr-plus"))):
                rows.setdefault(row.label, [None] * len(splits))[at] = row
    cells = []
    for label, found in sorted(rows.items(), key=lambda item: (item[0] == "dpcr", item[0].startswith("dpcr,"))):
        orders = dict.fromkeys(order for row in found if row for order in row.each(lambda run: run.order))
        values = [_ours(row, m) for row in found for m in METRICS]
        cells.append([escaped(label), ", ".join(sorted(orders)), *values])
    return _table(f"Method | Orders{_titles(s.title.partition(', ')[2] for s in splits)}", cells)


def _titles(splits: Iterable[str]) -> str:
    return "".join(f" | >{escaped(split)}: {escaped(metric)}" for split in splits for metric in METRICS)


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
    cells = [[escaped(label), *(_ours(row, m) for row in rows for m in METRICS)] for label, rows in found.items()]
    known = sorted({order for rows in found.values() for row in rows if row for order in row.orders})
    title = f"**{dataset}, what each part gives**: order {', '.join(known)}; all but the last row from one training."
    head = f"Method{_titles(s.title.partition(', ')[2] for s in splits)}"
    return [title, "", *_table(head, cells), ""] if found else []


def _without(method: str) -> str:
    """A variant of `dpcr-plus` in words.

    >>> _without("dpcr-plus:quarters=1:memory_rank=84"), _without("dpcr-plus:ridge=3"), _without("dpcr-plus")
    ('quarters of 1 stage', 'dpcr-plus:ridge=3', 'dpcr-plus')
    """
    base, *settings = method.split(":")
    words = [ABLATED[setting] for setting in settings if setting in ABLATED]
    known = all(setting in ABLATED or setting.startswith("memory_") for setting in settings)
    return ", ".join(words) if words and known else "dpcr, trained as LwF" if base == "dpcr" else method


# -- benchmarks ------------------------------------------------------------------------------------------------------

Raw = Mapping[str, Any]


def _origin(stored: Raw) -> str:
    """Where a stored benchmark comes from."""
    about = f"`{stored['command']}`, {stored['raw']['device']}, commit {stored['commit']}"
    return f"`results/{BENCHMARKS}#{stored['name']}`: {about}"


def _rounds(raw: Raw) -> list[str]:
    """Of benchmarks/rounds.py: a model taught in rounds against a run, and what forgetting did to the other classes."""
    found, rows = raw["rounds"], []
    for row in found["rows"]:
        gone = row["forgotten"]
        means = {key: statistics.mean(one[key] for one in gone) for key in ("before", "ruled_out", "after")}
        rows.append({**row, **means, "worst": min(one["after"] - one["before"] for one in gone)})
    head = f"{escaped(found['data'])}, {found['classes']} classes in five rounds: seed | >Test pictures"
    head += " | >`efcil evaluate`, % | >`efcil run`, % | >Others before a class is forgotten, %"
    head += " | >Its name struck out, % | >After `efcil forget`, % | >Worst change, points"
    cells = "{seed} | {pictures} | {taught:.2f} | {run:.2f} | {before:.2f} | {ruled_out:.2f} | {after:.2f}"
    held, gone = f"{100 * found['held_out']:.0f} %", len(found["rows"][0]["forgotten"])
    words = f"Kept from training to measure recall: {held}. Accuracy of the others: mean over {gone} forgotten classes."
    return [*_filled(head, cells + " | {worst:+.2f}", rows), words]


def _serve(found: Raw) -> list[str]:
    """Of benchmarks/serve.py: bare loops, many clients at once, one client while the model is taught."""
    median, meanwhile = found["median"], found["meanwhile"]
    latency = "{per_second:.1f} | {p50_ms:.0f} | {p90_ms:.0f} | {p99_ms:.0f} | {errors:.0f}"
    served = (
        (f"{found['clients']} clients", median),
        ("one client", meanwhile["alone"]),
        ("one client, while it is taught", meanwhile["teaching"]),
    )
    rows = [
        ["bare loop over single JPEG files", f"{median['single']:.1f}", *[NONE] * 4],
        ["bare loop over ready batches of 32", f"{median['batch']:.1f}", *[NONE] * 4],
        *([f"`efcil serve`, {who}", *latency.format(**one).split(" | ")] for who, one in served),
    ]
    what = f"{found['backbone']}, {found['threads']} threads, median of {len(found['rounds'])} rounds"
    ratios = f"{found['ratio']:.2f} of the loop over single pictures, {found['ratio_to_batches']:.2f} of ready batches"
    words = f"The service gives {ratios}; {median['size']:.1f} pictures a pass. The teaching: {meanwhile['job']}."
    return [*_table(f"{what} | >Pictures a second | >p50, ms | >p90, ms | >p99, ms | >Errors", rows), "", words]


def _soak(found: Raw) -> list[str]:
    """Of benchmarks/serve.py --soak."""
    sizes = found["mib"]
    return [
        f"{found['seconds'] / 60:.0f} minutes, {found['clients']} clients, {found['backbone']}: "
        f"{found['per_second']:.1f} pictures a second, {found['errors']} errors, p99 {found['p99_ms']:.0f} ms. "
        f"Memory {min(sizes):.0f} to {max(sizes):.0f} MiB in "
        f"{len(sizes)} readings; from the first third to the last {found['growth']:+.2f} %."
    ]


def _ways(raw: Raw) -> list[str]:
    rows = []
    for row in raw["ways"]:
        how = row["teacher"]  # how it looked at the images: ahead where a record says only that it did
        teacher = how if isinstance(how, str) else "ahead" if how else "none"
        rows.append({**row, "teacher": teacher, "limit": row.get("limit", 10) or "all"})
    head = "Way of a captured step | Teacher | cuDNN's trials | >ms | >First step, s | >Against in order | >Chance"
    cells = "{way} | {teacher} | {limit} | {ms:.3f} | {first_seconds:.1f} | {race:.1g} | {chance:.1g}"
    return _filled(head, cells, rows)


def _ratios(values: list[float]) -> str:
    return f"({len(values)} turns, ratios {min(values):.2f} to {max(values):.2f})"


def _augment(raw: Raw) -> list[str]:
    rate = "{median:,.0f} images a second (spread {spread:,.0f})".format(**raw["augment"]["images_per_second"])
    return [f"Augmentation: {rate}, {raw['augment']['ratio']['median']:.1f} times Pillow's on one core."]


def _stream(raw: Raw) -> list[str]:
    found = raw["stream"]
    alone, streamed, ratio = (statistics.median(found[key]) for key in ("alone", "streamed", "ratio"))
    rates = f"{streamed:.0f} images a second, decoding alone {alone:.0f}, median ratio {ratio:.2f}"
    what = f"Streaming JPEGs at {raw['size']} pixels with {raw['workers']} workers"
    return [f"{what}: {rates} {_ratios(found['ratio'])}."]


def _distributed(raw: Raw) -> list[str]:
    found = raw["distributed"]
    rates = "{together:.0f} images a second together, {alone:.0f} alone".format(**found["images_per_second"])
    what = f"{found['processes']} processes, {found['problem']}"
    return [f"{what}: {rates}, median ratio {found['ratio']:.2f} {_ratios(found['ratios'])}."]


def _epoch(raw: Raw) -> list[str]:
    rows = [{"name": key.replace("_", " "), **raw["epoch"][key]} for key in ("no_teacher", "teacher")]
    cells = "{images:,} images, {name} | {images_per_second:,.0f} | {resident_images_per_second:,.0f} | {share:.2f}"
    head = f"An epoch at {raw.get('side')} pixels | >Images a second | >The step on one batch | >Share"
    return _filled(head, cells, rows) if "share" in rows[1] else []


def _update(raw: Raw) -> list[str]:
    rows = [["SVD and inverse a class, float32", f"{1e3 * raw['naive_seconds']:.1f}", "1", NONE]]
    for rule in ("positive", "numerical"):
        seconds, speedup, deviation = (raw[f"{rule}_{what}"] for what in ("seconds", "speedup", "deviation"))
        rows.append([f"ours, rule {rule}", f"{1e3 * seconds:.1f}", f"{speedup:.1f}", f"{deviation:.1e}"])
    head = f"Class update, {raw['classes']} + 10 classes, d = {raw['dim']} | >ms | >Times faster | >Deviation"
    return [*_table(head, rows), "", f"Ten times the classes take {raw['tenfold_growth']:.1f} times as long."]


ON_PAPER = (("ImageNet-1k", 1_000), ("ImageNet-21k", 21_841), ("a hundred thousand classes", 100_000))
ROWS_ON_PAPER = 64  # of a factor


def _scale(raw: Raw) -> list[str]:
    """Many classes: what was measured, and what follows for sizes that nobody has measured."""
    found = raw["scale"]
    rows = [
        {**r, "mb": r["stored_bytes"] / 1e6, "peak": f"{r['peak_ratio']:.2f}" if r["classes"] >= 1000 else NONE}
        for r in (*found["classes"], *found["dimensions"])
    ]
    head = ">Classes | >d | >Images | Kept as | >Update, s | >Processor, s | >Stored, MB | >Of the paper's | >Peak"
    cells = "{classes:,} | {dim:,} | {images} | {form} | {seconds:.2f} | {processor_seconds:.2f} | {mb:,.1f}"
    lines = _filled(head, cells + " | {of_papers:.3f} | {peak}", rows)
    growth, apart = f"{found['tenfold_growth']:.1f}", f"{found['factor_deviation']:.0e}"
    lines += [f"Ten times the classes take {growth} times the processor time; exact factors differ by {apart} from"]
    lines += ["Grams after an update. Peak: what the update takes beside one block, times what is stored after it.", ""]
    first = found["tasks"][0]
    head = f">Tasks ({first['classes']} classes, d = {first['dim']}) | >Classes moved | >All updates, s"
    lines += _filled(head, "{tasks} | {class_moves:,} | {processor_seconds:.2f}", found["tasks"])
    first = found["compression"][0]
    head = f">`memory_error` (d = {first['dim']}, {first['images']} images) | >Rows | >Of a Gram | >Left out"
    head += " | >After a move | >Change of the classifier"
    cells = "{error:g} | {rows} | {of_gram:.3f} | {left_out:.4f} | {left_out_after_a_move:.4f} | {weight_change:.4f}"
    return [*lines, *_filled(head, cells, found["compression"]), *_on_paper(found)]


def _on_paper(found: Raw) -> list[str]:
    """Sizes that nobody has measured: bytes from the formulas, seconds from the rate of the largest measured update."""
    rate = {}
    for form in ("gram", "factors"):
        r = max((r for r in found["classes"] if r["form"] == form), key=lambda r: r["classes"])
        rate[form] = r["classes"] * _operations(form, r["dim"], r["images"]) / r["processor_seconds"]
    rows = []
    for name, classes in ON_PAPER:
        for dim in (512, 2048):
            for form, own in (("gram", dim * (dim + 1) // 2), ("factors", ROWS_ON_PAPER * dim)):
                seconds = classes * _operations(form, dim, ROWS_ON_PAPER) / rate[form]
                kept = form if form == "gram" else f"factors, {ROWS_ON_PAPER} rows"
                size = f"{8 * classes * (own + dim) / 1e9:,.1f}"
                rows.append([f"{name}, {classes:,}", f"{dim:,}", kept, size, f"{seconds:,.0f}"])
    words = ", ".join(f"{form} {rate[form] / 1e9:.0f} GFLOP/s" for form in rate)
    lines = _table("On paper | >d | Kept as | >Stored, GB | >Update, processor s", rows)
    return [*lines, "", f"At the rate of a core in the largest updates above: {words}."]


def _operations(form: str, dim: int, rows: int) -> float:
    """Operations of moving one class and adding its Gram to the sum."""
    return 3.25 * dim**3 if form == "gram" else 4.0 * rows * dim**2


SERVED: dict[str, tuple[str, Callable[[Raw], list[str]]]] = {"serve": ("Throughput", _serve), "soak": ("Soak", _soak)}
MEASURED: dict[str, Callable[[Raw], list[str]]] = {  # by what a record holds, in the order of the page
    "rounds": _rounds,
    "step": lambda raw: _filled(
        "Step of 128 images | Teacher | >ms | >Spread | >Ceiling, ms",
        "{variant} | {words} | {median:.3f} | {spread:.3f} | {ceiling:.3f}",
        (
            {**row, "words": "yes" if row["teacher"] else "no", "ceiling": 1e3 * row["ceiling_seconds"]}
            | {key: 1e3 * row["seconds"][key] for key in ("median", "spread")}
            for row in raw["step"]["rows"]
        ),
    ),
    "ways": _ways,
    "compiler": lambda raw: _filled(
        "Compiler option | >Compile and capture, s | >Step with teacher, ms",
        "{variant} | {compile_and_capture_seconds} | {step_ms:.3f}",
        raw["compiler"],
    ),
    "augment": _augment,
    "stream": _stream,
    "epoch": _epoch,
    "distributed": _distributed,
    "runs": lambda raw: _filled(
        "From prompt to prompt | >Seconds | >GPU memory at most, MiB",
        "`{what}` | {seconds:.1f} | {peak_gpu_mib}",
        ({"peak_gpu_mib": NONE, **row} for row in raw["runs"]),
    ),
    "startup": lambda raw: [
        *_filled(
            "Compile cache | >Until the loop, s | >First step, s | >The whole process, s",
            "{cache} | {build_seconds:.1f} | {first_step_seconds:.1f} | {process_seconds:.1f}",
            ({"cache": cache, **raw["startup"][cache]} for cache in ("cold", "warm")),
        ),
        f"Imports: {raw['startup']['import_seconds']['median']:.1f} s.",
    ],
    "naive_seconds": _update,
    "scale": _scale,
}


def serve_text(results: Path) -> str:
    """The block of docs/serve.md: what benchmarks/serve.py measured."""
    lines = []
    for stored in read_lines(results / BENCHMARKS):
        for key, (title, lines_of) in SERVED.items():
            if found := stored.get("raw", {}).get(key):
                lines += [f"**{title}.** {_origin(stored)}", "", *lines_of(found), ""]
    return "\n".join([BEGIN, "", *lines, END])


def benchmarks_text(results: Path) -> str:
    """The block of docs/performance.md: what benchmarks/ measured."""
    lines = []
    for stored in read_lines(results / BENCHMARKS):
        raw = stored.get("raw", {})
        if raw and not SERVED.keys() & raw.keys():  # a text has no table, and the service's are in docs/serve.md
            lines += [_origin(stored), ""]
            for made in (lines_of(raw) for key, lines_of in MEASURED.items() if key in raw):
                lines += [*made, ""] if made and made[-1] else made
    return "\n".join([BEGIN, "", *lines, END])


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
    parts = "; ".join(f"`{key}` {', '.join(values)}" for key, values in sorted(found.items()))
    text = f"Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: {parts}." if parts else "Measured: not yet."
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
        check_complete(summary, str(directory / below))
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
            if options.add.is_file():
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
        outdated = f"{found}out of date: run python tools/results_tables.py"
        print(outdated if found else "the ledger is what the summaries give")
        return int(bool(found))
    for path, text in wanted.items():
        atomic_write_text(path, text)
        print(f"wrote {path.relative_to(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
