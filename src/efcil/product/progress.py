"""Progress of updates: callback events and a terminal progress bar."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SECONDS_PER_LINE = 5.0  # of progress where stderr is not a terminal
_BEGIN = {"chosen": 0.0, "reading": 0.0, "training": 0.05, "solving": 0.95, "learned": 1.0}
_END = {"chosen": 0.0, "reading": 0.05, "training": 0.95, "solving": 1.0, "learned": 1.0}


@dataclass(frozen=True)
class Progress:
    """Progress event of an update: `reading`, `training`, `solving`, `learned`, in this order.

    Before the first update of a model comes `chosen`, with what the model consists of.
    """

    event: str
    done: int  # images read or epochs trained
    total: int
    message: str
    loss: float | None = None  # mean training loss of the epoch

    @property
    def fraction(self) -> float:
        """Estimated fraction of the whole update that is complete, 0 to 1.

        >>> round(Progress("training", 10, 20, "").fraction, 6)
        0.5
        """
        begin, end = _BEGIN[self.event], _END[self.event]
        return begin + (end - begin) * (self.done / self.total if self.total else 1.0)


Callback = Callable[[Progress], object]


@contextlib.contextmanager
def progress_callbacks(callbacks: Sequence[Callback], bar: bool) -> Iterator[Callback]:
    """Yield a function that calls all callbacks; with `bar`, also show progress: a bar on a terminal, else lines."""
    with contextlib.ExitStack() as stack:
        listeners = list(callbacks)
        if bar:
            listeners.append(stack.enter_context(_bar()) if sys.stderr.isatty() else _Lines())

        def tell(progress: Progress) -> None:
            for listener in listeners:
                listener(progress)

        yield tell


class _Lines:
    """Prints a line to stderr at the first event of each kind, and then at most one in `SECONDS_PER_LINE`."""

    def __init__(self) -> None:
        self.event, self.next = "", 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.event != "learned" and (progress.event != self.event or time.monotonic() >= self.next):
            print(progress.message, file=sys.stderr, flush=True)
            self.event, self.next = progress.event, time.monotonic() + SECONDS_PER_LINE


@contextlib.contextmanager
def _bar() -> Iterator[Callback]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        line = bars.add_task("", total=1.0)

        def show(progress: Progress) -> None:
            if progress.event == "chosen":
                bars.console.print(progress.message, highlight=False, markup=False)
            else:
                bars.update(line, completed=progress.fraction, description=progress.message)

        yield show
