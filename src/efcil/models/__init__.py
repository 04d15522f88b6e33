"""Backbones: images (n, channels, height, width) in, features (n, dim) out."""

from __future__ import annotations

from efcil.errors import ConfigError
from efcil.models import resnet
from efcil.models.resnet import NAMES, STEMS, ResNet
from efcil.models.timm import PREFIX, TimmBackbone, build_timm

__all__ = ["NAMES", "STEMS", "ResNet", "TimmBackbone", "build", "build_timm", "is_timm"]


def is_timm(name: str) -> bool:
    """Whether a backbone is timm's.

    >>> is_timm("timm/vit_small_patch16_224"), is_timm("resnet18")
    (True, False)
    """
    return name.startswith(PREFIX)


def build(
    name: str,
    *,
    stem: str = "cifar",
    width: int | None = None,
    channels: int = 3,
    seed: int = 0,
    last_relu: bool = True,
) -> ResNet | TimmBackbone:
    """A freshly initialized backbone, the same bits for the same seed: one of ours (`resnet.build`), or `timm/NAME`.

    A timm model brings its own stem; it has no width to choose.
    """
    if not is_timm(name):
        return resnet.build(name, stem=stem, width=width, channels=channels, seed=seed, last_relu=last_relu)
    if width is not None or not last_relu:
        raise ConfigError(f"backbone {name}: width={width}, last_relu={last_relu}; of a timm model neither can be set")
    return build_timm(name, channels=channels, seed=seed)
