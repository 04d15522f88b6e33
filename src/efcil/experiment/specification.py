"""From what the user typed to what is run: every choice resolved and checked before anything is computed."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from efcil import __version__
from efcil import data as datasets
from efcil.config import (
    Options,
    Values,
    build,
    default_preset,
    flat,
    keys,
    parse_overrides,
    preset_names,
    preset_values,
    whole_number,
)
from efcil.data.dataset import DataSet
from efcil.errors import ConfigError, nearest
from efcil.learners import LEARNERS
from efcil.learners.base import TrainingOptions
from efcil.methods import MOVABLE, Method, on_learner, plugin_presets
from efcil.resolution import RequestedMethod, collected, parse_label, preset_method
from efcil.resolution import resolve as resolve_options
from efcil.tasks import task_sizes, whole_split

NO_PRESET = "none"  # the options' own defaults, for data sets that no preset speaks of
OWN_DATA = "model"  # for images that a program brings: what models that people teach have
SMALL_IMAGES = 40  # pixels up to which the first layer keeps the size


@dataclass(frozen=True)
class ExperimentSpec:
    """What the user asked for, unresolved."""

    methods: tuple[str | Method, ...]
    dataset: str | DataSet
    tasks: int | None = None
    init_cls: int | None = None
    increment: int | list[int] | None = None
    allow_uneven: bool = False
    order: str = "identity"
    seed: int = 0
    preset: str | None = None
    overrides: tuple[str, ...] | Mapping[str, Any] = ()
    val_fraction: float = 0.0
    epochs: int | None = None  # of each task, instead of the preset's
    learner: str | None = None  # instead of the methods' own; None: theirs


@dataclass(frozen=True)
class Experiment:
    """A request with every option resolved. Equal plans on equal data give equal metrics."""

    methods: dict[str, tuple[Method, Options]]  # label -> method and its options
    dataset: str
    data: Options
    preset: str
    tasks: dict[str, Any]  # how the classes are split
    order: str
    seed: int
    learner: str
    training: TrainingOptions
    val_fraction: float = 0.0  # share of the training images that is measured on instead of the test images

    @property
    def eval_split(self) -> str:
        """The data set, for summaries: one that was measured on held-out training images must never pass for it."""
        return f"{self.dataset}, {self.val_fraction:.0%} of training held out" if self.val_fraction else self.dataset

    def fingerprint(self) -> dict[str, Any]:
        """Return all that determines the metrics, as plain values."""
        return {
            "methods": {label: {"method": m.name, **flat(options)} for label, (m, options) in self.methods.items()},
            "dataset": self.dataset,
            "data": flat(self.data),
            "preset": self.preset,
            "split": self.tasks,
            "order": self.order,
            "seed": self.seed,
            "learner": self.learner,
            "training": flat(self.training),
            **({"val_fraction": self.val_fraction} if self.val_fraction else {}),
        }

    def sizes(self, classes: int) -> tuple[int, ...]:
        """Return the classes in each task."""
        return task_sizes(classes, **self.tasks)


def resolve(spec: ExperimentSpec) -> Experiment:
    """Resolve and check a request; every mistake in its settings is reported at once."""
    methods = dict(requests_of(spec))
    if len(methods) != len(spec.methods):
        raise ConfigError(f"a method is named twice in {','.join(map(label_of, spec.methods))}")
    source = _source(spec.dataset)
    preset = _choose_preset(spec.preset, source.name, [requested.method for requested in methods.values()])
    overrides = given_overrides(spec)
    derived: Values = {}
    if preset == OWN_DATA and isinstance(spec.dataset, DataSet):
        derived["stem"] = "cifar" if spec.dataset.size <= SMALL_IMAGES else "imagenet"

    def preset_section(section: str) -> Values:
        if preset == NO_PRESET:
            return {}
        return preset_values(preset, "defaults" if preset == OWN_DATA else source.name, section)

    errors: list[str] = []
    of_data = {key: value for key, value in overrides.items() if key.startswith("data.")}
    rest = {key: value for key, value in overrides.items() if key not in of_data}
    with collected(errors):
        data_keys = [f"data.{key}" for key in keys(source.options)]
        resolved = resolve_options(methods, preset_section, rest, derived, elsewhere=data_keys)
    with collected(errors):
        in_memory = isinstance(spec.dataset, DataSet)
        data = _data_options(source, {} if in_memory else preset_section("data"), of_data)
    if errors:
        raise ConfigError("; ".join(errors))
    return Experiment(
        resolved.methods,
        source.name,
        data,
        preset,
        _split(spec),
        str(spec.order),
        whole_number("seed", spec.seed, 0),
        resolved.learner,
        resolved.training.with_epochs(_common_epochs(spec, methods)),
        spec.val_fraction,
    )


def _common_epochs(spec: ExperimentSpec, methods: Mapping[str, RequestedMethod]) -> int | None:
    """Return the number of epochs per task that the methods or the request give."""
    given = {epochs for request in methods.values() for epochs in _epochs(request.method).values()}
    if len(given | ({spec.epochs} if given and spec.epochs is not None else set())) > 1:
        raise ConfigError(f"epochs differ ({', '.join(map(str, sorted(given)))}): methods share a trajectory; give one")
    return given.pop() if given else spec.epochs


def requests_of(spec: ExperimentSpec) -> list[tuple[str, RequestedMethod]]:
    """Return the methods that are asked for, each on the learner that it runs on.

    >>> spec = ExperimentSpec(("dpcr", "ldc"), "digits", learner="adapt-first")
    >>> [(label, requested.method.learner) for label, requested in requests_of(spec)]
    [('dpcr', 'adapt-first'), ('ldc', 'adapt-first')]
    """
    found = [parse_label(method) for method in spec.methods]
    if spec.learner is not None:
        learner = LEARNERS.canonical(spec.learner)
        return [(label, replace(one, method=on_learner(one.method, learner))) for label, one in found]
    joining = joining_methods(spec)
    return [
        (label, replace(one, method=on_learner(one.method, "pretrained")) if label in joining else one)
        for label, one in found
    ]


def joining_methods(spec: ExperimentSpec) -> list[str]:
    """Return the methods that join the frozen backbone of others in a comparison, where one was chosen by name.

    They are those that need no training of their own behind it: their class statistics are read from its features.

    >>> spec = ExperimentSpec(("ranpac", "dpcr", "lwf"), "digits", overrides=("backbone=efficientnet-lite0",))
    >>> joining_methods(spec)
    ['dpcr']
    """
    requests = [parse_label(method) for method in spec.methods]
    with_others = any(requested.method.learner == "pretrained" for _, requested in requests)
    if spec.learner is not None or not with_others or "backbone" not in given_overrides(spec):
        return []
    return [
        label
        for label, requested in requests
        if requested.method.learner in MOVABLE and requested.method.classifier.needs != "learner"
    ]


def label_of(method: str | Method) -> str:
    """Return what a method is called that was given by name or as an object."""
    return method if isinstance(method, str) else method.name


def given_overrides(spec: ExperimentSpec) -> Values:
    """Return the settings that the user gave, by dotted key."""
    return dict(spec.overrides) if isinstance(spec.overrides, Mapping) else parse_overrides(spec.overrides)


def _source(dataset: str | DataSet) -> datasets.DatasetSpec:
    """Return the description of a data set; one that is in memory has a name and no options."""
    if isinstance(dataset, str):
        return datasets.find(dataset)
    return datasets.DatasetSpec(dataset.name, "in memory", "-", "-", loader=lambda: dataset)


def by_trajectory(spec: ExperimentSpec) -> dict[str, ExperimentSpec]:
    """Split a comparison into those methods that can share a trained backbone, by name of their learner.

    Methods whose backbone is frozen after the first task share the first one of an LwF trajectory. A method with
    settings of its own for training has a trajectory of its own.

    >>> spec = ExperimentSpec(("dpcr", "finetune", "acil", "lwf"), "digits", overrides=("ridge=2", "first.lr=0.1"))
    >>> {name: part.methods for name, part in by_trajectory(spec).items()}
    {'lwf': ('dpcr', 'acil', 'lwf'), 'finetune': ('finetune',)}
    """
    groups: dict[tuple[str, str], list[str | Method]] = {}
    requests = [request for _, request in requests_of(spec)]
    trained = [(request.method.learner, _training_settings(request)) for request in requests]
    for method, (learner, settings) in zip(spec.methods, trained, strict=True):
        shares = learner == "first-task" and ("lwf", settings) in trained
        groups.setdefault(("lwf" if shares else learner, settings), []).append(method)
    parts: dict[str, ExperimentSpec] = {}
    overrides = given_overrides(spec)
    known = {group: _known_keys(spec, methods) for group, methods in groups.items()}
    everywhere = set().union(*known.values())
    for (learner, settings), methods in groups.items():
        number = sum(name.partition(":")[0] == learner for name in parts)
        name = learner if not number else f"{learner}:{number + 1}"
        own = {k: v for k, v in overrides.items() if k in known[learner, settings] or k not in everywhere}
        parts[name] = replace(spec, methods=tuple(methods), overrides=own)
    return parts


def _training_settings(request: RequestedMethod) -> str:
    """Return what makes the training of a method its own, for comparison."""
    training = keys(LEARNERS.find(request.method.learner, f" of {request.method.name}").options_type)
    given = {key: value for key, value in request.settings.items() if key in training} | _epochs(request.method)
    return repr(sorted((key, id(value) if callable(value) else value) for key, value in given.items()))


def _epochs(method: Method) -> Values:
    """Return the number of epochs that a method was given in Python."""
    return {key: value for key, value in method.settings.items() if key == "epochs"}


def _known_keys(spec: ExperimentSpec, methods: Sequence[str | Method]) -> set[str]:
    requests = [request.method for _, request in requests_of(replace(spec, methods=tuple(methods)))]
    models = [model for method in requests for model in (method.options, LEARNERS[method.learner].options_type)]
    return {key for model in models for key in keys(model)}


def _choose_preset(asked: str | None, dataset: str, methods: Sequence[Method]) -> str:
    """Return the preset that is asked for, else that of the methods or of the data set."""
    known = preset_names(dataset)
    if not known and asked is None and dataset not in datasets.DATASETS:
        return OWN_DATA
    if asked is None:
        meant = {method.preset for method in methods}
        usual = default_preset(dataset) or NO_PRESET
        preset = next((name for name in known if meant == {name}), usual)
    else:
        preset = next((name for name in (*known, NO_PRESET) if name.casefold() == asked.casefold()), "")
        if not preset:
            raise ConfigError(f"preset '{asked}' does not exist for {dataset}: {nearest(asked, known)}")
    if preset not in (NO_PRESET, OWN_DATA) and not preset_values(preset, dataset, "training"):
        sections = {m.name: _section(m) for m in methods if not plugin_presets(m)}
        silent = [name for name, section in sections.items() if not preset_values(preset, dataset, section)]
        if silent:
            raise ConfigError(f"preset '{preset}' says nothing of {', '.join(silent)}: pass another --preset")
    return preset


def _section(method: Method) -> str:
    """Return the section of a preset that a method's training is in."""
    if LEARNERS[method.learner].starts_pretrained:
        return method.learner
    return preset_method(method, "learner").preset_key


def _data_options(source: datasets.DatasetSpec, preset: Values, overrides: Values) -> Options:
    """Build the options of a data set from settings `data.KEY`."""
    known = [f"data.{key}" for key in keys(source.options)]
    unknown = [key for key in overrides if key not in known]
    if unknown:
        remedies = {key: nearest(key, known) if known else "it has none" for key in unknown}
        raise ConfigError("; ".join(f"{key} is not an option of {source.name}: {remedies[key]}" for key in unknown))
    given = {key.removeprefix("data."): value for key, value in overrides.items()}
    return build(source.options, preset | given, source.name)


def _split(spec: ExperimentSpec) -> dict[str, Any]:
    """Return how the classes are split; without a request into five tasks."""
    numbers = whole_split(spec.tasks, spec.init_cls, spec.increment)
    split: dict[str, Any] = dict(zip(("tasks", "init_cls", "increment"), numbers, strict=True))
    split = {key: value for key, value in split.items() if value is not None} or {"tasks": 5}
    return split | ({"allow_uneven": True} if spec.allow_uneven else {})


def commit() -> str:
    """Return the commit of the code: EFCIL_COMMIT, else git's, else the package's version."""
    return os.environ.get("EFCIL_COMMIT") or _git_commit()


@functools.cache
def _git_commit() -> str:
    """Say it once: what runs was loaded at the beginning, whatever is committed or changed beside it since."""
    here = Path(__file__).resolve().parent
    try:
        # This package's repository, not one it is installed into; a run that is killed must not leave a lock in it.
        git = ["git", "--no-optional-locks", "-C", str(here)]
        subprocess.run(  # nosec B603 # here and below: constant arguments and the package's own path, no shell
            [*git, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True, timeout=10
        )
        how: Any = {"capture_output": True, "text": True, "check": True, "timeout": 10}
        head = subprocess.run([*git, "rev-parse", "HEAD"], **how)  # nosec B603
        dirty = subprocess.run([*git, "status", "--porcelain"], **how)  # nosec B603
    except (OSError, subprocess.SubprocessError):
        return f"v{__version__}"
    return head.stdout.strip()[:12] + ("+changes" if dirty.stdout.strip() else "")


def versions(packages: Sequence[str] = ("numpy", "pillow", "safetensors")) -> dict[str, str]:
    """Return the versions a result depends on."""
    found = {"efcil": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return found | {name: metadata.version(name) for name in packages}
