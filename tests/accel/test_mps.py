"""A Mac's GPU beside the CPU, with the CPU in its place: nothing here needs a Mac."""

import copy

import numpy as np
import pytest
import torch

from efcil.accel.backend import Backend, _mps
from efcil.accel.mps import Mps, _forward, _Remote, mps_problem
from efcil.errors import ConfigError
from efcil.learners import LEARNERS
from efcil.models import build
from efcil.tasks import TaskStream
from efcil.training.distributed import SINGLE_PROCESS
from efcil.training.image_batches import ImageBatches
from efcil.training.state import TaskData
from efcil.training.trainer import Trainer
from problems import TINY, blobs

CPU = torch.device("cpu")


@pytest.fixture
def images():
    return torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_pass_elsewhere_has_the_same_features_gradients_and_running_statistics(images, training):
    near = build("resnet10", width=8).train(training)
    far = copy.deepcopy(near)
    near(images).square().sum().backward()
    _forward(far, CPU, images).square().sum().backward()
    for (name, one), (_, other) in zip(near.named_parameters(), far.named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
    for (name, one), (_, other) in zip(near.named_buffers(), far.named_buffers(), strict=True):
        assert torch.equal(one, other), name


def test_a_frozen_copy_shares_nothing_and_lets_gradients_of_images_through(images):
    network = build("resnet10", width=8).eval()
    backend = Mps(CPU, accelerator=CPU)
    frozen = backend.fold(network)
    before = frozen(images)
    torch.testing.assert_close(before, network(images), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for weight in network.parameters():
            weight.zero_()
    assert torch.equal(frozen(images), before)
    asked = images.requires_grad_()
    frozen(asked).sum().backward()
    assert asked.grad.abs().sum() > 0


@pytest.mark.parametrize("learner", ["lwf", "pseudo-replay", "podnet"])
def test_learners_reach_the_weights_that_the_cpu_reaches(learner):
    data, weights = blobs(), []
    for backend in (Backend(CPU), Mps(CPU, accelerator=CPU)):
        kind = LEARNERS[learner]
        more = {"memory": 12} if learner == "podnet" else {"pseudo_ratio": 0.0} if learner == "pseudo-replay" else {}
        own = kind(kind.options_type(**{**TINY, **more}), data.train.images.shape[1], backend, 0)
        for task in TaskStream(data.train, np.arange(6), (3, 3))[: 2 if learner == "lwf" else 1]:
            pixels = ImageBatches(backend.tensor(task.images), data.mean, data.std, backend)
            Trainer(own).fit(TaskData(task, pixels, backend.tensor(task.labels), own.transform(task.images.shape[-1])))
        weights.append(own.state(teacher=False))
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_the_trial_finds_a_device_that_computes_nothing():
    assert mps_problem("cpu") is None
    assert "fails" in mps_problem("meta")
    if not torch.backends.mps.is_available():
        assert "fails" in mps_problem("mps")


def test_the_trial_finds_wrong_results(monkeypatch):
    monkeypatch.setattr(_Remote, "forward", lambda self, images: self.network(images) * 1.5)
    assert "another result" in mps_problem.__wrapped__("cpu")


def test_where_a_macs_gpu_is_wrong_the_cpu_is_used_with_a_note(monkeypatch):
    heard = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr("efcil.accel.mps.mps_problem", lambda: "computes another result than the CPU")
    assert type(Backend.choose("auto", note=heard.append)) is Backend
    assert heard == ["the GPU of this Mac computes another result than the CPU; the CPU is used"]


def test_tensors_of_runs_stay_on_the_cpu():
    backend = _mps(torch.device("mps"), "fp32", SINGLE_PROCESS, print)
    assert (type(backend), backend.device, backend.accelerator.type) == (Mps, CPU, "mps")
    assert backend.tensor(np.zeros(2)).dtype == torch.float64
    assert "MPS" in backend.name
    with pytest.raises(ConfigError, match="--precision bf16"):
        _mps(torch.device("mps"), "bf16", SINGLE_PROCESS, print)
