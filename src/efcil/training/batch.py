"""Batches passed to losses, and the frozen network whose outputs they may need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class FrozenForward:
    """Frozen network whose outputs a loss needs.

    `call` runs in the step; `ahead` precomputes the same outputs for many images, or is None.
    """

    call: Callable[[Tensor], Any]  # normalized images (n, c, h, w) -> outputs
    ahead: Callable[[Tensor], Tensor] | None = None


@dataclass
class Batch:
    """Normalized images with labels, further views and teacher outputs.

    `teacher` is the output of the learner's `frozen_forward`, computed in the step or precomputed. `views` are
    additional augmentations of the same images, as many as the learner declares.
    """

    images: Tensor  # (n, c, h, w)
    labels: Tensor  # (n,) positions in the class order
    views: tuple[Tensor, ...] = ()
    _teacher: Any = None
    _join: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def teacher(self) -> Any:
        """Outputs of the frozen network, or None."""
        self._join()
        return self._teacher
