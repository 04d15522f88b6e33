"""LDC: learnable drift compensation on the LwF backbone.

Gomez-Villa et al., "Exemplar-free Continual Representation Learning via Learnable Drift Compensation", ECCV 2024.

Idea: a linear layer learns, by gradient descent on the current images, to turn old features into new ones. The old
class means are sent through it: it is DPCR's task-wise projection (TSSP), learned instead of solved. The classifier is
the nearest class mean, by cosine.

What survives a task: the mean of each class, dim numbers, and its count.
Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: `ldc` T = 10 47.78 ± 1.21 / 62.72 ± 0.80 (46.60 / 61.67), T
= 20 35.75 ± 0.91 / 52.29 ± 1.43 (36.76 / 53.06).
"""

from __future__ import annotations

from efcil.features import TaskFeatures
from efcil.methods.class_means import LwFNCM
from efcil.randomness import Purpose, generator
from efcil.shift.ldc import LDCOptions, learned_map


class LDC(LwFNCM):
    """Means follow a learned linear map."""

    def __init__(self, options: LDCOptions):
        super().__init__(options)
        self.options = options

    def learn(self, task: TaskFeatures) -> None:
        """Move the old means, add the new ones."""
        if self.means is not None and not task.rests:
            old, new = task.pairs(self.options.shift_view)
            source = generator(old.device, Purpose.SHIFT, task.learner.seed, task.index)
            self.means = self.means @ learned_map(old, new, self.options, source).to(self.means)
        super().learn(task)
