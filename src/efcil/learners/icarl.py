"""iCaRL's training: cross-entropy over all classes on new images and exemplars, and distillation of the old ones.

Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017, Algorithm 3. The paper uses
sigmoids in both terms; PyCIL, which the DPCR paper used, and this file use softmax with a temperature.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from efcil.learners.rehearsal import Rehearsal, RehearsalOptions
from efcil.losses import distillation, new_class_loss
from efcil.models.heads import GrowingHead, LinearHead
from efcil.training.batch import Batch, FrozenForward
from efcil.training.schedule import Schedule


class ICaRLOptions(RehearsalOptions):
    """Options of training, memory and distillation."""

    temperature: float = Field(default=2.0, gt=0)
    """Temperature of the distillation."""
    first: Schedule = Schedule(epochs=200, lr=0.1, milestones=(60, 120, 170), weight_decay=5e-4)
    """Schedule of the first task."""
    later: Schedule = Schedule(epochs=170, lr=0.1, milestones=(80, 120), weight_decay=2e-4)
    """Schedule of later tasks."""


class ICaRL(Rehearsal):
    """Linear head over all classes, distillation of the teacher's logits for old ones."""

    options_type = ICaRLOptions

    def new_head(self, dim: int) -> GrowingHead:
        """Make a linear head."""
        return LinearHead(dim)

    def frozen_forward(self) -> FrozenForward | None:
        """Return the teacher's features."""
        return self.backend.frozen(self.teacher.backbone, self.teacher_features) if self.num_old_classes else None

    def loss(self, batch: Batch) -> Tensor:
        """Return classification over all classes plus distillation over the old ones."""
        logits = self.head(self.student_features(batch.images))
        loss = new_class_loss(logits, batch.labels, 0)
        if self.num_old_classes:
            with torch.no_grad():
                target = self.teacher.head(batch.teacher)
            loss = loss + distillation(logits[:, : self.num_old_classes], target, self.options.temperature)
        return loss
