"""Commands that show what there is: methods, options, doctor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from efcil.cli.options import TOOLS, JsonFlag

if TYPE_CHECKING:
    from efcil.cli.catalog import OptionGroup

app = typer.Typer()


@app.command(rich_help_panel=TOOLS)
def methods(
    name: Annotated[
        str,
        typer.Argument(help="Method whose parts and options are shown; without one, all methods.", show_default=False),
    ] = "",
    json: JsonFlag = False,
) -> None:
    """List the methods with their components and accuracy, or the options of one."""
    from efcil.cli import catalog

    if name:
        _one_method(name, json)
        return
    rows = catalog.method_rows()
    if json:
        _print_json(rows)
    else:
        _method_table(rows)


@app.command(rich_help_panel=TOOLS)
def options(
    name: Annotated[
        str,
        typer.Argument(help="Method, learner, shift, classifier or data set; without one, all.", show_default=False),
    ] = "",
    json: JsonFlag = False,
) -> None:
    """List options for --set: meaning, default and preset values."""
    from efcil.cli import catalog

    if name.casefold() in _method_names() or "+" in name:
        _one_method(name, json)
        return
    groups = catalog.part_options(name) if name else catalog.all_options()
    if json:
        _print_json(_plain(groups))
        return
    if not groups:
        print(f"{name} has no options of its own")
    _option_tables(groups)
    if not name:
        print("efcil options METHOD adds the values of each preset")


@app.command(rich_help_panel=TOOLS)
def doctor() -> None:
    """Show hardware and optional dependencies."""
    from efcil.cli.doctor import examine

    for line in examine():
        print(line)


def _method_names() -> set[str]:
    from efcil.cli.catalog import method_rows

    return {row["method"].casefold() for row in method_rows()}


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, ensure_ascii=False, indent=1))


def _plain(groups: Sequence[OptionGroup]) -> list[dict[str, Any]]:
    from dataclasses import asdict

    return [{"of": group.title, **asdict(row)} for group in groups for row in group.rows]


def _method_table(rows: Sequence[dict[str, Any]]) -> None:
    from efcil.cli.catalog import KINDS
    from efcil.cli.console import WIDE, console, new_table

    out = console()
    wide = out.width >= WIDE
    more = ("paper", "memory per class") if wide else ()
    table = new_table("method", "learner", "shift", "classifier", "A_f", "A_avg", *more, right=("A_f", "A_avg"))
    table.columns[0].no_wrap = True
    for kind in dict.fromkeys((*KINDS, *(row["kind"] for row in rows))):
        members = [row for row in rows if row["kind"] == kind]
        if members:
            table.add_row(f"[dim]{kind}[/dim]")
        for row in members:
            parts = ["-" if row[key] == "none" else row[key] for key in ("learner", "shift", "classifier")]
            ours = ["-", "-"] if row["ours"] is None else [f"{value:.2f}" for value in row["ours"]]
            paper = "-" if row["paper"] is None else " / ".join(f"{value:.2f}" for value in row["paper"])
            table.add_row(f"[bold]{row['method']}[/bold]", *parts, *ours, *((paper, row["memory"]) if wide else ()))
        table.add_section()
    out.print(table)
    memory = " Memory in numbers: d is the feature dimension, b the width of the expansion." if wide else ""
    out.print(
        "A_f: accuracy over all classes after the last task, in %. A_avg: mean over tasks of the accuracy over the "
        "classes seen. Ours, on CIFAR-100 in ten tasks, mean over class orders; with exemplars, 500 in all." + memory,
        style="dim",
    )
    out.print("efcil methods NAME shows the options of one; learner+shift+classifier names any other combination.")


def _one_method(name: str, json: bool) -> None:
    from efcil.cli import catalog
    from efcil.cli.console import console
    from efcil.methods import find

    groups = catalog.method_options(name)
    if json:
        _print_json(_plain(groups))
        return
    method = find(name)
    learner, shift, classifier = method.parts
    out = console()
    out.print(
        f"[bold]{method.title}[/bold] ({method.paper})" if method.paper.strip("-") else f"[bold]{method.title}[/bold]"
    )
    out.print(f"learner {learner}, shift {shift}, classifier {classifier}; memory per class: {method.memory_formula}")
    if method.overrides:
        fixed = ", ".join(f"{key}={catalog.show_value(value)}" for key, value in method.overrides.items())
        out.print(f"fixed: {fixed}")
    _option_tables(groups)
    out.print(
        "Presets are shown where they differ from the default. Change an option with --set KEY=VALUE.", style="dim"
    )


def _option_tables(groups: Sequence[OptionGroup]) -> None:
    from rich.text import Text

    from efcil.cli.catalog import show_presets, show_value
    from efcil.cli.console import console, new_table

    out = console()
    key_width = max((len(row.key) for group in groups for row in group.rows), default=0)
    for group in groups:
        table = new_table("option", "default", "meaning")
        table.columns[0].min_width, table.columns[0].no_wrap = key_width, True
        table.columns[1].width = 14
        table.columns[1].overflow = "fold"
        for row in group.rows:
            meaning = Text(row.meaning)
            if row.choices and row.choices != ("true", "false"):
                meaning.append(f" One of {', '.join(row.choices)}.", style="dim")
            if presets := show_presets(row):
                meaning.append(f"\n{presets}", style="cyan")
            table.add_row(Text(row.key, style="bold"), Text(show_value(row.default)), meaning)
        out.print()
        out.print(Text(group.title, style="bold underline"))
        out.print(table)
