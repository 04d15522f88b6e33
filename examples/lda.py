"""Example plug-in: the classifier LDA (linear discriminant analysis) on shifted class statistics.

    [project.entry-points."efcil.classifiers"]
    lda = "lda:LDA"
    [project.entry-points."efcil.methods"]
    lwf-lda = "lda:METHOD"

Then `efcil compare lwf-lda,dpcr digits` and combinations such as `lwf+ldc+lda` work. In a script, use
`efcil.register_classifier("lda", LDA)` and `efcil.register_method(METHOD)`.
"""

import torch
from pydantic import Field

from efcil import Method
from efcil.classifiers import Classifier
from efcil.config import Options
from efcil.core.gaussian import pooled_covariance
from efcil.shift.dual_projection import DualProjection


class LDAOptions(Options):
    """Options of LDA."""

    shrinkage: float = Field(default=0.1, gt=0, le=1)  # of the covariance, towards a multiple of the identity


class LDA(Classifier):
    """Gaussians with one covariance S for all classes: x' S^-1 mu_c - mu_c' S^-1 mu_c / 2 + log N_c."""

    options_type = LDAOptions
    supports = frozenset({"update", "forget", "merge"})  # solved from statistics alone

    def fit(self, stats):
        within, share = pooled_covariance(stats), self.options.shrinkage
        ridge = (share * within.trace() / stats.dim + 1e-9) * torch.eye(stats.dim).to(within)
        self.weight = torch.linalg.solve((1 - share) * within + ridge, stats.mean.T)  # (dim, classes)
        self.bias = stats.count.log() - (stats.mean.T * self.weight).sum(0) / 2

    def logits(self, features):
        return features.to(self.weight) @ self.weight + self.bias


METHOD = Method("lwf-lda", "lwf", DualProjection, LDA, "LwF + LDA", "this example", "d(d+1)/2 + d")
