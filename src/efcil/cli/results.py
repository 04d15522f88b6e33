"""Commands that evaluate and report: reevaluate, ensemble, report, reproduce."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from efcil.cli.directories import command_line
from efcil.cli.options import (
    EXPERIMENTS,
    MACHINE,
    OUTPUT,
    PROBLEM,
    ConcurrentRuns,
    Device,
    MarkdownFlag,
    Overrides,
    QuietFlag,
)

app = typer.Typer()


@app.command(rich_help_panel=EXPERIMENTS)
def reevaluate(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="Directory of a run or comparison made with --save-features.", show_default=False
        ),
    ],
    methods: Annotated[
        str,
        typer.Argument(
            metavar="METHODS", help="Comma-separated methods; a variant is name:key=value.", show_default=False
        ),
    ],
    overrides: Overrides = [],  # noqa: B006
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Output directory; by default beside the run.", rich_help_panel=OUTPUT),
    ] = None,
    device: Device = "auto",
    quiet: QuietFlag = False,
) -> None:
    """Evaluate other methods on the saved features of a run, without training or images."""
    from efcil.experiment.reevaluate import execute

    execute(source, methods, overrides, out, device, quiet, shlex.join(["efcil", *sys.argv[1:]]))


@app.command(rich_help_panel=EXPERIMENTS)
def ensemble(
    methods: Annotated[
        str,
        typer.Argument(
            metavar="METHODS", help="Comma-separated methods; a variant is name:key=value.", show_default=False
        ),
    ],
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Runs made with --save-features that differ in --seed.", show_default=False
        ),
    ],
    overrides: Overrides = [],  # noqa: B006
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output directory.", rich_help_panel=OUTPUT)] = Path(
        "ensemble"
    ),
    device: Device = "auto",
    quiet: QuietFlag = False,
) -> None:
    """Evaluate several training seeds of a method together: their standardized scores are added."""
    from efcil.experiment.ensemble import execute

    execute(sources, methods, overrides, out, device, quiet, shlex.join(["efcil", *sys.argv[1:]]))


@app.command(rich_help_panel=EXPERIMENTS)
def report(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIRECTORIES", help="Run directories, searched recursively.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output directory.", rich_help_panel=OUTPUT)] = Path(
        "report"
    ),
    markdown: MarkdownFlag = False,
) -> None:
    """Write tables, curves, accuracy matrices and an HTML page of runs, finished or not."""
    from efcil.cli.console import print_runs
    from efcil.report import load_summaries, markdown_table, write_report

    summaries = load_summaries(directories)
    written = write_report(summaries, out)
    if markdown:
        print(markdown_table(summaries))
    else:
        print_runs(summaries)
        matrices = [name for name in written if name.startswith("matrix-")]
        names = [name for name in written if name not in matrices]
        print(f"written to {out}: {', '.join(names)}" + (f" and {len(matrices)} matrix-*.png" if matrices else ""))


@app.command(rich_help_panel=EXPERIMENTS)
def reproduce(
    names: Annotated[
        str,
        typer.Argument(
            metavar="NAMES", help="Comma-separated tables and figures; without any, list them.", show_default=False
        ),
    ] = "",
    data: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=DIR",
            help="Dataset directory; repeat for more. Data sets without one are skipped.",
            show_default=False,
            rich_help_panel=PROBLEM,
        ),
    ] = [],  # noqa: B006 (typer copies it)
    only: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Comma-separated data sets or methods to run.", rich_help_panel=PROBLEM),
    ] = "",
    orders: Annotated[
        str,
        typer.Option("--orders", metavar="ORDERS", help="Class orders; default: the paper's.", rich_help_panel=PROBLEM),
    ] = "",
    tasks: Annotated[
        str, typer.Option(metavar="N", help="Numbers of tasks; default: the paper's.", rich_help_panel=PROBLEM)
    ] = "",
    overrides: Overrides = [],  # noqa: B006
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Output directory of runs and results.", rich_help_panel=OUTPUT)
    ] = Path("reproduce"),
    results: Annotated[
        list[Path],
        typer.Option(
            "--from",
            metavar="DIR",
            help="Directory with earlier results; repeatable.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = [],  # noqa: B006
    quiet: QuietFlag = False,
    device: Device = "auto",
    concurrent_runs: ConcurrentRuns = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="One process per run: their number, auto (3 per GPU, or one per core), ray or ray://HOST:PORT.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    retries: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="With --parallel: retries of a failed run.", rich_help_panel=MACHINE),
    ] = 2,
) -> None:
    """Reproduce tables and figures of the paper; reports published result, our result and difference."""
    from efcil.cli.console import console, new_table, print_markdown
    from efcil.reproduce.command import execute, listing

    if not names:
        table = new_table("name", "what it shows")
        for row in listing():
            table.add_row(*row)
        console().print(table)
        return
    execute(
        names,
        data=data,
        out=out,
        only=only,
        orders=orders,
        tasks=tasks,
        results=results,
        overrides=overrides,
        device=device,
        concurrent_runs=concurrent_runs,
        parallel=parallel,
        retries=retries,
        quiet=quiet,
        command=command_line(out),
        show=print_markdown,
    )
