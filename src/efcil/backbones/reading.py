"""What classifiers may read of a ResNet beside its features: the maps before its last ones, and mirror images.

The maps before the last ones are less bound to the classes of one task. Their mean over each quarter of the image
(2 x 2) keeps where things are, which the features, means over the whole image, do not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from efcil.backbones.resnet import ResNet


class Reading(nn.Module):
    """The backbone's features, and behind them what else is read; the backbone stays what it is.

    >>> from efcil.backbones import build
    >>> reading = Reading(build("resnet10", width=4), quarters=True, mirrored=True)
    >>> reading(torch.zeros(2, 3, 8, 8)).shape, reading.dim
    (torch.Size([2, 96]), 96)
    """

    def __init__(self, backbone: ResNet, quarters: bool, mirrored: bool) -> None:
        super().__init__()
        self.backbone, self.quarters, self.mirrored = backbone, quarters, mirrored
        planes = backbone.dim // 2  # of the stage before the last, whatever the blocks are
        self.dim = backbone.dim + (4 * planes if quarters else 0)

    def forward(self, images: Tensor) -> Tensor:
        """(n, dim), or with the quarters of the maps before the last ones (n, dim + 4 planes)."""
        found = self._read(images)
        return (found + self._read(images.flip(3))) / 2 if self.mirrored else found

    def _read(self, images: Tensor) -> Tensor:
        *_, before, last = self.backbone.stages(images)
        features = last.mean((2, 3))
        return torch.cat([features, adaptive_avg_pool2d(before, 2).flatten(1)], 1) if self.quarters else features
