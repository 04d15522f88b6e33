"""Class statistics as factors: the same numbers as with Grams where it is exact, a bounded error where it is cut."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from efcil import reference
from efcil.core import class_stats as stats_module
from efcil.core.class_stats import ClassStats
from efcil.core.gram_storage import LowRankGrams, PackedGrams, StorageSpec, compress, compress_gram
from efcil.core.metrics import AccuracyMatrix
from efcil.core.projection import class_shift, factor_space, row_projector, task_shift
from efcil.core.ridge import normalize_columns, ridge_weight
from efcil.errors import ConfigError, NotFiniteError
from efcil.learners import LEARNERS
from efcil.methods import METHODS, StorageOptions
from efcil.product import IncrementalClassifier
from efcil.protocol import Evaluator
from efcil.tasks import TaskStream
from efcil.trajectory import Trajectory
from messages import raises
from problems import TINY, blobs, draw, follow_stream, gap

FACTORS = StorageSpec("factors")
DIM = 16
COUNTS = (5, 30, 1, 8, 9, 3, 0, 40, 2)  # of classes 0, 1, 2 ...: 8 images are the last that a factor holds in less
LABELS = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))


@pytest.fixture
def features() -> Tensor:
    return draw(len(LABELS), DIM).abs()


@pytest.fixture
def pair(features: Tensor) -> tuple[ClassStats, ClassStats]:
    """The same classes as Grams and as factors."""
    return ClassStats.from_features(features, LABELS), ClassStats.from_features(features, LABELS, FACTORS)


def same(one: ClassStats, two: ClassStats, bound: float = 1e-8) -> None:
    assert torch.equal(one.classes, two.classes)
    assert torch.equal(one.count, two.count)
    assert gap(one.mean, two.mean) < bound
    for mine, theirs in zip(one.gram, two.gram, strict=True):
        assert gap(mine, theirs) < bound


def ranks(stats: ClassStats) -> list[int]:
    """Rank of each class's factor, -1 of a Gram."""
    return stats.state()["factor_rank"].tolist()


# --- exact ------------------------------------------------------------------------------------------------------------


def test_a_class_of_few_images_is_a_factor_and_one_of_many_a_gram(pair) -> None:
    grams, factors = pair
    same(factors, grams, 1e-13)
    assert ranks(factors) == [5, -1, 1, 8, -1, 3, -1, 2]
    triangle = DIM * (DIM + 1) // 2
    assert grams.numel == 8 * (triangle + DIM)
    assert factors.numel == 3 * triangle + (5 + 1 + 8 + 3 + 2) * DIM + 8 * DIM
    assert gap(factors.gram_sum(), grams.gram_sum()) < 1e-14
    assert gap(factors.covariance(), grams.covariance()) < 1e-12


def test_storage_is_half_of_the_papers_and_less_for_few_images() -> None:
    dim, per_class = 64, 20
    x, y = draw(3 * per_class, dim), torch.arange(3).repeat_interleave(per_class)
    papers = 3 * (dim * dim + dim)
    exact = ClassStats.from_features(x, y)
    assert exact.numel <= 0.55 * papers
    assert sum(t.numel() for t in exact.state().values()) <= 0.55 * papers
    bytes_held = sum(p.packed.untyped_storage().nbytes() for p in exact.parts) + exact.mean.untyped_storage().nbytes()
    assert bytes_held <= 0.55 * papers * 8
    factors = ClassStats.from_features(x, y, FACTORS)
    assert factors.numel == 3 * (per_class + 1) * dim < exact.numel
    for count in range(1, dim + 2):  # never more than Grams, and less below dim / 2 images
        own = compress(draw(count, dim), FACTORS)
        assert own.numel == min(count * dim, dim * (dim + 1) // 2)


RULES = [
    ("none", None, len),
    ("positive", None, reference.rank_positive),
    ("numerical", None, reference.rank_numerical),
    ("tolerance", 1e-3, reference.rank_tolerance(1e-3)),
    ("energy", 0.9, reference.rank_energy(0.9)),
]


@pytest.mark.parametrize(("rule", "tolerance", "rank"), RULES)
def test_factors_follow_task_by_task_as_the_ladder(features: Tensor, rule, tolerance, rank) -> None:
    if rule == "positive":
        features[LABELS == 0, 3] = 0.0  # a dead channel of a factor, and of a Gram
        features[LABELS == 1, 7] = 0.0
    shifts = [torch.eye(DIM, dtype=torch.float64) + 0.2 * draw(DIM, DIM, seed=seed) for seed in (1, 2, 3)]
    grams, factors = (ClassStats.from_features(features, LABELS, m) for m in (StorageSpec(), FACTORS))
    composed = factors
    for shift in shifts:
        grams, factors = (stats.transform_projected(shift, rule, tolerance) for stats in (grams, factors))
        composed = composed.transform(
            class_shift(shift, composed.gram, rule, tolerance).expand(len(composed), DIM, DIM)  # a P for each class
        )
    assert ranks(factors) == ranks(composed) == [5, -1, 1, 8, -1, 3, -1, 2]
    same(factors, grams)
    same(composed, grams)
    if rule == "positive":
        assert float(factors.gram[0, 3].abs().max()) == float(factors.mean[0, 3]) == 0.0
    for place, c in enumerate(grams.classes.tolist()):
        if rule == "positive" and c < 2:  # the literal rule counts singular values; which of five zeros is dead is open
            continue
        moved = reference.ladder(features[c == LABELS], shifts, rank)
        assert gap(factors.gram[place], moved.T @ moved) < 1e-8
        assert gap(factors.mean[place], moved.mean(0)) < 1e-8


@pytest.mark.parametrize("width", [DIM, 5, 20])
def test_a_factor_moves_as_the_features_would(pair, features: Tensor, width: int) -> None:
    shift = draw(DIM, width, seed=1)
    wanted = ClassStats.from_features(features @ shift, LABELS)
    same(pair[1].transform(shift), wanted, 1e-12)
    same(pair[1].transform(shift.expand(8, DIM, width)), wanted, 1e-12)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 5))
@settings(deadline=None, max_examples=20)
def test_the_row_space_of_a_factor_is_that_of_its_gram(classes: int, rank: int, lost: int) -> None:
    factor = draw(classes, rank, 6)
    factor[:, max(0, rank - lost) :] = 0.0  # rows of zeros, as padding has them
    space = factor_space(factor)
    found = torch.eye(6).double().expand(classes, 6, 6) if space is None else space.projector()
    assert (found - row_projector(factor.mT @ factor)).abs().max() < 1e-10


def test_one_whole_task_gives_the_same_classifier(pair) -> None:
    before, y = draw(60, DIM, seed=4).abs(), 9 + torch.arange(12).repeat_interleave(5)
    after = before @ (torch.eye(DIM).double() + 0.2 * draw(DIM, DIM, seed=5))
    weights = []
    for stats, storage in zip(pair, (StorageSpec(), FACTORS), strict=True):
        new = ClassStats.from_features(after, y, storage)
        moved = stats.transform_projected(task_shift(before, after), "positive").merge(new, storage)
        weights.append(normalize_columns(ridge_weight(moved, 5.0)))
    assert gap(weights[1], weights[0]) < 1e-8
    assert gap(weights[0], weights[0].roll(1, 1)) > 1e-2


def test_blocks_change_no_bit_of_factors(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    shift = draw(DIM, DIM, seed=1)
    for rule in ("positive", "numerical"):
        whole = pair[1].transform_projected(shift, rule)
        for block in (1, 2, 5, 50):
            assert torch.equal(pair[1].transform_projected(shift, rule, class_block=block).gram, whole.gram)
        monkeypatch.setattr(stats_module, "BLOCK_BYTES", {"cpu": 1})
        assert torch.equal(pair[1].transform_projected(shift, rule).gram, whole.gram)
        monkeypatch.undo()
    again = ClassStats.from_state(pair[1].state())  # other parts, the same bits
    assert torch.equal(again.transform_projected(shift).gram_sum(), pair[1].transform_projected(shift).gram_sum())


def test_a_factor_is_a_function_of_the_gram_alone(features: Tensor) -> None:
    x = features[:8]
    turn = torch.linalg.qr(draw(8, 8, seed=3))[0]
    one, two = compress(x, FACTORS), compress(turn @ x, FACTORS)  # other images with the same Gram
    assert gap(one.rows, two.rows) < 1e-10
    assert gap(one.rows, compress_gram(x.T @ x, FACTORS).rows) < 1e-10
    assert min(float((one.rows[:, None] - x).abs().amax(2).min()), 1.0) > 1e-3, "a row is an image's feature"


# --- adding -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(0, 24), st.sampled_from([None, FACTORS]))
@settings(deadline=None, max_examples=25)
def test_factors_of_batches_add_to_the_whole(labels: list[int], cut: int, storage: StorageSpec | None) -> None:
    x, y = draw(len(labels), 6), torch.tensor(labels)
    whole = ClassStats.from_features(x, y)
    parts = [ClassStats.from_features(x[s], y[s], FACTORS) for s in (slice(cut), slice(cut, None))]
    for joined in (parts[0].merge(parts[1], storage), parts[1].merge(parts[0], storage)):
        same(joined, whole, 1e-11)
        if "factor_rank" in joined.state():
            assert max(ranks(joined)) <= 3, "a factor that takes more than a Gram"


def test_grams_and_factors_of_one_class_add(features: Tensor) -> None:
    x, y = features[:9], torch.zeros(9, dtype=torch.int64)
    gram = ClassStats.from_features(x[:3], y[:3])
    factor = ClassStats.from_features(x[3:], y[3:], FACTORS)
    for joined in (gram.merge(factor), factor.merge(gram), factor.merge(gram, FACTORS)):
        same(joined, ClassStats.from_features(x, y), 1e-13)
        assert isinstance(joined.parts[0], PackedGrams)
    cut = factor.merge(gram, StorageSpec("factors", rank=2))
    assert ranks(cut) == [2]
    both = factor.merge(factor.relabel([0]), StorageSpec())
    assert isinstance(both.parts[0], PackedGrams)


def test_classes_are_selected_dropped_and_relabeled_in_any_storage(pair) -> None:
    for call in (
        lambda s: s.select([0, 4, 8]),
        lambda s: s.drop([0, 1, 2]),
        lambda s: s.relabel([7, 2, 9, 1, 0, 3, 8, 4]),
        lambda s: s.select([0, 1, 3]).merge(s.select([1, 2, 8])),
        lambda s: s.to("cpu"),
    ):
        same(call(pair[1]), call(pair[0]), 1e-13)
    assert ranks(pair[1].drop([1, 2])) == [5, 8, -1, 3, -1, 2]


# --- cut --------------------------------------------------------------------------------------------------------------


def left_out(stats: ClassStats, whole: ClassStats) -> Tensor:
    """Nuclear norm of what is missing, as a share of the trace, class by class."""
    missing = whole.gram - stats.gram
    return torch.linalg.matrix_norm(missing, "nuc") / whole.gram.diagonal(dim1=1, dim2=2).sum(1)


def scatters(stats: ClassStats) -> Tensor:
    """N_c times the covariance of each class."""
    return stats.covariance() * stats.count[:, None, None]


@pytest.mark.parametrize("error", [0.3, 0.1, 1e-2, 1e-4])
def test_the_error_of_cut_factors_is_bounded(pair, features: Tensor, error: float) -> None:
    grams = pair[0]
    cut = ClassStats.from_features(features, LABELS, StorageSpec("factors", tolerance=error))
    lost = left_out(cut, grams)
    assert float(lost.max()) <= error * (1 + 1e-9)
    assert torch.equal(cut.mean, grams.mean), "means are not cut"
    for gram, scatter, rank in zip(grams.gram, scatters(grams), ranks(cut), strict=True):
        if rank >= 2:  # the fewest rows after the mean's: one less would leave out more
            values = torch.linalg.eigvalsh(scatter).flip(0)
            assert float(values[rank - 2 :].sum()) > error * float(gram.trace()) * (1 - 1e-9)
        assert 2 * rank <= DIM
    if error == 0.3:
        assert cut.numel < pair[1].numel
        assert float(lost.max()) > 0.01


def test_cut_to_a_rank_what_is_lost_is_the_smallest_eigenvalues(pair, features: Tensor) -> None:
    grams = pair[0]
    cut = ClassStats.from_features(features, LABELS, StorageSpec("factors", rank=3))
    assert ranks(cut) == [3, 3, 1, 3, 3, 3, 3, 2]
    for gram, scatter, own in zip(grams.gram, scatters(grams), cut.gram, strict=True):
        values = torch.linalg.eigvalsh(scatter)  # the mean is the first of three rows
        assert torch.linalg.matrix_norm(gram - own, "nuc") == pytest.approx(
            float(values[:-2].sum()), rel=1e-9, abs=1e-9
        )
        assert torch.linalg.matrix_norm(gram - own, 2) == pytest.approx(
            float(values[-3].clamp_min(0)), rel=1e-9, abs=1e-9
        )


def test_a_cut_class_has_a_covariance_before_and_after_moves_and_joins(pair, features: Tensor) -> None:
    """Gram and mean belong together: a cut of the Gram alone would leave less than the mean's own product."""
    for storage in (
        StorageSpec("factors", rank=1),
        StorageSpec("factors", rank=3),
        StorageSpec("factors", tolerance=0.3),
    ):
        cut = ClassStats.from_features(features, LABELS, storage)
        rest = ClassStats.from_features(features.flip(1), LABELS, storage)
        for stats in (cut, cut.transform(draw(DIM, DIM, seed=1)), cut.merge(rest, storage)):
            values = torch.linalg.eigvalsh(stats.covariance())
            assert float(values.min()) > -1e-12 * float(stats.gram.abs().max())
            if storage.rank == 1:
                assert float(values.abs().max()) < 1e-12 * float(stats.gram.abs().max()), "nothing but the mean"
    values = torch.linalg.eigvalsh(scatters(pair[0]))
    compress = torch.linalg.eigvalsh(
        scatters(ClassStats.from_features(features, LABELS, StorageSpec("factors", rank=3)))
    )
    torch.testing.assert_close(compress[:, -2:], values[:, -2:], rtol=1e-9, atol=1e-9)


def test_a_class_that_comes_again_is_cut_without_its_gram(features: Tensor) -> None:
    """Two cut factors are joined by their rows; the same is found from the two Grams. After moves as well."""
    storage = StorageSpec("factors", rank=3)
    one = ClassStats.from_features(features, LABELS, storage)
    other = ClassStats.from_features(features.flip(1).repeat(2, 1), LABELS.repeat(2), storage)  # twice the images
    other = other.transform(draw(DIM, DIM, seed=1))
    quick = one.merge(other, storage)
    assert all(isinstance(part, LowRankGrams) for part in quick.parts)
    for own, a, b, count, mean in zip(quick.gram, one.gram, other.gram, quick.count, quick.mean, strict=True):
        slow = compress_gram(a + b, storage, count.double().sqrt() * mean)
        torch.testing.assert_close(own, slow.dense()[0], rtol=1e-9, atol=1e-9)
    exact = ClassStats.from_features(features, LABELS, FACTORS)
    mixed = exact.merge(other, storage)  # one side begins with another row than its mean
    torch.testing.assert_close(mixed.mean, quick.mean)
    for own, a, b, count, mean in zip(mixed.gram, exact.gram, other.gram, mixed.count, mixed.mean, strict=True):
        slow = compress_gram(a + b, storage, count.double().sqrt() * mean)
        torch.testing.assert_close(own, slow.dense()[0], rtol=1e-9, atol=1e-9)


def test_what_was_left_out_moves_as_a_gram_and_stays_bounded(pair, features: Tensor) -> None:
    """G - F'F is positive, so after P its trace is at most |P|^2 times what it was."""
    shift = draw(DIM, DIM, seed=1)
    cut = ClassStats.from_features(features, LABELS, StorageSpec("factors", tolerance=0.05))
    before = (pair[0].gram - cut.gram).diagonal(dim1=1, dim2=2).sum(1)
    after = pair[0].transform(shift).gram - cut.transform(shift).gram
    most = torch.linalg.matrix_norm(shift, 2) ** 2 * before
    assert bool((after.diagonal(dim1=1, dim2=2).sum(1) <= most * (1 + 1e-9) + 1e-9).all())
    assert float(torch.linalg.eigvalsh(after).min()) > -1e-9 * float(after.abs().max())


def test_storage_refuses_what_makes_no_sense() -> None:
    for bad, named in (
        ({"rank": 2}, ("gram", "factors")),
        ({"tolerance": 0.1}, ("gram", "factors")),
        ({"form": "factors", "rank": 2, "tolerance": 0.1}, ("rank=2", "tolerance=0.1")),
        ({"form": "factors", "rank": 0}, ("rank", 0)),
        ({"form": "factors", "tolerance": 1.5}, ("tolerance", 1.5, 0, 1)),
    ):
        with raises(ConfigError, *named):
            StorageSpec(**bad)
    with pytest.raises(ValueError, match="gram_rank"):
        StorageOptions(gram_rank=3)
    with raises(ConfigError, (2, 4), 3):
        LowRankGrams(torch.ones(2, 4), [1, 2])
    with pytest.raises(NotFiniteError):
        ClassStats.from_features(torch.full((2, 8), float("nan")), torch.zeros(2, dtype=torch.int64), FACTORS)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_hostile_features_make_sound_factors(scale: float) -> None:
    x = scale * draw(6, 20)
    x[3:] = x[0]  # duplicates: rank 3
    x[:, 4] = 0.0  # a dead channel
    own = compress(x, FACTORS)
    assert own.ranks == (3,)
    assert gap(own.dense()[0], x.T @ x) < 1e-13
    assert compress(torch.zeros(4, 20).double(), FACTORS).numel == 0
    nothing = LowRankGrams.zero(2, torch.zeros(2, 20).double())
    for rule in ("positive", "numerical"):
        moved, mean = nothing.transform_projected(torch.ones(2, 20).double(), torch.eye(20).double(), rule, None)
        assert moved.numel == 0
        assert float(mean.abs().max()) == 0.0


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_factor_without_rows_survives_in_a_state() -> None:
    features = torch.cat([torch.zeros(3, DIM), draw(5, DIM)])
    stats = ClassStats.from_features(features, torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]), FACTORS)
    assert stats.state()["factor_rank"].tolist() == [0, 5]
    again = ClassStats.from_state(stats.state())
    assert torch.equal(again.gram, stats.gram)
    assert again.state()["factor_rank"].tolist() == [0, 5]


def test_state_holds_the_form_and_every_bit(pair) -> None:
    factors = pair[1].transform(draw(DIM, DIM, seed=1))
    state = factors.state()
    assert state["gram_packed"].shape == (3, DIM * (DIM + 1) // 2)
    assert state["factor_rows"].shape == (19, DIM)
    for back in (ClassStats.from_state(state), copy.deepcopy(factors), pickle.loads(pickle.dumps(factors))):
        assert ranks(back) == ranks(factors)
        for name, tensor in factors.state().items():
            assert torch.equal(back.state()[name], tensor)
    assert "factor_rank" not in pair[0].state(), "Grams are written as ever"


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("factor_rank", lambda t: t + 1),
        ("factor_rank", lambda t: torch.full_like(t, -1)),
        ("factor_rank", lambda t: t[1:]),
        ("factor_rows", lambda t: t[1:]),
        ("factor_rows", lambda t: torch.cat([t, t])),
        ("factor_rows", lambda t: t[:, 1:]),
        ("factor_rows", lambda t: t[0]),
        ("gram_packed", lambda t: t[1:]),
        ("gram_packed", lambda t: t[:, 1:]),
        ("gram_packed", lambda t: t[0, 0]),
    ],
)
def test_a_state_that_does_not_fit_is_refused(pair, key: str, change) -> None:
    state = pair[1].state()
    state[key] = change(state[key])
    with pytest.raises(ConfigError):
        ClassStats.from_state(state)
    del state[key]
    with raises(ConfigError, "ClassStats", key):
        ClassStats.from_state(state)


# --- methods and models -----------------------------------------------------------------------------------------------


FORMS = {"gram": {}, "factors": {"gram_storage": "factors"}, "cut": {"gram_storage": "factors", "gram_tolerance": 0.05}}


FEW = blobs(per_class=6)  # 16 dimensions: 6 images are a factor


@pytest.fixture(scope="module")
def learned(backend):
    """DPCR and DP-NCM with Grams, with factors, and with cut ones, all on one trajectory; equal ones share a track."""
    kind = LEARNERS["lwf"]
    learner = kind(kind.options_type(**TINY), FEW.channels, backend, 0)
    stream = TaskStream(FEW.train, np.arange(len(FEW.class_names)), (2, 3, 1))
    evaluator = Evaluator(FEW, stream, backend)
    methods = {
        f"{name} {label}": (METHODS[name], METHODS[name].options(**given))
        for name in ("dpcr", "dp-ncm")
        for label, given in FORMS.items()
    }
    trajectory = Trajectory(learner, methods)
    matrices = {label: AccuracyMatrix(evaluator.totals()) for label in methods}
    follow_stream(stream, FEW, evaluator, trajectory, matrices)
    return trajectory, matrices


@pytest.mark.parametrize("name", ["dpcr", "dp-ncm"])
def test_methods_with_factors_give_what_they_give_with_grams(learned, name) -> None:
    trajectory, matrices = learned
    grams, factors, cut = (trajectory.stats(f"{name} {label}") for label in FORMS)
    assert all(isinstance(part, LowRankGrams) for part in factors.parts)
    same(factors, grams)
    assert matrices[f"{name} gram"] == matrices[f"{name} factors"]
    if name == "dpcr":
        weights = [trajectory.parts[f"dpcr {label}"].classifier.weight for label in ("factors", "gram")]
        assert gap(*weights) < 1e-8
    assert cut.numel < factors.numel < grams.numel
    assert gap(cut.gram, grams.gram) > 1e-6
    assert float(left_out(cut.select([5]), grams.select([5])).max()) <= 0.05 + 1e-9  # it has not moved
    again = Trajectory(None, {name: (METHODS[name], METHODS[name].options(**FORMS["factors"]))})
    (classifier,) = (part.classifier for part in again.parts.values())
    state = trajectory.parts[f"{name} factors"].classifier.state_dict()
    classifier.load_state_dict(state, ClassStats.from_state(factors.state()))
    x = draw(5, 16)
    assert torch.equal(again.logits(name, x), trajectory.logits(f"{name} factors", x))


def test_methods_that_agree_in_storage_share_a_track(learned) -> None:
    """DPCR and DP-NCM shift alike, so three ways of storage are three tracks for six methods."""
    trajectory, _ = learned
    assert len(trajectory.tracks) == len(FORMS)
    for label in FORMS:
        assert trajectory.stats(f"dpcr {label}") is trajectory.stats(f"dp-ncm {label}")


def test_a_model_keeps_factors_on_disk_and_off(tmp_path) -> None:
    images, labels = FEW.train.images, [FEW.class_names[label] for label in FEW.train.labels]
    late = FEW.train.labels >= 3
    models = {}
    for form in ("gram", "factors"):
        model = IncrementalClassifier(
            "dpcr", width=2, size=8, epochs=1, device="cpu", progress=False, options={"gram_storage": form}
        )
        for rows in (~late, late):
            model.learn(images[rows], [label for label, row in zip(labels, rows, strict=True) if row])
        model.save(tmp_path / form)
        models[form] = model
        card = json.loads((tmp_path / form / "model.json").read_text())
        assert card["config"]["options"]["gram_storage"] == form
        with safe_open(tmp_path / form / "statistics.safetensors", "pt") as file:
            assert any(name.endswith("factor_rows") for name in file.keys()) == (form == "factors")  # noqa: SIM118
    grams, factors = models.values()
    assert np.abs(grams.predict_proba(FEW.test.images) - factors.predict_proba(FEW.test.images)).max() < 1e-6
    assert factors.summary()["bytes"] < grams.summary()["bytes"]
    again = IncrementalClassifier.load(tmp_path / "factors")
    assert np.array_equal(again.predict_proba(FEW.test.images), factors.predict_proba(FEW.test.images))
    again.learn(*(images[late], [label for label, row in zip(labels, late, strict=True) if row]))  # the same once more
    again.forget("class1")
    assert np.isfinite(again.predict_proba(FEW.test.images)).all()
