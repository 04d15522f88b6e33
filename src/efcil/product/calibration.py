"""Temperature scaling without old images, fitted on features sampled from class statistics.

The probability of a class is softmax(scores / temperature). The temperature maximizes the likelihood of features
sampled from the Gaussians of all classes (mean and covariance, from the Gram), so classes of all updates have equal
weight. Sampled features are easier than new images, as the statistics come from training images. The difference is
measured in each update on held-out images: the ratio of the temperature fitted on them to the one fitted on samples of
the same classes. The mean ratio over all updates (`CalibrationOffset`) corrects the temperature. With a frozen backbone
the ratio is not updated, so that the temperature depends only on the statistics and models can be merged. For a method
without Grams the temperature is fitted on the held-out images of the last update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from efcil.core.class_stats import ClassStats
from efcil.core.linear_algebra import DTYPE
from efcil.randomness import RngStream, generator

DRAWS = 4096  # in total, but at least ...
DRAWS_EACH = 8
STEPS = 60  # of bisection in log space
RANGE = 1e6  # of temperatures, relative to the scale of the scores


@dataclass(frozen=True)
class CalibrationOffset:
    """Mean log ratio of temperatures fitted on held-out images and on samples, weighted by images.

    >>> round(CalibrationOffset().merge(math.log(2.0), 30).factor, 3)
    1.682
    """

    log_ratio: float = 0.0
    images: int = 10  # prior weight of ratio one, for first updates with few images

    def merge(self, log_ratio: float, images: int) -> CalibrationOffset:
        """Return the mean including another measurement."""
        total = self.images + images
        return CalibrationOffset((self.log_ratio * self.images + log_ratio * images) / total, total)

    @property
    def factor(self) -> float:
        """Factor for temperatures fitted on samples."""
        return math.exp(self.log_ratio)


def draw_features(stats: ClassStats, seed: int) -> tuple[Tensor, Tensor]:
    """Sample features (n, dim) from class Gaussians; return them with class indices in `stats` (n,)."""
    each = max(DRAWS_EACH, DRAWS // max(1, len(stats)))
    source = generator("cpu", RngStream.DRAWS, seed)
    samples = []
    for index in range(len(stats)):
        one = stats.select(stats.classes[index : index + 1])
        if index == 0 or stats.shared is None:  # else all classes have one covariance
            values, vectors = torch.linalg.eigh(one.covariance(unbiased=True)[0])
        noise = torch.randn(each, stats.dim, dtype=DTYPE, generator=source).to(values.device)
        samples.append(one.mean + (noise * values.clamp_min(0).sqrt()) @ vectors.T)
    return torch.cat(samples), torch.arange(len(stats), device=stats.mean.device).repeat_interleave(each)


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    """Return the maximum-likelihood temperature for `labels` (n,) and scores (n, classes).

    The log-likelihood is concave in 1 / temperature, so its derivative is bisected. Targets are smoothed by Laplace's
    rule: weight 1 - 1 / (n + 2) on the label and the remainder uniform, so that the temperature is finite even without
    errors.

    >>> rng = torch.Generator().manual_seed(0)
    >>> scores = torch.randn(20000, 3, generator=rng)
    >>> labels = torch.multinomial(torch.softmax(scores / 0.5, 1), 1, generator=rng)[:, 0]
    >>> round(fit_temperature(scores, labels), 1)
    0.5
    """
    scores = scores.to(DTYPE)
    if scores.shape[1] < 2 or len(scores) == 0:
        return 1.0
    smoothing = 1 / (len(scores) + 2)
    target = (1 - smoothing) * scores.gather(1, labels[:, None])[:, 0] + smoothing * scores.mean(1)
    scale = float(scores.std())
    if not scale > 0:
        return 1.0
    low, high = scale / RANGE, scale * RANGE  # temperatures
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        expected = (torch.softmax(scores / middle, 1) * scores).sum(1)
        if float((target - expected).sum()) > 0:  # a lower temperature is more likely
            high = middle
        else:
            low = middle
    return (low * high) ** 0.5
