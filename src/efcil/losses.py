"""Losses shared by several learners: classification, distillation and feature distillation.

`LwFLoss` and `FeatureDistillLoss` are objects so that the GPU backend can replace them by fused versions. It matches
exact types, so subclasses run unfused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, normalize, softmax

Criterion = Callable[[Tensor, Tensor, Any], Tensor]
"""Map features, labels and the teacher's outputs to a loss."""

UNLABELED = -100  # label of pseudo-samples, ignored by cross_entropy


def new_class_loss(logits: Tensor, labels: Tensor, old: int) -> Tensor:
    """Compute cross-entropy over the new classes only (first term of Eq. 1)."""
    return cross_entropy(logits[:, old:].float(), labels - old)


def task_class_loss(logits: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
    """Compute cross-entropy over the `classes` of the task (ascending), old and new.

    It is the first term of Eq. 1 for a task with repeated old classes; logits of absent classes are ignored.

    >>> logits = torch.tensor([[1.0, 2.0, 4.0]])
    >>> float(task_class_loss(logits, torch.tensor([2]), torch.tensor([1, 2])))  # log(1 + exp(2 - 4))
    0.126928...
    """
    return cross_entropy(logits[:, classes].float(), torch.searchsorted(classes, labels))


def distillation(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Compute the distillation loss of Eq. 2, mean over the batch, without the factor T^2 (as released).

    `logits` and `target` are (n, old classes).
    """
    return -(softmax(target.float() / temperature, 1) * log_softmax(logits.float() / temperature, 1)).sum(1).mean()


def feature_distance(mapped: Tensor, before: Tensor) -> Tensor:
    """Compute the squared distance of L2-normalized features (n, dim) to those before the task, mean over the batch."""
    return (normalize(mapped.float(), dim=1) - normalize(before.float(), dim=1)).square().sum(1).mean()


@dataclass(frozen=True)
class LwFLoss:
    """Loss of Eq. 1 and 2: cross-entropy over new classes plus distillation over old classes."""

    head: nn.Module
    teacher_head: nn.Module
    num_old_classes: int
    distill_weight: float
    temperature: float

    def __call__(self, features: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        """Return the loss from student and teacher features (n, dim) of the same images."""
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
    """LwF loss plus feature distillation through a linear projector, which leaves linear drift unpenalized."""

    projector: nn.Linear
    feature_distill_weight: float

    def distillation(self, features: Tensor, logits: Tensor, teacher: Tensor) -> Tensor:
        """Return the second term of Eq. 1 plus feature distillation."""
        distance = self.feature_distill_weight * feature_distance(self.projector(features), teacher)
        return super().distillation(features, logits, teacher) + distance


@dataclass(frozen=True)
class TaskClassLoss:
    """The loss `whole` for tasks with repeated old classes or unlabeled pseudo-samples."""

    whole: LwFLoss
    task_classes: Tensor | None  # (k,) ascending; None: new classes only
    pseudo_share: float = 0.0  # pseudo-samples per image of the task

    def __call__(self, features: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
        """Return the loss of features (n, dim) and labels (n,), `UNLABELED` for pseudo-samples."""
        logits = self.whole.head(features)
        loss = self.classification(logits, labels)
        return loss if teacher is None else loss + self.whole.distillation(features, logits, teacher)

    def classification(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute cross-entropy over labeled images, divided by their expected number in a batch.

        The actual number would differ between the processes of a distributed run.
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
        targets = torch.where(labels == UNLABELED, UNLABELED, targets)
        total = cross_entropy(logits.float(), targets, ignore_index=UNLABELED, reduction="sum")
        return total * (1 + self.pseudo_share) / len(labels)
