"""DPCR+ against literal transcriptions of docs/dpcr-plus.md, and what must hold of it."""

import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, log_softmax, softmax

from batches import loss_of
from efcil.classifiers.gaussian import RidgeAndGaussian
from efcil.classifiers.ridge import Ridge
from efcil.core.class_stats import ClassStats
from efcil.core.gaussian import gaussian_factors, log_densities, pooled_covariance
from efcil.core.gram_storage import StorageSpec
from efcil.core.metrics import AccuracyMatrix
from efcil.core.projection import cross_validated_ridge, feature_products
from efcil.data.dataset import ImageSet
from efcil.errors import ConfigError
from efcil.experiment.specification import ExperimentSpec, resolve
from efcil.features import TaskFeatures
from efcil.learners.lwf import LwF, LwFOptions
from efcil.learners.pseudo_replay import PseudoReplay, PseudoReplayOptions, select_seeds_and_targets
from efcil.losses import UNLABELED
from efcil.methods import METHODS, find
from efcil.models import build
from efcil.models.multi_stage import MultiStageFeatures
from efcil.protocol import Evaluator
from efcil.shift import dual_projection
from efcil.shift.dual_projection import DualProjection
from efcil.tasks import Task, TaskStream
from efcil.training.extraction import extract
from efcil.training.feature_inversion import invert_features
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import HostImages, LazyImages
from efcil.training.state import TaskData, TrainState
from efcil.trajectory import Trajectory
from messages import raises
from problems import TINY, Watch, blobs, copied, draw, follow_stream, stopped_in_the_second_task

SIZES = (2, 3, 1)
SMALL = {**TINY, "augment": "none"}


def make_learner(backend, seed=0, kind=PseudoReplay, channels=3, **options):
    return kind(kind.options_type(**{**SMALL, **options}), channels, backend, seed)


DPCR_PLUS = METHODS["dpcr-plus"]


def trajectory_of(learner, method=DPCR_PLUS, **options):
    return Trajectory(learner, {"it": (method, method.options(**options))})


def run(learner, data, watch=None, *, options=None, method=DPCR_PLUS, state=None, resumed_from=None):
    """Learn a stream; return the trajectory and the accuracies."""
    stream = TaskStream(data.train, np.arange(sum(SIZES)), SIZES)
    evaluator = Evaluator(data, stream, learner.backend)
    trajectory = trajectory_of(learner, method, **(options or {}))
    matrix = AccuracyMatrix(evaluator.totals())
    if state is not None:
        trajectory.load_state_dict(state)
    follow_stream(stream, data, evaluator, trajectory, {"it": matrix}, watch, resumed_from)
    return trajectory, matrix


def classifier_of(trajectory):
    return trajectory.parts["it"].classifier


def saved(index, labels, old, new):
    """A task whose features are given."""
    return TaskFeatures.from_saved(index, 0, {"labels": labels, "old": old, "new": new}, new.shape[1:])


def task_of(data, classes, backend):
    """The pixels and labels of some classes."""
    rows = np.flatnonzero(np.isin(data.train.labels, classes))
    pixels = ImageBatches(torch.from_numpy(data.train.images[rows]), data.mean, data.std, backend)
    return pixels, torch.from_numpy(data.train.labels[rows])


@pytest.fixture(scope="module")
def second(backend, data):
    """A learner in the middle of its second task: two old classes, three new ones."""
    return stopped_in_the_second_task(make_learner(backend), data, run)


# --- images are changed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 3])
def test_pixels_follow_the_gradient(backend, data, second, together):
    """Image by image and step by step, with the norm of a group and what pixels may be."""
    pixels, _ = task_of(data, [2, 3], backend)
    inputs, backbone = pixels.normalize(pixels.images[:6]), second.old_backbone.eval()
    goals = torch.rand(6, backbone.num_features, generator=torch.Generator().manual_seed(1))
    low, high = torch.tensor(-1.5), torch.tensor(1.75)
    want = inputs.clone()
    for _ in range(3):
        gradients = []
        for image, goal in zip(want, goals, strict=True):
            x = image[None].clone().requires_grad_()
            (backbone(x)[0] - goal).square().sum().backward()
            gradients.append(x.grad[0])
        for first in range(0, 6, together):
            norm = torch.stack(gradients[first : first + together]).square().sum().sqrt()
            for i in range(first, first + together):
                want[i] = (want[i] - 2.0 * gradients[i] / norm).clamp(low, high)
    found = invert_features(backbone, inputs, goals, 2.0, 3, (low, high), together)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert not found.requires_grad
    assert all(p.grad is None for p in backbone.parameters())


def test_the_nearest_images_are_taken_and_aim_at_the_classes_gaussian():
    means = torch.tensor([[0.0, 0.0], [10.0, 0.0]], dtype=torch.float64)
    covariance = torch.tensor([[2.0, 0.6], [0.6, 0.5]], dtype=torch.float64)
    source = torch.tensor([[0.1, 0.0], [9.0, 0.0], [5.2, 0.0], [0.0, 2.0], [11.0, 3.0], [-1.0, 0.0]]).double()
    rows, goals = select_seeds_and_targets(means, covariance, source, 6, 0.0, torch.Generator())
    assert [set(part.tolist()) for part in rows.split(3)] == [{0, 5, 3}, {1, 4, 2}]
    assert torch.equal(goals, means.repeat_interleave(3, 0)), "without spread they aim at the means"
    rows, goals = select_seeds_and_targets(
        means, covariance, source.repeat(5000, 1), 40000, 1.5, torch.Generator().manual_seed(0)
    )
    for own, mean in zip(goals.split(20000), means, strict=True):
        assert (own.mean(0) - mean).abs().max() < 0.05
        torch.testing.assert_close(torch.cov(own.T), 2.25 * covariance, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("wanted", "each"), [(7, 3), (1, 1), (1000, 6)])
def test_every_class_has_as_many_images_and_at_least_one(wanted, each):
    rows, goals = select_seeds_and_targets(
        draw(2, 4), torch.eye(4).double(), draw(6, 4, seed=1), wanted, 1.0, torch.Generator()
    )
    assert len(rows) == len(goals) == 2 * each
    assert all(len(set(part.tolist())) == each for part in rows.split(each)), "no image twice for a class"


@pytest.mark.parametrize("stages", [0, 1])
def test_pseudo_images_look_like_old_classes_to_the_old_backbone(backend, data, stages):
    """In all features: those of the last stage alone, or of an intermediate one as well, and in each of them."""
    learner = make_learner(
        backend, pseudo_ratio=2.0, pseudo_noise=0.0, pseudo_iterations=12, intermediate_stages=stages
    )
    nearness = {}

    def each_epoch(report, state):
        if report.task and report.task not in nearness:
            r, made = learner, learner.pseudo_images()
            pixels, labels = task_of(data, range(2, 5) if report.task == 1 else [5], backend)
            each = len(made) // r.num_old_classes
            means = r.old_stats.mean
            goals = means.repeat_interleave(each, 0)
            network = MultiStageFeatures(r.old_backbone, 1, flip_tta=False) if stages else r.old_backbone
            before, after = (extract(network, shown, backend).double() for shown in (pixels, pixels.with_images(made)))
            starts = torch.cdist(means, before).topk(each, largest=False).indices.flatten()
            for part in (slice(None), slice(r.backbone.num_features, None) if stages else slice(None)):
                far, near = (before[starts] - goals)[:, part], (after - goals)[:, part]
                nearness.setdefault(report.task, []).append((near.norm(dim=1).mean() / far.norm(dim=1).mean()).item())
            assert (made.dtype, made.shape[1:]) == (torch.uint8, pixels.images.shape[1:])
            assert len(made) == max(1, 2 * len(labels) // r.num_old_classes) * r.num_old_classes or each == len(labels)

    run(learner, data, Watch(each_epoch))
    assert sorted(nearness) == [1, 2]
    assert max(max(each) for each in nearness.values()) < 0.9


def test_pseudo_images_are_generated_in_the_precision_of_the_run(backend, data, second, monkeypatch):
    """In bfloat16 the gradient is another one and points the same way: as near to the means, within a tenth."""
    pixels, labels = task_of(data, [2, 3, 4], backend)
    distances, made, lower = [], [], []

    def watched(*given):
        lower.append(torch.is_autocast_enabled("cpu"))
        return invert_features(*given)

    monkeypatch.setattr("efcil.learners.pseudo_replay.invert_features", watched)
    for precision in ("fp32", "bf16"):
        other = copy.copy(second)
        other.backend = dataclasses.replace(backend, precision=precision)
        other.options = other.options.model_copy(update={"pseudo_noise": 0.0})
        other.generated = None
        other.training_data(0, pixels, labels)
        made.append(other.pseudo_images())
        goals = other.old_stats.mean.repeat_interleave(len(made[-1]) // 2, 0)
        found = extract(other.old_backbone, pixels.with_images(made[-1]), backend).double()
        distances.append((found - goals).norm(dim=1).mean().item())
    assert lower == [False, True]
    assert distances[1] < 1.1 * distances[0]


def test_lazily_loaded_images_give_the_same_pseudo_images(backend, data, second):
    pixels, labels = task_of(data, [2, 3, 4], backend)
    streamed = pixels.with_images(LazyImages(HostImages(pixels.images.numpy()), backend.device))
    made = []
    for source in (pixels, streamed):
        other = copy.copy(second)
        other.generated = None
        both, targets_of_all = other.training_data(0, source, labels)
        made.append(other.pseudo_images())
        assert torch.equal(both.images[torch.arange(len(labels), len(targets_of_all))], made[-1])
    assert torch.equal(*made)


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_the_loss_is_its_equation(backend, data, second):
    """Cross-entropy of those with a label over the task's share of the batch; distillation over all of them."""
    r = copy.copy(second)
    pixels, labels = task_of(data, [2, 3, 4], backend)
    both, targets_of_all = r.training_data(0, pixels, labels)
    rows = torch.tensor([0, 1, len(labels), 2, len(labels) + 1, 3, len(labels) + 2])
    images, targets = both.normalize(both.images[rows]), targets_of_all[rows]
    assert (targets == UNLABELED).tolist() == [False, False, True, False, True, False, True]
    r.eval()
    logits = r.student.head(r.student.backbone(images))
    known = r.teacher.head(r.teacher.backbone(images))
    labeled = targets != UNLABELED
    share = len(labels) / (len(labels) + len(r.generated))
    new = cross_entropy(logits[labeled][:, 2:], targets[labeled] - 2, reduction="sum") / (share * 7)
    old = -(softmax(known / 2, 1) * log_softmax(logits[:, :2] / 2, 1)).sum(1).mean()
    torch.testing.assert_close(loss_of(r, images, targets), new + 10 * old, rtol=1e-5, atol=1e-5)


def test_features_are_distilled_through_a_linear_map(backend, data):
    """The map begins as the identity in every task, learns with the student, and its term is its equation."""
    r, begins = make_learner(backend, feature_distill_weight=2.5, pseudo_ratio=0.0), []
    original = r.before_task

    def before_task(task):
        original(task)
        begins.append(r.projector.weight.detach().clone())

    r.before_task = before_task
    run(r, data)
    assert all(torch.equal(weight, torch.eye(r.backbone.num_features)) for weight in begins)
    assert len(begins) == 3
    weight, bias = r.projector.weight.detach(), r.projector.bias.detach()
    assert not torch.equal(weight, torch.eye(r.backbone.num_features)), "it learns"
    pixels, labels = task_of(data, [5], backend)
    images = pixels.normalize(pixels.images[:4])
    r.eval()
    features, before = r.student.backbone(images), r.teacher.backbone(images)
    logits, known = r.student.head(features), r.teacher.head(before)
    want = cross_entropy(logits[:, 5:], labels[:4] - 5)
    want = want - 10 * (softmax(known / 2, 1) * log_softmax(logits[:, :5] / 2, 1)).sum(1).mean()
    for x, y in zip(features @ weight.T + bias, before, strict=True):
        want = want + 2.5 / 4 * (x / x.norm() - y / y.norm()).square().sum()
    torch.testing.assert_close(loss_of(r, images, labels[:4]), want, rtol=1e-5, atol=1e-5)
    assert {name for name in r.state(teacher=True) if name.startswith("projector")} == {
        "projector.weight",
        "projector.bias",
    }
    assert not any(name.startswith("projector") for name in r.state(teacher=False)), "it does not survive the task"


def test_without_pseudo_images_it_is_lwf(backend, data):
    """pseudo_ratio=0 learns what LwF learns, to the bit; in the first task nothing is made either."""
    plain, other = make_learner(backend, kind=LwF), make_learner(backend, pseudo_ratio=0.0)
    assert issubclass(PseudoReplayOptions, LwFOptions)
    for learner in (plain, other):
        run(learner, data)
    assert other.pseudo_images() is None
    state = other.state(teacher=False)
    assert all(torch.equal(v, state[k]) for k, v in plain.state(teacher=False).items())
    made = make_learner(backend)
    made.training_data(0, *task_of(data, [0, 1], backend))
    assert made.pseudo_images() is None


def test_the_shift_may_have_more_pseudo_images_than_are_learned(backend, data):
    """Of each class the nearest are learned, the same as without the others; the shift sees all of them."""
    few, more = (
        stopped_in_the_second_task(
            make_learner(backend, pseudo_ratio=0.5, pseudo_ratio_shift=n, pseudo_noise=0.0), data, run
        )
        for n in (None, 1.5)
    )
    pixels, labels = task_of(data, [2, 3, 4], backend)
    learned = []
    for r, share in ((few, 0.5), (more, 1.5)):
        assert len(r.pseudo_images()) == 2 * (round(share * len(labels)) // 2)
        both, targets_of_all = r.training_data(0, pixels, labels)
        assert (targets_of_all == UNLABELED).sum() == 2 * (round(0.5 * len(labels)) // 2)
        learned.append(both.images[torch.arange(len(labels), len(targets_of_all))].int())
    assert (learned[0] - learned[1]).abs().max() <= 1, "rounded, after another batch"
    task = TaskFeatures(1, labels, 0, more, pixels)
    assert [len(features) for features in task.old_new_pairs("pseudo")] == [len(labels) + len(more.pseudo_images())] * 2
    images, targets = pixels.normalize(pixels.images[:8]), labels[:8]
    more.training_data(0, pixels, labels)
    logits = more.student.head(more.student.backbone(images))
    share = len(labels) / (len(labels) + len(learned[1]))
    want = cross_entropy(logits[:, 2:], targets - 2, reduction="sum") / (share * 8)
    torch.testing.assert_close(more.criterion().classification(logits, targets), want)


def test_the_shift_may_have_pseudo_images_where_none_are_learned(backend, data):
    plain, other = make_learner(backend, kind=LwF), make_learner(backend, pseudo_ratio=0.0, pseudo_ratio_shift=1.0)
    for learner in (plain, other):
        run(learner, data)
    state = other.state(teacher=False)
    assert all(torch.equal(v, state[k]) for k, v in plain.state(teacher=False).items()), "LwF to the bit"
    assert len(other.pseudo_images()) >= 5


def test_pseudo_images_keep_the_backbone_in_place(backend, data):
    """They change what is learned in the second task, and not what is learned in the first."""
    states = {}
    for pseudo in (0.0, 1.0):
        learner = make_learner(backend, pseudo_ratio=pseudo)
        watch = Watch(
            each_task=lambda task, r=learner, p=pseudo: states.__setitem__(
                (p, task), copy.deepcopy(r.backbone.state_dict())
            )
        )
        run(learner, data, watch)
    assert all(torch.equal(v, states[1.0, 0][k]) for k, v in states[0.0, 0].items())
    assert any(not torch.equal(v, states[1.0, 1][k]) for k, v in states[0.0, 1].items())


# --- what pseudo-samples are drawn from -------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch):
    """The means and the covariance of each draw."""
    found = []

    def watched(means, covariance, *rest):
        found.append((means.clone(), covariance.clone()))
        return select_seeds_and_targets(means, covariance, *rest)

    monkeypatch.setattr("efcil.learners.pseudo_replay.select_seeds_and_targets", watched)
    return found


def test_pseudo_samples_are_drawn_from_the_means_and_the_pooled_covariance(backend, data, drawn):
    """Read from a run's features by hand: means and scatter move by the map of the trajectory's own shift."""
    seen = []

    def learned(task):
        seen.append((task.labels, task.new().double(), task.old_new_pairs("pseudo") if task.index else None))

    options = {"shift_ridge_rel": 0, "shift_ridge": 0.01, "rank_rule": "none"}
    run(make_learner(backend), data, Watch(each_features=learned), options=options)
    means, scatter, images, wanted = torch.empty(0), 0, 0, []
    for labels, new, pairs in seen:
        if pairs is not None:
            x, y = (features.double() for features in pairs)
            shift = torch.linalg.inv(x.T @ x + 0.01 * torch.eye(x.shape[1], dtype=torch.float64)) @ x.T @ y
            means, scatter = means @ shift, shift.T @ scatter @ shift
        rows = [new[labels == c] for c in labels.unique()]
        means = torch.cat([means, torch.stack([x.mean(0) for x in rows])])
        scatter = scatter + sum((x - x.mean(0)).T @ (x - x.mean(0)) for x in rows)
        images += len(labels)
        wanted.append((means, scatter / images))
    assert [len(means) for means, _ in drawn] == [2, 5]
    for found, want in zip(drawn, wanted, strict=False):
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-8)


FREE = find("pseudo-replay+ldc+ncm")


@pytest.mark.parametrize("order", [("dpcr-plus", "free"), ("free", "dpcr-plus"), ("head", "free", "dpcr-plus")])
def test_the_first_methods_track_decides_where_several_are_compared(backend, data, drawn, order):
    """One that keeps no statistics has no say; one that needs means alone keeps Grams for the covariance."""
    known = {"dpcr-plus": DPCR_PLUS, "free": FREE, "head": find("pseudo-replay+none+head")}
    learner = make_learner(backend)
    trajectory = Trajectory(learner, {name: (known[name], known[name].options()) for name in order})
    first, other = [name for name in order if name != "head"]
    tracks, stream = [], TaskStream(data.train, np.arange(sum(SIZES)), SIZES)

    def each_task(index):
        tracks.append([trajectory.tracks[trajectory.parts[name].tracks[0]].stats for name in (first, other)])

    evaluator = Evaluator(data, stream, backend)
    matrices = {name: AccuracyMatrix(evaluator.totals()) for name in order}
    follow_stream(stream, data, evaluator, trajectory, matrices, Watch(each_task=each_task))
    assert len(drawn) == 2
    for (means, covariance), (own, _) in zip(drawn, tracks, strict=False):
        assert torch.equal(means, own.mean)
        assert torch.equal(covariance, pooled_covariance(own))
    assert not torch.allclose(drawn[1][0], tracks[1][1].mean), "the other's were shifted by another map"


def test_without_a_method_that_keeps_statistics_there_is_nothing_to_draw_from(backend):
    method = find("pseudo-replay+none+head")
    with raises(ConfigError, "statistics", "classifier"):
        trajectory_of(make_learner(backend), method)


@pytest.mark.parametrize("stages", [0, 1])
def test_pseudo_samples_follow_classes_that_are_dropped_or_merged(backend, data, stages):
    """Also where the classifier sees fewer features than are extracted, and so is fitted to another track."""

    def learned(seed):
        learner = make_learner(backend, seed, intermediate_stages=stages)
        trajectory, _ = run(learner, data, options={"use_stages": 0} if stages else None)
        assert len(trajectory.tracks) == 1 + stages
        return learner, trajectory

    def next_draw():
        task = Task(3, sum(SIZES), 0, ImageSet(pixels.images.numpy(), labels.numpy()))
        trajectory.learn_task(TaskData(task, pixels, labels), lambda: given.append(learner.old_stats))
        return given[-1]

    pixels, labels = task_of(data, [0, 1], backend)
    (learner, trajectory), (_, other), given = learned(0), learned(1), []
    before, added = (list(one.tracks.values())[-1].stats for one in (trajectory, other))
    positions = torch.tensor([0, 3, 4])
    trajectory.retain(positions)
    left = next_draw()
    assert left.dim == learner.feature_extractor(learner.backbone).num_features
    assert torch.equal(left.mean, before.mean[positions])
    assert torch.equal(left.covariance(), before.covariance()[positions])
    now = list(trajectory.tracks.values())[-1].stats
    trajectory.merge(other, torch.arange(len(now), len(now) + sum(SIZES)))
    both = next_draw()
    assert torch.equal(both.mean, torch.cat([now.mean, added.mean]))
    n, m = now.count.sum(), added.count.sum()
    want = (n * pooled_covariance(now) + m * pooled_covariance(added)) / (n + m)
    torch.testing.assert_close(pooled_covariance(both), want)


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_it_keeps_what_its_file_says(backend, data):
    learner = make_learner(backend)
    trajectory, _ = run(learner, data)
    dim, plain = learner.backbone.num_features, LwF.state(learner, teacher=False)
    assert learner.state(teacher=False).keys() == plain.keys(), "the learner keeps no statistics of its own"
    kept = {k.split(".")[-1]: v.numel() for k, v in trajectory.state_dict().items() if k.startswith("tracks.")}
    assert kept.pop("classes", 0) in (0, sum(SIZES))
    assert kept.pop("count") == sum(SIZES), "and its column in the classifier: on top, as for all methods"
    assert sum(kept.values()) == sum(SIZES) * (dim * (dim + 1) // 2 + dim + 1)
    assert METHODS["dpcr-plus"].memory_formula == "d(d+1)/2 + d + 1"
    assert not METHODS["dpcr-plus"].exemplars


@pytest.mark.parametrize(("task", "epoch"), [(1, 1), (2, 1), (1, 0), (2, 0)])
def test_a_run_goes_on_as_if_it_had_not_stopped(backend, data, task, epoch):
    options = {"augment": "crop-flip", "feature_distill_weight": 1.0, "pseudo_ratio_shift": 2.0}
    whole, kept = make_learner(backend, **options), {}

    def keep(optimizer, teacher):
        kept["state"] = copy.deepcopy(whole.state(teacher=teacher))
        kept["at"] = TrainState(task, epoch=epoch, optimizer=copied(optimizer))
        kept["trajectory"] = {k: v.clone() for k, v in trajectory.state_dict().items()}

    def each_epoch(report, state):
        if epoch and (report.task, report.epoch) == (task, epoch - 1):
            keep(state.optimizer, True)

    def each_task(index):
        if not epoch and index == task - 1:
            keep({}, False)

    stream = TaskStream(data.train, np.arange(sum(SIZES)), SIZES)
    evaluator = Evaluator(data, stream, backend)
    trajectory = trajectory_of(whole)
    matrix = AccuracyMatrix(evaluator.totals())
    follow_stream(stream, data, evaluator, trajectory, {"it": matrix}, Watch(each_epoch, each_task))
    resumed = make_learner(backend, **options)
    resumed.load_state(kept["state"])
    again, other = run(resumed, data, state=kept["trajectory"], resumed_from=kept["at"])
    for name, value in whole.state(teacher=True).items():
        assert torch.equal(resumed.state(teacher=True)[name], value), name
    for name, value in trajectory.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert other.A_t[-1] == matrix.A_t[-1]


# --- the shift --------------------------------------------------------------------------------------------------------


def test_pairs_are_of_the_tasks_images_and_of_pseudo_images(backend, data, second):
    pixels, labels = task_of(data, [2, 3, 4], backend)
    task = TaskFeatures(1, labels, 0, second, pixels)
    old, new = task.old_new_pairs("pseudo")
    assert len(old) == len(new) == len(labels) + len(second.generated)
    assert torch.equal(old[: len(labels)], task.old())
    assert torch.equal(new[len(labels) :], extract(second.backbone, pixels.with_images(second.generated), backend))
    assert task.old_new_pairs("pseudo")[0] is old, "computed once"
    assert [len(x) for x in task.old_new_pairs("clean")] == [len(labels)] * 2
    none = SimpleNamespace(pseudo_images=lambda: None, backbone=second.backbone, old_backbone=second.old_backbone)
    none.options, none.backend, none.feature_extractor = second.options, backend, lambda backbone: backbone
    none.feature_layout, none.features_of = second.feature_layout, second.features_of
    plain = TaskFeatures(1, labels, 0, none, pixels)
    assert torch.equal(plain.old_new_pairs("pseudo")[0], task.old()), "without pseudo-images those of the task are all"


def test_the_classifier_is_dpcrs_with_another_shift(backend, data):
    """Read from a run's features by hand: statistics move by the map of all images."""
    learner, seen = make_learner(backend), []

    def learned(task):
        seen.append((task.labels, task.new(), task.old_new_pairs("pseudo") if task.index else None))

    options = {"shift_ridge_rel": 0, "shift_ridge": 0.01, "rank_rule": "none"}
    trajectory, _ = run(learner, data, Watch(each_features=learned), options=options)
    grams, means, counts = [], [], []
    for labels, new, pairs in seen:
        if pairs is not None:
            x, y = (features.double() for features in pairs)
            shift = torch.linalg.inv(x.T @ x + 0.01 * torch.eye(x.shape[1], dtype=torch.float64)) @ x.T @ y
            grams, means = [shift.T @ g @ shift for g in grams], [m @ shift for m in means]
        for c in labels.unique():
            rows = new.double()[labels == c]
            grams.append(rows.T @ rows)
            means.append(rows.mean(0))
            counts.append(len(rows))
    total = sum(grams) + 200 * torch.eye(len(grams[0]), dtype=torch.float64)
    weight = torch.linalg.solve(total, torch.stack([n * m for n, m in zip(counts, means, strict=True)], 1))
    torch.testing.assert_close(classifier_of(trajectory).weight, weight / weight.norm(dim=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_the_shift_may_keep_to_the_identity(share, monkeypatch):
    """Its ridge is a share of trace / dim; methods that differ in it share nothing, those that agree share the map."""
    old, labels = draw(80, 6), torch.arange(80) % 2
    new = old @ draw(6, 6, seed=1)
    gram = old.T @ old
    ridge = share * gram.trace() / 6 * torch.eye(6, dtype=torch.float64)
    want = torch.linalg.inv(gram + ridge) @ (old.T @ new + ridge)
    estimates, estimate = [], dual_projection.estimate_shift
    monkeypatch.setattr(dual_projection, "estimate_shift", lambda *given: (estimates.append(1), estimate(*given))[1])
    first, other, again = (
        DualProjection(DPCR_PLUS.options(rank_rule="none", **given))
        for given in ({"shift_ridge_rel": share}, {"shift_ridge_rel": 0}, {"shift_ridge_rel": share, "ridge": 7.0})
    )
    task, before = saved(1, labels, old, new), ClassStats.from_features(old, labels)
    torch.testing.assert_close(first(before, task).mean, before.mean @ want)
    torch.testing.assert_close(other(before, task).mean, before.mean @ torch.linalg.lstsq(old, new).solution)
    assert len(estimates) == 2
    assert torch.equal(again(before, task).mean, first(before, task).mean)
    assert len(estimates) == 2
    assert first.key == again.key != other.key, "the classifier's ridge makes no other shift"


def test_how_much_is_chosen_for_each_task_where_nothing_is_said():
    old, labels = draw(80, 6), torch.arange(80) % 2
    new = old + 0.3 * old @ draw(6, 6, seed=1) + draw(80, 6, seed=2)
    task, before = saved(1, labels, old, new), ClassStats.from_features(old, labels)
    found = DualProjection(DPCR_PLUS.options(rank_rule="none"))(before, task)
    ridge = cross_validated_ridge(*feature_products(old, new), float((new - old).square().sum()), 80)
    want = torch.linalg.inv(old.T @ old + ridge * torch.eye(6).double()) @ (old.T @ new + ridge * torch.eye(6).double())
    torch.testing.assert_close(found.mean, before.mean @ want)
    same = DualProjection(shift_ridge_rel="auto", rank_rule="none", small_task="identity")
    torch.testing.assert_close(same(before, task).mean, found.mean)
    assert not torch.allclose(DualProjection()(before, task).mean, found.mean)


# --- the classes' Gaussians -------------------------------------------------------------------------------------------


def fitted(stats, **options):
    """A classifier that knows these statistics."""
    classifier = RidgeAndGaussian(DPCR_PLUS.options(**options))
    classifier.fit(stats)
    return classifier


def with_moves(stats, *moves):
    """The same statistics, whose classes were shifted so often."""
    return ClassStats(stats.classes, stats.count, stats.mean, stats.parts, torch.tensor(moves))


def knowing(stats, **options):
    """A trajectory of saved features whose only track holds these statistics."""
    trajectory = trajectory_of(None, **options)
    (track,) = trajectory.tracks.values()
    track.stats = stats
    classifier_of(trajectory).fit(stats)
    return trajectory


@pytest.fixture
def three():
    """Statistics of three classes of unlike spread and number in five dimensions, and images to score."""
    rows = [draw(count, 5, seed=c) * spread + c for c, (count, spread) in enumerate([(40, 0.5), (9, 2.0), (25, 1.0)])]
    labels = torch.cat([torch.full((len(x),), c) for c, x in enumerate(rows)])
    return ClassStats.from_features(torch.cat(rows), labels), draw(12, 5, seed=7) + 1, rows


def test_two_heads_are_added_as_their_equation_says(three):
    """Class by class with inverse and determinant, the pooled covariance over images, scores standardized by image."""
    stats, images, rows = three
    centered = torch.cat([x - x.mean(0) for x in rows])
    pooled = centered.T @ centered / len(centered)
    densities = torch.empty(12, 3, dtype=torch.float64)
    for c, x in enumerate(rows):
        own = (x - x.mean(0)).T @ (x - x.mean(0)) / len(x)
        covariance = 0.4 * own + 0.6 * pooled + 0.2 * pooled.trace() / 5 * torch.eye(5, dtype=torch.float64)
        for i, image in enumerate(images):
            away = image - x.mean(0)
            densities[i, c] = -0.5 * away @ torch.linalg.inv(covariance) @ away - 0.5 * torch.logdet(covariance)
    gram = sum(x.T @ x for x in rows) + 3 * torch.eye(5, dtype=torch.float64)
    weight = torch.linalg.inv(gram) @ torch.stack([x.sum(0) for x in rows], 1)
    linear = images @ (weight / weight.norm(dim=0))
    want = sum(
        weight * (s - s.mean(1, keepdim=True)) / s.std(1, correction=0, keepdim=True)
        for weight, s in ((1, linear), (0.7, densities))
    )
    found = fitted(stats, gaussian=0.7, gaussian_shared=0.6, gaussian_ridge=0.2, ridge=3.0).logits(images)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(log_densities(images, stats.mean, gaussian_factors(stats, 0.6, 0.2)), densities)


def test_without_gaussians_it_is_dpcrs_classifier(three):
    stats, images, _ = three
    plain = Ridge()
    plain.load_state_dict({"weight": fitted(stats).weight}, stats)
    assert torch.equal(fitted(stats, gaussian=0.0).logits(images), plain.logits(images))


def test_many_classes_are_factored_in_parts():
    features, labels = draw(200, 4), torch.arange(200) % 40
    stats = ClassStats.from_features(features, labels)
    alone = [gaussian_factors(stats, 0.0, 0.3)[c] for c in (0, 17, 39)]
    unit = 0.3 * pooled_covariance(stats).trace() / 4 * torch.eye(4, dtype=torch.float64)
    for c, factor in zip((0, 17, 39), alone, strict=True):
        own = torch.cov(features[labels == c].T, correction=0)
        torch.testing.assert_close(factor @ factor.T, own + unit)


def test_the_gaussians_follow_the_statistics(three):
    """After classes are dropped or added or a state is taken up, none of those before has a say."""
    stats, images, _ = three
    trajectory = knowing(stats)
    classifier = classifier_of(trajectory)
    classifier.logits(images)
    trajectory.retain(torch.tensor([0, 2]))
    two = stats.select(torch.tensor([0, 2])).relabel(range(2))
    torch.testing.assert_close(classifier.logits(images), fitted(two).logits(images))
    third = knowing(stats.select(torch.tensor([1])).relabel(range(1)))
    trajectory.merge(third, torch.tensor([2]))
    torch.testing.assert_close(classifier.logits(images), fitted(stats).logits(images)[:, [0, 2, 1]])
    trajectory.load_state_dict(knowing(two).state_dict())
    torch.testing.assert_close(classifier.logits(images), fitted(two).logits(images))
    assert set(classifier.state_dict()) == {"weight"}, "they are not stored"


@pytest.mark.parametrize("gaussian", [0.0, 0.5])
def test_classes_that_were_moved_get_a_bonus(three, gaussian):
    """Literally: to each standardized score b for every move."""
    stats, images, _ = three
    stats = with_moves(stats, 2, 0, 1)
    plain, other = (knowing(stats, gaussian=gaussian, moved_bonus=b) for b in (0.0, 0.3))
    scores = plain.logits("it", images)
    if not gaussian:
        scores = (scores - scores.mean(1, keepdim=True)) / scores.std(1, correction=0, keepdim=True)
    wanted = scores + torch.tensor([0.6, 0.0, 0.3])
    torch.testing.assert_close(other.logits("it", images), wanted)
    again = trajectory_of(None, gaussian=gaussian, moved_bonus=0.3)
    again.load_state_dict(other.state_dict())
    torch.testing.assert_close(again.logits("it", images), wanted)


@pytest.mark.parametrize(
    ("method", "moves"),
    [(DPCR_PLUS, [2, 2, 1, 1, 1, 0]), (find("pseudo-replay+none+ridge-gaussian"), [0] * 6)],
)
def test_moves_are_counted(backend, data, method, moves):
    trajectory, _ = run(make_learner(backend), data, method=method)
    assert trajectory.stats("it").moves.tolist() == moves


def test_moves_are_those_of_the_classes_that_are_left(three):
    stats, _, _ = three
    trajectory, other = knowing(with_moves(stats, 5, 2, 3)), knowing(with_moves(stats, 1, 4, 7))
    trajectory.retain(torch.tensor([2, 0]))
    assert trajectory.stats("it").moves.tolist() == [5, 3], "the order of classes stays"
    trajectory.merge(other, torch.tensor([0, 2, 3]))
    assert trajectory.stats("it").moves.tolist() == [1, 3, 4, 7], "of a class in both, those of the fresher one"


def test_a_class_that_comes_again_was_not_moved(three):
    stats, _, _ = three
    trajectory = knowing(with_moves(stats, 1, 4, 0), shift_view="clean", shift_ridge_rel=0.1)
    old, labels = draw(40, 5), torch.arange(40) % 2 * 2 + 1  # classes 1 and 3
    trajectory.update(saved(1, labels, old, old @ draw(5, 5, seed=2)))
    assert trajectory.stats("it").classes.tolist() == [0, 1, 2, 3]
    assert trajectory.stats("it").moves.tolist() == [2, 0, 1, 0]


def test_classes_without_spread_are_distinguished_by_distance():
    """One image of each class, and copies of one: no covariance is known. A single class has a score, and no NaN."""
    points = draw(3, 4)
    stats = ClassStats.from_features(points.repeat(2, 1), torch.arange(3).repeat(2))
    assert torch.equal(gaussian_factors(stats, 0.9, 0.3), torch.eye(4).double().repeat(3, 1, 1))
    assert fitted(stats, gaussian=1000.0).logits(points).argmax(1).tolist() == [0, 1, 2]
    single = fitted(ClassStats.from_features(points, torch.zeros(3, dtype=torch.int64)))
    assert single.logits(points).tolist() == [[0.0]] * 3


# --- options ----------------------------------------------------------------------------------------------------------


def test_preset_and_defaults():
    experiment = resolve(ExperimentSpec(("dpcr-plus",), "cifar100", tasks=10, preset="paper"))
    assert experiment.learner == "pseudo-replay"
    assert experiment.methods["dpcr-plus"][1].shift_view == "pseudo"
    assert experiment.training.pseudo_ratio == 1.0
    assert (experiment.training.later.epochs, experiment.training.distill_weight) == (100, 10)


@pytest.mark.parametrize(("dataset", "rate"), [("cifar100", 0.05), ("tiny-imagenet", 0.001)])
def test_the_tuned_preset_is_what_was_chosen_at_the_papers_budget(dataset, rate):
    """Epochs, rates and batches are the paper's; what a class takes is no more than DPCR's Gram and mean."""
    experiment = resolve(ExperimentSpec(("dpcr-plus",), dataset, tasks=10))
    paper = resolve(ExperimentSpec(("dpcr",), dataset, tasks=10))
    assert (experiment.preset, paper.preset) == ("tuned", "paper")
    for name in (
        "first",
        "later",
        "batch_size",
        "last_batch",
        "augment",
        "stem",
        "backbone",
        "temperature",
        "momentum",
    ):
        assert getattr(experiment.training, name) == getattr(paper.training, name), name
    assert experiment.training.later.lr == rate
    training, options = experiment.training, experiment.methods["dpcr-plus"][1]
    assert (training.pseudo_ratio, training.pseudo_ratio_shift) == (0, 4)
    assert (training.feature_distill_weight, training.distill_weight) == (3, 3)
    assert (training.intermediate_stages, training.flip_tta) == (3, True)
    assert (options.gaussian, options.gaussian_ridge, options.ridge, options.shift_ridge_rel) == (1, 1, 200, "auto")
    dim = MultiStageFeatures(build("resnet18"), training.intermediate_stages, training.flip_tta).num_features
    assert options.gram_storage == "factors"
    assert (options.gram_rank + 1) * dim <= 512 * 513 // 2 + 512 < (options.gram_rank + 2) * dim


def test_the_tuned_preset_is_for_what_was_tuned():
    with raises(ConfigError, "'tuned'", "dpcr", "--preset"):
        resolve(ExperimentSpec(("dpcr",), "cifar100", tasks=10, preset="tuned"))
    with raises(ConfigError, "'tuned'", "cub200", "paper", "released_code"):
        resolve(ExperimentSpec(("dpcr-plus",), "cub200", tasks=5, preset="tuned"))
    assert resolve(ExperimentSpec(("dpcr-plus",), "cub200", tasks=5)).preset == "paper"


@pytest.mark.parametrize(
    ("names", "setting", "named"),
    [
        (("dpcr-plus",), "pseudo_ratio=-1", ("pseudo_ratio=-1",)),
        (("dpcr-plus",), "pseudo_ratio_shift=-1", ("pseudo_ratio_shift=-1",)),
        (("dpcr-plus",), "pseudo_step_size=0", ("pseudo_step_size=0",)),
        (("dpcr-plus",), "pseudo_iterations=0", ("pseudo_iterations=0",)),
        (("dpcr-plus",), "pseudo_noise=-0.5", ("pseudo_noise=-0.5",)),
        (("dpcr",), "shift_view=pseudo", ("shift_view=pseudo", "pseudo-replay", "clean", "augmented")),
        (("sdc", "ldc"), "shift_view=pseudo", ("shift_view=pseudo", "sdc", "ldc")),
        (("adc",), "shift_view=pseudo", ("shift_view='pseudo'", "'clean'", "'augmented'")),
        (("dpcr-plus",), "ridge_view=pseudo", ("ridge_view='pseudo'", "'clean'", "'augmented'")),
        (("dpcr-plus",), "shift_ridge_rel=-0.1", ("shift_ridge_rel=-0.1",)),
        (("dpcr",), "shift_ridge_rel=often", ("shift_ridge_rel='often'", "auto")),
        (("dpcr-plus",), "feature_distill_weight=-1", ("feature_distill_weight=-1",)),
        (("dpcr-plus",), "intermediate_stages=4", ("intermediate_stages=4",)),
        (("dpcr-plus",), "intermediate_stages=-1", ("intermediate_stages=-1",)),
        (("dpcr-plus",), "use_stages=-1", ("use_stages=-1",)),
        (("dpcr-plus:use_stages=3", "dpcr-plus"), "intermediate_stages=2", ("use_stages=3", 2)),
        (("dpcr-plus",), "gaussian=-1", ("gaussian=-1",)),
        (("dpcr-plus",), "gaussian_shared=1.5", ("gaussian_shared=1.5",)),
        (("dpcr-plus",), "gaussian_ridge=0", ("gaussian_ridge=0",)),
        (("dpcr-plus",), "moved_bonus=-1", ("moved_bonus=-1",)),
        (("dpcr",), "pseudo_ratio=1", ("pseudo_ratio", "dpcr", "dpcr-plus")),
        (("dpcr-plus", "dpcr"), "batch_size=64", ("dpcr", "dpcr-plus")),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_learned(names, setting, named):
    with raises(ConfigError, *named):
        resolve(ExperimentSpec(names, "cifar100", tasks=10, overrides=(setting,)))


@pytest.mark.parametrize(("size", "channels", "crop", "part"), [(11, 1, None, None), (16, 1, 12, None), (16, 1, 14, 8)])
def test_other_sizes_and_grey_images(backend, size, channels, crop, part):
    data = blobs(classes=6, size=size, channels=channels)
    learner = make_learner(backend, channels=channels, augment="crop-flip", crop=crop, train_crop=part)
    _, matrix = run(learner, data)
    assert matrix.tasks_done == 3
    assert learner.pseudo_images().shape[1:] == (channels, size, size)


# --- more is read of the backbone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_multi_stage_features_are_pooled_maps_averaged_over_flips(backend, data, stages):
    """By hand: the mean of the last maps, and that of each quarter of the maps before, the latest first; for both."""
    learner = make_learner(backend, intermediate_stages=stages, flip_tta=True)
    backbone = learner.backbone.eval()
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def literal(x):
        maps = backbone.forward_intermediates(x)
        parts = [maps[-1].mean((2, 3))]
        for before in maps[-2 : -2 - stages : -1]:
            side = before.shape[-1] // 2
            rows = [before[:, c, i * side : (i + 1) * side, j * side : (j + 1) * side].mean((1, 2))
                    for c in range(before.shape[1]) for i in (0, 1) for j in (0, 1)]  # fmt: skip
            parts.append(torch.stack(rows, 1))
        return torch.cat(parts, 1)

    with torch.no_grad():
        found = learner.feature_extractor(backbone)(images)
        assert found.shape[1] == learner.feature_extractor(backbone).num_features
        torch.testing.assert_close(found, (literal(images) + literal(images.flip(3))) / 2)
        torch.testing.assert_close(found, learner.feature_extractor(backbone)(images.flip(3)))
        torch.testing.assert_close(
            make_learner(backend, flip_tta=True).feature_extractor(backbone)(images),
            (backbone(images) + backbone(images.flip(3))) / 2,
        )
    assert make_learner(backend).feature_extractor(backbone) is backbone


def test_multi_stage_features_change_the_classifier_and_not_the_backbone(backend, data):
    """Without pseudo-images, whose targets are all extracted features."""
    plain, wide = (
        make_learner(backend, feature_distill_weight=1.0, pseudo_ratio=0.0, intermediate_stages=more) for more in (0, 1)
    )
    (narrow, _), (trajectory, matrix) = run(plain, data), run(wide, data)
    for key, value in plain.backbone.state_dict().items():
        assert torch.equal(value, wide.backbone.state_dict()[key])
    dim = wide.backbone.num_features
    assert wide.old_stats.mean.shape[1] == wide.feature_extractor(wide.backbone).num_features
    torch.testing.assert_close(trajectory.stats("it").mean[-1:, :dim], narrow.stats("it").mean[-1:])
    before = wide.backbone.forward_intermediates(torch.zeros(1, 3, 8, 8))[-2].shape[1]
    assert narrow.stats("it").mean.shape == (sum(SIZES), dim)
    assert trajectory.stats("it").mean.shape == (sum(SIZES), dim + 4 * before)
    assert matrix.tasks_done == len(SIZES)


@pytest.mark.parametrize("stages", [0, 1])
def test_fewer_stages_may_be_used_than_are_extracted(backend, data, stages):
    """One run serves all: used of two stages are as many as another run extracts, but for what images aim at."""
    common = {"feature_distill_weight": 1.0, "pseudo_ratio": 0.0, "flip_tta": True}
    wide, narrow = (make_learner(backend, intermediate_stages=extracted, **common) for extracted in (2, stages))
    (used, _), (wanted, matrix) = run(wide, data, options={"use_stages": stages}), run(narrow, data)
    dim = narrow.feature_extractor(narrow.backbone).num_features
    assert used.stats("it").mean.shape == (sum(SIZES), dim)
    whole = wide.feature_extractor(wide.backbone).num_features
    assert wide.old_stats.mean.shape[1] == whole > dim, "pseudo-samples are drawn from all that is extracted"
    torch.testing.assert_close(used.stats("it").mean, wanted.stats("it").mean)
    torch.testing.assert_close(classifier_of(used).weight, classifier_of(wanted).weight)
    images = torch.randn(
        7, wide.feature_extractor(wide.backbone).num_features, generator=torch.Generator().manual_seed(3)
    )
    torch.testing.assert_close(used.logits("it", images), wanted.logits("it", images[:, :dim]))
    assert matrix.tasks_done == len(SIZES)


@pytest.mark.parametrize("extracted", [0, 2])
def test_methods_that_use_all_stages_share_one_track(backend, data, extracted):
    """The learner draws from the same track, so nothing is kept twice."""
    learner, method = make_learner(backend, intermediate_stages=extracted), METHODS["dpcr-plus"]
    numbers = {"usual": None, "all": extracted, **({"fewer": 1} if extracted else {})}
    methods = {label: (method, method.options(use_stages=stages)) for label, stages in numbers.items()}
    trajectory = Trajectory(learner, methods)
    assert trajectory.parts["all"].tracks == trajectory.parts["usual"].tracks
    assert len(trajectory.tracks) == len(numbers) - 1
    assert len(Trajectory(learner, {"all": methods["all"]}).tracks) == 1
    used, usual = (
        run(make_learner(backend, intermediate_stages=extracted), data, options=options)[0]
        for options in ({"use_stages": extracted}, None)
    )
    assert torch.equal(used.stats("it").mean, usual.stats("it").mean)
    assert torch.equal(classifier_of(used).weight, classifier_of(usual).weight)


def test_pseudo_images_are_used_where_fewer_stages_are(backend, data):
    ways = ({"use_stages": 1}, {"use_stages": 1, "shift_view": "clean"})
    with_pseudo, without = (run(make_learner(backend, intermediate_stages=2), data, options=way)[0] for way in ways)
    assert not torch.allclose(with_pseudo.stats("it").mean[0], without.stats("it").mean[0])


def test_the_last_stage_is_pooled_to_one_vector(backend):
    """A network of three stages has two before it."""
    with raises(ConfigError, "intermediate_stages=3", "resnet32"):
        make_learner(backend, backbone="resnet32", width=4, intermediate_stages=3)
    reading = make_learner(backend, backbone="resnet32", width=4, intermediate_stages=2)
    assert reading.feature_extractor(reading.backbone)(torch.zeros(1, 3, 16, 16)).shape == (1, 16 + 4 * 8 + 4 * 4)


def test_timm_models_have_no_multi_stage_features(backend):
    for name in ("intermediate_stages", "flip_tta"):
        with raises(ConfigError, name, "timm/x"):
            make_learner(backend, backbone="timm/x", width=None, **{name: True})


def test_the_tuned_preset_leaves_out_what_only_resnets_have():
    for backbone, found in (("timm/x", (0, False)), (torch.nn.Flatten(), (0, False)), ("resnet34", (3, True))):
        spec = ExperimentSpec(("dpcr-plus",), "cifar100", tasks=10, preset="tuned", overrides={"backbone": backbone})
        training = resolve(spec).training
        assert (training.intermediate_stages, training.flip_tta) == found
        assert training.feature_distill_weight == 3, "the rest stays"


# --- classes that are cut ---------------------------------------------------------------------------------------------


def test_gaussians_of_classes_that_are_cut_are_those_of_what_is_left():
    """Few rows of a class, the mean one of them: its own covariance alone, next to no ridge, and still a density."""
    features, labels = draw(60, 12), torch.arange(60) % 3
    stats = ClassStats.from_features(features, labels, StorageSpec("factors", rank=4))
    assert stats.numel < ClassStats.from_features(features, labels).numel
    moved = stats.transform(draw(12, 12, seed=1))
    for one in (stats, moved):
        factors = gaussian_factors(one, 0.0, 1e-6)
        ridge = 1e-6 * pooled_covariance(one).trace() / 12 * torch.eye(12).double()
        torch.testing.assert_close(factors @ factors.mT, one.covariance() + ridge, rtol=1e-9, atol=1e-12)
