"""Learning without forgetting: cross-entropy on the new classes, distillation of the old ones.

Li and Hoiem, "Learning without Forgetting", TPAMI 2018; as DPCR's learner: He et al., ICML 2025, Eq. 1-2.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from efcil.learners.base import Learner, TrainingOptions
from efcil.losses import Criterion, LwFLoss, TaskClassLoss
from efcil.training.batch import Batch, FrozenForward


class LwFOptions(TrainingOptions):
    """Training options and the distillation's."""

    distill_weight: float = Field(default=10.0, ge=0)
    """Weight of the distillation, alpha of Eq. 1."""
    temperature: float = Field(default=2.0, gt=0)
    """Temperature of the distillation."""


class LwF(Learner):
    """Learner that distills the teacher's logits over the old classes."""

    options_type = LwFOptions

    def frozen_forward(self) -> FrozenForward | None:
        """Return the teacher's features."""
        return self.backend.frozen(self.teacher.backbone, self.teacher_features) if self.num_old_classes else None

    def criterion(self) -> Criterion:
        """Return the loss of Eq. 1 over the classes of this task."""
        loss = self.lwf_loss()
        return loss if self.task_classes is None else TaskClassLoss(loss, self.task_classes)

    def lwf_loss(self) -> LwFLoss:
        """Return the loss of Eq. 1."""
        o = self.options
        return LwFLoss(self.head, self.teacher.head, self.num_old_classes, o.distill_weight, o.temperature)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of Eq. 1 on a batch."""
        features = self.student_features(batch.images)
        return self.backend.criterion(self.criterion())(features, batch.labels, batch.teacher)
