"""How a run is told: bars with the time left on a terminal, plain lines elsewhere, JSON lines, or nothing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from efcil.report.load import split_heads
from efcil.training.callbacks import EpochReport


def _print_line(text: str) -> None:
    """Print a line with its end in one piece: lines of runs that go on at once do not run together."""
    print(text + "\n", end="", flush=True)


class Reporter:
    """What a run has to say as it happens; this one says nothing but notes, on standard error."""

    def on_started(self, title: str, epochs: Sequence[int], done: int) -> None:
        """Begin: epochs of each task, of which `done` are learned already."""

    def on_epoch(self, report: EpochReport) -> None:
        """An epoch is done."""

    def on_solve(self, task: int) -> None:
        """Statistics move and heads are solved."""

    def on_task(self, task: int, tasks: int, accuracies: Mapping[str, float]) -> None:
        """A task is measured: A_t of each method."""

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Something countable goes on: a download, decoding."""

    def note(self, text: str) -> None:
        """Say it on standard error, so that standard output stays clean."""
        print(f"note: {text}", file=sys.stderr, flush=True)

    def on_finished(self, summaries: Sequence[Mapping[str, Any]], where: str) -> None:
        """The run is over."""

    def close(self) -> None:
        """Leave the screen tidy."""


class NullReporter(Reporter):
    """Nothing at all: of several processes the first one tells how the run goes."""

    def note(self, text: str) -> None:
        """Leave it to the first process."""


class JsonReporter(Reporter):
    """One JSON object a line on standard output."""

    @staticmethod
    def _say(**event: Any) -> None:
        _print_line(json.dumps(event))

    def on_started(self, title: str, epochs: Sequence[int], done: int) -> None:
        """Tell the plan."""
        self._say(event="started", title=title, epochs=list(epochs), epochs_done=done)

    def on_epoch(self, report: EpochReport) -> None:
        """Tell an epoch."""
        self._say(event="epoch", task=report.task + 1, epoch=report.epoch + 1, loss=report.loss, lr=report.lr)

    def on_solve(self, task: int) -> None:
        """Tell that training is over."""
        self._say(event="solving", task=task + 1)

    def on_task(self, task: int, tasks: int, accuracies: Mapping[str, float]) -> None:
        """Tell a task."""
        self._say(event="task", task=task + 1, tasks=tasks, A_t=dict(accuracies))

    def note(self, text: str) -> None:
        """Tell a note."""
        self._say(event="note", text=text)

    def on_finished(self, summaries: Sequence[Mapping[str, Any]], where: str) -> None:
        """Tell the summaries."""
        self._say(event="finished", out=where, summaries=list(summaries))


class LineReporter(Reporter):
    """A line now and then: for logs and pipes."""

    EVERY = 15.0  # seconds between two lines about epochs

    def __init__(self) -> None:
        self._last = time.monotonic()

    def _print(self, text: str) -> None:
        _print_line(text)

    def on_started(self, title: str, epochs: Sequence[int], done: int) -> None:
        """Print the title."""
        self._print(title)

    def on_epoch(self, report: EpochReport) -> None:
        """Print an epoch, not too often."""
        now = time.monotonic()
        if now - self._last >= self.EVERY:
            self._last = now
            self._print(f"task {report.task + 1}, epoch {report.epoch + 1} of {report.epochs}: loss {report.loss:.4f}")

    def on_task(self, task: int, tasks: int, accuracies: Mapping[str, float]) -> None:
        """Print the accuracies."""
        words = ", ".join(f"{name} {value:.2f}" for name, value in accuracies.items())
        self._print(f"task {task + 1} of {tasks}: A_t {words}")

    def note(self, text: str) -> None:
        """Print a note."""
        self._print(f"note: {text}")

    def on_finished(self, summaries: Sequence[Mapping[str, Any]], where: str) -> None:
        """Print the result of each method and where it lies."""
        for s in (one for summary in summaries for one in split_heads(summary)):
            self._print(f"{s['method']}: A_f {s['A_f']:.2f}, A_avg {s['A_avg']:.2f}, {s['seconds']:.0f} s")
        self._print(f"written to {where}")


class PrefixReporter(LineReporter):
    """Plain lines of one of several runs that go on at once: each says which."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def _print(self, text: str) -> None:
        super()._print(f"{self.prefix}: {text}")


class TerminalReporter(Reporter):
    """Bars and a table, drawn with rich (imported here: a process without a terminal does not need it)."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Left

        self.console = Console()
        self.bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            Left(),
            console=self.console,
            transient=True,
        )
        self._bar: Any = None
        self._counts: dict[str, Any] = {}
        self._tasks = 0

    def on_started(self, title: str, epochs: Sequence[int], done: int) -> None:
        """Show the bar over all epochs of all tasks."""
        self._tasks = len(epochs)
        self.console.print(title, style="bold", highlight=False, markup=False)
        self.bars.start()
        self._bar = self.bars.add_task(f"task 1/{self._tasks}", total=sum(epochs), completed=done, words="epochs")

    def on_epoch(self, report: EpochReport) -> None:
        """Advance the bar."""
        self.bars.update(
            self._bar,
            advance=1,
            description=f"task {report.task + 1}/{self._tasks}",
            words=f"epochs, loss {report.loss:.3f}",
        )

    def on_solve(self, task: int) -> None:
        """Say what happens now."""
        self.bars.update(self._bar, words="epochs, moving statistics")

    def on_task(self, task: int, tasks: int, accuracies: Mapping[str, float]) -> None:
        """Print the accuracies above the bar."""
        from rich.markup import escape

        words = "  ".join(f"{escape(name)} [bold]{value:.2f}[/bold]" for name, value in accuracies.items())
        self.console.print(f"task {task + 1:>2}/{tasks}  A_t  {words}", highlight=False)

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Show or advance the bar of something countable."""
        if what not in self._counts:
            self.bars.start()
            self._counts[what] = self.bars.add_task(what, total=total, words="")
        self.bars.update(self._counts[what], completed=done, total=total)
        if total is not None and done >= total:
            self.bars.remove_task(self._counts.pop(what))

    def note(self, text: str) -> None:
        """Print a note."""
        from rich.markup import escape

        self.console.print(f"[yellow]note:[/yellow] {escape(text)}", highlight=False)

    def on_finished(self, summaries: Sequence[Mapping[str, Any]], where: str) -> None:
        """Print the table of results."""
        from rich.markup import escape
        from rich.table import Table

        self.bars.stop()
        table = Table(box=None, pad_edge=False)
        table.add_column("method")
        for name in ("A_f", "A_avg", "old", "new", "forgetting"):
            table.add_column(name, justify="right")
        best = max(s["A_f"] for s in summaries)
        for s in (one for summary in summaries for one in split_heads(summary)):
            cells = [s["A_f"], s["A_avg"], s["old"][-1], s["new"][-1], s["forgetting"][-1]]
            style = "bold green" if s["A_f"] == best and len(summaries) > 1 else ""
            table.add_row(escape(s["method"]), *("-" if c is None else f"{c:.2f}" for c in cells), style=style)
        self.console.print(table)
        self.console.print(f"written to {where}", highlight=False, markup=False)

    def close(self) -> None:
        """Take the bars away, whatever happened."""
        self.bars.stop()


def choose_reporter(quiet: bool = False, as_json: bool = False) -> Reporter:
    """Choose: JSON, nothing, bars on a terminal, lines elsewhere."""
    if as_json:
        return JsonReporter()
    if quiet:
        return Reporter()
    return TerminalReporter() if sys.stdout.isatty() else LineReporter()
