"""Fold batch normalization into the convolutions of a frozen EfficientNet-Lite, and lay its channels last.

As for ResNets (`efcil.accel.folded_resnet`): in eval mode normalization is one factor and one offset per channel. On a
CPU these networks are bound by memory, so a pass fewer over the maps of each layer counts, and small batches, whose
maps stay in the cache, are faster than large ones.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efcil.accel.folded_resnet import fold_batch_norm
from efcil.models.efficientnet_lite import EfficientNetLite, Layer

BATCH_NUMEL = 16 * 3 * 224 * 224  # numbers in a batch


class FoldedLayer:
    """A convolution with its normalization and ReLU6."""

    def __init__(self, layer: Layer):
        self.convolution, norm, self.relu = layer
        weight, bias = fold_batch_norm(self.convolution, norm)
        self.weight, self.bias = weight.float().contiguous(memory_format=torch.channels_last), bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        own = self.convolution
        y = F.conv2d(own.pad(x), self.weight, self.bias, own.stride, own.padding, groups=own.groups)
        return F.relu6(y, inplace=True) if self.relu else y


class FoldedEfficientNetLite:
    """A frozen copy of an EfficientNet-Lite that returns its features, on a CPU."""

    @torch.no_grad()
    def __init__(self, backbone: EfficientNetLite):
        self.stem, self.head = [[FoldedLayer(layer) for layer in part] for part in (backbone.stem(), backbone.head())]
        self.blocks = [([FoldedLayer(layer) for layer in own.layers()], own.skip) for own in backbone.all_blocks()]

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return features (n, 1280) of images (n, channels, height, width)."""
        x = images.float().contiguous(memory_format=torch.channels_last)
        for layer in self.stem:
            x = layer(x)
        for layers, skip in self.blocks:
            y = x
            for layer in layers:
                y = layer(y)
            x = y.add_(x) if skip else y
        for layer in self.head:
            x = layer(x)
        return x.mean((2, 3))


_FOLDED: weakref.WeakKeyDictionary[nn.Module, tuple[list[int], FoldedEfficientNetLite]] = weakref.WeakKeyDictionary()


def fold(backbone: nn.Module, device: torch.device) -> FoldedEfficientNetLite | None:
    """Return the network folded, for a CPU, and the same one until its weights change; None for other networks."""
    if type(backbone) is not EfficientNetLite or device.type != "cpu":
        return None
    versions = [tensor._version for tensor in (*backbone.parameters(), *backbone.buffers())]
    if backbone not in _FOLDED or _FOLDED[backbone][0] != versions:
        _FOLDED[backbone] = versions, FoldedEfficientNetLite(backbone)
    return _FOLDED[backbone][1]
