"""What a model is made of and never changes: method, backbone, size, options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from efcil import methods, models
from efcil.config import Options, Values, build, flat, preset_values
from efcil.data.preprocessing import Preprocessing
from efcil.errors import ConfigError
from efcil.files import StrPath
from efcil.learners import LEARNERS
from efcil.learners.base import TrainingOptions
from efcil.methods import Method
from efcil.resolution import RequestedMethod, collected
from efcil.resolution import resolve as resolve_options

TEACHABLE = ("lwf", "first-task", "pseudo-replay", "pretrained", "adapt-first")  # learners that need no old image
MOST_SIZE = 4096  # pixels of a side
SMALL_IMAGES = 40  # pixels up to which the first layer keeps the size
METHOD, BACKBONE = "slda", "efficientnet-lite0"  # by default: pretrained and frozen
TRAINED_METHOD, TRAINED_BACKBONE, TRAINED_SIZE = "dpcr", "resnet10", 64  # where a backbone is trained from scratch
SCRATCH = "scratch"  # the word for TRAINED_BACKBONE, where a backbone could be named instead
Adapt = Literal["none", "first", "always"]
ADAPTING: dict[str, tuple[str, Values]] = {  # method and options: gentle, and small batches, as a teaching is small
    "first": ("adapt-first+none+slda", {"batch_size": 16, "first.epochs": 10, "first.lr": 0.005}),
    "always": (
        "dpcr",
        {
            "batch_size": 16,
            "first.epochs": 10,
            "first.lr": 0.005,
            "later.epochs": 5,
            "later.lr": 0.002,
            "gram_storage": "factors",
        },
    ),
}
NO_WEIGHTS = "none"  # the word for a backbone from scratch, where a file of weights could be named instead


@dataclass(frozen=True)
class Request:
    """What a new model shall be; None: ours to choose."""

    method: str | None = None
    backbone: str | None = None
    width: int | None = None
    size: int | None = None
    weights: StrPath | None = None
    frozen: bool | None = None
    seed: int = 0
    val_fraction: float = 0.1
    adapt: Adapt = "none"

    def adapting(self) -> tuple[Request, Values]:
        """Return the request with the method that adapts the backbone as asked for, and the options of its training.

        >>> request, options = Request(adapt="first").adapting()
        >>> request.completed().method, options["first.epochs"]
        ('adapt-first+none+slda', 10)
        """
        if self.adapt == "none":
            return self, {}
        if self.adapt not in ADAPTING:
            raise ConfigError(f"adapt={self.adapt}: unknown; take none, {', '.join(ADAPTING)}")
        if self.method is not None or self.frozen is not None:
            given = f"method {self.method}" if self.method is not None else f"frozen={self.frozen}"
            raise ConfigError(f"adapt={self.adapt} and {given} are exclusive; leave one out")
        method, options = ADAPTING[self.adapt]
        frozen = None if self.adapt == "first" else False
        return replace(self, method=method, backbone=self.backbone or BACKBONE, frozen=frozen), options

    def completed(self) -> Request:
        """Choose what was left open.

        Without any choice: `slda` on the frozen `efficientnet-lite0` with its published weights. A backbone that has
        published weights, or is given some, is frozen. A method that trains its backbone (`dpcr`, ...), a backbone
        without weights, a `width`, "scratch" or weights="none" ask for training from scratch, of a `resnet10` where
        no backbone is named.

        >>> Request().completed().method, Request("dpcr").completed().backbone
        ('slda', 'resnet10')
        >>> one = Request("dpcr", "efficientnet-lite0").completed()
        >>> one.weights, one.frozen, one.size
        ('pretrained', True, 224)
        """
        weights, backbone = self.weights, self.backbone
        if backbone == SCRATCH:
            if weights is not None and os.fspath(weights) != NO_WEIGHTS:
                raise ConfigError(f"backbone={SCRATCH} and weights={os.fspath(weights)} are exclusive; name a backbone")
            backbone, weights = None, NO_WEIGHTS
        learner = None if self.method is None else LEARNERS[find_method(self.method).learner]
        no_weights = weights is not None and os.fspath(weights) == NO_WEIGHTS
        if backbone is None:
            trained = no_weights or self.width is not None or (learner is not None and not learner.starts_pretrained)
            backbone = TRAINED_BACKBONE if trained else BACKBONE
        models.check_name(backbone)
        published = backbone in models.PUBLISHED or models.is_timm(backbone)
        if weights is None and published:
            weights = models.PRETRAINED
        weights = None if no_weights else weights
        if weights is not None and os.fspath(weights) == models.PRETRAINED and not published:
            models.check_available(backbone)  # raises: none come with it
        method = self.method or (TRAINED_METHOD if weights is None else METHOD)
        found = find_method(method)
        learner = LEARNERS[found.learner]
        if learner.starts_pretrained and weights is None:
            raise ConfigError(
                f"method {method} starts from a pretrained backbone, and {backbone} has no weights; give weights, "
                f"backbone={BACKBONE}, or a method that trains, such as {TRAINED_METHOD}"
            )
        if learner.starts_pretrained and not learner.trains and self.frozen is False:
            raise ConfigError(f"frozen=False: {method} never trains its backbone; use {TRAINED_METHOD}")
        can_freeze = found.classifier.needs != "learner" and not (learner.starts_pretrained and learner.trains)
        frozen = (weights is not None and can_freeze) if self.frozen is None else self.frozen
        if frozen and weights is None:
            raise ConfigError("frozen=True needs weights=..., or train the model first and call freeze()")
        if frozen and not can_freeze:
            raise ConfigError(f"frozen=True is not supported by {method}, which only has a trained head; use dpcr")
        size = self.size
        if size is None and not published:
            if weights is not None:
                raise ConfigError(
                    f"weights of {backbone} do not say for which pictures; give size, the side of those that they "
                    "were trained with (224 for torchvision's)"
                )
            size = TRAINED_SIZE
        if size is None:
            size = models.preprocessing(backbone).size
        return replace(self, method=method, backbone=backbone, weights=weights, frozen=frozen, size=size)


@dataclass(frozen=True)
class ModelConfig:
    """All choices, resolved and checked."""

    method: Method
    training: TrainingOptions
    options: Options
    preprocessing: Preprocessing  # what happens to a picture before the backbone
    seed: int
    val_fraction: float  # share of a new class's pictures
    published: str | None = None  # SHA-256 of the backbone's weights where they are an installed package's

    @property
    def size(self) -> int:
        """Side of the pictures in pixels."""
        return self.preprocessing.size

    def to_dict(self) -> dict[str, Any]:
        """As plain values; `from_dict` undoes it."""
        return {
            "method": self.method.name,
            "training": flat(self.training),
            "options": flat(self.options),
            "preprocessing": self.preprocessing.to_dict(),
            "seed": self.seed,
            "val_fraction": self.val_fraction,
            "published": self.published,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ModelConfig:
        """Read what `to_dict` wrote."""
        method = find_method(document["method"])
        training = build(LEARNERS[method.learner].options_type, document["training"], "training")
        options = build(method.options, document["options"], method.name)
        preprocessing = Preprocessing.from_dict(document["preprocessing"])
        seed, val_fraction, published = int(document["seed"]), float(document["val_fraction"]), document["published"]
        if published not in (None, models.published_sha256(str(training.backbone))):
            raise ConfigError(f"it was made with other published weights of {training.backbone} (SHA-256 {published})")
        return cls(method, training, options, preprocessing, seed, val_fraction, published)


def resolve(request: Request, options: Mapping[str, Any] | None) -> ModelConfig:
    """Put preset, a completed request and `options` (dotted keys of training and method, as in `--set`) together."""
    assert request.method is not None
    assert request.size is not None
    found = find_method(request.method)
    size, errors = request.size, list[str]()
    if not 8 <= size <= MOST_SIZE:
        errors.append(f"size is {size}; wanted 8 to {MOST_SIZE} pixels")
    if not 0 <= request.seed < 2**63:
        errors.append(f"seed is {request.seed}; wanted zero or more, less than 2**63")
    if not 0 <= request.val_fraction <= 0.5:
        errors.append(f"val_fraction is {request.val_fraction}; wanted a share from 0 (measure no recall) to 0.5")
    derived: Values = {"backbone": request.backbone, "stem": "cifar" if size <= SMALL_IMAGES else "imagenet"}
    derived["weights"] = None if request.weights is None else os.fspath(request.weights)
    if request.width is not None:
        derived["width"] = request.width
    preset = partial(preset_values, "model", "defaults")
    with collected(errors):
        resolved = resolve_options({found.name: RequestedMethod(found)}, preset, dict(options or {}), derived)
    if errors:
        raise ConfigError("; ".join(errors))
    ((_, own),) = resolved.methods.values()
    training, published = resolved.training, None
    wanted = training.preprocessing() or models.preprocessing(training.backbone, size)
    if training.weights == models.PRETRAINED:
        published = models.published_sha256(str(training.backbone))
    if published is None:  # the model keeps weights of its own
        training = training.model_copy(update={"weights": None})
    config = ModelConfig(found, training, own, wanted.with_size(size), request.seed, request.val_fraction, published)
    stages, used = getattr(config.training, "intermediate_stages", 0), getattr(own, "use_stages", None)
    if LEARNERS[found.learner].needs_stats and used not in (None, stages):
        raise ConfigError(
            f"use_stages={used}: {found.learner} draws features of all {stages} intermediate stages from the "
            f"statistics; set intermediate_stages={used}"
        )
    return config


def find_method(name: str) -> Method:
    """Return a method, or raise ConfigError if models cannot be kept of it."""
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
