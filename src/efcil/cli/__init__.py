"""The command `efcil`. Heavy imports happen inside the commands, so that help is instant."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from efcil import __version__
from efcil.cli import datasets, experiments, models, results, tools
from efcil.cli.options import DATA
from efcil.errors import ConfigError, DataWarning, EfcilError, printable
from efcil.platform_support import choose_threads, tolerate_any_text

_SHOWN = 200  # characters of a path
_LONG_WORD = re.compile(r"\S{1000,}")  # in no path or name that is meant
DISTRIBUTED = ("run", "compare", "resume")  # commands whose processes share their work

app = typer.Typer(
    name="efcil",
    help="Exemplar-free class-incremental learning: learn new classes without storing images of old ones.",
    epilog="Start with `efcil demo`, then `efcil run dpcr digits`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)
for part in (experiments, results, models, tools):
    app.add_typer(part.app)
app.add_typer(
    datasets.app, name="data", help="List, download and verify data sets.", rich_help_panel=DATA, no_args_is_help=True
)


def _version(value: bool) -> None:
    if value:
        print(f"efcil {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if os.environ.get("TORCHELASTIC_RUN_ID") and context.invoked_subcommand not in DISTRIBUTED:
        from efcil.training.distributed import world_size

        if world_size() > 1:
            known = ", ".join(f"`efcil {name}`" for name in DISTRIBUTED)
            raise ConfigError(
                f"efcil {context.invoked_subcommand} works alone, and torchrun started {world_size()} processes of it: "
                f"start it without torchrun; only {known} share their work"
            )


def _complain(line: str) -> None:
    """Print a line to standard error, with control characters escaped and very long words shortened.

    A terminal gets it cut between words.
    """
    line = "\n".join(printable(part) for part in line.splitlines())
    line = _LONG_WORD.sub(lambda word: f"{word[0][:_SHOWN]}...{word[0][-_SHOWN // 2 :]}", line)
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    print(line, file=sys.stderr)


@contextlib.contextmanager
def _notes() -> Iterator[None]:
    """Show warnings about images as notes, each on one line of standard error."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", DataWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, DataWarning):
                _complain(f"note: {message}")
            else:
                others(message, category, *place, **more)

        warnings.showwarning = show
        yield


def main() -> None:
    """Run the command; an error is one line on standard error and a non-zero exit."""
    tolerate_any_text()
    choose_threads()
    try:
        with _notes():
            app(prog_name="efcil")
    except EfcilError as error:
        if str(error):
            _complain(f"efcil: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except (MemoryError, OverflowError, RuntimeError, OSError) as error:
        if (why := _too_much(error)) is None:
            raise
        _complain(f"efcil: {why}")
        sys.exit(3)


def _too_much(error: BaseException) -> str | None:
    """Return what to say of memory, numbers or places that a value on the command line has gone beyond; else None."""
    if isinstance(error, OSError):
        if error.strerror is None:
            return None
        place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
        place = place if len(place) <= _SHOWN else f"{place[:_SHOWN]}..."
        return f"{place}: {error.strerror}; choose another place" if place else f"{error.strerror}; try again"
    if isinstance(error, OverflowError):
        return f"a number is out of range: {error}; take a smaller one"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "out of memory; take smaller sizes, fewer images or a smaller network"
    return None
