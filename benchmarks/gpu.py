"""GPU benchmarks in one run: training steps, an epoch, augmentation, the class update, start-up.

    python benchmarks/gpu.py [--device cuda] [--out FILE.json] [--only step epoch ...] [--steps 100] [--data DIR]

- step     ResNet-18, batch 128, 32 x 32, with efcil's LwF, Step and CapturedStep in five variants, without and with a
           teacher, against an upper bound: counted operations at the measured rate of bf16 matrix products
- epoch    one epoch with efcil's trainer, including augmentation, relative to the images per second of the same step on
           a batch that stays on the device
- together the same epochs of one, two and three concurrent runs in one process, each with a thread and a stream:
           milliseconds per step of all of them
- augment  images per second of `cifar-autoaugment` (benchmarks/augment.py)
- update   one class update at 100 and 1,000 classes, d = 512, against SVD and inverse per class (benchmarks/core.py)
- startup  seconds to import, and to the first training step with an empty and with a filled compile cache

`--like tiny-imagenet` uses the size and augmentation of that set. Images are synthetic unless --data names the folder
of the set (CIFAR-100 or Tiny-ImageNet); their contents do not affect times. Times are medians of repeats with their
spread (largest minus smallest); the JSON file has raw timings. `--tiny --device cpu --steps 2` runs the same code at
test size and skips variants that need CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from efcil import data as datasets
from efcil import models
from efcil.accel.backend import Backend
from efcil.accel.cuda import Cuda
from efcil.accel.prefetch import Prefetcher
from efcil.accel.streams import thread_stream
from efcil.data.dataset import ImageSet
from efcil.experiment.specification import commit
from efcil.learners.lwf import LwF, LwFOptions
from efcil.tasks import Task, TaskStream
from efcil.training.callbacks import Callback, EpochReport
from efcil.training.image_batches import ImageBatches
from efcil.training.schedule import Schedule
from efcil.training.state import TaskData, TrainState
from efcil.training.step import Optimizer, Step
from efcil.training.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("step", "epoch", "together", "augment", "update", "startup")
VARIANTS = {  # name -> precision, compile, capture
    "fp32 eager": ("fp32", False, False),
    "bf16 eager": ("bf16", False, False),
    "bf16 captured": ("bf16", False, True),
    "bf16 compiled": ("bf16", True, False),
    "bf16 compiled + captured": ("bf16", True, True),
}
MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)  # CIFAR-100

Result = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Problem sizes."""

    backbone: str = "resnet18"
    width: int | None = None
    batch: int = 128
    side: int = 32
    classes: int = 100
    per_class: int = 500
    augment: str = "cifar-autoaugment"
    matmul: int = 8192
    warm_up: int = 10  # steps
    repeats: int = 5
    augmented: int = 50_000
    update: tuple[tuple[int, int], ...] = ((90, 3), (990, 1))  # (old classes, repeats); ten classes are added
    dim: int = 512
    dataset: str = "cifar100"


TINY = Size("resnet10", 4, 8, 8, 20, 6, "cifar-autoaugment", 64, 1, 2, 32, ((4, 2), (8, 1)), 16)
LIKE = {
    size.dataset: size for size in (Size(), Size(side=64, classes=200, augment="crop-flip", dataset="tiny-imagenet"))
}


def sibling(name: str) -> ModuleType:
    """Import another benchmark of this directory."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"benchmarks.{name}")


def summarized(raw: list[float]) -> Result:
    """Return median, spread and raw values.

    >>> summarized([3.0, 1.0, 2.0])
    {'median': 2.0, 'spread': 2.0, 'raw': [3.0, 1.0, 2.0]}
    """
    return {"median": statistics.median(raw), "spread": max(raw) - min(raw), "raw": raw}


def timed(call: Callable[[], object], count: int, repeats: int, device: torch.device) -> Result:
    """Time calls in `repeats` blocks of `count`, in seconds per call: CUDA events, or the clock on a CPU."""
    raw = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            begin.record()
            for _ in range(count):
                call()
            end.record()
            end.synchronize()
            raw.append(begin.elapsed_time(end) / 1000 / count)
        else:
            start = time.perf_counter()
            for _ in range(count):
                call()
            raw.append((time.perf_counter() - start) / count)
    return summarized(raw)


# -- operations and upper bound ----------------------------------------------------------------------------------------


def flops_per_image(size: Size, stem: str = "cifar") -> dict[str, int]:
    """Count operations (a multiply-add is two) of the backbone per image: forward, and forward + backward."""
    backbone = models.build(size.backbone, stem=stem, width=size.width)
    images = torch.zeros(2, 3, size.side, size.side)  # batch normalization of 1 x 1 maps needs two
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        backbone(images)
    with FlopCounterMode(display=False) as both:
        backbone(images).sum().backward()
    return {"forward": forward.get_total_flops() // 2, "training": both.get_total_flops() // 2}


def matmul_rate(size: Size, device: torch.device) -> Result:
    """Measure bf16 operations per second of a large matrix product."""
    side = size.matmul
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    timed(lambda: a @ b, 10, 1, device)
    seconds = timed(lambda: a @ b, 20, size.repeats, device)
    return {"side": side, "seconds": seconds, "flops_per_second": 2 * side**3 / seconds["median"]}


# -- the training step -------------------------------------------------------------------------------------------------


def stream(size: Size, data: Path | None) -> TaskStream:
    """Return ten tasks of the data set, or of noise of the same shape."""
    if data is not None:
        images = datasets.load(size.dataset, data, datasets.find(size.dataset).options()).train
    else:
        draw = np.random.default_rng(0)
        count = size.classes * size.per_class
        pixels = draw.integers(0, 256, (count, 3, size.side, size.side), dtype=np.uint8)
        images = ImageSet(pixels, np.arange(count, dtype=np.int64) % size.classes)
    return TaskStream(images, np.arange(size.classes), (size.classes // 10,) * 10)


def options_of(size: Size, augment: str = "none") -> LwFOptions:
    """Return the paper's options for CIFAR-100 at this size."""
    return LwFOptions(backbone=size.backbone, width=size.width, batch_size=size.batch, augment=augment)


def backends(device: str) -> Iterator[tuple[str, Backend | None]]:
    """Yield each variant with its backend, or None if CUDA is needed but not available."""
    place = torch.device(device)
    for name, (precision, compiled, captured) in VARIANTS.items():
        if place.type == "cuda":
            yield name, Cuda(place, precision, compile=compiled, cuda_graphs=captured)
        else:
            yield name, None if compiled or captured else Backend(place, precision)


@contextlib.contextmanager
def one_step(lwf: LwF, images: torch.Tensor, labels: torch.Tensor) -> Iterator[Callable[[], None]]:
    """Return efcil's training step on a fixed batch, captured if the backend uses CUDA graphs."""
    backend, options = lwf.backend, lwf.options
    optimizer = Optimizer(lwf, options.first, backend, momentum=options.momentum)
    lwf.train()
    pixels = ImageBatches(images, MEAN, STD, backend)
    with backend.optimizer_in_backward(lwf, optimizer):
        step = backend.step(Step(lwf.loss, optimizer, pixels, backend, frozen=lwf.frozen_forward()), lwf)
        yield lambda: step(images, labels)


def measure_steps(size: Size, device: str, steps: int, data: Path | None = None) -> Result:
    """Measure seconds per step of every variant, without and with teacher, and the fraction of the upper bound."""
    tasks = stream(size, data)
    flops, rate = flops_per_image(size), matmul_rate(size, torch.device(device))
    rows: list[Result] = []
    for name, backend in backends(device):
        if backend is None:
            rows.append({"variant": name, "left_out": "needs CUDA"})
            continue
        torch._dynamo.reset()  # compile each variant from scratch
        lwf = LwF(options_of(size), 3, backend, 0)
        for teacher in (False, True):
            task = tasks[int(teacher)]
            lwf.before_task(task)
            images, labels = (backend.tensor(array[: size.batch]) for array in (task.images, task.labels))
            began = time.perf_counter()
            with one_step(lwf, images, labels) as call:
                call()
                backend.synchronize()
                first = time.perf_counter() - began
                for _ in range(size.warm_up):
                    call()
                seconds = timed(call, steps, size.repeats, backend.device)
            work = size.batch * (flops["training"] + teacher * flops["forward"])
            ceiling = work / rate["flops_per_second"]
            row = {"variant": name, "teacher": teacher, "first_seconds": first, "seconds": seconds, "flops": work}
            rows.append({**row, "ceiling_seconds": ceiling, "share_of_ceiling": ceiling / seconds["median"]})
            del call
        del lwf
        gc.collect()
        if backend.device.type == "cuda":
            torch.cuda.empty_cache()
    return {"batch": size.batch, "steps": steps, "flops_per_image": flops, "matmul": rate, "rows": rows}


def train_epochs(lwf: LwF, task: Task, size: Size, epochs: int, each_epoch: Callable[[EpochReport], None]) -> None:
    """Train as `efcil run` does, on a task that the learner is prepared for."""
    backend = lwf.backend
    images = ImageBatches(backend.tensor(task.images), MEAN, STD, backend)
    data = TaskData(task, images, backend.tensor(task.labels), lwf.transform(size.side))
    schedule = Schedule(epochs=epochs, lr=0.01)
    with patch.object(lwf, "before_task"), patch.object(lwf, "stages", lambda task: (schedule,)):
        Trainer(lwf, [EachEpoch(each_epoch)]).fit(data)


class EachEpoch(Callback):
    """Calls a function after each epoch."""

    def __init__(self, call: Callable[[EpochReport], None]):
        self.call = call

    def on_epoch_end(self, report: EpochReport, state: TrainState) -> None:
        """Call it."""
        self.call(report)


def measure_together(size: Size, device: str, data: Path | None = None) -> list[Result]:
    """Measure milliseconds per step of one, two and three concurrent runs, with and without teacher."""
    backend = Backend.choose(device)
    tasks = stream(size, data)
    block = Prefetcher.MAX_EPOCHS if backend.device.type == "cuda" else 1
    learners = [LwF(options_of(size, size.augment), 3, backend, seed) for seed in range(3)]
    found = []
    for task in (tasks[0], tasks[1]):
        for lwf in learners:
            lwf.before_task(task)
        for count in (1, 2, 3):
            found.append({"teacher": task.index > 0, "runs": count, **_together(learners[:count], task, size, block)})
    return found


def _together(learners: list[LwF], task: Task, size: Size, block: int) -> Result:
    """Train learners concurrently; time them from when all have finished `block` epochs until all have ended."""
    met, begun = threading.Barrier(len(learners), lambda: begun.append(time.perf_counter())), list[float]()

    def one(lwf: LwF) -> None:
        place = lwf.backend.device
        on = torch.cuda.stream(thread_stream(place, "run")) if place.type == "cuda" else contextlib.nullcontext()
        with on:
            train_epochs(lwf, task, size, (1 + size.repeats) * block, lambda report: _meet(met, report, block))

    with ThreadPoolExecutor(len(learners)) as pool:
        for future in [pool.submit(one, lwf) for lwf in learners]:
            future.result()
    seconds = time.perf_counter() - begun[0]
    steps = size.repeats * block * math.ceil(len(task) / size.batch) * len(learners)
    return {"seconds": seconds, "steps": steps, "step_seconds": seconds / steps}


def _meet(met: threading.Barrier, report: EpochReport, block: int) -> None:
    if report.epoch + 1 == block:
        met.wait(600)


def measure_epochs(size: Size, device: str, steps: int, data: Path | None = None) -> Result:
    """Measure seconds per epoch as in `efcil run`: shuffled, augmented, without and with teacher.

    The same step on a resident batch shows the cost of loading images.
    """
    backend = Backend.choose(device)
    block = Prefetcher.MAX_EPOCHS if backend.device.type == "cuda" else 1  # epochs prepared at once
    tasks = stream(size, data)
    lwf = LwF(options_of(size, size.augment), 3, backend, 0)
    found: Result = {"machine": backend.name, "compile": backend.compile, "capture": backend.cuda_graphs}
    for teacher in (False, True):
        task = tasks[int(teacher)]
        lwf.before_task(task)
        ends: list[float] = []

        def note(report: EpochReport, ends: list[float] = ends) -> None:
            backend.synchronize()
            ends.append(time.perf_counter())

        train_epochs(lwf, task, size, size.repeats * block + 1, note)
        raw = summarized([(end - begin) / block for begin, end in pairwise(ends[::block])])  # the first block compiles
        with one_step(lwf, *(backend.tensor(a[: size.batch]) for a in (task.images, task.labels))) as call:
            timed(call, size.warm_up, 1, backend.device)
            step = timed(call, steps, size.repeats, backend.device)
        fed, resident = len(task) / raw["median"], size.batch / step["median"]
        rates = {"images_per_second": fed, "resident_images_per_second": resident, "share": fed / resident}
        row = {"images": len(task), "seconds": raw, "step_seconds": step, **rates}
        found["teacher" if teacher else "no_teacher"] = row
        del call
    return found


# -- other benchmarks --------------------------------------------------------------------------------------------------


def measure_augment(size: Size, device: str) -> Result:
    """Measure images per second of `cifar-autoaugment`; each raw value is the best of two passes."""
    runs = [sibling("augment").measure(size.augmented, device, 2) for _ in range(size.repeats)]
    return {"images": size.augmented} | {key: summarized([run[key] for run in runs]) for key in runs[0]}


def measure_update(size: Size, device: str) -> list[Result]:
    """Measure the class update for each number of classes, with both rank rules and the naive version."""
    core = sibling("core")
    found = []
    for classes, repeats in size.update:
        runs = [core.measure(classes, size.dim, device, 1, tenfold=False) for _ in range(repeats)]
        row: Result = {"classes": classes + core.NEW_CLASSES, "dim": size.dim}
        for key in ("naive_seconds", "positive_seconds", "numerical_seconds"):
            row[key] = summarized([run[key] for run in runs])
        for rule in ("positive", "numerical"):
            row[f"{rule}_speedup"] = row["naive_seconds"]["median"] / row[f"{rule}_seconds"]["median"]
            row[f"{rule}_deviation"] = max(run[f"{rule}_deviation"] for run in runs)
        found.append(row)
    return found


# -- start-up ----------------------------------------------------------------------------------------------------------


def first_step(size: Size, device: str) -> Result:
    """Build the classifier and take one step on the fastest path, in a separate process."""
    began = time.perf_counter()
    backend = Backend.choose(device)
    lwf = LwF(options_of(size), 3, backend, 0)
    task = stream(replace(size, per_class=13), None)[0]
    lwf.before_task(task)
    images, labels = (backend.tensor(array[: size.batch]) for array in (task.images, task.labels))
    built = time.perf_counter()
    with one_step(lwf, images, labels) as call:
        call()
        backend.synchronize()
    return {"build_seconds": built - began, "first_step_seconds": time.perf_counter() - built}


def _child(arguments: list[str], cache: str) -> tuple[float, str]:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": str(Path(cache, "triton"))}
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"start-up failed in a child process:\n{done.stderr[-2000:]}")
    return time.perf_counter() - began, done.stdout.strip().splitlines()[-1]


def measure_startup(device: str, tiny: bool) -> Result:
    """Measure seconds to import the package, and to the first step with an empty and with a filled compile cache."""
    importing = "import time; a = time.perf_counter(); import efcil.experiment.run; print(time.perf_counter() - a)"
    command = [str(Path(__file__).resolve()), "--first-step", "--device", device, *(["--tiny"] if tiny else [])]
    with tempfile.TemporaryDirectory() as cache:
        imports = [float(_child(["-c", importing], cache)[1]) for _ in range(1 if tiny else 3)]
        found: Result = {"import_seconds": summarized(imports)}
        for state in ("cold", "warm"):
            wall, line = _child(command, cache)
            found[state] = {"process_seconds": wall, **json.loads(line)}
    return found


# -- together ----------------------------------------------------------------------------------------------------------


def measure(size: Size, device: str, steps: int, only: tuple[str, ...] = SECTIONS, data: Path | None = None) -> Result:
    """Run the named sections and record machine and commit."""
    on_gpu = device.startswith("cuda")
    result: Result = {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "images": "real" if data is not None else "synthetic",
        "side": size.side,
    }
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: measure_steps(size, device, steps, data),
        "epoch": lambda: measure_epochs(size, device, steps, data),
        "together": lambda: measure_together(size, device, data),
        "augment": lambda: measure_augment(size, device),
        "update": lambda: measure_update(size, device),
        "startup": lambda: measure_startup(device, size == TINY),
    }
    for name in SECTIONS:
        if name in only:
            began = time.perf_counter()
            result[name] = calls[name]()
            print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    return result


def _plus_minus(value: Result, scale: float = 1.0, digits: int = 3) -> str:
    return f"{value['median'] * scale:.{digits}f} (spread {value['spread'] * scale:.{digits}f})"


def lines(result: Result) -> Iterator[str]:
    """Format the result as text."""
    yield f"{result['device']}, torch {result['torch']}, commit {result['commit']}, {result['images']} images"
    if "step" in result:
        step = result["step"]
        rate, flops = step["matmul"]["flops_per_second"] / 1e12, step["flops_per_image"]
        yield f"bf16 matrix product: {rate:.3g} TFLOP/s"
        yield f"operations an image: forward {flops['forward'] / 1e9:.4g} GFLOP, training {flops['training'] / 1e9:.4g}"
        yield f"{'step, batch ' + str(step['batch']):34}{'teacher':>8}{'ms':>26}{'ceiling ms':>12}{'of ceiling':>12}"
        for row in step["rows"]:
            if "left_out" in row:
                yield f"{row['variant']:34}{row['left_out']}"
            else:
                yield (
                    f"{row['variant']:34}{'yes' if row['teacher'] else 'no':>8}{_plus_minus(row['seconds'], 1e3):>26}"
                    f"{row['ceiling_seconds'] * 1e3:12.3f}{row['share_of_ceiling']:12.1%}"
                )
    for name in ("no_teacher", "teacher"):
        if "epoch" in result:
            epoch = result["epoch"][name]
            yield (
                f"epoch of {epoch['images']} images, {name.replace('_', ' ')}: {_plus_minus(epoch['seconds'])} s, "
                f"{epoch['images_per_second']:,.0f} images/s, {epoch['share']:.2f} of the step on a resident batch"
            )
    for row in result.get("together", ()):
        words = f"{row['runs']} at once, {'with' if row['teacher'] else 'without'} teacher"
        yield f"{words}: {row['step_seconds'] * 1e3:.3f} ms a step of all of them"
    if "augment" in result:
        speed, ratio = (result["augment"][key] for key in ("images_per_second", "ratio"))
        yield f"cifar-autoaugment: {_plus_minus(speed, digits=0)} images/s, {ratio['median']:.1f} x Pillow on one core"
    for row in result.get("update", ()):
        for rule in ("positive", "numerical"):
            yield (
                f"class update, {row['classes']} classes, {rule}: {_plus_minus(row[f'{rule}_seconds'], digits=4)} s, "
                f"{row[f'{rule}_speedup']:.1f} x naive {row['naive_seconds']['median']:.4f} s, "
                f"deviation {row[f'{rule}_deviation']:.1e}"
            )
    if "startup" in result:
        startup = result["startup"]
        yield f"import: {_plus_minus(startup['import_seconds'])} s"
        for state in ("cold", "warm"):
            one = startup[state]
            yield (
                f"first step, compile cache {state}: {one['first_step_seconds']:.2f} s after {one['build_seconds']:.2f}"
                f" s of set-up; whole process {one['process_seconds']:.2f} s"
            )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="directory with the data set; synthetic images without it")
    parser.add_argument("--like", choices=LIKE, default="cifar100", help="size and augmentation of steps and epochs")
    parser.add_argument("--out", type=Path, help="JSON file with all timings")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--steps", type=int, default=100, help="training steps in each timed block")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    parser.add_argument("--first-step", action="store_true", help=argparse.SUPPRESS)  # used by `startup`
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("CUDA is not available; use --device cpu --tiny --steps 2 for a trial")
    if options.tiny and options.data is not None:
        parser.error("--tiny uses synthetic images; omit --data")
    size = TINY if options.tiny else LIKE[options.like]
    if options.first_step:
        print(json.dumps(first_step(size, options.device)))
        return 0
    result = measure(size, options.device, options.steps, tuple(options.only), options.data)
    print("\n".join(lines(result)))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
