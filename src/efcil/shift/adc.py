"""Adversarial drift compensation (Goswami et al., CVPR 2024): estimate the drift of class means on adversarial images.

For each old class, select the `samples` current images X whose old features are nearest to its mean, update them
`iterations` times by

    X <- clip(X - step g / ||g||),    g = the gradient by X of ||old(X) - mean||^2

and average the drift new(X) - old(X) over the images whose nearest old mean is now that of the class.

As in the released code: X is the network's input (normalized pixels); ||g|| is one norm over all images of a class, so
the average image moves by step / sqrt(samples); X is clipped to the range of the task's normalized pixels, one range
for all channels; for a class that no image reaches, the drift is that of its nearest unmodified images. One deviation:
there the means are updated one after the other, and updated ones affect the filter of later classes; here all drifts
are computed from the old means.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from efcil.accel.backend import Backend
from efcil.config import Options
from efcil.core.class_stats import ClassStats
from efcil.core.linear_algebra import DTYPE
from efcil.features import TaskFeatures
from efcil.shift.base import Shift
from efcil.training.feature_inversion import batch_size_for, invert_features
from efcil.training.memory import memory_guard

GROUP_NUMBERS = 2**25  # chunk size in pixels or features: 109 classes of 100 CIFAR images
BATCH_IMAGES = 1024  # chunk size to find the pixel range


class ADCOptions(Options):
    """Options of the adversarial images."""

    step: float = Field(default=25.0, gt=0)
    """Step size of the adversarial images, alpha."""
    iterations: int = Field(default=3, ge=1)
    """Steps, i."""
    samples: int = Field(default=100, ge=1)
    """Images per old class, m; a task with fewer images gives all of them."""
    shift_view: Literal["clean", "augmented"] = "clean"
    """Images that the adversarial ones start from; the authors' code takes augmented ones."""


def adversarial_drift(means: Tensor, task: TaskFeatures, options: ADCOptions) -> Tensor:
    """Estimate the drift (classes, dim) of the old `means` (classes, dim)."""
    r, view = task.learner, options.shift_view
    means = means.to(DTYPE)
    old, new = task.old(view).to(DTYPE), task.new(view).to(DTYPE)
    pixels = task.pixels(view)
    center = pixels.center_crop(r.options.crop) if view == "clean" else None  # augmented images are cropped already

    def cropped(images: Tensor) -> Tensor:
        return images if center is None else center.apply(images, {})

    parts = [(x.amin((0, 2, 3)), x.amax((0, 2, 3))) for x in map(cropped, pixels.batches(BATCH_IMAGES))]
    lowest, highest = (torch.stack(found) for found in zip(*parts, strict=True))
    extremes = torch.stack([lowest.amin(0), highest.amax(0)])[:, :, None, None]
    bounds = pixels.normalize(extremes).aminmax()  # (min, max)

    samples = min(options.samples, len(old))
    nearest = torch.cdist(means, old).topk(samples, largest=False).indices  # (classes, samples)
    group = max(1, GROUP_NUMBERS // (samples * max(math.prod(pixels.images.shape[1:]), old.shape[1])))
    r.old_backbone.eval()
    r.backbone.eval()
    drifts = []
    with memory_guard("making adversarial images"):
        for classes in torch.arange(len(means), device=means.device).split(group):
            (chosen,) = pixels.batches_of([nearest[classes].flatten()])
            start = pixels.normalize(cropped(chosen))
            goals = means[classes].repeat_interleave(samples, 0)
            changed = invert_features(r.old_backbone, start, goals, options.step, options.iterations, bounds, samples)
            before, after = (_features(backbone, changed, r.backend) for backbone in (r.old_backbone, r.backbone))
            hit = torch.cdist(before, means).argmin(1).view(-1, samples) == classes[:, None]
            hits = hit.sum(1, keepdim=True)
            moves = (after - before).view(len(classes), samples, -1)
            drift = (hit.to(DTYPE)[:, None] @ moves)[:, 0] / hits.clamp_min(1)
            missed = hits[:, 0] == 0
            plain = nearest[classes[missed]]
            drift[missed] = (new[plain] - old[plain]).mean(1)
            drifts.append(drift)
    return torch.cat(drifts)


@torch.no_grad()
def _features(backbone: nn.Module, inputs: Tensor, backend: Backend) -> Tensor:
    """Compute features of network inputs in the same precision as those of the means."""
    with backend.autocast():
        return torch.cat([backbone(x).to(DTYPE) for x in inputs.split(batch_size_for(inputs))])


class AdversarialDrift(Shift):
    """Translate each mean by the drift of adversarial images (ADC); needs the task's images.

    >>> from efcil import LwF, Method, NearestMean, TaskStream
    >>> stream = TaskStream.from_dataset("digits", tasks=5)
    >>> method = Method(learner=LwF(epochs=1), shift=AdversarialDrift(samples=20), classifier=NearestMean)
    >>> for task in stream[:2]:
    ...     accuracies = method.learn(task).evaluate(stream)
    >>> accuracies.shape
    (2,)
    """

    options_type = ADCOptions
    moves = "mean"
    needs_images = True

    def __call__(self, stats: ClassStats, features: TaskFeatures) -> ClassStats:
        """Estimate the drift and translate the means."""
        return stats.translate(adversarial_drift(stats.mean, features, self.options))
