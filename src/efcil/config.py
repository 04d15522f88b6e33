"""Options as frozen typed models, presets as data files, and `key=value` overrides.

An option has a dotted key (`later.lr`, `ridge`). A preset file gives each key a value and its source. The options of a
run are the model's defaults, overridden by the preset, then by the user. All errors are reported together, unknown keys
with the nearest match.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from efcil.errors import ConfigError, nearest
from efcil.files import StrPath, read_text

Values = dict[str, Any]  # dotted key -> value


class Options(BaseModel):
    """Base class of all options: frozen, unknown keys are refused, the docstring below a field says what it means."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def check_training(self, training: Any) -> None:
        """Raise ConfigError if these options conflict with the training options."""


O_ = TypeVar("O_", bound=Options)


def keys(model: type[Options], prefix: str = "") -> list[str]:
    """Return the dotted keys of a model, nested ones included."""
    names: list[str] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Options):
            names += keys(kind, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


YAML_LIMIT = 1 << 22  # bytes of a YAML file
MAX_YAML_VALUES = 100_000  # limit after alias expansion, which can turn a few lines into billions of values


def load_yaml(text: str) -> Any:
    """Parse YAML of plain values; any error is a YAMLError.

    >>> load_yaml("a: [1, x]")
    {'a': [1, 'x']}
    """
    if sum(map(text.count, ",[{\n")) > MAX_YAML_VALUES:  # before parsing, which takes a minute for a few MB
        raise yaml.YAMLError(f"more than {MAX_YAML_VALUES:,} values")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _count_values(node, {}) > MAX_YAML_VALUES:
            raise yaml.YAMLError(f"more than {MAX_YAML_VALUES:,} values")
        return loader.construct_document(node)
    except yaml.YAMLError:
        raise
    except Exception as error:  # constructors raise arbitrary errors, such as ValueError for an invalid date
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from None
    finally:
        loader.dispose()


def read_yaml(path: StrPath) -> Any:
    """Read a YAML file; raise OSError if it is no regular file or too large, otherwise YAMLError or ValueError."""
    return load_yaml(read_text(path, YAML_LIMIT))


def _count_values(node: yaml.Node, counts: dict[int, float]) -> float:
    """Count values after alias expansion; infinite if a value contains itself."""
    if id(node) not in counts:
        counts[id(node)] = math.inf
        inside: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = (part for item in inside for part in (item if isinstance(item, tuple) else (item,)))
        counts[id(node)] = 1 + sum(_count_values(part, counts) for part in parts)
    return counts[id(node)]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dotted keys to nested dictionaries.

    >>> nested({"later.lr": 0.05, "batch_size": 128})
    {'later': {'lr': 0.05}, 'batch_size': 128}
    """
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{key}: {part} is a value and has no sub-options; set one of the two")
        node[last] = value
    return tree


def flat(options: Options) -> Values:
    """Convert options to dotted keys and plain values."""

    def walk(tree: Mapping[str, Any], prefix: str) -> Values:
        leaves: Values = {}
        for key, value in tree.items():
            leaves.update(walk(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
        return leaves

    return walk(options.model_dump(mode="json"), "")


def _nested_defaults(model: type[Options]) -> Values:
    defaults: Values = {}
    for name, field in model.model_fields.items():
        if isinstance(field.default, Options):
            defaults |= {f"{name}.{key}": value for key, value in flat(field.default).items()}
    return defaults


def build(model: type[O_], values: Mapping[str, Any], what: str) -> O_:
    """Build validated options from dotted values; errors name each option, its value and the expected one.

    Parts of a nested option that are not given keep the model's defaults.
    """
    try:
        return model.model_validate(nested({**_nested_defaults(model), **values}))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                lines.append(f"{key} is not an option: {nearest(key, keys(model))}")
            else:
                got = repr(problem["input"])
                got = got if len(got) <= 200 else got[:197] + "..."
                lines.append(f"{key}={got}: {problem['msg'].removeprefix('Value error, ').lower()}")
        raise ConfigError(f"{what}: " + "; ".join(lines)) from None


def parse_overrides(settings: Iterable[str]) -> Values:
    """Parse `key=value` settings; values are YAML, such as `1e-9`, `[60, 120]`, `null` or a word.

    >>> parse_overrides(["ridge=2000", "first.milestones=[60, 120]", "shift_ridge=1e-9"])
    {'ridge': 2000, 'first.milestones': [60, 120], 'shift_ridge': 1e-09}
    """
    values: Values = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"--set {setting}: wanted key=value")
        try:
            value = load_yaml(text) if text else ""
        except yaml.YAMLError:
            value = text
        if isinstance(value, str):  # YAML 1.1 parses 1e-9 as a string
            with contextlib.suppress(ValueError):
                value = float(value)
        values[key.strip()] = value
    return values


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return an argument as Python's int; raise ConfigError where it is none, or less than `least`.

    >>> whole_number("epochs", "3", 1)
    Traceback (most recent call last):
    efcil.errors.ConfigError: epochs='3': give a whole number from 1 on
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number >= 2**63 or (least is not None and number < least):
        raise ConfigError(f"{name}={value!r:.60}: give a whole number" + ("" if least is None else f" from {least} on"))
    return number


def check_presets(part: Any, options: Iterable[str], what: str) -> None:
    """Raise ConfigError if the attribute `presets` of a plug-in has unknown options."""
    values, options = getattr(part, "presets", {}), list(options)
    if not isinstance(values, Mapping):
        raise ConfigError(f"presets of {what} must be a mapping from options to values, got {type(values).__name__}")
    for key in values:
        if key not in options:
            raise ConfigError(f"presets of {what}: {key} is not an option: {nearest(str(key), options)}")


Preset = dict[str, dict[str, dict[str, tuple[Any, str]]]]  # data set -> section -> key -> (value, source)


@cache
def presets() -> dict[str, Preset]:
    """Return all presets: name -> data set -> section -> key -> (value, source)."""
    loaded: dict[str, Preset] = {}
    for file in sorted(resources.files("efcil.presets").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            tree = yaml.safe_load(file.read_text(encoding="utf-8"))
            loaded[file.name.removesuffix(".yaml")] = {
                dataset: {
                    section: {key: (value, source) for key, (value, source) in entries.items()}
                    for section, entries in sections.items()
                }
                for dataset, sections in tree.items()
            }
    return loaded


ON_REQUEST = ("vit_b16",)  # presets that are never a data set's default: their weights have to be fetched


def preset_names(dataset: str) -> list[str]:
    """Return the presets for a data set, the default first."""
    return sorted(
        (name for name, preset in presets().items() if dataset in preset),
        key=lambda n: (n in ON_REQUEST, n == "released_code", n),
    )


def default_preset(dataset: str) -> str | None:
    """Return the preset of a data set where none is asked for.

    >>> default_preset("cub200"), default_preset("imagenet-r")
    ('paper', None)
    """
    return next((name for name in preset_names(dataset) if name not in ON_REQUEST), None)


def preset_values(preset: str, dataset: str, section: str) -> Values:
    """Return the values of a preset for one section (`training` or a method name) on a data set."""
    names = preset_names(dataset)
    if preset not in names:
        raise ConfigError(f"preset '{preset}' does not exist for {dataset}: {nearest(preset, names)}")
    tree = presets()[preset]
    entries = {**tree.get("defaults", {}).get(section, {}), **tree[dataset].get(section, {})}
    return {key: value for key, (value, _) in entries.items()}
