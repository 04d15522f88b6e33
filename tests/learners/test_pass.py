"""PASS against literal transcriptions of its equations, and what must hold of it."""

import copy

import numpy as np
import pytest
import torch

from batches import loss_of
from efcil.accel.backend import Backend
from efcil.classifiers.learner_head import UnrotatedHead
from efcil.core.metrics import AccuracyMatrix
from efcil.data.dataset import DataSet, ImageSet
from efcil.errors import DataError
from efcil.experiment.specification import ExperimentSpec, resolve
from efcil.learners.pass_ import PASS, PASSOptions, class_spread, rotated
from efcil.methods import METHODS
from efcil.protocol import Evaluator
from efcil.tasks import TaskStream
from efcil.training.image_batches import ImageBatches
from efcil.training.schedule import Schedule
from efcil.training.state import TrainState
from efcil.trajectory import Trajectory
from messages import raises
from problems import TINY, Watch, blobs, copied, follow_stream, stopped_in_the_second_task

SIZES = (2, 3, 1)
SCHEDULE = Schedule(epochs=3, lr=2e-3, milestones=(2,), weight_decay=2e-4)
SMALL = {**TINY, "augment": "none", "first": SCHEDULE, "later": SCHEDULE}
SETTINGS = {"softmax_temperature": 0.3, "fkd_weight": 0.7, "proto_weight": 1.9}


def make_learner(backend, channels=3, seed=0, **options):
    return PASS(PASSOptions(**{**SMALL, **options}), channels, backend, seed)


def run(learner, data, watch=None, sizes=SIZES, state=None):
    """Learn a stream; return the classifier and the accuracies."""
    stream = TaskStream(data.train, np.arange(sum(sizes)), sizes)
    evaluator = Evaluator(data, stream, learner.backend)
    method, matrix = METHODS["pass"], AccuracyMatrix(evaluator.totals())
    trajectory = Trajectory(learner, {"pass": (method, method.options())})
    follow_stream(stream, data, evaluator, trajectory, {"pass": matrix}, watch, state)
    return trajectory.parts["pass"].classifier, matrix


def batch(data, classes, count=5):
    """Normalized images of some classes, and their labels."""
    rows = np.flatnonzero(np.isin(data.train.labels, classes))[:count]
    pixels = ImageBatches(torch.from_numpy(data.train.images[rows]), data.mean, data.std, Backend.choose("cpu"))
    return pixels.normalize(pixels.images), torch.from_numpy(data.train.labels[rows])


@pytest.fixture(scope="module")
def second(backend, data):
    """A learner with other settings in the middle of its second task: two old classes, three new."""
    return stopped_in_the_second_task(make_learner(backend, **SETTINGS), data, run)


def changed(learner, **options):
    """The same learner with other options."""
    other = copy.copy(learner)
    other._modules = dict(learner._modules)  # which a plain copy shares
    other.options = learner.options.model_copy(update=options)
    return other


def drawn_from(learner, seed=5):
    learner.loss_generator.manual_seed(seed)
    return learner


# --- rotations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "channels"), [(8, 3), (5, 1), (6, 4)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_each_image_is_turned_four_times(size, channels, layout):
    images = torch.rand(3, channels, size, size).contiguous(memory_format=layout)
    turned, targets = rotated(images, torch.tensor([4, 0, 7]))
    assert turned.is_contiguous(memory_format=layout)
    found = dict(zip(targets.tolist(), turned, strict=True))
    assert len(found) == 12
    for image, label in zip(images, (4, 0, 7), strict=True):
        for turn in range(4):
            want = np.rot90(image.numpy(), turn, axes=(1, 2))
            assert np.array_equal(found[4 * label + turn].numpy(), want), (label, turn)


def test_images_that_are_not_square_are_refused(backend):
    with raises(DataError, "8 x 6", "crop="):
        rotated(torch.rand(2, 3, 8, 6), torch.tensor([0, 1]))
    wide = blobs()
    parts = [ImageSet(part.images[..., :6].copy(), part.labels) for part in (wide.train, wide.test)]
    with raises(DataError, "8 x 6", "crop="):
        run(make_learner(backend), DataSet("wide", wide.class_names, *parts, mean=wide.mean, std=wide.std))


# --- the loss ---------------------------------------------------------------------------------------------------------


def literal_cross_entropy(logits, targets):
    """-log of the target's share, row by row."""
    losses = [-(row[t] - torch.log(sum(torch.exp(v) for v in row))) for row, t in zip(logits, targets, strict=True)]
    return sum(losses) / len(losses)


def literal_loss(learner, images, labels, draws=0, seed=5):
    """The published step in float64: images stacked beside their rotations, three terms. Returns each of them."""
    o, net, old_net = (
        learner.options,
        *(copy.deepcopy(m).double() for m in (learner.student, learner.teacher)),
    )
    inputs, targets = [], []
    for image, label in zip(images.double(), labels.tolist(), strict=True):
        for turn in range(4):
            inputs.append(torch.from_numpy(np.rot90(image.numpy(), turn, axes=(1, 2)).copy()))
            targets.append(4 * label + turn)
    net.train()
    old_net.eval()
    with torch.no_grad():
        features, before = (n.backbone(torch.stack(inputs)) for n in (net, old_net))
        weight, bias = net.head.weight, net.head.bias
        terms = [literal_cross_entropy((features @ weight.T + bias) / o.softmax_temperature, targets)]
        if draws:
            terms.append(sum((a - b) ** 2 for a, b in zip(features.flatten(), before.flatten(), strict=True)) ** 0.5)
            source = torch.Generator().manual_seed(seed)
            classes = torch.randint(learner.num_old_classes, (draws,), generator=source)
            noise = torch.randn(draws, weight.shape[1], generator=source).double()
            augmented = [
                learner.prototypes[c].double() + learner.radius * n for c, n in zip(classes, noise, strict=True)
            ]
            logits = torch.stack(augmented) @ weight.T + bias
            terms.append(literal_cross_entropy(logits / o.softmax_temperature, [4 * c for c in classes.tolist()]))
    return terms


def close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_the_first_task_is_cross_entropy_over_rotations(backend, data, temperature):
    learner = make_learner(backend, softmax_temperature=temperature)
    learner.before_task(TaskStream(data.train, np.arange(6), SIZES)[0])
    images, labels = batch(data, (0, 1))
    (want,) = literal_loss(learner, images, labels)
    state = learner.loss_generator.get_state()
    close(loss_of(learner.train(), images, labels), want)
    assert torch.equal(learner.loss_generator.get_state(), state), "nothing is drawn yet"


def test_later_tasks_add_the_distance_and_the_prototypes(data, second):
    images, labels = batch(data, (2, 3, 4))
    terms = literal_loss(second, images, labels, draws=second.options.batch_size)
    assert min(terms) > 0.05, "every term is seen"
    weights = (1.0, SETTINGS["fkd_weight"], SETTINGS["proto_weight"])
    close(loss_of(drawn_from(second).train(), images, labels), sum(w * t for w, t in zip(weights, terms, strict=True)))
    for fkd, proto in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)):
        other = drawn_from(changed(second, fkd_weight=fkd, proto_weight=proto))
        close(loss_of(other, images, labels), terms[0] + fkd * terms[1] + proto * terms[2])


def test_the_distance_is_of_the_whole_batch(data, second):
    """Not a mean: a batch twice over is sqrt(2) times as far, in eval mode, where its images do not mix."""
    images, labels = batch(data, (2, 3, 4))
    one, two = (changed(second, fkd_weight=w, proto_weight=0.0) for w in (0.0, 1.0))
    second.student.eval()
    far = [
        loss_of(two, x, y) - loss_of(one, x, y)
        for x, y in ((images, labels), (images.repeat(2, 1, 1, 1), labels.repeat(2)))
    ]
    assert float((far[1] / far[0]).detach()) == pytest.approx(2**0.5, rel=1e-4)


def test_the_loss_draws_from_its_own_noise_alone(data, second):
    images, labels = batch(data, (2, 3, 4))
    second.student.eval()
    before = torch.get_rng_state()
    losses = [float(loss_of(drawn_from(second, seed), images, labels).detach()) for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("old", "new", "times"), [(2, 3, 1), (6, 2, 3), (5, 2, 2), (4, 4, 1)])
def test_how_many_prototypes_a_step_draws(backend, old, new, times):
    for draws, factor in (("batch", 1), ("balanced", times)):
        learner = make_learner(backend, proto_draws=draws)
        learner.head.add_classes(old + new, torch.Generator())
        learner.num_old_classes, learner.prototypes = old, torch.zeros(old, learner.head.weight.shape[1])
        features, targets = learner.augmented()
        assert len(features) == len(targets) == factor * learner.options.batch_size


def test_balanced_draws_are_the_same_loss_of_more_prototypes(data, second):
    images, labels = batch(data, (4,))
    other = changed(second, proto_draws="balanced")
    other.student = copy.deepcopy(second.student)
    other.head.resize_like(
        {k: v[:12] for k, v in second.head.state_dict().items()}
    )  # three classes, of which two are old
    other.head.load_state_dict({k: v[:12] for k, v in second.head.state_dict().items()})
    other.student_features = other.student.backbone
    labels = labels - 2
    terms = literal_loss(other, images, labels, draws=2 * other.options.batch_size)
    weights = (1.0, SETTINGS["fkd_weight"], SETTINGS["proto_weight"])
    close(loss_of(drawn_from(other).train(), images, labels), sum(w * t for w, t in zip(weights, terms, strict=True)))


def test_augmented_prototypes_are_normal_about_theirs(backend):
    """Every old class equally often, unrotated, with the radius as standard deviation in each dimension."""
    learner = make_learner(backend, batch_size=30000)
    learner.num_old_classes, learner.radius = 3, torch.tensor(0.5, dtype=torch.float64)
    learner.prototypes = torch.arange(48.0).view(3, 16)
    features, targets = drawn_from(learner).augmented()
    assert features.dtype == torch.float32
    assert sorted(set(targets.tolist())) == [0, 4, 8]
    assert (torch.bincount(targets // 4) / 30000 - 1 / 3).abs().max() < 0.02
    noise = features - learner.prototypes[targets // 4]
    assert noise.mean(0).abs().max() < 0.02
    covariance = torch.cov(noise.T)
    assert (covariance - 0.25 * torch.eye(16)).abs().max() < 0.01


def test_classification_is_float32_under_autocast(second):
    """A temperature of 0.1 multiplies bfloat16's rounding of logits by ten."""
    narrow = changed(second)
    narrow.backend = Backend.choose("cpu", precision="bf16")
    features, targets = torch.rand(6, second.head.weight.shape[1]), torch.arange(6)
    want = second.classification(features, targets)
    with narrow.backend.autocast():
        got = narrow.classification(features, targets)
    assert torch.equal(got, want)


# --- prototypes and radius --------------------------------------------------------------------------------------------


def literal_protos(features, labels):
    """Mean of each class, and the trace of numpy's covariance by the dimension."""
    means, spreads = [], []
    for c in np.unique(labels):
        vectors = features[labels == c]
        means.append(np.mean(vectors, axis=0))
        spreads.append(np.trace(np.cov(vectors.T)) / vectors.shape[1])
    return np.stack(means), spreads


def test_class_spread_is_its_equation():
    features = torch.randn(40, 7, generator=torch.Generator().manual_seed(0)) + 3
    labels = torch.arange(40) % 3 + 5
    means, spreads = literal_protos(features.double().numpy(), labels.numpy())
    got_means, got_spreads = class_spread(features, labels)
    np.testing.assert_allclose(got_means.numpy(), means, rtol=1e-12)
    np.testing.assert_allclose(got_spreads.numpy(), spreads, rtol=1e-12)
    lonely = class_spread(features, torch.tensor([1] + [0] * 39))[1]
    assert lonely[1] == 0
    assert lonely[0] > 0


@pytest.mark.parametrize("classes", ["first", "all"])
def test_prototypes_stay_and_the_radius_is_the_root_of_the_mean_spread(backend, data, classes):
    learner = make_learner(backend, radius_classes=classes)
    prototypes, spreads, radii, features = [], [], [], {}

    def each_task(task):
        own = np.isin(data.train.labels, np.arange(sum(SIZES))[sum(SIZES[:task]) : sum(SIZES[: task + 1])])
        pixels = ImageBatches(torch.from_numpy(data.train.images[own]), data.mean, data.std, backend)
        with torch.no_grad():
            features[task] = learner.backbone.eval()(pixels.normalize(pixels.images)).double().numpy()
        means, spread = literal_protos(features[task], data.train.labels[own])
        prototypes.append(means)
        spreads.extend(spread)
        radii.append(np.sqrt(np.mean(spreads if classes == "all" else spreads[: SIZES[0]])))
        np.testing.assert_allclose(learner.prototypes.numpy(), np.concatenate(prototypes), rtol=1e-4, atol=1e-6)
        assert float(learner.radius) == pytest.approx(radii[-1], rel=1e-5)

    run(learner, data, Watch(each_task=each_task))
    assert len(radii) == 3
    assert (len({round(r, 6) for r in radii}) == 1) == (classes == "first")


# --- head, classifier, memory -----------------------------------------------------------------------------------------


def test_scores_are_the_rows_of_images_that_are_not_rotated(backend, data):
    learner = make_learner(backend)
    classifier, _ = run(learner, data)
    features = torch.rand(5, learner.head.weight.shape[1])
    head = learner.head
    want = torch.stack([features @ head.weight[4 * c] + head.bias[4 * c] for c in range(6)], 1)
    torch.testing.assert_close(classifier.logits(features), want.detach(), rtol=1e-5, atol=1e-6)
    again = UnrotatedHead()
    again.load_state_dict({k: v.clone() for k, v in classifier.state_dict().items()})
    assert torch.equal(again.logits(features), classifier.logits(features))
    kept = sum(v.numel() for v in classifier.state_dict().values()) + learner.prototypes.numel()
    assert kept == 6 * (5 * features.shape[1] + 4)
    assert METHODS["pass"].memory_formula == "5d + 4"


# --- what learns, what stays ------------------------------------------------------------------------------------------


def test_teacher_and_prototypes_rest_while_all_of_the_student_learns(backend, data):
    learner = make_learner(backend)
    seen = {}

    def each_epoch(report, state):
        kinds, roots = zip(*(name.split(".")[:2] for name in state.optimizer), strict=True)
        assert {"exp_avg", "exp_avg_sq"} < {*kinds}, "Adam"
        assert {*roots} == {"student"}
        if report.task == 1:
            assert not any(p.requires_grad for p in learner.teacher.parameters())
            seen[report.epoch] = copy.deepcopy(learner.state(teacher=True))

    after_first = {}
    watch = Watch(each_epoch, lambda task: after_first.setdefault(task, copy.deepcopy(learner.state(False))))
    run(learner, data, watch)
    one, two = seen[0], seen[1]
    for name, value in after_first[0].items():
        stays = name in ("prototypes", "radius")
        taught = two[name if stays else name.replace("student.", "teacher.")]
        assert torch.equal(taught, value), name  # the teacher is the student after the first task, and stays so
        assert stays or not torch.equal(two[name], one[name]), name
    old_rows = slice(0, 4 * SIZES[0])
    assert not torch.equal(two["student.head.weight"][old_rows], after_first[0]["student.head.weight"])
    assert torch.equal(learner.prototypes[: SIZES[0]], after_first[0]["prototypes"])


# --- taking up a run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "epoch"), [(0, 1), (1, 2), (2, 1)])
def test_a_run_resumed_in_the_middle_is_the_same_to_the_bit(backend, data, task, epoch):
    options = {"augment": "crop-flip", "radius_classes": "all"}
    whole, kept = make_learner(backend, **options), {}

    def each_epoch(report, state):
        if (report.task, report.epoch + 1) == (task, epoch):
            kept["state"] = copied(whole.state(teacher=True))
            kept["optimizer"] = copied(state.optimizer)

    classifier, matrix = run(whole, data, Watch(each_epoch))
    resumed = make_learner(backend, seed=0, **options)
    resumed.load_state(kept["state"])
    again, other = run(resumed, data, state=TrainState(task, epoch=epoch, optimizer=kept["optimizer"]))
    for name, value in whole.state(teacher=True).items():
        assert torch.equal(resumed.state(teacher=True)[name], value), name
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in classifier.state_dict().items())
    assert other.A_t[-1] == matrix.A_t[-1]


# --- problems ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "channels", "crop"), [(11, 1, None), (16, 1, 12), (12, 3, None)])
def test_other_sizes_and_grey_images(backend, size, channels, crop):
    data = blobs(classes=4, size=size, channels=channels)
    learner = make_learner(backend, channels, augment="crop-flip", crop=crop)
    classifier, matrix = run(learner, data, sizes=(2, 2))
    assert classifier.logits(torch.rand(3, 16)).shape == (3, 4)
    assert torch.isfinite(learner.prototypes).all()
    assert matrix.tasks_done == 2


def test_it_learns_and_the_old_classes_are_kept_by_what_pass_adds(backend):
    data, schedule = blobs(per_class=16), Schedule(epochs=8, lr=1e-2, milestones=(6,), weight_decay=2e-4)
    how = {"width": 4, "first": schedule, "later": schedule}
    _, matrix = run(make_learner(backend, **how), data, sizes=(3, 3))
    _, bare = run(make_learner(backend, **how, fkd_weight=0.0, proto_weight=0.0), data, sizes=(3, 3))
    assert matrix.A_t[0] > 90
    assert matrix.A_t[1] > 70, "chance is 17"
    assert matrix.A_t[1] > bare.A_t[1] + 10


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "draws", "classes"), [("paper", "balanced", "all"), ("released_code", "batch", "first")]
)
def test_settings_on_cifar100_are_the_published_ones(preset, draws, classes):
    o = resolve(ExperimentSpec(("pass",), "cifar100", tasks=10, preset=preset)).training
    assert (o.backbone, o.stem, o.batch_size) == ("resnet18", "cifar", 64)
    assert (o.optimizer, o.softmax_temperature, o.fkd_weight, o.proto_weight) == ("adam", 0.1, 10.0, 0.1)
    assert (o.proto_draws, o.radius_classes) == (draws, classes)
    for schedule in (o.first, o.later):
        assert (schedule.epochs, schedule.weight_decay) == (101, 2e-4)
        rates = [schedule.lr_at(epoch) for epoch in (0, 44, 45, 89, 90, 100)]
        assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5])
