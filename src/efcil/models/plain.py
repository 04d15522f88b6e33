"""Backbones of one's own: any `nn.Module` that maps images (n, channels, height, width) to features (n, dim)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, PlainSerializer
from torch import Tensor, nn

from efcil.errors import ConfigError
from efcil.plugins import one_line

Factory = Callable[[int], nn.Module]
"""Function from the number of image channels to a network."""


def backbone_name(backbone: Any) -> str:
    """Return what a backbone is called in summaries and messages: its name, or that of its class or factory."""
    if isinstance(backbone, str):
        return backbone
    return str(getattr(backbone, "__name__", None) or type(backbone).__name__)


def _is_source(backbone: Any) -> Any:
    if not isinstance(backbone, str | nn.Module) and not callable(backbone):
        raise ValueError(
            f"it must be a name, a torch module or a function that makes one, not {type(backbone).__name__}"
        )
    return backbone


BackboneSource = Annotated[Any, AfterValidator(_is_source), PlainSerializer(backbone_name, return_type=str)]
"""An option that is a backbone's name, or a module or factory of one's own, which is stored by its name."""


class PlainBackbone(nn.Module):
    """A module of somebody else as a backbone; ``num_features`` is the number of features that it was seen to return.

    >>> PlainBackbone(nn.Flatten(), 12)(torch.zeros(2, 3, 2, 2)).shape
    torch.Size([2, 12])
    """

    num_features: int

    def __init__(self, module: nn.Module, num_features: int) -> None:
        super().__init__()
        self.module, self.num_features = module, num_features

    def forward(self, images: Tensor) -> Tensor:
        """Return features (n, dim) of images (n, channels, height, width)."""
        features: Tensor = self.module(images)
        return features


def wrap_backbone(
    backbone: nn.Module | Factory, *, channels: int = 3, size: int, seed: int = 0, name: str | None = None
) -> PlainBackbone:
    """Make a backbone of a module, or of a factory `channels -> module`, tried on two images of `size` x `size`.

    A module is copied, with the weights that it has: each call gives the same backbone, and the module itself is never
    trained. A factory is called with torch's generator at `seed`: the same weights for the same seed. `name` is what
    messages call the backbone. One that cannot be used raises ConfigError.

    >>> module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> backbone = wrap_backbone(module, size=32)
    >>> backbone.num_features, backbone(torch.zeros(5, 3, 32, 32)).shape
    (16, torch.Size([5, 16]))
    >>> wrap_backbone(nn.Conv2d(3, 16, 3), size=32)
    Traceback (most recent call last):
    efcil.errors.ConfigError: backbone Conv2d: for images (2, 3, 32, 32) it returned (2, 16, 30, 30) in eval mode; ...
    """
    called = f"backbone {name or getattr(backbone, '__name__', None) or type(backbone).__name__}"
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):  # layers draw from the process-wide generator
        torch.manual_seed(seed)
        network = _copy(backbone, channels, called)
        shape = (2, channels, size, size)
        images = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        # In eval mode first, which changes nothing but lazy layers; training mode may count, so a copy is tried.
        dim = _try(network.eval(), images, called, "eval mode")
        in_training = _try(_copy(network, channels, called).train(), images, called, "training mode")
    if dim != in_training:
        raise ConfigError(
            f"{called}: it returned {dim} features in eval mode and {in_training} in training mode; "
            "both must be the same number"
        )
    parameters = list(network.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        why = "all its parameters have requires_grad=False" if parameters else "it has no parameters"
        raise ConfigError(f"{called}: {why}, so nothing can be trained; give a module with trainable parameters")
    return PlainBackbone(network.train(), dim)


def _copy(backbone: nn.Module | Factory, channels: int, called: str) -> nn.Module:
    """Return a module that is nobody else's, on the CPU."""
    made: object = backbone
    if not isinstance(backbone, nn.Module):
        if not callable(backbone):
            raise ConfigError(f"{called}: wanted an nn.Module or a function that makes one, got {backbone!r:.80}")
        try:
            made = backbone(channels)
        except Exception as error:
            raise ConfigError(f"{called}: cannot be made for {channels} channels: {one_line(error)}") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{called}: its factory returned {type(made).__name__}; wanted an nn.Module")
    try:
        return copy.deepcopy(made).cpu()  # of its own, should a factory return the same one again
    except Exception as error:
        raise ConfigError(f"{called}: cannot be copied: {one_line(error)}") from error


def _try(network: nn.Module, images: Tensor, called: str, mode: str) -> int:
    """Return the number of features, or say what is wrong with them."""
    shape = tuple(images.shape)
    try:
        with torch.no_grad():
            features = network(images)
    except Exception as error:
        raise ConfigError(f"{called}: cannot take images {shape} in {mode}: {one_line(error)}") from error
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2 or not features.numel():
        maps = isinstance(features, Tensor) and features.ndim == 4 and len(features) == 2
        got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        remedy = "; end it with nn.AdaptiveAvgPool2d(1) and nn.Flatten()" if maps else ""
        raise ConfigError(f"{called}: for images {shape} it returned {got} in {mode}; wanted features (2, dim){remedy}")
    if not features.is_floating_point():
        raise ConfigError(f"{called}: it returned features of {features.dtype}; wanted floating-point numbers")
    if not bool(features.isfinite().all()):
        raise ConfigError(f"{called}: it returned NaN or infinite features in {mode} for random images {shape}")
    return features.shape[1]
