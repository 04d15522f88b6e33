"""LwF that stops where moving on is estimated to cost more than it gains (`efcil.freezing`).

From then on its backbone is as it was before that task, so statistics of old classes are exact, and later tasks cost no
training. State between tasks: whether it is frozen, one number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from efcil.learners.lwf import LwF
from efcil.training.schedule import Schedule


class SelfFreezing(LwF):
    """Learner that takes back a task that it should not have trained on, and stays frozen."""

    can_freeze = True

    def stages(self, task: int) -> tuple[Schedule, ...]:
        """Return LwF's stages, none once it is frozen."""
        return () if self.frozen else super().stages(task)

    def freeze(self) -> None:
        """Go back to the backbone before this task, for good."""
        self.frozen = True
        self.head.resize_like(self.teacher.head.state_dict())
        self.student.load_state_dict(self.teacher.state_dict())

    def state(self, teacher: bool) -> dict[str, Tensor]:
        """Return the networks, and whether they are frozen."""
        return super().state(teacher) | {"frozen": torch.tensor(self.frozen)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        super().load_state(state)
        self.frozen = bool(state.get("frozen", False))
