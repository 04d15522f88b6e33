"""Estimate accuracy, confidence and novelty from leave-one-out deviations of training images (SLDA).

Only sums over all images are kept, no score of an image. From them and the class statistics the behavior of the
current model follows in closed form. The margin of a new image of class c over class j (the difference of their scores)
is taken as normal:

    mean      = delta - loss                delta: margin of the mean of class c
    variance  = spread^2 2 delta / known    loss  = nu / n_c (1 - pull (D_cc - D_cj))

The mean of n_c images is nearer to them than to new ones, so new images lose nu / n_c of the margin, with nu the
squared distance of a new image from the mean of its class (`SharedMetric.new_noise`). Class means are a small part of
the shared covariance; the last factor is how little of the loss that leaves (D: inner products of class means, in the
metric). 2 delta is the variance under linear discriminant analysis with the true covariance; new images vary more, the
fewer were learned. `known`, the squared distance of learned images relative to that of new ones, follows that; what is
left hardly depends on the number of images and classes, so sums of earlier rounds stay valid. It is measured on
training images, each without itself: t is the deviation of an image from the mean of its class in the direction that
separates it from the most similar class,

    spread = sqrt(pi / 2) sum |t| / sum sqrt(2 delta / known)
    t      = u (w_c - w_j) / (1 - leverage) sqrt(n / (n - 1)),   u = x - mu_c

|t| rather than t^2, as outliers have less effect. An image is recognized if it has a positive margin over each other
class. These margins are correlated: with one common normal factor z, correlation r (`RELATED`), and j over the most
similar classes,

    P(right) = E_z prod_j Phi((mean_j / deviation_j + sqrt(r) z) / sqrt(1 - r))

Margins are no normal variables: they have heavier tails, and classes differ. So each update with enough images of a
class compares P(right) with the share that is recognized of its images, each without itself. The factor on the spread
at which both are equal is known the better the more errors there are: the mean of its log over updates is weighted by
the information that a share gives, n (dP / dlog spread)^2 / (P (1 - P)).

The temperature maximizes the likelihood of margins that are drawn from this model.

Sums of the two novelty scores (`efcil.core.discriminant.NoveltyScores`) give the p-value of an image: the share of
images of known classes with at least as extreme scores.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from efcil.classifiers.shared_covariance import SharedCovariance
from efcil.core.discriminant import NoveltyScores
from efcil.core.linear_algebra import DTYPE, EPS
from efcil.product.calibration import SCORES, fit_temperature, spread_out
from efcil.randomness import RngStream, generator

ENOUGH = 10  # images of a class from which on its accuracy is predicted
PRIOR = (4.0, 2.0)  # prior of `Evidence.spread`: number of images, value
PRIOR_EXCESS = 10.0  # information of the prior of the factor on it, which is 1
RELATED = 0.8  # correlation of an image's margins over different classes, chosen on training images
RIVALS = 32  # most similar classes that an image is compared with
WARMEST = 4.5  # the temperature is at most the mean margin of class means divided by this
ONE_EACH = 10.0  # divisor of that margin if no class has a second image, chosen on training images
OF_DISTANCE = 0.2  # share of rejected known images that distance rejects, chosen on training images
MOST = 2000  # classes of which all pairs are compared
_CLASSES = 128  # classes of which margins are drawn, ...
_DRAWN = 256  # ... and draws of each
_MOST_DRAWN = 2**20  # drawn margins
_FACTORS = 64  # values of the common factor
_MOST_SCORES = 2**24  # scores of training images: 80 images of each of 450 classes


@dataclass(frozen=True)
class Evidence:
    """Sums of leave-one-out scores over training images.

    >>> Evidence(2, 1.0, 3.0, 1.6, 1.3, 0.1, 0.2).merge(Evidence(1, 2.0, 4.0, 0.8, 0.7, 0.1, 0.1)).images
    3
    """

    images: int = 0
    deviation: float = 0.0  # sum of the deviations |t|
    predicted: float = 0.0  # sum of the standard deviations sqrt(2 delta / known)
    familiarity: float = 0.0
    familiarity_square: float = 0.0
    distance: float = 0.0
    distance_square: float = 0.0
    information: float = 0.0  # of classes of `ENOUGH` images, on the log of the factor on the spread
    excess: float = 0.0  # sum of this log, weighted by the information

    def merge(self, other: Evidence) -> Evidence:
        """Return the sums over both."""
        return Evidence(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def spread(self) -> float:
        """Return the standard deviation of margins of new images, relative to sqrt(2 delta / known)."""
        before, usual = PRIOR
        if not self.predicted > 0:
            return usual
        measured = math.sqrt((before * usual**2 + self.images * self.measured**2) / (before + self.images))
        return measured * math.exp(self.excess / (PRIOR_EXCESS + self.information))

    @property
    def measured(self) -> float:
        """Return the spread that deviations show, without `excess`."""
        return math.sqrt(math.pi / 2) * min(self.deviation / self.predicted, 1e3)

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
    right, (along, familiarity, distance) = torch.empty_like(labels, dtype=torch.bool), delta.new_empty(3, len(labels))
    for part in torch.arange(len(labels), device=labels.device).split(_rows(classifier)):
        mapped = classifier.feature_maps[0](features[rows[part]], ()).to(DTYPE)
        scores, novelty = classifier.leave_one_out(mapped, labels[part], distances)
        right[part] = scores.argmax(1) == labels[part]
        along[part] = _deviations(classifier, mapped, labels[part], rival[part])
        familiarity[part], distance[part] = novelty
    count, hits = torch.bincount(row), torch.bincount(row, weights=right.to(DTYPE))
    found = {int(c): (int(h), int(n)) for c, h, n in zip(there, hits, count, strict=True)}
    usable = (delta > 0) & along.isfinite() & familiarity.isfinite() & distance.isfinite()
    sums = [float(part.sum()) for x in (familiarity, distance) for part in (x[usable], x[usable].square())]
    deviation, predicted = float(along[usable].abs().sum()), float(_predicted(classifier, delta[usable]).sum())
    evidence = Evidence(int(usable.sum()), deviation, predicted, *sums)
    return evidence.merge(_compare(classifier, evidence, there, hits, count)), found


def _compare(
    classifier: SharedCovariance, evidence: Evidence, classes: Tensor, hits: Tensor, count: Tensor
) -> Evidence:
    """Find the factor on the spread that explains how many images of each class are recognized (`hits`)."""
    enough = classifier.stats.count[classes] >= ENOUGH
    if not evidence.predicted > 0 or not bool(enough.any()):
        return NO_EVIDENCE
    weight = count[enough].to(DTYPE)
    margins = _margins(classifier, classes[enough], left_out=True)
    wanted = (float(hits[enough].sum()) + 0.5) / (float(weight.sum()) + 1)

    def recognized(excess: float) -> float:
        shares = _recognized(margins, evidence.measured * math.exp(excess))
        return float(shares @ weight / weight.sum())

    low, high = -1.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        found = recognized(middle)
        low, high = (middle, high) if found > wanted else (low, middle)
    slope = (recognized(low + 0.1) - recognized(low - 0.1)) / 0.2
    information = float(weight.sum()) * slope**2 / (wanted * (1 - wanted))
    return Evidence(information=information, excess=low * information)


def _deviations(classifier: SharedCovariance, features: Tensor, labels: Tensor, rival: Tensor) -> Tensor:
    """Return how far images are from the mean of their class, without themselves, on the way to another class."""
    stats, weight = classifier.stats, classifier.weight
    count = stats.count[labels].to(DTYPE)
    along = ((features - stats.mean[labels]) * (weight[:, labels] - weight[:, rival]).T).sum(1)
    alone = 1 - classifier.metric.leverage(stats, features, labels)
    return along / alone.clamp_min(1e-6) * (count / (count - 1)).sqrt()


def _predicted(classifier: SharedCovariance, delta: Tensor) -> Tensor:
    """Return the standard deviation of margins, up to the factor that is measured."""
    return (2 * delta.clamp_min(EPS) / classifier.metric.known).sqrt()


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


@dataclass(frozen=True)
class _Margins:
    """Normal distributions of the margins of new images of classes (m) over all classes (k)."""

    delta: Tensor  # (m, k), margins of class means; inf over the class itself
    mean: Tensor  # (m, k)
    deviation: Tensor  # (m, k), standard deviations, for a spread of 1

    @property
    def nearest(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the margins over the nearest rivals, (m, rivals)."""
        most = min(RIVALS, self.delta.shape[1] - 1)
        place = (self.mean / self.deviation).topk(most, 1, largest=False).indices
        return self.mean.gather(1, place), self.deviation.gather(1, place)


def _margins(classifier: SharedCovariance, classes: Tensor, left_out: bool = False) -> _Margins:
    """Return the margins of new images or, `left_out`, of learned ones without themselves."""
    metric, means, row = classifier.metric, classifier.means[classes], torch.arange(len(classes), device=classes.device)
    scores = classifier.mapped_logits(means)
    delta = scores[row, classes][:, None] - scores
    inner = scores - classifier.bias - classifier.means.mean(0) @ classifier.weight
    part = 1 - metric.pull * (inner[row, classes][:, None] - inner)
    count = classifier.stats.count[classes].clamp_min(1)[:, None]
    loss = metric.new_noise / count * part.clamp(0, 1)
    delta[row, classes] = float("inf")
    apart = delta + loss / (count - 1).clamp_min(1) if left_out else delta
    return _Margins(delta, delta - loss, _predicted(classifier, apart).nan_to_num(posinf=1.0))


def temperature(classifier: SharedCovariance, evidence: Evidence) -> float:
    """Return the temperature that calibrates the probabilities.

    With more than `_CLASSES` classes a spread-out subset is compared with all, which takes time linear in classes.
    """
    k = len(classifier.means)
    if k < 2:
        return 1.0
    found = [_margins(classifier, part) for part in spread_out(classifier.means, _CLASSES).split(_rows(classifier))]
    delta = torch.cat([margins.delta.min(1).values for margins in found])
    mean, deviation = (torch.cat(part)[delta > 0] for part in zip(*(m.nearest for m in found), strict=True))
    delta = delta[delta > 0]
    if len(delta) == 0:
        return 1.0
    if bool((classifier.stats.count <= 1).all()):  # the within-class covariance is unknown
        return float((delta / ONE_EACH).mean().clamp_min(1e-6))
    drawn = _draw(mean, evidence.spread * deviation)
    fitted = fit_temperature(drawn, torch.zeros(len(drawn), dtype=torch.long, device=drawn.device))
    return max(1e-6, min(fitted, float((delta / WARMEST).mean())))


def _draw(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return drawn scores, relative to the right class: 0 for it, first, and those of its nearest rivals.

    The common factor has evenly spaced quantiles; noise is assigned to rivals by rank, whatever the order of classes.
    """
    classes, rivals = mean.shape
    count = max(1, min(_DRAWN, _MOST_DRAWN // (classes * rivals)))
    own = torch.randn(count, rivals, dtype=DTYPE, generator=generator("cpu", RngStream.DRAWS, 0)).to(mean.device)
    factor = _quantiles(count, mean)[:, None]
    noise = math.sqrt(RELATED) * factor + math.sqrt(1 - RELATED) * own
    margins = mean[:, None] + deviation[:, None] * noise  # (classes, count, rivals)
    return torch.nn.functional.pad(-margins, (1, 0)).flatten(0, 1)


def _quantiles(count: int, like: Tensor) -> Tensor:
    """Return standard normal quantiles of equal probability."""
    return torch.special.ndtri((torch.arange(count, dtype=DTYPE, device=like.device) + 0.5) / count)


def expected_errors(classifier: SharedCovariance, evidence: Evidence) -> Tensor | None:
    """Return the estimated rate at which each other class scores higher than the class, (k, k); None if unknown."""
    margins = _known_margins(classifier, evidence)
    return None if margins is None else _exceeded(margins, evidence.spread)


def _exceeded(margins: _Margins, spread: float) -> Tensor:
    """Return the share of images of each class whose margin over each other class is negative."""
    return torch.special.ndtr(-margins.mean / (spread * margins.deviation))


def expected_accuracy(classifier: SharedCovariance, evidence: Evidence) -> Tensor | None:
    """Return the estimated share of new images of each class that are recognized, (k,); None if unknown."""
    margins = _known_margins(classifier, evidence)
    return None if margins is None else _recognized(margins, evidence.spread)


def _recognized(margins: _Margins, spread: float) -> Tensor:
    """Return the share of images of each class whose margins are all positive."""
    mean, deviation = margins.nearest
    shares = torch.zeros_like(mean[:, 0])
    for factor in math.sqrt(RELATED) * _quantiles(_FACTORS, mean):
        shares += torch.special.ndtr((mean / (spread * deviation) + factor) / math.sqrt(1 - RELATED)).prod(1) / _FACTORS
    return shares


def expected_confusions(classifier: SharedCovariance, evidence: Evidence) -> Tensor | None:
    """Return the estimated shares of each class's images by predicted class, (k, k); None if unknown.

    The diagonal is the expected accuracy; the other images are divided in proportion to `expected_errors`. Each row
    sums to 1.
    """
    margins = _known_margins(classifier, evidence)
    if margins is None:
        return None
    errors, right = _exceeded(margins, evidence.spread), _recognized(margins, evidence.spread)
    total = errors.sum(1).clamp_min(torch.finfo(errors.dtype).tiny)
    return errors * ((1 - right) / total)[:, None] + right.diag()


def _known_margins(classifier: SharedCovariance, evidence: Evidence) -> _Margins | None:
    """Return the margins of all classes, unless there are too many classes or too few images."""
    k = len(classifier.means)
    if not 2 <= k <= MOST or evidence.images < ENOUGH:
        return None
    return _margins(classifier, torch.arange(k, device=classifier.means.device))
