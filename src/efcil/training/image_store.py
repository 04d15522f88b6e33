"""Images on their way into a network: on the device all the time, or read when they are asked for."""

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

from efcil.data.lazy import Streamed

UNDER_WAY = 6  # requests that are being decoded while one is used
FITS = 0.5  # of the device's free memory: what may be held there for as long as a task takes


class Mapped:
    """An array in the host's memory, or mapped from a file, whose rows are read like those of `Streamed`."""

    def __init__(self, images: npt.NDArray[np.uint8]):
        self.images, self.shape = images, images.shape

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Any) -> Mapped:
        return Mapped(self.images[key])

    def begin(self, rows: npt.NDArray[np.int64]) -> Mapped:
        """Return the rows."""
        return Mapped(self.images[rows])

    @contextmanager
    def ready(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Lend the images."""
        yield self.images


class OnDemand:
    """Images (n, channels, height, width) that are read when they are asked for; rows come as uint8 on the device."""

    def __init__(self, source: Streamed | Mapped, device: torch.device):
        self.source, self.device = source, device
        self.extra: Tensor | None = None  # images behind those of the source, on the device

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a tensor."""
        return (len(self), *self.source.shape[1:])

    def __len__(self) -> int:
        return len(self.source) + (len(self.extra) if self.extra is not None else 0)

    def first(self, count: int) -> OnDemand:
        """Return the first images alone; they are not read yet."""
        assert self.extra is None
        return OnDemand(self.source[:count], self.device)

    def followed_by(self, images: Tensor) -> OnDemand:
        """Return these images and then others, which are on the device."""
        other = copy.copy(self)
        other.extra = images if self.extra is None else torch.cat([self.extra, images])
        return other

    def begin(self, rows: Tensor) -> Callable[[], Tensor]:
        """Start to read rows; what is returned waits for them."""
        wanted = rows.cpu()
        ours = wanted < len(self.source)
        request = self.source.begin(wanted[ours].numpy()) if bool(ours.any()) else None

        def wait() -> Tensor:
            found = torch.empty((len(wanted), *self.shape[1:]), dtype=torch.uint8, device=self.device)
            if request is not None:
                with request.ready() as images:
                    found[ours.to(self.device)] = torch.from_numpy(np.asarray(images)).to(self.device)
            if self.extra is not None:
                theirs = ~ours
                found[theirs.to(self.device)] = self.extra[(wanted[theirs] - len(self.source)).to(self.device)]
            return found

        return wait

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.begin(rows)()


Store = Tensor | OnDemand


def stored(images: Any, device: torch.device) -> Store:
    """Copy images to the device; what is read as it is needed stays where it is, and so does what does not fit."""
    if isinstance(images, Streamed):
        return OnDemand(images, device)
    if device.type == "cuda" and images.nbytes > FITS * torch.cuda.mem_get_info(device)[0]:
        return OnDemand(Mapped(images), device)
    return torch.from_numpy(np.array(images)).to(device)


def first(images: Store, count: int) -> Store:
    """Return the first images."""
    return images[:count] if isinstance(images, Tensor) else images.first(count)


def part(images: Store, rows: Tensor) -> Store:
    """Return some of the images; of those that are read when they are asked for nothing is read yet."""
    return images[rows] if isinstance(images, Tensor) else OnDemand(images.source[rows.cpu().numpy()], images.device)


def followed_by(images: Store, others: Tensor) -> Store:
    """Return images and then others."""
    return torch.cat([images, others]) if isinstance(images, Tensor) else images.followed_by(others)


def fetched(images: Store, parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the images of each part's rows; those that must be read are begun some parts ahead."""
    if isinstance(images, Tensor):
        yield from (images[rows] for rows in parts)
        return
    waiting: deque[Callable[[], Tensor]] = deque()
    for rows in parts:
        waiting.append(images.begin(rows))
        if len(waiting) > UNDER_WAY:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()
