"""From run directories to summaries, and from a summary to a `Run` with checked types."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efcil.errors import RunError
from efcil.files import read_json

__all__ = ["TIMING", "Run", "Summary", "load_summaries", "parse_runs", "requested_precision", "split_heads"]

Summary = Mapping[str, Any]
FILE = "summary.json"
# What the seconds of a run depend on beside the run itself.
TIMING = ("seconds", "device", "precision", "threads", "world_size", "concurrent_runs")
_CONFIG_LIMIT = 100_000  # characters of config.yaml that a page may carry


def requested_precision(summary: Summary) -> str:
    """Return the arithmetic that a run was told to use, or the one it is replayed from; auto if the machine chose it.

    >>> requested_precision({"command": "efcil run dpcr cifar100 --precision fp32"}), requested_precision({})
    ('fp32', 'auto')
    >>> requested_precision({"reevaluated_from": "efcil run dpcr cifar100 --precision fp32"})
    'fp32'
    """
    asked = re.search(r"--precision[= ](\w+)", f"{summary.get('command')} {summary.get('reevaluated_from')}")
    return asked[1] if asked else "auto"


def load_summaries(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """Read every ``summary.json`` at or below the given paths, each once, in the order of the paths.

    Each summary gains ``run_dir``, and ``config_text`` where a ``config.yaml`` lies beside it.
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
            raise RunError(f"{path}: no {FILE} in it or below; give the directory that `efcil run --out` wrote")
        found.update(dict.fromkeys(file.resolve() for file in files))
    if not found:
        raise RunError("no run given; give at least one run directory")
    return [_read(file) for file in found]


def _read(file: Path) -> dict[str, Any]:
    try:
        summary = read_json(file, error=RunError)
    except RunError as error:
        why = str(error).removeprefix(f"{file}: ")
        raise RunError(f"{file}: cannot be read ({why}); run it again or leave it out") from error
    if not isinstance(summary, dict):
        raise RunError(f"{file}: want a JSON object, got {type(summary).__name__}; run it again or leave it out")
    summary["run_dir"] = str(file.parent)
    config = file.with_name("config.yaml")
    if config.is_file():
        summary["config_text"] = config.read_text(encoding="utf-8", errors="replace")[:_CONFIG_LIMIT]
    parse_runs([summary])  # a broken one is reported here, by its file
    return summary


@dataclass(frozen=True)
class Run:
    """One summary with every key present, numbers finite or None and texts on one line."""

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
    old: float | None  # after the last task done, as the next three
    new: float | None
    forgetting: float | None
    bwt: float | None
    seconds: float | None
    task_sizes: tuple[int, ...]
    class_names: tuple[str, ...]
    device: str
    precision: str
    threads: int | None  # of a CPU
    world_size: int  # processes of the run
    concurrent_runs: int  # on the device, this one included
    commit: str
    command: str
    run_dir: str
    config_text: str

    @property
    def partial(self) -> bool:
        """Whether tasks are missing."""
        return self.tasks_done < self.tasks

    @property
    def execution(self) -> str:
        """What it was computed on, in words."""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        processes = f"{self.world_size} processes" if self.world_size > 1 else ""
        return ", ".join(filter(None, (self.device, threads, self.precision, processes)))

    @property
    def timed_on(self) -> str:
        """The machine, and how many runs had a part of it."""
        shared = f"{self.concurrent_runs} runs at once" if self.concurrent_runs > 1 else ""
        return ", ".join(filter(None, (self.execution, shared)))

    @property
    def A5_f(self) -> float | None:
        """Top-5 accuracy after the last task done."""
        return self.A5_t[-1] if self.A5_t else None

    @classmethod
    def of(cls, summary: Summary) -> Run:
        """Check a summary; unknown keys are ignored, missing optional ones are empty."""
        where = str(summary.get("run_dir", "summary"))
        for key in ("method", "dataset", "A_t"):
            if key not in summary:
                raise RunError(f"{where}: {FILE} has no '{key}'; run it again or leave it out")
        A_t = _accuracies(summary, "A_t", where)
        sizes = summary.get("task_sizes")
        task_sizes = tuple(int(size) for size in sizes) if sizes and _numbers(sizes) else ()
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
            run_dir=str(summary.get("run_dir", "")),
            config_text=str(summary.get("config_text", "")),
            **finals,
        )


def split_heads(summary: Summary) -> list[Summary]:
    """Return a summary for each classifier of the method: itself, where it has only one.

    >>> both = {"method": "icarl", "A_f": 2, "heads": {"nme": {"A_f": 2}, "cnn": {"A_f": 1}}}
    >>> [(s["method"], s["A_f"]) for s in split_heads(both)]
    [('icarl/nme', 2), ('icarl/cnn', 1)]
    """
    heads = summary.get("heads")
    if not isinstance(heads, Mapping) or not heads:
        return [summary]
    found: list[Summary] = []
    for head, numbers in heads.items():
        if not isinstance(numbers, Mapping):
            raise RunError(f"{summary.get('run_dir', 'summary')}: 'heads' in {FILE} must hold an object per classifier")
        own = {**summary, **numbers, "method": f"{summary['method']}/{head}"}
        found.append({key: value for key, value in own.items() if key != "heads"})  # it has only one now
    return found


def parse_runs(summaries: Iterable[Summary]) -> list[Run]:
    """Check every summary, each of a method's classifiers apart; RunError if there is none."""
    runs = [Run.of(one) for summary in summaries for one in split_heads(summary)]
    if not runs:
        raise RunError("no run given; give at least one run directory")
    return runs


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
    if _sequence(value):
        return " ".join(map(_text, value))
    return "" if value is None else " ".join(str(value).split())


def _order(value: Any) -> str:
    return "custom" if _sequence(value) else _text(value)


def _accuracies(summary: Summary, key: str, where: str) -> tuple[float, ...]:
    values = summary.get(key)
    if values is None:
        return ()
    if not _numbers(values):
        raise RunError(f"{where}: '{key}' in {FILE} must be a list of numbers; run it again or leave it out")
    return tuple(float(value) for value in values)


def _matrix(rows: Any, where: str) -> tuple[tuple[float | None, ...], ...]:
    if rows is None:
        return ()
    if not _sequence(rows) or not all(_sequence(row) for row in rows):
        raise RunError(f"{where}: 'matrix' in {FILE} must be a list of lists; run it again or leave it out")
    return tuple(tuple(_number(value) for value in row) for row in rows)
