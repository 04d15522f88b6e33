"""Small problems that tests learn."""

import numpy as np
import pytest
import torch

from efcil.data.dataset import DataSet, ImageSet
from efcil.protocol import run_protocol
from efcil.training.callbacks import Callback
from efcil.training.schedule import Schedule
from efcil.training.state import TaskData
from efcil.training.trainer import Trainer


def blobs(classes=6, per_class=12, size=8, channels=3, seed=0, noise=40.0):
    """Images of a class are one random picture plus noise: learnable in a few steps."""
    rng = np.random.default_rng(seed)
    pictures = rng.uniform(0, 255, (classes, channels, size, size))
    parts = []
    for count in (per_class, 5):
        labels = np.repeat(np.arange(classes), count)
        images = pictures[labels] + rng.normal(0, noise, (len(labels), channels, size, size))
        order = rng.permutation(len(labels))
        parts.append(ImageSet(images.clip(0, 255).astype(np.uint8)[order], labels[order].astype(np.int64)))
    names = tuple(f"class{i}" for i in range(classes))
    return DataSet("blobs", names, *parts, mean=(0.5,) * channels, std=(0.25,) * channels)


TINY = {
    "backbone": "resnet10",
    "width": 2,
    "batch_size": 8,
    "augment": "crop-flip",
    "first": Schedule(epochs=3, lr=0.05, milestones=(2,), weight_decay=5e-4),
    "later": Schedule(epochs=2, lr=0.02, milestones=(1,), weight_decay=2e-4),
}


class Watch(Callback):
    """Follows a run: calls `each_epoch`, `each_task` and `each_features`."""

    def __init__(
        self,
        each_epoch=lambda report, state: None,
        each_task=lambda task: None,
        each_features=lambda features: None,
        at_interrupt=lambda state: None,
    ):
        self.on_epoch_end, self.on_task_end, self.on_features = each_epoch, each_task, each_features
        self.on_interrupt = at_interrupt


def follow_stream(stream, data, evaluator, trajectory, matrices, watch=None, state=None):
    """Learn the tasks of a stream, as a run does; tasks before `state` count as measured, with no hit."""
    for matrix in matrices.values():
        for task in range(0 if state is None else state.task):
            matrix.record(task, [0] * (task + 1), [0] * (task + 1))
    trainer = Trainer(trajectory.learner, [] if watch is None else [watch])
    run_protocol(stream, data, evaluator, trajectory, matrices, trainer, state)


def fit_task(learner, task, images, labels, transform=None, watch=None, state=None, stop=lambda: False):
    """Train a learner on one task."""
    Trainer(learner, [] if watch is None else [watch], stop).fit(TaskData(task, images, labels, transform), state)


def copied(state):
    """A copy of tensors by name."""
    return {name: tensor.clone() for name, tensor in state.items()}


def stopped_in_the_second_task(learner, data, run):
    """Leave a learner in the middle of its second task, after its second epoch; `run` learns with a `Watch`."""

    def each_epoch(report, state):
        if (report.task, report.epoch) == (1, 1):
            raise KeyError("in the middle")

    with pytest.raises(KeyError):
        run(learner, data, Watch(each_epoch))
    return learner


def draw(*shape, seed=0):
    """Normal numbers in float64, from a seed."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gap(ours, theirs):
    """Largest difference, relative to the largest entry."""
    return float((ours - theirs).abs().max() / theirs.abs().max())
