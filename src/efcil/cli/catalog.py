"""What there is to choose: the methods, and the options of a method or a part with meaning, default and preset values.

Everything is generated from the typed models. The table of our own methods is kept in `presets/methods.json` as well
(`python -m efcil.cli.catalog` writes it), so that `efcil methods` does not have to import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata, resources
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:
    from efcil.config import Options
    from efcil.methods import Method

METHODS_FILE = "methods.json"
GROUPS = ("efcil.methods", "efcil.learners", "efcil.shifts", "efcil.classifiers")  # entry points of plug-ins
KINDS = ("exemplar-free", "with exemplars", "bounds", "DPCR ablations")


# --- methods ----------------------------------------------------------------------------------------------------------


def method_rows() -> list[dict[str, Any]]:
    """Return the methods as plain values: from the file where there are no plug-ins, from the registry otherwise."""
    if any(metadata.entry_points(group=group) for group in GROUPS):
        return registered_rows()
    return stored_rows()


def stored_rows() -> list[dict[str, Any]]:
    """Return our own methods, as the file has them."""
    text = resources.files("efcil.presets").joinpath(METHODS_FILE).read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    return rows


def registered_rows() -> list[dict[str, Any]]:
    """Return the methods of the registry, with our and the paper's accuracies where they are known."""
    from efcil.methods import METHODS, measured

    numbers = measured()
    rows = []
    for method in METHODS.values():
        usual = f"{method.name} ({method.preset})" if method.preset else method.name
        found = numbers.get(f"{method.name}:memory=500/{method.published}" if method.exemplars else usual, {})
        learner, shift, classifier = method.parts
        rows.append(
            {
                "method": method.name,
                "title": method.title,
                "kind": _kind(method),
                "learner": learner,
                "shift": shift,
                "classifier": classifier,
                "memory": method.memory_formula,
                "source": method.paper,
                "paper": found.get("paper"),
                "ours": found.get("ours"),
            }
        )
    return rows


def _kind(method: Method) -> str:
    if method.name in ("finetune", "joint"):
        return KINDS[2]
    if method.preset_key != method.name:
        return KINDS[3]
    return KINDS[1] if method.exemplars else KINDS[0]


# --- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptionRow:
    """An option: its key, what it means, its default, and its value in each preset."""

    key: str
    meaning: str
    default: Any
    choices: tuple[str, ...]
    presets: Mapping[str, Mapping[str, Any]]  # preset -> data set -> value


@dataclass(frozen=True)
class OptionGroup:
    """The options of one part."""

    title: str
    rows: tuple[OptionRow, ...]


def method_options(name: str) -> list[OptionGroup]:
    """Return the options of a method, by part, with the values of every preset."""
    from efcil.learners import LEARNERS
    from efcil.methods import StorageOptions, find

    method = find(name)
    learner, shift, _ = method.parts
    values = _preset_values(name)
    of_training = LEARNERS[method.learner].options_type
    groups = [OptionGroup(f"learner {learner}", _rows(of_training, values))]
    rest = {row.key: row for row in _rows(method.options, values)}
    parts: list[tuple[str, Any]] = [] if method.shift is None else [(f"shift {shift}", method.shift.options_type)]
    own = [(_classifier_name(head), head.options_type) for head in method.classifiers.values()]
    parts += [(f"classifier {part}", model) for part, model in dict(own).items()]
    for title, model in [*parts, ("storage of class statistics", StorageOptions)]:
        rows = tuple(rest.pop(key) for key in list(rest) if key in model.model_fields and key not in method.overrides)
        groups.append(OptionGroup(title, rows))
    groups.append(OptionGroup("method", tuple(row for key, row in rest.items() if key not in method.overrides)))
    return [group for group in groups if group.rows]


def part_options(name: str) -> list[OptionGroup]:
    """Return the options of a learner, a shift, a classifier or a data set (these after `data.`)."""
    found = [group for group in all_options() if group.title.split(" ", 1)[1].casefold() == name.casefold()]
    if not found:
        from efcil.classifiers import CLASSIFIERS
        from efcil.data import DATASETS
        from efcil.errors import ConfigError, nearest
        from efcil.learners import LEARNERS
        from efcil.methods import METHODS
        from efcil.shift import SHIFTS

        known = [*METHODS, *LEARNERS, *SHIFTS, *CLASSIFIERS, *DATASETS]
        if name.casefold() not in map(str.casefold, known):
            raise ConfigError(
                f"'{name}' is not a method, learner, shift, classifier or data set: {nearest(name, known)}"
            )
    return found


def all_options() -> list[OptionGroup]:
    """Return the options of every learner, shift, classifier and data set."""
    from efcil.classifiers import CLASSIFIERS
    from efcil.data import DATASETS
    from efcil.learners import LEARNERS
    from efcil.methods import StorageOptions
    from efcil.shift import SHIFTS

    groups = [OptionGroup(f"learner {name}", _rows(part.options_type, {})) for name, part in LEARNERS.items()]
    groups += [
        OptionGroup(f"shift {name}", _rows(part.options_type, {})) for name, part in SHIFTS.items() if part is not None
    ]
    groups += [OptionGroup(f"classifier {name}", _rows(part.options_type, {})) for name, part in CLASSIFIERS.items()]
    groups.append(OptionGroup("storage of class statistics", _rows(StorageOptions, {})))
    groups += [OptionGroup(f"data {name}", _rows(spec.options, {}, "data.")) for name, spec in DATASETS.items()]
    return [group for group in groups if group.rows]


def _classifier_name(head: Any) -> str:
    from efcil.classifiers import CLASSIFIERS

    return next((name for name, own in CLASSIFIERS.items() if own is head), head.__name__)


def _preset_values(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what each preset resolves to for a method: key -> preset -> data set -> value."""
    from efcil.config import flat, preset_names, presets
    from efcil.errors import ConfigError
    from efcil.experiment.specification import ExperimentSpec, resolve

    found: dict[str, dict[str, dict[str, Any]]] = {}
    for dataset in dict.fromkeys(dataset for preset in presets().values() for dataset in preset):
        if dataset == "defaults":
            continue
        for preset in preset_names(dataset):
            try:
                experiment = resolve(ExperimentSpec((name,), dataset, preset=preset))
            except ConfigError:  # a preset that says nothing of this method
                continue
            ((_, options),) = experiment.methods.values()
            for key, value in {**flat(experiment.training), **flat(options)}.items():
                found.setdefault(key, {}).setdefault(preset, {})[dataset] = value
    return found


def _rows(
    model: type[Options], values: Mapping[str, Mapping[str, Mapping[str, Any]]], prefix: str = ""
) -> tuple[OptionRow, ...]:
    return tuple(_walk(model, values, prefix, None))


def _walk(
    model: type[Options], values: Mapping[str, Mapping[str, Mapping[str, Any]]], prefix: str, given: Any
) -> Iterator[OptionRow]:
    from efcil.config import Options

    for name, field in model.model_fields.items():
        kind, key = field.annotation, f"{prefix}{name}"
        default = field.get_default() if given is None else getattr(given, name)
        if isinstance(kind, type) and issubclass(kind, Options):
            yield from _walk(kind, values, f"{key}.", default)
            continue
        default = list(default) if isinstance(default, tuple) else default
        meaning = next((d for c in model.__mro__ if (d := _description(c, name))), "")
        yield OptionRow(key, meaning, default, _choices(kind), values.get(key, {}))


def _description(kind: type, name: str) -> str:
    field = getattr(kind, "__pydantic_fields__", {}).get(name)
    return "" if field is None else field.description or ""


def _choices(kind: Any) -> tuple[str, ...]:
    """Return the words that an option may be; none where it may be something else as well.

    >>> _choices(Literal["clean", "augmented"] | None), _choices(float | Literal["auto"])
    (('clean', 'augmented'), ())
    """
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    if kind is bool:
        return ("true", "false")
    parts = [_choices(part) for part in get_args(kind) if part is not NoneType]
    return tuple(word for words in parts for word in words) if all(parts) else ()


def show_value(value: Any) -> str:
    """Return a value as `--set` takes it.

    >>> [show_value(value) for value in (None, True, 1e-9, 200.0, [60, 120], "cifar")]
    ['null', 'true', '1e-09', '200', '[60,120]', 'cifar']
    """
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def show_presets(row: OptionRow) -> str:
    """Return the preset values that differ from the default, in words; without data sets where all have the value.

    >>> of = {"quick": {"digits": 300.0, "glyphs": 20.0}, "paper": {"cifar100": 100.0}, "tuned": {"cifar100": 200.0}}
    >>> show_presets(OptionRow("ridge", "", 200.0, (), of))
    'quick 300 (digits), 20 (glyphs); paper 100'
    """
    by_text: dict[str, list[str]] = {}
    for preset, of in row.presets.items():
        values: dict[str, list[str]] = {}
        for dataset, value in of.items():
            if value != row.default:
                values.setdefault(show_value(value), []).append(dataset)
        parts = [value if len(where) == len(of) else f"{value} ({', '.join(where)})" for value, where in values.items()]
        if parts:
            by_text.setdefault(", ".join(parts), []).append(preset)
    return "; ".join(f"{', '.join(presets)} {text}" for text, presets in by_text.items())


if __name__ == "__main__":
    from pathlib import Path

    from efcil.files import atomic_write_text

    place = Path(str(resources.files("efcil.presets").joinpath(METHODS_FILE)))
    atomic_write_text(place, json.dumps(registered_rows(), indent=1, ensure_ascii=False) + "\n")
