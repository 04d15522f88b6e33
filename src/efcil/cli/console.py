"""Tables for people: drawn with rich on a terminal, plain text elsewhere."""

from __future__ import annotations

import html
import os
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PLAIN_WIDTH = 200  # columns of what is piped: nothing is folded
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
            out.print(_table(rows))
            rows = []
        if line.startswith("#"):
            out.print(Text(_unescaped(line.lstrip("# ")), style="bold"))
        elif not line.startswith("!["):  # a picture is a file beside it
            out.print(_styled(line.rstrip()), soft_wrap=True)


def _table(rows: list[list[str]]) -> Table:
    head, align, *body = rows
    table = new_table()
    for title, rule in zip(head, align, strict=True):
        numbers = rule.endswith(":")
        table.add_column(_unescaped(title), justify="right" if numbers else "left", no_wrap=numbers, overflow="fold")
    for cells in body:
        table.add_row(*map(_styled, cells))
    return table


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
