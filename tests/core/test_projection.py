"""Shifts and projectors: against the literal transcription, on matrices worked by hand, and on broken input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from efcil import reference
from efcil.core import linear_algebra, projection
from efcil.core.linear_algebra import (
    relative_ridge,
)
from efcil.core.projection import (
    class_shift,
    cross_validated_ridge,
    feature_products,
    row_projector,
    row_rank,
    row_space,
    task_shift,
    task_shift_from_gram,
)
from efcil.errors import ConfigError, NotFiniteError
from messages import raises
from problems import draw, gap

# --- task shift -------------------------------------------------------------------------------------------------------


def left_out_error(old: Tensor, new: Tensor, ridge: float) -> float:
    """Golub, Heath and Wahba, 1979: |(I - H) D|^2 / n over (tr(I - H) / n)^2, H = X (X'X + r I)^-1 X', D = Y - X."""
    x, d, n = old.double(), new.double() - old.double(), len(old)
    hat = x @ torch.inverse(x.T @ x + ridge * torch.eye(x.shape[1]).double()) @ x.T
    left = torch.eye(n).double() - hat
    return float((left @ d).square().sum() / n / (left.trace() / n) ** 2)


@pytest.mark.parametrize("new_dim", [6, 9])
def test_task_shift_equals_the_literal_equation(new_dim: int) -> None:
    old, new = draw(40, 6), draw(40, new_dim, seed=1)
    assert task_shift(old, new).shape == (6, new_dim)
    assert gap(task_shift(old, new), reference.task_shift(old, new)) < 1e-8
    assert gap(task_shift(old, new, ridge=3.0), reference.task_shift(old, new, 3.0)) < 1e-12


def test_task_shift_of_float32_features_is_solved_in_float64() -> None:
    # condition 1e8 of X'X: float32 products would be wrong in every digit
    old = (draw(200, 12) @ torch.diag(torch.logspace(0, -4, 12, dtype=torch.float64))).float()
    true = draw(12, 12, seed=1)
    assert gap(task_shift(old, old.double() @ true, ridge=0.0), true) < 1e-6


@pytest.mark.parametrize("images", [1, 5, 19])
def test_fewer_images_than_dimensions_give_the_minimum_norm_solution(images: int) -> None:
    old, new = draw(images, 20), draw(images, 20, seed=1)
    wanted = torch.from_numpy(np.linalg.pinv(old.numpy()) @ new.numpy())
    assert gap(task_shift(old, new, ridge=0.0), wanted) < 1e-8
    assert gap(task_shift(old, new), wanted) < 1e-6  # 1e-9 is small, not nothing, beside the least eigenvalue


def test_dead_channels_get_a_zero_row_and_leave_the_rest_alone() -> None:
    old, new = draw(50, 8), draw(50, 8, seed=1)
    old[:, [2, 5]] = 0.0
    shift = task_shift(old, new)
    alive = [0, 1, 3, 4, 6, 7]
    assert gap(shift[alive], reference.task_shift(old[:, alive], new)) < 1e-8
    assert shift[[2, 5]].abs().max() < 1e-12


def test_repeated_channels_share_what_one_would_carry() -> None:
    old, new = draw(50, 4), draw(50, 3, seed=1)
    doubled = torch.cat([old, old[:, :1]], dim=1)
    wanted = torch.from_numpy(np.linalg.pinv(doubled.numpy()) @ new.numpy())
    assert gap(task_shift(doubled, new), wanted) < 1e-8


def test_towards_identity_equals_its_formula_and_leaves_unseen_directions() -> None:
    old, new = draw(30, 6), draw(30, 6, seed=1)
    gram, cross = feature_products(old, new)
    ridge = relative_ridge(gram, 0.1)
    pull = ridge * torch.eye(6, dtype=torch.float64)
    wanted = torch.inverse(gram + pull) @ (cross + pull)
    assert gap(task_shift(old, new, ridge, towards="identity"), wanted) < 1e-12
    few = task_shift(old[:2], new[:2], 1e-12, towards="identity")
    unseen = torch.linalg.svd(old[:2])[2][2:]  # directions that two images do not show
    assert gap(unseen @ few, unseen) < 1e-8
    assert gap(old[:2] @ few, new[:2]) < 1e-6


def test_few_images_are_better_moved_towards_the_identity() -> None:
    dim, images = 64, 48
    true = torch.eye(dim, dtype=torch.float64) + 0.1 * draw(dim, dim) / dim**0.5
    old = draw(images, dim, seed=1)
    new = old @ true + 0.1 * draw(images, dim, seed=2)
    ridge = relative_ridge(old.T @ old, 0.1)
    plain = torch.linalg.matrix_norm(task_shift(old, new) - true)
    gentle = torch.linalg.matrix_norm(task_shift(old, new, ridge, towards="identity") - true)
    assert gentle < 0.3 * plain


@pytest.mark.parametrize(("images", "dim", "noise"), [(60, 12, 0.3), (60, 12, 0.01), (30, 24, 0.5), (16, 24, 0.3)])
def test_the_ridge_is_the_one_that_cross_validation_chooses(images: int, dim: int, noise: float) -> None:
    old = draw(images, dim, seed=1) @ torch.diag(torch.linspace(0.2, 3, dim, dtype=torch.float64))
    true = torch.eye(dim, dtype=torch.float64) + 0.3 * draw(dim, dim) / dim**0.5
    new = old @ true + noise * draw(images, dim, seed=2)
    chosen = cross_validated_ridge(*feature_products(old, new), float((new - old).square().sum()), images)
    ridges = [relative_ridge(old.T @ old, 10 ** (-6 + k / 20)) for k in range(161)]
    errors = [left_out_error(old, new, ridge) for ridge in ridges]
    assert chosen == pytest.approx(ridges[errors.index(min(errors))])
    assert ridges[0] < chosen < ridges[-1]
    shift = task_shift(old, new, chosen, towards="identity")
    plain = torch.linalg.matrix_norm(task_shift(old, new) - true)
    assert torch.linalg.matrix_norm(shift - true) < plain
    assert torch.linalg.matrix_norm(shift - true) < torch.linalg.matrix_norm(torch.eye(dim).double() - true)


def test_a_ridge_is_chosen_where_channels_are_dead_or_nothing_is_seen() -> None:
    old, dead = draw(40, 6, seed=1), torch.zeros(40, 20).double()
    new = old @ (torch.eye(6).double() + 0.3 * draw(6, 6)) + 0.8 * draw(40, 6, seed=2)
    old, new = torch.cat([old, dead], 1), torch.cat([new, dead], 1)
    chosen = cross_validated_ridge(*feature_products(old, new), float((new - old).square().sum()), 40)
    ridges = [relative_ridge(old.T @ old, 10 ** (-6 + k / 20)) for k in range(161)]
    errors = [left_out_error(old, new, ridge) for ridge in ridges]
    assert chosen == pytest.approx(ridges[errors.index(min(errors))])
    nothing = torch.zeros(3, 3).double()
    assert cross_validated_ridge(nothing, nothing, 0.0, 5) == 0
    assert torch.equal(task_shift_from_gram(nothing, nothing, 0.0, "identity"), torch.eye(3).double())


def test_a_ridge_cannot_be_chosen_without_images_or_with_other_shapes() -> None:
    gram = torch.eye(3).double()
    with raises(ConfigError, "images", 0):
        cross_validated_ridge(gram, gram, 1.0, 0)
    with pytest.raises(ConfigError, match=r"cross has shape \(3, 2\); wanted that of gram, \(3, 3\)"):
        cross_validated_ridge(gram, gram[:, :2], 1.0, 5)


def test_products_of_batches_add_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = draw(37, 5), draw(37, 4, seed=1)
    gram, cross = feature_products(old, new)
    parts = [feature_products(old[at], new[at]) for at in (slice(0, 10), slice(10, 11), slice(11, 37))]
    assert gap(sum((part[0] for part in parts[1:]), parts[0][0]), gram) < 1e-14
    assert gap(sum((part[1] for part in parts[1:]), parts[0][1]), cross) < 1e-14
    assert torch.equal(task_shift(old, new), task_shift_from_gram(gram, cross))
    monkeypatch.setattr(linear_algebra, "ROWS_AT_ONCE", 8)
    assert gap(feature_products(old, new)[0], gram) < 1e-14


@given(st.floats(1e-3, 1e4), st.integers(0, 100))
@settings(deadline=None, max_examples=15)
def test_task_shift_does_not_depend_on_the_scale_of_both_features(scale: float, seed: int) -> None:
    old, new = draw(30, 5, seed=seed), draw(30, 5, seed=seed + 1)
    assert gap(task_shift(scale * old, scale * new), task_shift(old, new)) < 1e-4 / min(1, scale) ** 2 * 1e-3
    assert gap(task_shift(scale * old, new, 0.0) * scale, task_shift(old, new, 0.0)) < 1e-10


def test_task_shift_refuses_what_it_cannot_solve() -> None:
    broken = draw(10, 3)
    broken[4, 1] = float("nan")
    with raises(NotFiniteError, "X'X", 5, 9):
        task_shift(broken, draw(10, 3))
    with raises(NotFiniteError, "X'Y", 7, 2, 9):
        task_shift(draw(10, 3), broken / 0.0)
    with raises(ConfigError, (10, 3), (9, 3)):
        task_shift(draw(10, 3), draw(9, 3))
    with raises(ConfigError, 0):
        task_shift(draw(0, 3), draw(0, 3))
    with raises(ConfigError, "'identiy'", "'identity'"):
        task_shift(draw(10, 3), draw(10, 3), towards="identiy")  # type: ignore[arg-type]
    with raises(ConfigError, (3, 4), (3, 3)):
        task_shift(draw(10, 3), draw(10, 4), towards="identity")
    for ridge in (-1.0, float("nan")):
        with raises(ConfigError, "ridge", ridge):
            task_shift(draw(10, 3), draw(10, 3), ridge=ridge)


# --- projectors -------------------------------------------------------------------------------------------------------

RULES = [
    ("numerical", None, reference.rank_numerical),
    ("tolerance", 1e-2, reference.rank_tolerance(1e-2)),
    ("tolerance", 0.5, reference.rank_tolerance(0.5)),
    ("energy", 0.9, reference.rank_energy(0.9)),
    ("energy", 0.3, reference.rank_energy(0.3)),
]


@pytest.mark.parametrize(("rule", "tolerance", "rank"), RULES)
@pytest.mark.parametrize("images", [3, 21, 23, 60])
def test_projector_equals_the_literal_one_and_is_a_projector(rule, tolerance, rank, images) -> None:
    features = draw(5, images, 24) * torch.linspace(1.0, 3.0, 24)
    gram = features.mT @ features
    projector = row_projector(gram, rule, tolerance)
    ranks = row_rank(gram, rule, tolerance)
    for index in range(5):
        assert gap(projector[index], reference.row_projector(gram[index], rank)) < 1e-8
        assert int(ranks[index]) == rank(torch.linalg.svdvals(gram[index]))
        if rule == "numerical":
            assert int(ranks[index]) == min(images, 24) == torch.linalg.matrix_rank(features[index])
    assert torch.equal(projector, projector.mT)
    assert (projector @ projector - projector).abs().max() < 1e-12
    assert torch.equal(projector.diagonal(dim1=1, dim2=2).sum(1).round().long(), ranks)


@pytest.mark.parametrize(
    ("rule", "tolerance", "kept"),
    [
        ("positive", None, [1, 1, 1, 1, 0]),
        ("numerical", None, [1, 1, 1, 0, 0]),
        ("tolerance", 1e-6, [1, 1, 1, 0, 0]),
        ("tolerance", 0.05, [1, 0, 1, 0, 0]),
        ("tolerance", 0.1, [1, 0, 0, 0, 0]),
        ("energy", 0.8, [1, 0, 0, 0, 0]),
        ("energy", 0.9, [1, 0, 0, 0, 0]),
        ("energy", 0.91, [1, 0, 1, 0, 0]),
        ("energy", 0.9901, [1, 1, 1, 0, 0]),
        ("energy", 1.0, [1, 1, 1, 0, 0]),
        ("none", None, [1, 1, 1, 1, 1]),
    ],
)
def test_rank_rules_by_hand(rule, tolerance, kept) -> None:
    gram = torch.diag(torch.tensor([90.0, 1.0, 9.0, 1e-15, 0.0], dtype=torch.float64))
    wanted = torch.diag(torch.tensor(kept, dtype=torch.float64))
    assert (row_projector(gram, rule, tolerance) - wanted).abs().max() < 1e-14
    assert int(row_rank(gram, rule, tolerance)) == sum(kept)


def test_positive_agrees_with_the_released_float32_rule_without_dead_channels() -> None:
    for images in (20, 400):  # fewer and more than dimensions: float32 noise counts as positive
        features = torch.rand(images, 32, generator=torch.Generator().manual_seed(images))
        gram = features.T @ features
        u, sigma, _ = torch.linalg.svd(gram)
        kept = u[:, sigma > 0]
        assert int(row_rank(gram, "positive")) == kept.shape[1] == 32
        assert (row_projector(gram, "positive") - kept @ kept.T).abs().max() < 1e-5


def test_positive_with_dead_channels_agrees_with_float32_svd_to_its_rounding() -> None:
    features = torch.rand(400, 32, generator=torch.Generator().manual_seed(3))
    features[:, [0, 7, 31]] = 0.0
    gram = features.T @ features
    u, sigma, _ = torch.linalg.svd(gram)
    # LAPACK gives the dead channels 1e-4 of rounding or zero, by accident: what stands clear of it is the rule.
    kept = u[:, sigma > 32 * torch.finfo(torch.float32).eps * sigma[0]]
    assert int(row_rank(gram, "positive")) == kept.shape[1] == 29
    assert (row_projector(gram, "positive") - kept @ kept.T).abs().max() < 1e-5


def test_positive_decomposes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("decomposed")

    for name in ("eigh", "svd", "cholesky_ex"):
        monkeypatch.setattr(torch.linalg, name, forbidden)
    assert row_space(torch.ones(2, 3, 3), "positive") is None
    with pytest.raises(AssertionError, match="decomposed"):
        row_space(torch.ones(2, 3, 3), "numerical")


def test_full_rank_grams_are_never_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("decomposed")

    monkeypatch.setattr(torch.linalg, "eigh", forbidden)
    features = draw(4, 90, 30)
    assert row_space(features.mT @ features, "numerical") is None


@pytest.mark.parametrize("gaps", [1e-3, 1e-8, 1e-11, 1e-12, 3e-13])
def test_thin_null_spaces_equal_the_eigendecomposition(gaps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # eigenvalues from 1 down to `gaps`, then three zeros; the second matrix has two
    basis = torch.linalg.qr(draw(2, 40, 40))[0]
    values = torch.logspace(0, float(np.log10(gaps)), 40, dtype=torch.float64).repeat(2, 1)
    values[0, 37:], values[1, 38:] = 0.0, 0.0
    gram = linear_algebra.symmetrize(basis * values[:, None, :] @ basis.mT)
    fast = row_projector(gram)
    monkeypatch.setattr(projection, "_small_null_space", lambda g, _: (g.new_zeros(0, 40, 0), torch.zeros(2) > 0))
    slow = row_projector(gram)
    assert row_rank(gram).tolist() == [37, 38]
    assert (fast - slow).abs().max() < 100 * linear_algebra.EPS / gaps
    exact = basis[0, :, :37] @ basis[0, :, :37].T
    assert (fast[0] - exact).abs().max() < 100 * linear_algebra.EPS / gaps


def test_thin_null_spaces_need_no_eigendecomposition() -> None:
    features = draw(3, 60, 64)
    gram = features.mT @ features
    basis, found = projection._small_null_space(gram, 64 * linear_algebra.EPS)
    assert found.tolist() == [True] * 3
    assert basis.shape == (3, 64, 4)
    wide = draw(1, 30, 64)
    assert projection._small_null_space(wide.mT @ wide, 64 * linear_algebra.EPS)[1].tolist() == [False]


def test_thin_null_spaces_do_not_depend_on_the_global_generator() -> None:
    features = draw(3, 60, 64)
    gram = features.mT @ features
    torch.manual_seed(1)
    before = torch.get_rng_state()
    basis = projection._small_null_space(gram, 64 * linear_algebra.EPS)[0]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(projection._small_null_space(gram, 64 * linear_algebra.EPS)[0], basis)


def test_mixed_batch_of_full_thin_wide_and_empty_classes() -> None:
    grams = []
    for images in (100, 47, 5, 0, 48):
        features = draw(images, 48, seed=images)
        grams.append(features.T @ features)
    gram = torch.stack(grams)
    assert row_rank(gram).tolist() == [48, 47, 5, 0, 48]
    for index in range(5):
        alone = row_projector(gram[index])
        assert (row_projector(gram)[index] - alone).abs().max() < 1e-10
    assert row_rank(gram.reshape(5, 1, 48, 48)).shape == (5, 1)


@given(st.integers(1, 12), st.integers(1, 10), st.floats(1e-6, 1e6))
@settings(deadline=None, max_examples=25)
def test_rank_does_not_depend_on_scale(images: int, dim: int, scale: float) -> None:
    features = draw(images, dim, seed=images * 31 + dim)
    gram = features.T @ features
    assert int(row_rank(scale * gram)) == min(images, dim)
    assert (row_projector(scale * gram) - row_projector(gram)).abs().max() < 1e-6


def test_rules_refuse_what_they_do_not_know() -> None:
    gram = torch.eye(2)
    with raises(ConfigError, "'numericl'", "'numerical'"):
        row_projector(gram, "numericl")  # type: ignore[arg-type]
    for rule, tolerance in (("tolerance", None), ("energy", 1.5), ("energy", 0.0)):
        with raises(ConfigError, rule, tolerance):
            row_projector(gram, rule, tolerance)  # type: ignore[arg-type]
    with raises(ConfigError, "'numerical'", 0.1, "'tolerance'", "'energy'"):
        row_projector(gram, "numerical", 0.1)
    for rule in ("positive", "numerical"):
        with raises(NotFiniteError, "gram", 2):
            row_projector(gram / 0.0, rule)  # type: ignore[arg-type]
    with raises(ConfigError, "gram", (2, 3)):
        row_projector(torch.ones(2, 3))


# --- class shift ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "tolerance", "rank"), RULES)
def test_class_shift_equals_the_literal_equation(rule, tolerance, rank) -> None:
    features, shift = draw(3, 6, 10), draw(10, 10, seed=1)
    gram = features.mT @ features
    ours = class_shift(shift, gram, rule, tolerance)
    assert ours.shape == (3, 10, 10)
    for index in range(3):
        assert gap(ours[index], reference.class_shift(shift, gram[index], rank)) < 1e-8


@pytest.mark.parametrize("rule", ["positive", "numerical", "none"])
def test_class_shift_without_a_cut_is_the_shared_matrix_itself(rule) -> None:
    features, shift = draw(3, 30, 10), draw(10, 10, seed=1)
    assert class_shift(shift, features.mT @ features, rule) is shift


def test_class_shift_zeroes_dead_channels_under_positive() -> None:
    features, shift = draw(2, 30, 4), draw(4, 4, seed=1)
    features[1, :, 2] = 0.0
    ours = class_shift(shift, features.mT @ features, "positive")
    assert torch.equal(ours[0], shift)
    assert torch.equal(ours[1][:, [0, 1, 3]], shift[:, [0, 1, 3]])
    assert torch.equal(ours[1][:, 2], torch.zeros(4, dtype=torch.float64))


def test_class_shift_refuses_unequal_dimensions() -> None:
    with raises(ConfigError, "task_shift", (3, 3), "gram", (1, 4, 4)):
        class_shift(torch.eye(3), torch.eye(4)[None])
