"""Linear discriminant analysis against scikit-learn's and against the literal log-densities."""

import numpy as np
import pytest
import torch
from sklearn.covariance import OAS, empirical_covariance
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from efcil.core.class_stats import ClassStats
from efcil.core.discriminant import (
    HEAVIER,
    SharedMetric,
    discriminant,
    oas_shrinkage,
    shared_discriminant,
    shrunk_covariance,
)
from efcil.core.gram_storage import SHARED


def classes_of(sizes=(9, 4, 1, 30), dim=5, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    shape = rng.normal(size=(dim, dim))
    return 3 + 2 * rng.normal(size=(len(sizes), dim))[labels] + rng.normal(size=(len(labels), dim)) @ shape, labels


def within(x, y):
    """Means of classes, and the scatter about them."""
    means = np.stack([x[y == c].mean(0) for c in range(y.max() + 1)])
    apart = x - means[y]
    return torch.tensor(means), torch.tensor(apart.T @ apart)


def literal_oas(s, n):
    """Eq. 23 of Chen et al."""
    p = len(s)
    square, trace = np.trace(s @ s), np.trace(s)
    return min(1.0, ((1 - 2 / p) * square + trace**2) / ((n + 1 - 2 / p) * (square - trace**2 / p)))


@pytest.mark.parametrize("dim", [2, 5, 60])
def test_oas_equals_the_formula_of_the_paper(dim):
    x, _ = classes_of((40,), dim)
    x = x - x.mean(0)
    share = oas_shrinkage(torch.tensor(x.T @ x), len(x))
    assert 0 < share < 1
    assert share == pytest.approx(literal_oas(x.T @ x / len(x), len(x)), rel=1e-12)


def test_oas_of_many_dimensions_is_that_of_scikit_learn():
    x, _ = classes_of((40,), dim=400)
    x = x - x.mean(0)
    theirs = OAS(assume_centered=True).fit(x)
    assert oas_shrinkage(torch.tensor(x.T @ x), len(x)) == pytest.approx(theirs.shrinkage_, rel=1e-3)
    ours = shrunk_covariance(torch.tensor(x.T @ x), len(x), 1.0)
    np.testing.assert_allclose(ours, theirs.covariance_, atol=1e-3 * np.abs(theirs.covariance_).max())


@pytest.mark.parametrize("dim", [2, 60])
def test_a_given_shrinkage_is_the_share_of_the_identity(dim):
    x, _ = classes_of((40,), dim)
    x = x - x.mean(0)
    half = shrunk_covariance(torch.tensor(x.T @ x), len(x), 1.0, shrinkage=0.5)
    plain = empirical_covariance(x, assume_centered=True)
    np.testing.assert_allclose(half, 0.5 * plain + 0.5 * np.trace(plain) / dim * np.eye(dim), rtol=1e-12)


def test_scores_are_log_densities_up_to_what_all_classes_share():
    x, y = classes_of()
    means, scatter = within(x, y)
    covariance = shrunk_covariance(scatter, len(x) - len(means), 1.0)
    weight, bias = discriminant(means, covariance)
    normal = torch.distributions.MultivariateNormal
    points = torch.tensor(x)
    literal = torch.stack([normal(mean, covariance).log_prob(points) for mean in means], 1)
    ours = points @ weight + bias
    torch.testing.assert_close(ours.log_softmax(1), literal.log_softmax(1), rtol=1e-9, atol=1e-9)


def test_decisions_are_those_of_scikit_learn():
    x, y = classes_of((12, 12, 12), dim=6)
    means, scatter = within(x, y)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.3).fit(x, y)
    weight, bias = discriminant(means, shrunk_covariance(scatter, len(x), 1.0, shrinkage=0.3))
    ours = (torch.tensor(x) @ weight + bias).softmax(1)
    np.testing.assert_allclose(ours, theirs.predict_proba(x), rtol=1e-8, atol=1e-12)


def test_rare_classes_are_not_at_a_disadvantage():
    """With the same mean and scatter, the number of images of a class changes no score."""
    means, scatter = within(*classes_of())
    covariance = shrunk_covariance(scatter, 40.0, 1.0)
    weight, bias = discriminant(means, covariance)
    middle = (means[0] + means[2]) / 2  # of 9 images and of 1
    scores = middle @ weight + bias
    assert float(scores[0] - scores[2]) == pytest.approx(0.0, abs=1e-9)


def test_classes_that_do_not_vary_have_a_euclidean_metric():
    means = torch.tensor([[0.0, 1.0], [3.0, 0.0]]).double()
    covariance = shrunk_covariance(torch.zeros(2, 2).double(), 0.0, 4.0)
    assert torch.equal(covariance, 4.0 * torch.eye(2).double())
    weight, bias = discriminant(means, covariance)
    assert (torch.tensor([[0.2, 0.8], [2.0, 0.0]]).double() @ weight + bias).argmax(1).tolist() == [0, 1]
    assert torch.equal(shrunk_covariance(torch.zeros(2, 2).double(), 0.0, 0.0), torch.eye(2).double())


def test_a_dead_channel_leaves_a_covariance_that_can_be_solved():
    x, y = classes_of((300, 300), dim=3)
    x[:, 1] = 0.0
    means, scatter = within(x, y)
    weight, bias = discriminant(means, shrunk_covariance(scatter, len(x) - 2, 1.0, shrinkage=0.0))
    assert torch.isfinite(weight).all()
    assert (torch.tensor(x) @ weight + bias).isfinite().all()


def test_features_far_from_zero_lose_no_digits():
    x, y = classes_of((30, 30, 30))
    near, far = (
        discriminant(means, shrunk_covariance(scatter, 87.0, 1.0))
        for means, scatter in (within(x, y), within(x + 1e6, y))
    )
    scores = [torch.tensor(points) @ weight + bias for points, (weight, bias) in ((x, near), (x + 1e6, far))]
    torch.testing.assert_close(scores[0].softmax(1), scores[1].softmax(1), rtol=1e-4, atol=1e-4)


def test_the_ridge_is_a_multiple_of_that_of_oas():
    x, y = classes_of((12, 30, 9))
    means, scatter = within(x, y)
    apart = means - means.mean(0)
    scatter, freedom = scatter + 3 / 51 * apart.T @ apart, 48 + 3 / 51 * 2
    share = oas_shrinkage(scatter, freedom)
    assert 0.01 < share < 0.99
    ridge = HEAVIER * share / (1 - share) * float(scatter.trace()) / freedom / 5
    covariance = scatter / freedom + ridge * torch.eye(5).double()
    weight, bias = discriminant(means, covariance)
    noise = float(torch.linalg.solve(covariance, scatter / freedom).trace())
    wanted = weight, bias + noise / 2 / torch.tensor([12, 30, 9]).double()
    found = shared_discriminant(ClassStats.from_features(torch.tensor(x), torch.tensor(y)))
    for got, want in zip(found, wanted, strict=True):
        scale = float((got * want).sum() / want.square().sum())  # the same covariance, but for its scale
        torch.testing.assert_close(got, scale * want, rtol=1e-8, atol=1e-9)


def test_of_single_images_the_means_say_in_what_classes_vary():
    """Where all that the images show is a channel in which they differ wildly, the others decide."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 4)) * [50.0, 1.0, 1.0, 1.0]
    weight, _ = shared_discriminant(ClassStats.from_features(torch.tensor(x), torch.arange(30)))
    plain, _ = discriminant(torch.tensor(x), torch.eye(4).double())
    shares = [float(found[0].abs().mean() / found[1:].abs().mean()) for found in (weight, plain)]
    assert shares[0] < shares[1] / 5


def test_a_class_of_few_images_does_not_lose_to_one_of_many():
    """Two images against eighty of a class in 40 dimensions: as many errors either way."""
    rng, missed = np.random.default_rng(0), [0, 0]
    for _ in range(20):
        centers = rng.normal(size=(2, 40)) * 0.5
        x = np.concatenate([centers[0] + rng.normal(size=(2, 40)), centers[1] + rng.normal(size=(80, 40))])
        stats = ClassStats.from_features(torch.tensor(x), torch.tensor([0] * 2 + [1] * 80))
        weight, bias = shared_discriminant(stats)
        for c in (0, 1):
            points = torch.tensor(centers[c] + rng.normal(size=(100, 40)))
            missed[c] += int(((points @ weight + bias).argmax(1) != c).sum())
    assert sum(missed) < 600
    assert 0.5 < missed[0] / missed[1] < 2


@pytest.mark.parametrize("images", [3, 10, 60])
def test_new_images_are_as_far_from_the_mean_of_their_class_as_expected(images):
    source = torch.Generator().manual_seed(images)
    spread, centers = torch.logspace(1, -2, 80).double(), 2 * torch.randn(4, 80, generator=source).double()

    def drawn(count):
        labels = torch.arange(4).repeat_interleave(count)
        return centers[labels] + spread * torch.randn(4 * count, 80, generator=source).double(), labels

    stats = ClassStats.from_features(*drawn(images), SHARED)
    metric, (x, y) = SharedMetric.of(stats), drawn(200)
    u = x - stats.mean[y]
    squares = (u @ metric.inverse * u).sum(1).mean() / (1 + 1 / images)  # the mean of the class is off, too
    assert metric.new_noise == pytest.approx(float(squares), rel=0.15)
    assert images > 10 or metric.noise < 0.8 * metric.new_noise


def test_the_leverage_of_an_image_is_what_the_metric_loses_without_it():
    source = torch.Generator().manual_seed(5)
    labels = torch.tensor([0] * 4 + [1] * 3)
    features = torch.randn(7, 5, generator=source, dtype=torch.float64)
    stats = ClassStats.from_features(features, labels, SHARED)
    metric = SharedMetric.of(stats)
    leverage = metric.leverage(stats, features, labels)
    for row in range(7):
        kept = torch.arange(7) != row
        scatters = [s.deviations()[0] for s in (stats, ClassStats.from_features(features[kept], labels[kept], SHARED))]
        inverse = torch.linalg.inv(torch.linalg.inv(metric.inverse) - metric.step * (scatters[0] - scatters[1]))
        u = features[row] - stats.mean[labels[row]]
        assert torch.allclose(inverse @ u, metric.inverse @ u / (1 - leverage[row]), rtol=1e-8)


def test_scores_without_an_image_are_those_of_statistics_without_it():
    """Of the same shrinkage, and the middle and the share of the means as they were: what the formula leaves alone."""
    source = torch.Generator().manual_seed(4)
    labels = torch.tensor([0] * 7 + [1] * 5 + [2] * 9)
    features = torch.randn(21, 6, generator=source, dtype=torch.float64)
    features += 2 * torch.nn.functional.one_hot(labels, 6)
    stats = ClassStats.from_features(features, labels, SHARED)
    metric = SharedMetric.of(stats)
    scores, (familiarity, distance) = metric.leave_one_out(stats, features, labels)
    covariance = torch.linalg.inv(metric.inverse)
    center = stats.mean.mean(0)
    for row in (0, 8, 20):
        kept = torch.arange(21) != row
        less = ClassStats.from_features(features[kept], labels[kept], SHARED)
        scatters = [part.deviations()[0] for part in (stats, less)]
        inverse = torch.linalg.inv(covariance - metric.step * (scatters[0] - scatters[1]))
        x, means = features[row] - center, less.mean - center
        own = (means @ inverse * means).sum(1)
        expected = means @ inverse @ x - own / 2 + metric.noise / (2 * less.count.double())
        assert torch.allclose(scores[row], expected, rtol=1e-8)
        whole = own + 1 / (1 / metric.noise - metric.step)
        ways = (means @ inverse @ x) / (own * whole).sqrt() * (whole / (x @ inverse @ x)) ** 0.3
        ways -= 0.8 * (own / whole).sqrt()
        assert torch.allclose(familiarity[row], ways.max(), rtol=1e-8)
        squares = [(x - mean) @ inverse @ (x - mean) for mean in means]
        assert torch.allclose(distance[row], (min(squares) * (1 / metric.noise - metric.step)).log(), rtol=1e-8)


@pytest.mark.parametrize("images", [5, 10, 60])
def test_new_images_are_as_far_as_expected_however_few_were_learned(images):
    """As those that were learned are without themselves; those of other directions are farther."""
    source = torch.Generator().manual_seed(images)
    spread = torch.linspace(3, 0.2, 80, dtype=torch.float64)
    centers = 2 * torch.randn(4, 80, generator=source, dtype=torch.float64)

    def drawn(count):
        labels = torch.arange(4).repeat_interleave(count)
        return centers[labels] + spread * torch.randn(4 * count, 80, generator=source, dtype=torch.float64), labels

    learned, labels = drawn(images)
    stats = ClassStats.from_features(learned, labels, SHARED)
    metric = SharedMetric.of(stats)
    _, without = metric.leave_one_out(stats, learned, labels)
    new = metric.novelty_scores(stats, drawn(100)[0]).distance
    assert abs(without.distance.mean()) < 0.25
    assert abs(new.mean()) < 0.25
    strange = metric.novelty_scores(stats, 3 * torch.randn(100, 80, generator=source, dtype=torch.float64)).distance
    assert strange.mean() > new.mean() + 2 * new.std()


@pytest.mark.parametrize("seed", range(3))
def test_a_class_far_from_the_others_takes_in_no_more_unknown_images(seed):
    """Of unknown classes halfway between the center and a class, in a model in which one class is far off."""
    source = torch.Generator().manual_seed(seed)
    labels = torch.arange(4).repeat_interleave(60)
    centers = torch.eye(4, 60, dtype=torch.float64) * torch.tensor([9.0, 3, 3, 3], dtype=torch.float64)[:, None]

    def drawn(share):
        noise = torch.randn(len(labels), 60, generator=source, dtype=torch.float64)
        return centers.mean(0) + share * (centers - centers.mean(0))[labels] + noise

    stats = ClassStats.from_features(drawn(1), labels, SHARED)
    metric = SharedMetric.of(stats)
    known, unknown = (metric.novelty_scores(stats, drawn(share)).familiarity for share in (1, 0.5))
    passed = (unknown >= known.quantile(0.05)).double().view(4, 60).mean(1)
    assert passed[0] < passed[1:].mean()
