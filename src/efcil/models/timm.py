"""Backbones of the timm library by name, `timm/NAME` (extra `timm`): features behind the pooling, no classifier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from efcil.errors import ConfigError

PREFIX = "timm/"


class TimmBackbone(nn.Module):
    """A timm model without its classifier; ``num_features`` is the number of features."""

    num_features: int

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.num_features = int(getattr(model, "head_hidden_size", None) or model.num_features)

    def forward(self, images: Tensor) -> Tensor:
        """Features (n, dim) of images (n, channels, height, width)."""
        features: Tensor = self.model(images)
        return features


def build_timm(name: str, *, channels: int, seed: int, pretrained: bool = False) -> TimmBackbone:
    """Make the model that timm knows as NAME of `timm/NAME`, from scratch or with the weights that timm fetches."""
    try:
        import timm
    except ImportError as error:
        raise ConfigError(f"backbone {name} needs timm ({error}): pip install 'efcil[timm]'") from None
    with torch.random.fork_rng(devices=[]):  # timm draws its first weights from the process-wide generator
        torch.manual_seed(seed)
        try:
            model = timm.create_model(
                name.removeprefix(PREFIX), pretrained=pretrained, num_classes=0, in_chans=channels
            )
        except RuntimeError as error:
            raise ConfigError(f"backbone {name}: {error}; timm.list_models() names those there are") from None
    return TimmBackbone(model)
