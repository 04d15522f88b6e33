"""What tests/training/test_distributed.py computes in two processes, and once more alone, to compare.

`python tests/support/distributed_worker.py OUT` in each process that torchrun, or a test, has started; the names of
`CASES` after OUT choose some.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from efcil.accel.backend import Backend
from efcil.config import build
from efcil.core.metrics import AccuracyMatrix
from efcil.data import augment
from efcil.data.dataset import ImageSet
from efcil.errors import ConfigError, DataError, FailedOnOtherRank
from efcil.features import TaskFeatures
from efcil.learners import LEARNERS
from efcil.learners.base import TrainingOptions
from efcil.methods import FROZEN, METHODS
from efcil.protocol import Evaluator
from efcil.tasks import Task, TaskStream
from efcil.tensor_files import save_tensors
from efcil.training.distributed import init_distributed
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.schedule import Schedule
from efcil.trajectory import Trajectory
from problems import TINY, Watch, blobs, draw, fit_task, follow_stream

CPU = Backend(torch.device("cpu"))
WHOLE = {
    "dpcr": 1,
    "dpcr-plus": 1,
    "acil": 1,
    "icarl": 1,
    "podnet": 1,
    "foster": 1,
    "pass": 1,
    "joint": 1,
}  # a method of each kind


class Bare(nn.Module):
    """What the trainer asks of a learner, around a network that is no learner of ours."""

    views, seed, num_old_classes = 0, 0, 0

    def __init__(self):
        super().__init__()
        self.loss_generator = torch.Generator()

    def stages(self, task):
        return (self.options.first,)

    def before_task(self, task):
        pass

    def training_data(self, stage, images, labels):
        return images, labels

    def frozen_forward(self):
        return None


class Student(Bare):
    """A small network without batch normalization: a step in shares must be the step on the whole batch."""

    def __init__(self, backend):
        super().__init__()
        torch.manual_seed(0)
        self.backend = backend
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 8))
        self.head = nn.Linear(8, 6)
        self.unused = nn.Linear(2, 2)  # no gradient: it must stay as it is

    def loss(self, batch):
        features = self.features(batch.images)
        return cross_entropy(self.head(features), batch.labels) + 0.1 * self.backend.world.norm(features)


def trained(world, module, epochs, last="keep", size=4, rows=13, transform=None, backend=CPU):
    """Train on the first rows of a small problem; return the losses."""
    backend, data, losses = replace(backend, world=world), blobs(), []
    pixels = ImageBatches(torch.from_numpy(data.train.images[:rows].copy()), data.mean, data.std, backend)
    module.backend = backend
    module.options = TrainingOptions(batch_size=size, last_batch=last, first=Schedule(epochs=epochs, lr=0.05))
    labels = torch.from_numpy(data.train.labels[:rows])
    task = Task(0, 0, 6, ImageSet(data.train.images[:rows], data.train.labels[:rows]))
    fit_task(module, task, pixels, labels, transform, Watch(lambda report, state: losses.append(report.loss)))
    return losses


def training(world):
    """Batches of 4, 4, 4 and 1: the last has fewer rows than there are processes."""
    found = {}
    for last in ("keep", "wrap", "drop"):
        student = Student(replace(CPU, world=world))
        losses = trained(world, student, 3, last, transform=augment.make_transform("crop-flip", 8))
        found |= {f"{last}.{k}": v.clone() for k, v in student.state_dict().items()}
        found[f"{last}.losses"] = torch.tensor(losses)
    return found


class Normalized(Bare):
    """Normalizes its input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(3 * 64, 6)

    def loss(self, batch):
        return cross_entropy(self.head(self.norm(batch.images).flatten(1)), batch.labels)


def normalization(world):
    """One step on a batch of five rows."""
    module = Normalized()
    trained(world, module, 1, size=5, rows=5)
    return {"mean": module.norm.running_mean, "variance": module.norm.running_var}


def statistics(world):
    """Of features that all processes hold; class 9 is in one share alone, 11 rows do not divide."""
    labels = torch.tensor([4, 4, 9, 9, 9, 4, 2, 2, 4, 2, 2])
    stats = world.class_stats(draw(11, 5, seed=3) * 1e3, labels)
    one = world.class_stats(draw(1, 5), torch.tensor([1]))
    return {**stats.state(), "gram": stats.gram, "one": one.mean}


def untrained(world):
    backend, data = replace(CPU, world=world), blobs()
    kind = LEARNERS["lwf"]
    learner = kind(kind.options_type(**TINY), data.channels, backend, 0)
    stream = TaskStream(data.train, np.arange(6), (4, 2))
    learner.before_task(stream[0])
    return backend, data, learner, stream


def images(world):
    """Features, statistics and predictions from images with the same weights."""
    backend, data, learner, stream = untrained(world)
    task = stream[0]
    pixels = ImageBatches(backend.tensor(task.images[:47]), data.mean, data.std, backend)
    learned = TaskFeatures(0, backend.tensor(task.labels[:47]), 0, learner, pixels, learner.transform(8))
    trajectory = Trajectory(learner, {"dpcr": (METHODS["dpcr"], METHODS["dpcr"].options())})
    trajectory.update(learned)
    evaluator = Evaluator(data, stream, backend)
    seen, _ = evaluator.test_images(0)
    scores = trajectory.logits("dpcr", extract(learner.backbone, seen, backend))
    found = {"features": learned.new(), "augmented": learned.new("augmented"), "scores": scores}
    return {
        **found,
        **learned.stats().state(),
        "hits": torch.tensor(evaluator.measure(0, trajectory)["dpcr"]),
    }


def methods(world):
    """A method of each kind of training, two tasks."""
    backend, data, found = replace(CPU, world=world), blobs(), {}
    for name in WHOLE:
        method = METHODS[name]
        kind = LEARNERS[method.learner]
        brief = {
            s: Schedule(epochs=1, lr=0.02) for s in ("balance", "compression") if s in kind.options_type.model_fields
        }
        more = {"memory": 12} if "memory" in kind.options_type.model_fields else {}
        options = kind.options_type(**{**TINY, **brief, **more, "first": TINY["later"]})
        learner = kind(options, data.channels, backend, 0)
        stream = TaskStream(data.train, np.arange(6), (4, 2))
        evaluator = Evaluator(data, stream, backend)
        own = build(method.options, {"buffer": 16} if name == "acil" else {}, name)
        trajectory = Trajectory(learner, {name: (method, own)}, freezes=method.learner in FROZEN)
        matrices = {label: AccuracyMatrix(evaluator.totals()) for label in trajectory.parts}
        follow_stream(stream, data, evaluator, trajectory, matrices, Watch())
        found |= {f"{name}.{k}": v.clone() for k, v in learner.state(teacher=True).items()}
        found |= {f"{label}/counts": torch.tensor(matrix.A_t) for label, matrix in matrices.items()}
    return found


def talk(world):
    """What processes say to each other, and how one of them fails for all."""
    rank = torch.tensor(world.rank)
    found = {
        "rows": world.all_gather(torch.arange(5.0)[world.shard(5)], 5),
        "few": world.all_gather(torch.ones(1), 1),
        "none": torch.tensor(world.any(False)),
        "second": torch.tensor(world.any(world.rank == 1)),
        "first": torch.tensor(world.broadcast_object([world.rank, "é"])[0]),
    }
    own = {"a": torch.full((2, 3), 7.0), "b": torch.tensor([True, False]), "c": torch.zeros(0, 4)} if rank == 0 else {}
    found |= {f"given.{k}": v for k, v in world.broadcast_tensors(own).items()}
    with world.sync_errors():
        pass
    told = []
    for failing in (0, 1):
        try:
            with world.sync_errors():
                if world.rank == failing:
                    raise DataError(f"{failing} fails")
        except (DataError, FailedOnOtherRank) as error:
            told.append(f"{type(error).__name__} {error.exit_code} {error}")
    try:
        world.check_equal("it", str(min(world.rank, 1)))
    except (ConfigError, FailedOnOtherRank) as error:
        told.append(f"{type(error).__name__} {error}")
    found["told"] = torch.tensor(list("; ".join(told).encode()))
    return found


def turns(world, out):
    """The first process of a machine is done before the others begin."""
    with world.local_main_first():
        there = sorted(path.name for path in out.glob("turn-*"))
        if world.rank == 0:
            time.sleep(0.5)  # busy for a while
        (out / f"turn-{world.rank}").touch()
    return {"before": torch.tensor(len(there))}


CASES = {f.__name__: f for f in (statistics, images, training, normalization, methods, talk)}


def main() -> None:
    out, chosen = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    torch.set_num_threads(1)
    with init_distributed() as world:
        found = {f"{name}/{k}": v for name in chosen for k, v in CASES[name](world).items()}
        found |= {f"turns/{k}": v for k, v in turns(world, out).items()}
    save_tensors(out / f"rank-{world.rank}.safetensors", found, {})


if __name__ == "__main__":
    main()
