"""The analytic core under hostile statistics, against arithmetic with fifty digits.

A case is a matrix of features that a careless world may bring: few or duplicated rows, dead or duplicated channels,
scales from 1e-12 to 1e12. A result is right when its error stays below what the condition of the problem allows,
BOUND * dim * eps * condition; where the matrix cannot be solved at all, a typed error says which one and why.
"""

import contextlib
import math

import mpmath
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from efcil.core.class_stats import ClassStats
from efcil.core.linear_algebra import EPS, cholesky, congruence, pack_symmetric, unpack_symmetric
from efcil.core.mahalanobis import correlation_factor, direction, mahalanobis_scores
from efcil.core.projection import row_projector, task_shift
from efcil.core.recursive_ridge import RecursiveRidge
from efcil.core.ridge import normalize_columns, ridge_weight
from efcil.errors import NotFiniteError, NotPositiveDefiniteError

mpmath.mp.dps = 50
BOUND = 64.0  # how many dim * eps * condition an error may be: rounding of products, factorisation and two solves

SCALES = st.integers(-12, 12).map(lambda k: 10.0**k)


@st.composite
def features(draw, least=1, most=8, dims=(1, 6)):
    """Features (n, dim) in float64, with one of the diseases above."""
    dim = draw(st.integers(*dims))
    rows = draw(st.integers(least, most))
    x = torch.randn(
        rows, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    )
    disease = draw(st.sampled_from(["none", "copies", "dead", "equal channels", "positive", "one hot"]))
    if disease == "copies":
        x = x[:1].repeat(rows, 1)
    elif disease == "dead":
        x[:, draw(st.integers(0, dim - 1))] = 0
    elif disease == "equal channels":
        x[:, -1] = x[:, 0]
    elif disease == "positive":
        x = x.clamp_min(0)
    elif disease == "one hot":
        x = torch.eye(dim, dtype=torch.float64)[torch.arange(rows) % dim]
    return x * draw(SCALES)


def exact(tensor):
    return mpmath.matrix([[mpmath.mpf(v) for v in row] for row in tensor.tolist()])


def error(ours, theirs, largest=None):
    """Largest deviation relative to the largest entry, or to what is given: a sum is as exact as its terms."""
    largest = max((abs(v) for v in theirs), default=mpmath.mpf(0)) if largest is None else mpmath.mpf(largest)
    worst = max(
        (abs(mpmath.mpf(ours[i, j].item()) - theirs[i, j]) for i in range(theirs.rows) for j in range(theirs.cols)),
        default=mpmath.mpf(0),
    )
    return float(worst / largest) if largest else float(worst)


def condition(matrix):
    values = mpmath.eigsy(matrix, eigvals_only=True)
    low, high = min(values), max(values)
    return float(high / low) if low > 0 else math.inf


# -- the classifier ----------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(features(most=10), SCALES, st.integers(0, 3))
def test_the_reconstruction_is_as_exact_as_its_condition_allows(x, ridge, seed):
    labels = torch.arange(len(x)) % (1 + seed % len(x))
    stats = ClassStats.from_features(x, labels)
    classes = labels.unique().tolist()
    gram = exact(x).T * exact(x) + mpmath.mpf(ridge) * mpmath.eye(x.shape[1])
    cond = condition(gram)
    if cond > 0.01 / EPS:  # it may be refused, and then it is named
        with contextlib.suppress(NotPositiveDefiniteError):
            ridge_weight(stats, ridge)
        return
    weight = ridge_weight(stats, ridge)
    assert torch.isfinite(weight).all()
    if cond > 0.001 / EPS:
        return  # no digit is left to compare
    onehot = mpmath.matrix(len(x), len(classes))
    for i, label in enumerate(labels.tolist()):
        onehot[i, classes.index(label)] = 1
    inverse = mpmath.inverse(gram)
    literal = inverse * (exact(x).T * onehot)
    terms = float(x.abs().sum(0).max()) * float(max(abs(v) for v in inverse))  # what the sums are made of
    largest = max(float(max(abs(v) for v in literal)), terms)
    assert error(weight, literal, largest) < BOUND * x.shape[1] * EPS * cond


@settings(max_examples=60, deadline=None)
@given(features(least=2, most=12), SCALES)
def test_the_shift_is_as_exact_as_its_condition_allows(x, ridge):
    y = x.roll(1, 1) + 0.1 * x
    shift = task_shift(x, y, ridge)
    assert torch.isfinite(shift).all()
    gram = exact(x).T * exact(x) + mpmath.mpf(ridge) * mpmath.eye(x.shape[1])
    cond = condition(gram)
    # Directions at the level of rounding are given the value for zero on purpose: the formula would blow rounding up.
    plain = condition(exact(x).T * exact(x))
    assume(cond < 1e-3 / EPS and (plain < 1e-4 / (x.shape[1] * EPS) or ridge > 1e-5 * float(x.square().sum())))
    inverse = mpmath.inverse(gram)
    literal = inverse * (exact(x).T * exact(y))
    terms = float((x.abs().T @ y.abs()).max()) * float(max(abs(v) for v in inverse))
    largest = max(float(max(abs(v) for v in literal)), terms)
    assert error(shift, literal, largest) < BOUND * x.shape[1] * EPS * cond


@settings(max_examples=60, deadline=None)
@given(features(least=2, most=9), SCALES)
def test_moved_statistics_are_those_of_moved_features(x, scale):
    dim = x.shape[1]
    shift = torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim)) * scale
    moved = ClassStats.from_features(x, torch.zeros(len(x), dtype=torch.long)).transform(shift)
    p, gram = exact(shift), exact(x).T * exact(x)
    products = shift.abs().T @ (x.abs().T @ x.abs()) @ shift.abs()
    assert error(moved.gram[0], p.T * gram * p, float(products.max())) < BOUND * dim * EPS
    mean = mpmath.matrix([[sum(exact(x)[:, j]) / len(x) for j in range(dim)]])
    terms = float((x.abs().mean(0) @ shift.abs()).max())
    assert error(moved.mean, mean * p, terms) < BOUND * dim * EPS


@settings(max_examples=40, deadline=None)
@given(features(most=6), SCALES)
def test_one_image_of_each_class(x, ridge):
    """As many classes as rows: statistics are the rows themselves, and the classifier is as exact as ever."""
    stats = ClassStats.from_features(x, torch.arange(len(x)))
    assert torch.equal(stats.mean, x)
    assert stats.count.tolist() == [1] * len(x)
    assert torch.equal(stats.covariance(unbiased=True), stats.covariance())
    largest = float(x.abs().max()) ** 2
    assert float(stats.covariance().abs().max()) <= BOUND * EPS * largest, "a class of one image does not vary"
    gram = exact(x).T * exact(x) + mpmath.mpf(ridge) * mpmath.eye(x.shape[1])
    cond = condition(gram)
    assume(cond < 0.001 / EPS)
    inverse = mpmath.inverse(gram)
    literal = inverse * exact(x).T
    terms = float(x.abs().max()) * float(max(abs(v) for v in inverse))
    largest = max(float(max(abs(v) for v in literal)), terms)
    assert error(ridge_weight(stats, ridge), literal, largest) < BOUND * x.shape[1] * EPS * cond


@settings(max_examples=40, deadline=None)
@given(features(least=2, most=12), SCALES, st.integers(1, 11))
def test_a_ridge_regression_in_parts_is_the_joint_one(x, ridge, cut):
    """Rows that come in two parts, the second with a class more: the same sums, the same weight."""
    cut = min(cut, len(x) - 1)
    labels = torch.arange(len(x)) % 2
    labels[cut:] += 1
    onehot = torch.nn.functional.one_hot(labels, 3).double()
    sums = RecursiveRidge.empty(x.shape[1], torch.device("cpu"))
    sums.add(x[:cut], onehot[:cut, :2], 0)
    sums.add(x[cut:], onehot[cut:], 0)
    gram = exact(x).T * exact(x) + mpmath.mpf(ridge) * mpmath.eye(x.shape[1])
    cond = condition(gram)
    if cond > 0.01 / EPS:
        with contextlib.suppress(NotPositiveDefiniteError):
            sums.solve(ridge)
        return
    weight = sums.solve(ridge)
    assert torch.isfinite(weight).all()
    assume(cond < 0.001 / EPS)
    inverse = mpmath.inverse(gram)
    literal = inverse * (exact(x).T * exact(onehot))
    terms = float(x.abs().sum(0).max()) * float(max(abs(v) for v in inverse))
    largest = max(float(max(abs(v) for v in literal)), terms)
    assert error(weight, literal, largest) < BOUND * x.shape[1] * EPS * cond


@settings(max_examples=40, deadline=None)
@given(features(least=1, most=12))
def test_a_covariance_is_exact_beside_the_second_moment(x):
    """What is subtracted is as large as the second moment: the error is rounding of that, not of the difference."""
    stats = ClassStats.from_features(x, torch.zeros(len(x), dtype=torch.long))
    rows, n = exact(x), len(x)
    mean = mpmath.matrix([[sum(rows[:, j]) / n for j in range(x.shape[1])]])
    literal = rows.T * rows / n - mean.T * mean
    moment = float((x.abs().T @ x.abs() / n).max())
    assert error(stats.covariance()[0], literal, moment or 1.0) < BOUND * x.shape[1] * EPS


@settings(max_examples=40, deadline=None)
@given(features(least=1, most=6), st.floats(0.05, 1.0))
def test_the_metric_of_a_class_is_one(x, power):
    """FeCAM's factors exist for any class, one image and dead channels included, and give finite distances."""
    points = direction(x, power)
    stats = ClassStats.from_features(points, torch.zeros(len(x), dtype=torch.long))
    factor = correlation_factor(stats.covariance(unbiased=True), stats.gram / stats.count[:, None, None], 1.0, 1.0, 2)
    scores = mahalanobis_scores(points, stats.mean, factor)
    assert torch.isfinite(scores).all()
    assert float(scores.max()) <= 0.0


# -- rank and projection -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(features(least=1, most=5, dims=(2, 8)))
def test_a_projector_is_one_and_holds_the_rows(x):
    """U U' is symmetric, its own square, and leaves every row of the class where it is, whatever the scale."""
    gram = x.T @ x
    projector = row_projector(gram[None], "numerical")[0]
    size = x.shape[1]
    assert torch.isfinite(projector).all()
    assert (projector - projector.T).abs().max() < 1e-12
    assert (projector @ projector - projector).abs().max() < 1e-9
    assert round(float(projector.trace())) <= min(len(x), size)
    if x.abs().max() > 0:
        kept = (x @ projector - x).norm() / x.norm()
        assert kept < 1e-6, "what is cut is rounding beside the largest row"


# -- counts and joins --------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10**7), st.integers(1, 10**7), SCALES)
def test_counts_from_one_to_ten_million(first, second, scale):
    """Statistics of huge classes join as sums do: counts exact, means weighted, Grams added."""
    mean = torch.tensor([[1.0, -2.0]], dtype=torch.float64) * scale
    parts = [
        ClassStats(torch.tensor([0]), torch.tensor([n]), m, (m.T @ m)[None] * n)
        for n, m in ((first, mean), (second, 3 * mean))
    ]
    whole = parts[0].merge(parts[1])
    assert whole.count.tolist() == [first + second]
    share = mpmath.mpf(second) / (first + second)
    expected = mpmath.mpf(scale) * (1 + 2 * share)
    assert float(abs(mpmath.mpf(whole.mean[0, 0].item()) - expected) / expected) < 8 * EPS
    ridge = float(whole.gram_sum().trace())
    weight = ridge_weight(whole, ridge)
    n, m = mpmath.matrix([[first, second]]), exact(torch.cat([mean, 3 * mean]))
    gram = n[0] * m[0, :].T * m[0, :] + n[1] * m[1, :].T * m[1, :] + mpmath.mpf(ridge) * mpmath.eye(2)
    literal = mpmath.inverse(gram) * (n[0] * m[0, :] + n[1] * m[1, :]).T
    assert error(weight, literal) < BOUND * 2 * EPS * 2  # its condition is below 2: the ridge is the trace


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), SCALES)
def test_packing_loses_no_bit(dim, scale):
    half = torch.randn(3, dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim)) * scale
    gram = half @ half.mT
    gram = (gram + gram.mT) / 2
    assert torch.equal(unpack_symmetric(pack_symmetric(gram)), gram)


# -- sizes and limits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 63, 512, 2048])
def test_dimensions_from_one_to_two_thousand(dim):
    x = torch.randn(8, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim))
    stats = ClassStats.from_features(x, torch.tensor([0, 0, 0, 0, 1, 1, 1, 2]))
    weight = ridge_weight(stats, 1.0)
    assert weight.shape == (dim, 3)
    # by the small side: (X'X + I)^-1 X' = X' (XX' + I)^-1
    small = x.T @ torch.linalg.solve(x @ x.T + torch.eye(8, dtype=torch.float64), torch.eye(8, dtype=torch.float64))
    onehot = torch.nn.functional.one_hot(torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])).double()
    assert torch.allclose(weight, small @ onehot, atol=1e-10)


@pytest.mark.parametrize("dim", [1, 2, 63, 300, pytest.param(2048, marks=pytest.mark.slow)])
def test_shift_and_projection_in_dimensions_from_one_to_two_thousand(dim):
    """Eight images of any dimension: their shift maps each on its new place, the projector holds them, both finite."""
    x = torch.randn(8, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim))
    y = x.roll(1, 1)
    shift = task_shift(x, y, 1e-9)
    assert torch.isfinite(shift).all()
    if dim >= 8:
        assert (x @ shift - y).norm() < 1e-6 * y.norm()
    stats = ClassStats.from_features(x, torch.zeros(8, dtype=torch.long))
    projector = row_projector(stats.gram, "numerical")[0]
    assert (x @ projector - x).norm() < 1e-6 * x.norm()
    assert round(float(projector.trace())) == min(8, dim)
    assert torch.isfinite(stats.transform(shift).gram).all()


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize(
    ("solve", "named"),
    [
        (
            lambda x: ridge_weight(ClassStats.from_features(x, torch.zeros(2, dtype=torch.long)), 0.0),
            "the sum of Grams",
        ),
        (lambda x: cholesky(torch.stack([torch.eye(3).double(), x.T @ x]), "the Gram"), r"the Gram number 1 \(3 x 3\)"),
    ],
)
def test_what_cannot_be_solved_is_named_with_the_reason(scale, solve, named):
    """Two rows in three dimensions, at any scale: which matrix, its size, why, and what to do."""
    x = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], dtype=torch.float64) * scale
    with pytest.raises(NotPositiveDefiniteError, match=f"{named}.* is not positive definite: its smallest .*; .*ridge"):
        solve(x)


@pytest.mark.parametrize("scale", [1e-170, 1e160])
def test_squares_that_leave_the_range_are_named(scale):
    """Beyond 1e154 the Gram overflows: an error that says so; below 1e-162 it is zero: the ridge decides."""
    x = torch.tensor([[1.0, 2.0], [3.0, 1.0]], dtype=torch.float64) * scale
    labels = torch.tensor([0, 1])
    if scale > 1:
        with pytest.raises(NotFiniteError, match="4 infinite of 4"):
            ridge_weight(ClassStats.from_features(x, labels), 1.0)
    else:
        assert torch.isfinite(ridge_weight(ClassStats.from_features(x, labels), 1.0)).all()
        with pytest.raises(NotPositiveDefiniteError):
            ridge_weight(ClassStats.from_features(x, labels), 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_named(bad):
    x = torch.ones(3, 2, dtype=torch.float64)
    x[1, 0] = bad
    with pytest.raises(NotFiniteError):
        ClassStats.from_features(x, torch.zeros(3, dtype=torch.long))
    with pytest.raises(NotFiniteError):
        task_shift(x, torch.ones(3, 2))
    with pytest.raises(NotFiniteError):
        normalize_columns(x)


@settings(max_examples=60, deadline=None)
@given(features(least=2, most=5), st.floats(-300, 300))
def test_columns_are_normalized_at_any_scale(x, power):
    weight = normalize_columns(x / x.abs().max() * 10.0**power if x.abs().max() > 0 else x)
    norms = torch.linalg.vector_norm(weight, dim=0)
    for norm, column in zip(norms.tolist(), x.T, strict=True):
        assert norm == pytest.approx(1.0 if column.abs().max() > 0 else 0.0, abs=1e-12)


def test_congruence_stays_symmetric_to_the_last_bit():
    x = torch.randn(4, 40, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gram = x.mT @ x
    shift = torch.randn(33, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(30):
        gram = congruence((gram + gram.mT) / 2, shift / 6)
        assert torch.equal(gram, gram.mT)
