"""From what the user typed to what is run: every choice resolved and checked before anything is computed."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from efcil import __version__
from efcil import data as datasets
from efcil.config import Options, Values, build, flat, keys, parse_overrides, preset_names, preset_values
from efcil.errors import ConfigError, nearest
from efcil.learners import LEARNERS
from efcil.methods import FROZEN, METHODS, Method, find, plugin_presets
from efcil.models import is_resnet
from efcil.tasks import task_sizes

NO_PRESET = "none"  # the options' own defaults, for data sets that no preset speaks of


@dataclass(frozen=True)
class ExperimentSpec:
    """What the user asked for, unresolved."""

    methods: tuple[str, ...]
    dataset: str
    tasks: int | None = None
    init_cls: int | None = None
    increment: int | list[int] | None = None
    allow_uneven: bool = False
    order: str = "identity"
    seed: int = 0
    preset: str | None = None
    overrides: tuple[str, ...] = ()
    val_fraction: float = 0.0


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
    training: Any
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


def _parse_label(label: str) -> tuple[Method, Values]:
    """Read `dpcr`, `dpcr:rank_rule=numerical:ridge=100`, `icarl:memory=500`: a method with settings of its own."""
    name, *overrides = label.split(":")
    return find(name), parse_overrides(overrides)


def _like(method: Method, kind: str) -> Method:
    """Return the method whose preset values apply: itself, or our first one with the same `kind` of part."""
    own, part = METHODS.own, getattr(method, kind)
    return own.get(method.preset_key) or next((like for like in own.values() if getattr(like, kind) == part), method)


def _method_values(method: Method, preset_section: Callable[[str], Values]) -> Values:
    """Return what a preset gives to a method's options: to those of its shift and to those of its classifier."""
    if method.preset_key in METHODS.own:
        return preset_section(method.preset_key)
    found = plugin_presets(method)
    for kind, part in (("shift", method.shift), ("classifier", method.classifier)):
        like = _like(method, kind)
        values = preset_section(like.preset_key) | like.overrides
        found |= {k: v for k, v in values.items() if part is not None and k in part.options_type.model_fields}
    return found


def _unknown_option(key: str, methods: str, known: Collection[str]) -> str:
    """Say that methods have no such option: who has it, or which known one is nearest."""
    others = [
        m.name
        for m in METHODS.values()
        if key in (*keys(m.options), *keys(LEARNERS[m.learner].options_type)) and key not in m.overrides
    ]
    if others:
        return f"{key} is not an option of {methods}, only of {', '.join(others)}"
    return f"{key} is not an option here: {nearest(key, known)}"


def resolve(spec: ExperimentSpec) -> Experiment:
    """Resolve and check a request; every mistake in its settings is told at once."""
    if len(set(spec.methods)) != len(spec.methods):
        raise ConfigError(f"a method is named twice in {','.join(spec.methods)}")
    source = datasets.find(spec.dataset)
    parsed = {label: _parse_label(label) for label in spec.methods}
    kinds = {method.learner for method, _ in parsed.values()}
    if kinds == {"lwf", *FROZEN}:  # a frozen backbone is the first one of an LwF trajectory
        kinds = {"lwf"}
    if len(kinds) > 1:
        groups = "; ".join(f"{k}: {', '.join(n for n, (m, _) in parsed.items() if m.learner == k)}" for k in kinds)
        raise ConfigError(f"methods on different backbones cannot share a trajectory ({groups}): compare them apart")
    (learner,) = kinds
    known_presets = preset_names(spec.dataset)
    meant = {method.preset for method, _ in parsed.values()}
    usual = next((name for name in known_presets if meant == {name}), known_presets[0] if known_presets else NO_PRESET)
    preset = spec.preset or usual
    if preset not in (*known_presets, NO_PRESET):
        raise ConfigError(f"preset '{preset}' does not exist for {spec.dataset}: {nearest(preset, known_presets)}")
    if preset != NO_PRESET and not preset_values(preset, spec.dataset, "training"):
        sections = {m.name: _like(m, "learner").preset_key for m, _ in parsed.values() if not plugin_presets(m)}
        silent = [name for name, section in sections.items() if not preset_values(preset, spec.dataset, section)]
        if silent:
            raise ConfigError(f"preset '{preset}' says nothing of {', '.join(silent)}: pass another --preset")

    overrides = parse_overrides(spec.overrides)
    training_type = LEARNERS[learner].options_type
    training_keys, data_keys = set(keys(training_type)), {f"data.{k}" for k in keys(source.options)}
    method_keys = {label: set(keys(method.options)) for label, (method, _) in parsed.items()}
    known = training_keys | data_keys | set().union(*method_keys.values())
    problems = []
    for key in overrides:
        if key not in known:
            named = ", ".join(dict.fromkeys(method.name for method, _ in parsed.values()))
            problems.append(_unknown_option(key, named, known))
    of_training: Values = {}  # settings of training that a label gives: for the whole trajectory
    for label, (method, own) in parsed.items():
        for key in {**own, **{k: v for k, v in overrides.items() if k in method_keys[label]}}:
            if key in method.overrides:
                problems.append(f"{method.name} fixes {key}={method.overrides[key]}: take dpcr to choose it")
            elif key in method_keys[label]:
                continue
            elif key not in training_keys:
                problems.append(_unknown_option(key, method.name, method_keys[label]))
            elif len(parsed) > 1 and any(own.get(key) != other.get(key) for _, other in parsed.values()):
                problems.append(f"{label}: {key} is set for the whole trajectory; run it apart, or --set {key}=...")
            elif key in overrides:
                problems.append(f"{label}: {key} is also given by --set; give it once")
            else:
                of_training[key] = own[key]
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))

    def overrides_for(allowed: set[str], prefix: str = "") -> Values:
        return {k.removeprefix(prefix): v for k, v in overrides.items() if k in allowed}

    errors: list[str] = []

    def build_options(model: type[Options], values: Mapping[str, Any], what: str) -> Any:
        try:
            return build(model, values, what)
        except ConfigError as error:
            errors.append(str(error))
            return None

    def preset_section(section: str) -> Values:
        return {} if preset == NO_PRESET else preset_values(preset, spec.dataset, section)

    preset_training: Values = {}
    for method, _ in parsed.values():
        preset_training |= plugin_presets(method)
    preset_training |= preset_section("training") | preset_section(learner)  # a learner of its own has a section
    if learner not in ("lwf", *FROZEN):  # or its method has one for both
        for method, _ in parsed.values():
            preset_training |= preset_section(_like(method, "learner").preset_key)
    chosen = {**overrides, **of_training}.get("backbone")
    if chosen is not None and not is_resnet(str(chosen)):
        preset_training.pop("width", None)  # that of the preset's backbone
    training = build_options(
        training_type,
        {k: v for k, v in preset_training.items() if k in training_keys} | overrides_for(training_keys) | of_training,
        learner,
    )
    data = build_options(
        source.options,
        preset_section("data") | overrides_for(data_keys, "data."),
        spec.dataset,
    )
    methods = {}
    for label, (method, own) in parsed.items():
        values = {k: v for k, v in _method_values(method, preset_section).items() if k in method_keys[label]}
        values |= overrides_for(method_keys[label]) | method.overrides
        values |= {k: v for k, v in own.items() if k in method_keys[label]}
        methods[label] = (method, build_options(method.options, values, label))
        if None not in (methods[label][1], training):
            try:
                methods[label][1].check_training(training)
            except ConfigError as error:
                errors.append(f"{label}: {error}")
    if errors:
        raise ConfigError("; ".join(errors))
    split = {"tasks": spec.tasks, "init_cls": spec.init_cls, "increment": spec.increment}
    split = {k: v for k, v in split.items() if v is not None} or {"tasks": 5}
    if spec.allow_uneven:
        split["allow_uneven"] = True
    order, seed, val_fraction = str(spec.order), spec.seed, spec.val_fraction
    return Experiment(methods, spec.dataset, data, preset, split, order, seed, learner, training, val_fraction)


def commit() -> str:
    """Return the commit of the code: EFCIL_COMMIT, else git's, else the package's version."""
    return os.environ.get("EFCIL_COMMIT") or _git_commit()


@functools.cache
def _git_commit() -> str:
    """Say it once: what runs was loaded at the beginning, whatever is committed or changed beside it since."""
    here = Path(__file__).resolve().parent
    try:
        git = ["git", "-C", str(here)]  # which must be this package's repository, not one it is installed into
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
