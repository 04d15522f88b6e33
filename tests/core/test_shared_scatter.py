"""One scatter for all classes: it adds in any order, follows one shift, and keeps what dropped classes added."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from efcil.core.class_stats import ClassStats
from efcil.core.gaussian import pooled_covariance
from efcil.core.gram_storage import SHARED
from efcil.core.linear_algebra import ROWS_AT_ONCE
from efcil.core.ridge import ridge_weight
from efcil.errors import ConfigError
from messages import raises
from problems import draw, gap

COUNTS = (5, 1, 12, 3, 7)
LABELS = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))[
    torch.randperm(28, generator=torch.Generator().manual_seed(0))
]
DIM = 6
FEATURES = draw(len(LABELS), DIM).abs() + 1


def shared(features=FEATURES, labels=LABELS):
    return ClassStats.from_features(features, labels, SHARED)


def same(one, two, bound=1e-10):
    assert torch.equal(one.classes, two.classes)
    assert torch.equal(one.count, two.count)
    assert gap(one.mean, two.mean) < bound
    assert (one.shared.images, one.shared.classes) == (two.shared.images, two.shared.classes)
    assert gap(one.shared.packed, two.shared.packed) < bound


def test_sums_equal_those_of_the_rows():
    stats = shared()
    apart = FEATURES.double() - stats.mean[LABELS]
    assert gap(stats.scatter(), apart.T @ apart) < 1e-13
    assert gap(stats.gram_sum(), FEATURES.double().T @ FEATURES.double()) < 1e-13
    assert gap(stats.covariance(unbiased=True)[2], apart.T @ apart / (28 - 5)) < 1e-13
    assert gap(stats.gram.sum(0), stats.gram_sum()) < 1e-12
    assert stats.numel == DIM * (DIM + 1) // 2 + len(COUNTS) * DIM


def test_it_equals_what_grams_of_each_class_give():
    grams, stats = ClassStats.from_features(FEATURES, LABELS), shared()
    assert gap(stats.scatter(), grams.scatter()) < 1e-12
    assert gap(pooled_covariance(stats), pooled_covariance(grams)) < 1e-12
    assert gap(ridge_weight(stats, 2.0), ridge_weight(grams, 2.0)) < 1e-12
    assert stats.deviations()[1] == grams.deviations()[1] == 23


def test_many_rows_are_summed_in_blocks(monkeypatch):
    whole = shared()
    monkeypatch.setattr("efcil.core.shared_scatter.ROWS_AT_ONCE", 4)
    assert ROWS_AT_ONCE > 28
    same(whole, shared(), 1e-13)


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(28)), st.lists(st.integers(1, 27), max_size=5))
def test_any_parts_in_any_order_add_to_the_whole(order, cuts):
    """Classes may come whole, in pieces, again, and one image at a time."""
    index, stats = torch.tensor(order), ClassStats.empty(DIM)
    for part in torch.tensor_split(index, sorted(set(cuts))):
        stats = stats.merge(shared(FEATURES[part], LABELS[part]), SHARED)
    same(stats, shared())


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(len(COUNTS))))
def test_one_class_at_a_time_in_any_order_is_all_at_once(order):
    stats = ClassStats.empty(DIM)
    for c in order:
        stats = stats.merge(shared(FEATURES[c == LABELS], LABELS[c == LABELS]))
    same(stats, shared(), 1e-13)


def test_what_a_dropped_class_added_stays_in_the_scatter():
    stats = shared().drop([2])
    assert stats.classes.tolist() == [0, 1, 3, 4]
    assert torch.equal(stats.shared.packed, shared().shared.packed)
    assert torch.equal(stats.covariance()[0], shared().covariance()[0])
    kept = stats.mean.T @ (stats.count[:, None] * stats.mean)
    assert gap(stats.gram_sum(), 16 * shared().covariance()[0] + kept) < 1e-12
    assert stats.deviations()[1] == 23
    none = shared().select([])
    assert (len(none), none.shared.images) == (0, 28)
    again = none.merge(shared(FEATURES[:9], LABELS[:9]))
    assert again.shared.images == 37
    assert torch.equal(shared(FEATURES[:9], LABELS[:9]).merge(none).shared.packed, again.shared.packed)


def test_it_follows_one_shift_for_all_classes():
    shift = draw(DIM, 4)
    same(shared().transform(shift), shared(FEATURES.double() @ shift.double()), 1e-12)
    square = draw(DIM, DIM)
    same(shared().transform_projected(square, rule="none"), shared(FEATURES.double() @ square.double()), 1e-12)
    drift = draw(len(COUNTS), DIM).double()
    same(shared().translate(drift), shared(FEATURES.double() + drift[LABELS]), 1e-12)
    with raises(ConfigError, "one shift for all classes"):
        shared().transform(shift.expand(len(COUNTS), -1, -1))
    with raises(ConfigError, "row spaces"):
        shared().transform_projected(square)


def test_forms_do_not_mix():
    grams = ClassStats.from_features(FEATURES, LABELS + 10)
    for one, other in ((shared(), grams), (grams, shared())):
        with raises(ConfigError, "store both in one form"):
            one.merge(other)


def test_it_is_saved_to_the_bit():
    stats = shared().drop([0]).relabel([4, 2, 0, 7])
    for again in (
        ClassStats.from_state({name: value.clone() for name, value in stats.state().items()}),
        pickle.loads(pickle.dumps(stats)),
        copy.deepcopy(stats),
        stats.to("cpu"),
    ):
        assert all(torch.equal(value, again.state()[name]) for name, value in stats.state().items())
        assert (again.shared.images, again.shared.classes) == (28, 5)
    assert "shared_packed" not in ClassStats.from_features(FEATURES, LABELS).state()


@pytest.mark.parametrize("damage", ["shared_packed", "shared_size", "shape"])
def test_a_damaged_state_is_refused(damage):
    state = shared().state()
    if damage == "shape":
        state["shared_packed"] = state["shared_packed"][:-1]
    else:
        del state[damage]
    with raises(ConfigError, "shared_packed" if damage == "shape" else damage):
        ClassStats.from_state(state)
