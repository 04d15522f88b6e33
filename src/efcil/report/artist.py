"""Figures drawn beside a run, by processes that have read matplotlib before anything is asked of them.

A figure takes half a second, and a comparison has one for every run, all at its end. A process is asked by a line of
JSON, and answers with the length of a file and the file. It ends when nobody can ask it any more, however that came
about.
"""

from __future__ import annotations

import json
import os
import subprocess  # nosec B404 # constant arguments: this module
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from efcil.report.figures import Order, drawn

MOST = 4  # processes
SMALL = {"method": "-", "dataset": "-", "A_t": [1.0], "matrix": [[1.0]]}  # what is drawn before anything is asked for


class Artist:
    """A process that draws; where it cannot, this one does."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C is for the run, which ends it.
        pipe, own = subprocess.PIPE, {"start_new_session": True, "stderr": subprocess.DEVNULL}
        command = [sys.executable, "-m", "efcil.report.artist"]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, **own)  # type: ignore[call-overload] # nosec B603

    def draw(self, order: Order) -> bytes:
        """Return the file that was asked for."""
        asked, answer = self.process.stdin, self.process.stdout
        with suppress(OSError, ValueError):
            asked.write(json.dumps(order).encode() + b"\n")
            asked.flush()
            size = int.from_bytes(answer.read(8), "big")
            found: bytes = answer.read(size)
            if size and len(found) == size:
                return found
        return drawn(order)

    def end(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        with suppress(OSError):  # what was asked and not read
            self.process.communicate()


class Artists:
    """Several of them."""

    def __init__(self, count: int):
        self.all = [Artist() for _ in range(count)]

    def draw(self, orders: Sequence[Order]) -> list[bytes]:
        """Return a file for every order."""
        found: dict[int, bytes] = {}
        waiting = iter(enumerate(orders))  # whoever is free takes the next

        def work(artist: Artist) -> None:
            for index, order in waiting:
                found[index] = artist.draw(order)

        with ThreadPoolExecutor(len(self.all)) as pool:
            list(pool.map(work, self.all))
        return [found[index] for index in range(len(orders))]


@contextmanager
def artists(figures: int) -> Iterator[Artists | None]:
    """Meanwhile processes stand ready to draw so many figures; None where there are no cores to spare."""
    count = min(MOST, figures, (os.cpu_count() or 1) // 4)
    if count < 1:
        yield None
        return
    ready = Artists(count)
    try:
        yield ready
    finally:
        for artist in ready.all:
            artist.end()


def main() -> None:
    """Draw what is asked for, until nobody asks any more."""
    for name in ("matrix.png", "curves.png", "curves.svg"):  # so all is read that they need
        drawn((name, [SMALL]))
    for line in sys.stdin.buffer:
        data = drawn(json.loads(line))
        sys.stdout.buffer.write(len(data).to_bytes(8, "big") + data)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
