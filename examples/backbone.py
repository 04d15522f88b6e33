"""Example plug-in: a backbone, any `nn.Module` from images (n, channels, height, width) to features (n, dim).

    [project.entry-points."efcil.backbones"]
    small = "backbone:SmallNet"

Then `efcil run dpcr digits --set backbone=small`. In a script, `efcil.register_backbone("small", SmallNet)` has the
same effect. The number of features is measured at the image size before training.
"""

import itertools

from torch import nn


class SmallNet(nn.Sequential):
    """Three convolutions and global average pooling."""

    def __init__(self, channels):
        layers, widths = [], (channels, 16, 32, 64)
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
