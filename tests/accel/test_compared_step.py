"""The captured step of a learner from another package is used where it does what the eager one does.

A stand-in for the captured step replays it as a CUDA graph would: what Python decides and counts in the loss is as it
was when the step was recorded.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional

from efcil.accel import captured_step
from efcil.accel.compared_step import ComparedStep
from efcil.accel.cuda import Cuda
from efcil.learners.lwf import LwF
from efcil.tasks import TaskStream
from efcil.training.image_batches import ImageBatches
from efcil.training.schedule import Schedule
from problems import TINY, blobs, fit_task

STEPS = 9  # of a task: three epochs of 24 images in batches of 8


class Plugin(LwF):
    """Of another package; its loss draws random numbers."""

    capturable = True

    def loss(self, batch):
        features = self.student_features(batch.images)
        noise = 0.1 * torch.rand(features.shape, generator=self.loss_generator)
        return functional.cross_entropy(self.head(features + noise).float(), batch.labels)


class Undeclared(Plugin):
    """Says nothing of captures."""

    capturable = False


class Counting(Plugin):
    """Counts its steps, and doubles the loss of the second."""

    count = 0

    def loss(self, batch):
        self.count += 1
        return super().loss(batch) * (2 if self.count == 2 else 1)


class Asking(Plugin):
    """Asks a value of the GPU, which a capture forbids."""


class Recorder:
    """Takes the place of `CapturedStep`."""

    made, replays = 0, 0
    factor, error = 1.0, None

    def __init__(self, step, module, *batch, loss_generator=None):
        type(self).made += 1
        self.step, self.module = step, module
        tensors = [*module.state_dict().values(), *step.optimizer.state_dict().values(), step.loss_sum]
        saved, drawn = [t.clone() for t in tensors], loss_generator.get_state()
        for _ in range(3):
            step(*batch)
        if self.error is not None:
            raise self.error
        step(*batch)
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)
        loss_generator.set_state(drawn)
        self.count = getattr(module, "count", 0)

    def __call__(self, *batch):
        type(self).replays += 1
        counted, loss = getattr(self.module, "count", 0), self.step.loss
        self.module.count = self.count - 1  # as it was when the graph was recorded
        self.step.loss = lambda batch: self.factor * loss(batch)
        self.step(*batch)
        self.module.count, self.step.loss = counted, loss


@pytest.fixture
def recorder(monkeypatch):
    class Own(Recorder):
        pass

    monkeypatch.setattr(captured_step, "CapturedStep", Own)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Own


def trained(kind, graphs=True, precision="fp32", tasks=1):
    """A learner after some tasks, and the notes on the way."""
    notes, data = [], blobs()
    backend = Cuda(torch.device("cpu"), precision, note=notes.append, cuda_graphs=graphs)
    schedule = Schedule(epochs=3, lr=0.05)
    options = kind.options_type(**{**TINY, "batch_size": 8, "first": schedule, "later": schedule})
    learner = kind(options, 3, backend, 0)
    for task in list(TaskStream(data.train, np.arange(6), (2, 2, 2)))[:tasks]:
        pixels = ImageBatches(backend.tensor(task.images), data.mean, data.std, backend)
        fit_task(learner, task, pixels, backend.tensor(task.labels), learner.transform(data.size))
    return learner, notes


def assert_same_weights(one, other):
    for (name, a), b in zip(one.student.state_dict().items(), other.student.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_captured_step_that_does_the_same_is_replayed(recorder, precision):
    learner, notes = trained(Plugin, precision=precision)
    assert (recorder.made, recorder.replays) == (1, STEPS)
    assert not notes
    assert learner.capturable
    assert_same_weights(learner, trained(Plugin, graphs=False, precision=precision)[0])


@pytest.mark.parametrize(("precision", "factor"), [("fp32", 1.01), ("bf16", 1.2), ("fp32", float("nan"))])
def test_a_captured_step_that_does_something_else_is_dropped(recorder, precision, factor):
    recorder.factor = factor
    learner, notes = trained(Plugin, precision=precision, tasks=2)
    assert (recorder.made, recorder.replays) == (1, 1), "nor is it tried again in the next task"
    (note,) = notes
    assert "Plugin" in note
    assert "capturable = False" in note
    assert "\n" not in note
    assert learner.capturable is False
    assert Plugin.capturable is True
    assert_same_weights(learner, trained(Plugin, graphs=False, precision=precision, tasks=2)[0])


def test_rounding_is_no_difference(recorder):
    recorder.factor = 1.0001
    assert not trained(Plugin)[1]
    assert recorder.replays == STEPS


def test_a_loss_that_counts_goes_on_counting_as_if_nothing_had_been_tried(recorder):
    """The first steps agree, the second does not."""
    learner, notes = trained(Counting)
    usual = trained(Counting, graphs=False)[0]
    assert recorder.replays == 2
    assert len(notes) == 1
    assert learner.count == usual.count == STEPS
    assert_same_weights(learner, usual)


def test_a_step_that_cannot_be_captured_is_eager(recorder):
    recorder.error = RuntimeError("operation not permitted\nwhen stream is capturing")
    learner, notes = trained(Asking)
    assert recorder.replays == 0
    assert "operation not permitted when stream is capturing" in notes[0]
    assert_same_weights(learner, trained(Plugin, graphs=False)[0])


def test_a_lack_of_memory_is_no_difference(recorder):
    recorder.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(Exception, match="out of memory while training task 1"):
        trained(Plugin)


@pytest.mark.parametrize(("kind", "graphs"), [(Undeclared, True), (Plugin, False)])
def test_nothing_is_captured_unasked(recorder, kind, graphs):
    assert trained(kind, graphs)[1] == []
    assert recorder.made == 0


def test_a_learner_of_ours_is_captured_without_a_comparison(recorder):
    learner, notes = trained(LwF)
    assert (recorder.made, recorder.replays, notes) == (1, STEPS, [])
    assert_same_weights(learner, trained(LwF, graphs=False)[0])


def test_all_processes_take_the_same_way(recorder, monkeypatch):
    asked = []
    monkeypatch.setattr("efcil.training.distributed.World.any", lambda self, flag: asked.append(flag) or len(asked) > 1)
    backend = Cuda(torch.device("cpu"), cuda_graphs=True)
    learner = Plugin(Plugin.options_type(**TINY), 3, backend, 0)
    from efcil.training.step import Optimizer, Step

    data, notes = blobs(), []
    task = TaskStream(data.train, np.arange(6), (2, 2, 2))[0]
    learner.before_task(task)
    pixels = ImageBatches(backend.tensor(task.images), data.mean, data.std, backend)
    step = Step(learner.loss, Optimizer(learner, Schedule(epochs=1, lr=0.1), backend), pixels, backend)
    call = ComparedStep(step, learner, learner.loss_generator, notes.append)
    for _ in range(3):
        call(pixels.images[:8], backend.tensor(task.labels[:8]))
    assert asked == [False, False], "this process agreed, another did not"
    assert "another process" in notes[0]
    assert recorder.replays == 2
