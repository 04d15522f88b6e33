"""Load summaries from run directories and validate them as `Run` objects."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efcil.errors import RunError, printable
from efcil.files import read_json

__all__ = ["TIMING", "Run", "Summary", "load_summaries", "parse_runs", "requested_precision", "split_heads"]

Summary = Mapping[str, Any]
FILE = "summary.json"
# Fields that affect the time of a run.
TIMING = ("seconds", "device", "precision", "threads", "world_size", "concurrent_runs")
_CONFIG_LIMIT = 100_000  # maximum characters of config.yaml on a page
# A number in a summary can stand for a page of any length: a matrix has the square of so many cells.
MOST_TASKS, MOST_DRAWN_TASKS = 2_000, 200
_MOST_NAMES, _MOST_HEADS, _MOST_CHARACTERS, _MOST_SETTINGS, _DEEPEST = 100_000, 32, 10_000, 1_000, 8


def requested_precision(summary: Summary) -> str:
    """Return the requested --precision of a run, or of the run it re-evaluates; "auto" if not given.

    >>> requested_precision({"command": "efcil run dpcr cifar100 --precision fp32"}), requested_precision({})
    ('fp32', 'auto')
    >>> requested_precision({"reevaluated_from": "efcil run dpcr cifar100 --precision fp32"})
    'fp32'
    """
    asked = re.search(r"--precision[= ](\w+)", f"{summary.get('command')} {summary.get('reevaluated_from')}")
    return asked[1] if asked else "auto"


def load_summaries(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """Load every ``summary.json`` at or below the given paths, without duplicates, in the order of the paths.

    Each summary gets ``run_dir``, and ``config_text`` if there is a ``config.yaml``.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_file():
            files = [path]
        elif path.is_dir():
            files = sorted(path.rglob(FILE))
        else:
            raise RunError(f"{path}: no such run; give a run directory or its {FILE}")
        if not files:
            raise RunError(f"{path}: contains no {FILE}; give the output directory of `efcil run --out`")
        found.update(dict.fromkeys(file.resolve() for file in files))
    if not found:
        raise RunError("no run given; give at least one run directory")
    return [_read(file) for file in found]


def _read(file: Path) -> dict[str, Any]:
    try:
        summary = read_json(file, error=RunError)
    except RunError as error:
        why = str(error).removeprefix(f"{file}: ")
        raise RunError(f"cannot read {file} ({why}); run it again or omit it") from error
    if not isinstance(summary, dict):
        raise RunError(f"{file}: expected a JSON object, got {type(summary).__name__}; run it again or omit it")
    summary["run_dir"] = str(file.parent)
    config = file.with_name("config.yaml")
    if config.is_file():
        with config.open(encoding="utf-8", errors="replace") as text:
            summary["config_text"] = text.read(_CONFIG_LIMIT)
    parse_runs([summary])  # validate, with the file in the error
    return summary


@dataclass(frozen=True)
class Run:
    """Validated summary: every key is present, numbers are finite or None, texts have one line."""

    method: str
    preset: str
    dataset: str
    tasks: int
    tasks_done: int
    order: str
    seed: str
    A_t: tuple[float, ...]
    A5_t: tuple[float, ...]
    A_f: float | None
    A_avg: float | None
    matrix: tuple[tuple[float | None, ...], ...]
    old: float | None  # after the last completed task, like the next three
    new: float | None
    forgetting: float | None
    bwt: float | None
    seconds: float | None
    task_sizes: tuple[int, ...]
    class_names: tuple[str, ...]
    device: str
    precision: str
    threads: int | None  # CPU threads
    world_size: int  # number of processes
    concurrent_runs: int  # runs sharing the device, this one included
    commit: str
    command: str
    run_dir: str
    config_text: str
    settings: tuple[tuple[str, str], ...]  # dotted options of the method, its training and the data, and their values

    @property
    def partial(self) -> bool:
        """Whether the run is incomplete."""
        return self.tasks_done < self.tasks

    @property
    def execution(self) -> str:
        """Device and precision, as text."""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        processes = f"{self.world_size} processes" if self.world_size > 1 else ""
        return ", ".join(filter(None, (self.device, threads, self.precision, processes)))

    @property
    def timed_on(self) -> str:
        """Device and number of concurrent runs, for comparing times."""
        shared = f"{self.concurrent_runs} concurrent runs" if self.concurrent_runs > 1 else ""
        return ", ".join(filter(None, (self.execution, shared)))

    @property
    def A5_f(self) -> float | None:
        """Top-5 accuracy after the last completed task."""
        return self.A5_t[-1] if self.A5_t else None

    @classmethod
    def of(cls, summary: Summary) -> Run:
        """Validate a summary; unknown keys are ignored, missing optional ones are empty."""
        where = str(summary.get("run_dir", "summary"))
        for key in ("method", "dataset", "A_t"):
            if key not in summary:
                raise RunError(f"{where}: {FILE} has no '{key}'; run it again or omit it")
        A_t = _accuracies(summary, "A_t", where)
        sizes = summary.get("task_sizes")
        task_sizes = tuple(int(size) for size in sizes) if sizes and _numbers(sizes) else ()
        _check_lengths(summary, where)
        tasks = _number(summary.get("tasks"))
        done = _number(summary.get("tasks_done"))
        planned = int(tasks) if tasks is not None else max(len(task_sizes), len(A_t))
        names = summary.get("class_names")
        finals = {key: _last(summary.get(key)) for key in ("old", "new", "forgetting", "bwt", "seconds")}
        A_f, A_avg = _number(summary.get("A_f")), _number(summary.get("A_avg"))
        return cls(
            method=_text(summary["method"]) or "unnamed",
            preset=_text(summary.get("preset")),
            dataset=_text(summary["dataset"]),
            tasks=planned,
            tasks_done=min(planned, int(done) if done is not None else len(A_t)),
            order=_order(summary.get("order")),
            seed=_text(summary.get("seed")),
            A_t=A_t,
            A5_t=_accuracies(summary, "A5_t", where),
            A_f=A_f if A_f is not None or not A_t else A_t[-1],
            A_avg=A_avg if A_avg is not None or not A_t else sum(A_t) / len(A_t),
            matrix=_matrix(summary.get("matrix"), where),
            task_sizes=task_sizes if len(task_sizes) >= len(A_t) else (),
            class_names=tuple(map(_text, names)) if names and _sequence(names) else (),
            device=_text(summary.get("device")),
            precision=_text(summary.get("precision")),
            threads=None if (threads := _number(summary.get("threads"))) is None else int(threads),
            world_size=int(_number(summary.get("world_size")) or 1),
            concurrent_runs=int(_number(summary.get("concurrent_runs")) or 1),
            commit=_text(summary.get("commit")),
            command=_text(summary.get("command")),
            run_dir=printable(str(summary.get("run_dir", ""))),
            settings=tuple(_settings(summary)),
            config_text=str(summary.get("config_text", "")),
            **finals,
        )


def split_heads(summary: Summary) -> list[Summary]:
    """Return one summary per classifier of the method.

    >>> both = {"method": "icarl", "A_f": 2, "heads": {"nme": {"A_f": 2}, "cnn": {"A_f": 1}}}
    >>> [(s["method"], s["A_f"]) for s in split_heads(both)]
    [('icarl/nme', 2), ('icarl/cnn', 1)]
    """
    heads = summary.get("heads")
    if not isinstance(heads, Mapping) or not heads:
        return [summary]
    if len(heads) > _MOST_HEADS:
        where = summary.get("run_dir", "summary")
        raise RunError(f"{where}: {FILE} has {len(heads):,} 'heads', more than {_MOST_HEADS}; run it again or omit it")
    parts: list[Summary] = []
    for head, numbers in heads.items():
        if not isinstance(numbers, Mapping):
            raise RunError(f"{summary.get('run_dir', 'summary')}: 'heads' in {FILE} must hold an object per classifier")
        head_summary = {**summary, **numbers, "method": f"{summary['method']}/{head}"}
        parts.append({key: value for key, value in head_summary.items() if key != "heads"})  # now a single classifier
    return parts


def parse_runs(summaries: Iterable[Summary]) -> list[Run]:
    """Validate summaries, one per classifier; raise RunError if there are none."""
    runs = [Run.of(one) for summary in summaries for one in split_heads(summary)]
    if not runs:
        raise RunError("no run given; give at least one run directory")
    return runs


def _settings(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield every option and its value as text; those of the data without what leaves its images as they are."""

    def walk(value: Any, key: str, depth: int = 0) -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping) and depth < _DEEPEST:
            for name, inner in value.items():
                yield from walk(inner, f"{key}.{_text(name)}" if key else _text(name), depth + 1)
        else:
            yield key, "null" if value is None else _text(value)

    for part, prefix in (("training", ""), ("options", ""), ("data", "data")):
        given = summary.get(part)
        own = {k: v for k, v in given.items() if k not in ("lazy", "skip_bad")} if isinstance(given, Mapping) else {}
        yield from walk(own, prefix)


def _sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _numbers(value: Any) -> bool:
    return _sequence(value) and all(_number(item) is not None for item in value)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return value


def _last(value: Any) -> float | None:
    return _number(value[-1] if _sequence(value) and len(value) else value)


def _text(value: Any) -> str:
    """Return a value on one line of limited length, without characters that a terminal would obey."""
    if _sequence(value):
        value = " ".join(str(one) for one in value[:_MOST_CHARACTERS])
    return "" if value is None else printable(" ".join(str(value)[:_MOST_CHARACTERS].split()))


def _check_lengths(summary: Summary, where: str) -> None:
    tasks = _number(summary.get("tasks")) or 0
    matrix: Any = summary.get("matrix")
    rows = [len(row) for row in matrix if _sequence(row)] if _sequence(matrix) else []
    for key, length, most in (
        ("tasks", tasks, MOST_TASKS),
        *((key, _length(summary.get(key)), MOST_TASKS) for key in ("A_t", "A5_t", "task_sizes", "matrix")),
        ("matrix", max(rows, default=0), MOST_TASKS),
        ("class_names", _length(summary.get("class_names")), _MOST_NAMES),
        *((key, _length(summary.get(key)), _MOST_SETTINGS) for key in ("training", "options", "data")),
    ):
        if length > most:
            raise RunError(f"{where}: '{key}' in {FILE} goes up to {length:,.0f}, more than {most:,}; omit the run")


def _length(value: Any) -> int:
    return len(value) if _sequence(value) or isinstance(value, Mapping) else 0


def _order(value: Any) -> str:
    return "custom" if _sequence(value) else _text(value)


def _accuracies(summary: Summary, key: str, where: str) -> tuple[float, ...]:
    values = summary.get(key)
    if values is None:
        return ()
    if not _numbers(values):
        raise RunError(f"{where}: '{key}' in {FILE} must be a list of numbers; run it again or omit it")
    return tuple(float(value) for value in values)


def _matrix(rows: Any, where: str) -> tuple[tuple[float | None, ...], ...]:
    if rows is None:
        return ()
    if not _sequence(rows) or not all(_sequence(row) for row in rows):
        raise RunError(f"{where}: 'matrix' in {FILE} must be a list of lists; run it again or omit it")
    return tuple(tuple(_number(value) for value in row) for row in rows)
