"""Group runs by benchmark (data set and split) and method, and average over class orders and seeds."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import accumulate

from efcil.report.load import Run
from efcil.tasks import BY_SIMILARITY

__all__ = ["COLUMNS", "NONE", "Benchmark", "Group", "Value", "duration", "group_runs"]


Settings = tuple[tuple[str, str], ...]
NONE = "\N{EN DASH}"  # missing number


@dataclass(frozen=True)
class Value:
    """Mean with sample standard deviation over runs; no spread for a single run."""

    mean: float
    spread: float | None = None

    @classmethod
    def over(cls, values: Iterable[float | None]) -> Value | None:
        """Return mean and spread of values, or None if a value is missing.

        >>> Value.over([1.0, 3.0])
        Value(mean=2.0, spread=1.4142135623730951)
        """
        numbers: list[float] = []
        for value in values:
            if value is None:
                return None
            numbers.append(value)
        if not numbers:
            return None
        return cls(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)

    def text(self, plus_minus: str = " ± ") -> str:
        """Format with two decimals."""
        mean = f"{self.mean:.2f}"
        return mean if self.spread is None else f"{mean}{plus_minus}{self.spread:.2f}"


@dataclass(frozen=True)
class Column:
    """Column of a table: key, title, value of a run and direction of improvement."""

    key: str
    title: str
    get: Callable[[Run], float | None]
    better: int  # 1: higher, -1: lower, 0: neither
    help: str


COLUMNS = (
    Column("A_f", "A_f", lambda run: run.A_f, 1, "accuracy over all classes after the last task"),
    Column("A_avg", "A_avg", lambda run: run.A_avg, 1, "mean over tasks of the accuracy over the classes seen"),
    Column("A5_f", "Top-5", lambda run: run.A5_f, 1, "top-5 accuracy after the last task"),
    Column("old", "Old", lambda run: run.old, 0, "accuracy on the classes of earlier tasks"),
    Column("new", "New", lambda run: run.new, 0, "accuracy on the classes of the last task"),
    Column("forgetting", "Forgetting", lambda run: run.forgetting, -1, "mean drop from the best accuracy of a task"),
    Column("bwt", "BWT", lambda run: run.bwt, 0, "backward transfer: final minus initial accuracy"),
)


CAPTION = "A_f: accuracy after the last task, A_avg: mean accuracy over all tasks (%)."


@dataclass(frozen=True)
class Group:
    """Runs of one method with the same progress that differ only in class order or seed."""

    label: str
    method: str
    runs: tuple[Run, ...]

    @property
    def partial(self) -> bool:
        """Whether the runs are incomplete."""
        return self.runs[0].partial

    @property
    def status(self) -> str:
        """``complete``, or the number of completed tasks."""
        run = self.runs[0]
        return f"partial, {run.tasks_done} of {run.tasks} tasks" if self.partial else "complete"

    @property
    def orders(self) -> str:
        """Unique class orders, seeds last."""
        return _join_orders(self.runs)

    @property
    def seconds(self) -> Value | None:
        """Time per run."""
        return Value.over(run.seconds for run in self.runs)

    @property
    def curve(self) -> list[Value]:
        """A_t with spread."""
        points = (Value.over(column) for column in zip(*(run.A_t for run in self.runs), strict=False))
        return [point for point in points if point is not None]

    @property
    def matrix(self) -> list[list[float | None]]:
        """R, mean over runs; None where a run has no value."""
        rows = zip(*(run.matrix for run in self.runs), strict=False)
        cells = ((Value.over(cell) for cell in zip(*row, strict=False)) for row in rows)
        return [[None if cell is None else cell.mean for cell in row] for row in cells]

    def value(self, column: Column) -> Value | None:
        """Return the value of the group in a column."""
        return Value.over(column.get(run) for run in self.runs)


@dataclass(frozen=True)
class Benchmark:
    """Comparable runs, with the same data set and split into tasks."""

    dataset: str
    tasks: int
    task_sizes: tuple[int, ...]
    groups: tuple[Group, ...]  # sorted by final accuracy, partial ones last
    extreme: str = ""  # order by similarity of all runs, "hard" or "easy": no sample of random orders

    @property
    def title(self) -> str:
        """Data set and number of tasks, with task sizes if uneven."""
        sizes = self.task_sizes
        split = f" ({_split(sizes)})" if len(set(sizes)) > 1 else ""
        return f"{self.dataset}, T = {self.tasks}{split}" + (f", {self.extreme} order" if self.extreme else "")

    @property
    def classes_seen(self) -> tuple[int, ...]:
        """Number of classes after each task; empty if unknown."""
        return tuple(accumulate(self.task_sizes))

    def best(self, column: Column) -> str | None:
        """Return the best formatted mean of a column among complete groups, or None."""
        values = [value for group in self.groups if not group.partial and (value := group.value(column)) is not None]
        if not column.better or len(values) < 2:
            return None
        choose = max if column.better > 0 else min
        return f"{choose(value.mean for value in values):.2f}"

    def is_best(self, group: Group, column: Column) -> bool:
        """Return whether the formatted value of a group is the best one."""
        value = group.value(column)
        return value is not None and not group.partial and f"{value.mean:.2f}" == self.best(column)

    @property
    def orders(self) -> str:
        """Class orders of all runs."""
        return _join_orders(run for group in self.groups for run in group.runs)

    @property
    def notes(self) -> list[str]:
        """Notes on the comparability of rows."""
        notes = []
        if any(len(group.runs) > 1 for group in self.groups):
            notes.append("± is the sample standard deviation over the runs of a row.")
        if any(group.partial for group in self.groups):
            notes.append("Partial runs show the completed tasks and are not considered for the best value.")
        if len({tuple(sorted(run.order for run in group.runs)) for group in self.groups}) > 1:
            notes.append("The rows use different class orders; compare them with care.")
        return notes


def group_runs(runs: Iterable[Run]) -> list[Benchmark]:
    """Group runs into benchmarks, in the order of the runs; extreme class orders are never averaged with others."""
    sorted_in: dict[tuple[str, int, tuple[int, ...], str], list[Run]] = {}
    presets: dict[str, set[str]] = {}  # over all benchmarks, for consistent labels
    for run in runs:
        presets.setdefault(run.method, set()).add(run.preset)
        extreme = run.order if run.order in BY_SIMILARITY else ""
        sorted_in.setdefault((run.dataset, run.tasks, run.task_sizes, extreme), []).append(run)
    result = []
    for (dataset, tasks, sizes, extreme), members in sorted_in.items():
        result.append(Benchmark(dataset, tasks, sizes, tuple(sorted(_groups(members, presets), key=_rank)), extreme))
    return result


def _rank(group: Group) -> tuple[bool, float, str]:
    final = group.value(COLUMNS[0])
    return group.partial, -final.mean if final else 0.0, group.label


def _groups(runs: list[Run], presets: dict[str, set[str]]) -> list[Group]:
    together: dict[tuple[str, str, int, Settings], list[Run]] = {}
    for run in runs:
        together.setdefault((run.method, run.preset, run.tasks_done, run.settings), []).append(run)
    groups = []
    for (method, preset, _, settings), members in together.items():
        about = [preset or "no preset"] if len(presets[method]) > 1 else []
        about += _distinct_settings(settings, [r.settings for r in runs if (r.method, r.preset) == (method, preset)])
        label = f"{method} ({', '.join(about)})" if about else method
        if len({(run.order, run.seed) for run in members}) == len(members):
            groups.append(Group(label, method, tuple(members)))
        else:  # repeated order and seed: another configuration or a repetition, not averaged
            names = _distinct_names([run.run_dir for run in members])
            groups += [Group(f"{label} [{name}]", method, (run,)) for name, run in zip(names, members, strict=True)]
    return groups


def _distinct_settings(own: Settings, every: Collection[Settings]) -> list[str]:
    """Return the settings that tell one of several configurations from the others: a few, else also its number.

    >>> first, second = (("lr", "1"), ("width", "2")), (("lr", "5"), ("width", "2"))
    >>> _distinct_settings(first, [first, second])
    ['lr=1']
    >>> short, long = [tuple((f"{stage}.epochs", n) for stage in ("first", "later")) for n in ("5", "9")]
    >>> _distinct_settings(short, [short, long])
    ['epochs=5']
    """
    configurations = [dict(one) for one in dict.fromkeys(every)]
    keys = dict.fromkeys(key for one in configurations for key in one)
    differing = [key for key in keys if len({one.get(key) for one in configurations}) > 1]
    values = {key: dict(own).get(key, "?") for key in differing}
    texts = []
    for key, value in values.items():
        stage, _, rest = key.partition(".")
        if stage not in ("first", "later") or values.get(f"first.{rest}") != values.get(f"later.{rest}"):
            texts.append(f"{key}={value}")
        elif stage == "first":  # the same in all tasks
            texts.append(f"{rest}={value}")
    if len(texts) <= 4:
        return texts
    return [*texts[:3], f"{len(texts) - 3} more", f"configuration {configurations.index(dict(own)) + 1}"]


def _join_orders(runs: Iterable[Run]) -> str:
    orders = {run.order or "?" for run in runs}
    return ", ".join(sorted(orders, key=lambda order: (order.isdigit(), int(order) if order.isdigit() else 0, order)))


def _distinct_names(directories: list[str]) -> list[str]:
    """Return short distinct names of directories: relative to their common parent, or numbers."""
    if all(directories) and len(set(directories)) == len(directories):
        shared = os.path.commonpath([os.path.abspath(directory) for directory in directories])
        return [" ".join(os.path.relpath(directory, shared).split()) for directory in directories]
    return [str(number) for number in range(1, len(directories) + 1)]


def _split(sizes: tuple[int, ...]) -> str:
    """Format task sizes.

    >>> _split((50, 5, 5, 5)), _split((3, 1, 2))
    ('50 + 3 x 5', '3 + 1 + 2')
    """
    parts: list[list[int]] = []
    for size in sizes:
        if parts and parts[-1][1] == size:
            parts[-1][0] += 1
        else:
            parts.append([1, size])
    return " + ".join(str(size) if count == 1 else f"{count} x {size}" for count, size in parts)


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(3.21), duration(170), duration(7384)
    ('3.2 s', '2 min 50 s', '2 h 03 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
