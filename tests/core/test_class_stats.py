"""Class statistics: they add, they move as the features would, they are kept exactly and dropped for good."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from torch import Tensor

from efcil import reference
from efcil.core import class_stats as stats_module
from efcil.core.class_stats import ClassStats
from efcil.core.gram_storage import GRAMS, MEANS, StorageSpec
from efcil.core.projection import class_shift, task_shift
from efcil.core.ridge import normalize_columns, ridge_weight
from efcil.errors import ConfigError, NotFiniteError
from messages import raises
from problems import draw, gap


def same(one: ClassStats, two: ClassStats, bound: float = 1e-12) -> None:
    assert torch.equal(one.classes, two.classes)
    assert torch.equal(one.count, two.count)
    assert gap(one.mean, two.mean) < bound
    assert gap(one.gram, two.gram) < bound


# classes 2, 3, 5, 9, unsorted, of 1, 2, 30 and 7 images
LABELS = torch.tensor([5] * 10 + [9] * 7 + [2] + [5] * 20 + [3] * 2)


@pytest.fixture
def features() -> Tensor:
    return draw(len(LABELS), 6).abs()


def test_statistics_equal_the_literal_prototypes(features: Tensor) -> None:
    stats = ClassStats.from_features(features, LABELS)
    assert stats.classes.tolist() == [2, 3, 5, 9]
    assert stats.count.tolist() == [1, 2, 30, 7]
    assert (len(stats), stats.dim) == (4, 6)
    for index, c in enumerate(stats.classes.tolist()):
        mean, gram = reference.prototype(features[c == LABELS])
        assert gap(stats.mean[index], mean) < 1e-13
        assert gap(stats.gram[index], gram) < 1e-13
    assert torch.equal(stats.gram, stats.gram.mT)
    assert gap(stats.gram_sum(), features.T @ features) < 1e-13
    one_hot = (LABELS[:, None] == stats.classes).double()
    assert gap(stats.cross, features.T @ one_hot) < 1e-13


def test_covariance_is_the_centered_one(features: Tensor) -> None:
    stats = ClassStats.from_features(features, LABELS)
    x = features[LABELS == 9].numpy()
    assert gap(stats.covariance()[3], torch.from_numpy(np.cov(x.T, bias=True))) < 1e-12
    assert gap(stats.covariance(unbiased=True)[3], torch.from_numpy(np.cov(x.T))) < 1e-12
    assert stats.covariance(unbiased=True)[0].abs().max() < 1e-14  # one image: zero, not a division by zero


def test_float32_and_integer_labels_are_summed_in_float64() -> None:
    x = (1e4 + torch.rand(5000, 3, generator=torch.Generator().manual_seed(0))).float()
    stats = ClassStats.from_features(x, torch.zeros(5000, dtype=torch.int32))
    assert stats.gram.dtype == stats.mean.dtype == torch.float64
    assert gap(stats.gram[0], x.double().T @ x.double()) < 1e-14


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(0, 40), st.integers(1, 5))
@settings(deadline=None, max_examples=25)
def test_batches_add_to_the_whole_in_any_order(labels: list[int], cut: int, dim: int) -> None:
    x, y = draw(len(labels), dim), torch.tensor(labels)
    first = ClassStats.from_features(x[:cut], y[:cut])
    second = ClassStats.from_features(x[cut:], y[cut:])
    whole = ClassStats.from_features(x, y)
    same(first.merge(second), whole)
    same(second.merge(first), whole)
    for joined in (first.merge(second), second.merge(first)):
        assert torch.equal(joined.gram, joined.gram.mT)


def test_joining_other_classes_keeps_every_bit(features: Tensor) -> None:
    whole = ClassStats.from_features(features, LABELS)
    for parts in ([[2, 3], [5, 9]], [[5, 9], [2, 3]], [[2, 9], [3, 5]]):
        joined = whole.select(parts[0]).merge(whole.select(parts[1]))
        for name in ("classes", "count", "mean", "gram"):
            assert torch.equal(getattr(joined, name), getattr(whole, name))
    assert whole.merge(ClassStats.empty(6)) is whole
    assert ClassStats.empty(6).merge(whole) is whole
    with raises(ConfigError, 6, 5):
        whole.merge(ClassStats.empty(5))


def test_a_class_of_one_side_keeps_its_mean_where_the_sides_interleave() -> None:
    whole = ClassStats.from_features(draw(147, 6), torch.arange(3).repeat(49)).transform(draw(6, 40, seed=1))
    assert not torch.equal(whole.mean * 49 / 49, whole.mean), "a mean by way of the sum would be rounded"
    assert torch.equal(whole.select([0, 2]).merge(whole.select([1])).mean, whole.mean)


def test_appended_classes_move_and_sum_like_any_other(features: Tensor) -> None:
    whole = ClassStats.from_features(features, LABELS)
    parts = whole.select([2, 3]).merge(whole.select([5, 9]))
    shift = draw(6, 4, seed=1)
    for block in (1, 3, None):
        same(parts.transform(shift, class_block=block), whole.transform(shift))
    assert gap(parts.gram_sum(), features.T @ features) < 1e-14
    each = draw(4, 6, 6, seed=2)
    for block in (1, 3, None):
        same(parts.transform(each, class_block=block), whole.transform(each))


@pytest.mark.parametrize("width", [6, 3, 8])
def test_moved_statistics_are_the_statistics_of_moved_features(features: Tensor, width: int) -> None:
    shift = draw(6, width, seed=1)
    moved = ClassStats.from_features(features, LABELS).transform(shift)
    same(moved, ClassStats.from_features(features @ shift, LABELS))
    assert torch.equal(moved.gram, moved.gram.mT)


def test_a_shift_for_each_class(features: Tensor) -> None:
    stats = ClassStats.from_features(features, LABELS)
    shift = draw(4, 6, 5, seed=1)
    moved = stats.transform(shift)
    for index in range(4):
        gram, mean = reference.rectify(stats.gram[index], stats.mean[index], shift[index])
        assert gap(moved.gram[index], gram) < 1e-12
        assert gap(moved.mean[index], mean) < 1e-12


def test_moves_compose(features: Tensor) -> None:
    stats = ClassStats.from_features(features, LABELS)
    one, two = draw(6, 6, seed=1), draw(6, 6, seed=2)
    same(stats.transform(one).transform(two), stats.transform(one @ two))


@pytest.mark.parametrize("rule", ["positive", "numerical"])
def test_block_size_does_not_change_the_result(rule, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.arange(11).repeat_interleave(torch.tensor([30, 15, 1, 2, 14, 30, 12, 16, 17, 3, 9]))
    stats = ClassStats.from_features(draw(len(labels), 16), labels)
    shift = draw(16, 16, seed=1)
    whole = stats.transform_projected(shift, rule)
    for block in (1, 2, 5, 11, 50):
        same(stats.transform(shift, class_block=block), stats.transform(shift))
        same(stats.transform_projected(shift, rule, class_block=block), whole)
    monkeypatch.setattr(stats_module, "BLOCK_BYTES", {"cpu": 1})
    same(stats.transform_projected(shift, rule), whole)
    with raises(ConfigError, "class_block", 0):
        stats.transform(shift, class_block=0)


RULES = [
    ("none", None, len),
    ("positive", None, reference.rank_positive),
    ("numerical", None, reference.rank_numerical),
    ("tolerance", 1e-3, reference.rank_tolerance(1e-3)),
    ("energy", 0.95, reference.rank_energy(0.95)),
]


@pytest.mark.parametrize(("rule", "tolerance", "rank"), RULES)
def test_task_by_task_equals_the_ladder(rule, tolerance, rank) -> None:
    # 9 dimensions; classes of 40, 8 and 4 images: full, thin and wide null spaces
    labels = torch.tensor([0] * 40 + [1] * 8 + [2] * 4)
    features = draw(52, 9).abs()
    shifts = [torch.eye(9, dtype=torch.float64) + 0.2 * draw(9, 9, seed=seed) for seed in (1, 2, 3)]
    stats = composed = ClassStats.from_features(features, labels)
    for shift in shifts:
        stats = stats.transform_projected(shift, rule, tolerance)
        composed = composed.transform(class_shift(shift, composed.gram, rule, tolerance))
    same(stats, composed, 1e-10)
    for c in range(3):
        moved = reference.ladder(features[labels == c], shifts, rank)
        assert gap(stats.gram[c], moved.T @ moved) < 1e-8
        assert gap(stats.mean[c], moved.mean(0)) < 1e-8
    if rule in ("numerical", "energy"):  # the cut is real: it differs from not cutting
        uncut = ClassStats.from_features(features, labels)
        for shift in shifts:
            uncut = uncut.transform(shift)
        assert gap(stats.gram[2], uncut.gram[2]) > 1e-2


@pytest.mark.parametrize("ridge", [0.5, 200.0])
def test_ridge_from_statistics_equals_ridge_from_features(features: Tensor, ridge: float) -> None:
    stats = ClassStats.from_features(features, LABELS)
    weight = ridge_weight(stats, ridge)
    assert gap(weight, reference.ridge_joint(features, LABELS, stats.classes.tolist(), ridge)) < 1e-8
    one_hot = (LABELS[:, None] == stats.classes).double().numpy()
    peer = Ridge(alpha=ridge, fit_intercept=False, solver="cholesky").fit(features.numpy(), one_hot)
    assert gap(weight, torch.from_numpy(peer.coef_.T)) < 1e-8


def test_scaled_features_scale_the_weight(features: Tensor) -> None:
    weight = ridge_weight(ClassStats.from_features(features, LABELS), 2.0)
    scaled = ridge_weight(ClassStats.from_features(10.0 * features, LABELS), 200.0)
    assert gap(scaled, weight / 10.0) < 1e-12
    assert gap(normalize_columns(scaled), normalize_columns(weight)) < 1e-12


def test_one_whole_task_equals_the_literal_algorithm() -> None:
    old_labels, new_labels = torch.arange(3).repeat_interleave(25), 3 + torch.arange(2).repeat_interleave(20)
    first, before = draw(75, 8).abs(), draw(40, 8, seed=1).abs()
    after = before @ (torch.eye(8).double() + 0.2 * draw(8, 8, seed=2)) + 0.01 * draw(40, 8, seed=3)
    stats = ClassStats.from_features(first, old_labels).transform_projected(task_shift(before, after), "numerical")
    stats = stats.merge(ClassStats.from_features(after, new_labels))
    weight = normalize_columns(ridge_weight(stats, 5.0))

    images = list(range(40))  # stand for themselves: a backbone looks their features up
    known = {c: (25, *reference.prototype(first[old_labels == c])) for c in range(3)}
    networks = before.__getitem__, after.__getitem__
    found, _, literal = reference.dpcr(
        known, images, new_labels, networks[0], lambda old: networks[1], 5.0, rank=reference.rank_numerical
    )
    assert gap(weight, literal) < 1e-8
    for place, c in enumerate(stats.classes.tolist()):
        count, mean, gram = found[c]
        assert count == stats.count[place]
        assert gap(stats.mean[place], mean) < 1e-8
        assert gap(stats.gram[place], gram) < 1e-8


def test_forgetting_is_as_if_the_class_had_never_come(features: Tensor) -> None:
    stats = ClassStats.from_features(features, LABELS).drop([5])
    kept = LABELS != 5
    never = ClassStats.from_features(features[kept], LABELS[kept])
    for name in ("classes", "count", "mean", "gram"):
        assert torch.equal(getattr(stats, name), getattr(never, name))
    assert stats.drop(torch.tensor([2, 3, 9])).dim == 6
    assert len(stats.drop([])) == 3
    for call in (stats.drop, stats.select):
        with raises(ConfigError, 5, [2, 3, 9]):
            call([5])


def test_no_images_give_the_empty_statistics() -> None:
    stats = ClassStats.from_features(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    assert (len(stats), stats.dim) == (0, 4)
    assert stats.gram.shape == (0, 4, 4)
    assert stats.transform(torch.ones(4, 2)).gram.shape == (0, 2, 2)
    assert len(stats.transform_projected(torch.ones(4, 4))) == 0
    assert torch.equal(stats.gram_sum(), torch.zeros(4, 4).double())
    assert ClassStats.from_state(stats.state()).dim == 4


def test_state_is_packed_and_exact(features: Tensor) -> None:
    stats = ClassStats.from_features(features, LABELS).transform(draw(6, 6, seed=1))
    state = stats.state()
    assert state["gram_packed"].shape == (4, 21)
    assert all(tensor.is_contiguous() for tensor in state.values())
    for back in (ClassStats.from_state(state), copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        for name in ("classes", "count", "mean", "gram"):
            assert torch.equal(getattr(back, name), getattr(stats, name))
    del state["mean"]
    with raises(ConfigError, "ClassStats", "mean"):
        ClassStats.from_state(state)


def test_statistics_cannot_be_changed(features: Tensor) -> None:
    stats = ClassStats.from_features(features, LABELS)
    with raises(AttributeError, "ClassStats", "mean"):
        stats.mean = features
    kept = stats.gram.clone()
    stats.transform(draw(6, 6))
    stats.transform_projected(draw(6, 6))
    stats.merge(stats)
    ridge_weight(stats, 1.0)
    assert torch.equal(stats.gram, kept)


def test_bad_input_is_named(features: Tensor) -> None:
    stats = ClassStats.from_features(features, LABELS)
    broken = features.clone()
    broken[3, 2] = float("inf")
    with pytest.raises(NotFiniteError, match="features holds 0 NaN and 1 infinite"):
        ClassStats.from_features(broken, LABELS)
    with raises(NotFiniteError, "shift", 1, 36):
        stats.transform(broken[:6])
    with raises(ConfigError, "labels", torch.float32):
        ClassStats.from_features(features, LABELS.float())
    with raises(ConfigError, (40, 6), (39,)):
        ClassStats.from_features(features, LABELS[1:])
    with raises(ConfigError, "shift", (5, 6), "(6, dim_new)", "(4, 6, dim_new)"):
        stats.transform(draw(5, 6))
    with raises(ConfigError, "task_shift", (6, 5), (6, 6)):
        stats.transform_projected(draw(6, 5))
    with raises(ConfigError, "mean", (2, 6), (4, 6)):
        ClassStats(stats.classes, stats.count, stats.mean[:2], stats.gram)
    with raises(ConfigError, "classes"):
        ClassStats(stats.classes.flip(0), stats.count, stats.mean, stats.gram)


def test_a_class_in_both_parts_is_that_of_all_its_images() -> None:
    x, labels = draw(12, 3), torch.tensor([0, 1, 1, 1, 2, 0, 0, 1, 2, 2, 2, 4])
    whole = ClassStats.from_features(x, labels)
    for cut in (1, 4, 7, 11):  # classes with one image on a side, and with several
        first = ClassStats.from_features(x[:cut], labels[:cut])
        second = ClassStats.from_features(x[cut:], labels[cut:])
        same(first.merge(second), whole)
        same(second.merge(first), whole)


# --- how often a class was shifted ------------------------------------------------------------------------------------


OPERATIONS = ["transform", "project", "translate", "add", "again", "merge", "select", "relabel", "state", "copy"]


@given(st.sampled_from([GRAMS, StorageSpec("factors"), MEANS]), st.lists(st.sampled_from(OPERATIONS), max_size=12))
@settings(deadline=None, max_examples=60)
def test_moves_are_counted_through_every_change(storage: StorageSpec, program: list[str]) -> None:
    """A dictionary from class to moves goes along: each shift counts one, new images of a class count from zero."""
    shift = torch.eye(4, dtype=torch.float64) + 0.1 * draw(4, 4, seed=1)

    def of(*classes: int) -> ClassStats:
        return ClassStats.from_features(draw(2 * len(classes), 4).abs(), torch.tensor(classes).repeat(2), storage)

    stats, moves = of(3, 5, 8), {3: 0, 5: 0, 8: 0}
    for step, operation in enumerate(program):
        if operation == "transform" or (operation == "project" and storage == MEANS):
            stats, moves = stats.transform(shift), {c: n + 1 for c, n in moves.items()}
        elif operation == "project":
            stats, moves = stats.transform_projected(shift), {c: n + 1 for c, n in moves.items()}
        elif operation == "translate" and storage == MEANS:
            stats, moves = stats.translate(torch.ones(len(stats), 4)), {c: n + 1 for c, n in moves.items()}
        elif operation == "add":  # below, between and above those that are there
            new = [100 + step, -step - 1]
            stats, moves = stats.merge(of(*new), storage), {**moves, **dict.fromkeys(new, 0)}
        elif operation == "again":
            stats, moves = stats.merge(of(min(moves)), storage), {**moves, min(moves): 0}
        elif operation == "merge":  # with another model's, whose classes were shifted twice
            other = of(min(moves), 50).transform(shift).transform(shift)
            stats = other.merge(stats, storage)
            moves = {**moves, **{c: min(2, moves.get(c, 2)) for c in (min(moves), 50)}}
        elif operation == "select" and len(moves) > 1:
            stats = stats.drop([max(moves)])
            del moves[max(moves)]
        elif operation == "relabel":
            order = sorted(moves)
            stats = stats.relabel([-c for c in order])  # the last becomes the first
            moves = {-c: n for c, n in moves.items()}
        elif operation == "state":
            stats = ClassStats.from_state(stats.state())
        elif operation == "copy":
            stats = pickle.loads(pickle.dumps(copy.deepcopy(stats.to("cpu"))))
        assert dict(zip(stats.classes.tolist(), stats.moves.tolist(), strict=True)) == moves


def test_moves_must_fit_the_classes(features: Tensor) -> None:
    stats = ClassStats.from_features(features, LABELS)
    with raises(ConfigError, "moves", (3,), (4,)):
        ClassStats(stats.classes, stats.count, stats.mean, stats.gram, torch.zeros(3))
    state = stats.state()
    del state["moves"]
    with raises(ConfigError, "ClassStats", "moves"):
        ClassStats.from_state(state)


# --- means alone ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(0, 40), st.integers(1, 5))
@settings(deadline=None, max_examples=25)
def test_means_alone_are_those_beside_grams(labels: list[int], cut: int, dim: int) -> None:
    """Of a batch to the bit, merged and shifted as with Grams; nothing but means is stored."""
    x, y = draw(len(labels), dim), torch.tensor(labels)
    whole, shift = ClassStats.from_features(x, y), draw(dim, 3, seed=1)
    batches = []
    for storage in (MEANS, GRAMS):
        parts = [ClassStats.from_features(x[rows], y[rows], storage) for rows in (slice(cut), slice(cut, None))]
        batches.append((parts[0].merge(parts[1], storage), parts[1].merge(parts[0], storage)))
    for means, grams in zip(*batches, strict=True):
        for one, other in ((means, grams), (means.transform(shift), grams.transform(shift))):
            for name in ("classes", "count", "mean", "moves"):
                assert torch.equal(getattr(one, name), getattr(other, name)), name
            assert one.numel == one.mean.numel()
        assert gap(means.mean, whole.mean) < 1e-12
    alone = ClassStats.from_features(x, y, MEANS)
    assert torch.equal(alone.mean, whole.mean)
    assert torch.equal(alone.merge(ClassStats.from_features(x, y, MEANS)).mean, whole.merge(whole).mean)


def test_a_translation_moves_every_mean_by_its_drift(features: Tensor) -> None:
    stats = ClassStats.from_features(features, LABELS, MEANS)
    one, two = draw(4, 6, seed=1), draw(4, 6, seed=2)
    moved = stats.translate(one).translate(two)
    assert gap(moved.mean, stats.mean + one + two) < 1e-14
    assert torch.equal(moved.count, stats.count)
    same_drift = stats.translate(one[:1].expand(4, 6))  # as if all images had moved
    assert gap(same_drift.mean, ClassStats.from_features(features + one[0], LABELS, MEANS).mean) < 1e-14
    back = ClassStats.from_state(moved.state())
    assert torch.equal(back.mean, moved.mean)
    assert back.numel == moved.numel == moved.mean.numel()
    assert torch.equal(back.select([3, 9]).relabel([7, 1]).mean, moved.mean[[3, 1]])


@pytest.mark.parametrize("storage", [GRAMS, StorageSpec("factors")])
def test_a_translation_of_grams_is_refused(features: Tensor, storage: StorageSpec) -> None:
    """It would leave the Gram behind: Phi of x + d is no function of Phi and d without the mean's own part."""
    stats = ClassStats.from_features(features, LABELS, storage)
    with raises(ConfigError, "translate", "Grams"):
        stats.translate(torch.zeros(4, 6))


def test_a_projection_needs_grams(features: Tensor) -> None:
    """The row space of a class without a Gram is empty: its mean would become zero."""
    stats = ClassStats.from_features(features, LABELS, MEANS)
    for rule in ("positive", "numerical"):
        with raises(ConfigError, "transform_projected", "Grams"):
            stats.transform_projected(torch.eye(6), rule)
    shift = draw(6, 6, seed=1)
    assert torch.equal(stats.transform_projected(shift, "none").mean, stats.transform(shift).mean)
