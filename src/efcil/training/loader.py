"""Batches of an epoch: shuffling, augmentation and sharding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from efcil.data import augment
from efcil.data.augment import CHUNK_BYTES, Parameters, Transform
from efcil.training.distributed import SINGLE_PROCESS, World
from efcil.training.image_store import ImageStore, iter_rows

LastBatch = Literal["wrap", "keep", "drop"]
StoredBatch = tuple[Tensor, ...]  # uint8 images, labels, further views, and precomputed teacher outputs, if any


def batch_slices(count: int, size: int, last: LastBatch) -> Iterator[slice]:
    """Yield the slices of a shuffled epoch; `wrap` expects a permutation padded by `shuffle`.

    >>> [(b.start, b.stop) for b in batch_slices(10, 4, "keep")]
    [(0, 4), (4, 8), (8, 10)]
    >>> [(b.start, b.stop) for b in batch_slices(10, 4, "drop")]
    [(0, 4), (4, 8)]
    """
    size = min(size, count)
    stop = count // size * size if last == "drop" else count
    for start in range(0, stop, size):
        yield slice(start, min(start + size, stop))


def padded_count(count: int, size: int, last: LastBatch) -> int:
    """Return the number of rows of an epoch of `count` images; `wrap` fills the last batch."""
    return count + (-count % min(size, count) if last == "wrap" else 0)


def shuffle(count: int, size: int, last: LastBatch, source: torch.Generator) -> Tensor:
    """Return a random order of `count` rows; `wrap` repeats its head until every batch is full."""
    order = torch.randperm(count, generator=source, device=source.device)
    missing = padded_count(count, size, last) - count
    return torch.cat([order, order[:missing]]) if missing else order


EpochDraw = tuple[
    Tensor, list[Parameters], list[slice]
]  # of an epoch: rows in order, augmentation of each view, batches


def draw_epoch(
    count: int,
    transform: Transform | None,
    size: int,
    last: LastBatch,
    source: torch.Generator,
    world: World,
    views: int = 0,
) -> EpochDraw:
    """Draw an epoch, identical in every process, and keep this process's rows of each batch."""
    order = shuffle(count, size, last, source)
    drawn = [{} if transform is None else augment.draw(transform, len(order), source) for _ in range(1 + views)]
    bounds = list(batch_slices(len(order), min(size, count), last))
    if world.size == 1:
        return order, drawn, bounds
    rows = torch.arange(len(order), device=order.device)
    parts = [rows[cut][world.shard(cut.stop - cut.start)] for cut in bounds]
    own, stops = torch.cat(parts), torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).tolist()
    bounds = [slice(start, stop) for start, stop in itertools.pairwise(stops)]
    return order[own], [{name: value[own] for name, value in one.items()} for one in drawn], bounds


def _augmented(images: Tensor, transform: Transform | None, drawn: Parameters) -> Tensor:
    return images if transform is None else augment.apply(transform, images, drawn)


def epoch_batches(
    images: ImageStore,
    labels: Tensor,
    transform: Transform | None,
    size: int,
    last: LastBatch,
    source: torch.Generator,
    world: World = SINGLE_PROCESS,
    views: int = 0,
) -> Iterator[StoredBatch]:
    """Yield the augmented batches of one epoch; random numbers are drawn for the whole epoch first."""
    order, drawn, bounds = draw_epoch(len(labels), transform, size, last, source, world, views)
    row = math.prod(images.shape[1:]) * (1 + views)
    per_chunk = max(1, CHUNK_BYTES[images.device.type] // (row * bounds[0].stop))  # batches in a chunk
    if not isinstance(images, Tensor):
        per_chunk = 1
    chunks = [bounds[first : first + per_chunk] for first in range(0, len(bounds), per_chunk)]
    rows = (order[chunk[0].start : chunk[-1].stop] for chunk in chunks)
    for chunk, pixels in zip(chunks, iter_rows(images, rows), strict=True):
        begin, end = chunk[0].start, chunk[-1].stop
        parts = ({name: value[begin:end] for name, value in one.items()} for one in drawn)
        first, *others = [_augmented(pixels, transform, part) for part in parts]
        targets = labels[order[begin:end]]
        for cut in chunk:
            own = slice(cut.start - begin, cut.stop - begin)
            yield (first[own], targets[own], *(view[own] for view in others))


def several_epochs(
    images: ImageStore,
    labels: Tensor,
    transform: Transform | None,
    size: int,
    last: LastBatch,
    datasets: Sequence[torch.Generator],
    world: World = SINGLE_PROCESS,
    views: int = 0,
) -> list[list[StoredBatch]]:
    """Return the batches of several epochs, augmented at once: identical to `epoch_batches`, with fewer kernel
    launches."""
    epochs = [draw_epoch(len(labels), transform, size, last, source, world, views) for source in datasets]
    orders, bounds = [e[0] for e in epochs], epochs[0][2]
    rows = torch.cat(orders)
    found = [labels[rows]]
    for view in range(1 + views):
        drawn = [e[1][view] for e in epochs]
        keep_aspect = {name: torch.cat([d[name] for d in drawn]) for name in drawn[0]}
        found.insert(len(found) if view else 0, _augmented(images[rows], transform, keep_aspect))
    of_each = zip(*(tensor.split(len(orders[0])) for tensor in found), strict=True)
    return [[tuple(tensor[cut] for tensor in parts) for cut in bounds] for parts in of_each]
