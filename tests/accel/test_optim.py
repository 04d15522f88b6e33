"""SGD without torch's class around it is torch's SGD, and needs no compiler."""

import subprocess
import sys

import pytest
import torch

from efcil.accel.optim import SGD


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("decay", [5e-4, 0.0])
def test_it_is_torch_s_sgd_to_the_bit(momentum, decay):
    ours, theirs = ([drawn(3, 4, seed=1).requires_grad_(), drawn(5, seed=2).requires_grad_()] for _ in range(2))
    rate = torch.tensor(0.1)
    mine = SGD(ours, rate, momentum, decay, fused=False)
    torch_s = torch.optim.SGD(theirs, torch.tensor(0.1), momentum, weight_decay=decay)
    for step in range(4):
        for given, update in ((ours, mine), (theirs, torch_s)):
            update.zero_grad()
            (given[0].square() * drawn(3, 4, seed=step)).sum().backward()
            if step != 1:  # then the other has none
                given[1].exp().sum().backward()
            update.step()
        rate.fill_(0.1 / (step + 2))  # the schedule writes into it
        torch_s.param_groups[0]["lr"].fill_(0.1 / (step + 2))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    if momentum:
        kept = [torch_s.state[p]["momentum_buffer"] for p in theirs]
        assert all(torch.equal(mine.state[a]["momentum_buffer"], b) for a, b in zip(ours, kept, strict=True))


@pytest.mark.parametrize("kind", ["as it is", "half precision", "a part of something larger"])
def test_one_parameter_at_a_time_is_the_same(kind):
    ours, theirs = (drawn(6, 3, 2, 2, seed=1).requires_grad_() for _ in range(2))
    mine, usual = (SGD([p], torch.tensor(0.1), 0.9, 0.01, fused=False) for p in (ours, theirs))
    for step in range(3):
        gradient = drawn(6, 8, 2, 2, seed=10 + step)[:, :3]
        if kind != "a part of something larger":
            gradient = gradient.contiguous()
        if kind == "half precision":
            gradient = gradient.bfloat16()
        mine.zero_grad()
        mine.apply(ours, gradient)
        mine.step()  # leaves it alone
        theirs.grad = gradient.float().contiguous()
        usual.step()
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert ours.grad is None
    mine.zero_grad()
    ours.grad = torch.ones_like(ours)
    mine.step()  # in another step it may be updated in the usual way
    assert not torch.equal(ours, drawn(6, 3, 2, 2, seed=1))


@pytest.mark.parametrize("early", [True, False])
def test_copies_in_another_precision_follow_every_update(early):
    weight, other = (drawn(6, 3, 2, 2, seed=seed).requires_grad_() for seed in (1, 2))
    sgd = SGD([weight, other], torch.tensor(0.1), 0.9, 0.01, fused=False)
    copy = sgd.low_precision_copy(weight, torch.bfloat16)
    assert sgd.low_precision_copy(weight, torch.bfloat16) is copy
    for step in range(3):
        before = copy.clone()
        sgd.zero_grad()
        if early:
            sgd.apply(weight, drawn(6, 3, 2, 2, seed=10 + step))
        else:
            weight.grad = drawn(6, 3, 2, 2, seed=10 + step)
        other.grad = torch.ones_like(other)
        sgd.step()
        assert not torch.equal(copy, before)
        assert torch.equal(copy, weight.detach().bfloat16())
    assert list(sgd.copies) == [weight], "of nobody else"
    with torch.no_grad():
        weight.zero_()  # by somebody else
    sgd.sync_copies()
    assert not copy.any()


def test_training_on_a_cpu_loads_no_compiler():
    lines = """
import sys, numpy as np, torch
from efcil.tasks import TaskStream
from efcil.data.dataset import ImageSet
from efcil.training.state import TaskData
from efcil.training.trainer import Trainer
from efcil.learners.lwf import LwF, LwFOptions
from efcil.training.image_batches import ImageBatches
from efcil.accel.backend import Backend
from efcil.training.schedule import Schedule
images, labels = np.zeros((8, 1, 8, 8), np.uint8), np.arange(8) % 2
task = TaskStream(ImageSet(images, labels), np.arange(2), (2,))[0]
backend, once = Backend(torch.device("cpu")), Schedule(epochs=1, lr=0.1)
lwf = LwF(LwFOptions(backbone="resnet10", width=2, batch_size=8, first=once, later=once), 1, backend, 0)
pixels = ImageBatches(torch.from_numpy(task.images), (0.0,), (1.0,), backend)
Trainer(lwf).fit(TaskData(task, pixels, torch.from_numpy(task.labels)))
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", lines], check=True, timeout=100)
