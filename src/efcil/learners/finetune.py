"""Finetuning: cross-entropy on each task alone, the usual lower bound."""

from __future__ import annotations

from torch import Tensor

from efcil.learners.base import Learner
from efcil.losses import new_class_loss
from efcil.training.batch import Batch


class Finetune(Learner):
    """Cross-entropy over the new classes, without any regularization for the old ones."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy of a batch."""
        return new_class_loss(self.head(self.student_features(batch.images)), batch.labels, self.num_old_classes)
