"""FOSTER: feature boosting and compression, with exemplars.

Wang et al., "FOSTER: Feature Boosting and Compression for Class-Incremental Learning", ECCV 2022.

Idea: as gradient boosting adds a learner for what the ones before it miss, a new backbone is trained beside the frozen
old one, on new images and exemplars. Both are then distilled into a single backbone, so that the model does not grow
from task to task (learners/foster.py).

Two classifiers are measured. `compressed`: the single backbone, which survives the task; the paper's FOSTER. `boosted`:
the two backbones before compression; the paper's FOSTER B4. PyCIL logs the second as "CNN top1", so that is the one in
the DPCR paper's table. In the first task they are the same.

What survives a task: the compressed backbone; its head, dim + 1 numbers per class; `memory` images in all. A checkpoint
holds the two backbones of `boosted` as well, so that it can be measured again; the next task does not read them.

Differences from the paper, all with PyCIL: the whole head on old and new features learns; the paper also admits zeros
for the new classes on old features (PyCIL's oofc = ft and az). Every class has a weight of its own, not the old classes
one and the new ones another. Weights are not aligned after a stage (is_teacher_wa, is_student_wa = false).
Differences from PyCIL: the images of a class are counted, of an old class its exemplars. There an old class has
memory // old classes and a new one of CIFAR-100 500: the same on balanced sets.
As PyCIL, exemplars are herded with the features of the boosted model, old and new, not with the compressed ones.
Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: `foster:memory=1000/boosted` T = 10 58.07 / 71.54 (40.42 /
53.15), T = 20 52.61 / 67.20 (41.79 / 55.41); `foster:memory=1000/compressed` T = 10 56.08 / 70.23, T = 20 51.90 /
66.05; `foster:memory=500/boosted` T = 10 48.73 / 66.65 (37.15 / 49.18), T = 20 43.25 / 63.75 (30.85 / 40.06);
`foster:memory=500/compressed` T = 10 48.35 / 64.63, T = 20 43.27 / 62.49.
"""

from __future__ import annotations

import copy
from typing import Literal

from torch import Tensor

from efcil.config import Options
from efcil.features import TaskFeatures
from efcil.learners.foster import FOSTER
from efcil.methods.own_head import OwnHead


class FOSTERReadoutOptions(Options):
    """Which classifier's accuracy is the method's; both are measured."""

    head: Literal["compressed", "boosted"] = "compressed"


class PartHead(OwnHead):
    """A head on some of the features."""

    @property
    def dim(self) -> int:
        """How many features the head reads."""
        return self.state()["weight"].shape[1]


class Compressed(PartHead):
    """The student's head on its features, the last ones."""

    def scores(self, features: Tensor) -> Tensor:
        """Return the logits of features (n, 3 dim), or (n, dim) after the first task."""
        return super().scores(features[:, -self.dim :])


class Boosted(PartHead):
    """The head of the boosted model on old and new features, the first ones."""

    def learn(self, task: TaskFeatures) -> None:
        """Copy the head."""
        assert isinstance(task.learner, FOSTER)
        self.head = copy.deepcopy(task.learner.boosted_head)

    def scores(self, features: Tensor) -> Tensor:
        """Return the logits of features (n, 3 dim), or (n, dim) after the first task."""
        return super().scores(features[:, : self.dim])
