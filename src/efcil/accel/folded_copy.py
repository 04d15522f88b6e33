"""The form of networks of ours on a CPU: channels-last, and frozen copies without batch normalization.

In eval mode batch normalization is one factor and one offset per channel, and goes into the convolution before it
(`efcil.accel.folded_resnet.fold_batch_norm`). The forward pass stays the network's own.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import nn

from efcil.accel.folded_resnet import fold_batch_norm
from efcil.models import EfficientNetLite, ResNet
from efcil.models.multi_stage import MultiStageFeatures

OUR_NETWORKS = (ResNet, EfficientNetLite)
"""Exact types whose layers are known: in each of their modules a convolution is followed by its normalization."""

# With fewer, the backward pass of a channels-last 1 x 1 convolution of stride 2 writes past its memory on AVX2 CPUs
# (oneDNN in torch 2.13; not with AVX-512 or SSE 4.1).
MIN_CHANNELS_LAST = 8


def our_networks(module: nn.Module) -> list[nn.Module]:
    """Return the networks of ours in a module; a subclass is none of them."""
    return [network for network in module.modules() if type(network) in OUR_NETWORKS]


def use_channels_last(module: nn.Module) -> None:
    """Bring the weights of networks of ours into the memory format that is fast on a CPU, where it is safe.

    Convolutions follow the format of their weights, whatever that of the images is.
    """
    for network in our_networks(module):
        channels = [norm.num_features for norm in network.modules() if isinstance(norm, nn.BatchNorm2d)]
        if min(channels) >= MIN_CHANNELS_LAST:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@torch.no_grad()
def folded_copy(backbone: nn.Module) -> nn.Module:
    """Return a frozen copy of a network of ours that computes the same with fewer operations; any other as it is.

    >>> from efcil.models import build
    >>> network = build("resnet10", width=4)
    >>> type(folded_copy(network).bn1).__name__, folded_copy(network.layer1) is network.layer1
    ('Identity', True)
    """
    if type(backbone) not in (*OUR_NETWORKS, MultiStageFeatures) or not our_networks(backbone):
        return backbone
    if not any(isinstance(module, nn.BatchNorm2d) for module in backbone.modules()):
        return backbone  # folded already
    return _folded(backbone)


def _folded(module: nn.Module) -> nn.Module:
    """Return a copy of a module of ours, which shares no weight with it: it has none but those that are folded."""
    copied = copy.copy(module)
    copied._parameters, copied._buffers, copied._modules = {}, {}, {}
    copied.training = False
    layers: list[tuple[str, nn.Module]] = list(module.named_children())
    folded: dict[str, nn.Module] = {}
    for (name, convolution), (behind, norm) in pairwise(layers):
        if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            folded[name], folded[behind] = _folded_convolution(convolution, norm), nn.Identity()
    for name, child in layers:
        copied._modules[name] = folded[name] if name in folded else _folded(child)
    return copied


def _folded_convolution(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    weight, bias = fold_batch_norm(convolution, norm)
    layout = torch.preserve_format if convolution.weight.is_contiguous() else torch.channels_last
    copied = copy.copy(convolution)
    copied.training = False
    copied._parameters = {
        "weight": nn.Parameter(weight.to(convolution.weight.dtype, memory_format=layout), requires_grad=False),
        "bias": nn.Parameter(bias.to(convolution.weight.dtype), requires_grad=False),
    }
    return copied
