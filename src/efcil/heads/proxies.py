"""PODNet's classifier: a class has several proxies, and those of old classes stay as they were learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, softmax

from efcil.heads.growing import GrowingHead, uniform


class ProxyHead(GrowingHead):
    """logits = scale * sum_k a_ck s_ck with s_ck = cos(feature, proxy k of class c) and a_c = softmax(s_c).

    The scale starts at 1 and is learned in every task.
    """

    def __init__(self, dim: int, proxies: int = 10):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, proxies, dim))  # (new classes, proxies, dim)
        self.frozen = nn.Parameter(torch.empty(0, proxies, dim), requires_grad=False)  # (old classes, proxies, dim)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, dim) -> logits (n, classes), in float32."""
        proxies = torch.cat([self.frozen, self.weight])
        with torch.autocast(features.device.type, enabled=False):
            cosines = linear(normalize(features.float(), dim=1), normalize(proxies.flatten(0, 1), dim=1))
            similar = cosines.unflatten(1, proxies.shape[:2])  # (n, classes, proxies)
            return self.scale * (softmax(similar, 2) * similar).sum(2)

    def grow(self, classes: int, source: torch.Generator) -> None:
        """Freeze the proxies of all classes so far; add those of new ones, uniform in +-1/sqrt(dim)."""
        _, proxies, dim = self.weight.shape
        rows = uniform(classes * proxies, dim, dim**-0.5, source).view(classes, proxies, dim)
        old = torch.cat([self.frozen, self.weight.detach()])
        self.frozen, self.weight = nn.Parameter(old, requires_grad=False), nn.Parameter(rows.to(old))
