"""Pictures of different requests in one forward pass.

One thread computes. It takes whatever waits, up to a full batch, so a lone request starts at once, and while one pass
runs the next batch gathers by itself. Nothing waits for a clock.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from efcil.errors import RunError
from efcil.serve.images import ImageArray

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Confidences:
    """Confidence in each class of the model that answered."""

    names: Sequence[str]
    confidence: Scores  # (classes,)


class Overloaded(RunError):
    """More pictures wait than the limit allows."""


@dataclass(frozen=True)
class _PendingImage:
    pixels: ImageArray
    future: asyncio.Future[Confidences]
    loop: asyncio.AbstractEventLoop


# A model at one moment: the names of its classes, and pictures (n, 3, size, size) to confidences (n, classes).
Scorer = tuple[Sequence[str], Callable[[ImageArray], Scores]]


class Batcher:
    """Answers single pictures from batches; `scorer` is asked for the model anew before each batch."""

    def __init__(self, scorer: Callable[[], Scorer], *, largest: int, observe: Callable[[int], None]) -> None:
        self._scorer, self._largest, self._observe = scorer, largest, observe
        self._queue: queue.SimpleQueue[_PendingImage | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="efcil-predict", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Answer what waits, then stop."""
        self._queue.put(None)
        self._thread.join()

    async def score(self, pixels: ImageArray) -> Confidences:
        """Return the confidences of one picture (3, size, size)."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Confidences] = loop.create_future()
        self._queue.put(_PendingImage(pixels, future, loop))
        return await future

    def _batch(self) -> tuple[list[_PendingImage], bool]:
        """Return what waits, at least one picture unless the end is reached, and whether to go on."""
        batch: list[_PendingImage] = []
        while len(batch) < self._largest:
            try:
                item = self._queue.get(block=not batch)
            except queue.Empty:
                break
            if item is None:
                return batch, False
            if not item.future.cancelled():  # its client has gone
                batch.append(item)
        return batch, True

    def _work(self) -> None:
        go_on = True
        while go_on:
            batch, go_on = self._batch()
            if batch:
                self._answer(batch)

    def _answer(self, batch: list[_PendingImage]) -> None:
        try:
            names, score = self._scorer()
            rows = score(np.stack([item.pixels for item in batch]))
            found: list[Confidences | Exception] = [Confidences(names, row) for row in rows]
        except Exception as error:  # told to each request; the thread must live on
            found = [error] * len(batch)
        self._observe(len(batch))
        for loop in {item.loop for item in batch}:
            mine = [(item.future, value) for item, value in zip(batch, found, strict=True) if item.loop is loop]
            loop.call_soon_threadsafe(_deliver, mine)


def _deliver(answers: list[tuple[asyncio.Future[Confidences], Confidences | Exception]]) -> None:
    for future, value in answers:
        if future.done():
            continue
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)
