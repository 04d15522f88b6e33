"""LwF's first task, then a frozen backbone.

ACIL, DS-AL and FeCAM use it. When evaluated together with LwF methods they share LwF's backbone after the first task,
which is identical.
"""

from __future__ import annotations

from efcil.learners.lwf import LwF
from efcil.training.schedule import Schedule


class FirstTask(LwF):
    """Trains as LwF in the first task and not at all afterwards."""

    def stages(self, task: int) -> tuple[Schedule, ...]:
        """Return LwF's stages for the first task, none for later ones."""
        return () if task else super().stages(task)
