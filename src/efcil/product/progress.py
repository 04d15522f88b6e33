"""Progress of updates: callback events and a terminal progress bar."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_BEGIN = {"reading": 0.0, "training": 0.05, "solving": 0.95, "learned": 1.0}
_END = {"reading": 0.05, "training": 0.95, "solving": 1.0, "learned": 1.0}


@dataclass(frozen=True)
class Progress:
    """Progress event of an update: `reading`, `training`, `solving`, `learned`, in this order."""

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
    """Yield a function that calls all callbacks; with `bar`, also show a progress bar if stderr is a terminal."""
    with contextlib.ExitStack() as stack:
        listeners = list(callbacks)
        if bar and sys.stderr.isatty():
            listeners.append(stack.enter_context(_bar()))

        def tell(progress: Progress) -> None:
            for listener in listeners:
                listener(progress)

        yield tell


@contextlib.contextmanager
def _bar() -> Iterator[Callback]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        line = bars.add_task("", total=1.0)
        yield lambda progress: bars.update(line, completed=progress.fraction, description=progress.message)
