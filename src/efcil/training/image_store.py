"""Store images on the device, or load them on demand."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from efcil import accel
from efcil.data.lazy import LazyImageFolder

MAX_PENDING = 6  # decoding requests in flight
MAX_DEVICE_SHARE = 0.5  # maximum share of free device memory for a task's images


class HostImages:
    """Array in host memory or memory-mapped, with the interface of `LazyImageFolder`."""

    def __init__(self, images: npt.NDArray[np.uint8]):
        self.images, self.shape = images, images.shape

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Any) -> HostImages:
        return HostImages(self.images[key])

    def submit(self, rows: npt.NDArray[np.int64]) -> HostImages:
        """Return the rows."""
        return HostImages(self.images[rows])

    @contextmanager
    def wait(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the images."""
        yield self.images


class LazyImages:
    """Images (n, channels, height, width) loaded on demand as uint8 on the device."""

    def __init__(self, source: LazyImageFolder | HostImages, device: torch.device):
        self.source, self.device = source, device
        self.extra: Tensor | None = None  # images appended to those of the source, on the device

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the images."""
        return (len(self), *self.source.shape[1:])

    def __len__(self) -> int:
        return len(self.source) + (len(self.extra) if self.extra is not None else 0)

    def head(self, count: int) -> LazyImages:
        """Return the first images without loading them."""
        assert self.extra is None
        return LazyImages(self.source[:count], self.device)

    def concat(self, images: Tensor) -> LazyImages:
        """Append images that are on the device."""
        other = copy.copy(self)
        other.extra = images if self.extra is None else torch.cat([self.extra, images])
        return other

    def submit(self, rows: Tensor) -> Callable[[], Tensor]:
        """Start loading rows; the returned function waits for them."""
        wanted = rows.cpu()
        in_source = wanted < len(self.source)
        request = self.source.submit(wanted[in_source].numpy()) if bool(in_source.any()) else None

        def wait() -> Tensor:
            found = torch.empty((len(wanted), *self.shape[1:]), dtype=torch.uint8, device=self.device)
            if request is not None:
                with request.wait() as images:
                    found[in_source.to(self.device)] = torch.from_numpy(np.asarray(images)).to(self.device)
            if self.extra is not None:
                in_extra = ~in_source
                found[in_extra.to(self.device)] = self.extra[(wanted[in_extra] - len(self.source)).to(self.device)]
            return found

        return wait

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.submit(rows)()


ImageStore = Tensor | LazyImages


def to_device(images: Any, device: torch.device) -> ImageStore:
    """Copy images to the device, except lazy ones and those that do not fit."""
    if isinstance(images, LazyImageFolder):
        return LazyImages(images, device)
    free = accel.free_memory(device)
    if free is not None and images.nbytes > MAX_DEVICE_SHARE * free:
        return LazyImages(HostImages(images), device)
    return torch.from_numpy(np.array(images)).to(device)


def on_demand(images: Any, device: torch.device) -> LazyImages:
    """Load images when they are asked for, however many fit on the device."""
    return LazyImages(images if isinstance(images, LazyImageFolder) else HostImages(images), device)


def head(images: ImageStore, count: int) -> ImageStore:
    """Return the first images."""
    return images[:count] if isinstance(images, Tensor) else images.head(count)


def select(images: ImageStore, rows: Tensor) -> ImageStore:
    """Return some images; lazy ones are not loaded."""
    return images[rows] if isinstance(images, Tensor) else LazyImages(images.source[rows.cpu().numpy()], images.device)


def concat(images: ImageStore, others: Tensor) -> ImageStore:
    """Concatenate images."""
    return torch.cat([images, others]) if isinstance(images, Tensor) else images.concat(others)


def iter_rows(images: ImageStore, parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the images of each part; lazy ones are prefetched."""
    if isinstance(images, Tensor):
        yield from (images[rows] for rows in parts)
        return
    pending: deque[Callable[[], Tensor]] = deque()
    for rows in parts:
        pending.append(images.submit(rows))
        if len(pending) > MAX_PENDING:
            yield pending.popleft()()
    while pending:
        yield pending.popleft()()
