"""ADC: adversarial drift compensation on the LwF backbone.

Goswami et al., "Resurrecting Old Classes with New Data for Exemplar-Free Continual Learning", CVPR 2024.

Idea: the current images nearest to an old class's mean are changed, as adversarial images are, until the old backbone
takes them for that class. The mean is translated by their average move from the old to the new backbone. The
classifier is the nearest class mean, by cosine.

What survives a task: the mean of each class, dim numbers, and its count; the changed images are gone with the task.
Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: `adc` T = 10 48.01 ± 0.71 / 62.68 ± 0.35 (46.80 / 62.05), T
= 20 34.16 ± 1.46 / 51.74 ± 0.87 (34.69 / 52.16).
"""

from __future__ import annotations

from efcil.features import TaskFeatures
from efcil.methods.class_means import LwFNCM
from efcil.shift.adc import ADCOptions, adversarial_drift


class ADC(LwFNCM):
    """Means are translated as adversarial images of their class."""

    def __init__(self, options: ADCOptions):
        super().__init__(options)
        self.options = options

    def learn(self, task: TaskFeatures) -> None:
        """Move the old means, add the new ones."""
        if self.means is not None and not task.rests:
            self.means = self.means + adversarial_drift(self.means, task, self.options)
        super().learn(task)
