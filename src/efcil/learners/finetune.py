"""Finetuning: cross-entropy on each task alone, the usual lower bound."""

from __future__ import annotations

from torch import Tensor

from efcil.learners.base import Learner, new_class_loss


class Finetune(Learner):
    """Cross-entropy over the new classes, without any regularization for the old ones."""

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of a batch."""
        return new_class_loss(self.head(self.student_features(images)), labels, self.num_old_classes)
