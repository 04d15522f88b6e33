"""From what the user typed to what is run: every choice resolved and checked before anything is computed."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from efcil import __version__
from efcil import data as datasets
from efcil.config import Options, Values, build, flat, keys, parse_overrides, preset_names, preset_values
from efcil.errors import ConfigError, nearest
from efcil.learners.base import TrainingOptions
from efcil.methods import Method, plugin_presets
from efcil.resolution import collected, parse_label, preset_method
from efcil.resolution import resolve as resolve_options
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
    methods = dict(parse_label(label) for label in spec.methods)
    if len(methods) != len(spec.methods):
        raise ConfigError(f"a method is named twice in {','.join(spec.methods)}")
    source = datasets.find(spec.dataset)
    preset = _choose_preset(spec.preset, source.name, [requested.method for requested in methods.values()])
    overrides = parse_overrides(spec.overrides)

    def preset_section(section: str) -> Values:
        return {} if preset == NO_PRESET else preset_values(preset, source.name, section)

    errors: list[str] = []
    of_data = {key: value for key, value in overrides.items() if key.startswith("data.")}
    rest = {key: value for key, value in overrides.items() if key not in of_data}
    with collected(errors):
        data_keys = [f"data.{key}" for key in keys(source.options)]
        resolved = resolve_options(methods, preset_section, rest, elsewhere=data_keys)
    with collected(errors):
        data = _data_options(source, preset_section("data"), of_data)
    if errors:
        raise ConfigError("; ".join(errors))
    return Experiment(
        resolved.methods,
        source.name,
        data,
        preset,
        _split(spec),
        str(spec.order),
        spec.seed,
        resolved.learner,
        resolved.training,
        spec.val_fraction,
    )


def _choose_preset(asked: str | None, dataset: str, methods: Sequence[Method]) -> str:
    """Return the preset that is asked for, else that of the methods or of the data set."""
    known = preset_names(dataset)
    if asked is None:
        meant = {method.preset for method in methods}
        usual = known[0] if known else NO_PRESET
        preset = next((name for name in known if meant == {name}), usual)
    else:
        preset = next((name for name in (*known, NO_PRESET) if name.casefold() == asked.casefold()), "")
        if not preset:
            raise ConfigError(f"preset '{asked}' does not exist for {dataset}: {nearest(asked, known)}")
    if preset != NO_PRESET and not preset_values(preset, dataset, "training"):
        sections = {m.name: preset_method(m, "learner").preset_key for m in methods if not plugin_presets(m)}
        silent = [name for name, section in sections.items() if not preset_values(preset, dataset, section)]
        if silent:
            raise ConfigError(f"preset '{preset}' says nothing of {', '.join(silent)}: pass another --preset")
    return preset


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
    split: dict[str, Any] = {"tasks": spec.tasks, "init_cls": spec.init_cls, "increment": spec.increment}
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
