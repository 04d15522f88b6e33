"""Multi-stage features of a ResNet: its pooled features, 2 x 2-pooled intermediate stages, flip averaging.

Earlier stages are less specific to the classes of one task. Pooling them to 2 x 2 preserves spatial information, unlike
global average pooling.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from efcil.models.resnet import ResNet


class MultiStageFeatures(nn.Module):
    """Pooled features of the backbone, followed by those of intermediate stages.

    >>> from efcil.models import build
    >>> features = MultiStageFeatures(build("resnet10", width=4), stages=2, flip_tta=True)
    >>> features(torch.zeros(2, 3, 8, 8)).shape, features.num_features  # 32 + 4 x 16 + 4 x 8
    (torch.Size([2, 128]), 128)
    """

    def __init__(self, backbone: ResNet, stages: int, flip_tta: bool) -> None:
        super().__init__()
        self.backbone, self.stages, self.flip_tta = backbone, stages, flip_tta  # number of stages before the last
        # A stage has half the planes of the next one and 2 x 2 positions.
        self.layout = (backbone.num_features, *(4 * (backbone.num_features >> back) for back in range(1, stages + 1)))
        self.num_features = sum(self.layout)

    def forward(self, images: Tensor) -> Tensor:
        """Return features (n, num_features): the last stage, then 2 x 2-pooled stages from later to earlier."""
        features = self._read(images)
        return (features + self._read(images.flip(3))) / 2 if self.flip_tta else features

    def _read(self, images: Tensor) -> Tensor:
        last, *before = reversed(self.backbone.forward_intermediates(images))
        stages = [adaptive_avg_pool2d(maps, 2).flatten(1) for maps in before[: self.stages]]
        return torch.cat([last.mean((2, 3)), *stages], 1)
