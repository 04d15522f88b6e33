"""The estimators: scikit-learn's own checks, batches against the whole, literal transcriptions of their formulas."""

import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import RidgeClassifier, RidgeClassifierCV
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import (
    check_dataframe_column_names_consistency,
    check_estimator,
    check_n_features_in_after_fitting,
    parametrize_with_checks,
)

from efcil import NearestMeanClassifier, RidgeReconstructionClassifier
from efcil.core.class_stats import ClassStats
from efcil.core.gcv import AS_GOOD, candidates, gcv_scores
from efcil.core.nearest_mean import cosine_scores
from efcil.core.ridge import normalize_columns, ridge_weight
from efcil.errors import ConfigError, NotPositiveDefiniteError
from efcil.estimators.base import union
from efcil.estimators.ridge import onto_simplex
from efcil.estimators.sums import ROWS_AT_ONCE, FeatureSums
from messages import raises

PAPER = {"ridge": 5.0, "fit_intercept": False, "normalize": True}
ALL = [
    RidgeReconstructionClassifier(),
    RidgeReconstructionClassifier(**PAPER),
    RidgeReconstructionClassifier(ridge=2, normalize=True),
    NearestMeanClassifier(),
]


def problem(classes=4, dim=6, per_class=15, seed=0, offset=0.0):
    """Blobs of uneven size in mixed order."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(classes), per_class + 3 * np.arange(classes))
    X = rng.normal(size=(classes, dim))[y] * 2 + rng.normal(size=(len(y), dim)) + offset
    order = rng.permutation(len(y))
    return X[order], y[order]


def state(model):
    """What the estimator learned, as one vector."""
    if isinstance(model, NearestMeanClassifier):
        return model.means_.ravel()
    return np.concatenate([model.coef_.ravel(), model.intercept_])


def names(models):
    return [f"{type(m).__name__}-{i}" for i, m in enumerate(models)]


every = pytest.mark.parametrize("model", ALL, ids=names(ALL))

# --- scikit-learn's own suite -----------------------------------------------------------------------------------------


@parametrize_with_checks(ALL)
def test_scikit_learns_check(estimator, check):
    check(estimator)


@every
def test_no_check_is_skipped_or_expected_to_fail(model):
    results = check_estimator(clone(model), on_skip=None, on_fail=None)
    assert [(r["check_name"], str(r["exception"])) for r in results if r["status"] != "passed"] == []
    ran = {r["check_name"] for r in results}
    needs_pandas_or_array_api = {
        "check_sample_weights_pandas_series",
        "check_classifier_data_not_an_array",
    }
    assert needs_pandas_or_array_api <= ran
    assert any("array_api" in name for name in ran)
    assert len(ran) > 50


@every
@pytest.mark.parametrize("check", [check_dataframe_column_names_consistency, check_n_features_in_after_fitting])
def test_checks_that_scikit_learn_keeps_for_its_own(model, check):
    check(type(model).__name__, clone(model))


def test_importing_efcil_imports_neither_torch_nor_sklearn():
    code = "import sys, efcil; assert not {'torch', 'sklearn', 'numpy'} & set(sys.modules)"
    code += "; assert 'NearestMeanClassifier' in dir(efcil); from efcil import NearestMeanClassifier as n"
    code += "; assert n.__module__ == 'efcil.estimators.nearest_mean'; assert not hasattr(efcil, 'Nothing')"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the same core as the methods -------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
def test_ridge_is_that_of_class_statistics(normalize):
    X, y = problem()
    weight = ridge_weight(ClassStats.from_features(torch.tensor(X), torch.tensor(y)), 3.0)
    weight = normalize_columns(weight) if normalize else weight
    model = RidgeReconstructionClassifier(3.0, fit_intercept=False, normalize=normalize).fit(X, y)
    np.testing.assert_allclose(model.coef_, weight.T, atol=1e-12)
    np.testing.assert_allclose(model.decision_function(X), X @ weight.numpy(), atol=1e-12)
    assert not model.intercept_.any()


def test_nearest_mean_is_that_of_class_statistics():
    X, y = problem()
    mean = ClassStats.from_features(torch.tensor(X), torch.tensor(y)).mean
    model = NearestMeanClassifier().fit(X, y)
    np.testing.assert_allclose(model.means_, mean, atol=1e-14)
    np.testing.assert_allclose(model.decision_function(X), cosine_scores(torch.tensor(X), mean), atol=1e-14)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_with_an_intercept_it_is_scikit_learns_ridge_classifier(classes, offset):
    """Its labels are -1 and 1, ours 0 and 1: 2 s - 1, and for two classes the difference of ours."""
    X, y = problem(classes, offset=offset)
    weight = np.random.default_rng(1).uniform(0.2, 3, len(y))
    ours = RidgeReconstructionClassifier(7.0).fit(X, y, sample_weight=weight)
    theirs = RidgeClassifier(7.0, solver="svd").fit(X, y, sample_weight=weight)
    scores = ours.decision_function(X)
    np.testing.assert_allclose(scores if classes == 2 else 2 * scores - 1, theirs.decision_function(X), atol=1e-9)
    np.testing.assert_array_equal(ours.predict(X), theirs.predict(X))
    assert ours.coef_.shape == (1 if classes == 2 else classes, 6)
    np.testing.assert_allclose(X @ ours.coef_.T + ours.intercept_, scores.reshape(len(X), -1), atol=1e-9)


def test_normalized_scores_are_distances_from_the_plane():
    X, y = problem()
    plain = RidgeReconstructionClassifier(3.0).fit(X, y)
    model = RidgeReconstructionClassifier(3.0, normalize=True).fit(X, y)
    length = np.linalg.norm(plain.coef_, axis=1)
    np.testing.assert_allclose(model.decision_function(X), plain.decision_function(X) / length, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(model.coef_, axis=1), 1.0)


def test_normalizing_helps_rare_classes():
    X, y = load_digits(return_X_y=True)
    X, held, y, truth = train_test_split(X, y, test_size=0.5, random_state=0, stratify=y)
    rows = np.concatenate([np.flatnonzero(y == c)[: 80 if c < 5 else 8] for c in range(10)])
    recall = [
        np.mean(
            RidgeReconstructionClassifier(normalize=n).fit(X[rows], y[rows]).predict(held)[truth > 4]
            == truth[truth > 4]
        )
        for n in (False, True)
    ]
    assert recall[1] > recall[0] + 0.3


# --- batches ----------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("order", ["mixed", "class after class", "row after row", "reversed"])
def test_any_batches_give_the_whole(model, order):
    X, y = problem(offset=3.0)
    whole = clone(model).fit(X, y)
    cuts = {"mixed": [11, 12, 40], "row after row": range(1, len(y))}.get(
        order, np.flatnonzero(np.diff(np.sort(y))) + 1
    )
    if order in ("class after class", "reversed"):
        rows = np.argsort(y, kind="stable")
        X, y = (X[rows], y[rows]) if order == "class after class" else (X[rows][::-1], y[rows][::-1])
        cuts = cuts if order == "class after class" else len(y) - cuts[::-1]
    parts = clone(model)
    for rows, labels in zip(np.split(X, cuts), np.split(y, cuts), strict=True):
        parts.partial_fit(rows, labels)
    assert parts.classes_.tolist() == whole.classes_.tolist()
    np.testing.assert_allclose(state(parts), state(whole), rtol=0, atol=1e-10)
    np.testing.assert_array_equal(parts.predict(X), whole.predict(X))
    if isinstance(model, RidgeReconstructionClassifier):
        assert parts.ridge_ == whole.ridge_


def test_large_batches_go_through_in_pieces():
    rng = np.random.default_rng(0)
    X, y = (
        rng.normal(5.0, 1.0, (2 * ROWS_AT_ONCE + 17, 3)).astype(np.float32),
        rng.integers(0, 3, 2 * ROWS_AT_ONCE + 17),
    )
    weight = rng.uniform(size=len(y))
    weight[:ROWS_AT_ONCE] = 0.0  # a piece of nothing
    sums = FeatureSums.from_rows(X, y, weight, 4)
    x = X.astype(np.float64)
    np.testing.assert_allclose(sums.gram_sum(), x.T @ (x * weight[:, None]), rtol=1e-12)
    np.testing.assert_allclose(sums.cross, x.T @ (np.eye(4)[y] * weight[:, None]), rtol=1e-12)
    middle = x - np.average(x, axis=0, weights=weight)
    np.testing.assert_allclose(sums.scatter, middle.T @ (middle * weight[:, None]), rtol=0, atol=1e-8)


def test_features_far_from_zero_lose_no_digits():
    X, y = problem()
    near, far = (RidgeReconstructionClassifier(1.0).fit(X + offset, y) for offset in (0.0, 2.0**24))
    np.testing.assert_allclose(far.coef_, near.coef_, rtol=0, atol=1e-7)  # the features themselves keep 1e-9


@every
def test_weights_count_rows(model):
    X, y = problem()
    weight = np.random.default_rng(3).integers(0, 4, len(y))
    repeated = clone(model).fit(np.repeat(X, weight, axis=0), np.repeat(y, weight))
    weighted = clone(model).partial_fit(X[:20], y[:20], sample_weight=weight[:20])
    weighted.partial_fit(X[20:], y[20:], sample_weight=weight[20:])
    np.testing.assert_allclose(state(weighted), state(repeated), rtol=0, atol=1e-10)
    np.testing.assert_allclose(weighted.class_count_, np.bincount(y, weight))


@every
@pytest.mark.parametrize(
    "labels", [np.array(["ox", "a", "crane"]), np.array([True, False]), np.array([-7, 300]), [2.0, 1.0]]
)
def test_labels_of_any_kind(model, labels):
    labels = np.asarray(labels)
    X, y = problem(len(labels))
    model = clone(model)
    for rows, index in ((X[y == i], y[y == i]) for i in range(len(labels))):
        model.partial_fit(rows, labels[index])
    np.testing.assert_array_equal(model.classes_, np.unique(labels))
    assert model.classes_.dtype.kind == labels.dtype.kind
    assert model.score(X, labels[y]) > 0.8
    assert model.predict(X).dtype == model.classes_.dtype


def test_labels_of_a_data_frame():
    X, y = problem(3)
    frame = pd.DataFrame(X, columns=[f"f{i}" for i in range(6)])
    series = pd.Series(np.array(["one", "two", "three"])[y])
    model = RidgeReconstructionClassifier().partial_fit(frame[:20], series[:20])
    model.partial_fit(frame[20:], series[20:], sample_weight=pd.Series(np.ones(len(y) - 20)))
    assert model.feature_names_in_.tolist() == list(frame.columns)
    assert model.score(frame, series) > 0.8
    np.testing.assert_array_equal(
        model.partial_fit(frame, series.to_numpy().astype(str)).classes_, ["one", "three", "two"]
    )
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[frame.columns[::-1]])


# --- classes that are announced ---------------------------------------------------------------------------------------


@every
def test_announced_classes_have_a_place_and_are_not_predicted_before_they_come(model):
    X, y = problem()
    announced, grown = clone(model), clone(model)
    for c in range(4):
        announced.partial_fit(X[y == c], y[y == c], classes=[0, 1, 2, 3] if c == 0 else None)
        grown.partial_fit(X[y == c], y[y == c])
        assert announced.classes_.tolist() == [0, 1, 2, 3]
        assert announced.decision_function(X).shape == (len(X), 4)
        assert set(announced.predict(-X).tolist()) <= set(range(c + 1))
        np.testing.assert_array_equal(announced.predict(X), grown.predict(X))
    np.testing.assert_allclose(state(announced), state(grown), rtol=0, atol=1e-12)


def test_a_label_that_was_not_announced_is_refused_until_it_is():
    X, y = problem()
    model = NearestMeanClassifier().partial_fit(X[y < 2], y[y < 2], classes=[0, 1])
    before = pickle.dumps(model)
    with raises(ValueError, 2, 3, (0, 1), "classes"):
        model.partial_fit(X, y)
    with raises(ValueError, 3, (0, 1, 2), "classes"):
        model.partial_fit(X, y, classes=[2])
    assert pickle.dumps(model) == before
    assert model.partial_fit(X, y, classes=[3, 2]).classes_.tolist() == [0, 1, 2, 3]


def test_numbers_and_strings_do_not_mix():
    X, y = problem()
    model = NearestMeanClassifier().fit(X, y)
    with raises(ConfigError, "'3'", (0, 1, 2, 3)):
        model.partial_fit(X, y.astype(str))
    assert union(np.array(["a"], dtype=object), np.array(["b"])).tolist() == ["a", "b"]


# --- generalized cross-validation -------------------------------------------------------------------------------------


def literal_gcv(X, y, ridge, intercept):
    """n |(I - H) Y|^2 / trace(I - H)^2, with the n x n matrix H."""
    n, dim = X.shape
    Y = np.eye(y.max() + 1)[y]
    mean = np.full((n, n), 1 / n) if intercept else np.zeros((n, n))
    centered = X - mean @ X
    H = centered @ np.linalg.inv(centered.T @ centered + ridge * np.eye(dim)) @ centered.T + mean
    rest = np.eye(n) - H
    return n * np.linalg.norm(rest @ Y) ** 2 / np.trace(rest) ** 2


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("dim", [6, 200])
def test_gcv_from_sums_equals_the_literal_formula(intercept, dim):
    X, y = problem(dim=dim, offset=0.5)
    model = RidgeReconstructionClassifier(fit_intercept=intercept).fit(X, y)
    sums = model._sums.centered() if intercept else model._sums
    ridges = torch.tensor([0.1, 1.0, 20.0, 3000.0], dtype=torch.float64)
    square = len(y) - (np.bincount(y) ** 2).sum() / len(y) if intercept else len(y)
    ours = gcv_scores(sums.gram_sum(), sums.cross, square, len(y), ridges, free=int(intercept))
    np.testing.assert_allclose(ours, [literal_gcv(X, y, float(r), intercept) for r in ridges], rtol=1e-7)
    grid = candidates(sums.gram_sum()).numpy()
    literal = np.array([literal_gcv(X, y, r, intercept) for r in grid])
    assert model.ridge_ == grid[literal <= literal.min() * (1 + AS_GOOD)][-1]
    assert grid[0] < model.ridge_ < grid[-1]


def test_auto_is_the_choice_of_scikit_learns_cross_validation_on_digits():
    X, y = load_digits(return_X_y=True)
    ours = RidgeReconstructionClassifier().fit(X, y)
    grid = [10.0 ** (j / 4) for j in range(-8, 25)]
    assert ours.ridge_ == pytest.approx(RidgeClassifierCV(grid).fit(X, y).alpha_)


def test_auto_follows_the_scale_of_the_features():
    X, y = problem()
    one, thousand = (RidgeReconstructionClassifier().fit(X * scale, y) for scale in (1, 1000))
    assert thousand.ridge_ == pytest.approx(1e6 * one.ridge_)
    np.testing.assert_allclose(thousand.coef_ * 1000, one.coef_, atol=1e-10)


def test_auto_where_there_is_nothing_to_choose_by():
    same = RidgeReconstructionClassifier().fit(np.ones((4, 3)), [0, 0, 1, 0])
    assert not same.coef_.any()
    np.testing.assert_allclose(same.predict_proba([[9.0, 9.0, 9.0]]), [[0.75, 0.25]])
    alone = RidgeReconstructionClassifier().fit([[1.0, 2.0]], ["only"])
    assert alone.predict([[5.0, 5.0]]).tolist() == ["only"]
    light = RidgeReconstructionClassifier().fit(*problem(), sample_weight=np.full(78, 1e-3))
    assert np.isfinite(light.coef_).all()


def test_another_ridge_needs_no_rows():
    X, y = problem()
    model = RidgeReconstructionClassifier().fit(X, y).set_params(ridge=40.0, fit_intercept=False)
    fresh = RidgeReconstructionClassifier(40.0, fit_intercept=False).fit(X, y)
    np.testing.assert_array_equal(state(model.solve()), state(fresh))
    with pytest.raises(NotFittedError):
        RidgeReconstructionClassifier().solve()


# --- probabilities ----------------------------------------------------------------------------------------------------


def test_probabilities_are_the_nearest_to_the_scores():
    rng = np.random.default_rng(0)
    scores = rng.normal(0.3, 0.6, (50, 4))
    found = onto_simplex(scores)
    np.testing.assert_allclose(found.sum(1), 1.0)
    assert found.min() >= 0
    others = rng.dirichlet(np.ones(4), 20000)  # none of many is nearer
    distance = ((scores[:, None, :] - others) ** 2).sum(2).min(1)
    assert (((scores - found) ** 2).sum(1) <= distance + 1e-12).all()
    inside = rng.dirichlet(np.ones(4), 10)
    np.testing.assert_allclose(onto_simplex(inside), inside, atol=1e-12)


def test_probabilities_follow_the_prediction_and_leave_out_what_never_came():
    X, y = problem()
    model = RidgeReconstructionClassifier().partial_fit(X, y, classes=range(6))
    found = model.predict_proba(X)
    np.testing.assert_array_equal(model.classes_[found.argmax(1)], model.predict(X))
    np.testing.assert_allclose(found.sum(1), 1.0)
    assert not found[:, 4:].any()


def test_no_probabilities_where_scores_estimate_none():
    assert not hasattr(NearestMeanClassifier(), "predict_proba")
    with pytest.raises(AttributeError) as told:
        RidgeReconstructionClassifier(normalize=True).predict_proba([[1.0]])
    assert "CalibratedClassifierCV" in str(told.value.__cause__ or told.value)
    X, y = problem()
    found = CalibratedClassifierCV(NearestMeanClassifier(), cv=3).fit(X, y).predict_proba(X)
    np.testing.assert_allclose(found.sum(1), 1.0)


# --- inside scikit-learn ----------------------------------------------------------------------------------------------


def test_in_a_pipeline_and_a_grid_search():
    X, y = load_digits(return_X_y=True)
    X, y = X[:500], y[:500]
    search = GridSearchCV(
        make_pipeline(StandardScaler(), RidgeReconstructionClassifier()),
        {"ridgereconstructionclassifier__ridge": [1e6, 100.0, "auto"]},
        cv=3,
        error_score="raise",
    ).fit(X, y)
    by_ridge = dict(zip(["huge", "hundred", "auto"], search.cv_results_["mean_test_score"], strict=True))
    assert by_ridge["huge"] < by_ridge["auto"] - 0.02
    assert search.best_score_ > 0.87
    assert make_pipeline(StandardScaler(), NearestMeanClassifier()).fit(X, y).score(X, y) > 0.85


@every
def test_pickles_and_goes_on(model):
    X, y = problem()
    model = clone(model).partial_fit(X[:30], y[:30])
    copy = pickle.loads(pickle.dumps(model)).partial_fit(X[30:], y[30:])
    np.testing.assert_array_equal(state(copy), state(model.partial_fit(X[30:], y[30:])))


def test_what_is_kept_does_not_grow_with_the_rows_or_the_square_by_classes():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(5000, 64)), rng.integers(0, 50, 5000)
    sizes = [len(pickle.dumps(RidgeReconstructionClassifier().fit(X[:n], y[:n]))) for n in (2500, 5000)]
    assert sizes[0] == sizes[1]
    assert sizes[0] < 8 * (64 * 64 + 4 * 50 * 64) + 5000  # one matrix for all classes, no row


@pytest.mark.parametrize("attribute", ["means_", "class_count_"])
def test_changing_an_attribute_does_not_change_the_sums(attribute):
    X, y = problem()
    model = NearestMeanClassifier().fit(X, y)
    getattr(model, attribute)[:] = 99.0
    model.partial_fit(X, y)
    np.testing.assert_allclose(model.means_, NearestMeanClassifier().fit(X, y).means_, atol=1e-12)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [-1.0, float("nan"), float("inf"), "best", True, None])
def test_a_ridge_that_is_none_is_refused(ridge):
    X, y = problem()
    with pytest.raises(ValueError, match="ridge is .*wanted a finite number, zero or more, or 'auto'"):
        RidgeReconstructionClassifier(ridge).fit(X, y)


@every
def test_a_call_that_fails_changes_nothing(model):
    X, y = problem()
    model = clone(model).fit(X, y)
    before = pickle.dumps(model)
    broken = X.copy()
    broken[0, 0] = np.nan
    huge = np.full_like(X, 1e200)
    huge[0] = -1e308
    for rows, labels, weight, words in (
        (broken, y, None, "NaN"),
        (X[:, :3], y, None, "features"),
        (X, y[:-1], None, "inconsistent"),
        (X, y + 0.5, None, "Unknown label type"),
        (X, y, -np.ones(len(y)), "sample_weight"),
        (X, y, 0 * y, "weight.*zero"),
    ):
        with pytest.raises(ValueError, match=words):
            model.partial_fit(rows, labels, sample_weight=weight)
    if isinstance(model, RidgeReconstructionClassifier):
        with raises(ValueError, "X", 1e308, "StandardScaler"):
            model.partial_fit(huge, y)
        ridge = model.ridge
        with raises(ValueError, "ridge", -1):
            model.set_params(ridge=-1).partial_fit(X, y)
        model.set_params(ridge=ridge)
    assert pickle.dumps(model) == before


def test_no_ridge_wants_enough_rows():
    X, y = problem(dim=200)
    with raises(NotPositiveDefiniteError, "200 x 200", "ridge"):
        RidgeReconstructionClassifier(0.0).fit(X, y)
    X, y = problem()
    weight = np.linalg.lstsq(np.c_[X, np.ones(len(y))], np.eye(4)[y], rcond=None)[0]
    np.testing.assert_allclose(RidgeReconstructionClassifier(0).fit(X, y).coef_, weight[:-1].T, atol=1e-10)


@every
def test_before_it_has_learned(model):
    with pytest.raises(NotFittedError):
        clone(model).predict([[1.0, 2.0]])
    broken = clone(model)
    with pytest.raises(ValueError):
        broken.partial_fit([[1.0, 2.0]], ["a"], classes=["b"])
    with pytest.raises(NotFittedError):
        broken.decision_function([[1.0, 2.0]])
