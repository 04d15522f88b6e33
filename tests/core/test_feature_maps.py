"""Maps in front of class statistics: what they compute, what they say of themselves, and whose statistics they make."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from efcil.classifiers.mahalanobis import Mahalanobis
from efcil.classifiers.nearest_mean import NearestMean
from efcil.core.class_stats import ClassStats
from efcil.core.feature_maps import FewerStages, RandomReLU, TukeyPower, UnitLength, UnitPower
from efcil.core.gram_storage import MEANS
from efcil.core.projection import task_shift
from efcil.errors import ConfigError
from efcil.features import TaskFeatures
from efcil.methods import METHODS, Method
from efcil.shift.dual_projection import TaskShift
from efcil.shift.ldc import LearnedMap
from efcil.trajectory import Trajectory
from messages import raises
from problems import draw, gap

LAYOUT = (4, 3, 2)  # the last stage's features first
MAPS = [
    FewerStages(0),
    FewerStages(1),
    FewerStages(3),
    UnitLength(),
    TukeyPower(0.1),
    TukeyPower(0.5),
    UnitPower(0.7),
    RandomReLU(5, 0),
]
seeds = st.integers(0, 10**6)


def features(seed=0, count=12):
    return draw(count, sum(LAYOUT), seed=seed).abs()


def task(index, labels, old, new, seed=0):
    """A task of a run that saved its features."""
    return TaskFeatures.from_saved(index, seed, {"labels": labels, "old": old, "new": new}, LAYOUT)


@pytest.mark.parametrize("feature_map", MAPS, ids=repr)
@given(seed=seeds)
@settings(deadline=None, max_examples=15)
def test_a_map_is_linear_where_it_says_so(feature_map, seed):
    x, y = features(seed), features(seed + 1)
    together = feature_map(2 * x + 3 * y, LAYOUT)
    apart = 2 * feature_map(x, LAYOUT) + 3 * feature_map(y, LAYOUT)
    assert (gap(together, apart) < 1e-12) == feature_map.is_linear


@pytest.mark.parametrize("feature_map", MAPS, ids=repr)
@given(seed=seeds, cut=st.integers(0, 12))
@settings(deadline=None, max_examples=15)
def test_a_map_knows_one_image_at_a_time(feature_map, seed, cut):
    """So statistics behind it add over batches as any others do."""
    x, labels = features(seed), torch.arange(12) % 3
    whole = ClassStats.from_features(feature_map(x, LAYOUT), labels)
    parts = [
        ClassStats.from_features(feature_map(x[rows], LAYOUT), labels[rows]) for rows in (slice(cut), slice(cut, None))
    ]
    joined = parts[0].merge(parts[1])
    assert gap(joined.mean, whole.mean) < 1e-12
    assert gap(joined.gram, whole.gram) < 1e-12


def test_maps_are_values():
    assert len({*MAPS, *(type(m)(**vars(m)) for m in MAPS)}) == len(MAPS)
    assert FewerStages(1) != FewerStages(2)
    assert TukeyPower(0.5) != TukeyPower(0.1)


@pytest.mark.parametrize(("stages", "left"), [(0, 4), (1, 7), (2, 9), (5, 9)])
@given(seed=seeds)
@settings(deadline=None, max_examples=10)
def test_fewer_stages_are_a_block_of_all_statistics(stages, left, seed):
    x, labels = features(seed), torch.arange(12) % 2
    whole = ClassStats.from_features(x, labels)
    fewer = ClassStats.from_features(FewerStages(stages)(x, LAYOUT), labels)
    assert torch.equal(fewer.mean, whole.mean[:, :left])
    assert gap(fewer.gram, whole.gram[:, :left, :left]) < 1e-14


@given(seeds, st.floats(1e-3, 1e3))
@settings(deadline=None, max_examples=25)
def test_unit_length_forgets_the_length_and_nothing_else(seed, scale):
    x = features(seed)
    unit = UnitLength()(x)
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(12).double())
    torch.testing.assert_close(UnitLength()(scale * x), unit)
    torch.testing.assert_close(UnitLength()(unit), unit)
    torch.testing.assert_close(unit * x.norm(dim=1, keepdim=True), x)
    assert UnitLength()(x.float()).dtype == torch.float64
    assert torch.equal(UnitLength()(torch.zeros(1, 3)), torch.zeros(1, 3).double()), "not a division by zero"


@given(seeds, st.floats(0.1, 2), st.floats(0.1, 2))
@settings(deadline=None, max_examples=25)
def test_powers_multiply_and_keep_the_order(seed, one, two):
    x = features(seed)
    torch.testing.assert_close(TukeyPower(two)(TukeyPower(one)(x)), TukeyPower(one * two)(x))
    torch.testing.assert_close(TukeyPower(1.0)(x), x)
    assert torch.equal(TukeyPower(one)(x).argsort(1), x.argsort(1))
    assert torch.equal(TukeyPower(one)(x.flip(1)), TukeyPower(one)(x).flip(1))


@pytest.mark.parametrize("feature_map", MAPS, ids=repr)
def test_a_mapped_task_has_the_features_behind_the_map(feature_map):
    labels, old, new = torch.arange(12) % 3, features(1), features(2)
    plain = task(1, labels, old, new)
    mapped = plain.mapped(feature_map)
    assert torch.equal(mapped.new(), feature_map(new, LAYOUT))
    assert torch.equal(mapped.old_new_pairs()[0], feature_map(old, LAYOUT))
    assert torch.equal(mapped.stats().mean, ClassStats.from_features(feature_map(new, LAYOUT), labels).mean)
    assert plain.mapped(type(feature_map)(**vars(feature_map))) is mapped, "equal maps share what is computed"
    assert torch.equal(plain.new(), new), "the task itself stays as it is"
    assert plain.mapped(None) is plain


def test_a_track_behind_a_map_follows_the_shift_there():
    """DPCR+ with fewer stages: statistics and map are those of a run that has no more features."""
    method = METHODS["dpcr-plus"]
    labels, first, old, new = torch.arange(60) % 3, features(1, 60), features(2, 60), features(3, 60)
    options = {"shift_view": "clean", "shift_ridge_rel": 0, "rank_rule": "none"}
    trajectory = Trajectory(None, {"it": (method, method.options(use_stages=1, **options))})
    trajectory.update(task(0, labels, first, first))
    trajectory.update(task(1, labels + 3, old, new))
    behind = FewerStages(1)
    shift = task_shift(behind(old, LAYOUT), behind(new, LAYOUT), method.options().shift_ridge)
    moved = ClassStats.from_features(behind(first, LAYOUT), labels).transform(shift)
    stats = trajectory.stats("it")
    torch.testing.assert_close(stats.mean[:3], moved.mean)
    torch.testing.assert_close(stats.gram[:3], moved.gram)
    assert stats.moves.tolist() == [1, 1, 1, 0, 0, 0]
    assert stats.dim == 7


def test_a_classifier_may_be_fitted_to_two_tracks():
    """FeCAM: means of features, and Grams of their powers; the means take no Gram."""
    method = METHODS["fecam"]
    labels, new = torch.arange(60) % 3, features(1, 60)
    trajectory = Trajectory(None, {"fecam": (method, method.options(power=0.5))}, freezes=True)
    trajectory.update(task(0, labels, new, new))
    stats = {key.feature_map: track.stats for key, track in trajectory.tracks.items()}
    assert set(stats) == {None, TukeyPower(0.5)}
    assert torch.equal(stats[None].mean, ClassStats.from_features(new, labels, MEANS).mean)
    assert stats[None].numel == stats[None].mean.numel()
    assert gap(stats[TukeyPower(0.5)].gram, ClassStats.from_features(new**0.5, labels).gram) < 1e-12


@pytest.mark.parametrize("shift", [TaskShift, LearnedMap])
def test_no_linear_shift_goes_behind_a_map_that_is_not_linear(shift):
    with raises(ConfigError, "it", "mahalanobis", "linear", "none"):
        Method("it", "lwf", shift, Mahalanobis)
    Method("it", "lwf", shift, NearestMean)
    Method("it", "lwf", None, Mahalanobis)
