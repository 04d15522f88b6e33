"""What a model card may ask for, checked against the files beside it before memory is taken or anything is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from torch import Tensor

from efcil import models
from efcil.errors import ModelError
from efcil.product.model_config import MOST_SIZE, ModelConfig

TRUST = "EFCIL_TRUST_BACKBONES"  # environment variable by which a user agrees to what a card names
_EXPANDED = ("buffer", "expansion")  # options that make a feature map as large as the statistics behind it
_BACKBONE = "backbone."
_MARGIN = 1_000_000  # numbers that may be missing: what does not fit exactly is reported when they are loaded


def check_config(config: ModelConfig, weights: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> None:
    """Raise ModelError for a configuration that is out of range, or larger than the model's own weights."""
    for name, value, least, most in (
        ("size", config.size, 1, MOST_SIZE),
        ("seed", config.seed, 0, 2**63 - 1),
        ("val_fraction", config.val_fraction, 0, 0.5),
        ("crop", config.training.crop or 1, 1, config.size),
    ):
        if not least <= value <= most:
            raise ModelError(f"{name} is {value}; wanted {least} to {most}")
    seen = config.preprocessing
    if type(seen.size) is not int or len(seen.mean) != 3 or not all(map(math.isfinite, (*seen.mean, *seen.std))):
        raise ModelError("preprocessing: wanted a whole size, and three finite numbers as mean and std")
    name = str(config.training.backbone)
    _check_source(name)
    if config.training.weights not in (None, models.PRETRAINED):
        raise ModelError(f"its weights would be loaded from {config.training.weights}; wanted those beside the card")
    own = {key: tensor for key, tensor in weights.items() if key.startswith(_BACKBONE)}
    wanted = models.parameter_count(name, config.training.stem, config.training.width) if own else None
    found = sum(tensor.numel() for tensor in own.values())
    if wanted is not None and wanted > found + _MARGIN:
        raise ModelError(f"its {name} would have {wanted:,} parameters, but the file of weights has {found:,}")
    room = sum(tensor.numel() for tensor in statistics.values())
    for option in _EXPANDED:
        value = getattr(config.options, option, 0)
        if statistics and value > room:
            raise ModelError(f"{option} is {value:,}, but the statistics have only {room:,} numbers")


def _check_source(backbone: str) -> None:
    """A name of timm may lead to a place on the Hub or on this machine, whose code and weights are somebody's."""
    if models.is_timm(backbone) and (":" in backbone or "/" in backbone.removeprefix("timm/")) and not _is_trusted():
        raise ModelError(
            f"its backbone would be loaded from elsewhere ({backbone}); if you trust that place, set {TRUST}=1"
        )


def _is_trusted() -> bool:
    return os.environ.get(TRUST) == "1"
