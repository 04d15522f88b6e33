"""Fold batch normalization into the convolutions of a frozen ResNet, and fuse them on a GPU.

In eval mode batch normalization is one factor and one offset per channel. So a layer is one product with other weights,

    relu(gamma (W x - mean) / sqrt(var + eps) + beta + shortcut) = relu(W' x + b' + shortcut),
    W' = W gamma / sqrt(var + eps),  b' = beta - mean gamma / sqrt(var + eps),

and cuDNN computes it in one kernel, which reads its input and writes its output once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efcil.accel.stem import StemConv
from efcil.models.resnet import BasicBlock, Bottleneck, ResNet


@functools.cache
def supports_fused_conv(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device computes fused layers correctly; tried once."""
    return device.type == "cuda" and is_correct_on(device, dtype)


@torch.no_grad()
def is_correct_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a folded stem and block are correct on a device whose memory is full of NaN."""
    stem, norm, block = StemConv(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), BasicBlock(16, 16, 1, pad=False)
    whole = nn.Sequential(stem, norm, nn.ReLU(), block).eval()
    whole = whole.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.linspace(-2, 2, 8 * 3 * 8 * 8).view(8, 3, 8, 8).to(device, memory_format=torch.channels_last)
    waste = [torch.full((8, 16, 8, 8), torch.nan, device=device, dtype=dtype) for _ in range(8)]
    del waste  # whoever gets this memory and does not write it first is found out
    try:
        found, wanted = FoldedBlock(block, dtype)(FoldedConv(stem, norm, dtype)(images.to(dtype))), whole(images)
    except (RuntimeError, ImportError):  # a fused layer that is not there, or no Triton
        return False
    return bool((found.float() - wanted).norm() < 0.03 * wanted.norm())


def fold_batch_norm(convolution: nn.Conv2d, norm: nn.BatchNorm2d | nn.SyncBatchNorm) -> tuple[Tensor, Tensor]:
    """Return W' and b' of a convolution and the normalization behind it, in float64."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    weight = convolution.weight.double() * scale.view(-1, 1, 1, 1)
    return weight, norm.bias.double() - norm.running_mean.double() * scale


class FoldedConv:
    """A convolution with its normalization, a shortcut's sum and a ReLU."""

    def __init__(
        self, convolution: nn.Conv2d, norm: nn.BatchNorm2d | nn.SyncBatchNorm, dtype: torch.dtype, relu: bool = True
    ):
        weight, bias = fold_batch_norm(convolution, norm)
        assert isinstance(convolution.padding, tuple)
        self.stride, self.padding = convolution.stride, convolution.padding
        self.prepare_input: Callable[[Tensor], Tensor] = lambda x: x
        if isinstance(convolution, StemConv) and convolution.is_small:  # as it learns (`efcil.accel.fused_resnet`)
            self.prepare_input = functools.partial(convolution.im2col, dtype=dtype)
            weight, self.stride, self.padding = convolution.weight_to_im2col(weight), (1, 1), (0, 0)
        elif isinstance(convolution, StemConv) and weight.is_cuda:  # as `StemConv` does
            self.prepare_input, weight = convolution.pad_channels, convolution.pad_channels(weight)
        self.weight = weight.to(dtype)
        if weight.is_cuda:
            self.weight = self.weight.contiguous(memory_format=torch.channels_last)
        self.offset, self.relu = bias, relu  # b' in float64
        self.bias: Tensor | None = bias.to(dtype)

    def __call__(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """(n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        x = self.prepare_input(x)
        if x.is_cuda and self.relu:
            return self._fused(x, shortcut)
        y = F.conv2d(x, self.weight, self.bias, self.stride, self.padding)
        y = y if shortcut is None else y.add_(shortcut)
        return y.relu_() if self.relu else y

    def _fused(self, x: Tensor, shortcut: Tensor | None) -> Tensor:
        how = (self.stride, self.padding, (1, 1), 1)
        if shortcut is None:
            return torch.cudnn_convolution_relu(x, self.weight, self.bias, *how)
        return torch.cudnn_convolution_add_relu(x, self.weight, shortcut, 1.0, self.bias, *how)


class FoldedBlock:
    """A folded residual block."""

    def __init__(self, block: BasicBlock | Bottleneck, dtype: torch.dtype):
        *inner, last = block.layers()
        self.inner = [FoldedConv(*pair, dtype) for pair in inner]
        self.last = FoldedConv(*last, dtype, block.last_relu)
        self.shortcut: Callable[[Tensor], Tensor] | None = block.downsample
        if isinstance(block.downsample, nn.Sequential):
            convolution, norm = block.downsample
            assert isinstance(convolution, nn.Conv2d)
            assert isinstance(norm, nn.BatchNorm2d | nn.SyncBatchNorm)
            self.shortcut = around = FoldedConv(convolution, norm, dtype, relu=False)
            # One offset for both: cuDNN adds the last layer's, and the shortcut's would be a pass of its own.
            self.last.bias, around.bias = (self.last.offset + around.offset).to(dtype), None

    def __call__(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        y = x
        for layer in self.inner:
            y = layer(y)
        return self.last(y, x if self.shortcut is None else self.shortcut(x))


class FoldedResNet:
    """A frozen copy of a ResNet that returns its features."""

    @torch.no_grad()
    def __init__(self, backbone: ResNet, dtype: torch.dtype = torch.float32):
        self.dtype = dtype
        self.stem = FoldedConv(StemConv.over(backbone.conv1), backbone.bn1, dtype)
        self.maxpool = backbone.maxpool
        self.blocks = [FoldedBlock(block, dtype) for block in backbone.blocks()]

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Features (n, dim) of images (n, channels, height, width)."""
        x = self.maxpool(self.stem(images.to(self.dtype)))
        for block in self.blocks:
            x = block(x)
        return x.mean((2, 3))


def fold(backbone: nn.Module, device: torch.device, dtype: torch.dtype) -> FoldedResNet | None:
    """Return a folded ResNet where the device supports it; None elsewhere."""
    return FoldedResNet(backbone, dtype) if type(backbone) is ResNet and supports_fused_conv(device, dtype) else None
