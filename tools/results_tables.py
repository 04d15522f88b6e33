"""Results ledger: generate results/README.md and other tables from stored summaries and published results.

    python tools/results_tables.py            write results/README.md and the blocks in README.md and docs/
    python tools/results_tables.py --check    exit 1 and say what differs, when they are not what the summaries give
    python tools/results_tables.py --add DIR --name NAME
                                              first store the summaries of a run, a compare or several orders of one,
                                              or the record of a benchmark (a file)

results/<data set>.jsonl has one summary per line with the name of its run, results/benchmarks.jsonl named benchmark
records, results/research.jsonl the summaries behind docs/dev/research-log.md and results/frozen-features.jsonl those of
docs/classifiers.md (research/frozen_classifiers.py), as results/photo-rounds.jsonl (research/photo_rounds.py). All
printed numbers are values of summaries, their means, spreads or medians, or published results in
src/efcil/reproduce/paper.yaml.
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
from efcil.experiment.specification import ExperimentSpec, resolve
from efcil.files import atomic_write_text, write_json_lines
from efcil.methods import METHODS, Method
from efcil.report import load_summaries
from efcil.report.groups import NONE, Value, group_runs
from efcil.report.load import TIMING, Run, parse_runs, requested_precision
from efcil.report.tables import md as escaped
from efcil.reproduce.result_index import own_options
from efcil.reproduce.result_index import paper as read_paper

sys.path.insert(0, str(Path(__file__).resolve().parent))

from benchmark_tables import BEGIN, BENCHMARKS, END, add_benchmark, benchmarks_text, read_lines, serve_text, table
from paper_gaps import FAR, cause_of, is_far
from readme_tables import PAPERS_ORDERS, headline_text, photos_text, readme_text

ROOT = Path(__file__).resolve().parent.parent
UNMEASURED = "not measured yet"
METRICS = ("A_f", "A_avg")
OTHERS = (BENCHMARKS, "research.jsonl", "frozen-features.jsonl", "photo-rounds.jsonl")
ABLATION = "ablation"  # prefix of runs that evaluate ablations on one trajectory
ABLATED = {
    "gaussian=0": "no Gaussians",
    "shift_view=clean": "no pseudo-samples in the map",
    "use_stages=0": "no intermediate stages",
    "use_stages=1": "1 intermediate stage",
    "use_stages=2": "2 intermediate stages",
}
KEPT_BACK = ("1", "2", "3")  # class orders not used for model selection nor in the paper

Config = tuple[tuple[str, str], ...]  # dotted key, value as JSON
Paper = Mapping[str, Mapping[int, Mapping[str, Mapping[str, Any]]]]  # data set -> tasks -> method -> numbers


@dataclass(frozen=True)
class Entry:
    """One classifier of a stored summary."""

    run: Run  # `method` is the label
    name: str  # name of the run
    config: Config  # flat options, training, data and requested precision
    usual: Config | None = None  # the same from the preset; None if it does not exist

    @property
    def unusual(self) -> bool:
        """Whether options were overridden that the method's name does not show."""
        return self.usual is not None and self.config != self.usual

    @property
    def kept_back(self) -> bool:
        """Whether its class order is reserved for reports."""
        return self.run.order in KEPT_BACK

    @property
    def paper_key(self) -> str:
        """Name of the method in paper.yaml, with its number of exemplars."""
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
        """Return the runs by class order."""
        found: dict[str, list[Run]] = {}
        for entry in self.entries:
            found.setdefault(entry.run.order or "?", []).append(entry.run)
        return found

    def value(self, metric: str) -> Value | None:
        """Return mean and sample standard deviation over class orders, after averaging repetitions and seeds per
        order."""
        means = []
        for runs in self.orders.values():
            of_order = Value.over(getattr(run, metric) for run in runs)
            means.append(None if of_order is None else of_order.mean)
        return Value.over(means)

    def seconds(self, fastest: bool = False) -> str:
        """Return the median time per machine, or of the fastest machine."""
        times: dict[str, list[float]] = {}
        for run in (entry.run for entry in self.entries):
            if run.seconds is not None:
                times.setdefault(run.timed_on or "device unknown", []).append(run.seconds)
        medians = [(statistics.median(values), execution) for execution, values in times.items()]
        chosen = sorted(medians)[:1] if fastest else medians
        return "; ".join(f"{_time(seconds)} ({execution})" for seconds, execution in chosen) or NONE

    def each(self, get: Callable[[Run], str]) -> list[str]:
        """Return the distinct values over the runs."""
        return list(dict.fromkeys(get(entry.run) or "?" for entry in self.entries))

    @property
    def variant(self) -> bool:
        """Whether it belongs to the ablation table: a part removed, or other options or presets."""
        entry = self.entries[0]
        return _is_variant(entry.run.method) or entry.unusual or entry.run.preset == "released_code"


@dataclass(frozen=True)
class Section:
    """Data set and split with published and measured results."""

    title: str
    paper: Mapping[str, Mapping[str, Any]]
    rows: tuple[Row, ...]  # best A_f first

    @cached_property
    def commands(self) -> dict[str, int]:
        """Return the commands of its runs with their numbers below the tables."""
        each = dict.fromkeys(command for row in self.rows for command in row.each(lambda run: run.command))
        return {command: number for number, command in enumerate(each, 1)}

    def lines(self, variant: bool) -> Iterator[tuple[str, Mapping[str, Any] | None, Row | None]]:
        """Yield (label, published result, measured row), measured rows first."""
        measured = [row for row in self.rows if row.variant == variant]
        for row in measured:
            entry = row.entries[0]
            yield row.label, None if entry.unusual or entry.kept_back else self.paper.get(entry.paper_key), row
        have = {e.paper_key for e in (row.entries[0] for row in measured) if not (e.unusual or e.kept_back)}
        missing = [key for key in self.paper if key not in have and _is_variant(key) == variant]
        for key in sorted(missing, key=lambda key: -self.paper[key]["A_f"]):
            yield key, self.paper[key], None


def _is_variant(label: str) -> bool:
    base, *overrides = label.partition("/")[0].split(":")
    return base.startswith("rrcr") or any(not setting.startswith("memory=") for setting in overrides)


def _time(seconds: float | None) -> str:
    return NONE if seconds is None else f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in tree.items():
        inner = _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: json.dumps(value)}
        found.update(inner)
    return found


# -- reading ---------------------------------------------------------------------------------------------------------


def key_of(summary: Mapping[str, Any]) -> tuple[int, str, str]:
    """Return the identity and sort key of a summary within a data set."""
    return summary["tasks"], summary["run"], summary["method"]


def check_complete(summary: Mapping[str, Any], where: str) -> None:
    """Raise RunError for a summary of an incomplete run."""
    if (done := summary["tasks_done"]) < (tasks := summary["tasks"]):
        raise RunError(f"{where}: {summary['method']} has {done} of {tasks} tasks; finish it with --resume")


def read_entries(results: Path) -> list[Entry]:
    """Load every classifier of every stored summary."""
    entries = []
    for path in sorted(results.glob("*.jsonl")):
        for summary in [] if path.name in OTHERS else read_lines(path):
            place = "/".join(map(str, (path.stem, *key_of(summary))))
            check_complete(summary, place)
            summary = _as_preset(summary | {"run_dir": place})
            config, usual = _config(summary)
            entries += [Entry(run, summary["run"], config, usual) for run in parse_runs([summary])]
    return entries


def _as_preset(summary: dict[str, Any]) -> dict[str, Any]:
    """Rename a summary to its method's default preset if its overrides equal that preset."""
    base, _, overrides = str(summary["method"]).partition(":")
    own = METHODS[base].preset if base in METHODS else ""
    for method in (base, f"{base}:{overrides}") if own and summary.get("preset") != own else ():
        config, usual = _config(summary | {"method": method, "preset": own})
        if config == usual:
            return summary | {"method": method, "preset": own}
    return summary


def _config(summary: Mapping[str, Any]) -> tuple[Config, Config | None]:
    """Return the options of a summary and those of its preset; options added later have their defaults."""

    def flat_(options: Mapping[str, Any], training: Mapping[str, Any], data: Mapping[str, Any]) -> Config:
        kept = {key: value for key, value in data.items() if key != "lazy"}  # does not affect pixels
        return tuple(sorted(_flat({**options, **training, "data": kept}).items()))

    asked = requested_precision(summary)
    apart = () if asked == "auto" else (("precision", asked),)
    given = [own_options(summary), *(summary.get(key, {}) for key in ("training", "data"))]
    try:
        experiment = resolve(ExperimentSpec((summary["method"],), summary["dataset"], preset=summary["preset"]))
        usual = (experiment.methods[summary["method"]][1], experiment.training, experiment.data)
        filled = [type(o).model_validate(g).model_dump(mode="json") for o, g in zip(usual, given, strict=True)]
    except (KeyError, EfcilError, ValidationError):
        return (*flat_(*given), *apart), None
    return (*flat_(*filled), *apart), flat_(*(options.model_dump(mode="json") for options in usual))


def sections_of(entries: Iterable[Entry], paper: Paper) -> list[Section]:
    """Return the paper's benchmarks in its order, measured or not, then the others."""
    found = {(entry.run.run_dir, entry.run.method): entry for entry in entries}
    made: dict[tuple[str, int, str], Section] = {
        (dataset, tasks, title := f"{dataset}, T = {tasks}"): Section(title, methods, ())
        for dataset, splits in paper.items()
        for tasks, methods in splits.items()
    }
    for benchmark in group_runs(entry.run for entry in found.values()):
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
        overrides = [set(config) for config in configurations]
        shared = set.intersection(*overrides)  # the others distinguish the configurations
        for config, members in configurations.items():
            usual = members[0].usual
            apart = ", ".join(f"{k}={v}" for k, v in config if (k, v) not in (shared if usual is None else usual))
            name = f"{label} [{apart}]" if apart else label
            parts = [tuple(m for m in members if m.kept_back is kept) for kept in (False, True)]
            if all(parts):  # separate rows for both kinds of orders
                orders = sorted({member.run.order for member in parts[1]})
                apart = f"{name}, order{'s' * (len(orders) > 1)} {', '.join(orders)}"
                rows += [Row(name, parts[0]), Row(apart, parts[1])]
            else:
                rows.append(Row(name, tuple(members)))
    return tuple(sorted(rows, key=lambda row: (-(v.mean if (v := row.value("A_f")) else 0.0), row.label)))


# -- writing ---------------------------------------------------------------------------------------------------------


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
    head += " | Time per run (s, median) | Commit | Command"
    return table(head, lines) if lines else []


def _each_run(section: Section) -> list[str]:
    rows = []
    for row in section.rows:
        for entry in sorted(row.entries, key=lambda entry: (entry.run.order, entry.run.seed, entry.run.run_dir)):
            run = entry.run
            cells = [*map(escaped, (row.label, run.order, run.seed)), f"{run.A_f:.2f}", f"{run.A_avg:.2f}"]
            cells += [_time(run.seconds), *map(escaped, (run.execution, run.commit, entry.name))]
            rows.append([*cells, str(section.commands[run.command or "?"])])
    head = "Method | Order | Seed | >A\\_f | >A\\_avg | >Seconds | Device | Commit | Run | Command"
    return ["<details><summary>Every run</summary>", "", *table(head, rows), "", "</details>", ""]


def _legend(paper: Paper) -> list[str]:
    orders: dict[str, str] = {}
    for splits in paper.values():
        for methods in splits.values():
            for numbers in methods.values():
                for n in (numbers, *numbers.get("also", [])):
                    orders[n["source"]] = ", ".join(n["orders"]) if n["orders"] else "orders not stated"
    return [f"- {source} of the paper: {text}" for source, text in sorted(orders.items())]


def full_text(sections: list[Section], paper: Paper) -> str:
    """Return the contents of results/README.md."""
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
    """Return the block of docs/results/accuracy.md with its markers."""
    lines, devices = list[str](), dict[str, None]()
    for section in sections:
        if section.title.startswith("digits"):
            continue  # the demo's; results/README.md has them
        rows = [
            [
                escaped(label),
                *(NONE if numbers is None else f"{numbers[m]:.2f}" for m in METRICS),
                *(_ours(row, m) for m in METRICS),
                _difference(row, numbers),
                "all three" if set(row.orders) == PAPERS_ORDERS else escaped(", ".join(sorted(row.orders))),
                escaped(_without_device(row.seconds(fastest=True), devices)),
            ]
            for label, numbers, row in section.lines(variant=False)
            if row is not None
        ]
        if rows:
            head = "Method | >Paper A\\_f | >Paper A\\_avg | >A\\_f | >A\\_avg | >Difference | Orders"
            head += " | >Time per run (s)"
            lines += [f"**{escaped(section.title)}**", "", *table(head, rows), ""]
    where = (
        f"Time per run in seconds on {' and '.join(devices)}; in brackets how many runs shared it." if devices else ""
    )
    return "\n".join([BEGIN, "", *([where, ""] if where else []), *lines, END])


def _without_device(seconds: str, devices: dict[str, None]) -> str:
    """Take the device out of a time, and note it.

    >>> _without_device("155 (NVIDIA H200, bf16)", {}), _without_device("9 (GPU, bf16, 4 concurrent runs)", {})
    ('155', '9 (4)')
    """
    found = re.fullmatch(r"(\S+) \((.+?)(?:, (\d+) concurrent runs)?\)", seconds)
    if found is None:
        return seconds
    devices[found[2]] = None
    return found[1] + (f" ({found[3]})" if found[3] else "")


def _difference(row: Row, numbers: Mapping[str, Any] | None) -> str:
    value = row.value("A_f")
    return NONE if value is None or numbers is None else f"{value.mean - numbers['A_f']:+.2f}"


def marked(name: str, text: str) -> str:
    """Return a block of a page with its markers."""
    return f"<!-- {name} -->\n\n{text}\n\n<!-- /{name} -->"


def gaps_text(sections: list[Section]) -> str:
    """Return what docs/fidelity.md begins with: what is not measured, and what is far from the paper."""
    unmeasured = [section.title for section in sections if section.paper and not section.rows]
    rows = []
    for section in sections:
        for label, numbers, row in section.lines(variant=False):
            value = row.value("A_f") if row is not None else None
            if row is not None and value is not None and numbers and is_far(value.mean - numbers["A_f"]):
                cells = [escaped(section.title), escaped(label), f"{numbers['A_f']:.2f}", value.text()]
                cells += [_difference(row, numbers), escaped(", ".join(sorted(row.orders)))]
                rows.append([*cells, cause_of(section.title, label)])
    rows.sort(key=lambda cells: float(cells[4]))
    return "\n".join(
        [
            f"Not measured: {escaped('; '.join(unmeasured))}.",
            "",
            f"More than {FAR:g} points of A\\_f from the paper, lowest first:",
            "",
            *table("Data | Method | >Paper A\\_f | >A\\_f | >Difference | Class orders | Cause", rows),
        ]
    )


def variants_text(sections: list[Section]) -> str:
    """Return the block of docs/fidelity.md: parts of DPCR, options and presets beside their method, by split."""
    lines = []
    for section in sections:
        rows = [row for row in section.rows if _method_of(row) != "dpcr-plus" and not row.entries[0].kept_back]
        varied = {_method_of(row) for row in rows if row.variant}
        cells = [
            [escaped(row.label), escaped(", ".join(sorted(row.orders))), *(_ours(row, m) for m in METRICS)]
            for row in rows
            if row.variant or _method_of(row) in varied
        ]
        if cells:
            head = f"Method | Class orders{''.join(f' | >{escaped(metric)}' for metric in METRICS)}"
            lines += [f"**{section.title}**", "", *table(head, cells), ""]
    return "\n".join([BEGIN, "", *lines, END])


def _method_of(row: Row) -> str:
    """Return the method of a row without its options; ablations of DPCR are DPCR's."""
    base = re.split(r"[:/]", row.entries[0].run.method)[0]
    return "dpcr" if base.startswith("rrcr") else base


def beyond_text(sections: list[Section]) -> str:
    """Return the block of docs/dpcr-plus.md: results of `dpcr-plus` and `dpcr` by data set."""
    lines = []
    for dataset in dict.fromkeys(s.title.partition(", ")[0] for s in sections):
        splits = [s for s in sections if s.title.startswith(f"{dataset}, T = ")]
        splits = [s for s in splits if any(row.label.startswith("dpcr-plus") for row in s.rows)]
        if splits:
            lines += [f"**{dataset}**", "", *_beyond(splits), "", *_ablation(dataset, splits)]
    return "\n".join([BEGIN, "", *lines, END])


def _beyond(splits: list[Section]) -> list[str]:
    """Return the table of one data set: one row per setting, `dpcr` last, reserved orders first."""
    rows: dict[str, list[Row | None]] = {}
    for at, split in enumerate(splits):
        for row in split.rows:
            apart = all(entry.name.startswith(ABLATION) for entry in row.entries)  # in a separate table
            if not apart and (row.label == "dpcr" or row.label.startswith(("dpcr, order", "dpcr-plus"))):
                rows.setdefault(row.label, [None] * len(splits))[at] = row
    cells = []
    for label, found in sorted(rows.items(), key=lambda item: (item[0] == "dpcr", item[0].startswith("dpcr,"))):
        orders = dict.fromkeys(order for row in found if row for order in row.each(lambda run: run.order))
        values = [_ours(row, m) for row in found for m in METRICS]
        short = re.sub(r" \[.*\]$", " (tuned options, given one by one)", label)  # results/README.md lists them
        cells.append([escaped(short), ", ".join(sorted(orders)), *values])
    return table(f"Method | Orders{_titles(s.title.partition(', ')[2] for s in splits)}", cells)


def _titles(splits: Iterable[str]) -> str:
    return "".join(f" | >{escaped(split)}: {escaped(metric)}" for split in splits for metric in METRICS)


def _ablation(dataset: str, splits: list[Section]) -> list[str]:
    """Return the ablation table: rows of one trajectory per split, and DPCR in that order; [] if there are none."""
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
    return [title, "", *table(head, cells), ""] if found else []


def _without(method: str) -> str:
    """Describe a variant of `dpcr-plus`.

    >>> _without("dpcr-plus:use_stages=1:gram_rank=84"), _without("dpcr-plus:ridge=3"), _without("dpcr-plus")
    ('1 intermediate stage', 'dpcr-plus:ridge=3', 'dpcr-plus')
    """
    base, *overrides = method.split(":")
    words = [ABLATED[setting] for setting in overrides if setting in ABLATED]
    known = all(setting in ABLATED or setting.startswith("gram_") for setting in overrides)
    return ", ".join(words) if words and known else "dpcr, trained as LwF" if base == "dpcr" else method


def methods_text(sections: list[Section]) -> str:
    """Return the data of `efcil methods`: published and measured results on CIFAR-100 in ten tasks."""
    found: dict[str, dict[str, list[float] | None]] = {}
    for section in sections:
        if section.title == "cifar100, T = 10":
            for variant in (False, True):
                for label, numbers, row in section.lines(variant):
                    paper = [numbers[m] for m in METRICS] if numbers else None
                    ours = [round(v.mean, 2) for m in METRICS if (v := row.value(m))] if row else None
                    found[label] = {"paper": paper, "ours": ours}
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def demo_text(results: Path) -> str:
    """Return what `efcil demo` says of other class orders: mean A_f over orders 1, 2 and 3, by method."""
    found: dict[str, list[float]] = {}
    for summary in read_lines(results / "digits.jsonl"):
        if summary["run"].startswith("demo-order-") and str(summary["order"]) in ("1", "2", "3"):
            found.setdefault(summary["method"], []).append(summary["A_f"])
    complete = {method: round(statistics.mean(values), 2) for method, values in found.items() if len(values) == 3}
    return json.dumps(complete, indent=1, sort_keys=True) + "\n"


def measured_text(file: str, sections: list[Section]) -> str:
    """Return the paragraph of a classifier's file with the CIFAR-100 results of its methods."""
    found: dict[str, list[str]] = {}
    for section in sections:
        if section.title not in ("cifar100, T = 10", "cifar100, T = 20"):
            continue
        for label, numbers, row in section.lines(False):
            name = re.split(r"[:/ ]", label)[0]  # without settings, classifier or preset
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
    return method.heads.get(head, method.classifier).__module__ == f"efcil.classifiers.{file}"


def wanted_files(root: Path) -> tuple[dict[Path, str], list[str]]:
    """Return the expected contents of all files, and notes."""
    results = root / "results"
    paper = read_paper()
    sections = sections_of(read_entries(results), paper)
    wanted = {results / "README.md": full_text(sections, paper)}
    measured = root / "src" / "efcil" / "presets" / "measured.json"
    if measured.parent.is_dir():
        wanted[measured] = methods_text(sections)
        wanted[measured.with_name("demo.json")] = demo_text(results)
    notes = []
    photos = photos_text(read_lines(results / "frozen-features.jsonl"))
    headline = "\n\n".join(filter(None, [headline_text(sections), photos]))
    blocks = [
        ("README.md", marked("headline", headline)),
        ("README.md", marked("results", readme_text(sections))),
        ("docs/index.md", marked("headline", headline)),
        ("docs/results/accuracy.md", compact_text(sections)),
        ("docs/fidelity.md", marked("gaps", gaps_text(sections))),
        ("docs/fidelity.md", variants_text(sections)),
        ("docs/dpcr-plus.md", beyond_text(sections)),
        ("docs/dev/performance.md", benchmarks_text(results)),
        ("docs/serve.md", serve_text(results)),
    ]
    for path in sorted((root / "src" / "efcil" / "classifiers").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if found := re.search(r"^Measured.*?\.$(?=\n\"\"\"|\n\n)", text, re.MULTILINE | re.DOTALL):
            wanted[path] = text[: found.start()] + measured_text(path.stem, sections) + text[found.end() :]
    for name, block in blocks:
        path, (begin, end) = root / name, (block.splitlines()[0], block.splitlines()[-1])
        text = wanted.get(path) or (path.read_text(encoding="utf-8") if path.is_file() else "")
        if begin not in text or end not in text.partition(begin)[2]:
            notes.append(f"{name} has no block {begin} ... {end}: left alone")
            continue
        before, _, rest = text.partition(begin)
        wanted[path] = before + block + rest.partition(end)[2]
    return wanted, notes


# -- adding ----------------------------------------------------------------------------------------------------------


def public(command: str) -> str:
    """Remove local directories from a command.

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


def add(directory: Path, name: str, results: Path, concurrent_runs: int = 1) -> list[str]:
    """Store the summaries at or below `directory` in results/ under a run name, without overwriting.

    `concurrent_runs` includes runs of other processes on the same device.
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
            raise RunError(f"{place} exists with other contents; choose another --name")
        added.append(place)
    for file, found in lines.items():
        write_json_lines(results / file, [found[key] for key in sorted(found)])
    return added


def differences(wanted: Mapping[Path, str], root: Path) -> str:
    """Return a diff of files on disk and expected contents; empty if they are equal."""
    found = ""
    for path, text in wanted.items():
        current = path.read_text(encoding="utf-8") if path.is_file() else ""
        name = path.relative_to(root).as_posix()
        lines = difflib.unified_diff(current.splitlines(), text.splitlines(), f"{name} on disk", f"{name} wanted", n=0)
        found += "".join(f"{line.rstrip()}\n" for line in lines)
        if not found and current != text:
            found += f"{name}: line ends differ\n"
    return found


def main(arguments: list[str] | None = None) -> int:
    """Write, check or add; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the files are out of date")
    parser.add_argument(
        "--add", type=Path, metavar="DIR", help="a run, a compare, a compare of several orders, or a benchmark's record"
    )
    parser.add_argument("--name", help="name of the run or benchmark in results/")
    parser.add_argument(
        "--concurrent-runs", type=int, default=1, help="runs sharing its device, including other processes and itself"
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
