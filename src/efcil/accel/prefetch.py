"""Prepare the next epochs on a GPU beside the steps of this one, the outputs of frozen networks included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from efcil.accel.backend import Backend, EpochLoader
from efcil.accel.streams import thread_stream
from efcil.data.augment import CHUNK_BYTES
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import ImageStore
from efcil.training.loader import StoredBatch

FrozenOutputs = Callable[[Tensor], Tensor]  # normalized images -> outputs of frozen networks (n, ...)
TEACHER_BATCH_NUMEL = 2560 * 3 * 32 * 32  # numbers in a batch of images for frozen networks


@torch.no_grad()
def precompute_teacher(
    epochs: Sequence[Sequence[StoredBatch]], frozen: FrozenOutputs, pixels: ImageBatches, backend: Backend
) -> list[list[StoredBatch]]:
    """Add the outputs of frozen networks to the batches of epochs, computed in batches of a size that fills a GPU.

    All have one size, the last one is padded: a new size would be compiled and autotuned again.
    """
    parts = [batch[0] for epoch in epochs for batch in epoch]
    rows = torch.cat(parts)
    size = max(len(parts[0]), TEACHER_BATCH_NUMEL // math.prod(rows.shape[1:]))

    def forward() -> Tensor:
        found = []
        with backend.autocast():
            for part in rows.split(size):
                full = torch.cat([part, part[:1].expand(size - len(part), -1, -1, -1)])
                found.append(frozen(pixels.normalize(full))[: len(part)])
        return torch.cat(found)

    with backend.prevent_capture():
        seen = iter(backend.run_on_autotune_thread(forward).split([len(part) for part in parts]))
    return [[(*batch, next(seen)) for batch in epoch] for epoch in epochs]


class Prefetcher(EpochLoader):
    """Prefetch the next epochs on a stream of its own, on a GPU and where they fit.

    Images are augmented and frozen networks applied to them. Small tasks have several epochs prefetched together, since
    an epoch of 2,500 images is a hundred launches of little work each. A block is started as many epochs before its
    first one is needed, so that steps, which have priority on the GPU, do not wait for it.
    """

    MAX_EPOCHS = 8  # epochs at once

    def __init__(
        self,
        load_epoch: Callable[[int], Iterable[StoredBatch]],  # the batches of an epoch
        load_epochs: Callable[[range], Sequence[Sequence[StoredBatch]]],  # of several epochs
        images: ImageStore,
        num_epochs: int,  # epochs in all
        backend: Backend,
    ):
        self.load_epoch, self.load_epochs, self.num_epochs = load_epoch, load_epochs, num_epochs
        fit = CHUNK_BYTES[backend.device.type] // max(1, images.numel()) if isinstance(images, Tensor) else 0
        self.block_size = min(self.MAX_EPOCHS, fit)
        self.stream = thread_stream(backend.device, "prefetch") if backend.device.type == "cuda" and fit else None
        self.pending: dict[
            int, tuple[Sequence[StoredBatch], torch.cuda.Event]
        ] = {}  # and what tells that they are there
        self._in_use: Sequence[StoredBatch] = []
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())  # the images must be there

    def prefetch(self, epoch: int) -> None:
        """Start the batches of `epoch` and of those after it, unless a whole block is pending."""
        first = max(self.pending, default=epoch - 1) + 1
        if self.stream is not None and first < self.num_epochs and len(self.pending) < self.block_size:
            block = range(first, min(first + self.block_size, self.num_epochs))
            with torch.cuda.stream(self.stream):
                found = self.load_epochs(block)
                done = self.stream.record_event()
            self.pending |= {number: (batches, done) for number, batches in zip(block, found, strict=True)}

    def get(self, epoch: int) -> Iterable[StoredBatch]:
        """Return an epoch's batches; the caller synchronizes with the device before asking for the next."""
        if self.stream is None:
            return self.load_epoch(epoch)
        if epoch not in self.pending:
            self.prefetch(epoch)
        found, done = self.pending.pop(epoch)
        torch.cuda.current_stream().wait_event(done)
        self._in_use = found  # kept until the next epoch: the steps that read it are done by then
        return self._in_use
