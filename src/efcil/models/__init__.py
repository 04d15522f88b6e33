"""Backbones: images (n, channels, height, width) in, features (n, dim) out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from efcil.data.preprocessing import Preprocessing
from efcil.errors import ConfigError, nearest
from efcil.files import StrPath
from efcil.models import efficientnet_lite, resnet
from efcil.models.efficientnet_lite import EfficientNetLite
from efcil.models.plain import BackboneSource, Factory, PlainBackbone, backbone_name, wrap_backbone
from efcil.models.pretrained import NAMES as PUBLISHED
from efcil.models.pretrained import PRETRAINED, check_available, load_weights, published_sha256
from efcil.models.resnet import NAMES, STEMS, ResNet
from efcil.models.timm import PREFIX, TimmBackbone, build_timm, empty_timm, timm_preprocessing
from efcil.plugins import Registry

__all__ = [
    "BACKBONES",
    "NAMES",
    "PRETRAINED",
    "PUBLISHED",
    "STEMS",
    "BackboneSource",
    "EfficientNetLite",
    "PlainBackbone",
    "Preprocessing",
    "ResNet",
    "TimmBackbone",
    "backbone_name",
    "build",
    "build_timm",
    "check_available",
    "check_name",
    "is_published",
    "is_resnet",
    "is_timm",
    "load_weights",
    "preprocessing",
    "published_preprocessing",
    "published_sha256",
    "register_backbone",
    "wrap_backbone",
]

BACKBONES: Registry[Callable[..., Any]] = Registry(
    "backbone",
    "efcil.backbones",
    dict.fromkeys(NAMES, resnet.build) | dict.fromkeys(efficientnet_lite.NAMES, efficientnet_lite.build),
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
    weights: StrPath | None = None,
) -> ResNet | EfficientNetLite | TimmBackbone | PlainBackbone:
    """Make a backbone: one of ours (`resnet.build`, `efficientnet_lite.build`), `timm/NAME`, one that is registered, or
    a module or factory of one's own (`wrap_backbone`).

    Only ResNets have a stem, and a width to choose. Registered ones and modules are tried on images of `size`, the side
    of the network's input. `weights` are "pretrained" (the published ones) or a file (`load_weights`); without, they
    are initialized, to the same bits for the same seed. What the network expects of a picture is `preprocessing`.

    >>> backbone = build("efficientnet-lite0", weights="pretrained")
    >>> backbone.num_features, preprocessing("efficientnet-lite0").size
    (1280, 224)
    """
    published = weights is not None and os.fspath(weights) == PRETRAINED and is_timm(backbone_name(backbone))
    built = _build(backbone, stem, width, channels, seed, last_relu, size, published)
    if weights is not None and not published:
        load_weights(built, backbone_name(backbone), weights)
    return built


def _build(
    backbone: str | nn.Module | Factory,
    stem: str,
    width: int | None,
    channels: int,
    seed: int,
    last_relu: bool,
    size: int | None,
    published: bool,
) -> ResNet | EfficientNetLite | TimmBackbone | PlainBackbone:
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
    if own is None and name in efficientnet_lite.NAMES:
        return efficientnet_lite.build(name, channels=channels, seed=seed)
    if own is None and is_timm(name):
        return build_timm(name, channels=channels, seed=seed, pretrained=published, size=size)
    if size is None:
        raise ConfigError(f"backbone {name}: its features are measured at the size of its input; give size, or crop")
    factory = BACKBONES[name] if own is None else own
    return wrap_backbone(factory, channels=channels, size=size, seed=seed, name=name)


def is_published(backbone: str | nn.Module | Factory) -> bool:
    """Return whether a backbone is one of ours or timm's; others come with the weights that they have.

    >>> is_published("efficientnet-lite0"), is_published(nn.Flatten())
    (True, False)
    """
    return isinstance(backbone, str) and (is_timm(backbone) or backbone in (*NAMES, *efficientnet_lite.NAMES))


def published_preprocessing(backbone: str | nn.Module | Factory) -> Preprocessing | None:
    """Return what the published weights of a backbone were trained to see, None where that is not known."""
    known = isinstance(backbone, str) and (is_timm(backbone) or backbone in efficientnet_lite.NAMES)
    return preprocessing(backbone) if known else None


def parameter_count(name: str, stem: str, width: int | None) -> int | None:
    """Return how many numbers the state of a ResNet or a timm model has, without taking memory; None for others.

    >>> parameter_count("resnet18", "cifar", 64)
    11178452
    """
    if not (is_resnet(name) or is_timm(name)):
        return None
    with torch.device("meta"):
        model = resnet.empty(name, stem, width) if is_resnet(name) else empty_timm(name)
    return sum(tensor.numel() for tensor in model.state_dict().values())


def preprocessing(backbone: str | nn.Module | Factory, size: int | None = None) -> Preprocessing:
    """Return what a backbone expects of a picture: of one with published weights what these were trained with.

    `size` is the side of the input where another one is wanted; ResNets and networks of one's own have none.

    >>> preprocessing("resnet18", size=32) == Preprocessing(32)
    True
    >>> preprocessing("efficientnet-lite0").interpolation
    'bicubic'
    """
    name = backbone_name(backbone)
    if isinstance(backbone, str) and is_timm(name):
        return timm_preprocessing(name, size)
    if isinstance(backbone, str) and name in efficientnet_lite.NAMES:
        return efficientnet_lite.preprocessing(name, size)
    if size is None:
        raise ConfigError(f"backbone {name}: the size of its input is not known; give size")
    return Preprocessing(size)
