"""SDC, LDC and ADC against literal transcriptions of their equations, and what must hold of each."""

import copy
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, normalize

from efcil.config import build
from efcil.core.class_stats import ClassStats
from efcil.core.gram_storage import LowRankGrams
from efcil.core.metrics import AccuracyMatrix
from efcil.errors import ConfigError
from efcil.features import TaskFeatures
from efcil.learners import LEARNERS
from efcil.methods import METHODS
from efcil.protocol import Evaluator
from efcil.randomness import RngStream, generator
from efcil.shift import adc
from efcil.shift.adc import ADCOptions, adversarial_drift
from efcil.shift.ldc import LDCOptions, learned_map
from efcil.shift.sdc import SDCOptions, kernel_drift
from efcil.tasks import TaskStream
from efcil.training import feature_inversion
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.trajectory import Trajectory
from messages import raises
from problems import TINY, Watch, blobs, follow_stream

SIZES = (2, 3, 1)
KINDS = ("sdc", "ldc", "adc")


def following(name, **options):
    """A trajectory of saved features with one of the methods."""
    return Trajectory(None, {name: (METHODS[name], METHODS[name].options(**options))})


def means_of(trajectory):
    """The means that the only classifier goes by."""
    (part,) = trajectory.parts.values()
    return part.classifier.means


def task_of(index, labels, old, new, seed=0):
    """A task whose features are given."""
    return TaskFeatures.from_saved(index, seed, {"labels": labels, "old": old, "new": new}, new.shape[1:])


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def feature_tasks(dim=7):
    """Three tasks of two classes: labels, features before, features after."""
    tasks = []
    for index in range(3):
        labels = torch.arange(40) % 2 + 2 * index
        old = random(6, dim, seed=index)[labels] + 0.3 * random(40, dim, seed=10 + index) + 1
        tasks.append((labels, old, old @ (torch.eye(dim) + 0.1 * random(dim, dim, seed=20 + index)) + 0.2))
    return tasks


# --- SDC --------------------------------------------------------------------------------------------------------------


def literal_sdc(means, old, new, sigma, floor):
    """The drift of each class, image by image."""
    drifts = []
    for mean in means.double():
        weights = []
        for image in old.double():
            weights.append(np.exp(-float(((image - mean) ** 2).sum()) / (2 * sigma**2)) + floor)
        moved = torch.zeros_like(mean)
        for weight, before, after in zip(weights, old.double(), new.double(), strict=True):
            moved += weight / sum(weights) * (after - before)
        drifts.append(moved)
    return torch.stack(drifts)


@pytest.mark.parametrize(("sigma", "floor"), [(0.3, 1e-5), (0.3, 0.0), (2.0, 0.5)])
@pytest.mark.parametrize("count", [12, 60])  # torch measures distances of few and of many points differently
def test_sdc_is_its_equation(sigma, floor, count):
    old, new, means = normalize(random(count, 5)), random(count, 5, seed=1), 0.9 * normalize(random(4, 5, seed=2))
    want = literal_sdc(means, old, new, sigma, floor)
    got = kernel_drift(means, old, new, sigma, floor)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(got, kernel_drift(means, old, new, sigma * 1.1, floor), rtol=1e-3)


@pytest.mark.parametrize("unit", [True, False])
def test_sdc_moves_means_task_after_task(unit):
    tasks = feature_tasks()
    trajectory = following("sdc", sigma=0.5, unit_features=unit)
    means = torch.zeros(0, 7).double()
    for index, (labels, old, new) in enumerate(tasks):
        trajectory.update(task_of(index, labels, old, new))
        before, after = ([normalize(x.double()), x.double()][not unit] for x in (old, new))
        if index:
            means = means + literal_sdc(means, before, after, 0.5, 1e-5)
        means = torch.cat([means, torch.stack([after[labels == c].mean(0) for c in labels.unique()])])
    torch.testing.assert_close(means_of(trajectory), means, rtol=1e-10, atol=1e-10)


def test_sdc_recovers_a_translation():
    old, means, shift = random(30, 5), random(4, 5, seed=2), random(5, seed=3).double()
    got = kernel_drift(means, old.double(), old.double() + shift, 0.3, 1e-5)
    torch.testing.assert_close(got, shift.expand(4, 5), rtol=0, atol=1e-12)
    # The method on raw features, where a translation is one.
    trajectory = following("sdc", unit_features=False)
    trajectory.update(task_of(0, torch.arange(30) % 2, old, old))
    first = means_of(trajectory)
    trajectory.update(task_of(1, torch.arange(30) % 2 + 2, old.double(), old.double() + shift))
    torch.testing.assert_close(means_of(trajectory)[:2], first + shift, rtol=0, atol=1e-12)


def test_sdc_on_far_means_is_never_zero_by_zero():
    old, new = random(20, 5), random(20, 5, seed=1)
    far = 1e5 * random(3, 5, seed=2)
    assert (torch.cdist(far, old).square() > 1e6).all(), "every kernel underflows"
    moves = new.double() - old.double()
    with_floor, without = (kernel_drift(far, old, new, 0.3, floor) for floor in (1e-5, 0.0))
    torch.testing.assert_close(with_floor, moves.mean(0).expand(3, 5))  # what SDC on raw features amounts to
    nearest = torch.cdist(far.double(), old.double()).argmin(1)
    torch.testing.assert_close(without, moves[nearest])


# --- LDC --------------------------------------------------------------------------------------------------------------


def literal_ldc(old, new, epochs, lr, size, source):
    """torch's Adam and autograd on a linear layer without bias, batch by batch."""
    dim = old.shape[1]
    layer = nn.Linear(dim, new.shape[1], bias=False)
    start = torch.empty(dim, new.shape[1]).uniform_(-(dim**-0.5), dim**-0.5, generator=source)
    with torch.no_grad():
        layer.weight.copy_(start.T)
    optimizer = torch.optim.Adam(layer.parameters(), lr=lr)
    for _ in range(epochs):
        order = torch.randperm(len(old), generator=source)
        for begin in range(0, len(old), size):
            rows = order[begin : begin + size]
            (layer.weight.grad,) = torch.autograd.grad(mse_loss(layer(old[rows]), new[rows]), [layer.weight])
            optimizer.step()
    return layer.weight.detach().T


def literal_adam(old, new, epochs, lr, size, source):
    """Adam as it was published, in float64, with the gradient number by number."""
    old, new, dim = old.double(), new.double(), old.shape[1]
    weight = torch.empty(dim, new.shape[1]).uniform_(-(dim**-0.5), dim**-0.5, generator=source).double()
    first, second, step = torch.zeros_like(weight), torch.zeros_like(weight), 0
    for _ in range(epochs):
        for rows in torch.randperm(len(old), generator=source).split(size):
            gradient = torch.zeros_like(weight)
            for i in rows.tolist():
                gradient += torch.outer(old[i], old[i] @ weight - new[i]) * 2 / (len(rows) * new.shape[1])
            step += 1
            first = 0.9 * first + 0.1 * gradient
            second = 0.999 * second + 0.001 * gradient**2
            weight = weight - lr * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    return weight


@pytest.mark.parametrize("scale", [1.0, 1e-4])  # gradients that Adam's 1e-8 can be seen beside: their scale counts
@pytest.mark.parametrize("size", [50, 16, 64])  # the last batch is full, is not, or is the only one
def test_ldc_is_adam_on_the_mean_square(size, scale):
    old, new = scale * random(50, 6), scale * random(50, 6, seed=1)
    options = LDCOptions(map_epochs=3, map_lr=0.01, map_batch_size=size)
    got, literal, published = (
        f(old, new, *how, generator("cpu", RngStream.SHIFT, 5, 2))
        for f, how in ((learned_map, (options,)), (literal_ldc, (3, 0.01, size)), (literal_adam, (3, 0.01, size)))
    )
    torch.testing.assert_close(got, literal, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.double(), published, rtol=1e-6, atol=1e-6)


def test_ldc_starts_as_torch_starts_a_linear_layer():
    weight = learned_map(
        random(2, 64), random(2, 64), LDCOptions(map_epochs=1, map_lr=1e-12), torch.Generator().manual_seed(0)
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        usual = nn.Linear(64, 64, bias=False).weight.detach()
    assert 0.99 * 64**-0.5 < weight.abs().max() <= 64**-0.5
    assert abs(float(weight.std() / usual.std()) - 1) < 0.05


def test_ldc_moves_means_task_after_task():
    tasks = feature_tasks()
    trajectory = following("ldc", map_epochs=2, map_lr=0.05, map_batch_size=16)
    means = torch.zeros(0, 7).double()
    for index, (labels, old, new) in enumerate(tasks):
        trajectory.update(task_of(index, labels, old, new, seed=4))
        if index:
            source = generator("cpu", RngStream.SHIFT, 4, index)
            means = means @ literal_ldc(old, new, 2, 0.05, 16, source).double()
        means = torch.cat([means, torch.stack([new[labels == c].double().mean(0) for c in labels.unique()])])
    torch.testing.assert_close(means_of(trajectory), means, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moves", [True, False])
def test_ldc_recovers_a_linear_map(moves):
    old = random(300, 6)
    linear = random(6, 6, seed=1) if moves else torch.eye(6)
    probe = random(5, 6, seed=2)
    weights = [
        learned_map(old, old @ linear, LDCOptions(map_lr=0.02, map_epochs=epochs, map_batch_size=64), torch.Generator())
        for epochs in (1, 120)
    ]
    errors = [float((probe @ weight - probe @ linear).abs().max()) for weight in weights]
    assert errors[1] < 1e-3 < errors[0]


def test_ldc_is_a_function_of_seed_and_task():
    tasks = feature_tasks()

    def moved(seed, index):
        trajectory = following("ldc", map_epochs=1)
        trajectory.update(task_of(0, *tasks[0]))
        trajectory.update(task_of(index, *tasks[1], seed=seed))
        return means_of(trajectory)[:2]

    assert torch.equal(moved(0, 1), moved(0, 1))
    assert not torch.equal(moved(0, 1), moved(1, 1))
    assert not torch.equal(moved(0, 1), moved(0, 2))


# --- ADC --------------------------------------------------------------------------------------------------------------


class Conv(nn.Module):
    """A small backbone with everything that must be in eval mode."""

    dim = 5

    def __init__(self, seed, offset=0.0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Conv2d(2, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 2))
            self.body[1].running_mean.normal_()
        self.offset = offset

    def forward(self, x):
        return self.body(x).mean((2, 3)) + self.offset


def image_task(backend, old, new, crop=None, count=30, size=8):
    images = np.random.default_rng(0).integers(20, 230, (count, 2, size, size)).astype(np.uint8)
    pixels = ImageBatches(torch.from_numpy(images), (0.5, 0.4), (0.25, 0.2), backend)
    options = SimpleNamespace(crop=crop)
    there = SimpleNamespace(backbone=new, old_backbone=old, options=options, backend=backend, feature_layout=(5,))
    there.feature_extractor = lambda backbone: backbone
    there.features_of = lambda backbone, seen, crop: extract(backbone, seen, backend, crop)
    return TaskFeatures(1, torch.arange(count) % 2 + 4, 0, there, pixels)  # after four old classes


def old_means(task, classes=4, spread=1.0):
    """Means between which the old features of the task lie."""
    features = task.old().double()
    return features.mean(0) + spread * features.std(0) * random(classes, features.shape[1], seed=9).double()


def literal_adc(means, images, old, new, step, iterations, samples):
    """Class by class; `images` are normalized. Returns the drifts and how many images were kept of each class."""
    old, new = copy.deepcopy(old).eval(), copy.deepcopy(new).eval()
    low, high = images.min(), images.max()
    drifts, kept = [], []
    for c, mean in enumerate(means.float()):
        with torch.no_grad():
            distances = [float((row - mean).norm()) for row in old(images)]
        chosen = sorted(range(len(images)), key=distances.__getitem__)[:samples]
        x = images[chosen]
        for _ in range(iterations):
            x = x.detach().requires_grad_()
            loss = mse_loss(old(x), mean.expand(len(x), -1))
            (gradient,) = torch.autograd.grad(loss, x)
            x = (x - step * gradient / gradient.norm()).clamp(low, high)
        with torch.no_grad():
            moves = []
            for before, after in zip(old(x), new(x), strict=True):
                distances = [float((before - other.float()).norm()) for other in means]
                if distances.index(min(distances)) == c:
                    moves.append(after - before)
            kept.append(len(moves))
            if not moves:
                moves = list(new(images[chosen]) - old(images[chosen]))
        drifts.append(torch.stack(moves).mean(0))
    return torch.stack(drifts).double(), kept


@pytest.mark.parametrize(("step", "iterations", "samples"), [(4.0, 3, 10), (25.0, 2, 6), (2.0, 1, 100)])
def test_adc_is_its_equation(backend, step, iterations, samples):
    task = image_task(backend, Conv(0).train(), Conv(1).train())
    means = old_means(task)
    task.new()  # features are there already where several methods are compared: whether the backbone is frozen is open
    pixels = task.pixels()
    normalized = pixels.normalize(pixels.images)
    r = task.learner
    want, kept = literal_adc(means, normalized, r.old_backbone, r.backbone, step, iterations, samples)
    assert any(0 < k < min(samples, 30) for k in kept), "the filter has something to do"
    r.old_backbone.train()
    r.backbone.train()
    buffers = {k: v.clone() for k, v in r.backbone.state_dict().items()}
    options = ADCOptions(step=step, iterations=iterations, samples=samples)
    with torch.no_grad():  # whoever calls may have switched gradients off
        got = adversarial_drift(means, task, options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(v, buffers[k]) for k, v in r.backbone.state_dict().items())
    assert all(p.grad is None for b in (r.backbone, r.old_backbone) for p in b.parameters())


def test_adc_without_a_hit_takes_the_nearest_images_as_they_are(backend):
    task = image_task(backend, Conv(0), Conv(1))
    means = old_means(task, classes=3)
    means[2] = means[0]  # the first of equal means is the nearest
    drift = adversarial_drift(means, task, ADCOptions(step=4.0, samples=8))
    chosen = torch.cdist(means[2:], task.old().double())[0].argsort()[:8]
    want = (task.new() - task.old())[chosen].double().mean(0)
    torch.testing.assert_close(drift[2], want)
    assert not torch.allclose(drift[0], want, rtol=1e-2)


def test_adc_recovers_a_translation_and_rest(backend):
    shift = random(5, seed=3)
    moved = adversarial_drift(old_means(t := image_task(backend, Conv(0), Conv(0, shift))), t, ADCOptions(samples=8))
    torch.testing.assert_close(moved, shift.double().expand(4, 5), rtol=1e-5, atol=1e-6)
    still = adversarial_drift(old_means(t := image_task(backend, Conv(0), Conv(0))), t, ADCOptions(samples=8))
    assert torch.equal(still, torch.zeros(4, 5).double())


def test_adc_adds_the_drift_to_the_means(backend):
    shift = random(5, seed=3)
    task = image_task(backend, Conv(0), Conv(0, shift))
    trajectory = following("adc", samples=8)
    before = old_means(task)
    (track,) = trajectory.tracks.values()
    track.stats = ClassStats(torch.arange(4), torch.ones(4), before, LowRankGrams.zero(4, before))
    trajectory.update(task)
    torch.testing.assert_close(means_of(trajectory)[:4], before + shift.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(means_of(trajectory)[4:], task.stats().mean)


def test_adc_in_small_pieces_is_the_same(backend, monkeypatch):
    task = image_task(backend, Conv(0), Conv(1))
    means, options = old_means(task, classes=5), ADCOptions(step=4.0, samples=10)
    whole = adversarial_drift(means, task, options)
    seen = []
    task.learner.old_backbone.register_forward_hook(lambda module, given, out: seen.append(len(out)))
    monkeypatch.setattr(adc, "GROUP_NUMBERS", 2 * 10 * 2 * 8 * 8)  # two classes at once
    monkeypatch.setattr(feature_inversion, "BATCH_NUMEL", 7 * 2 * 8 * 8)  # seven images at once
    pieces = adversarial_drift(means, task, options)
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-6)
    assert max(seen) == 7


def test_adc_changes_the_center_crop_of_clean_images(backend):
    whole = image_task(backend, Conv(0), Conv(1), crop=6)
    cut = image_task(backend, Conv(0), Conv(1))
    cut._pixels["clean"] = cut.pixels().with_images(cut.pixels().images[:, :, 1:7, 1:7].contiguous())
    means, options = old_means(cut), ADCOptions(step=4.0, samples=10)
    torch.testing.assert_close(adversarial_drift(means, whole, options), adversarial_drift(means, cut, options))


def test_adc_survives_a_backbone_without_gradient(backend):
    old = Conv(0)
    nn.init.zeros_(old.body[0].weight)
    drift = adversarial_drift(random(3, 5), image_task(backend, old, Conv(1)), ADCOptions(samples=8))
    assert torch.isfinite(drift).all()


# --- all three --------------------------------------------------------------------------------------------------------


def learned(backend, data, at_end=lambda task: None, view="clean"):
    """The three on one LwF trajectory, and their means after each task."""
    kind = LEARNERS["lwf"]
    learner = kind(kind.options_type(**TINY), data.channels, backend, 0)
    stream = TaskStream(data.train, np.arange(len(data.class_names)), SIZES)
    evaluator = Evaluator(data, stream, backend)
    trajectory = Trajectory(learner, {name: (METHODS[name], METHODS[name].options(shift_view=view)) for name in KINDS})
    matrices = {name: AccuracyMatrix(evaluator.totals()) for name in KINDS}
    means = []

    def after_task(task):
        means.append({name: part.classifier.means.clone() for name, part in trajectory.parts.items()})
        at_end(task)

    follow_stream(stream, data, evaluator, trajectory, matrices, Watch(each_task=after_task))
    return trajectory, means


@pytest.fixture(scope="module")
def run(backend):
    return learned(backend, blobs(seed=3))


@pytest.mark.parametrize("name", KINDS)
def test_old_means_move_and_new_ones_are_added(run, name):
    trajectory, means = run
    assert [len(m[name]) for m in means] == [2, 5, 6]
    for before, after in itertools.pairwise(means):
        old = after[name][: len(before[name])]
        assert torch.isfinite(after[name]).all()
        assert not torch.equal(old, before[name])
    (key,) = trajectory.parts[name].tracks
    assert trajectory.tracks[key].stats.moves.tolist() == [2, 2, 1, 1, 1, 0]
    scores = trajectory.logits(name, torch.rand(4, 16))
    assert scores.shape == (4, 6)
    assert (scores.abs() <= 1 + 1e-9).all()


def test_again_is_bitwise_equal_without_the_old_images(backend, run):
    """After each task its pixels are poisoned: nothing that is learned later may change."""
    poisoned = blobs(seed=3)

    def poison(task):
        poisoned.train.images[poisoned.train.labels < sum(SIZES[: task + 1])] = task

    _, means = learned(backend, poisoned, poison)
    for got, want in zip(means, run[1], strict=True):
        assert all(torch.equal(got[name], want[name]) for name in KINDS)


def test_augmented_images_are_an_option_of_the_shift_alone(backend, run):
    _, means = learned(backend, blobs(seed=3), view="augmented")
    for name in KINDS:
        assert not torch.equal(means[1][name][:2], run[1][1][name][:2]), name
        assert torch.equal(means[1][name][2:], run[1][1][name][2:]), name


@pytest.mark.parametrize("name", KINDS)
def test_state_round_trip(run, name):
    kept = run[0]
    (key,) = kept.parts[name].tracks
    state = kept.tracks[key].stats.state()
    floats = [value for value in state.values() if value.is_floating_point()]
    assert sum(value.numel() for value in floats) == 6 * 16, "dim numbers per class"
    assert METHODS[name].memory_formula == "d"
    whole = {key: value.clone() for key, value in kept.state_dict().items()}
    again = Trajectory(None, {label: (part.method, part.method.options()) for label, part in kept.parts.items()})
    again.load_state_dict(whole)
    probe = torch.rand(5, 16)
    assert torch.equal(again.logits(name, probe), kept.logits(name, probe))
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in whole.items())


@pytest.mark.parametrize("name", ["sdc", "ldc"])
def test_old_and_new_features_are_of_the_same_view(name):
    """Augmented features in the place of the clean ones give the same shift, whatever the clean ones are."""
    first, (labels, old, new), _ = feature_tasks()
    other = task_of(1, labels, random(40, 7, seed=6), random(40, 7, seed=5))
    other._cache |= {("old", "augmented"): old, ("new", "augmented"): new}
    means = []
    for view, task in (("clean", task_of(1, labels, old, new)), ("augmented", other)):
        trajectory = following(name, shift_view=view)
        trajectory.update(task_of(0, *first))
        trajectory.update(task)
        means.append(means_of(trajectory))
    assert torch.equal(means[0][:2], means[1][:2])
    assert not torch.allclose(means[0][2:], means[1][2:], rtol=1e-2)


@pytest.mark.parametrize("name", ["sdc", "ldc"])
def test_a_state_goes_on_as_if_never_stopped(name):
    through, stopped = following(name), following(name)
    for index, task in enumerate(feature_tasks()):
        through.update(task_of(index, *task))
        stopped.update(task_of(index, *task))
        state, stopped = stopped.state_dict(), following(name)
        stopped.load_state_dict(state)
    assert torch.equal(means_of(through), means_of(stopped))


def test_features_that_do_not_change_leave_the_means_of_sdc_alone():
    (labels, old, _), *_ = feature_tasks()
    trajectory = following("sdc")
    trajectory.update(task_of(0, labels, old, old))
    before = means_of(trajectory)
    trajectory.update(task_of(1, labels + 2, old, old))
    assert torch.equal(means_of(trajectory)[:2], before)


@pytest.mark.parametrize("name", KINDS)
def test_a_backbone_that_did_not_learn_shifts_nothing(name):
    """A model that is kept leaves its backbone alone where a call brings no new class: there is no old one then."""
    (labels, old, new), *_ = feature_tasks()
    trajectory = following(name)
    trajectory.update(task_of(0, labels, old, new))
    before = means_of(trajectory)
    again = TaskFeatures.from_saved(1, 0, {"labels": labels + 2, "new": new}, new.shape[1:])
    again.backbone_unchanged = True
    trajectory.update(again)
    assert torch.equal(means_of(trajectory), torch.cat([before, before]))


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        (SDCOptions, {"sigma": 0}),
        (SDCOptions, {"floor": -1}),
        (LDCOptions, {"map_lr": 0}),
        (LDCOptions, {"map_epochs": 0}),
        (LDCOptions, {"map_batch_size": 0}),
        (ADCOptions, {"step": 0}),
        (ADCOptions, {"iterations": 0}),
        (ADCOptions, {"samples": 0}),
    ],
)
def test_impossible_options_are_refused(options, setting):
    ((key, value),) = setting.items()
    with raises(ConfigError, f"{key}={value}"):
        build(options, setting, "method")


def test_defaults_are_the_papers():
    assert SDCOptions().model_dump() == {"sigma": 0.3, "floor": 1e-5, "unit_features": True, "shift_view": "clean"}
    assert LDCOptions().model_dump() == {
        "map_lr": 0.001,
        "map_epochs": 20,
        "map_batch_size": 128,
        "shift_view": "clean",
    }
    assert ADCOptions().model_dump() == {"step": 25.0, "iterations": 3, "samples": 100, "shift_view": "clean"}
