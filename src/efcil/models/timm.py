"""timm models as backbones, `timm/NAME` (extra `timm`): pooled features without classifier, each with its own input."""

from __future__ import annotations

import math
import socket
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from efcil.data.preprocessing import INTERPOLATIONS, Preprocessing
from efcil.errors import ConfigError, MissingPackageError
from efcil.plugins import one_line

PREFIX = "timm/"


class TimmBackbone(nn.Module):
    """timm model without classifier, with ``num_features`` features and what it expects of a picture."""

    num_features: int

    def __init__(self, model: Any, num_features: int, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.model, self.num_features, self.preprocessing = model, num_features, preprocessing

    def forward(self, images: Tensor) -> Tensor:
        """Return features (n, dim) of images (n, channels, height, width)."""
        features: Tensor = self.model(images)
        return features


def _timm(name: str) -> Any:
    try:
        import timm
    except ImportError as error:
        raise MissingPackageError(f"backbone {name} needs timm ({error}): pip install 'efcil[timm]'") from None
    except RuntimeError as error:  # torchvision of another torch
        why = one_line(error)
        what = f"backbone {name} needs timm, whose torchvision does not fit this torch ({why})"
        raise MissingPackageError(what) from None
    return timm


def build_timm(
    name: str, *, channels: int, seed: int, pretrained: bool = False, size: int | None = None
) -> TimmBackbone:
    """Create the timm model NAME of `timm/NAME`, from scratch or with pretrained weights.

    `size` is the side of its input where that is not the model's own.
    """
    timm = _timm(name)
    with torch.random.fork_rng(devices=[]):  # timm initializes from the global generator
        torch.manual_seed(seed)
        model = _create(timm, name, pretrained=pretrained, in_chans=channels)
    wanted = _preprocessing(timm, model, name).with_size(size)
    return TimmBackbone(model, _num_features(model, channels, wanted.size, name), wanted)


def _create(timm: Any, name: str, *, pretrained: bool = False, **options: Any) -> Any:
    if pretrained:
        _check_reachable(timm, name)
    try:
        return timm.create_model(name.removeprefix(PREFIX), num_classes=0, pretrained=pretrained, **options)
    except RuntimeError as error:
        raise ConfigError(f"backbone {name}: {one_line(error)}; timm.list_models() lists the models") from None
    except Exception as error:  # of the Hub, of its HTTP library, of the disk
        if not pretrained:
            raise
        raise ConfigError(_no_weights(name, one_line(error))) from None


def _check_reachable(timm: Any, name: str) -> None:
    """Raise ConfigError if weights would have to be downloaded and the Hub has no address: its retries take a minute.

    Behind a proxy the address is the proxy's business.
    """
    config = timm.get_pretrained_cfg(name.removeprefix(PREFIX))
    repository = getattr(config, "hf_hub_id", None)
    if repository is None or getproxies():
        return
    from huggingface_hub import constants, try_to_load_from_cache

    files = (config.hf_hub_filename, constants.SAFETENSORS_SINGLE_FILE, constants.PYTORCH_WEIGHTS_NAME)
    if any(isinstance(try_to_load_from_cache(repository, file), str) for file in files if file):
        return
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError as error:
        raise ConfigError(_no_weights(name, f"no network: {error.strerror or error}")) from None


def _no_weights(name: str, why: str) -> str:
    return (
        f"weights=pretrained: the weights of {name} are not here and cannot be downloaded ({why}); connect once, give "
        "a file of weights, or take efficientnet-lite0, which needs no network"
    )


def _num_features(model: Any, channels: int, size: int, name: str) -> int:
    """Return the number of pooled features, as the model returns them."""
    training = model.training
    try:
        with torch.no_grad():
            features = model.eval()(torch.zeros(1, channels, size, size))
    except Exception as error:
        raise ConfigError(f"backbone {name}: cannot take images of {size} x {size}: {one_line(error)}") from None
    finally:
        model.train(training)
    shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise ConfigError(
            f"backbone {name}: its features are not pooled ({shape} for an image); take a model with pooling"
        )
    return int(features.shape[1])


def _preprocessing(timm: Any, model: Any, name: str) -> Preprocessing:
    """Return what a timm model's configuration says of its input."""
    config = timm.data.resolve_model_data_config(model)
    _, height, width = config["input_size"]
    if height != width:
        raise ConfigError(f"backbone {name}: its input is {height} x {width}; take a model of square input")
    interpolation = config["interpolation"]
    if interpolation not in INTERPOLATIONS:
        interpolation = "bicubic"  # "random" is for training
    size, crop = int(height), float(config["crop_pct"])
    squash = config.get("crop_mode") == "squash"
    # timm resizes the short side to a whole number of pixels and cuts the center out of them.
    crop = 1.0 if squash else min(1.0, size / math.floor(size / crop))
    mean, std = tuple(map(float, config["mean"])), tuple(map(float, config["std"]))
    return Preprocessing(size, crop, interpolation, squash, mean, std)


def empty_timm(name: str) -> Any:
    """Create a timm model on the current device, to see its size."""
    return _create(_timm(name), name, pretrained=False, in_chans=3)


def timm_preprocessing(name: str, size: int | None = None) -> Preprocessing:
    """Return what `timm/NAME` expects of a picture, without making its weights."""
    with torch.device("meta"):
        model = _create(_timm(name), name)
    return _preprocessing(_timm(name), model, name).with_size(size)
