"""What classifiers may read of a ResNet beside its features: the maps before its last ones, and mirror images.

Maps before the last ones are less bound to the classes of one task, the more so the earlier they are. Their mean over
each quarter of the image (2 x 2) keeps where things are, which the features, means over the whole image, do not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from efcil.models.resnet import ResNet


class Reading(nn.Module):
    """The backbone's features, and behind them what else is read; the backbone stays what it is.

    >>> from efcil.models import build
    >>> reading = Reading(build("resnet10", width=4), use_stages=2, mirrored=True)
    >>> reading(torch.zeros(2, 3, 8, 8)).shape, reading.dim  # 32 features, four times 16 planes, four times 8
    (torch.Size([2, 128]), 128)
    """

    def __init__(self, backbone: ResNet, use_stages: int, mirrored: bool) -> None:
        super().__init__()
        self.backbone, self.use_stages, self.mirrored = backbone, use_stages, mirrored  # stages before the last
        # A stage has half of the next one's planes, and four quarters of each.
        self.layout = (backbone.dim, *(4 * (backbone.dim >> back) for back in range(1, use_stages + 1)))
        self.dim = sum(self.layout)

    def forward(self, images: Tensor) -> Tensor:
        """(n, dim): the features, then the quarters of the stages before the last, the latest first."""
        found = self._read(images)
        return (found + self._read(images.flip(3))) / 2 if self.mirrored else found

    def _read(self, images: Tensor) -> Tensor:
        last, *before = reversed(self.backbone.stages(images))
        quarters = [adaptive_avg_pool2d(maps, 2).flatten(1) for maps in before[: self.use_stages]]
        return torch.cat([last.mean((2, 3)), *quarters], 1)
