"""Text tables: Markdown and LaTeX with one row per method, CSV with one row per run at full precision."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

from efcil.report.groups import CAPTION, COLUMNS, NONE, Benchmark, Group, group_runs
from efcil.report.load import Run, Summary, parse_runs

__all__ = ["csv_table", "latex_table", "markdown_table", "md", "row", "tex"]

_MARKDOWN = re.compile(r"([\\`*_{}\[\]|~$])")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "…": r"\ldots{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def markdown_table(summaries: Iterable[Summary]) -> str:
    """Return one Markdown table per benchmark, with the best value of each column in bold."""
    return "\n".join(_markdown(benchmark) for benchmark in group_runs(parse_runs(summaries)))


def _markdown(benchmark: Benchmark) -> str:
    head = ["Method", *(column.title.replace("_", r"\_") for column in COLUMNS), "Orders", "Seconds", "Status"]
    align = ["---", *["---:"] * len(COLUMNS), "---", "---:", "---"]
    lines = [f"### {md(benchmark.title)}", "", row(head), row(align)]
    for group in benchmark.groups:
        cells = [md(group.label)]
        for column in COLUMNS:
            value = group.value(column)
            text = NONE if value is None else value.text()
            cells.append(f"**{text}**" if benchmark.is_best(group, column) else text)
        seconds = group.seconds
        cells += [md(group.orders), NONE if seconds is None else f"{seconds.mean:.0f}", group.status]
        lines.append(row(cells))
    lines.append("")
    lines += [f"{note}  " for note in (md(CAPTION), *benchmark.notes)]
    return "\n".join(lines).rstrip() + "\n"


def row(cells: Iterable[str]) -> str:
    """Join the cells of a Markdown row."""
    return "| " + " | ".join(cells) + " |"


def md(text: str) -> str:
    """Escape a text for Markdown."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", escaped)


def latex_table(summaries: Iterable[Summary]) -> str:
    """Return a booktabs table with one row per method, and A_f and A_avg of each benchmark."""
    benchmarks = group_runs(parse_runs(summaries))
    labels = list(dict.fromkeys(group.label for benchmark in benchmarks for group in benchmark.groups))
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{tabular}{l" + "rr" * len(benchmarks) + "}",
        r"\toprule",
        " & ".join(["", *(rf"\multicolumn{{2}}{{c}}{{{_tex_title(b)}}}" for b in benchmarks)]).lstrip() + r" \\",
        " ".join(rf"\cmidrule(lr){{{2 * i + 2}-{2 * i + 3}}}" for i in range(len(benchmarks))),
        " & ".join(["Method", *[r"$A_f$ & $A_{avg}$"] * len(benchmarks)]) + r" \\",
        r"\midrule",
    ]
    footnote = False
    for label in labels:
        cells = [tex(label)]
        for benchmark in benchmarks:
            # A complete and a partial group may share a label; the complete one comes first.
            group = next((group for group in benchmark.groups if group.label == label), None)
            footnote |= group is not None and group.partial
            cells += [_tex_value(benchmark, group, column) for column in (0, 1)]
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    if footnote:
        lines.append(r"% $^{*}$: partial run, after the completed tasks")
    notes = dict.fromkeys(note for benchmark in benchmarks for note in benchmark.notes)
    return "\n".join([*lines, *(f"% {note}" for note in notes)]) + "\n"


def _tex_title(benchmark: Benchmark) -> str:
    title = tex(benchmark.title)
    return title.replace(f"T = {benchmark.tasks}", f"$T = {benchmark.tasks}$")


def _tex_value(benchmark: Benchmark, group: Group | None, index: int) -> str:
    value = None if group is None else group.value(COLUMNS[index])
    if group is None or value is None:
        return "--"
    mean = f"{value.mean:.2f}"
    if benchmark.is_best(group, COLUMNS[index]):
        mean = rf"\textbf{{{mean}}}"
    if group.partial:
        mean += "$^{*}$"
    return mean if value.spread is None else rf"{mean} {{\scriptsize$\pm${value.spread:.2f}}}"


def tex(text: str) -> str:
    """Escape a text for LaTeX."""
    return "".join(_LATEX.get(letter, letter) for letter in text)


def csv_table(summaries: Iterable[Summary]) -> str:
    """Return one row per run at full precision; columns A_1 to A_T are the accuracy after each task."""
    runs = parse_runs(summaries)
    tasks = max(len(run.A_t) for run in runs)
    fields = ["method", "preset", "dataset", "tasks", "tasks_done", "task_sizes", "order", "seed"]
    numbers = ["A_f", "A_avg", "A5_f", "old", "new", "forgetting", "bwt", "seconds"]
    execution = ["device", "precision", "threads", "world_size", "concurrent_runs"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    after = [f"A_{t + 1}" for t in range(tasks)]
    writer.writerow([*fields, "status", *numbers, *execution, "commit", "command", *after])
    for run in runs:
        writer.writerow(
            [
                *(_plain(run, field) for field in fields),
                "partial" if run.partial else "complete",
                *(_plain(run, field) for field in (*numbers, *execution)),
                *(run.commit, run.command),
                *run.A_t,
                *[""] * (tasks - len(run.A_t)),
            ]
        )
    return text.getvalue()


def _plain(run: Run, field: str) -> object:
    value = getattr(run, field)
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value is None else value
