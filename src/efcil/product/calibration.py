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
from efcil.core.linear_algebra import DTYPE, covariance_root
from efcil.randomness import RngStream, generator

DRAWS = 4096  # in total, at most, ...
SCORES = 2**22  # ... and as few as have no more scores together: the cost is linear in classes
STEPS = 60  # of Newton's method or, where it leaves the range, of bisection in log space
CONVERGED = 1e-12  # relative change of the temperature
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
    """Sample features (n, dim) from class Gaussians; return them with class indices in `stats` (n,).

    Of more classes than can be drawn from, some are: those at equal distances in the order along a random direction,
    in which noise is assigned as well. So the draws do not depend on the order in which the classes were learned.
    """
    k = len(stats)
    total = max(1, min(DRAWS, SCORES // max(1, k)))
    source = generator("cpu", RngStream.DRAWS, seed)
    order = spread_out(stats.mean, total, source)
    each = max(1, total // max(1, k))
    samples: list[Tensor] = []
    root = stats.mean.new_zeros(0)
    for place in order.tolist():
        one = stats.select(stats.classes[place : place + 1]) if stats.shared is None else stats
        if not samples or stats.shared is None:  # else all classes have one covariance
            root = covariance_root(one.covariance(unbiased=True)[0])
        noise = torch.randn(each, stats.dim, dtype=DTYPE, generator=source).to(stats.mean.device)
        samples.append(stats.mean[place] + noise @ root.T)
    drawn = torch.cat(samples) if samples else stats.mean.new_zeros(0, stats.dim)
    return drawn, order.repeat_interleave(each)


def spread_out(means: Tensor, most: int, source: torch.Generator | None = None) -> Tensor:
    """Return at most `most` classes, evenly spaced along a random direction of the class means."""
    source = source or generator("cpu", RngStream.DRAWS, 0)
    direction = torch.randn(means.shape[1], dtype=DTYPE, generator=source).to(means.device)
    order = (means @ direction).argsort()
    return order if len(order) <= most else order[torch.arange(most, device=order.device) * len(order) // most]


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    """Return the maximum-likelihood temperature for `labels` (n,) and scores (n, classes).

    The log-likelihood is concave in 1 / temperature, so Newton's method, kept in brackets, finds it. Targets are
    smoothed by Laplace's rule: weight 1 - 1 / (n + 2) on the label and the remainder uniform, so that the temperature
    is finite even without errors.

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
    low, high = 1 / (scale * RANGE), RANGE / scale  # of 1 / temperature
    inverse = 1 / scale
    for _ in range(STEPS):
        probabilities = torch.softmax(scores * inverse, 1)
        expected = (probabilities * scores).sum(1)
        slope = float((target - expected).sum())
        low, high = (inverse, high) if slope > 0 else (low, inverse)
        curvature = float((probabilities.mul_(scores) * scores).sum() - expected.square().sum())
        step = inverse + slope / curvature if curvature > 0 else 0.0
        after = step if low < step < high else (low * high) ** 0.5
        if abs(after - inverse) <= CONVERGED * inverse:
            break
        inverse = after
    return 1 / inverse
