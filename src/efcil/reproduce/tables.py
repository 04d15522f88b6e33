"""The paper's tables with published result, our result, difference and time, as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from efcil.report.groups import CAPTION, NONE, Value
from efcil.report.tables import md, row, tex
from efcil.reproduce.result_index import ResultIndex, published

METRICS = {"A_f": "$A_f$", "A_avg": "$A_{avg}$"}
MISSING = "not measured"


@dataclass(frozen=True)
class Benchmark:
    """Data set and split in a table."""

    dataset: str
    tasks: int

    @property
    def title(self) -> str:
        """Title text."""
        return f"{self.dataset}, T = {self.tasks}"


@dataclass(frozen=True)
class TableRow:
    """Row of a table: published and measured results of a method."""

    method: str
    words: str
    paper: Mapping[str, Any] | None
    values: Mapping[str, Value | None]  # by metric, mean over `orders`
    orders: tuple[str, ...]  # measured class orders
    seconds: float | None  # of the fastest run
    device: str

    def difference(self, metric: str) -> float | None:
        """Return our result minus the published one."""
        value = self.values[metric]
        return None if self.paper is None or value is None else value.mean - self.paper[metric]


@dataclass(frozen=True)
class Table:
    """Table of the paper."""

    name: str
    title: str
    source: str  # as paper.yaml names it
    benchmarks: tuple[Benchmark, ...]
    methods: Mapping[str, str]  # label -> title
    orders: tuple[str, ...]

    def lines(self, benchmark: Benchmark, index: ResultIndex) -> list[TableRow]:
        """Return the rows of a benchmark."""
        rows = []
        for method, words in self.methods.items():
            runs = {o: r for o in self.orders if (r := index.get(benchmark.dataset, benchmark.tasks, o, method))}
            values = {metric: Value.over(getattr(r, metric) for r in runs.values()) for metric in METRICS}
            seconds = min((r.seconds for r in runs.values() if r.seconds is not None), default=None)
            devices = "; ".join(dict.fromkeys(r.timed_on for r in runs.values()))
            entry = published(benchmark.dataset, benchmark.tasks, method, self.source)
            rows.append(TableRow(method, words, entry, values, tuple(runs), seconds, devices))
        return rows

    def complete(self, index: ResultIndex) -> bool:
        """Return whether every result was measured in every order."""
        lines = (line for benchmark in self.benchmarks for line in self.lines(benchmark, index))
        return all(line.orders == self.orders for line in lines)

    def markdown(self, index: ResultIndex, command: str) -> str:
        """Return one Markdown table per benchmark."""
        parts = [f"# {self.title}", "", f"`{command}`", ""]
        for benchmark in self.benchmarks:
            head = ["Method"]
            for metric in METRICS:
                name = metric.replace("_", r"\_")
                head += [f"{name} paper", f"{name} ours", "difference"]
            parts += [f"## {md(benchmark.title)}", "", row([*head, "orders", "seconds"])]
            parts.append(row(["---", *["---:"] * 6, "---", "---:"]))
            lines = self.lines(benchmark, index)
            for line in lines:
                cells = [md(line.words)]
                for metric in METRICS:
                    value, gap = line.values[metric], line.difference(metric)
                    cells.append(NONE if line.paper is None else f"{line.paper[metric]:.2f}")
                    cells.append(MISSING if value is None else value.text())
                    cells.append(NONE if gap is None else f"{gap:+.2f}")
                seconds = NONE if line.seconds is None else f"{line.seconds:.0f}"
                parts.append(row([*cells, ", ".join(line.orders) or NONE, seconds]))
            devices = "; ".join(dict.fromkeys(part for line in lines for part in line.device.split("; ") if part))
            shared = f"Seconds of the fastest training, which all rows of a group share, on {devices}."
            parts += ["", *([shared, ""] * bool(devices))]
        parts += [md(CAPTION), ""]
        several = any(
            line.values["A_f"] and line.values["A_f"].spread for b in self.benchmarks for line in self.lines(b, index)
        )
        if several:
            parts.append("± is the sample standard deviation over the class orders.")
        return "\n".join(parts).rstrip() + "\n"

    def latex(self, index: ResultIndex) -> str:
        """Return a booktabs table of our results, with the published ones in brackets and our best in bold."""
        benchmarks = [(benchmark, self.lines(benchmark, index)) for benchmark in self.benchmarks]
        titles = [tex(b.title).replace(f"T = {b.tasks}", f"$T = {b.tasks}$") for b in self.benchmarks]
        lines = [
            r"% needs \usepackage{booktabs}; ours, in brackets the paper's",
            r"\begin{tabular}{l" + "rr" * len(benchmarks) + "}",
            r"\toprule",
            " & ".join(["", *(rf"\multicolumn{{2}}{{c}}{{{title}}}" for title in titles)]).lstrip() + r" \\",
            " ".join(rf"\cmidrule(lr){{{2 * i + 2}-{2 * i + 3}}}" for i in range(len(benchmarks))),
            " & ".join(["Method", *[" & ".join(METRICS.values())] * len(benchmarks)]) + r" \\",
            r"\midrule",
        ]
        for number, words in enumerate(self.methods.values()):
            cells = [tex(words)]
            for _, own in benchmarks:
                best = {m: max((v.mean for o in own if (v := o.values[m])), default=None) for m in METRICS}
                cells += [_tex_cell(own[number], metric, best[metric]) for metric in METRICS]
            lines.append(" & ".join(cells) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"

    def csv(self, index: ResultIndex) -> str:
        """Return one row per value at full precision."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        head = ["dataset", "tasks", "method", "metric", "paper", "ours", "spread", "difference", "orders", "seconds"]
        writer.writerow([*head, "device"])
        for benchmark in self.benchmarks:
            for line in self.lines(benchmark, index):
                for metric in METRICS:
                    value = line.values[metric]
                    numbers = [None, None] if value is None else [value.mean, value.spread]
                    values = [line.paper[metric] if line.paper else None, *numbers, line.difference(metric)]
                    details = [" ".join(line.orders), *_plain([line.seconds]), line.device]
                    writer.writerow(
                        [benchmark.dataset, benchmark.tasks, line.method, metric, *_plain(values), *details]
                    )
        return text.getvalue()


def _plain(values: Sequence[float | None]) -> list[float | str]:
    return ["" if value is None else value for value in values]


def _tex_cell(line: TableRow, metric: str, best: float | None) -> str:
    value = line.values[metric]
    mean = "--" if value is None else f"{value.mean:.2f}"
    if value is not None and best is not None and mean == f"{best:.2f}":
        mean = rf"\textbf{{{mean}}}"
    return mean if line.paper is None else rf"{mean} {{\scriptsize({line.paper[metric]:.2f})}}"
