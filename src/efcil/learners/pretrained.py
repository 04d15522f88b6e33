"""A pretrained backbone that is never trained, and one that is trained gently on the first task and then frozen.

With features that do not change, a method is its classifier: class statistics add, and one class at a time is all at
once.

Zhou et al., "Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and Adaptivity are All You
Need", IJCV 2024: SimpleCIL is the nearest mean on a frozen backbone; APER adapts the backbone on the first task before.

State between tasks: none beside the backbone.
"""

from __future__ import annotations

from efcil.learners.first_task import FirstTask
from efcil.learners.lwf import LwFOptions
from efcil.training.schedule import Schedule

SHORT = Schedule(epochs=10, lr=0.001, milestones=(), lr_schedule="cosine", weight_decay=5e-4)


class Pretrained(FirstTask):
    """Frozen from the start."""

    starts_pretrained = True

    def stages(self, task: int) -> tuple[Schedule, ...]:
        """Return no stage for any task."""
        return ()


class AdaptFirstOptions(LwFOptions):
    """Options of training, with a short and gentle schedule."""

    first: Schedule = SHORT
    """Schedule of the first task."""


class AdaptFirst(FirstTask):
    """Fine-tuned with cross-entropy on the first task, then frozen."""

    options_type = AdaptFirstOptions
    starts_pretrained = True
