"""ACIL, DS-AL and FeCAM against literal transcriptions of their formulas, and what their files promise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from efcil.classifiers.dual_stream import DualStreamRidgeOptions
from efcil.classifiers.mahalanobis import Mahalanobis, MahalanobisOptions
from efcil.classifiers.random_features import RandomFeatureRidge, RandomFeatureRidgeOptions
from efcil.core import mahalanobis, recursive_ridge
from efcil.core.class_stats import ClassStats
from efcil.core.gram_storage import StorageSpec
from efcil.core.mahalanobis import LowRankMetric, correlation, correlation_factor, mahalanobis_scores, shrunk
from efcil.core.metrics import AccuracyMatrix
from efcil.core.recursive_ridge import RecursiveRidge, expansion_matrix
from efcil.errors import ConfigError, NotFiniteError, NotPositiveDefiniteError, TrainingError
from efcil.experiment.specification import ExperimentSpec, resolve
from efcil.features import TaskFeatures
from efcil.learners import LEARNERS
from efcil.methods import FROZEN, METHODS
from efcil.protocol import Evaluator
from efcil.tasks import TaskStream
from efcil.trajectory import Trajectory
from messages import raises
from problems import TINY, follow_stream

DIM, BUFFER, RIDGE = 10, 24, 0.1
OPTIONS = {
    "acil": {"buffer": BUFFER, "ridge": RIDGE},
    "ds-al": {"buffer": BUFFER, "ridge": RIDGE, "compensation": 1.5},
    "fecam": {},
}


def following(name, **options):
    """A trajectory of saved features with one of the methods."""
    method = METHODS[name]
    return Trajectory(None, {name: (method, method.options(**{**OPTIONS[name], **options}))}, freezes=True)


def task_of(index, labels, features, seed=0):
    """A task whose features are given."""
    return TaskFeatures.from_saved(index, seed, {"labels": labels, "new": features}, features.shape[1:])


def feature_tasks(sizes=(3, 2, 4), images=30, dim=DIM, seed=0):
    """Features as behind a ReLU and a mean over positions: not negative, some zero, classes apart."""
    source = torch.Generator().manual_seed(seed)
    tasks, first = [], 0
    for size in sizes:
        labels = torch.cat([torch.arange(size), torch.randint(size, (images * size - size,), generator=source)]) + first
        centers = torch.rand(sum(sizes), dim, generator=source) * 2
        features = (centers[labels] + 0.5 * torch.randn(len(labels), dim, generator=source)).clamp_min(0).float()
        tasks.append((labels, features))
        first += size
    return tasks


def learned(name, tasks, seed=0, **options):
    trajectory = following(name, **options)
    for index, (labels, features) in enumerate(tasks):
        trajectory.update(task_of(index, labels, features, seed))
    return trajectory


def classifier_of(trajectory):
    """Its only classifier."""
    (part,) = trajectory.parts.values()
    return part.classifier


def scored(trajectory, features):
    """Scores of its only classifier."""
    return classifier_of(trajectory).logits(features)


def close(got, want, tolerance=1e-8):
    return torch.allclose(got, want, rtol=tolerance, atol=tolerance)


# --- ACIL -------------------------------------------------------------------------------------------------------------


def literal_recursion(tasks, ridge):
    """The recursion as printed: R by Woodbury's identity, the classifier widened with every task."""
    (x, y), *later = tasks
    r = torch.inverse(x.T @ x + ridge * torch.eye(x.shape[1]).double())
    w = r @ x.T @ y
    for x, y in later:
        r = r - r @ x.T @ torch.inverse(torch.eye(len(x)).double() + x @ r @ x.T) @ x @ r
        w = torch.cat([w - r @ x.T @ x @ w, r @ x.T @ y], dim=1)
    return w


def one_hot(labels):
    return torch.stack([(labels == c).double() for c in labels.unique()], dim=1)


def test_acil_is_the_printed_recursion_and_the_joint_solution():
    tasks = feature_tasks()
    trajectory = learned("acil", tasks)
    stream = classifier_of(trajectory).stream
    expansion = stream.expansion
    rows = [(torch.relu(x.double() @ expansion), labels) for labels, x in tasks]
    weight = stream.weight
    assert close(weight, literal_recursion([(x, one_hot(labels)) for x, labels in rows], RIDGE))
    x, y = torch.cat([x for x, _ in rows]), one_hot(torch.cat([labels for _, labels in rows]))
    assert close(weight, torch.inverse(x.T @ x + RIDGE * torch.eye(BUFFER).double()) @ x.T @ y)
    probe = torch.rand(7, DIM)
    assert close(scored(trajectory, probe), torch.relu(probe.double() @ expansion) @ weight)
    assert scored(trajectory, probe).shape == (7, 9)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 59), max_size=8), st.sampled_from([1, 3, 1000]))
def test_any_split_in_any_order_gives_the_joint_solution(seed, cuts, strip):
    source = torch.Generator().manual_seed(seed)
    x = torch.rand(60, 8, generator=source).double()
    y = one_hot(torch.arange(60) % 4)
    order = torch.randperm(60, generator=source)
    sums = RecursiveRidge.empty(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recursive_ridge, "STRIP", strip)
        for rows in torch.tensor_split(order, sorted(cuts)):
            sums.add(x[rows], y[rows])
    assert torch.equal(sums.gram, sums.gram.T)
    assert close(sums.solve(RIDGE), torch.inverse(x.T @ x + RIDGE * torch.eye(8).double()) @ x.T @ y)


def test_tasks_may_come_in_any_order_and_classes_again():
    tasks = feature_tasks()
    probe = torch.rand(5, DIM)
    want = scored(learned("acil", tasks), probe)
    assert close(scored(learned("acil", tasks[::-1]), probe), want)
    halves = [(labels[part::2], x[part::2]) for part in (0, 1) for labels, x in tasks]
    assert close(scored(learned("acil", halves), probe), want)


def test_solving_leaves_the_sums_as_they_were():
    sums = classifier_of(learned("acil", feature_tasks())).stream.sums
    before = sums.gram.clone()
    first = sums.solve(1e3)
    assert torch.equal(sums.gram, before)
    assert not close(first, sums.solve(1.0)), "another ridge needs no data"


def test_expansion_is_uniform_and_of_the_seed():
    matrix = expansion_matrix(25, 4000, torch.Generator().manual_seed(1))
    bound = 1 / 5  # torch's default for a linear layer, as released: uniform in +-1/sqrt(dim)
    assert float(matrix.abs().max()) <= bound
    edges = torch.linspace(-bound, bound, 11).double()
    shares = torch.histogram(matrix.flatten(), edges).hist / matrix.numel()
    assert torch.allclose(shares, torch.full((10,), 0.1).double(), atol=0.005)
    tasks = feature_tasks()
    one, same, other = (classifier_of(learned("acil", tasks, seed)).stream.expansion for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.isclose(one, other).any(0).all()


# --- DS-AL ------------------------------------------------------------------------------------------------------------


def literal_ds_al(tasks, expansion, ridge):
    """Both streams with R by Woodbury's identity; the residue of earlier classes is set to zero."""
    width = expansion.shape[1]
    r_main = r_second = torch.eye(width).double() / ridge
    main = second = torch.zeros(width, 0).double()
    for labels, features in tasks:
        new = len(labels.unique())
        y = torch.zeros(len(labels), main.shape[1] + new).double()
        for row, label in enumerate(labels.tolist()):
            y[row, label] = 1
        main, second = (torch.cat([w, torch.zeros(width, new).double()], dim=1) for w in (main, second))
        embedding = features.double() @ expansion
        x = torch.maximum(embedding, torch.zeros(()).double())
        r_main = r_main - r_main @ x.T @ torch.inverse(torch.eye(len(x)).double() + x @ r_main @ x.T) @ x @ r_main
        main = main + r_main @ x.T @ (y - x @ main)
        residue = y - x @ main
        residue[:, :-new] = 0
        z = torch.tanh(embedding)
        r_second = r_second - r_second @ z.T @ torch.inverse(torch.eye(len(z)).double() + z @ r_second @ z.T) @ (
            z @ r_second
        )
        second = second + r_second @ z.T @ (residue - z @ second)
    return main, second


def test_ds_al_is_the_literal_loop():
    tasks = feature_tasks()
    streams = classifier_of(learned("ds-al", tasks))
    main, second = literal_ds_al(tasks, streams.main.expansion, RIDGE)
    assert close(streams.main.weight, main)
    assert close(streams.second.weight, second)
    assert float(second.abs().max()) > 1e-3
    probe = torch.rand(6, DIM)
    embedding = probe.double() @ streams.main.expansion
    assert close(streams.logits(probe), torch.relu(embedding) @ main + 1.5 * torch.tanh(embedding) @ second)


def test_the_main_stream_is_acil_and_compensation_zero_leaves_it_alone():
    tasks, probe = feature_tasks(), torch.rand(6, DIM)
    alone = scored(learned("ds-al", tasks, compensation=0.0), probe)
    assert torch.equal(alone, scored(learned("acil", tasks), probe))
    assert not close(scored(learned("ds-al", tasks), probe), alone, 1e-3)


def test_compensation_fits_the_training_images_better():
    tasks = feature_tasks(sizes=(6,))
    labels, features = tasks[0]
    target = one_hot(labels)
    errors = [(scored(learned(name, tasks), features) - target).square().sum() for name in ("acil", "ds-al")]
    assert errors[1] < 0.98 * errors[0]


# --- FeCAM ------------------------------------------------------------------------------------------------------------


def literal_fecam(tasks, probe, power, alpha1, alpha2, times):
    """Class by class, image by image, with explicit inverses."""
    scores = []
    for labels, features in tasks:
        for c in labels.unique():
            rows = features.double()[labels == c]
            mean = sum(rows) / len(rows)
            powers = rows**power
            centered = powers - sum(powers) / len(powers)
            covariance = sum(torch.outer(row, row) for row in centered) / (len(rows) - 1)
            covariance[covariance.abs() < 1e-15] = 0  # of dead channels
            identity = torch.eye(len(mean)).double()
            for _ in range(times):
                v1 = covariance.trace() / len(mean)
                off = [float(covariance[i, j]) for i in range(len(mean)) for j in range(len(mean)) if i != j]
                off = [value for value in off if value != 0]
                covariance = covariance + alpha1 * v1 * identity + alpha2 * sum(off) / len(off) * (1 - identity)
            deviation = torch.sqrt(covariance.diagonal())
            inverse = torch.inverse(covariance / torch.outer(deviation, deviation))
            center = mean**power / (mean**power).norm()
            column = []
            for row in probe.double():
                unit = (row / row.norm()) ** power
                difference = unit / unit.norm() - center
                column.append(-(difference @ inverse @ difference))
            scores.append(torch.stack(column))
    return torch.stack(scores, dim=1)


@pytest.mark.parametrize(
    ("power", "alpha1", "alpha2", "times"),
    [(0.1, 1.0, 2.0, 2), (0.5, 1.0, 1.0, 2), (0.5, 1.0, 1.0, 1), (1.0, 3.0, 0.5, 1)],
)
def test_fecam_is_its_formulas(power, alpha1, alpha2, times):
    tasks = [(labels, x.clone()) for labels, x in feature_tasks()]
    tasks[1][1][:, 3] = 0.0  # a dead channel
    options = {"power": power, "shrink_diagonal": alpha1, "shrink_off_diagonal": alpha2, "shrink_times": times}
    probe = tasks[0][1][:9] + 0.1
    got = scored(learned("fecam", tasks, **options), probe)
    assert close(got, literal_fecam(tasks, probe, power, alpha1, alpha2, times))


def test_presets_have_the_appendix_and_the_codes_own_configuration():
    found = {}
    for preset in ("paper", "released_code"):
        (_, options) = resolve(ExperimentSpec(("fecam",), "cifar100", tasks=10, preset=preset)).methods["fecam"]
        found[preset] = (options.power, options.shrink_diagonal, options.shrink_off_diagonal, options.shrink_times)
    assert found == {"paper": (0.1, 1.0, 2.0, 2), "released_code": (0.5, 1.0, 1.0, 2)}


def test_fecam_reads_negative_features_as_zero():
    tasks = feature_tasks()
    trajectory = learned("fecam", tasks)
    probe = torch.randn(8, DIM)
    assert torch.equal(scored(trajectory, probe), scored(trajectory, probe.clamp_min(0)))
    assert torch.isfinite(scored(trajectory, torch.zeros(1, DIM))).all()


def test_later_tasks_leave_a_class_as_it_was():
    tasks, probe = feature_tasks(), torch.rand(5, DIM)
    first = scored(learned("fecam", tasks[:1]), probe)
    assert torch.equal(scored(learned("fecam", tasks), probe)[:, :3], first)


def test_a_class_of_one_image_and_of_copies_of_one():
    x = torch.rand(1, DIM) + 0.05
    probe = torch.rand(6, DIM)
    unit = torch.nn.functional.normalize(probe.double() ** 0.1, dim=1)
    center = torch.nn.functional.normalize(x.double() ** 0.1, dim=1)
    euclidean = -(unit - center).square().sum(1)
    labels, features = feature_tasks()[0]
    for copies in (1, 3, 7):
        more = torch.cat([labels, torch.full((copies,), 3)]), torch.cat([features, x.expand(copies, DIM)])
        assert close(scored(learned("fecam", [more]), probe)[:, 3], euclidean)


@pytest.mark.parametrize("name", ["acil", "ds-al"])
def test_one_image_can_be_a_task(name):
    tasks = feature_tasks()
    tasks[1] = (torch.tensor([3]), 5 * torch.eye(DIM)[:1])
    tasks[2] = (tasks[2][0] - 1, tasks[2][1])
    scores = scored(learned(name, tasks), tasks[1][1])
    assert scores.shape == (1, 8)
    assert torch.isfinite(scores).all()
    assert 0.2 < float(scores[0, 3]) < 1.0, "it counts, as one image among many"


def test_a_shrinkage_that_is_no_metric_is_weakened_for_its_class_alone():
    source = torch.Generator().manual_seed(0)
    good = torch.randn(40, 6, generator=source).double()
    zero_sum = good - good.mean(1, keepdim=True)  # covariances whose mean is as negative as can be
    covariance = torch.stack([torch.cov(good.T), torch.cov(zero_sum.T)])
    twice = covariance
    for _ in range(2):
        twice = shrunk(twice, 1.0, 2.0)
    assert (torch.linalg.eigvalsh(twice)[:, 0] > 0).tolist() == [True, False]
    factors = correlation_factor(covariance, covariance, 1.0, 2.0, 2)
    got = factors @ factors.mT
    assert close(got[0], correlation(twice)[0])
    weaker = [correlation(shrunk(shrunk(covariance, 1.0, 2 * s), 1.0, 2 * s))[1] for s in mahalanobis.SHARES]
    sound = [matrix for matrix in weaker if float(torch.linalg.eigvalsh(matrix)[0]) > mahalanobis.DEFINITE]
    assert 0 < len(sound) < len(weaker)
    assert close(got[1], sound[0])


def test_shrinkage_of_nothing_is_nothing():
    assert torch.equal(shrunk(torch.zeros(1, 3, 3), 1.0, 2.0), torch.zeros(1, 3, 3))
    assert torch.equal(correlation(torch.zeros(1, 3, 3)), torch.eye(3)[None])


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_old_classes_are_distinguished_from_new_ones(name):
    tasks = feature_tasks(images=60)
    trajectory = learned(name, tasks)
    labels, features = (torch.cat(parts) for parts in zip(*tasks, strict=True))
    assert float((scored(trajectory, features).argmax(1) == labels).float().mean()) > 0.65  # of nine classes


@pytest.mark.parametrize("name", OPTIONS)
def test_state_round_trip_goes_on_to_the_bit(name):
    tasks, probe = feature_tasks(), torch.rand(4, DIM)
    whole = learned(name, tasks)
    half = learned(name, tasks[:2])
    state = {key: value.clone() for key, value in half.state_dict().items()}
    again = following(name)
    again.load_state_dict(state)
    assert torch.equal(scored(again, probe), scored(half, probe))
    again.update(task_of(2, *tasks[2], seed=99))  # the expansion stays that of the first task
    assert torch.equal(scored(again, probe), scored(whole, probe))
    kept = again.state_dict()
    assert all(torch.equal(value, kept[key]) for key, value in whole.state_dict().items())


@pytest.mark.parametrize("name", OPTIONS)
def test_same_seed_is_bitwise_equal_and_another_is_not(name):
    tasks = feature_tasks()
    one, same, other = (scored(learned(name, tasks, seed), torch.ones(2, DIM)) for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert torch.equal(one, other) == (name == "fecam"), "FeCAM draws nothing"


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("acil", BUFFER * (BUFFER + 1) // 2 + 9 * 2 * BUFFER + 2),
        ("ds-al", 2 * (BUFFER * (BUFFER + 1) // 2 + 9 * 2 * BUFFER) + 2),
        ("fecam", 9 * (DIM * (DIM + 1) // 2 + 2 * DIM)),
    ],
)
def test_memory_is_what_the_file_says(name, numbers):
    trajectory = learned(name, feature_tasks())
    stored = sum(value.numel() for value in classifier_of(trajectory).state_dict().values())
    assert stored + sum(track.stats.numel for track in trajectory.tracks.values()) == numbers


@pytest.mark.parametrize("name", OPTIONS)
def test_sizes_of_chunks_change_nothing(name, monkeypatch):
    tasks, probe = feature_tasks(), torch.rand(50, DIM)
    want = scored(learned(name, tasks), probe)
    calls = []
    add, solve = RecursiveRidge.add, torch.linalg.solve_triangular
    monkeypatch.setattr(RecursiveRidge, "add", lambda *a, **k: (calls.append(1), add(*a, **k))[1])
    monkeypatch.setattr(torch.linalg, "solve_triangular", lambda *a, **k: (calls.append(1), solve(*a, **k))[1])
    monkeypatch.setattr(recursive_ridge, "ROW_BYTES", 8 * BUFFER * 7)
    monkeypatch.setattr(recursive_ridge, "STRIP", 5)
    monkeypatch.setattr(mahalanobis, "ROWS_AT_ONCE", 7)
    got = scored(learned(name, tasks), probe)
    assert close(got, want, 1e-9)
    # Tasks of 90, 60 and 120 rows by 7 are 13, 9 and 18 chunks; 50 rows to score are 8 for each of 9 classes.
    assert len(calls) == {"acil": 40, "ds-al": 80, "fecam": 72}[name]


class Sizes(TorchDispatchMode):
    """Counts the numbers in each tensor that an operation makes anew."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.made.append(tensor.numel())
        return result


def test_solving_makes_one_matrix_of_the_size_of_the_gram(monkeypatch):
    """At 10,000 such a matrix is 800 MB: the factor is one, and there must be no copy, product or inverse beside it."""
    width = 600
    monkeypatch.setattr(recursive_ridge, "ROW_BYTES", 8 * width * 100)
    monkeypatch.setattr(recursive_ridge, "STRIP", 50)
    classifier = RandomFeatureRidge(buffer=width)
    tasks = feature_tasks()
    classifier.fit_features(task_of(0, *tasks[0]))
    with Sizes() as sizes:
        classifier.fit_features(task_of(1, *tasks[1]))
    assert len([n for n in sizes.made if n > width * width // 3]) == 1
    assert max(sizes.made) == width * width


def test_distances_make_nothing_of_images_times_images():
    points = torch.rand(500, 6).double()
    with Sizes() as sizes:
        mahalanobis_scores(points, points[:3], torch.eye(6).double().expand(3, 6, 6))
    assert max(sizes.made) == 500 * 6


def test_a_frozen_run_and_the_start_of_an_lwf_run_agree(backend, data):
    """Through the protocol: they read the first backbone of either trajectory, and learn nothing else."""
    hits = []
    for kind in ("first-task", "lwf"):
        learner_type = LEARNERS[kind]
        learner = learner_type(learner_type.options_type(**TINY), data.channels, backend, 0)
        stream = TaskStream(data.train, np.arange(6), (2, 3, 1))
        evaluator = Evaluator(data, stream, backend)
        methods = {name: (METHODS[name], METHODS[name].options(**given)) for name, given in OPTIONS.items()}
        trajectory = Trajectory(learner, methods, freezes=kind in FROZEN)
        matrices = {name: AccuracyMatrix(evaluator.totals()) for name in methods}
        follow_stream(stream, data, evaluator, trajectory, matrices)
        assert all(part.first_backbone == (kind == "lwf") for part in trajectory.parts.values())
        hits.append(matrices)
    for name in OPTIONS:
        assert hits[0][name] == hits[1][name]
        assert hits[0][name].tasks_done == 3


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_finite(name, bad):
    labels, features = feature_tasks()[0]
    features[4, 2] = bad
    with raises(NotFiniteError, "features", 1, 900):
        following(name).update(task_of(0, labels, features))


def test_a_task_that_is_refused_leaves_no_trace():
    tasks = feature_tasks()
    trajectory = learned("acil", tasks[:1])
    sums = classifier_of(trajectory).stream.sums
    before = sums.gram.clone()
    with pytest.raises(NotFiniteError):
        trajectory.update(task_of(1, tasks[1][0], tasks[1][1] * float("nan")))
    assert torch.equal(sums.gram, before)
    assert classifier_of(trajectory).stream.sums is sums


def test_features_whose_squares_overflow():
    labels, features = feature_tasks()[0]
    with raises(NotFiniteError, 23, 24):
        following("acil").update(task_of(0, labels, features.double() * 1e200))


def test_a_ridge_lost_in_rounding():
    labels, features = feature_tasks()[0]
    trajectory = following("acil", buffer=128, ridge=1e-9)  # more columns than rows, and huge numbers
    with raises(NotPositiveDefiniteError, 1e-09, "128 x 128", "ridge"):
        trajectory.update(task_of(0, labels, features * 1e6))


def test_a_factor_that_goes_through_and_means_nothing():
    """Cholesky of two rows in four columns with a ridge of one rounding: it may succeed with pivots below the ridge."""
    ridge, noticed = 2.0**-53, 0
    for seed in range(3000):
        x = torch.rand(2, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        sums = RecursiveRidge.empty(4)
        sums.add(x, torch.ones(2, 1).double())
        factor, info = torch.linalg.cholesky_ex(sums.gram + ridge * torch.eye(4).double())
        if int(info) == 0 and float(factor.diagonal().square().min()) < ridge / 2:
            noticed += 1
            with pytest.raises(NotPositiveDefiniteError):
                sums.solve(ridge)
    assert noticed > 0


def test_a_covariance_that_stays_singular():
    trajectory = following("fecam", shrink_diagonal=0.0, shrink_off_diagonal=0.0)
    with raises(NotPositiveDefiniteError, 0, "10 x 10", "shrink_diagonal", "shrink_times"):
        trajectory.update(task_of(0, torch.zeros(4, dtype=torch.int64), torch.rand(4, DIM)))


def test_other_widths_are_refused():
    classifier = classifier_of(learned("acil", feature_tasks()))
    with raises(ConfigError, "features", (2, 11), "(n, 10)"):
        classifier.logits(torch.rand(2, 11))
    with raises(ConfigError, 24, 32, "buffer=24"):
        RandomFeatureRidge(buffer=32).load_state_dict(classifier.state_dict())
    with raises(ConfigError, (3, 4), (2, 1), "(n, 5)"):
        RecursiveRidge.empty(5).add(torch.rand(3, 4).double(), torch.rand(2, 1).double())


def test_memory_that_runs_out_names_the_buffer(monkeypatch):
    def full(*args):
        raise MemoryError

    monkeypatch.setattr(RecursiveRidge, "empty", full)
    for name in ("acil", "ds-al"):
        with raises(TrainingError, 24, "--set buffer="):
            following(name).update(task_of(0, *feature_tasks()[0]))


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (RandomFeatureRidgeOptions, {"buffer": 0}),
        (RandomFeatureRidgeOptions, {"ridge": 0.0}),
        (DualStreamRidgeOptions, {"compensation": -1.0}),
        (MahalanobisOptions, {"power": 0.0}),  # a logarithm, which features that are zero do not have
        (MahalanobisOptions, {"shrink_times": -1}),
    ],
)
def test_impossible_options(options, values):
    with pytest.raises(ValueError, match=next(iter(values))):
        options(**values)


@pytest.mark.parametrize(
    ("diagonal", "off_diagonal", "times"), [(1.0, 2.0, 2), (1.0, 1.0, 1), (10.0, 10.0, 1), (1.0, 0.0, 1)]
)
def test_a_metric_of_few_images_is_the_whole_one(diagonal, off_diagonal, times):
    """Also with channels that are zero in all images of a class, a class of one image, and many more channels."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(40, 60, generator=draw, dtype=torch.float64) ** 2
    x[:14, 5:9] = 0.0
    labels = torch.tensor([0] * 14 + [1] * 25 + [2])
    options = {"shrink_diagonal": diagonal, "shrink_off_diagonal": off_diagonal, "shrink_times": times}
    points, found = torch.rand(30, 60, generator=draw, dtype=torch.float64), []
    for form in ("gram", "factors"):
        fecam = Mahalanobis(**options)
        maps = [x if behind is None else behind(x, ()) for behind in fecam.feature_maps]
        fecam.fit(*(ClassStats.from_features(own, labels, StorageSpec(form)) for own in maps))
        found.append(fecam.logits(points))
        kinds = {type(factor) for factor in fecam.factors}
        assert kinds == ({torch.Tensor} if form == "gram" else {LowRankMetric})
    assert (found[0] - found[1]).abs().max() < 1e-9 * found[0].abs().max()


def test_features_without_a_power_are_of_unit_length():
    """As the released code has it for vision transformers, whose features may be negative."""
    draw = torch.Generator().manual_seed(0)
    x, labels = torch.randn(40, 6, generator=draw, dtype=torch.float64), torch.arange(40) % 2
    fecam = Mahalanobis(power=None, shrink_diagonal=1.0, shrink_off_diagonal=0.0, shrink_times=1)
    fecam.fit(*(ClassStats.from_features(behind(x, ()), labels) for behind in fecam.feature_maps))
    unit = x / x.norm(dim=1, keepdim=True)
    for c in range(2):
        own = unit[labels == c]
        covariance = torch.cov(own.T, correction=0) + torch.eye(6).double() * torch.cov(own.T, correction=0).trace() / 6
        deviation = covariance.diagonal().sqrt()
        whole = covariance / torch.outer(deviation, deviation)
        apart = unit[:5] - own.mean(0)
        wanted = -(apart @ torch.linalg.inv(whole) * apart).sum(1)
        assert (fecam.logits(x[:5])[:, c] - wanted).abs().max() < 1e-9
