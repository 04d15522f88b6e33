"""ResNets without classifier, with torchvision's parameter names and initialization.

He et al., Deep Residual Learning for Image Recognition, CVPR 2016. Only the stem depends on the size of the images:

========  ==========================================  =======================================
stem      layers                                      for
========  ==========================================  =======================================
cifar     3x3, stride 1                               32 to 64 pixels (CIFAR-100, Tiny-ImageNet)
small     3x3, stride 1, 3x3 max-pool of stride 2     ImageNet-100 in the released DPCR code
imagenet  7x7, stride 2, 3x3 max-pool of stride 2     224 pixels (torchvision's)
========  ==========================================  =======================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efcil.errors import ConfigError, nearest
from efcil.platform_support import memory

__all__ = ["NAMES", "STEMS", "ResNet", "build"]


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class PadShortcut(nn.Module):
    """Option A of the paper: subsampling and zero channels, without parameters."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (outputs - inputs) // 2
        self.after = outputs - inputs - self.before

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))

    def backward_input(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of x from the gradient of the output."""
        result = torch.zeros_like(x)
        result[:, :, :: self.stride, :: self.stride] = grad[:, self.before : self.before + x.shape[1]]
        return result


def _shortcut(inputs: int, outputs: int, stride: int, pad: bool) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    if pad:
        return PadShortcut(inputs, outputs, stride)
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, planes: int, stride: int, pad: bool, last_relu: bool = True) -> None:
        super().__init__()
        self.last_relu = last_relu
        self.conv1 = _conv(inputs, planes, 3, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(planes, planes, 3)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = _shortcut(inputs, planes, stride, pad)

    def layers(self) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
        """Return the convolutions, each with its normalization, but for the shortcut's."""
        return [(self.conv1, self.bn1), (self.conv2, self.bn2)]

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, planes, h / stride, w / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y = y + (x if self.downsample is None else self.downsample(x))
        return F.relu(y, inplace=True) if self.last_relu else y


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride, as in torchvision), 1x1 convolutions and a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, planes: int, stride: int, pad: bool, last_relu: bool = True) -> None:
        super().__init__()
        self.last_relu = last_relu
        outputs = planes * self.expansion
        self.conv1 = _conv(inputs, planes, 1)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = _conv(planes, planes, 3, stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = _conv(planes, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, outputs, stride, pad)

    def layers(self) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
        """Return the convolutions, each with its normalization, but for the shortcut's."""
        return [(self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)]

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, 4 planes, h / stride, w / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y = y + (x if self.downsample is None else self.downsample(x))
        return F.relu(y, inplace=True) if self.last_relu else y


@dataclass(frozen=True)
class _Shape:
    block: type[BasicBlock] | type[Bottleneck]
    blocks: tuple[int, ...]  # per stage; stages after the first halve the resolution and double the channels
    width: int = 64
    pad: bool = False


_SHAPES = {
    "resnet10": _Shape(BasicBlock, (1, 1, 1, 1)),
    "resnet18": _Shape(BasicBlock, (2, 2, 2, 2)),
    "resnet32": _Shape(BasicBlock, (5, 5, 5), width=16, pad=True),  # the CIFAR-10 network of the paper, 6 * 5 + 2
    "resnet34": _Shape(BasicBlock, (3, 4, 6, 3)),
    "resnet50": _Shape(Bottleneck, (3, 4, 6, 3)),
}
NAMES: tuple[str, ...] = tuple(_SHAPES)
STEMS: tuple[str, ...] = ("cifar", "imagenet", "small")
MOST_WIDTH = 2**16  # channels
_COPIES = 4  # of all parameters while training: student, teacher, gradient, momentum


class ResNet(nn.Module):
    """ResNet up to global average pooling, with ``num_features`` features; see `build`."""

    num_features: int

    def __init__(self, shape: _Shape, stem: str, width: int, channels: int, last_relu: bool = True) -> None:
        super().__init__()
        size, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.conv1 = _conv(channels, width, size, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.Identity() if stem == "cifar" else nn.MaxPool2d(3, stride=2, padding=1)
        stages: list[nn.Module] = []
        inputs = width
        for index, count in enumerate(shape.blocks):
            planes = width * 2**index
            blocks: list[nn.Module] = []
            for position in range(count):
                stride = 2 if index and not position else 1
                last = index == len(shape.blocks) - 1 and position == count - 1
                blocks.append(shape.block(inputs, planes, stride, shape.pad, last_relu or not last))
                inputs = planes * shape.block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3 = stages[:3]
        self.layer4 = stages[3] if len(stages) > 3 else nn.Identity()
        self.num_features = inputs

    def forward(self, images: Tensor) -> Tensor:
        """Return features (n, dim) of images (n, channels, height, width)."""
        x = self.layer4(self.layer3(self.layer2(self.layer1(self._stem(images)))))
        features: Tensor = x.mean((2, 3))
        return features

    def forward_intermediates(self, images: Tensor) -> list[Tensor]:
        """Return feature maps (n, planes, h, w) of each stage; the spatial mean of the last one are the features."""
        maps = [self.layer1(self._stem(images))]
        for stage in (self.layer2, self.layer3, self.layer4):
            if not isinstance(stage, nn.Identity):  # resnet32 has three stages
                maps.append(stage(maps[-1]))
        return maps

    def blocks(self) -> list[BasicBlock | Bottleneck]:
        """Return the residual blocks of all stages, in order."""
        stages = (self.layer1, self.layer2, self.layer3, self.layer4)
        found: list[Any] = [block for stage in stages if isinstance(stage, nn.Sequential) for block in stage]
        return found

    def _stem(self, images: Tensor) -> Tensor:
        x: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        return x


def build(
    name: str,
    *,
    stem: str = "cifar",
    width: int | None = None,
    channels: int = 3,
    seed: int = 0,
    last_relu: bool = True,
) -> ResNet:
    """Build an initialized backbone, deterministic in the seed.

    `width` is the number of channels of the first stage (64, or 16 for resnet32). Without `last_relu` the last block
    has no final ReLU, so features have both signs. The global random state is not affected.

    >>> backbone = build("resnet10", width=8, channels=1)
    >>> backbone.num_features, tuple(backbone(torch.zeros(2, 1, 8, 8)).shape)
    (64, (2, 64))
    """
    # Layer initialization uses the global generator; fork_rng restores its state.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        backbone = empty(name, stem, width, channels, last_relu)
    generator = torch.Generator().manual_seed(seed)
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
    return backbone


def empty(
    name: str, stem: str = "cifar", width: int | None = None, channels: int = 3, last_relu: bool = True
) -> ResNet:
    """Build a backbone on the current device, its weights not yet initialized as `build` does."""
    if name not in _SHAPES:
        raise ConfigError(f"backbone: unknown name '{name}'; {nearest(name, _SHAPES)}")
    if stem not in STEMS:
        raise ConfigError(f"stem: unknown name '{stem}'; {nearest(stem, STEMS)}")
    shape = _SHAPES[name]
    width = shape.width if width is None else width
    for argument, value in (("width", width), ("channels", channels)):
        if not 1 <= value <= MOST_WIDTH:
            raise ConfigError(f"{argument} is {value}; wanted 1 to {MOST_WIDTH:,} channels")
    if width > shape.width:
        with torch.device("meta"):
            size = 4 * sum(p.numel() for p in ResNet(shape, stem, width, channels, last_relu).parameters())
        if (room := memory()) is not None and _COPIES * size > room:
            raise ConfigError(f"width is {width}: {name} would have {size / 2**30:,.1f} GiB of weights; take less")
    return ResNet(shape, stem, width, channels, last_relu)
