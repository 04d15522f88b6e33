"""What the addresses of app.py call: answers, teachings and changes, without a word of HTTP."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from efcil.errors import ConfigError, DataError, ModelError, nearest
from efcil.product import IncrementalClassifier
from efcil.serve.batching import Batcher, Confidences, Overloaded, Scorer
from efcil.serve.images import decode_image
from efcil.serve.jobs import Job, Jobs
from efcil.serve.limits import Limits
from efcil.serve.metrics import Metrics
from efcil.serve.store import Conflict, ModelStore
from efcil.serve.uploads import UploadedImages

# Pictures of a pass. A CPU gains nothing from more, and a part of the clients is read while another is computed.
LARGEST_BATCH = {"cpu": 16}
LARGEST_ELSEWHERE = 64


class ClassNotFound(ConfigError):
    """A class that the model does not know."""


class Service:
    """One model directory, served."""

    def __init__(
        self, directory: Path, *, limits: Limits | None = None, device: str = "auto", teach_threads: int | None = None
    ):
        cores = os.cpu_count() or 1
        self.limits, self.metrics, self.store = limits or Limits(), Metrics(), ModelStore(directory, device)
        self.jobs = Jobs(self.store, self.metrics, teach_threads or max(1, cores // 2))
        largest = LARGEST_BATCH.get(self.store.current.model.device.type, LARGEST_ELSEWHERE)
        self.batcher = Batcher(self._scorer, largest=largest, observe=self.metrics.batches.observe)
        self._decoders = ThreadPoolExecutor(max(2, min(cores, 8)), "efcil-decode")
        self._changes = ThreadPoolExecutor(1, "efcil-change")  # apart, so that no upload keeps an answer waiting
        self._waiting = 0
        self.metrics.gauge("efcil_model_version", "Changes of the model, from 1.", lambda: self.store.current.version)
        self.metrics.gauge("efcil_model_classes", "Classes of the model.", lambda: len(self.store.current.names))
        self.metrics.gauge("efcil_waiting_images", "Pictures that wait for their answer.", lambda: self._waiting)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve until the block ends; a teaching that still runs is cancelled then."""
        with self.store.held():
            self.batcher.start()
            try:
                yield
            finally:
                await self.jobs.close()
                self.batcher.close()
                self._decoders.shutdown()
                self._changes.shutdown()

    def _scorer(self) -> Scorer:
        now = self.store.current
        return now.names, lambda pixels: now.model.predict_proba(torch.from_numpy(pixels))

    async def predict(
        self, images: Sequence[tuple[str | None, Callable[[], bytes]]], top: int, reject_below: float | None
    ) -> list[dict[str, Any]]:
        """Answer each picture, given by its name and a way to read it, or say what is wrong with it."""
        if not self.store.current.names:
            raise Conflict("the model knows no class yet; teach it first")
        if self._waiting + len(images) > self.limits.waiting:
            raise Overloaded(f"{self._waiting} pictures are waiting already; try again in a moment")
        self._waiting += len(images)
        try:
            return list(await asyncio.gather(*(self._answer(name, read, top, reject_below) for name, read in images)))
        finally:
            self._waiting -= len(images)

    async def _answer(
        self, name: str | None, read: Callable[[], bytes], top: int, reject_below: float | None
    ) -> dict[str, Any]:
        loop, size, most = asyncio.get_running_loop(), self.store.size, self.limits.pixels
        try:
            pixels = await loop.run_in_executor(self._decoders, lambda: decode_image(read(), size, most))
        except DataError as error:
            self.metrics.refused.inc()
            return {"file": name, "error": str(error)}
        answer = {"file": name, **best_classes(await self.batcher.score(pixels), top, reject_below)}
        self.metrics.predictions.inc()
        return answer

    async def teach(
        self, upload: Callable[[], UploadedImages], epochs: int | None, budget: float | None
    ) -> tuple[Job, UploadedImages]:
        """Read a lesson and start to teach it."""
        self.store.claim("a teaching is running")
        try:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._changes, upload)
            return self.jobs.start(found, epochs, budget), found
        except BaseException:
            self.store.release()
            raise

    async def forget(self, names: Sequence[str]) -> None:
        """Drop classes."""
        known = self.store.current.names
        if wrong := [name for name in names if name not in known]:
            raise ClassNotFound(f"no class {wrong[0]!r}: {nearest(wrong[0], known)}")
        await self._change("a class is being forgotten", lambda model: model.forget(list(dict.fromkeys(names))))

    async def undo(self) -> None:
        """Go back to the model before its last teaching."""
        await self._change("a teaching is being undone", lambda model: model.undo())

    async def _change(self, what: str, how: Callable[[IncrementalClassifier], object]) -> None:
        self.store.claim(what)
        loop = asyncio.get_running_loop()

        def change() -> None:
            try:
                self.store.change(how)
            except ModelError as error:  # nothing to undo, or a method that cannot forget
                raise Conflict(str(error)) from None
            finally:
                loop.call_soon_threadsafe(self.store.release)  # also when the client has gone meanwhile

        await loop.run_in_executor(self._changes, change)


def best_classes(scored: Confidences, top: int, reject_below: float | None) -> dict[str, Any]:
    """Return the best classes of one picture; below `unknown` the label is None.

    >>> best_classes(Confidences(("a", "b"), np.array([0.25, 0.75])), 1, 0.8)
    {'label': None, 'confidence': 0.75, 'top': [{'label': 'b', 'confidence': 0.75}]}
    """
    confidence = np.clip(scored.confidence, 0.0, 1.0)
    order = np.argsort(-confidence, kind="stable")[:top]
    best = [{"label": scored.names[i], "confidence": float(confidence[i])} for i in order]
    sure = reject_below is None or best[0]["confidence"] >= reject_below
    return {"label": best[0]["label"] if sure else None, "confidence": best[0]["confidence"], "top": best}
