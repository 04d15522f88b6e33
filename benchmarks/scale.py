"""Scaling of the class update and its memory with classes, dimensions and tasks.

    python benchmarks/scale.py [--check] [--tiny] [--out JSON] [--machine WORDS] [--figure STEM] [--threads 2]

One update: P from the new task's images, old statistics moved (rule `positive`), new classes added, ridge weight,
column normalization. Each size is measured in a process of its own, so that the peak of its memory is its own. Peak:
the size of the statistics before the update, and what the process grew by during it.

Prediction: time and memory are linear in the classes. A Gram is (d + 1) / 2 + 1 numbers a dimension, half of the
paper's d + 1, and moves with 3.25 d^3 operations; a factor of n images takes n + 1 and moves with 2 n d^2: at d = 512
and 50 images a fifth of the memory and a seventeenth of the operations. Statistics are values, so an update holds the
old ones until the new ones are complete: the peak is both, a block, and the products of the task's own images.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for use as a script

from benchmarks.core import RIDGE, features
from benchmarks.record import add_options, write_record
from efcil.core.class_stats import BLOCK_BYTES, ClassStats
from efcil.core.gram_storage import Form, GramBlock, StorageSpec, coalesce
from efcil.core.projection import task_shift
from efcil.core.ridge import normalize_columns, ridge_weight
from efcil.files import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_GROWTH_TENFOLD = 12.0  # relative processor time of ten times the classes
MAX_PEAK = 2.2  # relative to the stored statistics: old and new ones, plus one block
MANY = 1000  # minimum number of classes to check the peak
MAX_STORAGE = 0.55  # relative to the paper's d^2 + d numbers per class
MAX_DEVIATION = 1e-8  # relative deviation of exact factors from Grams
DISTINCT = 8  # sampled classes; the others repeat them, which does not affect time or memory
PAGE = 1024


@dataclass(frozen=True)
class Size:
    """Size of one measurement: `classes` after the update, a tenth of them new."""

    classes: int
    dim: int
    images: int  # per class
    form: Form = "gram"
    threads: int = 2
    repeats: int = 3

    @property
    def new(self) -> int:
        """Number of new classes."""
        return max(1, self.classes // 10)


FULL: dict[str, list[Size]] = {
    "classes": [
        *(Size(c, 512, 500, repeats=r) for c, r in ((10, 4), (100, 3), (1000, 3))),
        *(Size(c, 512, 50, "factors", repeats=r) for c, r in ((10, 4), (100, 3), (1000, 2), (10_000, 1))),
    ],
    "dimensions": [
        *(Size(20, d, 500, repeats=4 if d < 2048 else 1) for d in (64, 256, 1024, 2048)),
        *(Size(20, d, 30, "factors", repeats=2) for d in (64, 256, 1024, 2048)),
        Size(1000, 2048, 64, "factors", repeats=1),
    ],
}
TASKS = (5, 10, 20, 50, 100)
ERRORS = (0.1, 0.03, 0.01, 0.001)
TINY: dict[str, list[Size]] = {
    "classes": [Size(c, 24, 30, repeats=1) for c in (10, 100)] + [Size(10, 24, 8, "factors", repeats=1)],
    "dimensions": [Size(10, d, 30, repeats=1) for d in (8, 24)] + [Size(10, 24, 8, "factors", repeats=1)],
}


# --- one update -------------------------------------------------------------------------------------------------------


def old_statistics(size: Size) -> ClassStats:
    """Return statistics of the old classes, in blocks as after an update."""
    number = size.classes - size.new
    rows = torch.cat([features(size.images, size.dim, 10 + c) for c in range(DISTINCT)])
    drawn = ClassStats.from_features(
        rows, torch.arange(DISTINCT).repeat_interleave(size.images), StorageSpec(size.form)
    ).parts
    (every,) = coalesce(drawn)
    mean = rows.double().view(DISTINCT, size.images, size.dim).mean(1)
    index = torch.arange(number) % DISTINCT
    block = max(2, BLOCK_BYTES["cpu"] // (8 * every.work))
    parts: list[GramBlock] = []
    for start in range(0, number, block):
        parts += coalesce([every.take(index[one : one + 1]) for one in range(start, min(start + block, number))])
    return ClassStats(torch.arange(number), torch.full((number,), size.images), mean[index], parts)


def new_task(size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Return at least 4 d features before and after the task, which determine P, and labels of the first ones."""
    old = features(max(size.new * size.images, 4 * size.dim), size.dim, 5000)
    draw = torch.Generator().manual_seed(2)
    turn = torch.eye(size.dim) + 0.3 * torch.randn(size.dim, size.dim, generator=draw) / size.dim**0.5
    labels = (size.classes - size.new + torch.arange(size.new)).repeat_interleave(size.images)
    return old, torch.relu(old @ turn), labels


def update(
    stats: ClassStats, before: Tensor, after: Tensor, labels: Tensor, memory: StorageSpec
) -> tuple[ClassStats, ClassStats, Tensor]:
    """Run one task; return (shifted old statistics, all statistics, classifier)."""
    moved = stats.transform_projected(task_shift(before, after), "positive")
    everything = moved.merge(ClassStats.from_features(after[: len(labels)], labels, memory), memory)
    return moved, everything, normalize_columns(ridge_weight(everything, RIDGE))


def _memory_kb(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def _settled() -> int:
    """Release freed memory, reset the peak and return the memory in use, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _memory_kb("VmRSS") * PAGE


def measure_one(size: Size) -> dict[str, Any]:
    """Measure time, storage and peak memory of one update; sets the number of threads, so run it in a separate
    process."""
    torch.set_num_threads(size.threads)
    task = new_task(size)
    memory = StorageSpec(size.form)
    warm = Size(4, size.dim, 4, size.form)
    update(old_statistics(warm), *new_task(warm), memory)
    stats = old_statistics(size)
    walls, times, peaks, numbers = [], [], [], 0
    for _ in range(size.repeats):
        stored, held = 8 * stats.numel, _settled()
        wall, spent = time.perf_counter(), time.process_time()
        stats, everything, _ = update(stats, *task, memory)
        times.append(time.process_time() - spent)
        walls.append(time.perf_counter() - wall)
        # Linux accounts pages in batches, so for a small update the peak may be below the current value.
        peaks.append(stored + max(0, _memory_kb("VmHWM") * PAGE - held))
        numbers = everything.numel
        del everything
    return {
        **asdict(size),
        "seconds": min(walls),
        "processor_seconds": min(times),
        "numel": numbers,
        "stored_bytes": 8 * numbers,
        "of_papers": numbers / (size.classes * (size.dim**2 + size.dim)),
        "peak_bytes": max(peaks),
        "peak_ratio": (max(peaks) - BLOCK_BYTES["cpu"]) / (8 * numbers),
    }


def in_own_process(size: Size) -> dict[str, Any]:
    """Run `measure_one` in a new process."""
    command = [sys.executable, __file__, "--one", json.dumps(asdict(size))]
    threads = str(size.threads)
    # Waiting threads sleep, as spinning would waste a core on a shared machine.
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{size}: {done.stderr[-800:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- streams, exactness, compression ----------------------------------------------------------------------------------


def measure_tasks(tasks: int, classes: int, dim: int) -> dict[str, Any]:
    """Measure all updates of a stream of `classes` in `tasks` tasks, each shifting all earlier classes, in one
    thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    each = classes // tasks
    stats, moves = ClassStats.empty(dim), 0
    spent = 0.0
    before, _, labels = new_task(Size(10 * each, dim, 20))
    turn = torch.linalg.qr(torch.eye(dim) + 0.1 * torch.randn(dim, dim, generator=torch.Generator().manual_seed(3)))[0]
    after = before @ turn  # a rotation, so that norms are preserved over many tasks
    for task in range(tasks):
        labels = labels - labels.min() + task * each
        began = time.process_time()
        if len(stats):
            moves += len(stats)
            stats = stats.transform_projected(task_shift(before, after), "positive")
        stats = stats.merge(ClassStats.from_features(after[: len(labels)], labels))
        ridge_weight(stats, RIDGE)
        spent += time.process_time() - began
    torch.set_num_threads(threads)
    return {"tasks": tasks, "classes": classes, "dim": dim, "class_moves": moves, "processor_seconds": spent}


def deviation(dim: int, images: int) -> float:
    """Return the largest relative difference of Grams, means and classifier between storage as factors and as Grams."""
    x = torch.cat([features(images, dim, 10 + c) for c in range(4)])
    y = torch.arange(4).repeat_interleave(images)
    task = new_task(Size(10, dim, images))
    task = (task[0], task[1], task[2] - task[2].min() + 4)
    found = [update(ClassStats.from_features(x, y, m), *task, m)[1:] for m in (StorageSpec(), StorageSpec("factors"))]
    (grams, weight), (factors, other) = found
    pairs = [(grams.gram, factors.gram), (grams.mean, factors.mean), (weight, other)]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def compression(error: float, dim: int, images: int) -> dict[str, Any]:
    """Return error and memory of truncated factors, before and after a shift."""
    x = torch.cat([features(images, dim, 10 + c, _center(c, dim)) for c in range(4)])
    y = torch.arange(4).repeat_interleave(images)
    grams, cut = (ClassStats.from_features(x, y, m) for m in (StorageSpec(), StorageSpec("factors", tolerance=error)))
    shift = task_shift(*new_task(Size(10, dim, images))[:2])
    weights = [normalize_columns(ridge_weight(s.transform_projected(shift, "positive"), RIDGE)) for s in (grams, cut)]
    return {
        "error": error,
        "dim": dim,
        "images": images,
        "left_out": max(_left_out(grams, cut)),
        "left_out_after_a_move": max(_left_out(grams.transform(shift), cut.transform(shift))),
        "rows": max((rank for part in cut.parts for rank in getattr(part, "ranks", (dim,))), default=0),
        "of_gram": cut.numel / grams.numel,
        "weight_change": float((weights[0] - weights[1]).norm() / weights[0].norm()),
    }


def _center(seed: int, dim: int) -> Tensor:
    return torch.randn(max(2, dim // 4), generator=torch.Generator().manual_seed(900 + seed))


def _left_out(whole: ClassStats, cut: ClassStats) -> Iterator[float]:
    """Yield the relative trace of the discarded part, which is positive, so this is its nuclear norm."""
    for one, other in zip(whole.gram, cut.gram, strict=True):
        yield float((one - other).diagonal().sum() / one.diagonal().sum())


# --- all of it --------------------------------------------------------------------------------------------------------


def measure(
    tiny: bool = False, threads: int = 2, run: Callable[[Size], dict[str, Any]] = in_own_process
) -> dict[str, Any]:
    """Measure all axes; `run` measures one size."""
    sizes = TINY if tiny else FULL
    dim = 24 if tiny else 512
    found: dict[str, Any] = {
        "factor_deviation": deviation(dim, dim // 4),
        "compression": [compression(e, dim, 20 * dim // 24) for e in (ERRORS[:2] if tiny else ERRORS)],
        "tasks": [measure_tasks(t, 100, 16 if tiny else 256) for t in (TASKS[:2] if tiny else TASKS)],
    }
    found |= {axis: [run(replace(size, threads=threads)) for size in own] for axis, own in sizes.items()}
    grams = {row["classes"]: row for row in found["classes"] if row["form"] == "gram"}
    small = 10 if tiny else 100
    found["tenfold_growth"] = grams[10 * small]["processor_seconds"] / grams[small]["processor_seconds"]
    found["block_bytes"] = BLOCK_BYTES["cpu"]
    found["threads"] = threads
    return found


def missed(found: dict[str, Any]) -> list[str]:
    """Describe the bounds that a result of `measure` violates.

    Peaks are checked from 1,000 classes on; with fewer, the d x d matrices of the solution dominate.
    """
    lines = []
    if found["tenfold_growth"] > MAX_GROWTH_TENFOLD:
        lines.append(f"tenfold_growth is {found['tenfold_growth']:.2f}; wanted at most {MAX_GROWTH_TENFOLD}")
    for row in found["classes"] + found["dimensions"]:
        what = f"{row['classes']} classes, d = {row['dim']}, {row['form']}"
        if row["classes"] >= MANY and row["peak_ratio"] > MAX_PEAK:
            lines.append(f"peak of {what} is {row['peak_ratio']:.2f} times what is stored; wanted at most {MAX_PEAK}")
        if row["form"] == "gram":
            bound, judged = MAX_STORAGE, row["dim"] >= 20
        else:  # less than Grams
            bound, judged = 0.5 + 1 / (row["dim"] + 1) - 1e-9, 2 * row["images"] < row["dim"]
        if judged and row["of_papers"] > bound:
            lines.append(f"storage of {what} is {row['of_papers']:.3f} of the paper's; wanted at most {bound:.3f}")
    if not found["factor_deviation"] <= MAX_DEVIATION:
        lines.append(f"factor_deviation is {found['factor_deviation']:.1e}; wanted at most {MAX_DEVIATION}")
    for row in found["compression"]:
        if row["left_out"] > row["error"]:
            lines.append(
                f"error {row['error']} leaves out {row['left_out']:.4f} of the trace; wanted at most the error"
            )
    return lines


def drawn(found: dict[str, Any]) -> Figure:
    """Plot cost and memory against classes, dimensions and tasks."""
    from matplotlib.figure import Figure

    from efcil.report.figures import style_axes

    figure = Figure(figsize=(10.0, 6.4), dpi=150, layout="constrained")
    panels = figure.subplots(2, 3)
    looks = {"gram": ("#0b5fa5", "o", "PackedGrams"), "factors": ("#c2571a", "s", "factors")}
    for column, (axis, key, label) in enumerate(
        (("classes", "classes", "classes"), ("dimensions", "dim", "dimensions"), ("tasks", "tasks", "tasks"))
    ):
        for row, (value, scale, unit) in enumerate(
            (("processor_seconds", 1.0, "processor time, s"), ("stored_bytes", 1e-6, "memory, MB"))
        ):
            axes = panels[row][column]
            if axis == "tasks":
                x = [r["tasks"] for r in found["tasks"]]
                y = [r["processor_seconds"] if row == 0 else r["class_moves"] for r in found["tasks"]]
                axes.plot(x, y, color=looks["gram"][0], marker="o", markersize=4)
                unit = "all updates, s" if row == 0 else "classes moved"
            else:
                most = max(r["classes"] for r in found["classes"]) if axis == "classes" else found[axis][0]["classes"]
                for form, (color, marker, name) in looks.items():
                    own = [r for r in found[axis] if r["form"] == form and r["classes"] <= most]
                    points = [(r[key], scale * r[value]) for r in own]
                    axes.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=4, label=name)
                    if row == 1:
                        peaks = [scale * r["peak_bytes"] for r in own]
                        axes.plot([r[key] for r in own], peaks, color=color, linewidth=0.8, linestyle=":")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel(label)
            axes.set_ylabel(unit)
            style_axes(axes, None)
    panels[0][0].legend(frameon=False, fontsize=9)
    panels[1][0].set_title("dotted: peak during the update", loc="left", fontsize=8)
    return figure


def write_figure(found: dict[str, Any], stem: Path) -> None:
    """Write STEM.png and STEM.svg."""
    from efcil.report.figures import figure_bytes

    for kind in ("png", "svg"):
        atomic_write_bytes(stem.with_suffix(f".{kind}"), figure_bytes(drawn(found), kind))


def _print(found: dict[str, Any]) -> None:
    print(f"{'':44}{'seconds':>10}{'processor':>11}{'MB':>9}{'of paper':>10}{'peak':>7}")
    for row in found["classes"] + found["dimensions"]:
        what = f"{row['classes']} classes, d = {row['dim']}, {row['images']} images, {row['form']}"
        print(
            f"{what:44}{row['seconds']:10.3f}{row['processor_seconds']:11.3f}{row['stored_bytes'] / 1e6:9.1f}"
            f"{row['of_papers']:10.3f}{row['peak_ratio']:7.2f}"
        )
    for row in found["tasks"]:
        print(f"{row['tasks']} tasks: {row['class_moves']} classes moved, {row['processor_seconds']:.2f} s")
    for row in found["compression"]:
        print(
            f"error {row['error']}: {row['rows']} rows, {row['of_gram']:.3f} of the Grams; "
            f"left out {row['left_out']:.4f}, after a move {row['left_out_after_a_move']:.4f}; "
            f"classifier changes by {row['weight_change']:.4f}"
        )
    print(f"ten times the classes: {found['tenfold_growth']:.2f} x; factors deviate by {found['factor_deviation']:.1e}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, draw, check."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(description="Cost and memory for many classes.")
    add_options(parser)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a size for tests")
    parser.add_argument("--figure", type=Path, help="write STEM.png and STEM.svg")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bound is violated")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # measure one size, given as JSON
    options = parser.parse_args(given)
    if options.one:
        print(json.dumps(measure_one(Size(**json.loads(options.one)))))
        return 0
    found = measure(options.tiny, options.threads)
    _print(found)
    write_record(options, __file__, given, scale=found)
    if options.figure is not None:
        write_figure(found, options.figure)
    failures = missed(found)
    for failure in failures:
        print("MISSED:", failure)
    return 1 if options.check and failures else 0


if __name__ == "__main__":
    sys.exit(main())
