"""Learning without forgetting: cross-entropy on the new classes, distillation of the old ones.

Li and Hoiem, "Learning without Forgetting", TPAMI 2018; as DPCR's learner: He et al., ICML 2025, Eq. 1-2.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax, normalize, softmax

from efcil.accel.fused_lwf_loss import cosines, judged, works
from efcil.accel.machine import Machine
from efcil.accel.prefetch import Resting
from efcil.learners.base import Learner, TrainingOptions, new_class_loss, task_class_loss
from efcil.models.heads import CosineHead

Map = tuple[Tensor, Tensor, float]  # weight (dim, dim) and bias of a linear projector, and the loss weight


class LwFOptions(TrainingOptions):
    """Training options and the distillation's."""

    distill_weight: float = Field(default=10.0, ge=0)  # alpha of Eq. 1
    temperature: float = Field(default=2.0, gt=0)


def distillation(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Cross-entropy between softened predictions (Eq. 2), mean over the batch, without the T^2 factor (as released).

    Both (n, old classes).
    """
    return -(softmax(target.float() / temperature, 1) * log_softmax(logits.float() / temperature, 1)).sum(1).mean()


def feature_distance(mapped: Tensor, before: Tensor) -> Tensor:
    """Squared distance of L2-normalized features (n, dim) to those before the task, mean over the batch."""
    return (normalize(mapped.float(), dim=1) - normalize(before.float(), dim=1)).square().sum(1).mean()


def _cosine(head: nn.Module) -> tuple[Tensor, Tensor]:
    """Return weight (classes, dim) and scale of a cosine head."""
    assert isinstance(head, CosineHead)
    return head.weight, head.scale


class LwF(Learner):
    """Distils the teacher's logits over the old classes."""

    options_type = LwFOptions

    def __init__(self, options: Any, channels: int, machine: Machine, seed: int):
        super().__init__(options, channels, machine, seed)
        # Loss and gradients in fused kernels.
        self.at_once = machine.compile and machine.capture and works(machine.device, machine.dtype)

    def resting(self) -> Resting | None:
        """Return the teacher's features."""
        return self.at_rest(self.teacher.backbone, self.teacher_features) if self.num_old_classes else None

    def loss(self, images: Tensor, labels: Tensor, before: Tensor | None = None) -> Tensor:
        """Return the loss of Eq. 1 on a batch; `before`: the teacher's features, where they are computed already."""
        if self.at_once and self._plain():
            return self._judged(images, labels, before)
        if self.num_old_classes:
            with torch.no_grad(), self.machine.beside():
                before = self.teacher_features(images) if before is None else before
                target = self.teacher.head(before)
        features = self.student_features(images)
        logits = self.head(features)
        loss = self.classification(logits, labels)
        if self.num_old_classes:
            assert before is not None
            self.machine.join()
            loss = loss + self.distillation_loss(features, before, logits[:, : self.num_old_classes], target)
        return loss

    def _plain(self) -> bool:
        """Whether this is Eq. 1 and nothing else."""
        own = type(self)
        plain = own.distillation_loss is LwF.distillation_loss and own.classification is LwF.classification
        return plain and self.task_classes is None and type(self.head) is CosineHead

    def _judged(self, images: Tensor, labels: Tensor, before: Tensor | None) -> Tensor:
        """Return the same loss, computed by fused kernels."""
        o, dtype = self.options, self.machine.dtype
        target, old_scale = None, None
        if self.num_old_classes:
            with torch.no_grad(), self.machine.beside():
                before = self.teacher_features(images) if before is None else before
                weight, old_scale = _cosine(self.teacher.head)
                target = cosines(before, weight, dtype)
        features = self.student_features(images)
        if self.num_old_classes:
            self.machine.join()
        loss = judged(features, labels, _cosine(self.head), target, old_scale, o.distill_weight, o.temperature, dtype)
        through = self.feature_projector()
        if through is None:
            return loss
        assert before is not None
        weight, bias, share = through
        return loss + share * feature_distance(linear(features, weight, bias), before)

    def feature_projector(self) -> Map | None:
        """Return the linear projector of the feature distillation and its weight, None without one."""
        return None

    def distillation_loss(self, features: Tensor, before: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the distillation loss of features (n, dim) and logits (n, old), of the student and of the teacher."""
        found: Tensor = self.options.distill_weight * distillation(logits, target, self.options.temperature)
        return found

    def classification(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the first term of Eq. 1."""
        if self.task_classes is None:
            return new_class_loss(logits, labels, self.num_old_classes)
        return task_class_loss(logits, labels, self.task_classes)
