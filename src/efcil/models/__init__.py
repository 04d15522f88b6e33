"""Backbones: images (n, channels, height, width) in, features (n, dim) out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from efcil.errors import ConfigError, nearest
from efcil.models import resnet
from efcil.models.plain import BackboneSource, Factory, PlainBackbone, backbone_name, wrap_backbone
from efcil.models.resnet import NAMES, STEMS, ResNet
from efcil.models.timm import PREFIX, TimmBackbone, build_timm
from efcil.plugins import Registry

__all__ = [
    "BACKBONES",
    "NAMES",
    "STEMS",
    "BackboneSource",
    "PlainBackbone",
    "ResNet",
    "TimmBackbone",
    "backbone_name",
    "build",
    "build_timm",
    "check_name",
    "is_resnet",
    "is_timm",
    "register_backbone",
    "wrap_backbone",
]

BACKBONES: Registry[Callable[..., Any]] = Registry(
    "backbone",
    "efcil.backbones",
    dict.fromkeys(NAMES, resnet.build),
    lambda value: callable(value) and not isinstance(value, nn.Module),
    "a function from a number of channels to an nn.Module",
)


def register_backbone(name: str, factory: Factory) -> Factory:
    """Register a backbone by name, like the entry points `efcil.backbones`; `factory(channels)` returns an `nn.Module`.

    It maps images (n, channels, height, width) to features (n, dim); dim is measured.

    >>> register_backbone("two-layers", lambda channels: nn.Sequential(nn.Flatten(), nn.LazyLinear(8)))(3)
    Sequential(...)
    >>> build("two-layers", size=4).num_features
    8
    >>> BACKBONES.reset()
    """
    BACKBONES.register(name, factory)
    return factory


def is_timm(name: str) -> bool:
    """Return whether a backbone is a timm model.

    >>> is_timm("timm/vit_small_patch16_224"), is_timm("resnet18")
    (True, False)
    """
    return name.startswith(PREFIX)


def is_resnet(name: Any) -> bool:
    """Return whether a backbone is a built-in ResNet, with stages, a width and a last ReLU.

    >>> is_resnet("resnet18"), is_resnet("timm/resnet18")
    (True, False)
    """
    return name in NAMES


def check_name(name: Any) -> None:
    """Raise ConfigError for an unknown backbone; a module or factory is tried when it is built."""
    if isinstance(name, str) and not is_timm(name) and name not in BACKBONES:
        raise ConfigError(f"backbone: unknown name '{name}'; {nearest(name, BACKBONES)}, or timm/NAME")


def build(
    backbone: str | nn.Module | Factory,
    *,
    stem: str = "cifar",
    width: int | None = None,
    channels: int = 3,
    seed: int = 0,
    last_relu: bool = True,
    size: int | None = None,
) -> ResNet | TimmBackbone | PlainBackbone:
    """A freshly initialized backbone, the same bits for the same seed: one of ours (`resnet.build`), `timm/NAME`, one
    that is registered, or a module or factory of one's own (`wrap_backbone`).

    Only ours have a stem, and a width to choose. Registered ones and modules are tried on images of `size`, the side of
    the network's input.
    """
    own = None if isinstance(backbone, str) else backbone
    name = backbone_name(backbone)
    if own is None and is_resnet(name):
        return resnet.build(name, stem=stem, width=width, channels=channels, seed=seed, last_relu=last_relu)
    if own is None:
        check_name(name)
    if width is not None:
        raise ConfigError(f"backbone {name}: width={width} applies only to a ResNet; set width=null")
    if not last_relu:
        raise ConfigError(f"backbone {name}: this learner leaves out a ResNet's last ReLU; take {', '.join(NAMES)}")
    if own is None and is_timm(name):
        return build_timm(name, channels=channels, seed=seed)
    if size is None:
        raise ConfigError(f"backbone {name}: its features are measured at the size of its input; give size, or crop")
    factory = BACKBONES[name] if own is None else own
    return wrap_backbone(factory, channels=channels, size=size, seed=seed, name=name)
