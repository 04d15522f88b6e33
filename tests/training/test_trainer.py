"""The loop, its batches, its losses: against literal transcriptions, and bit for bit against itself."""

import contextlib
import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from batches import loss_of
from efcil import models
from efcil.accel import captured_step, cuda, folded_resnet, prefetch
from efcil.accel.backend import Backend
from efcil.accel.cuda import Cuda
from efcil.accel.fused_resnet import FusedResNet
from efcil.accel.optim import SGD
from efcil.data import augment
from efcil.errors import CheckpointError, ConfigError, TrainingError
from efcil.features import TaskFeatures
from efcil.learners import LEARNERS
from efcil.learners.rehearsal import Rehearsal
from efcil.losses import distillation, new_class_loss
from efcil.models.heads import CosineHead
from efcil.randomness import RngStream, generator
from efcil.tasks import TaskStream
from efcil.training import extraction, loader
from efcil.training.image_batches import ImageBatches
from efcil.training.loader import batch_slices, epoch_batches, several_epochs, shuffle
from efcil.training.memory import memory_guard
from efcil.training.schedule import Schedule
from efcil.training.state import TrainState
from efcil.training.step import Optimizer, Step
from efcil.training.trainer import TrainingInterrupted
from messages import raises
from problems import TINY, Watch, blobs, copied, fit_task


def make_learner(name="lwf", seed=0, backend=None, **options):
    kind = LEARNERS[name] if isinstance(name, str) else name
    return kind(kind.options_type(**{**TINY, **options}), 3, backend or Backend.choose("cpu"), seed)


def stream(data, sizes=(2, 2, 2)):
    return TaskStream(data.train, np.arange(sum(sizes)), sizes)


def shown(task, data, backend):
    """Images and labels of a task, as the loop gets them."""
    pixels = ImageBatches(backend.tensor(task.images), data.mean, data.std, backend)
    return pixels, backend.tensor(task.labels)


def fit(learner, task, data, each_epoch=lambda report, state: None, *, schedule=None, state=None):
    """Train on a task; `schedule` stands in for the learner's own."""
    if schedule is not None:
        learner.stages = lambda task: (schedule,)
    images, labels = shown(task, data, learner.backend)
    fit_task(learner, task, images, labels, learner.transform(data.size), Watch(each_epoch), state)


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "sizes"), [("keep", [4, 4, 2]), ("drop", [4, 4]), ("wrap", [4, 4, 4])])
def test_last_batch(last, sizes):
    order = shuffle(10, 4, last, torch.Generator().manual_seed(0))
    cuts = list(batch_slices(len(order), 4, last))
    assert [c.stop - c.start for c in cuts] == sizes
    rows = torch.cat([order[c] for c in cuts]).tolist()
    assert len(set(rows)) == (8 if last == "drop" else 10)
    if last == "wrap":
        assert rows[10:] == rows[:2]


def test_fewer_images_than_a_batch():
    images = torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 1, 2, 2).contiguous()
    labels = torch.arange(3)
    for last in ("wrap", "keep", "drop"):
        got = list(epoch_batches(images, labels, None, 128, last, torch.Generator().manual_seed(1)))
        assert len(got) == 1
        assert sorted(got[0][1].tolist()) == [0, 1, 2]
        assert torch.equal(got[0][0][:, 0, 0, 0].long(), got[0][1]), "images and labels must stay together"


def test_chunks_do_not_change_an_epoch(monkeypatch, data):
    images, labels = torch.from_numpy(data.train.images), torch.from_numpy(data.train.labels)
    transform = augment.make_transform("cifar-autoaugment", 8)

    def epoch(chunk):
        monkeypatch.setattr(loader, "CHUNK_BYTES", {"cpu": chunk})
        parts = list(epoch_batches(images, labels, transform, 8, "wrap", torch.Generator().manual_seed(3)))
        return torch.cat([p for p, _ in parts]), torch.cat([t for _, t in parts])

    whole, parts = epoch(2**30), epoch(1)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


@pytest.mark.parametrize("last", ["wrap", "keep", "drop"])
def test_several_epochs_at_once_are_the_same_epochs(data, last):
    images, labels = torch.from_numpy(data.train.images), torch.from_numpy(data.train.labels)
    transform = augment.make_transform("cifar-autoaugment", 8)

    def source(epoch):
        return generator("cpu", RngStream.EPOCH, 0, 0, epoch)

    together = several_epochs(images, labels, transform, 20, last, [source(e) for e in range(3)])
    assert len(together) == 3
    for epoch, got in enumerate(together):
        alone = list(epoch_batches(images, labels, transform, 20, last, source(epoch)))
        assert len(got) == len(alone)
        for (x, y), (u, v) in zip(got, alone, strict=True):
            assert torch.equal(x, u)
            assert torch.equal(y, v)


def test_normalize_is_the_formula(backend):
    images = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    mean, std = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    got = ImageBatches(images, mean, std, backend).normalize(images)
    want = (images.double() / 255 - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    assert torch.allclose(got.double(), want.double(), atol=1e-6)


def test_randomness_is_a_function_of_where():
    draws = {
        where: torch.rand(4, generator=generator("cpu", *where)).tolist()
        for where in itertools.product(RngStream, (0, 1), (0, 1), (0, 7))
    }
    assert len({tuple(d) for d in draws.values()}) == len(draws), "two places share their randomness"
    again = torch.rand(4, generator=generator("cpu", RngStream.EPOCH, 0, 1, 7)).tolist()
    assert again == draws[(RngStream.EPOCH, 0, 1, 7)]


# --- losses -----------------------------------------------------------------------------------------------------------


def literal_lwf_loss(x, y, student, teacher, old, weight, temperature):
    """Eq. 1 and 2 with loops: cross-entropy over new logits, soft cross-entropy over old ones, batch means."""

    def logits(classifier):
        f = classifier.backbone(x)
        w = classifier.head.weight
        return torch.stack(
            [torch.stack([classifier.head.scale * (fi @ wc) / (fi.norm() * wc.norm()) for wc in w]) for fi in f]
        )

    new, before = logits(student), logits(teacher)
    total = 0.0
    for i in range(len(x)):
        shifted = new[i, old:]
        total = total - shifted[y[i] - old] + torch.log(torch.exp(shifted).sum())
        p = torch.exp(before[i] / temperature) / torch.exp(before[i] / temperature).sum()
        q = torch.exp(new[i, :old] / temperature) / torch.exp(new[i, :old] / temperature).sum()
        total = total - weight * (p * torch.log(q)).sum()
    return total / len(x)


def test_lwf_loss_is_equations_1_and_2(data):
    learner = make_learner(distill_weight=7.0, temperature=3.0)
    tasks = stream(data)
    fit(learner, tasks[0], data)
    learner.before_task(tasks[1])
    learner.eval()  # batch statistics would make images depend on each other; both sides use the same mode
    with torch.no_grad():  # the student must differ from its teacher, or distillation is trivial
        for parameter in learner.student.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    x = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    y = torch.tensor([2, 3, 2, 2, 3, 3])
    want = literal_lwf_loss(x, y, learner.student, learner.teacher, 2, 7.0, 3.0)
    assert torch.allclose(loss_of(learner, x, y), want, rtol=1e-4)


def test_first_task_has_no_distillation(data):
    lwf, plain = make_learner("lwf"), make_learner("finetune")
    x, y = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 1, 0])
    for learner in (lwf, plain):
        learner.before_task(stream(data)[0])
        learner.eval()
    assert torch.equal(loss_of(lwf, x, y), loss_of(plain, x, y))


def test_distillation_has_no_temperature_squared():
    a, b = torch.randn(5, 4), torch.randn(5, 4)
    want = functional.cross_entropy(a / 2, functional.softmax(b / 2, 1))
    assert torch.allclose(distillation(a, b, 2.0), want)


def test_a_task_of_one_class_teaches_nothing():
    """Cross-entropy over one class is zero: what moves the backbone in such a task is noise, and nothing is learned."""
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = new_class_loss(logits, torch.full((5,), 3), 3)
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


def test_only_new_logits_enter_the_cross_entropy(data):
    learner = make_learner("finetune")
    tasks = stream(data)
    learner.before_task(tasks[0])
    learner.before_task(tasks[1])
    loss_of(learner, torch.rand(4, 3, 8, 8), torch.tensor([2, 3, 3, 2])).backward()
    gradient = learner.head.weight.grad
    assert torch.equal(gradient[:2], torch.zeros_like(gradient[:2]))
    assert (gradient[2:] != 0).any()


def test_head_is_cosine_with_scale_one_and_grows():
    head = CosineHead(5)
    source = torch.Generator().manual_seed(0)
    head.add_classes(3, source)
    kept = head.weight.detach().clone()
    assert head.scale.item() == 1.0
    assert kept.abs().max() <= 5**-0.5
    head.add_classes(2, source)
    assert torch.equal(head.weight[:3], kept)
    x = torch.randn(4, 5)
    want = functional.cosine_similarity(x[:, None], head.weight[None], dim=2)
    assert torch.allclose(head(x), want, atol=1e-6)
    assert torch.allclose(head(3 * x), head(x), atol=1e-6)


def test_joint_sees_everything_and_starts_anew(data):
    joint = make_learner("joint")
    fresh = {k: v.clone() for k, v in joint.student.backbone.state_dict().items()}
    tasks = stream(data)
    fit(joint, tasks.upto(0), data)
    assert any(not torch.equal(v, fresh[k]) for k, v in joint.student.backbone.state_dict().items())
    joint.before_task(tasks.upto(1))
    assert all(torch.equal(v, fresh[k]) for k, v in joint.student.backbone.state_dict().items())
    assert joint.head.weight.shape == (4, joint.backbone.num_features)
    loss_of(joint, torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])).backward()
    assert (joint.head.weight.grad.abs().sum(1) > 0).all(), "every class seen must be learned from"
    assert joint.stages(3) == (joint.options.first,)


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_momentum_of_another_network_is_refused_by_name(backend, rule):
    """Before: a traceback, as after resuming from a checkpoint whose tensors somebody renamed or cut."""
    optimizer = Optimizer(torch.nn.Linear(3, 2), Schedule(epochs=1, lr=0.1), backend, rule)
    state = {name: torch.full_like(tensor, 2.0) for name, tensor in optimizer.state_dict().items()}
    optimizer.load_state_dict(state)
    assert all(bool((tensor == 2).all()) for tensor in optimizer.state_dict().values())
    name = next(name for name in state if name.endswith(".weight"))
    for other in ({k: v for k, v in state.items() if k != name}, {**state, name: torch.ones(2, 4)}):
        with raises(CheckpointError, name, "--out"):
            optimizer.load_state_dict(other)


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_step_is_torchs_own(data, backend, rule):
    """Three steps of ours equal three of torch's rule with a number as learning rate."""
    ours, theirs = make_learner(), make_learner()
    task = stream(data)[0]
    ours.before_task(task)
    theirs.before_task(task)
    ours.train()
    theirs.train()
    schedule = Schedule(epochs=1, lr=0.1, weight_decay=1e-2)
    pixels = ImageBatches(backend.tensor(task.images), data.mean, data.std, backend)
    step = Step(ours.loss, Optimizer(ours, schedule, backend, rule), pixels, backend)
    how = {"lr": 0.1, "weight_decay": 1e-2}
    parameters = theirs.student.parameters()
    reference = (
        torch.optim.SGD(parameters, momentum=0.9, **how) if rule == "sgd" else torch.optim.Adam(parameters, **how)
    )
    for rows in (slice(0, 8), slice(8, 16), slice(16, 24)):
        batch, labels = pixels.images[rows], torch.from_numpy(task.labels[rows])
        step(batch, labels)
        reference.zero_grad()
        loss_of(theirs, pixels.normalize(batch), labels).backward()
        reference.step()
    for (name, a), b in zip(ours.student.named_parameters(), theirs.student.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-7), name


def test_a_loss_draws_the_same_in_the_same_epoch(data):
    """Noise is a function of (seed, task, epoch): going on after an epoch draws what an undisturbed run draws."""

    def drawn(start):
        learner, task = make_learner(), stream(data)[0]
        if start:
            learner.before_task(task)
        seen, loss = [], learner.loss

        def drawing(batch):
            seen.append(torch.randn((), generator=learner.loss_generator).item())
            return loss(batch)

        learner.loss = drawing
        fit(learner, task, data, schedule=Schedule(epochs=3, lr=0.01), state=TrainState(0, epoch=start))
        return seen

    whole, rest = drawn(0), drawn(1)
    assert len(set(whole)) == len(whole)
    assert whole[-len(rest) :] == rest


def test_stages_count_their_epochs_through_the_task(data):
    """Two stages of one epoch each draw the batches of epochs 0 and 1, and report 1 of 2 and 2 of 2."""

    def batches_of(epochs):
        learner, seen, reports, positions = make_learner(), [], [], []
        learner.stages = lambda task: tuple(Schedule(epochs=count, lr=0.01) for count in epochs)
        loss = learner.loss
        learner.loss = lambda batch: (seen.append(batch.labels.tolist()), loss(batch))[1]

        def each_epoch(report, state):
            reports.append((report.epoch, report.epochs))
            positions.append((state.stage, state.epoch, state.step))

        fit(learner, stream(data)[0], data, each_epoch)
        return seen, reports, positions

    two, one = batches_of((1, 1)), batches_of((2,))
    assert two[:2] == one[:2]
    assert two[1] == [(0, 2), (1, 2)]
    assert (two[2], one[2]) == ([(0, 1, 0), (1, 2, 0)], [(0, 1, 0), (0, 2, 0)])


def test_schedule_along_a_cosine_is_torchs():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
    ours = Schedule(epochs=7, lr=0.1, lr_schedule="cosine")
    for epoch in range(7):
        assert ours.lr_at(epoch) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()
    with pytest.raises(ValueError, match=r"\[2\].*cosine"):
        Schedule(epochs=7, lr=0.1, lr_schedule="cosine", milestones=(2,))


def test_the_teacher_does_not_learn(data):
    learner = make_learner()
    tasks = stream(data)
    fit(learner, tasks[0], data)
    before = copied(learner.student.state_dict())
    fit(learner, tasks[1], data)
    assert all(torch.equal(v, before[k]) for k, v in learner.teacher.state_dict().items())
    assert learner.student.training, "of the last epoch"
    assert not any(module.training for module in learner.teacher.modules()), "nor do statistics of a network's own"
    assert any(not torch.equal(v, before[k]) for k, v in learner.student.state_dict().items() if k in before)


@pytest.mark.parametrize(("how", "crop"), [("none", None), ("crop-flip", None), ("resized-crop", 7)])
def test_training_sees_the_smaller_crops_that_are_asked_for(data, how, crop):
    learner = make_learner(augment=how, crop=crop, train_crop=6)
    seen, loss = set(), learner.loss
    learner.loss = lambda batch: seen.add((*batch.images.shape[2:],)) or loss(batch)
    fit(learner, stream(data)[0], data)
    assert seen == {(6, 6)}


def test_learning_rate_follows_the_schedule(data):
    learner = make_learner()
    task = stream(data)[0]
    rates = []
    fit(learner, task, data, lambda report, state: rates.append(report.lr))
    assert rates == pytest.approx([0.05, 0.05, 0.005])


def test_same_seed_same_bits_other_seed_other_bits(data):
    def weights(seed):
        learner = make_learner(seed=seed)
        tasks = stream(data)
        for index in (0, 1):
            fit(learner, tasks[index], data)
        return learner.student.state_dict()

    one, two, other = weights(5), weights(5), weights(6)
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert any(not torch.equal(one[k], other[k]) for k in one)


def test_going_on_in_the_middle_of_a_task_changes_no_bit(data):
    tasks = stream(data)
    schedule = Schedule(epochs=4, lr=0.05, milestones=(2,), weight_decay=1e-3)
    straight, kept = make_learner(), {}
    fit(straight, tasks[0], data)

    def keep(report, state):
        if report.epoch == 1:
            kept.update(learner=copied(straight.state(teacher=True)), optimizer=copied(state.optimizer))

    fit(straight, tasks[1], data, keep, schedule=schedule)
    resumed = make_learner(seed=0)
    resumed.load_state(kept["learner"])
    fit(resumed, tasks[1], data, schedule=schedule, state=TrainState(1, epoch=2, optimizer=kept["optimizer"]))
    for (name, a), b in zip(straight.student.state_dict().items(), resumed.student.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_loss_that_is_not_finite_stops(data):
    learner = make_learner()
    task = stream(data)[0]
    seen = []
    schedule = Schedule(epochs=9, lr=1e6, weight_decay=1e6)
    with pytest.raises(
        TrainingError, match=r"the loss is nan in task 1, epoch 1 \(learning rate 1e\+06\).*lower the rate"
    ):
        fit(learner, task, data, lambda report, _: seen.append(report), schedule=schedule)
    assert not seen, "an epoch whose loss is not finite must not reach a checkpoint"


def test_learning_really_learns(backend):
    """A sanity check of the whole loop: the training loss falls far below chance."""
    data = blobs(classes=2, per_class=32, noise=10.0)
    learner = make_learner(first=Schedule(epochs=25, lr=0.1), augment="none", width=4)
    task = TaskStream(data.train, np.arange(2), (2,))[0]
    losses = []
    fit(learner, task, data, lambda report, _: losses.append(report.loss))
    assert losses[-1] < losses[0] / 3


# --- the machine ------------------------------------------------------------------------------------------------------


def test_machine_choices():
    backend = Backend.choose("cpu")
    assert (backend.precision, backend.compile, backend.cuda_graphs) == ("fp32", False, False)
    assert "1 thread," in backend.name
    for arguments, named in (
        ({"device": "warp"}, ("--device warp", "cpu")),
        ({"device": "cpu", "precision": "fp8"}, ("--precision fp8", "fp32", "bf16")),
        ({"device": "cpu", "cuda_graphs": True}, ("--cuda-graphs", "cpu")),
        ({"device": "cpu", "compile": True}, ("--compile", "cpu")),
    ):
        with raises(ConfigError, *named):
            Backend.choose(**arguments)


def test_bf16_on_the_cpu_is_close(data):
    reports = {}
    for precision in ("fp32", "bf16"):
        learner = make_learner(backend=Backend.choose("cpu", precision, note=lambda text: None))
        task = stream(data)[0]
        fit(learner, task, data, lambda r, _, p=precision: reports.setdefault(p, []).append(r.loss))
    assert reports["fp32"] != reports["bf16"]
    assert reports["fp32"] == pytest.approx(reports["bf16"], rel=0.1)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
)
def test_out_of_memory_says_what_to_lower(error):
    with (
        pytest.raises(TrainingError, match="out of memory while training task 2 .*batch_size.*--resume"),
        memory_guard("training task 2"),
    ):
        raise error


def test_other_errors_pass_the_memory_guard():
    with pytest.raises(RuntimeError, match="shape"), memory_guard("x"):
        raise RuntimeError("shape mismatch")


def test_schedule_refuses_nonsense():
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        Schedule(epochs=3, lr=0.1, milestones=(2, 1))
    with pytest.raises(ValueError, match="lr"):
        Schedule(epochs=3, lr=0)


def test_every_epoch_has_its_own_order(data):
    learner = make_learner(augment="none")
    task = stream(data)[0]
    loss, seen = learner.loss, []
    learner.loss = lambda batch: (seen.append(batch.images.sum((1, 2, 3))), loss(batch))[1]
    fit(learner, task, data)
    epochs = torch.cat(seen).view(3, -1)
    assert len(epochs.unique(dim=0)) == 3, "each in another order"
    assert len(epochs.sort(1).values.unique(dim=0)) == 1, "of the same images"


def test_teacher_is_the_student_as_it_was_when_the_task_began(data):
    learner = make_learner()
    tasks = stream(data)
    fit(learner, tasks[0], data)
    before = {k: v.clone() for k, v in learner.student.state_dict().items()}
    learner.before_task(tasks[1])
    teacher = learner.teacher.state_dict()
    assert teacher.keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in teacher.items())


# --- what networks at rest make of the images ------------------------------------------------------------------------


def foreseen(monkeypatch, epochs, room, start=0):
    """What is begun and waited for, in turn, without a GPU: blocks of epochs, and the events behind them."""
    said, place = [], SimpleNamespace(type="cuda")
    events = itertools.count()
    ahead = SimpleNamespace(
        wait_stream=lambda other: said.append("images"), record_event=lambda: f"event {next(events)}"
    )
    steps = SimpleNamespace(wait_event=lambda event: said.append(f"waits for {event}"))
    monkeypatch.setattr(prefetch, "thread_stream", lambda device, purpose: ahead)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: steps)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(said.append("beside")))
    monkeypatch.setitem(prefetch.CHUNK_BYTES, "cuda", room * 12)

    def several(block):
        said.append(f"{block.start} to {block.stop}")
        return [[(epoch,)] for epoch in block]

    found = prefetch.Prefetcher(lambda epoch: [], several, torch.zeros(12), epochs, SimpleNamespace(device=place))
    for epoch in range(start, epochs):
        assert found.get(epoch) == [(epoch,)]
        said.append(f"epoch {epoch}")
        found.prefetch(epoch + 1)
    assert not found.pending
    return [text for text in said if text not in ("images", "beside")]


def test_epochs_are_prepared_long_before_they_are_needed(monkeypatch):
    first = ["0 to 8", "waits for event 0", "epoch 0", "8 to 16"]
    assert foreseen(monkeypatch, 18, 100)[: len(first)] == first
    said = foreseen(monkeypatch, 18, 100)
    assert said[said.index("epoch 8") - 1] == "waits for event 1", "not for what is prepared beside it"
    assert said.index("16 to 18") == said.index("epoch 8") + 1, "the last ones"
    assert sum(" to " in text for text in said) == 3
    assert foreseen(monkeypatch, 4, 1) == [
        *("0 to 1", "waits for event 0", "epoch 0", "1 to 2", "waits for event 1", "epoch 1"),
        *("2 to 3", "waits for event 2", "epoch 2", "3 to 4", "waits for event 3", "epoch 3"),
    ], "one at a time where more do not fit"
    assert foreseen(monkeypatch, 7, 100, start=5)[0] == "5 to 7", "taken up again"


class Foresighted(prefetch.Prefetcher):
    """Prepares every epoch ahead, as on a GPU, without a stream."""

    def get(self, epoch):
        return self.load_epochs(range(epoch, epoch + 1))[0]


@pytest.fixture
def loading(monkeypatch, ahead):
    """Computes on the CPU, with epochs and what a teacher says of them prepared ahead as on a GPU, or as usual."""
    monkeypatch.setattr(cuda, "Prefetcher", Foresighted)
    return Cuda(torch.device("cpu")) if ahead else Backend(torch.device("cpu"))


@pytest.mark.parametrize("numel", [1, 7 * 192, 10**6])
def test_precomputed_teacher_outputs_belong_to_their_images(data, backend, monkeypatch, numel):
    """However many images are looked at at once, also where the last ones do not fill a batch."""
    monkeypatch.setattr(prefetch, "TEACHER_BATCH_NUMEL", numel)
    images, labels = torch.from_numpy(data.train.images[:23]), torch.arange(23)
    pixels = ImageBatches(images, data.mean, data.std, backend)
    datasets = [torch.Generator().manual_seed(seed) for seed in range(2)]
    epochs = several_epochs(images, labels, None, 5, "keep", datasets)
    sizes = set()

    def frozen(seen):
        assert not torch.is_grad_enabled()
        sizes.add(len(seen))
        return seen.flatten(1).sum(1, keepdim=True)

    found = prefetch.precompute_teacher(epochs, frozen, pixels, backend)
    assert sizes == {max(5, numel // 192)}
    assert [len(epoch) for epoch in found] == [5, 5]
    for before, after in zip(epochs, found, strict=True):
        for (x, y), (x2, y2, seen) in zip(before, after, strict=True):
            assert torch.equal(x, x2)
            assert torch.equal(y, y2)
            torch.testing.assert_close(seen, pixels.normalize(x).flatten(1).sum(1, keepdim=True))


@pytest.mark.parametrize("name", ["lwf", "pseudo-replay", "icarl", "foster"])
def test_training_does_not_depend_on_who_looks_at_the_images(data, monkeypatch, name):
    """The teacher's features computed ahead, or in the step: the same weights after the first and a later task."""
    asked, batch, backend = [], Step.batch, Cuda(torch.device("cpu"))
    monkeypatch.setattr(Step, "batch", lambda self, *given: asked.append(len(given) - 2) or batch(self, *given))

    def learned(prefetcher):
        monkeypatch.setattr(cuda, "Prefetcher", prefetcher)
        asked.clear()
        own = {"memory": 8} if issubclass(LEARNERS[name], Rehearsal) else {}
        own |= {"compression": Schedule(epochs=1, lr=0.05)} if name == "foster" else {}
        learner = make_learner(name, backend=backend, **own)
        for task in list(stream(data))[:2]:
            pixels, labels = shown(task, data, backend)
            fit_task(learner, task, pixels, labels, learner.transform(data.size))
            features = TaskFeatures(task.index, labels, 0, learner, pixels)
            learner.after_task(features)
            learner.old_stats = features.stats()
        return learner.student.state_dict(), set(asked)

    usual = prefetch.Prefetcher
    (ahead, both), (plain, none) = learned(Foresighted), learned(usual)
    assert both == {0, 1}
    assert none == {0}
    for key, value in plain.items():
        torch.testing.assert_close(ahead[key], value, rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize("ahead", [True, False])
def test_the_loss_of_another_package_gets_its_teacher(data, loading):
    """Computed ahead or in the step, it is what the teacher says of these images."""
    asked = []

    class Own(LEARNERS["lwf"]):
        def loss(self, batch):
            asked.append((self.num_old_classes, batch.teacher, self.teacher.backbone(batch.images)))
            return super().loss(batch)

    learner = make_learner(Own, backend=loading)
    for task in list(stream(data))[:2]:
        fit_task(learner, task, *shown(task, data, loading), learner.transform(data.size))
    assert {old for old, *_ in asked} == {0, 2}
    for old, given, wanted in asked:
        if not old:
            assert given is None
        else:
            torch.testing.assert_close(given, wanted, rtol=1e-3, atol=1e-5)


# --- what a learner of another package may ask of the loop ------------------------------------------------------------


class TwoViews(LEARNERS["lwf"]):
    """Features of two views of an image are alike, to a random degree; remembers what the loss got."""

    views = 1
    kept = ()

    def loss(self, batch):
        (view,) = batch.views
        self.kept = [*self.kept, (batch.images.clone(), view.clone(), batch.labels.clone(), batch.teacher)]
        apart = self.student_features(batch.images) - self.student_features(view)
        weight = torch.rand((), generator=self.loss_generator)
        return super().loss(batch) + weight * apart.square().mean()


@pytest.fixture
def plain_images(data):
    """Each image has one color of its own: whatever is cropped, flipped and filled up, its brightest pixel is that."""
    colors = np.arange(len(data.train.images), dtype=np.uint8)[:, None, None, None] * 3 + 20
    images = np.broadcast_to(colors, data.train.images.shape).copy()
    return replace(data, train=replace(data.train, images=images))


@pytest.mark.parametrize("ahead", [True, False])
def test_a_view_is_another_augmentation_of_the_same_images(plain_images, loading):
    learner, alone, once = make_learner(TwoViews, backend=loading), make_learner("lwf", backend=loading), []
    loss = alone.loss
    alone.loss = lambda batch: once.append(batch.images.clone()) or loss(batch)
    for task in list(stream(plain_images))[:2]:
        for one in (learner, alone):
            fit_task(one, task, *shown(task, plain_images, loading), one.transform(8))
        images, views, labels, teachers = zip(*learner.kept, strict=True)
        assert torch.equal(torch.cat(images), torch.cat(once)), "the first view is that of a learner without others"
        color = torch.cat(images).amax((1, 2, 3))
        assert torch.equal(torch.cat(views).amax((1, 2, 3)), color), "the same image in the same place"
        pixels, own = shown(task, plain_images, loading)
        label_of = dict(zip(pixels.normalize(pixels.images).amax((1, 2, 3)).tolist(), own.tolist(), strict=True))
        assert [label_of[c] for c in color.tolist()] == torch.cat(labels).tolist()
        differing = (torch.cat(images) != torch.cat(views)).flatten(1).any(1).float().mean()
        assert differing > 0.8, "another augmentation"
        if learner.num_old_classes:
            for seen, _, _, teacher in learner.kept:
                torch.testing.assert_close(teacher, learner.teacher.backbone(seen), rtol=1e-3, atol=1e-5)
        else:
            assert set(teachers) == {None}
        learner.kept = ()
        once.clear()


@pytest.mark.parametrize("after", ["an epoch", "a step"])
def test_a_learner_with_two_views_goes_on_with_the_same_bits(data, backend, after):
    first, second = list(stream(data))[:2]

    def begun():
        learner = make_learner(TwoViews, later=Schedule(epochs=4, lr=0.05, milestones=(2,)))
        fit_task(learner, first, *shown(first, data, backend), learner.transform(8))
        return learner

    straight, stopped, kept = begun(), begun(), {}

    def keep(state):
        held = replace(state, optimizer=copied(state.optimizer))
        kept.update(learner=copied(stopped.state(teacher=True)), state=held)

    def each_epoch(report, state):
        if after == "an epoch" and report.epoch == 1:
            keep(state)
            raise TrainingInterrupted

    steps, watch = iter([False] * 4 + [True]), Watch(each_epoch, at_interrupt=keep)  # three steps in an epoch
    images, transform = shown(second, data, backend), straight.transform(8)
    with pytest.raises(TrainingInterrupted):
        fit_task(stopped, second, *images, transform, watch, stop=lambda: after == "a step" and next(steps))
    at = (1, 0, 1, 2) if after == "a step" else (1, 0, 2, 0)
    assert tuple(kept["state"].position().values()) == at
    fit_task(straight, second, *images, transform)
    resumed = make_learner(TwoViews, later=straight.options.later)
    resumed.load_state(kept["learner"])
    state = TrainState.from_tensors(kept["state"].position(), kept["state"].tensors())
    fit_task(resumed, second, *images, transform, state=state)
    rest = len(resumed.kept)
    assert 0 < rest < len(straight.kept)
    for ours, theirs in zip(resumed.kept, straight.kept[-rest:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[:3], theirs[:3], strict=True))
    for (name, a), b in zip(straight.student.state_dict().items(), resumed.student.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_two_views_need_an_augmentation(data, backend):
    learner = make_learner(TwoViews, augment="none")
    task = stream(data)[0]
    before = {k: v.clone() for k, v in learner.state_dict().items()}
    with raises(ConfigError, "TwoViews", "2", "augment=none", "augment=crop-flip"):
        fit_task(learner, task, *shown(task, data, backend), learner.transform(8))
    assert all(torch.equal(v, before[k]) for k, v in learner.state_dict().items()), "before anything has begun"


class Doubled:
    """Returns every image twice, as a transform for contrastive learning might."""

    def draw(self, count, source):
        return {}

    def apply(self, images, drawn):
        return torch.cat([images, images])


@pytest.mark.parametrize("ahead", [True, False])
def test_a_transform_that_returns_more_images_is_refused(data, loading):
    learner, task = make_learner(backend=loading), stream(data)[0]
    seen = []
    learner.loss = lambda batch: seen.append(batch)
    with raises(TrainingError, "Doubled", "48", "24", "views"):
        fit_task(learner, task, *shown(task, data, loading), Doubled())
    assert not seen


class Clipped(LEARNERS["lwf"]):
    """Remembers the gradients that an update is about to use, and halves them."""

    seen = ()

    def loss(self, batch):
        self.at_loss = [p.detach().clone() for p in self.student.parameters()]
        return super().loss(batch)

    def before_update(self, parameters):
        named = {id(p): name for name, p in self.student.named_parameters()}
        untouched = all(map(torch.equal, self.student.parameters(), self.at_loss))
        self.seen = [*self.seen, ({named[id(p)]: p.grad.clone() for p in parameters}, untouched)]
        for parameter in parameters:
            parameter.grad.mul_(0.5)


def test_a_hook_sees_the_gradients_before_they_are_used(data, backend):
    """Half of each gradient is half a step of plain SGD."""
    task = stream(data)[0]
    once = {"first": Schedule(epochs=1, lr=0.1), "momentum": 0.0, "batch_size": 24}
    clipped, usual = make_learner(Clipped, **once), make_learner("lwf", **once)
    start = {name: p.detach().clone() for name, p in clipped.student.backbone.named_parameters()}
    for learner in (clipped, usual):
        fit_task(learner, task, *shown(task, data, backend), learner.transform(8))
    ((gradients, untouched),) = clipped.seen
    assert untouched, "no weight has moved when the hook is called"
    assert gradients.keys() == dict(clipped.student.named_parameters()).keys()
    for name, before in start.items():
        gradient = gradients[f"backbone.{name}"]
        assert gradient.any(), name
        torch.testing.assert_close(clipped.student.backbone.get_parameter(name), before - 0.05 * gradient)
        torch.testing.assert_close(usual.student.backbone.get_parameter(name), before - 0.1 * gradient)


@pytest.mark.parametrize("hook", ["none", "of a subclass", "of one of ours", "of an object"])
def test_with_a_hook_no_optimizer_runs_inside_the_backward_pass(data, monkeypatch, hook):
    """On the fast path as well: all gradients are there, and nothing was updated before."""
    monkeypatch.setattr(Cuda, "use_fused_resnet", True)
    early, sgd = [], SGD.apply
    monkeypatch.setattr(
        SGD, "apply", lambda self, parameter, grad: early.append(parameter) or sgd(self, parameter, grad)
    )
    if hook == "of one of ours":
        monkeypatch.setattr(Clipped, "__module__", "efcil.learners.clipped")
    backend, seen = Cuda(torch.device("cpu"), "bf16"), []
    learner = make_learner(Clipped if "ours" in hook or "subclass" in hook else "lwf", backend=backend)
    if hook == "of an object":
        learner.before_update = lambda parameters: seen.append([p.grad is not None for p in parameters])
    task = stream(data)[0]
    fit_task(learner, task, *shown(task, data, backend), learner.transform(8))
    assert isinstance(learner.student_features, FusedResNet)
    assert bool(early) is (hook == "none")
    names = dict(learner.student.named_parameters()).keys()
    if hook == "of an object":
        assert {len(found) for found in seen} == {len(names)}
        assert all(map(all, seen))
    elif hook != "none":
        assert len(learner.seen) == 9  # three epochs of three steps
        assert all(untouched and gradients.keys() == names for gradients, untouched in learner.seen)


@pytest.mark.parametrize("name", ["resnet10", "resnet18"])
def test_features_are_those_of_the_folded_network_where_that_is_fast(monkeypatch, name):
    """Normalization folded, in batches as the teacher sees them; elsewhere the network's own."""
    asked, sizes = [], []
    monkeypatch.setattr(Backend, "fold", lambda self, network: network)  # tests/accel/test_folded_copy.py is about that
    plain, fast = (
        Backend(torch.device("cpu"), "bf16"),
        Cuda(torch.device("cpu"), "bf16", compile=True, cuda_graphs=True),
    )
    backbone = models.build(name, stem="cifar", width=4, channels=3, seed=0)
    draw = torch.Generator().manual_seed(0)
    for module in backbone.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # as after training
            module.running_mean.normal_(generator=draw)
            module.running_var.uniform_(0.5, 2, generator=draw)
    images = torch.randint(0, 256, (70, 3, 8, 8), generator=draw, dtype=torch.uint8)
    found = {}
    for kind, backend, there in (("own", plain, True), ("not there", fast, False), ("at rest", fast, True)):
        monkeypatch.setattr(
            folded_resnet, "supports_fused_conv", lambda device, dtype, there=there: asked.append(dtype) or there
        )
        monkeypatch.setattr(cuda, "TEACHER_BATCH_NUMEL", 32 * 3 * 8 * 8)
        pixels = ImageBatches(images, (0.5,) * 3, (0.25,) * 3, backend)
        monkeypatch.setattr(pixels, "normalize", lambda batch, n=pixels.normalize: sizes.append(len(batch)) or n(batch))
        found[kind] = extraction.extract(backbone, pixels, backend)
        assert sizes == ([32, 32, 6] if kind == "at rest" else [70])
        sizes.clear()
    assert asked == [torch.bfloat16] * 2, "not where steps are not captured"
    assert torch.equal(found["own"], found["not there"])
    assert not torch.equal(found["own"], found["at rest"])
    with torch.no_grad():
        exact = backbone.double()(pixels.normalize(images).double()).float()
    error = {kind: ((value - exact).norm() / exact.norm()).item() for kind, value in found.items()}
    assert error["at rest"] < 0.02
    assert error["at rest"] < 1.2 * error["own"], "folding loses nothing"


class Recorded:
    """Stands for a CUDA graph and the streams around it: says what is done, and where."""

    def __init__(self, monkeypatch, free=10, reserved=5):
        self.said, self.now = [], ["main"]
        self.lines = {}
        monkeypatch.setattr(captured_step, "thread_stream", lambda device, name: self.line(name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.line(self.now[-1]))
        monkeypatch.setattr(torch.cuda, "stream", self.switched)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 20))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.said.append("memory is given back"))
        monkeypatch.setattr(captured_step.CapturedStep, "thread_state", threading.local())

    def line(self, name):
        waits = lambda other: self.said.append(f"{name} waits for {other.name}")  # noqa: E731
        return self.lines.setdefault(name, SimpleNamespace(name=name, wait_stream=waits))

    @contextlib.contextmanager
    def switched(self, line):
        self.now.append(line.name)
        yield
        self.now.pop()

    def capture_begin(self, capture_error_mode):
        self.said.append(f"begins on {self.now[-1]}, {capture_error_mode}")

    def capture_end(self):
        self.said.append("ends")

    def replay(self):
        self.said.append("replayed")


def counted(recorded, weight, fails=False):
    """A step that adds one to a weight and says where it is done."""

    def step(*batch):
        recorded.said.append(f"step on {recorded.now[-1]}")
        weight.add_(1)
        if fails and recorded.now[-1] == "capture":
            raise torch.OutOfMemoryError("no room")

    step.loss_sum, step.weight, step.backend = torch.zeros(()), 1.0, Cuda(torch.device("cpu"))
    update = SimpleNamespace(zero_grad=lambda: recorded.said.append("gradients go"))
    refresh = lambda: recorded.said.append("copies follow")  # noqa: E731
    step.optimizer = SimpleNamespace(state_dict=dict, update=update, sync_copies=refresh)
    return step


def test_a_step_is_recorded_after_a_warm_up_that_leaves_no_trace(monkeypatch):
    recorded, module = Recorded(monkeypatch), torch.nn.Linear(2, 1)
    weight, batch = module.weight.detach(), torch.ones(3, 2)
    before = weight.clone()
    captured = captured_step.CapturedStep(counted(recorded, weight), module, batch)
    begun, ended = ["warm-up waits for main"], ["main waits for warm-up", "gradients go"]
    capture = ["begins on capture, thread_local", "step on capture", "ends", "copies follow"]
    assert recorded.said == [*begun, *["step on warm-up"] * 3, *ended, *capture]
    assert torch.equal(weight, before)
    recorded.said.clear()
    captured(batch * 2)
    assert recorded.said == ["replayed"]
    assert torch.equal(captured.batch, batch * 2)
    captured(batch[:2])  # of another size
    assert recorded.said == ["replayed", "step on main"]
    recorded.said.clear()
    captured_step.CapturedStep(counted(recorded, weight), module, batch)
    assert recorded.said == [*begun, "step on warm-up", *ended, *capture], "a thread that knows the way"


def test_a_step_is_recorded_alone_and_in_the_thread_of_convolutions(monkeypatch):
    recorded, module = Recorded(monkeypatch), torch.nn.Linear(2, 1)
    step = counted(recorded, module.weight.detach())

    @contextlib.contextmanager
    def exclusive_capture():
        recorded.said.append("alone")
        yield
        recorded.said.append("others go on")

    def run_on_autotune_thread(work):
        recorded.said.append("in the thread of convolutions")
        return work()

    step.backend = SimpleNamespace(exclusive_capture=exclusive_capture, run_on_autotune_thread=run_on_autotune_thread)
    captured_step.CapturedStep(step, module, torch.ones(3, 2))
    assert recorded.said[:3] == ["alone", "in the thread of convolutions", "warm-up waits for main"]
    assert recorded.said[-3:] == ["ends", "others go on", "copies follow"], "who records waits for nobody inside"


def test_whoever_looks_at_images_does_so_in_the_thread_of_convolutions(monkeypatch):
    asked = []
    monkeypatch.setattr(Backend, "run_on_autotune_thread", lambda self, work: asked.append(work()) or asked[-1])
    backend = Backend(torch.device("cpu"))
    pixels = ImageBatches(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), (0.5,) * 3, (0.5,) * 3, backend)
    backbone = models.build("resnet10", stem="cifar", width=4, channels=3, seed=0)
    found = extraction.extract(backbone, pixels, backend)
    assert [part.shape for part in asked] == [(4, 32)]
    assert torch.equal(found, asked[0])
    epochs = [[(pixels.images, torch.zeros(4))]]
    (((_, _, seen),),) = prefetch.precompute_teacher(epochs, lambda images: images.mean((2, 3)), pixels, backend)
    assert [part.shape for part in asked] == [(4, 32), (4, 3)]
    assert torch.equal(seen, asked[1])


@pytest.mark.parametrize(("free", "given_back"), [(4, True), (5, False), (6, False)])
def test_memory_is_given_back_before_a_capture_only_where_it_is_short(monkeypatch, free, given_back):
    recorded, module = Recorded(monkeypatch, free=free, reserved=5), torch.nn.Linear(2, 1)
    captured_step.CapturedStep(counted(recorded, module.weight.detach()), module, torch.ones(3, 2))
    assert ("memory is given back" in recorded.said) is given_back


def test_a_capture_that_fails_is_ended(monkeypatch):
    recorded, module = Recorded(monkeypatch), torch.nn.Linear(2, 1)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        captured_step.CapturedStep(counted(recorded, module.weight.detach(), fails=True), module, torch.ones(3, 2))
    assert recorded.said[-1] == "ends"
