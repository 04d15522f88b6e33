"""Options from a file: YAML or JSON with the command's own options, an earlier run's config.yaml, or a PyCIL file."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import yaml

from efcil.cli.pycil import is_pycil, translated
from efcil.config import YAML_LIMIT, read_yaml
from efcil.errors import ConfigError, nearest
from efcil.files import parse_json, read_bytes

# There are two ways to split the classes: the one that is typed replaces the other one in the file.
_INSTEAD = {"tasks": ("init_cls", "increment"), "init_cls": ("tasks",), "increment": ("tasks",)}


def merged(path: Path, options: Mapping[str, Any], typed: Container[str]) -> dict[str, Any]:
    """Return the options with the file's among them; what was typed wins over the file.

    The file's keys are the option names (`tasks`, `order`, `preset`, ...) and `set`, a mapping of settings. What there
    is to say about the file is added as `notes`.
    """
    tree, notes = _read(path), list[str]()
    if isinstance(tree.get("run"), dict):
        try:
            tree = _from_run(tree["run"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"--config {path}: not what a run wrote about itself ({error!r}); take a copy") from None
    elif is_pycil(tree):
        by_hand = {name: value for name, value in options.items() if name in typed}
        tree, notes = translated(tree, by_hand, compare="orders" in options)
    overrides = tree.pop("set", {})
    if not isinstance(overrides, dict):
        raise ConfigError(f"--config {path}: set must be a mapping, such as 'set: {{ridge: 200}}'")
    known = {name.replace("_", "-"): name for name in options if name not in ("config", "overrides")}
    result = {**options, "notes": notes}
    for key, value in tree.items():
        name = known.get(str(key).replace("_", "-"))
        if name is None:
            raise ConfigError(f"--config {path}: {key} is not an option: {nearest(str(key), known)}")
        if any(other in typed for other in _INSTEAD.get(name, ())):
            continue
        if name not in typed:
            result[name] = _checked(name, value, options[name])
    given = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]  # JSON is YAML
    result["overrides"] = given + list(options["overrides"])  # later ones win
    return result


def _read(path: Path) -> dict[str, Any]:
    kind = "JSON" if path.suffix.lower() == ".json" else "YAML"
    try:
        # YAML 1.1 takes JSON's 5e-4 for a word.
        tree = parse_json(read_bytes(path, YAML_LIMIT)) if kind == "JSON" else read_yaml(path)
        tree = json.loads(json.dumps(tree, default=str))  # a date is a word here
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        why = " ".join(str(error).split())[:300]
        raise ConfigError(f"--config {path} is not {kind} that can be used: {why}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path}: must be a mapping of options, such as 'method: dpcr'")
    return tree


def _checked(name: str, value: Any, default: Any) -> Any:
    if name in ("data", "out", "order", "orders") and "\0" in str(value):
        raise ConfigError(f"{name}={value!r} in the file: no file has such a name")
    if name in ("data", "out"):
        return Path(str(value))
    if name == "log":
        return [str(one) for one in value] if isinstance(value, list) else [str(value)]
    if name in ("order", "orders", "increment", "methods"):
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)
    if name in ("tasks", "init_cls", "seed", "epochs", "threads", "concurrent_runs"):
        wanted: tuple[type, ...] = (int,)
    elif name == "checkpoint_seconds":
        wanted = (int, float)
    elif name in ("compile", "cuda_graphs") or isinstance(default, bool):
        wanted = (bool,)
    else:
        wanted = (str,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise ConfigError(f"{name}={value!r} in the file: must be {wanted[0].__name__}")
    return value


def _from_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """Turn what a run wrote about itself back into options; its presets are resolved, so all values are set."""
    methods = run["methods"]
    if len(methods) != 1:
        raise ConfigError("this config.yaml is of a compare run: name the methods and options by hand")
    ((_, own),) = methods.items()
    options = {k: v for k, v in own.items() if k != "method"}
    overrides = {**run["training"], **options, **{f"data.{k}": v for k, v in run["data"].items()}}
    return {
        "method": own["method"],
        "dataset": run["dataset"],
        "preset": run["preset"],
        "learner": run["learner"],
        "order": run["order"],
        "seed": run["seed"],
        "set": overrides,
        **run["split"],
    }
