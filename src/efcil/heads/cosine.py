"""The auxiliary head that the backbone learns with: a cosine classifier with one learnable scale, which grows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from efcil.heads.growing import GrowingHead, uniform


def cosine_logits(features: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """scale * cos(feature, weight_c): features (n, dim), weight (classes, dim) -> (n, classes)."""
    return scale * linear(normalize(features, dim=1), normalize(weight, dim=1))


class CosineHead(GrowingHead):
    """logits = scale * cos(feature, weight_c); the scale starts at 1."""

    def __init__(self, dim: int, classes: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, dim))  # (classes, dim)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, dim) -> logits (n, classes)."""
        return cosine_logits(features, self.weight, self.scale)

    def grow(self, classes: int, source: torch.Generator) -> None:
        """Add rows for new classes, uniform in +-1/sqrt(dim)."""
        dim = self.weight.shape[1]
        rows = uniform(classes, dim, dim**-0.5, source)
        self.extend(rows)

    def extend(self, rows: Tensor) -> None:
        """Add given rows (classes, dim)."""
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), rows.to(self.weight)]))

    def keep(self, positions: Tensor) -> None:
        """Keep the rows of some classes only."""
        self.weight = nn.Parameter(self.weight.detach()[positions])
