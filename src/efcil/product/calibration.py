"""Probabilities without old pictures: one temperature, fitted on features drawn from what is kept of each class.

The probability of a class is softmax(scores / temperature). The temperature is the most likely one for features drawn
from every class's Gaussian (mean and covariance, from its Gram): the classes of all teachings count alike, and no
picture is needed. Such features are easier than new pictures: they come from pictures that backbone and classifier have
seen. How much easier is measured at each teaching, on its held-out pictures: the temperature that fits them over the
one that fits draws of the same classes. The mean of that ratio over the teachings (`CalibrationOffset`) corrects the
drawn temperature. While the backbone is frozen the ratio stays as it was: the statistics alone decide, and models add.

A method that keeps no Gram is fitted on the held-out pictures of the last teaching.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from efcil.core.class_stats import ClassStats
from efcil.core.linear_algebra import DTYPE
from efcil.randomness import RngStream, generator

DRAWS = 4096  # in all, and no fewer than ...
DRAWS_EACH = 8
STEPS = 60  # of bisection, in the logarithm
RANGE = 1e6  # of temperatures, either way from the scale of the scores


@dataclass(frozen=True)
class CalibrationOffset:
    """By how much temperatures from draws are too low: the mean logarithm of the ratio, over held-out pictures.

    >>> round(CalibrationOffset().merge(math.log(2.0), 30).factor, 3)
    1.682
    """

    log_ratio: float = 0.0
    images: int = 10  # a little weight on no optimism, for first teachings of few pictures

    def merge(self, log_ratio: float, images: int) -> CalibrationOffset:
        """The mean with another measurement."""
        total = self.images + images
        return CalibrationOffset((self.log_ratio * self.images + log_ratio * images) / total, total)

    @property
    def factor(self) -> float:
        """What a temperature from draws is multiplied by."""
        return math.exp(self.log_ratio)


def draw_features(stats: ClassStats, seed: int) -> tuple[Tensor, Tensor]:
    """Return features (n, dim) drawn from each class's Gaussian, and their classes' places in `stats` (n,)."""
    each = max(DRAWS_EACH, DRAWS // max(1, len(stats)))
    source = generator("cpu", RngStream.DRAWS, seed)
    found = []
    for index in range(len(stats)):
        one = stats.select(stats.classes[index : index + 1])
        spread = one.covariance(unbiased=True)[0]
        values, vectors = torch.linalg.eigh(spread)
        noise = torch.randn(each, stats.dim, dtype=DTYPE, generator=source).to(spread.device)
        found.append(one.mean + (noise * values.clamp_min(0).sqrt()) @ vectors.T)
    return torch.cat(found), torch.arange(len(stats), device=stats.mean.device).repeat_interleave(each)


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    """Return the temperature under which `labels` (n,) are most likely given scores (n, classes).

    The log-likelihood is concave in 1 / temperature, so its slope is bisected. The target of a row has the share
    1 - 1 / (n + 2) and all classes together the rest (Laplace's rule), so that scores that are always right give a
    finite temperature too.

    >>> rng = torch.Generator().manual_seed(0)
    >>> scores = torch.randn(20000, 3, generator=rng)
    >>> labels = torch.multinomial(torch.softmax(scores / 0.5, 1), 1, generator=rng)[:, 0]
    >>> round(fit_temperature(scores, labels), 1)
    0.5
    """
    scores = scores.to(DTYPE)
    if scores.shape[1] < 2 or len(scores) == 0:
        return 1.0
    rest = 1 / (len(scores) + 2)
    wanted = (1 - rest) * scores.gather(1, labels[:, None])[:, 0] + rest * scores.mean(1)
    scale = float(scores.std())
    if not scale > 0:
        return 1.0
    low, high = scale / RANGE, scale * RANGE  # temperatures
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        expected = (torch.softmax(scores / middle, 1) * scores).sum(1)
        if float((wanted - expected).sum()) > 0:  # sharper would be likelier
            high = middle
        else:
            low = middle
    return (low * high) ** 0.5
