"""End runs at a signal: the first one saves, the second one ends immediately."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from efcil.errors import Interrupted
from efcil.experiment.reporters import Reporter
from efcil.platform_support import STOP_SIGNALS


class Stoppable(Protocol):
    """Something that a signal stops: a run here, or a grid of runs in other processes."""

    @property
    def stop(self) -> threading.Event:
        """Set: end after this step, and save it."""

    @property
    def training(self) -> bool:
        """Whether there is a step to finish."""

    @property
    def reporter(self) -> Reporter:
        """Who tells the user."""


@contextmanager
def stoppable(
    runs: Sequence[Stoppable], remedy: str | Callable[[], str], force_on_second: bool = True
) -> Iterator[None]:
    """During runs, the first Ctrl-C or SIGTERM lets them finish their step and save; the second ends them immediately.

    Either ends as `Interrupted`, with the remedy, which may be a function that is called then. Inside it is a
    KeyboardInterrupt, which nothing on its way swallows.
    Under torchrun a signal may come twice, from the cluster and from torchrun itself: without `force_on_second` a
    second one says nothing new.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may have handlers
        return
    received: list[int] = []

    def tell(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) == 1:  # a signal that comes inside `set` would wait there for the lock that is held
            for run in runs:
                run.stop.set()
        if (len(received) > 1 and force_on_second) or not any(run.training for run in runs):
            raise KeyboardInterrupt
        if len(received) == 1:
            more = "; once more to stop at once" if force_on_second else ""
            busy = next(run for run in runs if run.training)
            with suppress(RuntimeError):  # a print that the signal interrupted cannot be begun again inside itself
                busy.reporter.note(f"finishing the step and saving{more}")

    before = {number: signal.signal(number, tell) for number in STOP_SIGNALS}
    try:
        yield
    except KeyboardInterrupt:
        unknown = signal.SIGINT if force_on_second else signal.SIGTERM  # another process got the signal
        advice = remedy if isinstance(remedy, str) else remedy()
        raise Interrupted(received[0] if received else unknown, advice) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
