"""Learning without forgetting: cross-entropy on the new classes, distillation of the old ones.

Li and Hoiem, "Learning without Forgetting", TPAMI 2018; as DPCR's representation: He et al., ICML 2025, Eq. 1-2.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import log_softmax, softmax

from efcil.representations.base import Representation, TrainingOptions, new_class_loss, present_class_loss
from efcil.training.loop import Resting


class LwFOptions(TrainingOptions):
    """Training options and the distillation's."""

    distill_weight: float = Field(default=10.0, ge=0)  # alpha of Eq. 1
    temperature: float = Field(default=2.0, gt=0)


def distillation(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Cross-entropy between softened predictions (Eq. 2), mean over the batch, without the T^2 factor (as released).

    Both (n, old classes).
    """
    return -(softmax(target.float() / temperature, 1) * log_softmax(logits.float() / temperature, 1)).sum(1).mean()


class LwF(Representation):
    """The teacher's logits over the old classes are what must not be forgotten."""

    options_type = LwFOptions

    def resting(self) -> Resting | None:
        """Return the teacher's features."""
        return self.at_rest(self.teacher.backbone, self.teacher_features) if self.old else None

    def loss(self, images: Tensor, labels: Tensor, before: Tensor | None = None) -> Tensor:
        """Return the loss of Eq. 1 on a batch, whose features `before` the task may be known."""
        if self.old:
            with torch.no_grad(), self.machine.beside():
                before = self.teacher_features(images) if before is None else before
                target = self.teacher.head(before)
        features = self.student_features(images)
        logits = self.head(features)
        loss = self.classification(logits, labels)
        if self.old:
            assert before is not None
            self.machine.join()
            loss = loss + self.held(features, before, logits[:, : self.old], target)
        return loss

    def held(self, features: Tensor, before: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return what holds the student to the teacher: features (n, dim) and logits (n, old), its own and before."""
        found: Tensor = self.options.distill_weight * distillation(logits, target, self.options.temperature)
        return found

    def classification(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the first term of Eq. 1."""
        if self.present is None:
            return new_class_loss(logits, labels, self.old)
        return present_class_loss(logits, labels, self.present)
