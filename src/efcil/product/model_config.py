"""What a model is made of and never changes: method, backbone, size, options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from efcil import methods
from efcil.config import Options, Values, build, flat, preset_values
from efcil.errors import ConfigError
from efcil.learners import LEARNERS
from efcil.learners.base import TrainingOptions
from efcil.methods import Method
from efcil.resolution import RequestedMethod, collected
from efcil.resolution import resolve as resolve_options

TEACHABLE = ("lwf", "first-task", "pseudo-replay")  # learners that need no old image
SMALL_IMAGES = 40  # pixels up to which the first layer keeps the size


@dataclass(frozen=True)
class ModelConfig:
    """All choices, resolved and checked."""

    method: Method
    training: TrainingOptions
    options: Options
    size: int
    seed: int
    val_fraction: float  # share of a new class's pictures

    def to_dict(self) -> dict[str, Any]:
        """As plain values; `from_dict` undoes it."""
        return {
            "method": self.method.name,
            "training": flat(self.training),
            "options": flat(self.options),
            "size": self.size,
            "seed": self.seed,
            "val_fraction": self.val_fraction,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ModelConfig:
        """Read what `to_dict` wrote."""
        method = _find_method(document["method"])
        training = build(LEARNERS[method.learner].options_type, document["training"], "training")
        options = build(method.options, document["options"], method.name)
        size, seed, val_fraction = int(document["size"]), int(document["seed"]), float(document["val_fraction"])
        return cls(method, training, options, size, seed, val_fraction)


def resolve(
    method: str,
    backbone: str,
    width: int | None,
    size: int,
    seed: int,
    val_fraction: float,
    options: Mapping[str, Any] | None,
) -> ModelConfig:
    """Put preset, arguments and `options` (dotted keys of training and method, as `--set` takes them) together."""
    found = _find_method(method)
    errors: list[str] = []
    if size < 8:
        errors.append(f"size is {size}; wanted 8 pixels or more")
    if seed < 0:
        errors.append(f"seed is {seed}; wanted zero or more")
    if not 0 <= val_fraction <= 0.5:
        errors.append(f"val_fraction is {val_fraction}; wanted a share from 0 (measure no recall) to 0.5")
    derived: Values = {"backbone": backbone, "stem": "cifar" if size <= SMALL_IMAGES else "imagenet"}
    if width is not None:
        derived["width"] = width
    preset = partial(preset_values, "model", "defaults")
    with collected(errors):
        resolved = resolve_options({found.name: RequestedMethod(found)}, preset, dict(options or {}), derived)
    if errors:
        raise ConfigError("; ".join(errors))
    ((_, own),) = resolved.methods.values()
    config = ModelConfig(found, resolved.training, own, size, seed, val_fraction)
    stages, used = getattr(config.training, "intermediate_stages", 0), getattr(own, "use_stages", None)
    if LEARNERS[found.learner].needs_stats and used not in (None, stages):
        raise ConfigError(
            f"use_stages={used}: {found.learner} draws features of all {stages} intermediate stages from the "
            f"statistics; set intermediate_stages={used}"
        )
    return config


def _find_method(name: str) -> Method:
    method = methods.find(name)
    if method.learner not in TEACHABLE or method.heads or method.exemplars:
        why = f"models are kept of {', '.join(TEACHABLE)}, and its learner is {method.learner}"
        if method.exemplars or method.heads:
            why = "it keeps old images" if method.exemplars else "it has several classifiers"
        able = [m.name for m in methods.METHODS.values() if m.learner in TEACHABLE and not m.heads]
        raise ConfigError(f"method {name} cannot be taught picture by picture: {why}; take one of {', '.join(able)}")
    if LEARNERS[method.learner].needs_stats and not method.keeps_gram:
        raise ConfigError(
            f"method {name} cannot be taught picture by picture: {method.learner} draws features of old classes from "
            "Grams, and it keeps none; take dpcr-plus"
        )
    return method
