"""Semantic drift compensation (Yu et al., CVPR 2020): estimate the drift of class means from nearby images.

drift_c = sum_i w_ic (new_i - old_i) / sum_i w_ic,    w_ic = exp(-||old_i - mean_c||^2 / (2 sigma^2)) + floor
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from efcil.core.class_stats import ClassStats
from efcil.core.feature_maps import FeatureMap, UnitLength
from efcil.core.linear_algebra import DTYPE
from efcil.features import TaskFeatures
from efcil.learners.base import ImageView
from efcil.shift.base import PairsOptions, Shift


class SDCOptions(PairsOptions):
    """Options of the translation."""

    sigma: float = Field(default=0.3, ge=1e-6)
    """Width of the kernel; DPCR's appendix: 0.3 (CIFAR-100, Tiny-ImageNet), 1.0 (ImageNet-100)."""
    floor: float = Field(default=1e-5, ge=0)
    """Added to every weight by ADC's code; commented out in SDC's own."""
    # SDC uses L2-normalized features, which sigma assumes. ADC's code runs SDC on raw features, where all kernels are
    # negligible compared with the floor and every class drifts like the mean of all images.
    unit_features: bool = True
    """Normalize features for the kernel, which sigma is meant for."""
    shift_view: ImageView = "clean"
    """Images whose drift is measured; both repositories take augmented ones."""


def kernel_drift(means: Tensor, old: Tensor, new: Tensor, sigma: float, floor: float) -> Tensor:
    """Estimate the drift (classes, dim) of `means` (classes, dim) from features (n, dim) before and after a task.

    Weights are normalized in log space: if every kernel underflows and the floor is zero, the nearest image determines
    the drift.

    >>> old, new = torch.tensor([[0.0], [9.0]]), torch.tensor([[1.0], [11.0]])
    >>> kernel_drift(torch.tensor([[0.0], [9.0], [1e6]]), old, new, sigma=0.3, floor=0.0).tolist()
    [[1.0], [2.0], [2.0]]
    """
    means, old, new = means.to(DTYPE), old.to(DTYPE), new.to(DTYPE)
    exponent = torch.cdist(means, old).square_().div_(-2 * sigma**2)
    log_floor = torch.tensor(floor, dtype=DTYPE, device=old.device).log()  # -inf without a floor
    return torch.softmax(torch.logaddexp(exponent, log_floor), dim=1) @ (new - old)


class KernelDrift(Shift):
    """Translate each mean by the kernel-weighted drift of current images (SDC).

    >>> import torch
    >>> from efcil.core.class_stats import ClassStats
    >>> from efcil.core.gram_storage import MEANS
    >>> from efcil.features import TaskFeatures
    >>> old = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])  # the task's images, before it was learned
    >>> new = old @ torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # and after it: the axes have changed places
    >>> task = TaskFeatures.from_saved(1, 0, {"old": old, "new": new, "labels": torch.tensor([1, 1, 1, 1])}, (2,))
    >>> stats = ClassStats.from_features(torch.tensor([[4.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 0]), MEANS)
    >>> KernelDrift(unit_features=False, sigma=1.0)(stats, task).mean.round(decimals=1).tolist()
    [[1.3, 1.7]]
    """

    options_type = SDCOptions
    moves = "mean"

    @property
    def feature_map(self) -> FeatureMap | None:
        """L2-normalized features, which sigma assumes."""
        return UnitLength() if self.options.unit_features else None

    def __call__(self, stats: ClassStats, features: TaskFeatures) -> ClassStats:
        """Estimate the drift and translate the means."""
        old, new = features.old_new_pairs(self.options.shift_view)
        return stats.translate(kernel_drift(stats.mean, old, new, self.options.sigma, self.options.floor))
