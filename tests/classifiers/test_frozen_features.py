"""Classifiers of frozen features: closed forms of statistics that add, in any order, to what all images give."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from efcil.classifiers import CLASSIFIERS
from efcil.classifiers.cross_validated_ridge import RandomProjectionOptions
from efcil.core.class_stats import ClassStats
from efcil.core.discriminant import HEAVIER, oas_shrinkage
from efcil.core.feature_maps import RandomReLU, UnitLength, UnitPower
from efcil.core.gcv import AS_GOOD, balanced_ridge, candidates
from efcil.core.gram_storage import SHARED
from efcil.errors import ConfigError
from efcil.features import TaskFeatures
from efcil.learners import LEARNERS
from efcil.methods import find
from efcil.product.calibration import draw_features
from efcil.trajectory import Trajectory
from messages import raises

NAMES = ("slda", "ridge-gcv", "ranpac")
OPTIONS = {"ranpac": {"expansion": 40}}
DIM = 12


def problem(sizes=(9, 9, 9, 9), dim=DIM, seed=0):
    """Features as behind a ReLU and a mean over positions: not negative, classes apart."""
    source = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    centers = 2 * torch.rand(len(sizes), dim, generator=source)
    features = (centers[labels] + 0.5 * torch.randn(len(labels), dim, generator=source)).clamp_min(0)
    return features + 0.01, labels


def following(name):
    method = find(f"first-task+none+{name}")
    return Trajectory(None, {name: (method, method.options(**OPTIONS.get(name, {})))}, freezes=True)


def learn(trajectory, features, labels, index=0):
    trajectory.update(TaskFeatures.from_saved(index, 0, {"labels": labels, "new": features}, features.shape[1:]))
    return trajectory


def fitted(name, features, labels):
    (part,) = learn(following(name), features, labels).parts.values()
    return part.classifier


def gap(one, two):
    return float((one - two).abs().max() / two.abs().max())


# --- against literal formulas -----------------------------------------------------------------------------------------


def literal_gcv(x, y, ridge):
    """n |(I - H) Y|^2 / trace(I - H)^2 with the n x n matrix H of centered rows; one degree of freedom for the mean."""
    n, targets = len(x), np.eye(y.max() + 1)[y]
    centered = x - x.mean(0)
    hat = centered @ np.linalg.inv(centered.T @ centered + ridge * np.eye(x.shape[1])) @ centered.T + np.full(
        (n, n), 1 / n
    )
    rest = np.eye(n) - hat
    return n * np.linalg.norm(rest @ targets) ** 2 / np.trace(rest) ** 2


@pytest.mark.parametrize("dim", [6, 80])
def test_the_ridge_is_that_of_the_literal_score_on_all_rows(dim):
    features, labels = problem(dim=dim)
    x, y = UnitLength()(features).numpy(), labels.numpy()
    classifier = fitted("ridge-gcv", features, labels)
    centered = x - x.mean(0)
    grid = candidates(torch.tensor(centered.T @ centered)).numpy()
    scores = np.array([literal_gcv(x, y, ridge) for ridge in grid])
    assert classifier.ridge == grid[scores <= scores.min() * (1 + AS_GOOD)][-1]
    assert grid[0] < classifier.ridge < grid[-1]
    weight = np.linalg.solve(centered.T @ centered + classifier.ridge * np.eye(dim), centered.T @ np.eye(4)[y])
    literal = centered @ weight + np.full(4, 1 / 4)
    np.testing.assert_allclose(classifier.logits(features), literal, rtol=1e-8, atol=1e-10)


def test_of_uneven_classes_each_counts_as_equally_many():
    """The regression on weighted rows, had every class the covariance that all share."""
    features, labels = problem((20, 3, 9))
    stats = ClassStats.from_features(features, labels, SHARED)
    weight, bias, ridge = balanced_ridge(stats)
    source = torch.Generator().manual_seed(1)
    noise = torch.randn(4000, DIM, generator=source).double()
    noise = noise - noise.mean(0)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(noise.T @ noise / 4000), noise.T, upper=False).T
    cloud = white @ torch.linalg.cholesky(stats.scatter() / 32).T  # of exactly this covariance, about zero
    x = torch.cat([mean + cloud for mean in stats.mean])
    y = torch.arange(3).repeat_interleave(4000)
    share = 32 / len(x)  # each class 32 / 3 images
    centered = x - x.mean(0)
    gram = share * centered.T @ centered + ridge * torch.eye(DIM).double()
    literal = torch.linalg.solve(gram, share * centered.T @ torch.eye(3).double()[y])
    torch.testing.assert_close(weight, literal, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(bias, 1 / 3 - x.mean(0) @ literal, rtol=1e-6, atol=1e-7)


def test_slda_is_the_density_of_gaussians_with_one_covariance():
    features, labels = problem((9, 20, 3))
    classifier = fitted("slda", features, labels)
    x, y = UnitPower(0.7)(features).numpy(), labels.numpy()
    means = np.stack([x[y == c].mean(0) for c in range(3)])
    within, between = x - means[y], means - means.mean(0)
    scatter, freedom = within.T @ within + 3 / 32 * between.T @ between, 29 + 3 / 32 * 2
    share = oas_shrinkage(torch.tensor(scatter), freedom)
    covariance = scatter / freedom + HEAVIER * share / (1 - share) * np.trace(scatter) / freedom / DIM * np.eye(DIM)
    literal = np.stack([multivariate_normal(mean, covariance).logpdf(x) for mean in means], 1)
    literal += np.trace(np.linalg.solve(covariance, scatter / freedom)) / 2 / np.array([9, 20, 3])  # noise of the means
    literal -= literal.mean(1, keepdims=True)
    scores = classifier.logits(features).numpy()
    scores -= scores.mean(1, keepdims=True)
    np.testing.assert_allclose(scores * (scores * literal).sum() / (scores**2).sum(), literal, rtol=1e-7, atol=1e-7)


def test_ranpac_is_the_ridge_behind_a_random_projection():
    features, labels = problem()
    classifier = fitted("ranpac", features, labels)
    (behind,) = classifier.feature_maps
    assert isinstance(behind, RandomReLU)
    source = torch.Generator().manual_seed(behind.seed)
    matrix = torch.randn(DIM, 40, dtype=torch.float64, generator=source)
    wide = torch.relu(torch.nn.functional.normalize(features.double(), dim=1) @ matrix)
    weight, bias, ridge = balanced_ridge(ClassStats.from_features(wide, labels))
    assert classifier.ridge == ridge
    torch.testing.assert_close(classifier.logits(features), wide @ weight + bias, rtol=1e-8, atol=1e-10)
    other = CLASSIFIERS["ranpac"](RandomProjectionOptions(expansion=40, projection_seed=1))
    assert other.feature_maps != classifier.feature_maps


# --- one class at a time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(order=st.permutations(range(5)), sizes=st.tuples(*[st.integers(1, 14)] * 5), seed=st.integers(0, 99))
def test_one_class_at_a_time_in_any_order_is_all_at_once(name, order, sizes, seed):
    features, labels = problem(sizes, seed=seed)
    whole = fitted(name, features, labels).logits(features)
    trajectory = following(name)
    for index, c in enumerate(order):
        learn(trajectory, features[labels == c], labels[labels == c], index)
    assert gap(trajectory.logits(name, features), whole) < 1e-8


@pytest.mark.parametrize("name", NAMES)
def test_models_merge_and_are_saved_as_one_model(name):
    features, labels = problem((9, 5, 7, 4))
    whole = learn(following(name), features, labels)
    parts = []
    for classes in ((0, 2), (1, 3)):
        rows = torch.isin(labels, torch.tensor(classes))
        parts.append(learn(following(name), features[rows], torch.searchsorted(torch.tensor(classes), labels[rows])))
    left = parts[0]
    left.merge(parts[1], torch.tensor([2, 3]))
    assert gap(left.logits(name, features), whole.logits(name, features)[:, [0, 2, 1, 3]]) < 1e-8
    again = following(name)
    again.load_state_dict({key: value.clone() for key, value in left.state_dict().items()})
    assert torch.equal(again.logits(name, features), left.logits(name, features))


@pytest.mark.parametrize("name", NAMES)
def test_forgetting_drops_the_mean_and_keeps_the_covariance(name):
    features, labels = problem()
    trajectory = learn(following(name), features, labels)
    (track,) = trajectory.tracks.values()
    before = track.stats.covariance()[0]
    trajectory.retain(torch.tensor([0, 1, 3]))
    assert torch.equal(track.stats.covariance()[0], before)
    assert trajectory.logits(name, features).shape == (36, 3)
    kept = labels != 2
    expected = labels[kept] - (labels[kept] == 3).long()
    assert float((trajectory.logits(name, features[kept]).argmax(1) == expected).float().mean()) > 0.9


# --- few images and bad ones ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(1,), (1, 1), (1, 1, 1), (2, 1), (60, 1)])
def test_few_images_give_an_answer(name, sizes):
    features, labels = problem(sizes)
    scores = fitted(name, features, labels).logits(features)
    assert torch.isfinite(scores).all()
    assert torch.equal(scores.argmax(1)[-1], labels[-1])


@pytest.mark.parametrize("name", NAMES)
def test_images_that_are_all_the_same(name):
    features, labels = problem((3, 3))
    scores = fitted(name, features[:1].repeat(6, 1), labels).logits(features)
    assert torch.isfinite(scores).all()


@pytest.mark.parametrize("name", NAMES)
def test_dead_channels_and_scale_change_no_decision(name):
    features, labels = problem((30, 10, 20))
    features[:, 5] = 0
    plain = fitted(name, features, labels).logits(features)
    scaled = fitted(name, 1000 * features, labels).logits(1000 * features)
    assert gap(scaled, plain) < 1e-6


# --- tracks -----------------------------------------------------------------------------------------------------------


def test_methods_that_need_the_same_share_one_scatter():
    method, means = (find(f"first-task+none+{name}") for name in ("slda", "ncm"))
    methods = {"slda": (method, method.options()), "shrunk": (method, method.options(shrinkage=0.5))}
    features, labels = problem()
    trajectory = Trajectory(None, {**methods, "ncm": (means, means.options())}, freezes=True)
    learn(trajectory, features, labels)
    forms = [(key.feature_map, track.stats.shared is not None) for key, track in trajectory.tracks.items()]
    assert forms == [(UnitPower(0.7), True), (None, False)]
    assert trajectory.stats("slda").numel == DIM * (DIM + 1) // 2 + 4 * DIM
    assert trajectory.stats("ncm") is None


@pytest.mark.parametrize("name", NAMES)
def test_draws_from_the_statistics_are_behind_the_map_already(name):
    features, labels = problem((40, 40, 40))
    trajectory = learn(following(name), features, labels)
    drawn, wanted = draw_features(trajectory.stats(name), seed=0)
    classifier = trajectory.parts[name].classifier
    assert float((classifier.mapped_logits(drawn).argmax(1) == wanted).float().mean()) > 0.9
    mapped = classifier.feature_maps[0](features, ())
    assert torch.equal(classifier.mapped_logits(mapped), classifier.logits(features))


@pytest.mark.parametrize("shift", ["sdc", "dual-projection"])
def test_shifts_that_cannot_move_it_are_refused(shift):
    with raises(ConfigError, f"lwf+{shift}+slda", shift, "none"):
        find(f"lwf+{shift}+slda")
    assert "lwf" in LEARNERS
