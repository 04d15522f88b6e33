"""A plain linear classifier, which grows: the head of PASS, iCaRL and FOSTER."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from efcil.heads.growing import GrowingHead, uniform


class LinearHead(GrowingHead):
    """logits = weight x + bias, with one row per class or several."""

    def __init__(self, dim: int, rows: int = 1):
        super().__init__()
        self.rows = rows  # per class
        self.weight = nn.Parameter(torch.empty(0, dim))  # (classes rows, dim)
        self.bias = nn.Parameter(torch.empty(0))

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, dim) -> logits (n, classes rows)."""
        return linear(features, self.weight, self.bias)

    def grow(self, classes: int, source: torch.Generator) -> None:
        """Add rows for new classes, uniform in +-sqrt(3 / dim) (variance 1 / dim), without bias."""
        count, dim = classes * self.rows, self.weight.shape[1]
        rows = uniform(count, dim, (3 / dim) ** 0.5, source)
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), rows.to(self.weight)]))
        self.bias = nn.Parameter(torch.cat([self.bias.detach(), self.bias.new_zeros(count)]))
