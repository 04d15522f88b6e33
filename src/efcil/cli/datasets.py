"""Commands for data sets: list, fetch, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from efcil.cli.options import DataDir, Overrides, QuietFlag, SkipBad
from efcil.errors import ConfigError

app = typer.Typer(no_args_is_help=True)


@app.command("list")
def list_() -> None:
    """List the data sets: content, size, license and source."""
    from efcil.cli.console import console, new_table
    from efcil.data import DATASETS

    table = new_table("data set", "content, size", "license, source")
    table.columns[0].no_wrap = True
    for source in DATASETS.values():
        table.add_row(source.name, f"{source.description}; {source.size}", f"{source.license}; {source.url}")
    console().print(table)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Data set.", show_default=False)],
    data: Annotated[Path, typer.Option("--data", metavar="DIR", help="Directory to download to.")] = Path("data"),
    quiet: QuietFlag = False,
) -> None:
    """Download a data set from its official address; an interrupted download is continued."""
    from efcil import data as sources

    source = sources.find(name)
    if not source.fetchable:
        if not source.directory:
            raise ConfigError(f"{name} is built in; nothing to download")
        where = "use your own images" if source.url.startswith("--") else f"get it from {source.url}"
        raise ConfigError(f"{name} cannot be downloaded by efcil: {where} and give --data DIR")
    from efcil.data.fetch import fetch as download
    from efcil.experiment.reporters import choose_reporter

    reporter = choose_reporter(quiet)
    try:
        remote = sources.remote(name)
        place = download(
            remote, data, progress=lambda done, total: reporter.progress(f"downloading {name}", done, total)
        )
    finally:
        reporter.close()
    print(f"{name} is in {place}; use it with --data {data}")


@app.command()
def verify(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Data set.", show_default=False)],
    place: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Dataset directory, as --data.", show_default=False)
    ] = None,
    data: DataDir = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
    skip_bad: SkipBad = False,
    quiet: QuietFlag = False,
) -> None:
    """Decode every image, count images per class and split, and compare with the official counts."""
    from efcil import data as sources
    from efcil.config import build, parse_overrides
    from efcil.data.verify import verify as check
    from efcil.errors import DataError
    from efcil.experiment.reporters import choose_reporter

    if place is not None and data is not None:
        raise ConfigError(f"the directory is given twice, {place} and --data {data}: give it once")
    given = {key.removeprefix("data."): value for key, value in parse_overrides(overrides).items()}
    options = build(sources.find(name).options, given | ({"skip_bad": True} if skip_bad else {}), name)
    reporter = choose_reporter(quiet)
    try:
        found = check(name, data or place, options, lambda *count: reporter.progress(f"reading {name}", *count))
    finally:
        reporter.close()
    for note in found.notes:
        print(f"note: {note}")
    for problem in found.problems:
        print(f"problem: {problem}")
    if found.problems:
        count = f"{len(found.problems)} problem{'s' if len(found.problems) > 1 else ''}"
        raise DataError(f"{name} in {data or place}: {count}, listed above; repair or replace these files")
    print(found.summary)
