"""Frozen after the first task: that task is learned as LwF learns it, then the backbone rests.

ACIL, DS-AL and FeCAM stand on it. On an LwF trajectory they read its first backbone, which is the same one.
"""

from __future__ import annotations

from efcil.learners.lwf import LwF
from efcil.training.schedule import Schedule


class FirstTask(LwF):
    """LwF's first task, and nothing after it."""

    def stages(self, task: int) -> tuple[Schedule, ...]:
        """Only in the first task."""
        return () if task else super().stages(task)
