"""Small problems that tests learn."""

import numpy as np
import pytest
import torch

from efcil.data.dataset import DataSet, ImageSet
from efcil.training.schedule import Schedule


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


class Watch:
    """Observes a run: calls `each_epoch` and `each_task`."""

    def __init__(self, each_epoch=lambda report, optimizer: None, each_task=lambda task: None):
        self.after_epoch, self.after_task = each_epoch, each_task

    def on_training_end(self, task):
        pass


def stopped_in_the_second_task(learner, data, run):
    """Leave a learner in the middle of its second task, after its second epoch; `run` learns with a `Watch`."""

    def each_epoch(report, optimizer):
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
