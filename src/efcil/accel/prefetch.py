"""Prepare the next epochs on a GPU beside the steps of this one, the outputs of frozen networks included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from efcil.accel.machine import Machine
from efcil.accel.streams import own_stream
from efcil.data.augment import CHUNK_BYTES
from efcil.training.image_batches import Pixels
from efcil.training.image_store import Store
from efcil.training.loader import StoredBatch

Resting = Callable[[Tensor], Tensor]  # normalised images -> what networks at rest make of them, (n, ...)
AT_REST = 2560 * 3 * 32 * 32  # numbers in the images that networks at rest look at at once


@torch.no_grad()
def seen_at_rest(
    epochs: Sequence[Sequence[StoredBatch]], resting: Resting, pixels: Pixels, machine: Machine
) -> list[list[StoredBatch]]:
    """Add to the batches of epochs what networks at rest make of their images, in batches as large as a GPU likes.

    All of one size, the last one filled up: a new size would be compiled and tried out anew.
    """
    parts = [batch[0] for epoch in epochs for batch in epoch]
    rows = torch.cat(parts)
    size = max(len(parts[0]), AT_REST // math.prod(rows.shape[1:]))

    def looked() -> Tensor:
        found = []
        with machine.autocast():
            for part in rows.split(size):
                full = torch.cat([part, part[:1].expand(size - len(part), -1, -1, -1)])
                found.append(resting(pixels.normalise(full))[: len(part)])
        return torch.cat(found)

    with machine.uncaptured():
        seen = iter(machine.convolving(looked).split([len(part) for part in parts]))
    return [[(*batch, next(seen)) for batch in epoch] for epoch in epochs]


class Ahead:
    """On a GPU, prepares the next epochs beside the steps of this one, on a stream of its own, where they fit.

    Images are augmented, and networks at rest look at them. Of small tasks several epochs at once: an epoch of 2,500
    images is a hundred launches of little work each. They are begun as many epochs before the first of them is needed,
    so that steps, which go first on the GPU, do not wait for them.
    """

    MOST = 8  # epochs at once

    def __init__(
        self,
        one: Callable[[int], Iterable[StoredBatch]],  # the batches of an epoch
        several: Callable[[range], Sequence[Sequence[StoredBatch]]],  # of several epochs
        images: Store,
        last: int,  # epochs in all
        machine: Machine,
    ):
        self.one, self.several, self.last = one, several, last
        fit = CHUNK_BYTES[machine.device.type] // max(1, images.numel()) if isinstance(images, Tensor) else 0
        self.at_once = min(self.MOST, fit)
        self.stream = own_stream(machine.device, "ahead") if machine.device.type == "cuda" and fit else None
        self.ready: dict[int, tuple[Sequence[StoredBatch], torch.cuda.Event]] = {}  # and what tells that they are there
        self.taken: Sequence[StoredBatch] = []
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())  # the images must be there

    def prepare(self, epoch: int) -> None:
        """Begin the batches of `epoch` and of those after it, where fewer are begun than belong together."""
        first = max(self.ready, default=epoch - 1) + 1
        if self.stream is not None and first < self.last and len(self.ready) < self.at_once:
            block = range(first, min(first + self.at_once, self.last))
            with torch.cuda.stream(self.stream):
                found = self.several(block)
                there = self.stream.record_event()
            self.ready |= {number: (batches, there) for number, batches in zip(block, found, strict=True)}

    def take(self, epoch: int) -> Iterable[StoredBatch]:
        """Return an epoch's batches; the caller waits for the device before it asks for the next."""
        if self.stream is None:
            return self.one(epoch)
        if epoch not in self.ready:
            self.prepare(epoch)
        found, there = self.ready.pop(epoch)
        torch.cuda.current_stream().wait_event(there)
        self.taken = found  # kept until the next is taken: the steps that read it are done by then
        return self.taken
