"""What a model is made of and never changes: method, backbone, size, options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from efcil import methods, models
from efcil.config import Options, Values, build, flat, keys, preset_values
from efcil.errors import ConfigError, nearest
from efcil.learners import LEARNERS
from efcil.learners.base import TrainingOptions
from efcil.methods import Method
from efcil.training.schedule import Schedule

TEACHABLE = ("lwf", "first-task", "pseudo-replay")  # learners that need no old image
DEFAULT_BACKBONE = "resnet10"
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
    given: Values = dict(options or {})
    kind = LEARNERS[found.learner].options_type
    ours, theirs = set(keys(kind)), set(keys(found.options))
    for key in given:
        if key in found.overrides:
            raise ConfigError(f"{found.name} fixes {key}={found.overrides[key]}: take dpcr to choose it")
        if key not in ours | theirs:
            raise ConfigError(f"{key} is not an option of {found.name}: {nearest(key, ours | theirs)}")
    if size < 8:
        raise ConfigError(f"size is {size}; wanted 8 pixels or more")
    if seed < 0:
        raise ConfigError(f"seed is {seed}; wanted zero or more")
    if not 0 <= val_fraction <= 0.5:
        raise ConfigError(f"val_fraction is {val_fraction}; wanted a share from 0 (measure no recall) to 0.5")
    brought = methods.plugin_presets(found)
    preset = {k: v for k, v in brought.items() if k in ours} | preset_values("model", "defaults", "training")
    preset |= {k: v for k, v in preset_values("model", "defaults", found.preset_key).items() if k in ours}
    name = given.get("backbone", backbone)
    if name != DEFAULT_BACKBONE or width is not None:
        preset["width"] = width
    stem = "cifar" if size <= SMALL_IMAGES else "imagenet"
    values = {**preset, "backbone": name, "stem": stem} | {k: v for k, v in given.items() if k in ours}
    training = build(kind, values, "options")
    models.check_name(name)
    brought |= preset_values("model", "defaults", found.preset_key)
    own = {k: v for k, v in brought.items() if k in theirs}
    own |= found.overrides | {k: v for k, v in given.items() if k in theirs}
    config = ModelConfig(found, training, build(found.options, own, "options"), size, seed, val_fraction)
    config.options.check_training(training)
    stages, used = getattr(training, "intermediate_stages", 0), getattr(config.options, "use_stages", None)
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


def rescale_schedule(schedule: Schedule, epochs: int) -> Schedule:
    """The same schedule over another number of epochs: rates and milestones follow.

    >>> rescale_schedule(Schedule(epochs=100, lr=0.1, milestones=(45, 90)), 10).milestones
    (4, 9)
    """
    steps = (max(1, round(m * epochs / schedule.epochs)) for m in schedule.milestones)
    milestones = tuple(sorted({m for m in steps if m < epochs}))
    return schedule.model_copy(update={"epochs": epochs, "milestones": milestones})


def with_epochs(training: TrainingOptions, epochs: int | None) -> TrainingOptions:
    """The same options with another number of epochs a teaching."""
    if epochs is None:
        return training
    return training.model_copy(
        update={"first": rescale_schedule(training.first, epochs), "later": rescale_schedule(training.later, epochs)}
    )
