"""PODNet against literal transcriptions of its equations, its two stages, and the backbone it looks into."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from batches import loss_of
from efcil.accel.backend import Backend
from efcil.accel.cuda import Cuda
from efcil.classifiers.learner_head import LearnerHead
from efcil.core.metrics import AccuracyMatrix
from efcil.experiment.specification import ExperimentSpec, resolve
from efcil.learners.podnet import PODNet, PODNetOptions, nca, observed, pod_flat, pod_spatial, pooled
from efcil.methods import METHODS
from efcil.models import build
from efcil.models.heads import ProxyHead, head_from_state
from efcil.protocol import Evaluator
from efcil.tasks import TaskStream
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.schedule import Schedule
from efcil.training.state import TrainState
from efcil.trajectory import Trajectory
from problems import TINY, Watch, blobs, draw, follow_stream, gap

SIZES = (2, 3, 1)
SHORT = TINY | {"balance": Schedule(epochs=3, lr=0.02, lr_schedule="cosine", weight_decay=5e-4), "memory": 12}


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def student(backend, channels=3, **options):
    return PODNet(PODNetOptions(**(SHORT | options)), channels, backend, 0)


def learn(learner, data, at_epoch=lambda *a: None, at_end=lambda task: None, sizes=SIZES, state=None):
    stream = TaskStream(data.train, np.arange(len(data.class_names)), sizes)
    evaluator = Evaluator(data, stream, learner.backend)
    method = METHODS["podnet"]
    trajectory = Trajectory(learner, {"podnet": (method, method.options())})
    matrices = {label: AccuracyMatrix(evaluator.totals()) for label in trajectory.parts}
    follow_stream(stream, data, evaluator, trajectory, matrices, Watch(at_epoch, at_end), state)
    return matrices


def copied(state):
    return {name: value.detach().clone() for name, value in state.items()}


# --- the classifier ---------------------------------------------------------------------------------------------------


def literal_head(features, proxies, scale):
    """Class by class, proxy by proxy: similarities weighted with their softmax."""
    rows = []
    for h in features.double():
        row = []
        for own in proxies.double():
            s = [float(p @ h) / math.sqrt(float(p @ p) * float(h @ h)) for p in own]
            row.append(scale * sum(math.exp(x) * x for x in s) / sum(math.exp(x) for x in s))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("proxies", [1, 3, 10])
def test_logits_are_the_softmax_weighted_cosines_of_the_proxies(proxies):
    head = ProxyHead(5, proxies)
    head.add_classes(2, source())
    head.add_classes(3, source(1))
    head.scale.data.fill_(2.5)
    features = draw(7, 5, seed=2).float()
    want = literal_head(features, torch.cat([head.frozen, head.weight]).detach(), 2.5)
    ours = head(features).detach()
    assert ours.shape == (7, 5)
    assert gap(ours.double(), want) < 1e-6


def test_new_proxies_are_uniform_and_start_with_a_scale_of_one():
    head = ProxyHead(16, 10)
    head.add_classes(50, source())
    assert head.weight.shape == (50, 10, 16)
    assert float(head.weight.detach().abs().max()) <= 0.25
    assert float(head.weight.detach().std()) == pytest.approx(0.25 / math.sqrt(3), rel=0.02)
    assert float(head.scale.detach()) == 1


def test_growing_freezes_the_proxies_so_far_and_keeps_the_logits():
    head = ProxyHead(5, 4)
    head.add_classes(2, source())
    features = draw(3, 5).float()
    before, first = head(features), head.weight.detach().clone()
    head.add_classes(3, source(1))
    assert torch.equal(head.frozen, first)
    torch.testing.assert_close(head(features)[:, :2], before)
    head(features).square().sum().backward()
    assert head.frozen.grad is None
    assert not head.frozen.requires_grad
    assert float(head.weight.grad.abs().sum()) > 0
    assert float(head.scale.grad) != 0


@pytest.mark.parametrize("proxies", [1, 4, 10])
def test_a_head_is_restored_from_its_tensors(proxies):
    head = ProxyHead(5, proxies)
    head.add_classes(2, source())
    head.add_classes(1, source(1))
    again = head_from_state(copied(head.state_dict()))
    features = draw(3, 5).float()
    assert isinstance(again, ProxyHead)
    assert torch.equal(again(features), head(features))
    assert not again.frozen.requires_grad
    assert again.weight.requires_grad


# --- the loss ---------------------------------------------------------------------------------------------------------


def literal_nca(similarities, labels, margin=0.6):
    """As the published code goes about it: the margin off every similarity, then the largest one, true class as 0."""
    losses = []
    for s, y in zip(similarities, labels.tolist(), strict=True):
        s = s - margin
        s = s - s.max()
        sum_ = sum(torch.exp(s[i] - (s[i] if i == y else 0.0)) for i in range(len(s)))
        losses.append(-(s[y] - torch.log(sum_)))
    return torch.stack(losses).mean()


def test_nca_and_its_gradient_are_the_published_codes():
    ours = (3 * draw(9, 6)).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    labels = torch.arange(9) % 6
    assert len(set((ours.argmax(1) == labels).tolist())) == 2, "true classes that lead, and others"
    loss, want = nca(ours, labels), literal_nca(theirs, labels)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    loss.backward()
    want.backward()
    assert gap(ours.grad, theirs.grad) < 1e-6


def test_nca_is_cross_entropy_where_the_true_class_leads_and_at_most_log_2_more():
    s = 3 * draw(40, 6).float()
    for row in s.split(1):
        lead, other = row.argmax(1), row.argmin(1)
        assert float(nca(row, lead)) == pytest.approx(float(F.cross_entropy(row, lead)), rel=1e-5)
        more = float(nca(row, other) - F.cross_entropy(row, other))
        assert 0 < more <= math.log(2) + 1e-6


def test_a_single_class_costs_nothing():
    assert float(nca(torch.tensor([[0.3], [-2.0]]), torch.tensor([0, 0]))) == 0


def literal_spatial(student, teacher):
    """Image by image and stage by stage, entry by entry."""
    total = 0.0
    for a, b in zip(student, teacher, strict=True):
        for x, y in zip(a.double(), b.double(), strict=True):
            pair = []
            for maps in (x, y):
                c, h, w = maps.shape
                sums = [sum(float(maps[k, i, j]) ** 2 for j in range(w)) for k in range(c) for i in range(h)]
                sums += [sum(float(maps[k, i, j]) ** 2 for i in range(h)) for k in range(c) for j in range(w)]
                length = math.sqrt(sum(s * s for s in sums))
                pair.append([s / length for s in sums])
            total += math.sqrt(sum((p - q) ** 2 for p, q in zip(*pair, strict=True))) / (len(a) * len(student))
    return total


def test_pod_spatial_is_its_equation():
    shapes = [(4, 2, 6, 5), (4, 3, 3, 2)]
    a = [draw(*shape, seed=i).float() for i, shape in enumerate(shapes)]
    b = [draw(*shape, seed=i + 5).float() for i, shape in enumerate(shapes)]
    ours = pod_spatial([pooled(x) for x in a], [pooled(x) for x in b])
    assert float(ours) == pytest.approx(literal_spatial(a, b), rel=1e-6)
    assert [pooled(x).shape[1] for x in a] == [2 * 11, 3 * 5]


def test_pod_flat_is_the_cosine_embedding_loss():
    a, b = draw(6, 5).float(), draw(6, 5, seed=1).float()
    assert float(pod_flat(a, b)) == pytest.approx(float(F.cosine_embedding_loss(a, b, torch.ones(6))), rel=1e-6)


def test_a_student_that_is_its_teacher_has_no_pull_and_no_nan():
    maps = draw(3, 2, 4, 4).float()
    maps[0] = 0  # and one that sees nothing
    own = maps.clone().requires_grad_()
    loss = pod_spatial([pooled(own)], [pooled(maps)])
    loss.backward()
    assert torch.equal(loss.detach(), torch.zeros(()))
    assert torch.equal(own.grad, torch.zeros_like(own))


def two_tasks(backend, data, **options):
    """A learner that has begun its second task, and the images and labels of all six classes, normalized."""
    learner = student(backend, **options)
    stream = TaskStream(data.train, np.arange(6), (2, 4))
    learner.before_task(stream[0])
    learner.before_task(stream[1])
    pixels = ImageBatches(backend.tensor(data.train.images[:24]), data.mean, data.std, backend)
    return learner, pixels.normalize(pixels.images), backend.tensor(data.train.labels[:24])


def test_the_first_step_of_a_later_task_has_finite_gradients(backend, data):
    learner, images, labels = two_tasks(backend, data)
    learner.eval()  # at rest student and teacher are equal to the bit: every distance is zero
    assert all(map(torch.equal, learner.student_sees(images)[1], learner.teacher_sees(images)[1]))
    for mode in (False, True):
        learner.train(mode)
        learner.zero_grad()
        loss_of(learner, images, labels).backward()
        learning = {name: p.grad for name, p in learner.named_parameters() if p.requires_grad}
        assert all(torch.isfinite(g).all() for g in learning.values())
        assert sum(float(g.abs().sum()) for name, g in learning.items() if "backbone" in name) > 0


def test_the_loss_is_the_sum_of_its_terms(backend, data):
    learner, images, labels = two_tasks(backend, data, spatial_weight=4.0, flat_weight=0.7)
    for p in learner.student.parameters():
        p.data += 0.05 * draw(p.numel(), seed=p.numel()).float().view(p.shape)
    learner.eval()
    with torch.no_grad():
        ours = float(loss_of(learner, images, labels))
        new, before = (c.backbone.forward_intermediates(images) for c in (learner.student, learner.teacher))
        h, old = new[-1].mean((2, 3)), before[-1].mean((2, 3))
        head = learner.head
        logits = literal_head(h, torch.cat([head.frozen, head.weight]), float(head.scale))
        spatial = literal_spatial(new, before)
        flat = float(F.cosine_embedding_loss(h, old, torch.ones(len(h))))
        assert min(spatial, flat) > 1e-3
        want = float(literal_nca(logits, labels)) + math.sqrt(6 / 4) * (4.0 * spatial + 0.7 * flat)
        assert ours == pytest.approx(want, rel=1e-5)
        learner.num_old_classes = 0  # the first task has no teacher
        assert float(loss_of(learner, images, labels)) == pytest.approx(float(literal_nca(logits, labels)), rel=1e-5)


def test_similarities_and_distances_are_float32_under_autocast():
    backbone, head = build("resnet10", width=2, last_relu=False).eval(), ProxyHead(16)
    head.add_classes(3, source())
    images = draw(4, 3, 8, 8).float()
    with torch.autocast("cpu", torch.bfloat16):
        features, maps = observed(backbone, images)
        logits = head(features)
    assert features.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    assert all(m.dtype == torch.float32 for m in maps)
    assert torch.equal(logits, head(features.float())), "not a bit is lost"
    assert all(torch.allclose(m.norm(dim=1), torch.ones(4), atol=1e-6) for m in maps)


# --- two stages -------------------------------------------------------------------------------------------------------


def test_the_second_stage_comes_from_the_second_task_on(backend):
    o = PODNetOptions()
    learner = student(backend, **{k: getattr(o, k) for k in ("first", "later", "balance")})
    assert learner.stages(0) == (o.first,)
    assert learner.stages(1) == (o.later, o.balance)
    assert (o.first.epochs, o.first.lr, o.first.weight_decay) == (160, 0.1, 5e-4)
    assert o.later == o.first
    assert (o.balance.epochs, o.balance.lr, o.balance.weight_decay) == (20, 0.005, 5e-4)
    for schedule in (o.first, o.balance):  # falls along a cosine, as torch's scheduler has it
        optimizer = torch.optim.SGD([torch.zeros(1)], schedule.lr)
        theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, schedule.epochs)
        for epoch in range(schedule.epochs):
            assert schedule.lr_at(epoch) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
            optimizer.step()
            theirs.step()


def test_everything_but_the_old_proxies_learns_in_both_stages(backend, data):
    learner = student(backend)
    seen = []

    def keep(report, state):
        seen.append((report, copied(learner.student.state_dict()), copied(learner.teacher.state_dict())))
        trained = {name.partition(".")[2] for name in state.optimizer}
        assert "student.head.frozen" not in trained
        assert trained == {f"student.{n}" for n, _ in learner.student.named_parameters()} - {"student.head.frozen"}

    learn(learner, data, keep, sizes=(3, 3))
    first, later = [s for s in seen if s[0].task == 0], [s for s in seen if s[0].task == 1]
    assert [s[0].epoch for s in later] == [0, 1, 2, 3, 4]
    assert [round(s[0].lr, 6) for s in later] == [0.02, 0.002, 0.02, 0.015, 0.005]
    learned = first[-1][1]["head.weight"]
    for _, own, teacher in later:
        assert torch.equal(own["head.frozen"], learned), "the old proxies are as the first task left them"
        assert torch.equal(teacher["head.weight"], learned)
        assert all(torch.equal(v, later[0][2][k]) for k, v in teacher.items())
    for before, after in ((0, 1), (2, 3)):
        own, then = later[before][1], later[after][1]
        same = {k for k, v in own.items() if torch.equal(v, then[k])}
        assert same == {"head.frozen"}


def test_the_second_stage_studies_as_many_images_of_every_class(backend, data, monkeypatch):
    learner = student(backend)
    stages_trained = []
    original = PODNet.training_data

    def spy(self, stage, pixels, labels):
        found = original(self, stage, pixels, labels)
        features = extract(self.backbone, pixels, backend) if stage else None
        stages_trained.append((self.num_old_classes, stage, self.exemplars, pixels, labels, features, *found))
        return found

    monkeypatch.setattr(PODNet, "training_data", spy)
    learn(learner, data)
    assert [(old, stage) for old, stage, *_ in stages_trained] == [(0, 0), (2, 0), (2, 1), (5, 0), (5, 1)]
    for old, stage, kept, pixels, labels, features, shown, targets in stages_trained:
        counts = torch.bincount(targets).tolist()
        if stage == 0:
            assert counts == [12 // old if old else 0] * old + [12] * (len(counts) - old)
            continue
        each = 12 // old
        assert counts == [each] * (int(labels.max()) + 1)
        new = targets >= old
        assert torch.equal(shown.images[~new], kept.images)
        for c in labels.unique().tolist():
            mine = (labels == c).nonzero()[:, 0]
            unit = F.normalize(features[mine].double(), dim=1)
            chosen, mean = [], unit.mean(0)
            for k in range(1, each + 1):  # herding: the image that brings the mean of those chosen nearest
                sums = [unit[[*chosen, r]].sum(0) / k for r in range(len(unit))]
                far = [float((mean - s).norm()) if r not in chosen else math.inf for r, s in enumerate(sums)]
                chosen.append(int(np.argmin(far)))
            assert torch.equal(shown.images[targets == c], pixels.images[mine[chosen]])


def test_exemplars_are_shared_by_the_classes_seen_and_the_herded_ones_go(backend, data):
    learner = student(backend)
    kept = []

    def end(task):
        assert learner.herded is None
        assert not [k for k in learner.state(teacher=True) if k.startswith("herded.")]
        kept.append(torch.bincount(learner.exemplars.labels).tolist())

    learn(learner, data, at_end=end)
    assert kept == [[6] * 2, [2] * 5, [2] * 6]


def test_so_many_exemplars_of_each_class_balance_the_second_stage_too(backend, data):
    learner = student(backend, memory_per_class=3)
    counts = []
    learn(
        learner,
        data,
        lambda r, o: counts.append(
            (r.epoch, torch.bincount(learner.herded.labels).tolist() if learner.herded else None)
        ),
        sizes=(4, 2),
    )
    assert counts[-1] == (4, [0] * 4 + [3] * 2)
    assert counts[3] == (0, None)
    assert torch.bincount(learner.exemplars.labels).tolist() == [3] * 6


def test_a_run_resumed_after_any_epoch_is_bitwise_the_same(backend):
    """Also in the middle of the second stage, and between the two: what was herded is not herded again."""
    data, points = blobs(classes=4, per_class=6), []
    straight = student(backend)
    after_first = {}

    def at_epoch(report, state):
        if report.task == 1 and report.epoch + 1 < report.epochs:
            points.append((report.epoch + 1, copied(straight.state(teacher=True)), copied(state.optimizer)))

    def at_end(task):
        after_first.setdefault("state", copied(straight.state(teacher=False)))

    learn(straight, data, at_epoch, at_end, sizes=(2, 2))
    want = straight.state(teacher=True)
    assert [epoch for epoch, *_ in points] == [1, 2, 3, 4]
    assert [any(k.startswith("herded.") for k in state) for _, state, _ in points] == [False, False, True, True]
    for epoch, state, optimizer_state in points:
        again = student(backend)
        again.load_state(after_first["state"])
        again.load_state(state)
        learn(again, data, sizes=(2, 2), state=TrainState(1, epoch=epoch, optimizer=optimizer_state))
        got = again.state(teacher=True)
        assert got.keys() == want.keys()
        assert all(torch.equal(v, got[k]) for k, v in want.items()), epoch


# --- the backbone's maps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "stages", "growth"), [("resnet10", 4, 1), ("resnet32", 3, 1), ("resnet50", 4, 4)])
@pytest.mark.parametrize(("stem", "size"), [("cifar", (12, 20)), ("small", (6, 10))])
def test_maps_of_every_stage_and_features_are_the_mean_of_the_last(name, stages, growth, stem, size):
    backbone = build(name, width=2, channels=1, stem=stem, last_relu=False).eval()
    images = draw(3, 1, 12, 20).float()
    with torch.no_grad():
        maps, features = backbone.forward_intermediates(images), backbone(images)
    assert len(maps) == stages
    for i, found in enumerate(maps):
        assert found.shape == (3, 2 * growth * 2**i, math.ceil(size[0] / 2**i), math.ceil(size[1] / 2**i))
    assert torch.equal(maps[-1].mean((2, 3)), features)
    assert all(float(m.min()) >= 0 for m in maps[:-1]), "only the last one is without its ReLU"
    assert float(maps[-1].min()) < 0 < float(maps[-1].max())
    with_relu = build(name, width=2, channels=1, stem=stem).eval()
    assert all(torch.equal(v, with_relu.state_dict()[k]) for k, v in backbone.state_dict().items())
    with torch.no_grad():
        rectified = with_relu.forward_intermediates(images)
        assert torch.equal(with_relu(images), rectified[-1].mean((2, 3)))
    assert all(map(torch.equal, rectified, [*maps[:-1], maps[-1].relu()]))


def test_looking_at_the_maps_is_one_graph():
    backbone = build("resnet10", width=2, last_relu=False).train()
    compiled = torch.compile(lambda images: observed(backbone, images), backend="eager", fullgraph=True)
    images = draw(2, 3, 8, 8).float()
    for batch in (images, images.flip(0) * 3):
        torch.testing.assert_close(compiled(batch), observed(backbone, batch))


def test_a_compiled_machine_compiles_the_function(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda call, **how: calls.append((call, how)) or call)
    backend, backbone = Cuda(torch.device("cpu"), compile=True), build("resnet10", width=2)

    def function(images):
        return images

    images = torch.zeros(2, 3, 8, 8)
    assert backend.maybe_compile(function)(images) is images
    assert backend.maybe_compile(backbone)(images).shape == (2, backbone.num_features)
    assert [call for call, _ in calls] == [function, backbone.forward]
    assert [how["dynamic"] for _, how in calls] == [False, False]
    assert Backend(torch.device("cpu")).maybe_compile(backbone) is backbone


def test_parameters_are_registered_once(backend):
    learner = student(backend)
    names = [name for name, _ in learner.named_parameters(remove_duplicate=False)]
    owners = {name.split(".")[0] for name in (*names, *learner.state_dict())}
    assert owners == {"student", "teacher", "student_features", "teacher_features"}
    assert {name.split(".")[0] for name, _ in learner.named_parameters()} == {"student", "teacher"}
    assert not learner.student.backbone.get_submodule("layer4.0").last_relu
    assert not learner.teacher.backbone.get_submodule("layer4.0").last_relu


# --- the whole method -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "size"), [(1, 11), (3, 8)])
def test_it_learns(backend, channels, size):
    data = blobs(classes=4, per_class=20, size=size, channels=channels)
    schedule = Schedule(epochs=10, lr=0.1, lr_schedule="cosine", weight_decay=5e-4)
    learner = student(backend, channels, width=4, memory=16, augment="none", first=schedule, later=schedule)
    matrices = learn(learner, data, sizes=(2, 2))
    assert matrices["podnet/cnn"].A_t[-1] > 80, "chance is 25"
    assert matrices["podnet/nme"].A_t[-1] > 80


def test_the_trained_head_answers_and_the_means_stand_beside_it():
    method = METHODS["podnet"]
    assert method.heads["cnn"] is LearnerHead
    assert list(method.heads) == ["cnn", "nme"]
    assert method.heads["nme"] is METHODS["icarl"].heads["nme"]
    assert (method.default_head(method.options()), method.default_head(method.options(head="nme"))) == ("cnn", "nme")
    assert method.exemplars


def test_memory_per_class_is_ten_proxies(backend, data):
    learner = student(backend)
    classifier = LearnerHead()
    learn(learner, data, sizes=(3, 3))
    classifier.fit_learner(SimpleNamespace(learner=learner))
    assert sum(v.numel() for v in classifier.state_dict().values()) == 6 * 10 * learner.backbone.num_features + 1


def test_paper_preset_is_pycils():
    for preset in ("paper", "released_code"):
        t = resolve(ExperimentSpec(("podnet:memory=500",), "cifar100", tasks=10, preset=preset)).training
        assert (t.first, t.later, t.balance) == (PODNetOptions().first, PODNetOptions().later, PODNetOptions().balance)
        assert (t.proxies, t.spatial_weight, t.flat_weight, t.batch_size, t.momentum) == (10, 5, 1, 128, 0.9)
        assert (t.backbone, t.stem, t.memory) == ("resnet18", "cifar", 500)
    assert resolve(ExperimentSpec(("podnet",), "cifar100", tasks=10)).training.memory == 2000


@pytest.mark.parametrize("dataset", ["digits", "glyphs", "folder"])
def test_quick_presets_are_cosines(dataset):
    t = resolve(ExperimentSpec(("podnet",), dataset)).training
    assert {t.first.lr_schedule, t.later.lr_schedule, t.balance.lr_schedule} == {"cosine"}
    assert t.balance.epochs == 5
