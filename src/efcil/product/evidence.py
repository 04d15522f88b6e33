"""Estimate accuracy, confidence and novelty from leave-one-out scores of training images (SLDA).

Only sums over all images are kept, no score of an image: sums of the residuals between the margin of an image (score of
its class minus that of the most similar class) and the margin of the class mean, in units of the standard deviation
that the covariance predicts. From these sums and the class statistics, the behavior of the current model follows in
closed form:

    P(j instead of c) = Phi(-(sqrt(delta / 2) + z) / s),     delta: margin of c's mean over j; z, s: mean and
    temperature       = s^2 delta / (delta + z sqrt(2 delta))       standard deviation of the residuals

Under linear discriminant analysis with the true covariance the margin has mean delta and variance 2 delta, so z = 0 and
s = 1. Sums of the two novelty scores (`efcil.core.discriminant.NoveltyScores`) give the p-value of an image: the share
of images of known classes with at least as extreme scores.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from efcil.classifiers.shared_covariance import SharedCovariance
from efcil.core.discriminant import NoveltyScores
from efcil.core.linear_algebra import DTYPE
from efcil.product.calibration import SCORES, spread_out

ENOUGH = 10  # images of a class from which on its accuracy is predicted
PRIOR = (4.0, -1.0, 2.0)  # prior of the residuals: number of images, mean, standard deviation
WARMEST = 4.5  # the temperature is at most the margin of a class mean divided by this
ONE_EACH = 10.0  # divisor of that margin if no class has a second image, chosen on training images
OF_DISTANCE = 0.2  # share of rejected known images that distance rejects, chosen on training images
MOST = 2000  # classes of which all pairs are compared
_MOST_SCORES = 2**24  # scores of training images: 80 images of each of 450 classes


@dataclass(frozen=True)
class Evidence:
    """Sums of leave-one-out scores over training images.

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
        """Return mean and standard deviation of the residuals."""
        before, mean, deviation = PRIOR
        total = before + self.images
        center = (before * mean + self.residual) / total
        square = (before * (deviation**2 + mean**2) + self.residual_square) / total
        return center, math.sqrt(max(square - center**2, 0.25))

    def p_value(self, scores: NoveltyScores) -> Tensor:
        """Return the share of images of known classes with at least as extreme scores, 0 to 1.

        Both scores are limited so that each rejects its share of known images; they are treated as independent.
        """
        if self.images < ENOUGH:
            return torch.ones_like(scores.familiarity)
        unfamiliar = self._share_below(scores.familiarity, self.familiarity, self.familiarity_square)
        distant = self._share_below(-scores.distance, -self.distance, self.distance_square)
        limit = torch.minimum(unfamiliar / (1 - OF_DISTANCE), distant / OF_DISTANCE)
        kept = [1 - (share * limit).clamp_max(1) for share in (1 - OF_DISTANCE, OF_DISTANCE)]
        return 1 - kept[0] * kept[1]

    def _share_below(self, values: Tensor, total: float, square: float) -> Tensor:
        mean = total / self.images
        deviation = math.sqrt(max(square / self.images - mean**2, 1e-12))
        return torch.special.ndtr((values - mean) / deviation)


NO_EVIDENCE = Evidence()


def gather(
    classifier: SharedCovariance, features: Tensor, labels: Tensor
) -> tuple[Evidence, dict[int, tuple[int, int]]]:
    """Return the sums over training features (n, dim), and (correct, all) images of each class.

    Classes of one image are left out, since nothing is known of them without it. At most `_MOST_SCORES` are computed:
    of more images with more classes, images at equal distances in the order of classes are scored.
    """
    rows = (classifier.stats.count[labels] > 1).nonzero()[:, 0]
    most = max(ENOUGH, _MOST_SCORES // max(1, len(classifier.stats)))
    if len(rows) > most:
        spread = torch.arange(most, device=rows.device) * len(rows) // most
        rows = rows[labels[rows].argsort(stable=True)[spread]]
    labels = labels[rows]
    if len(classifier.stats) < 2 or len(labels) == 0:
        return Evidence(), {}
    there, row = labels.unique(return_inverse=True)
    delta, rival = (found[row] for found in class_rivals(classifier, there))
    distances = classifier.metric.distances(classifier.stats)
    right, (margin, familiarity, distance) = torch.empty_like(labels, dtype=torch.bool), delta.new_empty(3, len(labels))
    for part in torch.arange(len(labels), device=labels.device).split(_rows(classifier)):
        mapped = classifier.feature_maps[0](features[rows[part]], ()).to(DTYPE)
        scores, novelty = classifier.leave_one_out(mapped, labels[part], distances)
        own, other = (scores.gather(1, of[part, None])[:, 0] for of in (labels, rival))
        right[part], margin[part] = scores.argmax(1) == labels[part], own - other
        familiarity[part], distance[part] = novelty
    count, hits = torch.bincount(row), torch.bincount(row, weights=right.to(DTYPE))
    found = {int(c): (int(h), int(n)) for c, h, n in zip(there, hits, count, strict=True)}
    rest = (margin - delta) / (2 * delta).sqrt()
    usable = (delta > 0) & rest.isfinite() & familiarity.isfinite() & distance.isfinite()
    sums = [float(part.sum()) for x in (rest, familiarity, distance) for part in (x[usable], x[usable].square())]
    return Evidence(int(usable.sum()), *sums), found


def _rows(classifier: SharedCovariance) -> int:
    """Return the number of images or classes per chunk of scores for all classes."""
    return max(1, SCORES // max(1, len(classifier.means)))


def class_rivals(classifier: SharedCovariance, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the margin of each class mean over the most similar class, and that class."""
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
    """Return the margins of class means over each other class, (k, k); the diagonal is inf."""
    scores = classifier.mapped_logits(classifier.means)
    return (scores.diag()[:, None] - scores).fill_diagonal_(float("inf"))


def temperature(classifier: SharedCovariance, evidence: Evidence) -> float:
    """Return the temperature that calibrates the probabilities.

    With more than `MOST` classes a spread-out subset is compared with all, which takes time linear in classes.
    """
    k = len(classifier.means)
    if k < 2:
        return 1.0
    every = torch.arange(k, device=classifier.means.device)
    delta, _ = class_rivals(classifier, every if k <= MOST else spread_out(classifier.means, _rows(classifier)))
    delta = delta[delta > 0].to(DTYPE)
    if len(delta) == 0:
        return 1.0
    if bool((classifier.stats.count <= 1).all()):  # the within-class covariance is unknown
        return float((delta / ONE_EACH).mean().clamp_min(1e-6))
    mean, deviation = evidence.spread
    warm = deviation**2 * delta / (delta + mean * (2 * delta).sqrt()).clamp_min(1e-6 * delta)
    return float(torch.minimum(warm, delta / WARMEST).mean().clamp_min(1e-6))


def expected_errors(classifier: SharedCovariance, evidence: Evidence) -> Tensor | None:
    """Return the estimated rate at which each class is confused with each other one, (k, k); None if unknown."""
    if not 2 <= len(classifier.means) <= MOST or evidence.images < ENOUGH:
        return None
    mean, deviation = evidence.spread
    delta = class_margins(classifier).clamp_min(0)
    return torch.special.ndtr(-((delta / 2).sqrt() + mean) / deviation).fill_diagonal_(0)


def expected_confusions(classifier: SharedCovariance, evidence: Evidence) -> Tensor | None:
    """Return the estimated shares of each class's images by predicted class, (k, k); None if unknown.

    The diagonal is the expected recall, the product of 1 - `expected_errors`; the other images are divided in
    proportion to these errors. Each row sums to 1.
    """
    errors = expected_errors(classifier, evidence)
    if errors is None:
        return None
    recall = (1 - errors).prod(1)
    total = errors.sum(1).clamp_min(torch.finfo(errors.dtype).tiny)
    return errors * ((1 - recall) / total)[:, None] + recall.diag()
