"""The auxiliary head that the backbone learns with: a cosine classifier with one learnable scale, which grows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize


class CosineHead(nn.Module):
    """logits = scale * cos(feature, weight_c); the scale starts at 1."""

    def __init__(self, dim: int, classes: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, dim))  # (classes, dim)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, dim) -> logits (n, classes)."""
        return self.scale * linear(normalize(features, dim=1), normalize(self.weight, dim=1))

    def grow(self, classes: int, source: torch.Generator) -> None:
        """Add rows for new classes, uniform in +-1/sqrt(dim), drawn on the CPU from `source`."""
        dim = self.weight.shape[1]
        rows = (torch.rand(classes, dim, generator=source) * 2 - 1) / dim**0.5
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), rows.to(self.weight)]))

    def resize(self, classes: int) -> None:
        """Make room for a saved head of another size; its numbers are loaded next."""
        self.weight = nn.Parameter(self.weight.new_zeros(classes, self.weight.shape[1]))
