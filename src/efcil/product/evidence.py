"""What learned images say of new ones: each is scored as if it had not been learned (SLDA, `leave_one_out`).

Of these scores a few sums are kept, of all images together, and no score: how far the margins of images (score of their
class less that of the class most similar to it) are from those of the class's mean, in units of what the covariance
predicts. With the sums, the statistics of the classes tell what to expect of the model as it is now, in closed form:

    P(j instead of c) = Phi(-(sqrt(delta / 2) + z) / s),     delta: margin of c's mean against j; z, s: mean and
    temperature       = s^2 delta / (delta + z sqrt(2 delta))       standard deviation of the residuals

Under linear discriminant analysis with the true covariance the margin has mean delta and variance 2 delta, so z = 0 and
s = 1. The same sums of `familiarity` and `distance` (`efcil.core.discriminant.Looks`) give the share of images of known
classes that look as strange as a new one: what is similar to the classes shows in the first, anything else in the
second.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from efcil.classifiers.shared_covariance import SharedCovariance
from efcil.core.discriminant import Looks
from efcil.core.linear_algebra import DTYPE
from efcil.product.calibration import SCORES, spread_out

ENOUGH = 10  # images of a class from which on its accuracy is predicted
PRIOR = (4.0, -1.0, 2.0)  # images, mean and standard deviation of the residuals before any is seen
WARMEST = 4.5  # the temperature is at most the margin of a class's mean through this
ONE_EACH = 10.0  # and it is that margin through this where no class has a second image, chosen on training images
OF_DISTANCE = 0.2  # part of the known images turned away that distance turns away, chosen on training images
_MOST = 2000  # classes of which all pairs are compared


@dataclass(frozen=True)
class Evidence:
    """Sums over images that were scored as if they had not been learned.

    >>> Evidence(2, 1.0, 3.0, 1.6, 1.3, 0.1, 0.2).merge(Evidence(1, 2.0, 4.0, 0.8, 0.7, 0.1, 0.1)).images
    3
    """

    images: int = 0
    residual: float = 0.0
    residual_square: float = 0.0
    familiarity: float = 0.0
    familiarity_square: float = 0.0
    distance: float = 0.0
    distance_square: float = 0.0

    def merge(self, other: Evidence) -> Evidence:
        """Return the sums over both."""
        return Evidence(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def spread(self) -> tuple[float, float]:
        """Mean and standard deviation of the residuals."""
        before, mean, deviation = PRIOR
        total = before + self.images
        center = (before * mean + self.residual) / total
        square = (before * (deviation**2 + mean**2) + self.residual_square) / total
        return center, math.sqrt(max(square - center**2, 0.25))

    def share_as_strange(self, looks: Looks) -> Tensor:
        """Return the share of images of known classes that look at least as strange, 0 to 1."""
        if self.images < ENOUGH:
            return torch.ones_like(looks.familiarity)
        unlike = self._share_below(looks.familiarity, self.familiarity, self.familiarity_square)
        far = self._share_below(-looks.distance, -self.distance, self.distance_square)
        limit = torch.minimum(unlike / (1 - OF_DISTANCE), far / OF_DISTANCE)
        parts = [1 - (share * limit).clamp_max(1) for share in (1 - OF_DISTANCE, OF_DISTANCE)]
        return (
            1 - parts[0] * parts[1]
        )  # known images that are beyond one limit or the other, which say different things

    def _share_below(self, values: Tensor, total: float, square: float) -> Tensor:
        mean = total / self.images
        deviation = math.sqrt(max(square / self.images - mean**2, 1e-12))
        return torch.special.ndtr((values - mean) / deviation)


NO_EVIDENCE = Evidence()


def gather(
    classifier: SharedCovariance, features: Tensor, labels: Tensor
) -> tuple[Evidence, dict[int, tuple[int, int]]]:
    """Score learned features (n, dim), behind the map, as new ones; return sums, and right ones of all by class.

    Classes of one image are left out: without it, nothing is known of them.
    """
    known = classifier.stats.count[labels] > 1
    features, labels = features[known], labels[known]
    if len(classifier.stats) < 2 or len(labels) == 0:
        return Evidence(), {}
    there, row = labels.unique(return_inverse=True)
    delta, rival = (found[row] for found in class_rivals(classifier, there))
    parts, distances = [], classifier.metric.distances(classifier.stats)
    for part in torch.arange(len(labels), device=labels.device).split(_rows(classifier)):
        scores, looks = classifier.leave_one_out(features[part], labels[part], distances)
        own, other = (scores.gather(1, of[part, None])[:, 0] for of in (labels, rival))
        parts.append((scores.argmax(1) == labels[part], own - other, *looks))
    right, margin, familiarity, distance = map(torch.cat, zip(*parts, strict=True))
    count, hits = torch.bincount(row), torch.bincount(row, weights=right.to(DTYPE))
    found = {int(c): (int(h), int(n)) for c, h, n in zip(there, hits, count, strict=True)}
    rest = (margin - delta) / (2 * delta).sqrt()
    usable = (delta > 0) & rest.isfinite() & familiarity.isfinite() & distance.isfinite()
    sums = [float(part.sum()) for x in (rest, familiarity, distance) for part in (x[usable], x[usable].square())]
    return Evidence(int(usable.sum()), *sums), found


def _rows(classifier: SharedCovariance) -> int:
    """Return of how many images or classes the scores for all classes are computed at once."""
    return max(1, SCORES // max(1, len(classifier.means)))


def class_rivals(classifier: SharedCovariance, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the margin of each of these classes' means against the most similar class, and which that is."""
    found = []
    for part in classes.split(_rows(classifier)):
        scores, row = classifier.mapped_logits(classifier.means[part]), torch.arange(len(part), device=part.device)
        own = scores[row, part]
        scores[row, part] = -float("inf")
        nearest = scores.max(1)
        found.append((own - nearest.values, nearest.indices))
    delta, rival = map(torch.cat, zip(*found, strict=True))
    return delta, rival


def class_margins(classifier: SharedCovariance) -> Tensor:
    """Return by how much each class's mean scores more for its class than for each other one, (k, k); itself: inf."""
    scores = classifier.mapped_logits(classifier.means)
    return (scores.diag()[:, None] - scores).fill_diagonal_(float("inf"))


def temperature(classifier: SharedCovariance, evidence: Evidence) -> float:
    """Return the temperature of probabilities that are as often right as they say.

    Of more classes than can be compared with all in time that is linear in classes, some are (`spread_out`).
    """
    k = len(classifier.means)
    if k < 2:
        return 1.0
    every = torch.arange(k, device=classifier.means.device)
    delta, _ = class_rivals(classifier, every if k <= _MOST else spread_out(classifier.means, _rows(classifier)))
    delta = delta[delta > 0].to(DTYPE)
    if len(delta) == 0:
        return 1.0
    if bool((classifier.stats.count <= 1).all()):  # nothing says what a class varies in
        return float((delta / ONE_EACH).mean().clamp_min(1e-6))
    mean, deviation = evidence.spread
    warm = deviation**2 * delta / (delta + mean * (2 * delta).sqrt()).clamp_min(1e-6 * delta)
    return float(torch.minimum(warm, delta / WARMEST).mean().clamp_min(1e-6))


def expected_errors(classifier: SharedCovariance, evidence: Evidence) -> Tensor | None:
    """Return the share of images of each class that would be taken for each other one, (k, k); None: not known."""
    if not 2 <= len(classifier.means) <= _MOST or evidence.images < ENOUGH:
        return None
    mean, deviation = evidence.spread
    delta = class_margins(classifier).clamp_min(0)
    return torch.special.ndtr(-((delta / 2).sqrt() + mean) / deviation).fill_diagonal_(0)
