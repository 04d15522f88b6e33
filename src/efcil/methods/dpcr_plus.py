"""DPCR+: DPCR on a backbone that also rehearses images made in the place of old ones. Ours; docs/dpcr-plus.md.

Idea: what an exemplar-free learner lacks are images where old classes live, for the distillation that holds the
backbone and for the map that says how it moved. So the task's images are changed until the old backbone takes them for
old classes; both are done with them as well. Statistics and classifier are DPCR's.

What survives a task: what DPCR keeps, and for each class one more mean, for all one covariance; no image, made or real.
"""

from __future__ import annotations

from collections.abc import Hashable

from pydantic import Field

from efcil.methods.dpcr import DPCROptions
from efcil.representations.base import Seen


class DPCRPlusOptions(DPCROptions):
    """DPCR's options; the shift is estimated with the images that were made as well, and may keep to the identity."""

    shift_images: Seen = "pseudo"  # type: ignore[assignment]  # one more choice than the others have
    shift_share: float = Field(default=0.0, ge=0)  # of trace / dim: ridge of the shift towards the identity; 0: Eq. 5

    @property
    def how(self) -> tuple[Hashable, ...]:
        """All that decides the map."""
        return (*super().how, self.shift_share)

    def towards_identity(self, images: int, dim: int) -> float | None:
        """Return the share, where one is asked for."""
        return self.shift_share or super().towards_identity(images, dim)
