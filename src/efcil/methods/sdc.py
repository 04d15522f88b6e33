"""SDC: semantic drift compensation on the LwF backbone.

Yu et al., "Semantic Drift Compensation for Class-Incremental Learning", CVPR 2020.

Idea: how an old class moved is read off the current images that lay near its mean before the task: the mean is
translated by their average move, weighted by a Gaussian kernel of that distance. The classifier is the nearest class
mean, by cosine.

What survives a task: the mean of each class's L2-normalised features, dim numbers, and its count.
Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: `sdc` T = 10 42.23 ± 0.07 / 59.64 ± 0.89 (42.25 / 58.43), T
= 20 30.07 ± 0.58 / 48.39 ± 1.57 (33.10 / 48.68).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from efcil.core.class_stats import ClassStats
from efcil.features import TaskFeatures
from efcil.methods.class_means import LwFNCM
from efcil.shift.sdc import SDCOptions, kernel_drift


class SDC(LwFNCM):
    """Means are translated as the current images near them."""

    def __init__(self, options: SDCOptions):
        super().__init__(options)
        self.options = options

    def learn(self, task: TaskFeatures) -> None:
        """Move the old means, add the new ones."""
        o, view = self.options, self.options.shift_view
        if self.means is not None and not task.rests:
            old_images, new_images = self._embedded(task.old(view)), self._embedded(task.new(view))
            self.means = self.means + kernel_drift(self.means, old_images, new_images, o.sigma, o.floor)
        self._add(ClassStats.from_features(self._embedded(task.new()), task.labels))

    def _embedded(self, features: Tensor) -> Tensor:
        return normalize(features.double(), dim=1) if self.options.unit_features else features
