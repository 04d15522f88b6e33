"""Dynamic batching of images from different requests.

One thread runs forward passes on all queued images, up to a full batch. A single request starts immediately, and images
queue up during a forward pass, without a batching delay.
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
    """Class names and confidences of one image, and its typicality if the model measures it."""

    names: Sequence[str]
    confidence: Scores  # (classes,)
    typicality: float | None = None


class Overloaded(RunError):
    """More images are queued than the limit allows."""


@dataclass(frozen=True)
class _PendingImage:
    pixels: ImageArray
    future: asyncio.Future[Confidences]
    loop: asyncio.AbstractEventLoop


# Class names of a model, and a function from images (n, 3, size, size) to confidences (n, classes) and typicality (n,).
Scorer = tuple[Sequence[str], Callable[[ImageArray], tuple[Scores, Scores | None]]]


class Batcher:
    """Batches single images; `scorer` returns the current model before each batch."""

    def __init__(self, scorer: Callable[[], Scorer], *, largest: int, observe: Callable[[int], None]) -> None:
        self._scorer, self._largest, self._observe = scorer, largest, observe
        self._queue: queue.SimpleQueue[_PendingImage | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="efcil-predict", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Process queued images, then stop."""
        self._queue.put(None)
        self._thread.join()

    async def score(self, pixels: ImageArray) -> Confidences:
        """Return the confidences of one image (3, size, size)."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Confidences] = loop.create_future()
        self._queue.put(_PendingImage(pixels, future, loop))
        return await future

    def _batch(self) -> tuple[list[_PendingImage], bool]:
        """Wait for queued images; return them and whether to continue."""
        batch: list[_PendingImage] = []
        while len(batch) < self._largest:
            try:
                item = self._queue.get(block=not batch)
            except queue.Empty:
                break
            if item is None:
                return batch, False
            if not item.future.cancelled():  # the client has disconnected
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
            rows, typicality = score(np.stack([item.pixels for item in batch]))
            typical = [None] * len(rows) if typicality is None else typicality.tolist()
            results: list[Confidences | Exception] = [
                Confidences(names, row, value) for row, value in zip(rows, typical, strict=True)
            ]
        except Exception as error:  # returned to each request; the thread must survive
            results = [error] * len(batch)
        self._observe(len(batch))
        for loop in {item.loop for item in batch}:
            mine = [(item.future, value) for item, value in zip(batch, results, strict=True) if item.loop is loop]
            loop.call_soon_threadsafe(_deliver, mine)


def _deliver(answers: list[tuple[asyncio.Future[Confidences], Confidences | Exception]]) -> None:
    for future, value in answers:
        if future.done():
            continue
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)
