"""How long and how fast a task is learned."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from efcil.config import Options


class Schedule(Options):
    """Epochs and a learning rate that drops by `gamma` after each milestone, or falls to zero along a cosine.

    >>> schedule = Schedule(epochs=100, lr=0.05, milestones=(45, 90))
    >>> [round(schedule.lr_at(epoch), 6) for epoch in (0, 44, 45, 89, 90)]
    [0.05, 0.05, 0.005, 0.005, 0.0005]
    >>> [round(Schedule(epochs=4, lr=1.0, lr_schedule="cosine").lr_at(epoch), 3) for epoch in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """

    epochs: int = Field(ge=1, le=1_000_000)
    """Number of epochs."""
    lr: float = Field(gt=0, le=1e6)
    """Learning rate of the first epoch."""
    lr_schedule: Literal["steps", "cosine"] = "steps"
    """How the rate falls: in steps, at `milestones`, or along a cosine to zero."""
    milestones: tuple[int, ...] = ()
    """Epochs after which the rate is multiplied by `gamma`."""
    gamma: float = Field(default=0.1, gt=0, le=1)
    """Factor at each milestone."""
    weight_decay: float = Field(default=0.0, ge=0, le=1e6)
    """Weight decay (L2 penalty)."""

    @model_validator(mode="after")
    def _milestones_rise(self) -> Schedule:
        if list(self.milestones) != sorted(set(self.milestones)) or any(m < 1 for m in self.milestones):
            raise ValueError(f"milestones must rise from 1, got {list(self.milestones)}")
        if self.lr_schedule == "cosine" and self.milestones:
            raise ValueError(
                f"milestones {list(self.milestones)} belong to lr_schedule=steps; "
                "for lr_schedule=cosine leave them empty"
            )
        return self

    def lr_at(self, epoch: int) -> float:
        """Learning rate in an epoch (0 is the first)."""
        if self.lr_schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
        return self.lr * self.gamma ** sum(epoch >= m for m in self.milestones)

    def rescaled(self, epochs: int) -> Schedule:
        """Return the same schedule over another number of epochs; rates and milestones follow.

        >>> Schedule(epochs=100, lr=0.1, milestones=(45, 90)).rescaled(10).milestones
        (4, 9)
        """
        steps = (max(1, round(m * epochs / self.epochs)) for m in self.milestones)
        milestones = tuple(sorted({m for m in steps if m < epochs}))
        return self.model_copy(update={"epochs": epochs, "milestones": milestones})
