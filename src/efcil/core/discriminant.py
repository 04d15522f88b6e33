"""Linear discriminant analysis: one Gaussian for each class, all with the same shrunk covariance.

score_c(x) = x S^-1 mu_c' - mu_c S^-1 mu_c' / 2, the log-density of class c up to a constant. The prior is uniform,
whatever the number of images of each class. S is the within-class covariance, shrunk towards a multiple of the identity
(OAS: Chen, Wiesel, Eldar and Hero, "Shrinkage Algorithms for MMSE Covariance Estimation", IEEE Transactions on Signal
Processing 2010). It is determined by means, counts and one scatter for all classes, and all of these add.

OAS assumes Gaussian features with one covariance in all classes. Features of networks have heavier tails, and classes
differ, so the sample covariance is less reliable than OAS assumes. `HEAVIER` compensates for this; it was chosen on
training images (docs/classifiers.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from efcil.core.class_stats import ClassStats
from efcil.core.linear_algebra import DTYPE, EPS, cholesky, gram_matrix

LEAST_SHRINKAGE = 1e-6
"""Minimum weight of the identity: a channel that never varies makes the covariance singular."""

HEAVIER = 8.0
"""Factor on the ridge of OAS, relative to the covariance, for features of a network."""

ALLOWANCE, LENGTH_POWER = 0.8, 0.6
"""Constants of the familiarity of an image, chosen on training images (docs/dev/research-log.md, "None of these")."""


def oas_shrinkage(scatter: Tensor, freedom: float) -> float:
    """Return the shrinkage of OAS for the covariance scatter / freedom: the weight of the identity, 0 to 1.

    rho = ((1 - 2/p) tr(S^2) + tr(S)^2) / ((n + 1 - 2/p) (tr(S^2) - tr(S)^2 / p)), at most 1, for the covariance S of
    p dimensions from n independent deviations: images less classes, `freedom`. scikit-learn leaves out both 2/p.

    >>> round(oas_shrinkage(torch.diag(torch.tensor([30.0, 10.0])).double(), 10.0), 3)
    0.8
    """
    dim = len(scatter)
    trace = float(scatter.trace())
    square = float(scatter.square().sum())
    apart = square - trace**2 / dim  # how far it is from a multiple of the identity
    if freedom <= 0 or apart <= dim * EPS * square:
        return 1.0
    share = ((1 - 2 / dim) * square + trace**2) / ((freedom + 1 - 2 / dim) * apart)
    return min(1.0, share)


def shrunk_covariance(scatter: Tensor, freedom: float, spread: float, shrinkage: float | None = None) -> Tensor:
    """(1 - a) S + a tr(S) / dim I for S = scatter / freedom, with the share a of OAS where no `shrinkage` is given.

    Where the classes do not vary (an image each, or copies of one) the metric is Euclidean, of variance `spread`.

    >>> shrunk_covariance(torch.diag(torch.tensor([30.0, 10.0])).double(), 10.0, 1.0, shrinkage=0.5).diag().tolist()
    [2.5, 1.5]
    """
    dim = len(scatter)
    variance = float(scatter.trace()) / dim / freedom if freedom > 0 else 0.0
    if variance <= EPS * spread:
        return torch.eye(dim, dtype=DTYPE, device=scatter.device) * (spread if spread > 0 else 1.0)
    share = max(LEAST_SHRINKAGE, oas_shrinkage(scatter, freedom) if shrinkage is None else shrinkage)
    covariance = scatter.to(DTYPE) * ((1 - share) / freedom)
    covariance.diagonal().add_(share * variance)
    return covariance


def discriminant(means: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight (dim, k) and bias (k,) of linear discriminant analysis with means (k, dim) and a shared covariance.

    Scores are x @ weight + bias: log-densities up to what all classes share.

    >>> weight, bias = discriminant(torch.tensor([[2.0, 0.0], [-2.0, 0.0]]).double(), torch.eye(2).double())
    >>> weight.T.tolist(), bias.tolist()
    ([[2.0, 0.0], [-2.0, 0.0]], [-2.0, -2.0])
    """
    return _scores_of(means, _inverse(covariance))


def _inverse(covariance: Tensor) -> Tensor:
    factor = cholesky(covariance, "the covariance within classes", "raise shrinkage")
    return torch.cholesky_solve(torch.eye(len(factor), dtype=DTYPE, device=factor.device), factor)


def _scores_of(means: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    center = means.mean(0)
    apart = means - center  # what all means have in common adds the same to every score
    rows = apart @ inverse
    return rows.T, -(apart * rows).sum(1) / 2 - rows @ center


def shared_discriminant(stats: ClassStats, shrinkage: float | None = None) -> tuple[Tensor, Tensor]:
    """Return weight and bias of `discriminant` for statistics of k classes, shrunk by OAS and `HEAVIER` by default.

    N images of k classes show N - k deviations, a single image of each class none. How the means differ, as k / N of k
    - 1 further ones, tells what the classes vary in as long as there is little else to tell it.

    A mean of n images is off by noise of covariance C / n, with C what the images show and S what it was shrunk to, so
    mu S^-1 mu' is too large by tr(S^-1 C) / n. Without taking that off, a class of two images would lose to one of
    eighty; between classes of equal size it changes nothing.

    >>> stats = ClassStats.from_features(torch.tensor([[0.0], [2.0], [9.0], [11.0]]), torch.tensor([0, 0, 1, 1]))
    >>> weight, bias = shared_discriminant(stats)
    >>> (torch.tensor([[4.0], [7.0]]).double() @ weight + bias).argmax(1).tolist()
    [0, 1]
    """
    return SharedMetric.of(stats, shrinkage).scores_of(stats)


class NoveltyScores(NamedTuple):
    """Two scores that tell images of unknown classes from those of known ones.

    `familiarity`: the largest over the classes of r - `ALLOWANCE` e. r is how far the image lies from the center of all
    classes in the direction of the class mean, in units of the length expected of images of the class, divided by the
    `LENGTH_POWER` of the image's own length in these units. e = sqrt(q / (q + d)) is what r is expected to be for a new
    image of the class, for the squared distance q of the class mean from the center and d of a new image from that
    mean. Images of unknown classes, too, lie farther in the direction of a class that is far from the center; without
    the allowance such a class would take in too many of them. Low for unknown classes that resemble known ones.
    `distance`: log of the squared Mahalanobis distance to the nearest class mean, relative to the expected distance of
    a new image of the class, so about 0 for known classes. It is high for images unrelated to the classes, which differ
    from them in directions in which the classes do not differ from each other.
    """

    familiarity: Tensor  # (n,)
    distance: Tensor  # (n,)


@dataclass(frozen=True, eq=False)
class SharedMetric:
    """Inverse of the shared covariance, and the contribution of one image to the covariance."""

    inverse: Tensor  # (dim, dim)
    step: float  # weight of a deviation u in the covariance: step u'u
    noise: float  # tr(S^-1 C), squared distance of an image from the mean of its class
    known: float  # squared distance of learned images from the means of their classes, relative to that of new ones
    new_noise: float  # squared distance of a new image from the mean of its class
    pull: float  # weight of the deviation of a class mean from the center of all classes in the covariance

    @classmethod
    def of(cls, stats: ClassStats, shrinkage: float | None = None) -> SharedMetric:
        """Shrink and invert the covariance of statistics."""
        own, within = stats.deviations()
        moment = float(stats.mean.square().mean()) if len(stats) else 0.0
        share = len(stats) / max(1, int(stats.count.sum()))
        apart = stats.mean - stats.mean.mean(0)
        scatter, freedom = own + share * gram_matrix(apart), within + share * (len(stats) - 1)
        if shrinkage is None:
            ridge = oas_shrinkage(scatter, freedom)
            shrinkage = HEAVIER * ridge / (1 + (HEAVIER - 1) * ridge)
        inverse = _inverse(shrunk_covariance(scatter, freedom, moment, shrinkage))
        if freedom <= 0:
            return cls(inverse, 0.0, 0.0, 1.0, 0.0, 0.0)
        step, noise = (1 - shrinkage) / freedom, float((inverse * scatter).sum()) / freedom
        seen = float((inverse * own).sum()) / within if within > 0 else noise
        known = max(1e-6, 1 - step * seen)
        return cls(inverse, step, noise, known, seen / known, step * share)

    def scores_of(self, stats: ClassStats) -> tuple[Tensor, Tensor]:
        """Return weight (dim, k) and bias (k,) of the classes."""
        weight, bias = _scores_of(stats.mean, self.inverse)
        return weight, bias + self.noise / (2 * stats.count.clamp_min(1).to(DTYPE))

    def distances(self, stats: ClassStats) -> Tensor:
        """Return the squared distances (k,) of class means from the center of all classes."""
        others = stats.mean - stats.mean.mean(0)
        return _rows(others @ self.inverse, others)[:, 0]

    def leverage(self, stats: ClassStats, features: Tensor, labels: Tensor) -> Tensor:
        """Return b u S^-1 u' of training features, 0 to 1: their share in what S is along their deviation u.

        By Sherman and Morrison, <u, v> in the metric without the image is <u, v> / (1 - leverage) for every v.
        """
        u, count = features.to(DTYPE) - stats.mean[labels], stats.count[labels].to(DTYPE)
        return self.step * count / (count - 1) * _rows(u @ self.inverse, u)[:, 0]

    def leave_one_out(
        self, stats: ClassStats, features: Tensor, labels: Tensor, distances: Tensor | None = None
    ) -> tuple[Tensor, NoveltyScores]:
        """Return leave-one-out scores (n, k) and novelty scores of training features.

        Without x, of n images of class c, the mean is mu - u / (n - 1) for u = x - mu, and the covariance S - b u'u
        with b = step n / (n - 1); its inverse follows from Sherman and Morrison. The shrinkage, and the share of the
        means in the covariance, are kept. The score of a class of one image is NaN. Pass `distances` when calling it
        for the features in parts.
        """
        center, row = stats.mean.mean(0), torch.arange(len(features), device=features.device)
        apart, others = features.to(DTYPE) - center, stats.mean - center
        u = apart - others[labels]
        through = u @ self.inverse
        count = stats.count[labels].to(DTYPE)[:, None]
        factor = self.step * count / (count - 1)
        gain = factor / (1 - factor * _rows(u, through))

        def inner(one: Tensor, other: Tensor) -> Tensor:
            """<one_i, other_i> in the metric without x_i."""
            return _rows(one @ self.inverse, other) + gain * _rows(through, one) * _rows(through, other)

        onto = through @ others.T
        forward = apart @ self.inverse @ others.T + gain * _rows(through, apart) * onto  # (n, k)
        own = (self.distances(stats) if distances is None else distances) + gain * onto.square()
        mean = others[labels] - u / (count - 1)  # of its class without it
        forward[row, labels], own[row, labels] = inner(apart, mean)[:, 0], inner(mean, mean)[:, 0]
        sizes = stats.count.to(DTYPE).expand(len(features), -1).clone()
        sizes[row, labels] -= 1
        scores = forward - own / 2 + self.noise / (2 * sizes)
        return scores, self._novelty(forward, own, inner(apart, apart))

    def novelty_scores(self, stats: ClassStats, features: Tensor, distances: Tensor | None = None) -> NoveltyScores:
        """Return the novelty scores of features (n, dim), relative to the class that they resemble most."""
        center = stats.mean.mean(0)
        apart, others = features.to(DTYPE) - center, stats.mean - center
        forward = apart @ self.inverse @ others.T
        own = self.distances(stats) if distances is None else distances
        return self._novelty(forward, own, _rows(apart @ self.inverse, apart))

    def _novelty(self, forward: Tensor, own: Tensor, square: Tensor) -> NoveltyScores:
        # Training images are nearer to the mean and covariance that they contribute to: by Sherman and Morrison,
        # u S^-1 u' without the image is q / (1 - step q) for q with it, and q is `noise` on average.
        expected = self.noise / max(1e-6, 1 - self.step * self.noise)
        whole = own + expected  # squared length of a new image of the class
        reached = forward / (own * whole).sqrt() * (whole / square).pow(LENGTH_POWER / 2)
        familiarity = (reached - ALLOWANCE * (own / whole).sqrt()).max(1).values
        return NoveltyScores(familiarity, ((square - 2 * forward + own).min(1).values.clamp_min(0) / expected).log())


def _rows(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(1, keepdim=True)
