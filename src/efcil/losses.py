"""Losses that several learners share: classification over a task's classes, distillation, feature distillation.

`LwFLoss` and `FeatureDistillLoss` are objects so that a GPU backend can put a fused version in the place of one, by its
exact type; a subclass is another loss and is computed as it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, normalize, softmax

Criterion = Callable[[Tensor, Tensor, Any], Tensor]
"""Features, labels and what the teacher says of them -> the loss."""

UNLABELLED = -100  # a label that cross_entropy leaves out: that of a pseudo-sample


def new_class_loss(logits: Tensor, labels: Tensor, old: int) -> Tensor:
    """Cross-entropy over the logits of the task's new classes only (first term of Eq. 1)."""
    return cross_entropy(logits[:, old:].float(), labels - old)


def task_class_loss(logits: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy over the logits of the `classes` in the task (ascending), old and new.

    It is the first term of Eq. 1 for a task in which old classes come again; classes that are absent have no part.

    >>> logits = torch.tensor([[1.0, 2.0, 4.0]])
    >>> float(task_class_loss(logits, torch.tensor([2]), torch.tensor([1, 2])))  # log(1 + exp(2 - 4))
    0.126928...
    """
    return cross_entropy(logits[:, classes].float(), torch.searchsorted(classes, labels))


def distillation(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Cross-entropy between softened predictions (Eq. 2), mean over the batch, without the T^2 factor (as released).

    Both (n, old classes).
    """
    return -(softmax(target.float() / temperature, 1) * log_softmax(logits.float() / temperature, 1)).sum(1).mean()


def feature_distance(mapped: Tensor, before: Tensor) -> Tensor:
    """Squared distance of L2-normalized features (n, dim) to those before the task, mean over the batch."""
    return (normalize(mapped.float(), dim=1) - normalize(before.float(), dim=1)).square().sum(1).mean()


@dataclass(frozen=True)
class LwFLoss:
    """Eq. 1 and 2: cross-entropy over the new classes, distillation of the teacher's logits over the old ones."""

    head: nn.Module
    teacher_head: nn.Module
    num_old_classes: int
    distill_weight: float
    temperature: float

    def __call__(self, features: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        """Return the loss of the student's features (n, dim), given the teacher's of the same images."""
        logits = self.head(features)
        loss = self.classification(logits, labels)
        return loss if teacher is None else loss + self.distillation(features, logits, teacher)

    def classification(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the first term of Eq. 1."""
        return new_class_loss(logits, labels, self.num_old_classes)

    def distillation(self, features: Tensor, logits: Tensor, teacher: Tensor) -> Tensor:
        """Return the second term of Eq. 1."""
        with torch.no_grad():
            target = self.teacher_head(teacher)
        return self.distill_weight * distillation(logits[:, : self.num_old_classes], target, self.temperature)


@dataclass(frozen=True)
class FeatureDistillLoss(LwFLoss):
    """Also the distance of features to the teacher's through a linear projector: what moved linearly is not held."""

    projector: nn.Linear
    feature_distill_weight: float

    def distillation(self, features: Tensor, logits: Tensor, teacher: Tensor) -> Tensor:
        """Add the feature distillation."""
        distance = self.feature_distill_weight * feature_distance(self.projector(features), teacher)
        return super().distillation(features, logits, teacher) + distance


@dataclass(frozen=True)
class TaskClassLoss:
    """The loss of `whole`, in a task where old classes come again or where pseudo-samples have no label."""

    whole: LwFLoss
    task_classes: Tensor | None  # (k,) ascending; None: the new classes
    pseudo_share: float = 0.0  # pseudo-samples for each image of the task

    def __call__(self, features: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        """Return the loss of features (n, dim) and labels (n,), `UNLABELLED` for pseudo-samples."""
        logits = self.whole.head(features)
        loss = self.classification(logits, labels)
        return loss if teacher is None else loss + self.whole.distillation(features, logits, teacher)

    def classification(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of the images that have a label, as a mean over their usual number in a batch.

        The number at hand would do as well for one process; of several, each has another one in its share.
        """
        old = self.whole.num_old_classes
        if not self.pseudo_share:
            return (
                self.whole.classification(logits, labels)
                if self.task_classes is None
                else task_class_loss(logits, labels, self.task_classes)
            )
        if self.task_classes is None:
            logits, targets = logits[:, old:], labels - old
        else:
            logits = logits[:, self.task_classes]
            targets = torch.searchsorted(self.task_classes, labels.clamp_min(0))
        targets = torch.where(labels == UNLABELLED, UNLABELLED, targets)
        total = cross_entropy(logits.float(), targets, ignore_index=UNLABELLED, reduction="sum")
        return total * (1 + self.pseudo_share) / len(labels)
