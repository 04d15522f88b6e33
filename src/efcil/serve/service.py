"""Service logic behind the routes of app.py: predictions, updates and changes, independent of HTTP."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from efcil.errors import ConfigError, DataError, ModelError, nearest
from efcil.platform_support import cores
from efcil.product import IncrementalClassifier
from efcil.serve.batching import Batcher, Confidences, Overloaded, Scorer
from efcil.serve.decoding import LANES, MEDIUM, QUICK, SLOW, Decoders, lane_of
from efcil.serve.images import ImageArray, public
from efcil.serve.jobs import Job, Jobs
from efcil.serve.limits import Limits
from efcil.serve.metrics import Metrics
from efcil.serve.store import Conflict, ModelStore
from efcil.serve.uploads import Decode, UploadedImages

# Images per forward pass. Larger batches do not speed up a CPU and delay reading other requests.
LARGEST_BATCH = {"cpu": 16}
LARGEST_ELSEWHERE = 64
_SMALL = 2**17  # bytes of images whose heads are looked at on the event loop


class ClassNotFound(ConfigError):
    """Unknown class."""


class Service:
    """Serves one model directory."""

    def __init__(
        self,
        directory: Path,
        *,
        limits: Limits | None = None,
        device: str = "auto",
        teach_threads: int | None = None,
        decoders: Decoders | None = None,
    ):
        """Load the model; `decoders` are started and ended by whoever gives them."""
        found = cores()
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.limits, self.metrics, self.store = limits or Limits(), Metrics(), ModelStore(directory, device)
        self.jobs = Jobs(self.store, self.metrics, teach_threads or max(1, found // 2))
        largest = LARGEST_BATCH.get(self.store.current.model.device.type, LARGEST_ELSEWHERE)
        self.batcher = Batcher(self._scorer, largest=largest, observe=self.metrics.batches.observe)
        self.decoders, self._owns_decoders = decoders or Decoders(self.limits, max(2, min(found, 8))), decoders is None
        self._readers = ThreadPoolExecutor(2, "efcil-read")
        self._changes = ThreadPoolExecutor(1, "efcil-change")  # separate, so that uploads do not delay predictions
        self._waiting = dict.fromkeys(LANES, 0)
        self.metrics.gauge("efcil_model_version", "Model version, from 1.", lambda: self.store.current.version)
        self.metrics.gauge("efcil_model_classes", "Number of classes.", lambda: len(self.store.current.names))
        self.metrics.gauge("efcil_waiting_images", "Queued images.", lambda: sum(self._waiting.values()))
        self.metrics.gauge(
            "efcil_decoders_resident_memory_bytes", "Of decoding processes.", lambda: self.decoders.resident_memory
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the service within the context; a running update is cancelled at its end."""
        with self.store.held():
            self.batcher.start()
            if self._owns_decoders:
                self.decoders.start()
            try:
                yield
            finally:
                await self.jobs.close()
                self.batcher.close()
                if self._owns_decoders:
                    self.decoders.close()
                self._readers.shutdown()
                self._changes.shutdown()

    def _scorer(self) -> Scorer:
        now = self.store.current
        typicality = now.model.has_typicality
        return now.names, lambda pixels: now.model.scored(torch.from_numpy(pixels), typicality)

    async def predict(
        self,
        images: Sequence[tuple[str | None, Callable[[], bytes], int]],
        top: int,
        reject_below: float | None = None,
        reject_strange: float | None = None,
    ) -> list[dict[str, Any]]:
        """Classify images, given as names, read functions and lengths; unreadable ones get an error entry."""
        if not self.store.current.names:
            raise Conflict("the model has no classes yet; add some with POST /teach")
        if reject_strange is not None and not self.store.current.model.has_typicality:
            raise Conflict("the model does not measure typicality; leave out reject_strange, or use reject_below")
        loop, slots = asyncio.get_running_loop(), asyncio.Semaphore(self.limits.concurrent_decodes)
        if sum(length for *_, length in images) < _SMALL:
            lanes = [_lane(read) for _, read, _ in images]
        else:
            lanes = await loop.run_in_executor(self._readers, lambda: [_lane(read) for _, read, _ in images])
        self._check_room(Counter(lanes))
        waiting = list(lanes)
        for lane in lanes:
            self._waiting[lane] += 1

        async def answer(name: str | None, read: Callable[[], bytes], lane: int) -> dict[str, Any]:
            try:
                submit = partial(self.decoders.submit, read, self.store.preprocessing, lane)
                return await self._answer(name, submit, slots, best)
            finally:
                waiting.remove(lane)
                self._waiting[lane] -= 1

        best = partial(best_classes, top=top, reject_below=reject_below, reject_strange=reject_strange)
        try:
            async with asyncio.TaskGroup() as group:  # ends the others if one fails, or if the client goes
                given = zip(images, lanes, strict=True)
                tasks = [group.create_task(answer(name, read, lane)) for (name, read, _), lane in given]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for lane in waiting:  # of those that had not begun
                self._waiting[lane] -= 1
        return [task.result() for task in tasks]

    def _check_room(self, wanted: Counter[int]) -> None:
        """Raise Overloaded if too many pictures are waiting, counted apart by how long they take."""
        one = self.limits.predict_files  # a request that may come has room when it is alone
        medium, slow = max(one, self.limits.waiting // 4), max(one, self.limits.waiting_slow)
        most = {QUICK: self.limits.waiting, MEDIUM: medium, SLOW: slow}
        for lane, count in wanted.items():
            if self._waiting[lane] + count > most[lane]:
                what = "images that take long to decode" if lane else "images"
                raise Overloaded(f"{self._waiting[lane]} {what} are queued already; try again later")

    async def _answer(
        self,
        name: str | None,
        submit: Callable[[], Future[ImageArray]],
        slots: asyncio.Semaphore,
        best: Callable[[Confidences], dict[str, Any]],
    ) -> dict[str, Any]:
        try:
            async with slots:
                pixels = await asyncio.wrap_future(submit())
        except DataError as error:
            self.metrics.refused.inc()
            return {"file": name, "error": public(str(error))}
        answer = {"file": name, **best(await self.batcher.score(pixels))}
        self.metrics.predictions.inc()
        return answer

    async def teach(
        self, upload: Callable[[Decode], UploadedImages], epochs: int | None, budget: float | None
    ) -> tuple[Job, UploadedImages]:
        """Read an upload and start an update job."""
        self.store.claim("an update is running")
        try:
            loop = asyncio.get_running_loop()
            decode = partial(self.decoders.decode, size=self.store.preprocessing)
            found = await loop.run_in_executor(self._changes, upload, decode)
            return self.jobs.start(found, epochs, budget), found
        except BaseException:
            self.store.release()
            raise

    async def forget(self, names: Sequence[str]) -> None:
        """Remove classes."""
        class_names = self.store.current.names
        if wrong := [name for name in names if name not in class_names]:
            raise ClassNotFound(f"no class {wrong[0]!r}: {nearest(wrong[0], class_names)}")
        await self._change("a class is being forgotten", lambda model: model.forget(list(dict.fromkeys(names))))

    async def undo(self) -> None:
        """Restore the model before its last update."""
        await self._change("an update is being undone", lambda model: model.undo())

    async def _change(self, what: str, how: Callable[[IncrementalClassifier], object]) -> None:
        self.store.claim(what)
        loop = asyncio.get_running_loop()

        def change() -> None:
            try:
                self.store.change(how)
            except ModelError as error:  # nothing to undo, or a method that cannot forget
                raise Conflict(str(error)) from None
            finally:
                loop.call_soon_threadsafe(self.store.release)  # even if the client has disconnected

        await loop.run_in_executor(self._changes, change)


def _lane(read: Callable[[], bytes]) -> int:
    try:
        return lane_of(read())
    except DataError:  # not base64: reported when it is its turn
        return QUICK


def best_classes(
    scored: Confidences, top: int, reject_below: float | None = None, reject_strange: float | None = None
) -> dict[str, Any]:
    """Return the top classes of one image; the label is None below `reject_below` or `reject_strange`.

    >>> best_classes(Confidences(("a", "b"), np.array([0.25, 0.75]), 0.5), 1, 0.8)
    {'label': None, 'confidence': 0.75, 'typicality': 0.5, 'top': [{'label': 'b', 'confidence': 0.75}]}
    """
    confidence = np.clip(scored.confidence, 0.0, 1.0)
    order = np.argsort(-confidence, kind="stable")[:top]
    best = [{"label": scored.names[i], "confidence": float(confidence[i])} for i in order]
    highest, typicality = best[0]["confidence"], scored.typicality
    rejected = reject_below is not None and highest < reject_below
    if reject_strange is not None and typicality is not None:
        rejected = rejected or typicality < reject_strange
    return {
        "label": None if rejected else best[0]["label"],
        "confidence": highest,
        "typicality": typicality,
        "top": best,
    }
