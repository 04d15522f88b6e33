"""A learner of another package: LwF, and a contrastive loss between two views of each image (SimCLR, ICML 2020).

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
    """LwF's options, and those of the contrastive loss."""

    contrast: float = Field(default=0.5, ge=0)  # its weight
    contrast_temperature: float = Field(default=0.5, gt=0)


def nt_xent(one, other, temperature):
    """Cross-entropy of finding the other view of an image (n, dim) among those of all images, NT-Xent."""
    views = normalize(torch.cat([one, other]).float(), dim=1)
    similar = (views @ views.T / temperature).fill_diagonal_(-torch.inf)
    return cross_entropy(similar, torch.arange(len(views), device=views.device).roll(len(one)))


class TwoViews(LwF):
    """Both views go through the network together; LwF's loss is that of the first."""

    options_type = TwoViewsOptions
    views = 1  # beside the image itself: the augmentation is drawn once more

    def loss(self, batch):
        one, other = self.student_features(torch.cat([batch.images, *batch.views])).chunk(2)
        contrast = self.options.contrast * nt_xent(one, other, self.options.contrast_temperature)
        return self.criterion()(one, batch.labels, batch.teacher) + contrast


METHOD = Method("two-views", "two-views", DualProjection, Ridge, "DPCR on two views", "this example", "d(d+1)/2 + d")
