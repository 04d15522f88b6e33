"""Progress of runs: bars with the time left on a terminal, plain lines elsewhere, JSON Lines, or nothing."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from efcil.report.groups import CAPTION
from efcil.report.load import split_heads
from efcil.training.callbacks import EpochReport

EXPLAINED = "A_t: accuracy over the classes seen so far, in %"


def _print_line(text: str) -> None:
    """Print a line and its end in one call: lines of concurrent runs do not mix."""
    print(text + "\n", end="", flush=True)


class Reporter:
    """Interface of progress reports; this class only prints notes, on standard error."""

    def on_started(self, title: str, epochs: Sequence[int], done: int) -> None:
        """Report the start: epochs of each task, and how many of them are done."""

    def on_step(self, task: int, epoch: int, step: int, steps: int, images: int) -> None:
        """Report that `step` of `steps` of an epoch (0 is the first of the task) are done, each on so many images."""

    def on_epoch(self, report: EpochReport) -> None:
        """Report an epoch."""

    def on_solve(self, task: int) -> None:
        """Report that statistics are updated and classifiers refitted."""

    def on_task(self, task: int, tasks: int, accuracies: Mapping[str, float]) -> None:
        """Report a task: A_t of each method."""

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Report a download, or decoding."""

    def note(self, text: str) -> None:
        """Print a note on standard error, so that standard output stays clean."""
        print(f"note: {text}", file=sys.stderr, flush=True)

    def on_finished(self, summaries: Sequence[Mapping[str, Any]], where: str) -> None:
        """Report the end of the run."""

    def close(self) -> None:
        """Remove bars from the screen."""


class NullReporter(Reporter):
    """No reports: of several processes, only the first one reports."""

    def note(self, text: str) -> None:
        """Print nothing; the first process prints it."""


class ProgressOnly(NullReporter):
    """Progress of downloads and decoding, printed by another reporter, and nothing else."""

    def __init__(self, reporter: Reporter):
        self.progress = reporter.progress  # type: ignore[method-assign]


class JsonReporter(Reporter):
    """JSON Lines on standard output."""

    @staticmethod
    def _say(**event: Any) -> None:
        _print_line(json.dumps(event))

    def on_started(self, title: str, epochs: Sequence[int], done: int) -> None:
        """Print the start."""
        self._say(event="started", title=title, epochs=list(epochs), epochs_done=done)

    def on_epoch(self, report: EpochReport) -> None:
        """Print an epoch."""
        self._say(event="epoch", task=report.task + 1, epoch=report.epoch + 1, loss=report.loss, lr=report.lr)

    def on_solve(self, task: int) -> None:
        """Print that training of a task is over."""
        self._say(event="solving", task=task + 1)

    def on_task(self, task: int, tasks: int, accuracies: Mapping[str, float]) -> None:
        """Print a task."""
        self._say(event="task", task=task + 1, tasks=tasks, A_t=dict(accuracies))

    def note(self, text: str) -> None:
        """Print a note."""
        self._say(event="note", text=text)

    def on_finished(self, summaries: Sequence[Mapping[str, Any]], where: str) -> None:
        """Print the summaries."""
        self._say(event="finished", out=where, summaries=list(summaries))


class Pace:
    """Progress of a run in epochs of all its tasks, and its speed."""

    def __init__(self, epochs: Sequence[int], done: int):
        self.epochs, self.total, self.done = list(epochs), sum(epochs), float(done)
        self._first, self._began = float(done), time.monotonic()
        self._images, self._since = 0, self._began
        self.rate = 0.0  # images per second since it was asked for last

    def task_in_training(self) -> int:
        """Return the task whose epochs are not all done.

        >>> Pace([3, 2], 3).task_in_training()
        1
        """
        ends = itertools.accumulate(self.epochs)
        return next((task for task, end in enumerate(ends) if self.done < end), max(len(self.epochs) - 1, 0))

    def advance(self, task: int, epoch: float) -> None:
        """Set the number of epochs of a task that are done."""
        self.done = sum(self.epochs[:task]) + epoch

    def count(self, images: int) -> None:
        """Count images that were trained on."""
        self._images += images

    def measure(self) -> None:
        """Measure the rate since the last call."""
        now = time.monotonic()
        if now > self._since and self._images:
            self.rate = self._images / (now - self._since)
        self._images, self._since = 0, now

    def restart(self) -> None:
        """Exclude time that was not spent on training from the rate."""
        self._images, self._since = 0, time.monotonic()

    @property
    def seconds_left(self) -> float | None:
        """Time left at the mean speed so far; None before anything is done."""
        gained = self.done - self._first
        return (time.monotonic() - self._began) / gained * (self.total - self.done) if gained > 0 else None

    @property
    def words(self) -> str:
        """Rate and time left, as far as known."""
        left = self.seconds_left
        rate = [f"{self.rate:,.0f} images/s"] if self.rate else []
        return ", ".join([*rate, *([] if left is None else [f"{show_seconds(left)} left"])])


def show_seconds(seconds: float) -> str:
    """Return a duration as h:mm:ss.

    >>> show_seconds(3723.4)
    '1:02:03'
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class LineReporter(Reporter):
    """Plain lines, for logs and pipes."""

    EVERY = 15.0  # seconds between two progress lines

    def __init__(self) -> None:
        self._last, self._what = time.monotonic(), ""  # when the last line was, and what was counted there
        self._pace, self._explained = Pace((), 0), False

    def _print(self, text: str) -> None:
        _print_line(text)

    def on_started(self, title: str, epochs: Sequence[int], done: int) -> None:
        """Print the title."""
        self._pace = Pace(epochs, done)
        self._print(title)

    def on_step(self, task: int, epoch: int, step: int, steps: int, images: int) -> None:
        """Print a step, at most every `EVERY` seconds."""
        self._pace.count(images)
        if step < steps and time.monotonic() - self._last >= self.EVERY:
            self._pace.advance(task, epoch + step / steps)
            self._tell(f"task {task + 1}, epoch {epoch + 1} of {self._pace.epochs[task]}, step {step} of {steps}")

    def on_epoch(self, report: EpochReport) -> None:
        """Print an epoch, at most every `EVERY` seconds."""
        self._pace.advance(report.task, report.epoch + 1)
        if time.monotonic() - self._last >= self.EVERY:
            where = f"task {report.task + 1}, epoch {report.epoch + 1} of {report.epochs}"
            self._tell(f"{where}: loss {report.loss:.4f}")

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Print a count when it begins, and then at most every `EVERY` seconds."""
        begins = what != self._what and done != total  # what takes no time needs no line
        if begins or time.monotonic() - self._last >= self.EVERY:
            self._what, self._last = what, time.monotonic()
            self._print(f"{what}: {done:,}" + ("" if total is None else f" of {total:,}"))

    def _tell(self, text: str) -> None:
        self._last = time.monotonic()
        self._pace.measure()
        self._print(", ".join(filter(None, (text, self._pace.words))))

    def on_task(self, task: int, tasks: int, accuracies: Mapping[str, float]) -> None:
        """Print the accuracies."""
        self._pace.restart()
        if not self._explained:
            self._explain(EXPLAINED)
            self._explained = True
        words = ", ".join(f"{name} {value:.2f}" for name, value in accuracies.items())
        self._print(f"task {task + 1} of {tasks}: A_t {words}")

    def note(self, text: str) -> None:
        """Print a note."""
        self._print(f"note: {text}")

    def on_finished(self, summaries: Sequence[Mapping[str, Any]], where: str) -> None:
        """Print the result of each method and the output directory."""
        for s in (one for summary in summaries for one in split_heads(summary)):
            self._print(f"{s['method']}: A_f {s['A_f']:.2f}, A_avg {s['A_avg']:.2f}, {s['seconds']:.0f} s")
        self._explain(CAPTION)
        self._print(f"written to {where}")

    def _explain(self, text: str) -> None:
        self._print(text)


class PrefixReporter(LineReporter):
    """Plain lines of one of several runs, with its title; measures are explained below the table of all runs."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def _explain(self, text: str) -> None:
        pass

    def _print(self, text: str) -> None:
        super()._print(f"{self.prefix}: {text}")


class TerminalReporter(Reporter):
    """Bars and a table, drawn with rich, which is imported here: only terminals need it."""

    EVERY = 0.1  # seconds between two updates of the bar
    SHOWS_LOSS = True

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.console = Console()
        self.bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[words]}"),
            console=self.console,
            transient=True,
            expand=True,
        )
        self._bar: Any = None
        self._counts: dict[str, tuple[Any, float]] = {}  # bar and when it began
        self._pace, self._shown, self._loss = Pace((), 0), 0.0, ""
        self._measured, self._explained = 0.0, False

    def on_started(self, title: str, epochs: Sequence[int], done: int) -> None:
        """Show the bar over all epochs of all tasks."""
        self._pace, self._loss = Pace(epochs, done), ""
        self.console.print(title, style="bold", highlight=False, markup=False)
        self.bars.start()
        self._bar = self.bars.add_task("", total=sum(epochs), words="")
        self._show(self._pace.task_in_training(), "")

    def on_step(self, task: int, epoch: int, step: int, steps: int, images: int) -> None:
        """Advance the bar inside an epoch, ten times a second at most."""
        self._pace.count(images)
        if step < steps and time.monotonic() - self._shown >= self.EVERY:
            self._pace.advance(task, epoch + step / steps)
            self._show(task, f"epoch {epoch + 1}/{self._pace.epochs[task]}")

    def on_epoch(self, report: EpochReport) -> None:
        """Advance the bar."""
        self._loss = f"loss {report.loss:.3f}" if self.SHOWS_LOSS else ""
        self._pace.advance(report.task, report.epoch + 1)
        if time.monotonic() - self._shown >= self.EVERY or report.epoch + 1 == report.epochs:
            self._show(report.task, f"epoch {report.epoch + 1}/{report.epochs}")

    def _show(self, task: int, where: str) -> None:
        now = time.monotonic()
        if now - self._measured >= 1:  # over a second: the number is readable
            self._measured = now
            self._pace.measure()
        self._shown = now
        words = "  ".join(filter(None, (where, self._loss, self._pace.words.replace(", ", "  "))))
        self.bars.update(self._bar, completed=self._pace.done, description=self._label(task), words=words)

    def _label(self, task: int) -> str:
        return f"task {task + 1}/{len(self._pace.epochs)}"

    def on_solve(self, task: int) -> None:
        """Show what happens now."""
        self._show(task, "updating statistics")

    def on_task(self, task: int, tasks: int, accuracies: Mapping[str, float]) -> None:
        """Print the accuracies above the bar."""
        self.print_task(f"task {task + 1:>2}/{tasks}", accuracies)
        self._pace.restart()
        if task + 1 < tasks:
            self._loss = ""
            self._show(task + 1, "")

    def print_task(self, label: str, accuracies: Mapping[str, float]) -> None:
        """Print A_t of each method, which is explained the first time."""
        from rich.markup import escape

        if not self._explained:
            self.console.print(EXPLAINED, style="dim", highlight=False)
            self._explained = True
        words = "  ".join(f"{escape(name)} [bold]{value:.2f}[/bold]" for name, value in accuracies.items())
        self.console.print(f"{escape(label)}  A_t  {words}", highlight=False)

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Show or advance the bar of something countable."""
        if what not in self._counts:
            self.bars.start()
            self._counts[what] = self.bars.add_task(what, total=total, words=""), time.monotonic()
        bar, began = self._counts[what]
        words = f"{done:,}" if total is None else f"{done:,}/{total:,}"
        if done and total:
            words += f"  {show_seconds((time.monotonic() - began) / done * (total - done))} left"
        self.bars.update(bar, completed=done, total=total, words=words)
        if total is not None and done >= total:
            self.bars.remove_task(self._counts.pop(what)[0])

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
        self.console.print(CAPTION, style="dim", highlight=False)
        self.console.print("old, new: accuracy on the classes of earlier tasks and of the last one.", style="dim")
        self.console.print(f"written to {where}", highlight=False, markup=False)

    def close(self) -> None:
        """Remove the bars."""
        self.bars.stop()


def choose_reporter(quiet: bool = False, as_json: bool = False) -> Reporter:
    """Choose JSON Lines, notes only, bars on a terminal, or lines elsewhere."""
    if as_json:
        return JsonReporter()
    if quiet:
        return Reporter()
    return TerminalReporter() if sys.stdout.isatty() else LineReporter()
