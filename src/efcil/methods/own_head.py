"""The backbone's own auxiliary head as classifier: LwF, finetuning and joint training as they were published.

Idea: nothing is added; the head that was trained with the backbone answers.
What survives a task: the head, for LwF one row of `dim` numbers per class, and its scale.
Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: `icarl:memory=1000/cnn` T = 10 33.79 / 56.33 (32.33 /
53.15), T = 20 27.13 / 52.07 (28.45 / 49.92); `icarl:memory=500/cnn` T = 10 25.38 / 49.19 (22.28 / 45.91), T = 20 16.51
/ 42.30 (20.12 / 41.59); `lwf` T = 10 28.18 ± 1.12 / 49.00 ± 0.92, T = 20 23.98 ± 2.91 / 42.72 ± 3.18;
`podnet:memory=1000/cnn` T = 10 40.45 / 58.80 (35.57 / 55.00), T = 20 32.57 / 52.46 (28.71 / 49.09);
`podnet:memory=500/cnn` T = 10 34.17 / 54.89 (31.90 / 51.17), T = 20 23.16 / 44.94 (23.44 / 42.42).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from efcil.config import Options
from efcil.features import TaskFeatures
from efcil.models.heads import CosineHead, GrowingHead, restored


class OwnHead:
    """A copy of the auxiliary head after the task."""

    def __init__(self, options: Options):
        self.head: GrowingHead | None = None

    def learn(self, task: TaskFeatures) -> None:
        """Copy the head."""
        self.head = copy.deepcopy(task.learner.head)

    def keep(self, positions: Tensor) -> None:
        """Keep the rows of some classes only."""
        assert isinstance(self.head, CosineHead)
        self.head.keep(positions)

    @torch.no_grad()
    def scores(self, features: Tensor) -> Tensor:
        """Return the head's logits."""
        assert self.head is not None
        logits: Tensor = self.head(features)
        return logits

    def state(self) -> dict[str, Tensor]:
        """Return the head's tensors."""
        return dict(self.head.state_dict()) if self.head is not None else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up a head."""
        self.head = restored(state)
