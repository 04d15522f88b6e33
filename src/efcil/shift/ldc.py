"""Learnable drift compensation: a linear map from old to new features (Gomez-Villa et al., ECCV 2024).

    minimize over W, with Adam, the mean over images and dimensions of (old @ W - new)^2

As in the released code: no bias, no weight decay, raw features, default initialization of a linear layer (uniform in +-
1 / sqrt(dim)), default betas of Adam, batches of 128 including the last incomplete one. One deviation: that code
augments the images again in each of the 20 epochs; here every epoch shuffles the same features.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from efcil.core.class_stats import ClassStats
from efcil.features import TaskFeatures
from efcil.learners.base import ImageView
from efcil.randomness import RngStream, generator
from efcil.shift.base import PairsOptions, Shift


class LDCOptions(PairsOptions):
    """Options of the fit."""

    map_lr: float = Field(default=0.001, gt=0, le=1e6)
    """Learning rate of the map."""
    map_epochs: int = Field(default=20, ge=1)
    """Epochs of the map."""
    map_batch_size: int = Field(default=128, ge=1)
    """Batch size of the map."""
    shift_view: ImageView = "clean"
    """Images the map is learned from; the authors' code takes augmented ones."""


@torch.no_grad()
def learned_map(old: Tensor, new: Tensor, options: LDCOptions, source: torch.Generator) -> Tensor:
    """Fit W (dim, dim) in float32 with new ~ old @ W from features (n, dim) before and after a task.

    The optimizer is torch's Adam with the analytic gradient of the mean squared error, 2 X'(XW - Y) / Y.numel().
    """
    old, new = old.float(), new.float()
    bound = old.shape[1] ** -0.5
    weight = torch.empty(old.shape[1], new.shape[1], device=old.device).uniform_(-bound, bound, generator=source)
    adam = torch.optim.Adam([weight], lr=options.map_lr)
    for _ in range(options.map_epochs):
        order = torch.randperm(len(old), generator=source, device=old.device)
        for rows in order.split(options.map_batch_size):
            x = old[rows]
            error = x @ weight - new[rows]
            weight.grad = x.T @ error.mul_(2 / error.numel())
            adam.step()
    return weight


class LearnedMap(Shift):
    """Transform statistics by a linear map fitted with gradient descent (LDC).

    >>> import torch
    >>> from efcil.core.class_stats import ClassStats
    >>> from efcil.features import TaskFeatures
    >>> old = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])  # the task's images, before it was learned
    >>> new = old @ torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # and after it: the axes have changed places
    >>> task = TaskFeatures.from_saved(1, 0, {"old": old, "new": new, "labels": torch.tensor([1, 1, 1, 1])}, (2,))
    >>> stats = ClassStats.from_features(torch.tensor([[4.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 0]))
    >>> LearnedMap(map_epochs=2000, map_lr=0.01)(stats, task).mean.round(decimals=1).abs().tolist()
    [[0.0, 3.0]]
    """

    options_type = LDCOptions

    def __call__(self, stats: ClassStats, features: TaskFeatures) -> ClassStats:
        """Fit the map to the task's features and transform the statistics."""
        old, new = features.old_new_pairs(self.options.shift_view)
        source = generator(old.device, RngStream.SHIFT, features.seed, features.index)
        return stats.transform(learned_map(old, new, self.options, source))
