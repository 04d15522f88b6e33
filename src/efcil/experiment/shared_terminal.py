"""Several runs on one terminal: a bar over all of them, and one below it for each that trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from efcil.experiment.reporters import LineReporter, Pace, PrefixReporter, Reporter, TerminalReporter, show_seconds

__all__ = ["reporters_of_runs"]


def reporters_of_runs(reporter: Reporter, titles: Sequence[str]) -> list[Reporter]:
    """Return a reporter for each of several runs: bars or lines with the title of the run.

    >>> [type(one).__name__ for one in reporters_of_runs(LineReporter(), ["order 1", "order 2"])]
    ['PrefixReporter', 'PrefixReporter']
    """
    if len(titles) == 1 or not isinstance(reporter, LineReporter | TerminalReporter):
        return [reporter] * len(titles)
    if isinstance(reporter, LineReporter):
        return [PrefixReporter(title) for title in titles]
    shared = _Total(reporter, len(titles))
    return [_RunReporter(title, reporter, shared) for title in titles]


class _Total:
    """The bar over all runs, each of which counts the same."""

    def __init__(self, terminal: TerminalReporter, runs: int):
        self.terminal, self.runs = terminal, runs
        self._shares: dict[str, float] = {}
        self._began, self._before = time.monotonic(), 0.0  # `_before`: done before this command began
        self._bar: Any = None
        self._lock = threading.Lock()  # runs may be concurrent

    def begin(self, title: str, share: float) -> None:
        """Start a run, of which a share is done already."""
        with self._lock:
            self._before += share
        self.advance(title, share)

    def advance(self, title: str, share: float) -> None:
        """Set the share of a run that is done."""
        with self._lock:
            self._shares[title] = share
            done = sum(self._shares.values())
            if self._bar is None:
                self._bar = self.terminal.bars.add_task(f"all {self.runs} runs", total=self.runs, words="")
                self.terminal.bars.start()
        gained, words = done - self._before, f"{done / self.runs:.0%}"
        if gained > 0.02 * self.runs:
            left = (time.monotonic() - self._began) / gained * (self.runs - done)
            words += f"  about {show_seconds(left)} left"
        self.terminal.bars.update(self._bar, completed=done, words=words)


class _RunReporter(TerminalReporter):
    """One of several runs on a terminal, with its title on its lines and its bar."""

    SHOWS_LOSS = False

    def __init__(self, title: str, terminal: TerminalReporter, total: _Total):
        super().__init__()
        self.title, self.terminal, self.total = title, terminal, total
        self.console, self.bars = terminal.console, terminal.bars

    def on_started(self, title: str, epochs: Sequence[int], done: int) -> None:
        """Show the bar of this run."""
        self._pace = Pace(epochs, done)
        self.total.begin(self.title, self._share)
        self._bar = self.bars.add_task("", total=sum(epochs), words="")
        self._show(self._pace.task_in_training(), "")

    @property
    def _share(self) -> float:
        return self._pace.done / max(1, self._pace.total)

    def _label(self, task: int) -> str:
        return f"{self.title}  {super()._label(task)}"

    def _show(self, task: int, where: str) -> None:
        super()._show(task, where)
        self.total.advance(self.title, self._share)

    def print_task(self, label: str, accuracies: Mapping[str, float]) -> None:
        """Print A_t of each method above all bars."""
        self.terminal.print_task(f"{self.title}  {label.replace('  ', ' ')}", accuracies)

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Show or advance the bar of something countable, shared by all runs."""
        self.terminal.progress(what, done, total)

    def note(self, text: str) -> None:
        """Print a note."""
        self.terminal.note(f"{self.title}: {text}")

    def on_finished(self, summaries: Sequence[Mapping[str, Any]], where: str) -> None:
        """Remove the bar; the table of all runs follows."""
        if self._bar is None:  # it was finished before
            self.total.begin(self.title, 1.0)
            return
        self.bars.remove_task(self._bar)
        self._bar = None
        self.total.advance(self.title, 1.0)

    def close(self) -> None:
        """Keep the bars, which other runs share."""
