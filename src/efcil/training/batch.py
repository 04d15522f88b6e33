"""What a loss gets of a batch, and the frozen network whose outputs it may ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class FrozenForward:
    """A frozen network whose outputs a loss needs.

    `call` runs in the step; `ahead` runs on many images before it and gives the same, None where that is not possible.
    """

    call: Callable[[Tensor], Any]  # normalized images (n, c, h, w) -> outputs
    ahead: Callable[[Tensor], Tensor] | None = None


@dataclass
class Batch:
    """Normalized images, their labels, and what belongs to them.

    `teacher` is what the learner's `frozen_forward` says of the images: computed in the step or ahead of it, the loss
    cannot tell. `views` are further augmentations of the same images, as many as the learner asks for.
    """

    images: Tensor  # (n, c, h, w)
    labels: Tensor  # (n,) positions in the class order
    views: tuple[Tensor, ...] = ()
    _teacher: Any = None
    _join: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def teacher(self) -> Any:
        """The frozen network's outputs, None where the learner asks for none."""
        self._join()
        return self._teacher
