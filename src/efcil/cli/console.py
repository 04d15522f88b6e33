"""Tables for people: drawn with rich on a terminal, plain text elsewhere."""

from __future__ import annotations

import html
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PLAIN_WIDTH = 200  # columns of what is piped: nothing is folded
FIRST_WIDTH, OTHER_WIDTH = 24, 12  # columns that text has before others are left out
WIDE, NARROW = 118, ("A_f", "A_avg", "forgetting")  # columns from which all measures are shown, and those of fewer
_CELLS = re.compile(r"(?<!\\)\|")
_ESCAPED = re.compile(r"\\(\W|_)")
_RULE = re.compile(r":?-+:?")


def console() -> Console:
    """Return a console as wide as the terminal; wide enough for every table where there is none."""
    from rich.console import Console

    plain = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PLAIN_WIDTH if plain else None, soft_wrap=False, highlight=False, emoji=False)


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table of our look; columns named in `right` hold numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
    for column in columns:
        table.add_column(
            column, justify="right" if column in right else "left", no_wrap=column in right, overflow="fold"
        )
    return table


def print_markdown(text: str) -> None:
    """Print a Markdown text of ours for people: its tables as tables, its titles in bold, nothing escaped."""
    from rich.text import Text

    out = console()
    rows: list[list[str]] = []
    for line in [*text.rstrip().splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in _CELLS.split(line)[1:-1]])
            continue
        if rows:
            table, missing = _table(rows, out)
            out.print(table)
            if missing:
                out.print(f"not shown here: {', '.join(missing)}", style="dim")
            rows = []
        if line.startswith("#"):
            out.print(Text(_unescaped(line.lstrip("# ")), style="bold"))
        elif not line.startswith("!["):  # a picture is a file beside it
            out.print(_styled(line.rstrip()), soft_wrap=line.startswith("`"))  # a command is not cut into lines


def _table(rows: list[list[str]], out: Console) -> tuple[Table, list[str]]:
    """Return a table of as many columns as fit, and the titles of those that do not."""
    head, align, *body = rows
    for count in range(len(head), 1, -1):
        table = new_table()
        for index, (title, rule) in enumerate(zip(head[:count], align, strict=False)):
            numbers = rule.endswith(":")
            words = _unescaped(title).replace(" ", "\n") if numbers else _unescaped(title)
            longest = max((len(_unescaped(cells[index])) for cells in body), default=0)
            table.add_column(
                words,
                justify="right" if numbers else "left",
                no_wrap=numbers,
                overflow="fold",
                min_width=min(longest, FIRST_WIDTH) if index == 0 else min(longest, OTHER_WIDTH),
            )
        for cells in body:
            table.add_row(*map(_styled, cells[:count]))
        if count == 2 or table.__rich_measure__(out, out.options).minimum <= out.width:
            break
    return table, [_unescaped(title) for title in head[count:]]


def print_runs(summaries: Iterable[Mapping[str, Any]]) -> None:
    """Print a table for each data set and split: its methods, best first, with as many measures as fit."""
    from rich.text import Text

    from efcil.report.groups import CAPTION, COLUMNS, NONE, duration, group_runs
    from efcil.report.load import parse_runs

    out = console()
    shown = COLUMNS if out.width >= WIDE else [column for column in COLUMNS if column.key in NARROW]
    for benchmark in group_runs(parse_runs(summaries)):
        titles = [column.title for column in shown]
        table = new_table("method", *titles, "time", right=(*titles, "time"))
        for group in benchmark.groups:
            cells = [NONE if (value := group.value(column)) is None else value.text() for column in shown]
            styles = ["bold green" if benchmark.is_best(group, column) else "" for column in shown]
            name = f"{group.label}, {group.status}" if group.partial else group.label
            name += f", order {group.orders}" if group.orders != benchmark.orders else ""
            time = NONE if group.seconds is None else duration(group.seconds.mean)
            table.add_row(Text(name), *(Text(c, style=s) for c, s in zip(cells, styles, strict=True)), Text(time))
        out.print(Text(f"{benchmark.title}, class order {benchmark.orders}", style="bold"))
        out.print(table)
        out.print(Text(" ".join([CAPTION, *benchmark.notes]), style="dim"))


def _styled(text: str) -> Text:
    from rich.text import Text

    bold = text.startswith("**") and text.endswith("**") and len(text) > 4
    return Text(_unescaped(text[2:-2] if bold else text).replace("`", ""), style="bold green" if bold else "")


def _unescaped(text: str) -> str:
    r"""Undo the escapes of Markdown.

    >>> _unescaped(r"A\_f &lt; 3")
    'A_f < 3'
    """
    return html.unescape(_ESCAPED.sub(r"\1", text))
