"""Results of runs by method: numbers, tables, curves and reports, for terminals and notebooks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from efcil.errors import ConfigError, RunError, nearest
from efcil.files import StrPath, atomic_write_bytes, atomic_write_text, write_json
from efcil.report.groups import COLUMNS, Benchmark, Group, Value, group_runs
from efcil.report.html import html_page
from efcil.report.inline import (
    CAPTION,
    curves_document,
    html_matrix,
    html_table,
    text_matrix,
    text_table,
)
from efcil.report.load import Run, Summary, load_summaries, split_heads
from efcil.tasks import BY_SIMILARITY

if TYPE_CHECKING:
    import pandas

__all__ = ["Plot", "Result", "Results"]

FORMAT, VERSION = "efcil results", 1
MOST_BYTES = 64 * 2**20  # maximum size of a results file
MOST_RUNS, MOST_TASKS = 100_000, 10_000  # limits against damaged files
_COLUMNS = {column.key: column for column in COLUMNS}

Numbers = npt.NDArray[np.float64]


class Result:
    """Result of a method on one data set and split, averaged over runs with different class orders or seeds.

    Accuracies are in percent on the test images of all classes so far; NaN where not measured. `*_std` is the sample
    standard deviation over runs, None for a single one. `runs` has a `Result` per run.

    >>> run = {"method": "dpcr", "dataset": "digits", "tasks": 2}
    >>> runs = [{**run, "order": 1, "A_t": [98.0, 80.0]}, {**run, "order": 2, "A_t": [98.0, 84.0]}]
    >>> result = Results(runs)["dpcr"]
    >>> result.final_accuracy, round(result.final_accuracy_std, 2), result.orders
    (82.0, 2.83, ('1', '2'))
    >>> [run.final_accuracy for run in result.runs]
    [80.0, 84.0]
    """

    def __init__(self, group: Group, benchmark: Benchmark) -> None:
        self._group, self._benchmark = group, benchmark

    @property
    def method(self) -> str:
        """Name of the method."""
        return self._group.method

    @property
    def dataset(self) -> str:
        """Name of the data set."""
        return self._benchmark.dataset

    @property
    def tasks(self) -> int:
        """Total number of tasks."""
        return self._benchmark.tasks

    @property
    def tasks_done(self) -> int:
        """Number of completed tasks."""
        return self._group.runs[0].tasks_done

    @property
    def is_complete(self) -> bool:
        """Whether all tasks are complete."""
        return not self._group.partial

    @property
    def orders(self) -> tuple[str, ...]:
        """Class order of each run."""
        return tuple(run.order for run in self._group.runs)

    @property
    def runs(self) -> tuple[Result, ...]:
        """Results of the single runs."""
        label, method = self._group.label, self._group.method
        return tuple(Result(Group(label, method, (run,)), self._benchmark) for run in self._group.runs)

    @property
    def final_accuracy(self) -> float:
        """A_f, the accuracy over all classes after the last completed task."""
        return self._mean("A_f")

    @property
    def final_accuracy_std(self) -> float | None:
        """Standard deviation of the final accuracy over runs."""
        return self._std("A_f")

    @property
    def average_accuracy(self) -> float:
        """A_avg, the mean of A_t over tasks."""
        return self._mean("A_avg")

    @property
    def average_accuracy_std(self) -> float | None:
        """Standard deviation of the average accuracy over runs."""
        return self._std("A_avg")

    @property
    def forgetting(self) -> float:
        """Mean drop from the best accuracy of each earlier task; NaN after the first task."""
        return self._mean("forgetting")

    @property
    def forgetting_std(self) -> float | None:
        """Standard deviation of the forgetting over runs."""
        return self._std("forgetting")

    @property
    def accuracy_per_task(self) -> Numbers:
        """A_t, the accuracy over all classes so far after each task, (tasks_done,)."""
        return np.array([point.mean for point in self._group.curve])

    @property
    def accuracy_per_task_std(self) -> Numbers | None:
        """Standard deviation of A_t over runs, (tasks_done,)."""
        if len(self._group.runs) < 2:
            return None
        return np.array([point.spread for point in self._group.curve], dtype=np.float64)

    @property
    def accuracy_matrix(self) -> Numbers:
        """Accuracy on task i after task t, (tasks, tasks); NaN where not measured."""
        matrix = np.full((self.tasks, self.tasks), np.nan)
        for t, row in enumerate(self._group.matrix[: self.tasks]):
            matrix[t, : t + 1] = [math.nan if value is None else value for value in row[: t + 1]]
        return matrix

    @property
    def seconds(self) -> float:
        """Time per run."""
        value = self._group.seconds
        return math.nan if value is None else value.mean

    def _value(self, key: str) -> Value | None:
        return self._group.value(_COLUMNS[key])

    def _mean(self, key: str) -> float:
        value = self._value(key)
        return math.nan if value is None else float(value.mean)

    def _std(self, key: str) -> float | None:
        value = self._value(key)
        return None if value is None else value.spread

    def __repr__(self) -> str:
        return "\n".join(filter(None, [self._headline(), text_matrix(self._group), CAPTION]))

    def _repr_html_(self) -> str:
        alone = replace(self._benchmark, groups=(self._group,))
        return html_table([alone]) + html_matrix(self._group)

    def _headline(self) -> str:
        named = [
            f"{name} {value.text()}"
            for key, name in (("A_f", "A_f"), ("A_avg", "A_avg"), ("forgetting", "forgetting"))
            if (value := self._value(key)) is not None
        ]
        orders = f", order{'s' * (len(self.orders) > 1)} {self._group.orders}" if any(self.orders) else ""
        state = f", {self._group.status}" if self._group.partial else ""
        return f"{self._group.label} on {self._benchmark.title}{orders}{state}: {', '.join(named) or 'no task is done'}"


class Plot:
    """Plot of the accuracy after each task, one line per method; displayed in notebooks, written by `save`."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self.svg: str = curves_document(results.benchmarks)

    def save(self, path: StrPath) -> Path:
        """Save the plot as .svg (as in notebooks), or as .png or .pdf with matplotlib."""
        target = Path(path)
        kind = target.suffix.lower().removeprefix(".")
        if kind == "svg":
            return _written(target, self.svg)
        if kind not in ("png", "pdf"):
            raise ConfigError(f"{target}: unsupported format; use .svg, .png or .pdf")
        from efcil.report.figures import curve_figure, figure_bytes

        return _written(target, figure_bytes(curve_figure(self._results.summaries), kind))

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Plot of {', '.join(self._results)}: displayed in notebooks, save it with .save('curves.svg')"


class Results(Mapping[str, Result]):
    """Results of several methods: a mapping from methods to `Result`, displayed as a table.

    >>> matrix = {"A_t": [95.0, 70.0], "matrix": [[95.0, None], [60.0, 80.0]], "forgetting": [None, 35.0], "tasks": 2}
    >>> lwf = {"method": "lwf-ncm", "dataset": "digits", "order": "1993", "seconds": 20.0, **matrix}
    >>> dpcr = {"method": "dpcr", "dataset": "digits", "order": "1993", "A_t": [98.0, 90.0], "tasks": 2}
    >>> results = Results([lwf, dpcr])
    >>> results
    digits, T = 2, order 1993
    ─────────────────────────────────────────
    Method     A_f  A_avg  Forgetting    Time
    ─────────────────────────────────────────
    dpcr     90.00  94.00           –       –
    lwf-ncm  70.00  82.50       35.00  20.0 s
    ─────────────────────────────────────────
    <BLANKLINE>
    A_f: accuracy after the last task, A_avg: mean accuracy over all tasks (%).
    >>> list(results), results["dpcr"].final_accuracy, results["lwf-ncm"].accuracy_matrix[1]
    (['dpcr', 'lwf-ncm'], 90.0, array([60., 80.]))

    Results are averaged over class orders; `results["dpcr", 1993]` is the run with one order. `summaries` are the
    summaries of runs as dictionaries.
    """

    def __init__(self, summaries: Iterable[Summary]) -> None:
        """Build results from summaries as in `summary.json`; raise RunError for invalid ones."""
        self.summaries: list[dict[str, Any]] = [_checked(summary) for summary in summaries]
        runs = [Run.of(one) for summary in self.summaries for one in split_heads(summary)]
        if not runs:
            raise RunError("no results; give the summary of at least one run")
        self.benchmarks = group_runs(runs)
        self._results: dict[str, Result] = {}
        for benchmark in self.benchmarks:
            for group in benchmark.groups:
                self._results[self._key(group, benchmark)] = Result(group, benchmark)
        self._main = {  # of a method with several classifiers
            str(summary["method"]): f"{summary['method']}/{summary['head']}"
            for summary in self.summaries
            if summary.get("heads") and "head" in summary
        }

    def _key(self, group: Group, benchmark: Benchmark) -> str:
        """Return a unique label of a group."""
        key = group.label
        if sum(group.label in {other.label for other in one.groups} for one in self.benchmarks) > 1:
            key += f" on {benchmark.title}"
        return f"{key} ({group.status})" if key in self._results else key

    def __getitem__(self, what: str | tuple[str, str | int]) -> Result:
        """Return the result of a method, or for (method, order) of the run with that class order."""
        name, order = what if isinstance(what, tuple) else (what, None)
        key = self._find(name)
        if order in BY_SIMILARITY and key not in self._results:  # beside other orders it has a key of its own
            key = next((k for k, r in self._results.items() if k.startswith(f"{key} on ") and order in r.orders), key)
        result = self._results.get(key)
        if result is None:
            raise _NoResult(self._missing(name))
        if order is None:
            return result
        chosen = [run for run in result.runs if run.orders == (str(order),)]
        if len(chosen) != 1:
            how = "no run" if not chosen else f"{len(chosen)} runs"
            raise _NoResult(f"{name} has {how} with order {order}; its orders: {', '.join(result.orders)}")
        return chosen[0]

    def _find(self, name: Any) -> str:
        """Return the key of a name, ignoring case; a method's name refers to its main classifier."""
        if name in self._results:
            return str(name)
        text = self._main.get(str(name), str(name))
        return {key.casefold(): key for key in self._results}.get(text.casefold(), text)

    def _missing(self, name: Any) -> str:
        several = [key for key in self._results if key.startswith(f"{name} on ")]
        if several:
            return f"there are several results of {name}; use one of {', '.join(map(repr, several))}"
        return f"no result of '{name}': {nearest(str(name), self._results)}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Results) and self.summaries == other.summaries

    __hash__ = None  # type: ignore[assignment]  # contains lists

    def __repr__(self) -> str:
        return text_table(self.benchmarks)

    def _repr_html_(self) -> str:
        return html_table(self.benchmarks)

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a pandas DataFrame with one row per run (extra `pandas`)."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("to_dataframe needs pandas: pip install 'efcil[pandas]'") from None
        rows = [
            {
                "method": result.method,
                "preset": run.preset,
                "dataset": run.dataset,
                "tasks": run.tasks,
                "tasks_done": run.tasks_done,
                "order": run.order,
                "seed": run.seed,
                "final_accuracy": run.A_f,
                "average_accuracy": run.A_avg,
                "forgetting": run.forgetting,
                "old_accuracy": run.old,
                "new_accuracy": run.new,
                "final_top5_accuracy": run.A5_f,
                "seconds": run.seconds,
                "device": run.device,
                "accuracy_per_task": list(run.A_t),
            }
            for result in self._results.values()
            for run in result._group.runs
        ]
        return pandas.DataFrame(rows)

    def plot(self, path: StrPath | None = None) -> Plot:
        """Plot the accuracy after each task; with `path`, also save it (.svg, .png or .pdf)."""
        plot = Plot(self)
        if path is not None:
            plot.save(path)
        return plot

    def report(self, path: StrPath) -> Path:
        """Write the HTML report to a file, or to report.html in a directory; return its path."""
        target = Path(path)
        return _written(target / "report.html" if target.is_dir() else target, html_page(self.summaries))

    def save(self, path: StrPath) -> Path:
        """Save the results as JSON for `load`; return the path."""
        return _written(Path(path), {"format": FORMAT, "version": VERSION, "summaries": self.summaries})

    @classmethod
    def load(cls, *paths: StrPath) -> Results:
        """Load results files of `save`, and run directories (all runs at or below them).

        >>> import tempfile
        >>> file = tempfile.mkdtemp() + "/results.json"
        >>> _ = Results([{"method": "dpcr", "dataset": "digits", "A_t": [98.0, 90.0]}]).save(file)
        >>> Results.load(file)["dpcr"].average_accuracy
        94.0
        """
        found: list[Summary] = []
        for path in paths:
            place = Path(path)
            is_run = place.is_dir() or place.name == "summary.json" or not place.exists()
            found += load_summaries(place) if is_run else _read(place)
        return cls(found)


class _NoResult(ConfigError, KeyError):
    """Unknown key: a KeyError, as for other mappings, with a one-line message."""

    __str__ = Exception.__str__


def _written(path: Path, what: Any) -> Path:
    """Write text, bytes or a JSON value atomically."""
    try:
        if isinstance(what, str):
            atomic_write_text(path, what)
        elif isinstance(what, bytes):
            atomic_write_bytes(path, what)
        else:
            write_json(path, what, indent=None)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; choose another path") from error
    return path


# --- loading ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> list[Summary]:
    """Read the summaries of a results file; raise RunError if it is invalid."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise RunError(f"{path}: larger than {MOST_BYTES:,} bytes, the limit of results files")
        content = json.loads(data, parse_constant=_refuse, parse_float=_finite)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise RunError(f"{path}: a damaged results file ({why}); save the results again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RunError(f"{path}: not a results file; give a file of Results.save or a run directory")
    if content.get("version") != VERSION:
        raise RunError(
            f"{path}: a results file of version {content.get('version')!r:.20}, this efcil supports version {VERSION}; "
            "load it with the version that saved it, or load the run directories"
        )
    summaries = content.get("summaries")
    if not isinstance(summaries, list) or not summaries or len(summaries) > MOST_RUNS:
        raise RunError(f"{path}: a damaged results file (no list of 1 to {MOST_RUNS:,} summaries); save it again")
    for number, summary in enumerate(summaries, 1):
        try:
            _checked(summary)
        except RunError as error:
            raise RunError(f"{path}: a damaged results file (run {number}: {error}); save the results again") from error
    return summaries


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not a finite number")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits[:20])


def _checked(summary: Any) -> dict[str, Any]:
    """Return a validated copy of a summary as plain values; raise RunError if it is inconsistent."""
    if not isinstance(summary, Mapping):
        raise RunError(f"a summary is {type(summary).__name__}; wanted the contents of summary.json")
    try:
        own: dict[str, Any] = json.loads(json.dumps(dict(summary), default=_plain), parse_constant=_refuse)
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(f"invalid summary: {' '.join(str(error).split())[:200]}") from error
    for one in split_heads(own):
        method = one.get("method")
        if not isinstance(method, str) or not method.strip():
            raise RunError(f"summary without a method name, got {method!r:.40}")
        _check_shapes(one, f"summary of {method[:60]}")
        Run.of(one)
    return own


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a plain value")


def _check_shapes(summary: Mapping[str, Any], where: str) -> None:
    """Raise RunError for inconsistent counts, accuracies or matrices."""
    accuracies = summary.get("A_t")
    if not isinstance(accuracies, list) or not all(_is_percent(value) for value in accuracies):
        raise RunError(f"{where}: A_t: wanted a list of accuracies from 0 to 100")
    tasks, done = summary.get("tasks", max(1, len(accuracies))), summary.get("tasks_done", len(accuracies))
    if not _is_count(tasks) or not 1 <= tasks <= MOST_TASKS:
        raise RunError(f"{where}: tasks={tasks!r:.30}, wanted 1 to {MOST_TASKS:,}")
    if not _is_count(done) or not len(accuracies) == done <= tasks:
        raise RunError(f"{where}: {len(accuracies)} accuracies in A_t, tasks_done={done!r:.30}, tasks={tasks}")
    matrix = summary.get("matrix")
    if matrix is not None and not (
        isinstance(matrix, list)
        and len(matrix) <= tasks
        and all(isinstance(row, list) and len(row) <= tasks for row in matrix)
        and all(value is None or _is_percent(value) for row in matrix for value in row)
    ):
        raise RunError(f"{where}: matrix: wanted at most {tasks} x {tasks} accuracies from 0 to 100")
    sizes = summary.get("task_sizes")
    if sizes and not (isinstance(sizes, list) and len(sizes) == tasks and all(_is_count(n) and n > 0 for n in sizes)):
        raise RunError(f"{where}: task_sizes: wanted the number of classes of each of {tasks} tasks")
    for key in ("A_f", "A_avg"):
        if summary.get(key) is not None and not _is_percent(summary[key]):
            raise RunError(f"{where}: {key}={summary[key]!r:.30}, wanted an accuracy from 0 to 100")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_percent(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 100 + 1e-9
