"""Results where they are computed: aligned text for a terminal, a table and curves for a notebook."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from html import escape

from efcil.report.groups import CAPTION, COLUMNS, NONE, Benchmark, Group, duration
from efcil.report.styles import COLORS, Style, shorten, styles_for
from efcil.report.svg import WIDE, curve_elements, swatch_elements

__all__ = ["CAPTION", "curves_document", "html_matrix", "html_table", "text_matrix", "text_table"]

_SHOWN = [column for column in COLUMNS if column.key in ("A_f", "A_avg", "forgetting")]
_LABEL = 28  # characters of a method's name and how far it is: the table fits into 80
_MOST_TASKS = 20  # of a matrix in a terminal
WIDTH, HEIGHT = WIDE
_LEGEND, _ROW, _HEAD = 270, 24, 34  # width, height of a line, height of the title
_SHEET = (
    ".efcil-curves text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;fill:#1b2028}"
    ".efcil-curves .grid{stroke:#e1e5ea;stroke-width:1}.efcil-curves .tick{fill:#5d6673;font-size:12.5px}"
    ".efcil-curves .axis{fill:#5d6673;font-size:13px}.efcil-curves .title{font-size:15px;font-weight:600}"
    ".efcil-curves .name{font-size:13px}.efcil-curves .head{fill:#5d6673;font-size:12.5px}"
    ".efcil-curves .line{fill:none;stroke-width:2.2;stroke-linejoin:round}.efcil-curves .band{opacity:.13}"
    ".efcil-curves .dot{stroke:#fff;stroke-width:1}"
)


# --- text ------------------------------------------------------------------------------------------------------------


def text_table(benchmarks: Sequence[Benchmark]) -> str:
    """One aligned table for each benchmark, best method first, and a line that says what the columns are."""
    blocks = [_text_block(benchmark) for benchmark in benchmarks]
    return "\n\n".join([*blocks, CAPTION])


def _text_block(benchmark: Benchmark) -> str:
    rows = [["Method", *(column.title for column in _SHOWN), "Time"]]
    for group in benchmark.groups:
        cells = [NONE if (value := group.value(column)) is None else value.text() for column in _SHOWN]
        seconds = group.seconds
        rows.append([_name(group), *cells, NONE if seconds is None else duration(seconds.mean)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])  # names left, numbers right
        for row in rows
    ]
    rule = "─" * len(lines[0])
    notes = [textwrap.fill(note, 80) for note in benchmark.notes]
    return "\n".join([_title(benchmark), rule, lines[0].rstrip(), rule, *lines[1:], rule, *notes])


def _title(benchmark: Benchmark) -> str:
    orders = benchmark.orders
    return f"{benchmark.title}" + (f", order{'s' if ',' in orders else ''} {shorten(orders, 40)}" if orders else "")


def _name(group: Group, limit: int = _LABEL) -> str:
    state = f" ({group.runs[0].tasks_done} of {group.runs[0].tasks} tasks)" if group.partial else ""
    return shorten(group.label, limit - len(state)) + state


def text_matrix(group: Group) -> str:
    """Accuracy on each task (across) after each task (down); nothing where that is too wide for a terminal."""
    matrix = group.matrix
    if not matrix or len(matrix) > _MOST_TASKS:
        return ""
    head = "after task" + "".join(f"{task + 1:>7}" for task in range(len(matrix)))
    rows = [
        f"{after + 1:>10}" + "".join(f"{value:7.1f}" for value in row[: after + 1] if value is not None)
        for after, row in enumerate(matrix)
    ]
    return "\n".join([head, *rows])


# --- HTML ------------------------------------------------------------------------------------------------------------

_RULE = "1px solid rgba(128,128,128,.4)"  # on white and on black
_CELL = "padding:4px 12px;text-align:right;background:none;border:0;white-space:nowrap"


def html_table(benchmarks: Sequence[Benchmark]) -> str:
    """A table for each benchmark, with the notebook's own ink and paper: nothing of it is a color."""
    return "".join(_html_block(benchmark) for benchmark in benchmarks) + f"<p>{_formula(CAPTION)}</p>"


def _html_block(benchmark: Benchmark) -> str:
    left = _CELL.replace("right", "left")
    head = "".join(
        f'<th style="{_CELL};border-bottom:{_RULE}" title="{escape(column.help)}">{_formula(column.title)}</th>'
        for column in _SHOWN
    )
    rows = []
    for group in benchmark.groups:
        cells = []
        for column in _SHOWN:
            value = group.value(column)
            text = NONE if value is None else f"{value.mean:.2f}"
            text = f"<b>{text}</b>" if benchmark.is_best(group, column) else text
            if value is not None and value.spread is not None:
                text += f'<span style="opacity:.65"> ± {value.spread:.2f}</span>'
            cells.append(f'<td style="{_CELL}">{text}</td>')
        seconds = NONE if group.seconds is None else duration(group.seconds.mean)
        rows.append(
            f'<tr style="background:none"><th style="{left};font-weight:500" title="{escape(group.label)}">'
            f'{escape(_name(group))}</th>{"".join(cells)}<td style="{_CELL}">{seconds}</td></tr>'
        )
    notes = "".join(f"<br>{escape(note)}" for note in benchmark.notes)
    return (
        f'<div style="overflow-x:auto"><table style="border-collapse:collapse;border:0;'
        f'font-variant-numeric:tabular-nums"><caption style="caption-side:top;text-align:left;color:inherit">'
        f"<b>{escape(_title(benchmark))}</b></caption><thead><tr>"
        f'<th style="{left};border-bottom:{_RULE}">Method</th>{head}'
        f'<th style="{_CELL};border-bottom:{_RULE}">Time</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
        f'<span style="font-size:90%">{notes.removeprefix("<br>")}</span></div>'
    )


def html_matrix(group: Group) -> str:
    """Accuracy on each task (across) after each task (down)."""
    matrix = group.matrix
    if not matrix:
        return ""
    head = "".join(f'<th style="{_CELL};border-bottom:{_RULE}">{task + 1}</th>' for task in range(len(matrix)))
    rows = []
    for after, row in enumerate(matrix):
        cells = "".join(
            f'<td style="{_CELL}">{"" if value is None or task > after else f"{value:.1f}"}</td>'
            for task, value in enumerate(row[: len(matrix)])
        )
        rows.append(f'<tr style="background:none"><th style="{_CELL}">{after + 1}</th>{cells}</tr>')
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;border:0;'
        f'font-variant-numeric:tabular-nums"><thead><tr><th style="{_CELL};border-bottom:{_RULE}">after task</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _formula(text: str) -> str:
    return re.sub(r"\bA_(\w+)", r"<i>A</i><sub>\1</sub>", escape(text))


# --- SVG -------------------------------------------------------------------------------------------------------------


def curves_document(benchmarks: Sequence[Benchmark]) -> str:
    """One SVG of the accuracy after each task, a panel for each benchmark, that is whole without a page around it.

    It has a white background and names every color: it looks alike in a notebook, a browser and a drawing program.
    """
    styles = styles_for(group for benchmark in benchmarks for group in benchmark.groups)
    panels, top = [], 0
    for benchmark in benchmarks:
        height = max(HEIGHT, _ROW * (len(benchmark.groups) + 2)) + _HEAD
        panels.append(f'<g transform="translate(0 {top})">{_panel(benchmark, styles)}</g>')
        top += height
    width = WIDTH + _LEGEND
    document = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="efcil-curves" width="{width}" height="{top}" '
        f'viewBox="0 0 {width} {top}" role="img" style="max-width:100%;height:auto">'
        f"<title>Accuracy after each task</title><style>{_SHEET}</style>"
        f'<rect width="{width}" height="{top}" fill="#fff"/>'
        f"{''.join(panels)}</svg>"
    )
    return re.sub(r"var\(--c(\d+)\)", lambda slot: COLORS[int(slot[1])], document)


def _panel(benchmark: Benchmark, styles: dict[str, Style]) -> str:
    lines = [f'<text class="head" x="{WIDTH + 48}" y="{_HEAD + 22}">final accuracy, %</text>']
    drawn = [group for group in benchmark.groups if group.curve]
    for row, group in enumerate(drawn, 1):
        final = group.value(COLUMNS[0])
        y = _HEAD + 22 + row * _ROW
        lines.append(
            f'<g transform="translate({WIDTH + 4} {y - 11})">{swatch_elements(styles[group.label])}</g>'
            f'<text class="name" x="{WIDTH + 48}" y="{y}">{escape(_name(group, 24))}</text>'
            f'<text class="name" x="{WIDTH + _LEGEND - 14}" y="{y}" text-anchor="end">'
            f"{NONE if final is None else f'{final.mean:.2f}'}</text>"
        )
    return (
        f'<text class="title" x="16" y="24">{escape(shorten(_title(benchmark), 90))}</text>'
        f'<g transform="translate(0 {_HEAD})">{curve_elements(benchmark, styles)}</g>{"".join(lines)}'
    )
