"""Joint training: train a new backbone on all data so far in each task. The upper bound."""

from __future__ import annotations

from torch import Tensor

from efcil.learners.base import Learner
from efcil.losses import new_class_loss
from efcil.randomness import RngStream, generator
from efcil.tasks import Task
from efcil.training.batch import Batch
from efcil.training.schedule import Schedule


class Joint(Learner):
    """Trains from scratch on all data, with the first task's schedule and cross-entropy over all classes."""

    all_data = True

    def before_task(self, task: Task) -> None:
        """Start from new weights; the old backbone stays as the teacher."""
        self.num_old_classes = task.first_class
        self._copy_to_teacher()
        fresh = self._new_classifier(self.seed, self.weights)
        self.head.resize_like(fresh.head.state_dict())
        self.student.load_state_dict(fresh.state_dict())
        self.head.add_classes(task.seen, generator("cpu", RngStream.WEIGHTS, self.seed, task.index))

    def stages(self, task: int) -> tuple[Schedule, ...]:
        """Return the first task's schedule for every task."""
        return super().stages(0)

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy over all classes."""
        return new_class_loss(self.head(self.student_features(batch.images)), batch.labels, 0)
