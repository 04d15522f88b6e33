"""How much faster a CPU computes with the forms that efcil gives to networks of its own than without them?

    python benchmarks/cpu.py [--repeats 5] [--images 512] [--only NAME ...] [--check] [--out F] [--machine "..."]

Both forms alternate in one run, in one process with OMP_NUM_THREADS threads (1 unless set) that sleep while they wait:

Seconds are those of computing, not of the clock, which shows what else the machine does.

- plain  contiguous weights, frozen networks as they are, features in batches of up to 1,024 images: as it was before
- ours   what `Backend` does: channels-last, frozen networks folded, features in batches that fit the caches

For each network: an epoch of a first task (`train`), one of a later task with its teacher (`distill`), and features of
the images (`extract`). `teach` is the second teaching of a model: 500 pictures of 5 new classes. With `--check` a ratio
below its bound is an error: 1.2 and for `extract` 1.4 for the ResNet-18 of width 16, 1.2 for `teach`, 0.95 (no slower
but for noise) for the others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.record import add_options, write_record
from efcil.accel.backend import Backend, Inference
from efcil.data.dataset import ImageSet
from efcil.learners.lwf import LwF, LwFOptions
from efcil.product import IncrementalClassifier
from efcil.tasks import Task
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.schedule import Schedule
from efcil.training.state import TaskData
from efcil.training.trainer import Trainer

Seconds = dict[str, dict[str, list[float]]]  # what -> form -> of each repeat


class Plain(Backend):
    """The backend without the forms of a CPU."""

    def place(self, module: Any) -> Any:
        """Move a module to the device."""
        return module.to(self.device)

    def fold(self, backbone: nn.Module) -> nn.Module:
        """Return the network as it is."""
        return backbone

    def inference(self, backbone: nn.Module) -> Inference:
        """Return the network as it is, in large batches."""
        return Inference(backbone)


@dataclass(frozen=True)
class Network:
    """A network, its images and its batches."""

    backbone: str
    width: int | None
    size: int
    batch: int
    bounds: tuple[float, float]  # of the ratios: training, extraction
    channels: int = 3


NETWORKS = {
    "resnet18-16": Network("resnet18", 16, 32, 128, (1.2, 1.4)),
    "resnet10-32": Network("resnet10", 32, 64, 32, (0.95, 0.95)),
    "resnet18-64": Network("resnet18", 64, 32, 64, (0.95, 0.95)),
    "digits": Network("resnet10", 16, 8, 64, (0.95, 0.75), 1),  # folding takes 2 ms, and its images 15
    "efficientnet-lite0": Network("efficientnet-lite0", None, 224, 16, (0.95, 0.95)),
}
TEACH_BOUND = 1.2


def forms() -> dict[str, Backend]:
    """Return both backends."""
    return {"plain": Plain(torch.device("cpu")), "ours": Backend(torch.device("cpu"))}


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that all threads computed in a call: other programs change them little."""
    began = time.process_time()
    work()
    return time.process_time() - began


class Trial:
    """One network in one form: what is timed of it."""

    def __init__(self, network: Network, backend: Backend, count: int):
        once = Schedule(epochs=1, lr=0.01, milestones=())
        options = LwFOptions(
            backbone=network.backbone, width=network.width, batch_size=network.batch, first=once, later=once
        )
        draw = np.random.default_rng(0)
        images = draw.integers(0, 256, (count, network.channels, network.size, network.size), dtype=np.uint8)
        labels = np.arange(count) % 4
        self.learner = LwF(options, network.channels, backend, 0, network.size)
        pixels = ImageBatches(torch.from_numpy(images), (0.5,) * network.channels, (0.25,) * network.channels, backend)
        self.data = [
            TaskData(
                Task(t, 4 * t, 4, ImageSet(images, labels + 4 * t)), pixels, torch.from_numpy(labels + 4 * t), None
            )
            for t in (0, 1)
        ]
        self.fit(0)

    def fit(self, task: int) -> None:
        """Train an epoch of a task; its classes are new each time."""
        head = self.learner.head.state_dict()
        kept = {name: value[: 4 * task] if value.ndim == 2 else value for name, value in head.items()}
        self.learner.head.resize_like(kept)
        self.learner.head.load_state_dict(kept)
        Trainer(self.learner).fit(self.data[task])

    def extract(self) -> None:
        """Compute the features of the images."""
        extract(self.learner.backbone, self.data[0].images, self.learner.backend)


def measure_network(network: Network, count: int, repeats: int) -> Seconds:
    """Time both forms in turns."""
    trials = {form: Trial(network, backend, count) for form, backend in forms().items()}
    works: dict[str, Callable[[Trial], None]] = {
        "train": lambda trial: trial.fit(0),
        "distill": lambda trial: trial.fit(1),
        "extract": Trial.extract,
    }
    found: Seconds = {}
    for what, work in works.items():
        found[what] = in_turns({form: lambda t=trial, w=work: w(t) for form, trial in trials.items()}, repeats)
    return found


def in_turns(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Time each form in turns, after one call that is not counted."""
    for work in works.values():
        work()
    seconds: dict[str, list[float]] = {form: [] for form in works}
    for _ in range(repeats):
        for form, work in works.items():
            seconds[form].append(timed(work))
    return seconds


def measure_teaching(count: int, repeats: int, epochs: int = 5) -> Seconds:
    """Time the second teaching of a model of each form."""
    draw = np.random.default_rng(0)
    names = np.array([f"class {i % 5}" for i in range(count)])
    images = draw.integers(0, 256, (count, 64, 64, 3), dtype=np.uint8)

    def taught(backend: Backend) -> IncrementalClassifier:
        model = IncrementalClassifier("dpcr", backbone="resnet10", width=32, size=64, device="cpu", progress=False)
        model._backend = backend
        return model.learn(images, names, epochs=1)

    seconds: dict[str, list[float]] = {form: [] for form in forms()}
    later = np.array([f"later {i % 5}" for i in range(count)])
    for _ in range(repeats):
        for form, backend in forms().items():
            model = taught(backend)
            seconds[form].append(timed(lambda m=model: m.learn(images, later, epochs=epochs)))
    return {"later teaching": seconds}


def rows(found: dict[str, Seconds]) -> Iterator[dict[str, Any]]:
    """Yield medians of both forms, the median of the ratios of pairs, its bound, and the seconds."""
    for name, parts in found.items():
        for what, seconds in parts.items():
            yield {
                "name": name,
                "what": what,
                **{form: statistics.median(times) for form, times in seconds.items()},
                "ratio": statistics.median(a / b for a, b in zip(seconds["plain"], seconds["ours"], strict=True)),
                "bound": TEACH_BOUND if name == "teach" else NETWORKS[name].bounds[what == "extract"],
                "seconds": seconds,
            }


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--images", type=int, default=512, help="images of 32 x 32: as many pixels of others")
    parser.add_argument("--only", nargs="+", choices=[*NETWORKS, "teach"], default=[*NETWORKS, "teach"])
    parser.add_argument("--pictures", type=int, default=500, help="pictures of the later teaching")
    parser.add_argument("--check", action="store_true")
    add_options(parser)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Measure, print, store and check."""
    given = sys.argv[1:] if given is None else given
    o = arguments(given)
    found: dict[str, Seconds] = {}
    for name in o.only:
        if name == "teach":
            found[name] = measure_teaching(o.pictures, o.repeats)
        else:
            network = NETWORKS[name]
            count = max(network.batch, min(4 * o.images, o.images * 32**2 // network.size**2))
            found[name] = measure_network(network, count, o.repeats)
    made = list(rows(found))
    for row in made:
        print("{name} {what}: {plain:.3f} s plain, {ours:.3f} s ours, {ratio:.2f} x (at least {bound:g})".format(**row))
    threads = {"count": torch.get_num_threads(), "policy": os.environ["OMP_WAIT_POLICY"]}
    write_record(o, __file__, given, torch=torch.__version__, threads=threads, cpu_forms=made)
    return int(o.check and any(row["ratio"] < row["bound"] for row in made))


if __name__ == "__main__":
    sys.exit(main())
