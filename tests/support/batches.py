"""The loss of a batch, with the teacher's outputs as the training step hands them over."""

from __future__ import annotations

import torch

from efcil.training.batch import Batch


def taught(learner, images, labels, *views):
    """Return what the loss gets of normalized images."""
    frozen = learner.frozen_forward()
    with torch.no_grad():
        teacher = None if frozen is None else frozen.call(images)
    return Batch(images, labels, views, teacher)


def loss_of(learner, images, labels, *views):
    """Return a learner's loss of normalized images."""
    return learner.loss(taught(learner, images, labels, *views))
