"""Experiments from Python: `efcil.run` and `efcil.compare`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict, Unpack

from efcil import data as datasets
from efcil.accel.backend import Backend
from efcil.data.dataset import DataSet, format_list
from efcil.data.sources import as_dataset
from efcil.errors import ConfigError, DataError, Interrupted, RunError, as_keywords
from efcil.experiment.concurrent import execute_all
from efcil.experiment.progress import ProgressBar, choose_bar
from efcil.experiment.run import Run, RunOptions
from efcil.experiment.specification import ExperimentSpec, by_trajectory, label_of, resolve
from efcil.files import StrPath
from efcil.methods import Method
from efcil.results import Results
from efcil.tasks import TaskStream

__all__ = ["ExperimentOptions", "compare", "run"]

Order = str | int | os.PathLike[str]


class ExperimentOptions(TypedDict, total=False):
    """What `efcil.run` and `efcil.compare` take by name."""

    tasks: int  # number of tasks; 5 where neither it nor init_cls or increment is given
    init_cls: int  # classes in the first task
    increment: int | list[int]  # classes in each later one
    allow_uneven: bool  # tasks may differ by one class
    seed: int  # of training
    learner: str  # of all methods instead of their own, such as "pretrained"
    preset: str  # named values of options, such as "quick" or "paper"; by default the data set's first
    epochs: int  # of each task, instead of the preset's; its learning rates follow
    options: dict[str, Any]  # any option by its key, such as {"ridge": 200, "first.lr": 0.05}
    directory: StrPath  # of a data set known by name
    device: str  # "auto", "cpu", "cuda", "cuda:1", "mps"
    out: StrPath | None  # directory to keep; the same call finds its results there. None keeps nothing
    save_features: bool  # in `out`, to evaluate other methods on them later
    progress: bool  # a bar in terminals and notebooks


def run(
    method: str | Method, data: Any, *, order: Order | None = None, **options: Unpack[ExperimentOptions]
) -> Results:
    """Train and evaluate one method on all tasks of a data set.

    `method` is a name ("dpcr"; `efcil methods` lists them), a free combination ("lwf+ldc+ridge") or an `efcil.Method`.
    `data` is a name ("digits"), a folder of images, an `efcil.TaskStream`, or (training data, test data) in any form
    that `TaskStream.from_dataset` takes. `order` is "identity", a seed, "hard", "easy" (`efcil.similarity`) or a file.
    `ExperimentOptions` has the rest.

    >>> results = run("lwf-ncm", "digits", epochs=1, progress=False)
    >>> results["lwf-ncm"].accuracy_matrix.shape
    (5, 5)
    """
    return compare([method], data, orders=None if order is None else [order], **options)


def compare(
    methods: Sequence[str | Method],
    data: Any,
    *,
    orders: Sequence[Order] | None = None,
    **options: Unpack[ExperimentOptions],
) -> Results:
    """Compare methods on the same tasks and class orders; see `run`.

    Methods that share a learner share a trained backbone; others are trained separately. Each order is a run, and
    the results are means over them.

    >>> results = compare(["dpcr", "lwf-ncm", "finetune"], "digits", epochs=1, progress=False)
    >>> sorted(results)
    ['dpcr', 'finetune', 'lwf-ncm']
    """
    try:
        return _compare(methods, data, orders, dict(options))
    except (ConfigError, DataError, RunError) as error:
        raise type(error)(as_keywords(str(error))) from None
    except Interrupted:
        raise KeyboardInterrupt from None


_SPLIT = ("tasks", "init_cls", "increment", "allow_uneven")
_KINDS: dict[str, tuple[Any, str]] = {
    "learner": (str, "the name of a learner, such as 'pretrained'"),
    "preset": (str, "the name of a preset, such as 'quick'"),
    "options": (Mapping, "a mapping, such as {'ridge': 200}"),
    "directory": ((str, os.PathLike), "a path"),
    "out": ((str, os.PathLike), "a path, or None to keep nothing"),
}
_KNOWN = tuple(ExperimentOptions.__annotations__)


def _compare(
    methods: Sequence[str | Method], data: Any, orders: Sequence[Order] | None, options: dict[str, Any]
) -> Results:
    unknown = [key for key in options if key not in _KNOWN]
    if unknown:
        raise TypeError(
            f"{', '.join(unknown)}: no such argument; options of learners and methods go into options={{...}}, "
            f"and the arguments are {', '.join(_KNOWN)}"
        )
    if isinstance(methods, str | Method) or not methods:
        raise ConfigError(f"methods is {methods!r}: give a list, such as ['dpcr', 'lwf-ncm']")
    for method in methods:
        if not isinstance(method, str | Method):
            raise ConfigError(f"method {method!r:.60}: give a name, such as 'dpcr', or an efcil.Method")
    options = _checked(options)
    source = _source(data, options)
    if isinstance(source, TaskStream):
        given = [key for key in _SPLIT if key in options] + (["orders"] if orders is not None else [])
        if given:
            raise ConfigError(f"{', '.join(given)}: the TaskStream has its own tasks and order; leave it out")
        labels = [source.order_name]
    else:
        labels = [str(_named_order(order)) for order in _order_list(orders)]
        if len({*labels}) != len(labels):
            raise ConfigError(f"orders has one twice: {', '.join(labels)}")
    with ExitStack() as held, choose_bar(options.get("progress", True)) as bar:
        out = options.get("out")
        place = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="efcil-")) if out is None else out)
        runs = [
            run
            for order in labels
            for run in _runs(methods, source, order, options, place / f"order-{Path(order).stem}", bar)
        ]
        found = execute_all(runs, True, runs[0].backend.concurrent_runs if len(runs) > 1 else 1, "call it again")
        summaries = [summary for run in found for summary in run]
        names = [label_of(method) for method in methods]
        position = {name: place for place, name in enumerate(names)}
        summaries.sort(
            key=lambda summary: (labels.index(summary["order"]), position.get(summary["method"], len(names)))
        )
        results = Results(summaries)
        if out is not None:
            results.report(place / "report.html")
        return results


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are given; refuse those of another kind."""
    checked = {key: value for key, value in options.items() if value is not None}
    for key, (kind, wanted) in _KINDS.items():
        if key in checked and not isinstance(checked[key], kind):
            raise ConfigError(f"{key}={checked[key]!r:.60}: give {wanted}")
    if checked.get("save_features") and "out" not in checked:
        raise ConfigError("save_features=True needs out=..., the directory to save them in")
    return checked


def _order_list(orders: Any) -> Sequence[Any]:
    if orders is None:
        return ["identity"]
    if isinstance(orders, str | int | os.PathLike):
        raise ConfigError(f"orders is {orders!r}: give a list, such as ['identity', 1993]")
    return list(orders) or ["identity"]


def _named_order(order: Any) -> Order:
    """Return the order, or refuse a list of classes, which a run's directory and its summary have no name for."""
    if isinstance(order, str | int | os.PathLike):
        return order
    raise ConfigError(
        f"an order of {format_list([str(name) for name in order])} has no name: give the data as "
        "TaskStream.from_dataset(train, test, order=[...]), which takes one"
    )


def _source(data: Any, options: dict[str, Any]) -> str | DataSet | TaskStream:
    """Return the name of a data set, or what is in memory."""
    if isinstance(data, TaskStream):
        if data.dataset is None:
            raise DataError("the TaskStream has no test images; make it with TaskStream.from_dataset(train, test)")
        return data
    if isinstance(data, str) and datasets.DATASETS.canonical(data) in datasets.DATASETS:
        return data
    if isinstance(data, tuple) and len(data) == 2:
        return as_dataset(*data)
    if isinstance(data, str) and not os.path.exists(data):
        return datasets.find(data).name  # says which name is nearest
    return as_dataset(data)


def _runs(
    methods: Sequence[str | Method],
    source: str | DataSet | TaskStream,
    order: str,
    options: dict[str, Any],
    place: Path,
    bar: ProgressBar,
) -> list[Run]:
    """Return a run for each backbone that has to be trained."""
    stream = source if isinstance(source, TaskStream) else None
    dataset = source if not isinstance(source, TaskStream) else source.dataset
    assert dataset is not None
    split = {key: options[key] for key in _SPLIT if key in options}
    if stream is not None:
        split = {"increment": list(stream.sizes)}
    spec = ExperimentSpec(
        tuple(methods),
        dataset,
        **split,
        order=order,
        seed=options.get("seed", 0),
        preset=options.get("preset"),
        learner=options.get("learner"),
        overrides=dict(options.get("options") or {}),
        epochs=options.get("epochs"),
    )
    parts = {name: resolve(part) for name, part in by_trajectory(spec).items()}
    directory = options.get("directory")
    data = stream or (dataset if isinstance(dataset, DataSet) else None if directory is None else Path(directory))
    backend = Backend.choose(options.get("device", "auto"), note=bar.note)
    kept = RunOptions(f"python {sys.argv[0]}".strip(), compare=True, save_features=options.get("save_features", False))
    return [
        Run(part, place / name.replace(":", "-"), backend, bar.reporter(), kept, data) for name, part in parts.items()
    ]
