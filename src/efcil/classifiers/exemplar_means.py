"""iCaRL's nearest mean of exemplars.

Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017.

Idea: a few images of each old class are stored, selected so that their mean feature is close to that of the class
(herding). The backbone is trained on them and the new images, with distillation of the old classes (learners/icarl.py).
An image is assigned to the class with the nearest mean of exemplars (`nme`); the trained linear head is evaluated as
well (`cnn`).

State between tasks: `memory` images in all; the head, dim + 1 numbers per class. The means are recomputed after each
task. Measured on CIFAR-100, A_f / A_avg, in brackets the paper's: `icarl:memory=1000/nme` T = 10 46.34 / 64.56 (46.78 /
62.62), T = 20 39.62 / 59.63 (40.71 / 57.47); `icarl:memory=500/nme` T = 10 40.05 / 59.79 (39.56 / 58.16), T = 20 31.55
/ 53.30 (33.67 / 52.39); `podnet:memory=1000/nme` T = 10 36.36 / 55.62, T = 20 28.20 / 48.55; `podnet:memory=500/nme` T
= 10 32.62 / 52.66, T = 20 24.00 / 43.38.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from efcil.classifiers.base import Classifier
from efcil.core.class_stats import ClassStats
from efcil.core.nearest_mean import cosine_scores
from efcil.features import TaskFeatures
from efcil.learners.exemplars import l2_normalize
from efcil.learners.rehearsal import Rehearsal
from efcil.training.extraction import extract


class ExemplarMeans(Classifier):
    """Nearest mean of exemplars with L2-normalized features (Algorithm 1)."""

    needs = "learner"
    supports = frozenset()
    learner_type = Rehearsal
    means: Tensor  # (classes, dim)

    def fit_learner(self, features: TaskFeatures) -> None:
        """Compute the means of all exemplars with the new backbone."""
        r = features.learner
        assert isinstance(r, Rehearsal)
        assert r.exemplars is not None
        shown = features.pixels().with_images(r.exemplars.images)
        normalized = l2_normalize(extract(r.backbone, shown, r.backend, r.options.crop))
        labels = r.exemplars.labels
        sums = normalized.new_zeros(int(labels.max()) + 1, normalized.shape[1]).index_add_(0, labels, normalized)
        self.means = sums / torch.bincount(labels)[:, None]

    def logits(self, features: Tensor) -> Tensor:
        """Return cosine similarities to the means."""
        return cosine_scores(features, self.means)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the means to save."""
        return {"means": self.means}

    def load_state_dict(self, state: Mapping[str, Tensor], *stats: ClassStats) -> None:
        """Restore the means."""
        self.means = state["means"]
