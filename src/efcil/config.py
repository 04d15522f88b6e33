"""Options: frozen typed models, presets that are data, and `key=value` settings on top of both.

An option is known by a dotted key (`later.lr`, `ridge`). A preset file gives each key its value and its source. The
settings of a run are the model's defaults, then the preset, then what the user set; every mistake in them is
reported at once, each with the nearest known key.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from efcil.errors import ConfigError, nearest

Values = dict[str, Any]  # dotted key -> value


class Options(BaseModel):
    """Base of all options: frozen, and nothing unknown gets in."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def check_training(self, training: Any) -> None:
        """Refuse what does not go with the options of the training, where a method's own depend on them."""


O_ = TypeVar("O_", bound=Options)


def keys(model: type[Options], prefix: str = "") -> list[str]:
    """Return the dotted keys of a model, nested ones included."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Options):
            found += keys(kind, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


MAX_YAML_VALUES = 100_000  # values that a YAML text may stand for: aliases can make a few lines stand for billions


def load_yaml(text: str) -> Any:
    """Read YAML of plain values; whatever is wrong with it is a YAMLError.

    >>> load_yaml("a: [1, x]")
    {'a': [1, 'x']}
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _count_values(node, {}) > MAX_YAML_VALUES:
            raise yaml.YAMLError(f"it stands for more than {MAX_YAML_VALUES:,} values")
        return loader.construct_document(node)
    except yaml.YAMLError:
        raise
    except Exception as error:  # months of 99 days, numbers without digits: its constructors raise nearly anything
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from None
    finally:
        loader.dispose()


def _count_values(node: yaml.Node, known: dict[int, float]) -> float:
    """Count values, those behind an alias as often as they are meant; infinite where a value holds itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        inside: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = (part for item in inside for part in (item if isinstance(item, tuple) else (item,)))
        known[id(node)] = 1 + sum(_count_values(part, known) for part in parts)
    return known[id(node)]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted keys into nested dictionaries.

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
                raise ConfigError(f"{key}: {part} is a value and has no parts; give one of the two")
        node[last] = value
    return tree


def flat(options: Options) -> Values:
    """Turn options into dotted keys and plain values."""

    def walk(tree: Mapping[str, Any], prefix: str) -> Values:
        found: Values = {}
        for key, value in tree.items():
            found.update(walk(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
        return found

    return walk(options.model_dump(mode="json"), "")


def _nested_defaults(model: type[Options]) -> Values:
    found: Values = {}
    for name, field in model.model_fields.items():
        if isinstance(field.default, Options):
            found |= {f"{name}.{key}": value for key, value in flat(field.default).items()}
    return found


def build(model: type[O_], values: Mapping[str, Any], what: str) -> O_:
    """Make validated options of dotted values; an error names each option, the value got and what was wanted.

    A value for a part of a nested option leaves the rest of it at the model's default.
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
    """Read `key=value` texts; a value is YAML, so `1e-9`, `[60, 120]`, `null` and words all work.

    >>> parse_overrides(["ridge=2000", "first.milestones=[60, 120]", "shift_ridge=1e-9"])
    {'ridge': 2000, 'first.milestones': [60, 120], 'shift_ridge': 1e-09}
    """
    values: Values = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"--set {setting}: must be key=value")
        try:
            value = load_yaml(text) if text else ""
        except yaml.YAMLError:
            value = text
        if isinstance(value, str):  # YAML 1.1 takes 1e-9 for a word
            with contextlib.suppress(ValueError):
                value = float(value)
        values[key.strip()] = value
    return values


def check_presets(part: Any, known: Iterable[str], what: str) -> None:
    """Refuse an attribute `presets` of a plug-in that names what is no option."""
    values, known = getattr(part, "presets", {}), list(known)
    if not isinstance(values, Mapping):
        raise ConfigError(f"presets of {what} must be a mapping from options to values, got {type(values).__name__}")
    for key in values:
        if key not in known:
            raise ConfigError(f"presets of {what}: {key} is not an option: {nearest(str(key), known)}")


Preset = dict[str, dict[str, dict[str, tuple[Any, str]]]]  # data set -> section -> key -> (value, source)


@cache
def presets() -> dict[str, Preset]:
    """Return every preset: name -> data set -> section -> key -> (value, source)."""
    found: dict[str, Preset] = {}
    for file in sorted(resources.files("efcil.presets").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            tree = yaml.safe_load(file.read_text(encoding="utf-8"))
            found[file.name.removesuffix(".yaml")] = {
                dataset: {
                    section: {key: (value, source) for key, (value, source) in entries.items()}
                    for section, entries in sections.items()
                }
                for dataset, sections in tree.items()
            }
    return found


def preset_names(dataset: str) -> list[str]:
    """Return the presets that speak of a data set, the default one first."""
    return sorted(
        (name for name, preset in presets().items() if dataset in preset), key=lambda n: (n == "released_code", n)
    )


def preset_values(preset: str, dataset: str, section: str) -> Values:
    """Return the values a preset gives to one section (`training`, or the name of a method) on a data set."""
    known = preset_names(dataset)
    if preset not in known:
        raise ConfigError(f"preset '{preset}' does not exist for {dataset}: {nearest(preset, known)}")
    tree = presets()[preset]
    entries = {**tree.get("defaults", {}).get(section, {}), **tree[dataset].get(section, {})}
    return {key: value for key, (value, _) in entries.items()}
