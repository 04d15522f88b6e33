"""timm models as backbones, `timm/NAME` (extra `timm`): pooled features without classifier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from efcil.errors import ConfigError

PREFIX = "timm/"


class TimmBackbone(nn.Module):
    """timm model without classifier, with ``num_features`` features."""

    num_features: int

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.num_features = int(getattr(model, "head_hidden_size", None) or model.num_features)

    def forward(self, images: Tensor) -> Tensor:
        """Return features (n, dim) of images (n, channels, height, width)."""
        features: Tensor = self.model(images)
        return features


def build_timm(name: str, *, channels: int, seed: int, pretrained: bool = False) -> TimmBackbone:
    """Create the timm model NAME of `timm/NAME`, from scratch or with pretrained weights."""
    try:
        import timm
    except ImportError as error:
        raise ConfigError(f"backbone {name} needs timm ({error}): pip install 'efcil[timm]'") from None
    with torch.random.fork_rng(devices=[]):  # timm initializes from the global generator
        torch.manual_seed(seed)
        try:
            model = timm.create_model(
                name.removeprefix(PREFIX), pretrained=pretrained, num_classes=0, in_chans=channels
            )
        except RuntimeError as error:
            raise ConfigError(f"backbone {name}: {error}; timm.list_models() lists the available models") from None
    return TimmBackbone(model)
