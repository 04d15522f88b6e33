"""Factors, roots, congruences and packed matrices: against their formulas, and on broken input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from efcil.core import linear_algebra
from efcil.core.class_stats import ClassStats
from efcil.core.gaussian import gaussian_factors
from efcil.core.linear_algebra import (
    cholesky,
    congruence,
    covariance_root,
    gram_matrix,
    pack_symmetric,
    relative_ridge,
    unpack_symmetric,
)
from efcil.errors import ConfigError, NotFiniteError, NotPositiveDefiniteError
from messages import raises
from problems import draw, gap


def test_relative_ridge_follows_the_scale() -> None:
    gram = draw(9, 4).T @ draw(9, 4)
    assert relative_ridge(100.0 * gram, 0.1) == pytest.approx(100.0 * relative_ridge(gram, 0.1))


@pytest.mark.parametrize("dim", [1, 2, 4, 7, 12, 1030])
def test_gram_matrix_in_strips_equals_its_formula_and_is_symmetric(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = draw(5, dim)
    whole = gram_matrix(rows)
    monkeypatch.setattr(linear_algebra, "STRIPS_FROM", 1)
    for ours in (whole, gram_matrix(rows)):
        assert gap(ours, rows.T @ rows) < 1e-13
        assert torch.equal(ours, ours.T)
    assert gram_matrix(rows[:0]).abs().sum() == 0


@pytest.mark.parametrize("width", [1, 2, 3, 7, 10])
def test_congruence_equals_its_formula_and_is_symmetric(width: int) -> None:
    features = draw(3, 5, 6)
    gram = features.mT @ features
    for shift in (draw(6, width), draw(3, 6, width)):
        ours = congruence(gram, shift)
        assert gap(ours, shift.mT @ gram @ shift) < 1e-13
        assert torch.equal(ours, ours.mT)


def test_cholesky_tells_not_finite_from_not_positive_definite() -> None:
    good = torch.eye(3).expand(4, 3, 3).clone()
    assert torch.equal(cholesky(good), good.double())
    bad = good.clone()
    bad[2, 0, 0] = -1.0
    with raises(NotPositiveDefiniteError, "grams", 2, "3 x 3", "give up"):
        cholesky(bad, "grams", "give up")
    bad[1, 0, 0] = float("inf")
    with raises(NotFiniteError, 0, 1, 36):
        cholesky(bad)
    # badly scaled, yet definite: scaling rows and columns together must not matter
    scale = torch.diag(torch.tensor([1e-12, 1.0, 1e6]).double())
    assert torch.isfinite(cholesky(scale @ (torch.ones(3, 3) + torch.eye(3)).double() @ scale)).all()
    with pytest.raises(NotPositiveDefiniteError):
        cholesky(scale @ torch.ones(3, 3).double() @ scale)


def test_a_matrix_whose_eigenvalues_are_known_is_factored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = draw(60, 8), torch.arange(60) % 3
    stats = ClassStats.from_features(features, labels)
    monkeypatch.setattr(linear_algebra, "_min_eigenvalue_exceeds", lambda *_: pytest.fail("factored twice"))
    gram = features.T @ features
    ridged = torch.stack([gram + 0.5 * torch.eye(8).double(), 4.0 * gram + torch.eye(8).double()])
    assert gap(cholesky(ridged, floor=0.5), torch.from_numpy(np.linalg.cholesky(ridged.numpy()))) < 1e-14
    within = [np.cov(features[labels == c].T.numpy(), bias=True) for c in range(3)]
    shared = sum(within) / 3  # as many images of each class
    wanted = 0.1 * within[1] + 0.9 * shared + 0.3 * np.trace(shared) / 8 * np.eye(8)
    factor = gaussian_factors(stats, 0.9, 0.3)[1]
    assert gap(factor @ factor.T, torch.from_numpy(wanted)) < 1e-12
    with pytest.raises(pytest.fail.Exception, match="factored twice"):
        cholesky(gram)


def test_a_known_eigenvalue_is_believed_only_beyond_rounding_and_where_the_factorisation_goes_through() -> None:
    row = torch.arange(1.0, 7).double()[None]
    singular = row.T @ row  # 6 x 6, the largest diagonal 36
    bound = linear_algebra.CHOLESKY_MARGIN * 36 * linear_algebra.EPS * 36
    nearly = singular + 1e-14 * torch.eye(6).double()
    assert int(torch.linalg.cholesky_ex(nearly)[1]) == 0, "it goes through, and means nothing"
    for floor in (0.0, 1e-14, 0.9 * bound):
        with pytest.raises(NotPositiveDefiniteError):
            cholesky(nearly, floor=floor)
    ridged = singular + 1.1 * bound * torch.eye(6).double()
    factor = cholesky(ridged, floor=1.1 * bound)
    assert gap(factor @ factor.T, ridged) < 1e-14
    indefinite = torch.stack([torch.eye(6), torch.eye(6) - 0.5 * torch.ones(6, 6)])
    with raises(NotPositiveDefiniteError, 1, "6 x 6", "ridge"):
        cholesky(indefinite, floor=1.0)
    assert cholesky(torch.zeros(0, 3, 3)).shape == (0, 3, 3)


def centered(images: int, dim: int) -> Tensor:
    features = draw(images, dim) * torch.logspace(2, -3, dim, dtype=torch.float64) + 7.0
    return features - features.mean(0)


@pytest.mark.parametrize(("images", "dim"), [(40, 1), (40, 2), (2, 3), (90, 30), (30, 30), (5, 30), (9, 300)])
@pytest.mark.parametrize("dead", [False, True])
def test_the_root_of_a_covariance_is_its_literal_one(images: int, dim: int, dead: bool) -> None:
    features = centered(images, dim)
    if dead:
        features[:, ::3] = 0.0
    covariance = features.T @ features / (images - 1)
    ridge = 1e-8 * covariance.trace() / dim if covariance.trace() else 2.0**-1022
    root = covariance_root(covariance)
    assert torch.equal(root, root.tril())
    wanted = covariance + ridge * torch.eye(dim).double()
    assert (root @ root.T - wanted).abs().max() <= 1e-13 * covariance.trace()
    # beside the root of the eigendecomposition: no direction has another spread, by a ten-thousandth of a typical one
    values, vectors = torch.linalg.eigh(covariance)
    spread = torch.linalg.vector_norm(root.T @ vectors, dim=0)
    typical = (covariance.trace() / dim).sqrt()
    assert ((spread - values.clamp_min(0).sqrt()).abs() <= 1.01e-4 * typical + 1e-150).all()


def test_draws_with_the_root_have_the_covariance_and_dead_channels_none() -> None:
    covariance = torch.tensor([[2.0, 0.0, 0.6], [0.0, 0.0, 0.0], [0.6, 0.0, 0.5]]).double()
    drawn = draw(40_000, 3) @ covariance_root(covariance).T
    torch.testing.assert_close(torch.cov(drawn.T), covariance, rtol=0.03, atol=0.02)
    assert drawn[:, 1].abs().max() < 1e-3
    kept = covariance.clone()
    zero = torch.zeros(3, 3)
    assert torch.equal(1.0 + draw(9, 3) @ covariance_root(zero).T, torch.ones(9, 3).double())  # one image in each class
    assert torch.equal(covariance, kept)
    assert torch.equal(zero, torch.zeros(3, 3))


def test_a_covariance_that_was_moved_often_can_still_be_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    features = centered(12, 120)
    covariance = features.T @ features / 11
    for task in range(50):
        shift = torch.eye(120).double() + 0.3 * draw(120, 120, seed=task) / 120**0.5
        covariance = shift.T @ covariance @ shift  # neither symmetric to the last bit nor free of negative eigenvalues
    monkeypatch.setattr(torch.linalg, "eigh", lambda *_: pytest.fail("decomposed"))
    root = covariance_root(covariance)
    assert (root @ root.T - covariance).abs().max() < 1.01e-8 * covariance.trace() / 120


def test_what_is_no_covariance_cannot_be_drawn_from() -> None:
    with raises(NotPositiveDefiniteError, "2 x 2"):
        covariance_root(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    with raises(NotFiniteError, 1, 0, 4):
        covariance_root(torch.tensor([[1.0, 0.0], [0.0, float("nan")]]))
    with raises(ConfigError, "covariance", (2, 3)):
        covariance_root(torch.ones(2, 3))


@given(st.integers(0, 3), st.integers(1, 9))
@settings(deadline=None, max_examples=15)
def test_packing_is_exact(classes: int, dim: int) -> None:
    gram = linear_algebra.symmetrize(draw(classes, dim, dim))
    packed = pack_symmetric(gram)
    assert packed.shape == (classes, dim * (dim + 1) // 2)
    assert torch.equal(unpack_symmetric(packed), gram)


def test_unpacking_refuses_an_impossible_length() -> None:
    with raises(ConfigError, "packed", 4):
        unpack_symmetric(torch.ones(4))
