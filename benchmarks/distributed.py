"""Speedup of training with two processes on two cores over one process: images per second of the training loop.

    python benchmarks/distributed.py [--processes 2] [--width 16] [--batch 64] [--images 256] [--repeats 9]
                                     [--check] [--out F]

torchrun starts the processes, each with one thread on its own core. Both modes alternate in one run:

- together  all of them train on their shares of every batch; gradients and running statistics are reduced each step
- alone  the first one trains on full batches, the others sleep

`--check` fails if the speedup is below three quarters of the number of processes (1.5 for two). The speedup is the
median ratio over pairs of consecutive turns. Best turns are not comparable on a shared machine, since synchronized
processes need both cores to be free at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from efcil.accel.backend import Backend
from efcil.data.dataset import ImageSet
from efcil.learners.lwf import LwF, LwFOptions
from efcil.tasks import Task
from efcil.training.callbacks import Callback, EpochReport
from efcil.training.distributed import SINGLE_PROCESS, World, init_distributed
from efcil.training.image_batches import ImageBatches
from efcil.training.schedule import Schedule
from efcil.training.state import TaskData, TrainState
from efcil.training.trainer import Trainer

CLASSES, SIDE = 10, 32
WANTED = 0.75  # of a perfect speedup: 1.5 for two processes


class Stopwatch(Callback):
    """Notes when epochs end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_epoch_end(self, report: EpochReport, state: TrainState) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


def rate(world: World, o: argparse.Namespace) -> float:
    """Train two epochs of a second task (with a teacher) and return images per second of the second epoch."""
    backend = Backend(torch.device("cpu"), world=world)
    options = LwFOptions(backbone="resnet18", width=o.width, augment="crop-flip", batch_size=o.batch)
    learner = LwF(options, 3, backend, 0)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (o.images, 3, SIDE, SIDE), dtype=np.uint8)
    labels = rng.integers(CLASSES, 2 * CLASSES, o.images)
    learner.before_task(Task(0, 0, CLASSES, ImageSet(pixels[:1], labels[:1])))
    learner.stages = lambda task: (Schedule(epochs=2, lr=0.01),)  # type: ignore[method-assign]
    images = ImageBatches(torch.from_numpy(pixels), (0.5,) * 3, (0.25,) * 3, backend)
    task = Task(1, CLASSES, CLASSES, ImageSet(pixels, labels))
    data = TaskData(task, images, torch.from_numpy(labels), learner.transform(SIDE))
    watch = Stopwatch()
    Trainer(learner, [watch]).fit(data)
    return float(o.images // o.batch * o.batch / (watch.ends[1] - watch.ends[0]))


def work(o: argparse.Namespace) -> None:
    """Run one of the processes; the first one writes the result."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"together": [], "alone": []}
    with init_distributed() as world:
        own = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {own[world.local_rank % len(own)]})
        for _ in range(o.repeats):
            found["together"].append(rate(world, o))
            with world.local_main_first():
                if world.is_main:
                    found["alone"].append(rate(SINGLE_PROCESS, o))
    if world.is_main:
        o.out.write_text(json.dumps(found))


def measure(o: argparse.Namespace) -> dict[str, Any]:
    """Run the processes; return both rates and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "rates.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={o.processes}"]
        sizes = [f"--{name}={getattr(o, name)}" for name in ("processes", "width", "batch", "images", "repeats")]
        command = [*launcher, __file__, "--worker", f"--out={to}", *sizes]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found: dict[str, list[float]] = json.loads(to.read_text())
    ratios = [both / one for both, one in zip(found["together"], found["alone"], strict=True)]
    return {
        "processes": o.processes,
        "cores": len(os.sched_getaffinity(0)),
        "problem": f"LwF, ResNet-18 of width {o.width}, {SIDE} x {SIDE}, batches of {o.batch}",
        "images_per_second": {name: statistics.median(values) for name, values in found.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "turns": found,
        "wanted": WANTED * o.processes,
    }


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main() -> None:
    o = arguments()
    if o.worker:
        work(o)
        return
    result = measure(o)
    print(json.dumps(result, indent=2))
    if o.out:
        o.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if o.check and result["ratio"] < result["wanted"]:
        sys.exit(f"{result['ratio']:.2f} times one process, wanted {result['wanted']:.2f}")


if __name__ == "__main__":
    main()
