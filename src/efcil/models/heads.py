"""Auxiliary heads that are trained with the backbone and grow with the number of classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, softmax


class GrowingHead(nn.Module, ABC):
    """Head from features (n, dim) to logits (n, classes)."""

    @abstractmethod
    def add_classes(self, classes: int, source: torch.Generator) -> None:
        """Add classes, initialized on the CPU from `source`."""

    def resize_like(self, state: Mapping[str, Tensor]) -> None:
        """Resize parameters to the shapes of a saved state before it is loaded."""
        for name, parameter in list(self.named_parameters()):
            room = nn.Parameter(parameter.new_zeros(state[name].shape), requires_grad=parameter.requires_grad)
            setattr(self, name, room)


def uniform(rows: int, dim: int, bound: float, source: torch.Generator) -> Tensor:
    """Draw weights (rows, dim), uniform in +-bound."""
    return (torch.rand(rows, dim, generator=source) * 2 - 1) * bound


def cosine_logits(features: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return scale * cos(feature, weight_c): features (n, dim), weight (classes, dim) -> (n, classes)."""
    return scale * linear(normalize(features, dim=1), normalize(weight, dim=1))


class CosineHead(GrowingHead):
    """Cosine classifier, logits = scale * cos(feature, weight_c); the scale starts at 1."""

    def __init__(self, dim: int, classes: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, dim))  # (classes, dim)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (n, classes) of features (n, dim)."""
        return cosine_logits(features, self.weight, self.scale)

    def add_classes(self, classes: int, source: torch.Generator) -> None:
        """Add rows for new classes, uniform in +-1/sqrt(dim)."""
        dim = self.weight.shape[1]
        rows = uniform(classes, dim, dim**-0.5, source)
        self.append_weights(rows)

    def append_weights(self, rows: Tensor) -> None:
        """Append rows (classes, dim)."""
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), rows.to(self.weight)]))

    def select_classes(self, positions: Tensor) -> None:
        """Keep only the rows at `positions`."""
        self.weight = nn.Parameter(self.weight.detach()[positions])


class LinearHead(GrowingHead):
    """Linear classifier with one or more rows per class."""

    def __init__(self, dim: int, rows: int = 1):
        super().__init__()
        self.rows = rows  # per class
        self.weight = nn.Parameter(torch.empty(0, dim))  # (classes rows, dim)
        self.bias = nn.Parameter(torch.empty(0))

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (n, classes rows) of features (n, dim)."""
        return linear(features, self.weight, self.bias)

    def add_classes(self, classes: int, source: torch.Generator) -> None:
        """Add rows for new classes, uniform in +-sqrt(3 / dim) (variance 1 / dim), without bias."""
        count, dim = classes * self.rows, self.weight.shape[1]
        rows = uniform(count, dim, (3 / dim) ** 0.5, source)
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), rows.to(self.weight)]))
        self.bias = nn.Parameter(torch.cat([self.bias.detach(), self.bias.new_zeros(count)]))


class ProxyHead(GrowingHead):
    """Classifier with proxies: logits = scale * sum_k a_ck s_ck, s_ck = cos(feature, proxy k of class c) and a_c =
    softmax(s_c).

    The scale starts at 1 and is trained in every task.
    """

    def __init__(self, dim: int, proxies: int = 10):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, proxies, dim))  # (new classes, proxies, dim)
        self.frozen = nn.Parameter(torch.empty(0, proxies, dim), requires_grad=False)  # (old classes, proxies, dim)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (n, classes) of features (n, dim), in float32."""
        proxies = torch.cat([self.frozen, self.weight])
        with torch.autocast(features.device.type, enabled=False):
            cosines = linear(normalize(features.float(), dim=1), normalize(proxies.flatten(0, 1), dim=1))
            similar = cosines.unflatten(1, proxies.shape[:2])  # (n, classes, proxies)
            return self.scale * (softmax(similar, 2) * similar).sum(2)

    def add_classes(self, classes: int, source: torch.Generator) -> None:
        """Freeze the proxies of all classes so far; add proxies of new classes, uniform in +-1/sqrt(dim)."""
        _, proxies, dim = self.weight.shape
        rows = uniform(classes * proxies, dim, dim**-0.5, source).view(classes, proxies, dim)
        old = torch.cat([self.frozen, self.weight.detach()])
        self.frozen, self.weight = nn.Parameter(old, requires_grad=False), nn.Parameter(rows.to(old))


HEAD_TYPES: tuple[type[CosineHead] | type[LinearHead] | type[ProxyHead], ...] = (CosineHead, LinearHead, ProxyHead)


def head_from_state(state: Mapping[str, Tensor]) -> GrowingHead:
    """Build a head from a state dict; its type follows from the tensor names."""
    (kind,) = (kind for kind in HEAD_TYPES if set(kind(1).state_dict()) == set(state))
    head = kind(state["weight"].shape[-1]).to(state["weight"])
    head.resize_like(state)
    head.load_state_dict(dict(state))
    return head
