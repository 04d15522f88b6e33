"""What the heads that are trained with a backbone share: they grow by rows, and make room for saved ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class GrowingHead(nn.Module, ABC):
    """Features (n, dim) -> logits (n, classes)."""

    @abstractmethod
    def grow(self, classes: int, source: torch.Generator) -> None:
        """Add new classes; what is random is drawn on the CPU from `source`."""

    def make_room(self, state: Mapping[str, Tensor]) -> None:
        """Take the shapes of a saved head of this kind; its numbers are loaded next."""
        for name, own in list(self.named_parameters()):
            room = nn.Parameter(own.new_zeros(state[name].shape), requires_grad=own.requires_grad)
            setattr(self, name, room)


def uniform(rows: int, dim: int, bound: float, source: torch.Generator) -> Tensor:
    """Return new weights (rows, dim), uniform in +-bound."""
    return (torch.rand(rows, dim, generator=source) * 2 - 1) * bound
