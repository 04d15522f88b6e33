"""Implementations of the captured training step, timed in one run: ResNet-18, batch 128, 32 x 32, bf16.

    python benchmarks/steps.py [--out FILE.json] [--steps 200]    on a CUDA device
    python benchmarks/steps.py --device cpu --tiny --steps 2      the same code, neither compiled nor captured

- compiled   the network compiled by torch.compile
- in order   the network as few fused kernels (efcil.accel.fused_resnet) on one stream
- branches   the same, with weight gradients and shortcuts on parallel branches of the graph

A row has milliseconds per step (median of five blocks), the seconds until the first step, and checks of the result:

- deviation  distance of the weights after 20 steps from those of `compiled`, relative to their total change; `again` is
             the deviation of two runs of the same graph, as a baseline
- race       deviation of one replayed step from the same step outside a graph, the maximum over parameters, relative to
             its change, in ten replays from each of two states; `chance` is that of the step run twice.
             It reveals branches that read overwritten memory

The fastest one is also timed with precomputed teacher features (`precompute_teacher`), with a list of its kernels, and
with a teacher on a separate branch (`teacher: beside`). `--like tiny-imagenet` uses 64 x 64.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from efcil.accel.backend import Backend
from efcil.accel.captured_step import CapturedStep
from efcil.accel.fused_resnet import FusedResNet
from efcil.experiment.specification import commit
from efcil.learners.lwf import LwF
from efcil.training.batch import FrozenForward
from efcil.training.image_batches import ImageBatches
from efcil.training.step import Optimizer, Step

gpu = importlib.import_module("gpu" if __name__ == "__main__" else "benchmarks.gpu")  # the file in this directory

WAYS = ("compiled", "in order", "branches")
LONG, REPLAYS = 20, 10  # steps compared as a sequence, and replays of one step
Row = dict[str, Any]


class Ways:
    """One learner and the implementations of its step, compiled once."""

    def __init__(self, size: Any, device: str):
        self.size = size
        self.backend = Backend.choose(device) if device.startswith("cuda") else Backend(torch.device("cpu"), "bf16")
        self.tasks = gpu.stream(size, None)
        self.lwf = LwF(gpu.options_of(size), 3, self.backend, 0)
        net = self.lwf.student.backbone
        self.compiled = self.backend.maybe_compile(net)
        self.ours = FusedResNet(net, torch.bfloat16)
        self.lwf._modules.pop("student_features", None)  # a function cannot replace a module
        self.optimizer: Optimizer | None = None
        self.reference: dict[str, list[Tensor]] = {}  # weights of the first implementation, for each kind of teacher

    def begin(self, teacher: str) -> None:
        """Prepare the first batch of the first task, or of the second task with its teacher `ahead` or `beside`."""
        task = self.tasks[int(teacher != "none")]
        if teacher != "beside":
            self.lwf.before_task(task)
        self.lwf.train()
        self.images, self.labels = (self.backend.tensor(a[: self.size.batch]) for a in (task.images, task.labels))
        self.pixels = ImageBatches(self.images, gpu.MEAN, gpu.STD, self.backend)
        self.seen: tuple[Tensor, ...] = ()
        net = self.lwf.teacher.backbone
        folded = self.backend.frozen(net, net).ahead
        assert folded is not None
        self.frozen = FrozenForward(folded) if teacher == "beside" else None
        if teacher == "ahead":
            with torch.no_grad(), self.backend.autocast():
                self.seen = (folded(self.pixels.normalize(self.images)),)
        self.teacher = teacher
        self.start = [tensor.clone() for tensor in self.lwf.student.state_dict().values()]

    def choose(self, way: str) -> None:
        """Select the implementation."""
        self.lwf.student_features = (lambda x: self.compiled(x)) if way == "compiled" else self.ours

    @contextlib.contextmanager
    def recorded(self, way: str) -> Iterator[tuple[Step, Callable[[], None], list[Tensor]]]:
        """Yield the step, its captured graph, and all tensors that it changes, in their initial state."""
        self.choose(way)
        self.restore(list(self.lwf.student.state_dict().values()), self.start)
        self.optimizer = optimizer = Optimizer(self.lwf, self.lwf.options.first, self.backend)
        step = Step(self.lwf.loss, optimizer, self.pixels, self.backend, frozen=self.frozen)
        batch = (self.images, self.labels, *self.seen)
        call: Step | CapturedStep = step
        with self.backend.optimizer_in_backward(self.lwf, optimizer):
            if self.backend.cuda_graphs:
                # Without forking streams there are no branches.
                one = mock.patch("torch.cuda.is_current_stream_capturing", return_value=False)
                with one if way == "in order" else contextlib.nullcontext():
                    call = CapturedStep(step, self.lwf, *batch)
            changed = [*self.lwf.student.state_dict().values(), *optimizer.state_dict().values()]
            yield step, lambda: call(*batch), changed
            optimizer.update.zero_grad()

    def restore(self, kept: list[Tensor], values: list[Tensor]) -> None:
        """Restore tensors; momentum buffers, which are not in `values`, are set to zero."""
        with torch.no_grad():
            for index, tensor in enumerate(kept):
                tensor.copy_(values[index]) if index < len(values) else tensor.zero_()
        if self.optimizer is not None:
            self.optimizer.sync_copies()

    def weights(self) -> list[Tensor]:
        """Return a copy of all trained weights."""
        return [p.detach().double() for p in self.lwf.student.parameters()]

    def measured(self, way: str, steps: int, most: int = 0) -> Row:
        """Compare and time one implementation; with `most`, list its kernels."""
        row: Row = {"way": way, "teacher": self.teacher}
        on_gpu = self.backend.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        with self.recorded(way) as (step, call, kept):
            call()
            self.backend.synchronize()
            row["first_seconds"] = time.perf_counter() - began
            gpu.timed(call, self.size.warm_up, 1, self.backend.device)
            found = gpu.timed(call, steps, self.size.repeats, self.backend.device)
            row |= {"ms": 1000 * found["median"], "raw": found["raw"]}
            if on_gpu:
                row["memory_mib"] = torch.cuda.max_memory_allocated() >> 20
            row |= self.compared(step, call, kept)
            if most:
                row["kernels"] = kernels(call, on_gpu, most=most)
        return row

    def compared(self, step: Step, call: Callable[[], None], kept: list[Tensor]) -> Row:
        """Return the deviation from the first implementation, and of a replayed step from the eager step."""
        self.restore(kept, self.start)
        begin = self.weights()
        ends = []
        for _ in range(2):
            self.restore(kept, self.start)
            for _ in range(LONG):
                call()
            ends.append(self.weights())
        went = distance(self.reference.setdefault(self.teacher, ends[0]), begin)
        row = {
            "deviation": distance(ends[0], self.reference[self.teacher]) / went,
            "again": distance(ends[0], ends[1]) / went,
        }
        batch = (self.images, self.labels, *self.seen)
        worst, chance = 0.0, 0.0
        for state in (self.start, [tensor.clone() for tensor in kept]):
            self.restore(kept, state)
            before = self.weights()
            step(*batch)
            wanted = self.weights()
            self.restore(kept, state)
            step(*batch)
            chance = max(chance, apart(self.weights(), wanted, before))
            for _ in range(REPLAYS):
                self.restore(kept, state)
                call()
                worst = max(worst, apart(self.weights(), wanted, before))
        return row | {"race": worst, "chance": chance}


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the distance of two lists of tensors, each as one vector."""
    return sum(float((a - b).square().sum()) for a, b in zip(some, others, strict=True)) ** 0.5


def apart(found: list[Tensor], wanted: list[Tensor], before: list[Tensor]) -> float:
    """Return the largest relative deviation of parameter changes since `before`."""
    shares = [
        float((a - b).norm() / (b - c).norm().clamp_min(1e-12))
        for a, b, c in zip(found, wanted, before, strict=True)
        if b.numel()
    ]
    return max(shares)


def kernels(call: Callable[[], object], on_gpu: bool, steps: int = 5, most: int = 60) -> list[tuple[str, float, float]]:
    """Return the slowest kernels: name, calls per step, microseconds per step."""
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as seen:
        for _ in range(steps):
            call()
        if on_gpu:
            torch.cuda.synchronize()

    def spent(event: Any) -> float:
        return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)

    found = sorted(seen.key_averages(), key=spent, reverse=True)
    total = [("all", sum(e.count for e in found) / steps, sum(spent(e) for e in found) / steps)]
    return total + [(e.key[:100], e.count / steps, spent(e) / steps) for e in found[:most]]


def said(row: Row) -> None:
    """Print a row."""
    print(json.dumps({k: v for k, v in row.items() if k not in ("raw", "kernels")}), flush=True)
    for name, count, microseconds in row.get("kernels", []):
        print(f"{microseconds:9.1f} us {count:6.1f}x {name}", flush=True)


def rows(ways: Ways, steps: int) -> Iterator[Row]:
    """Yield a row for each implementation, also for failed ones."""

    def tried(way: str, most: int = 0) -> Row:
        try:
            return ways.measured(way, steps, most)
        except Exception as error:  # keep the other measurements
            traceback.print_exc()
            return {"way": way, "teacher": ways.teacher, "failed": f"{type(error).__name__}: {error}"[:2000]}

    ways.begin("none")
    found = []
    for way in WAYS:
        found.append(tried(way))
        yield found[-1]
    best = min((row for row in found if "ms" in row), key=lambda row: row["ms"], default={"way": "compiled"})["way"]
    ways.begin("ahead")
    yield tried(best, most=60)
    ways.begin("beside")
    yield tried(best)


def main(arguments: list[str] | None = None) -> int:
    """Measure all implementations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    parser.add_argument("--out", type=Path, help="JSON file, written after every row")
    parser.add_argument("--steps", type=int, default=200, help="steps in each of five timed blocks")
    parser.add_argument("--like", choices=gpu.LIKE, default="cifar100", help="data set whose sizes to use")
    asked = parser.parse_args(arguments)
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("CUDA is not available; use --device cpu --tiny --steps 2 for a trial")
    began = time.perf_counter()
    ways = Ways(gpu.TINY if asked.tiny else gpu.LIKE[asked.like], asked.device)
    device = ways.backend.name.partition(",")[0]
    raw: Row = {"device": device, "torch": torch.__version__, "seconds": 0.0, "ways": []}
    found: Row = {"command": f"python benchmarks/steps.py --like {asked.like}", "commit": commit(), "raw": raw}

    def keep(row: Row) -> None:
        raw["ways"].append(row)
        raw["seconds"] = time.perf_counter() - began
        if asked.out is not None:
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    for row in rows(ways, asked.steps):
        said(row)
        keep(row)
    print(f"{time.perf_counter() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
