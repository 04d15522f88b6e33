"""Example plug-in: LwF with a contrastive loss between two views of each image (SimCLR, ICML 2020).

Its entry points are `two-views = "two_views:TwoViews"` of `efcil.learners` and `two-views = "two_views:METHOD"` of
`efcil.methods`; in a script `efcil.register_learner("two-views", TwoViews)` and `efcil.register_method(METHOD)`.
"""

import torch
from pydantic import Field
from torch.nn.functional import cross_entropy, normalize

from efcil import Method
from efcil.classifiers.ridge import Ridge
from efcil.learners.lwf import LwF, LwFOptions
from efcil.shift.dual_projection import DualProjection


class TwoViewsOptions(LwFOptions):
    """Options of LwF and the contrastive loss."""

    contrast: float = Field(default=0.5, ge=0)  # its weight
    contrast_temperature: float = Field(default=0.5, gt=0)


def nt_xent(one, other, temperature):
    """Compute the NT-Xent loss of two views (n, dim)."""
    views = normalize(torch.cat([one, other]).float(), dim=1)
    similar = (views @ views.T / temperature).fill_diagonal_(-torch.inf)
    return cross_entropy(similar, torch.arange(len(views), device=views.device).roll(len(one)))


class TwoViews(LwF):
    """LwF loss on the first view plus NT-Xent of both views, in one forward pass."""

    options_type = TwoViewsOptions
    views = 1  # one additional augmented view

    def loss(self, batch):
        one, other = self.student_features(torch.cat([batch.images, *batch.views])).chunk(2)
        contrast = self.options.contrast * nt_xent(one, other, self.options.contrast_temperature)
        return self.criterion()(one, batch.labels, batch.teacher) + contrast


METHOD = Method("two-views", "two-views", DualProjection, Ridge, "DPCR on two views", "this example", "d(d+1)/2 + d")
