"""Backbones that are registered: any `nn.Module` that maps images (n, channels, height, width) to features (n, dim)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from efcil.errors import ConfigError
from efcil.plugins import one_line

Factory = Callable[[int], nn.Module]
"""Channels of an image -> a network."""


class PlainBackbone(nn.Module):
    """A network of a plug-in; ``num_features`` is the number of features that it was seen to return."""

    num_features: int

    def __init__(self, module: nn.Module, num_features: int) -> None:
        super().__init__()
        self.module, self.num_features = module, num_features

    def forward(self, images: Tensor) -> Tensor:
        """Features (n, dim) of images (n, channels, height, width)."""
        features: Tensor = self.module(images)
        return features


def build_plain(name: str, factory: Factory, *, channels: int, size: int, seed: int) -> PlainBackbone:
    """Make a network and try it on two images of `size` x `size`; the same bits for the same seed."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):  # layers draw from the process-wide generator
        torch.manual_seed(seed)
        try:
            made = factory(channels)
        except Exception as error:
            raise ConfigError(f"backbone {name}: cannot be made for {channels} channels: {one_line(error)}") from error
        if not isinstance(made, nn.Module):
            raise ConfigError(f"backbone {name}: its factory returned {type(made).__name__}; wanted an nn.Module")
        network = copy.deepcopy(made)  # of its own, should the factory return the same one again
        shape = (2, channels, size, size)
        try:
            with torch.no_grad():
                features = network.eval()(torch.zeros(shape))
        except Exception as error:
            raise ConfigError(f"backbone {name}: cannot take images {shape}: {one_line(error)}") from error
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2 or not features.numel():
        got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(f"backbone {name}: for images {shape} it returned {got}; wanted features (2, dim)")
    if not features.is_floating_point():
        raise ConfigError(f"backbone {name}: it returned features of {features.dtype}; wanted floating-point numbers")
    return PlainBackbone(network.train(), features.shape[1])
