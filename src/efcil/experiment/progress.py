"""One progress bar over all runs of a comparison, in terminals and notebooks."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from efcil.experiment.reporters import Pace, Reporter, show_seconds
from efcil.training.callbacks import EpochReport

Show = Callable[[float, str], None]  # the share that is done, and words about it


class ProgressBar:
    """Progress of several runs as one; drawn with `show`, ten times a second at most."""

    EVERY = 0.1

    def __init__(self, show: Show | None):
        self.show, self._runs, self._last_draw = show, list[_Follower](), 0.0

    def reporter(self) -> Reporter:
        """Return the reporter of another run."""
        self._runs.append(_Follower(self))
        return self._runs[-1]

    def update(self, words: str, force: bool = False) -> None:
        """Draw the bar again."""
        now = time.monotonic()
        if self.show is not None and (force or now - self._last_draw >= self.EVERY):
            self._last_draw = now
            self.show(sum(run.fraction for run in self._runs) / len(self._runs), words)

    def note(self, text: str) -> None:
        """Print a note on standard error."""
        if self.show is not None:
            print(f"note: {text}", file=sys.stderr, flush=True)


class _Follower(Reporter):
    """Follows one run for the bar."""

    def __init__(self, bar: ProgressBar):
        self.bar, self.fraction, self._pace = bar, 0.0, Pace((), 0)
        self._accuracies = ""

    def on_started(self, title: str, epochs: Sequence[int], done: int) -> None:
        self._pace = Pace(epochs, done)

    def on_step(self, task: int, epoch: int, step: int, steps: int, images: int) -> None:
        self._advance(task, epoch + step / steps)

    def on_epoch(self, report: EpochReport) -> None:
        self._advance(report.task, report.epoch + 1)

    def _advance(self, task: int, epochs: float) -> None:
        self._pace.advance(task, epochs)
        self.fraction = self._pace.done / max(1, self._pace.total)
        self.bar.update(f"task {task + 1}/{len(self._pace.epochs)}{self._accuracies}")

    def on_task(self, task: int, tasks: int, accuracies: Mapping[str, float]) -> None:
        shown = "  ".join(f"{name} {value:.1f}" for name, value in list(accuracies.items())[:3])
        self._accuracies = f"  A_t: {shown}{'  ...' if len(accuracies) > 3 else ''}"
        self.fraction = (task + 1) / tasks
        self.bar.update(f"task {task + 1}/{tasks}{self._accuracies}", force=True)

    def on_finished(self, summaries: Sequence[Mapping[str, Any]], where: str) -> None:
        self.fraction = 1.0

    def note(self, text: str) -> None:
        """Say nothing of finished and resumed runs: their results are returned like others."""


@contextmanager
def choose_bar(visible: bool) -> Iterator[ProgressBar]:
    """Yield a bar for where Python runs: a notebook, a terminal, or one that is not drawn."""
    if not visible:
        yield ProgressBar(None)
    elif _in_notebook():
        with _notebook_bar() as show:
            yield ProgressBar(show)
    elif sys.stderr.isatty():
        with _terminal_bar() as show:
            yield ProgressBar(show)
    else:
        yield ProgressBar(None)


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


@contextmanager
def _terminal_bar() -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns: list[Any] = [BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn()]
    columns += [TimeRemainingColumn(), TextColumn("{task.description}", markup=False)]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        line = bars.add_task("", total=1.0)
        yield lambda fraction, words: bars.update(line, completed=fraction, description=words)


@contextmanager
def _notebook_bar() -> Iterator[Show]:
    """Yield a function that redraws a bar below the cell; it disappears at the end."""
    from IPython.display import HTML, display  # type: ignore[import-not-found,unused-ignore]

    handle, began = display(HTML(""), display_id=True), time.monotonic()

    def show(fraction: float, words: str) -> None:
        left = f"{show_seconds((time.monotonic() - began) / fraction * (1 - fraction))} left" if fraction else ""
        text = f'<progress max="1" value="{fraction:.4f}"></progress> {fraction:.0%} {left} {html.escape(words)}'
        handle.update(HTML(f'<span style="font-family: monospace">{text}</span>'))

    try:
        yield show
    finally:
        handle.update(HTML(""))
