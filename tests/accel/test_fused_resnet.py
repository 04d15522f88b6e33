"""A ResNet that learns as one function learns what it learns layer by layer; what runs beside it is waited for."""

import contextlib
import copy
import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from efcil import models
from efcil.accel import criteria, fused_lwf_loss, fused_resnet
from efcil.accel.backend import Backend
from efcil.accel.batch_norm import BatchNorm
from efcil.accel.criteria import FusedFeatureDistillLoss, FusedLwFLoss
from efcil.accel.cuda import Cuda
from efcil.accel.fused_resnet import FusedResNet
from efcil.accel.optim import SGD
from efcil.data.dataset import ImageSet
from efcil.errors import TrainingError
from efcil.features import TaskFeatures
from efcil.learners import OWN
from efcil.learners.lwf import LwF, LwFOptions
from efcil.learners.pseudo_replay import PseudoReplay, PseudoReplayOptions
from efcil.losses import FeatureDistillLoss, LwFLoss, TaskClassLoss
from efcil.models.heads import LinearHead
from efcil.tasks import TaskStream
from efcil.training.image_batches import ImageBatches
from efcil.training.step import Step
from efcil.training.trainer import TrainingInterrupted
from messages import raises
from problems import TINY, blobs, fit_task

FORMATS = (torch.contiguous_format, torch.channels_last)
OPTIONS = LwFOptions(backbone="resnet10", width=4, batch_size=8, augment="none")
KINDS = [{"last_relu": False}, {"stem": "imagenet"}, {"stem": "small", "channels": 1}]


def drawn(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def network(name="resnet10", dtype=torch.float64, form=torch.contiguous_format, **options):
    """In training, with normalizations that are not as they were born."""
    net = models.build(name, width=8, **options).train().to(dtype=dtype, memory_format=form)
    for number, module in enumerate(net.modules()):
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data += drawn(module.num_features, seed=number).to(dtype) / 4
            module.bias.data += drawn(module.num_features, seed=1000 + number).to(dtype) / 4
    return net


def learned(features, net, images):
    """Features, gradients of all parameters that have one, and all that was counted on the way."""
    net.zero_grad()
    found = features(images)
    (found.float() if found.dtype == torch.bfloat16 else found).square().sum().backward()
    grads = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return found.detach(), grads, {name: b.clone() for name, b in net.named_buffers()}


def alike(found, wanted, within=1e-9):
    assert found[1].keys() == wanted[1].keys()
    assert found[2].keys() == wanted[2].keys()
    pairs = [
        (found[0], wanted[0]),
        *((part[key], wanted[k][key]) for k, part in enumerate(found[1:], 1) for key in part),
    ]
    return all((a.double() - b.double()).abs().max() <= within * b.double().abs().max() for a, b in pairs)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["resnet10", "resnet18", "resnet32", "resnet50"])
def test_a_resnet_that_learns_as_one_function_learns_the_same(name, form):
    net = network(name, form=form)
    other, images = copy.deepcopy(net), drawn(5, 3, 16, 16).contiguous(memory_format=form)
    wanted = learned(net, net, images)
    found = learned(FusedResNet(other, torch.float64), other, images)
    assert alike(found, wanted)
    assert wanted[1].keys() == dict(net.named_parameters()).keys()
    assert all(grad.stride() == found[1][key].stride() for key, grad in wanted[1].items())
    assert all(int(value) == 1 for key, value in found[2].items() if key.endswith("num_batches_tracked"))


@pytest.mark.parametrize("options", KINDS)
def test_every_kind_of_resnet_is_distinguished(options):
    net = network(**options)
    other, images = copy.deepcopy(net), drawn(4, options.get("channels", 3), 16, 16)
    assert alike(learned(FusedResNet(other, torch.float64), other, images), learned(net, net, images))


def test_products_in_half_precision_are_as_exact_as_those_of_autocast():
    net = network(dtype=torch.float32)
    images = drawn(16, 3, 16, 16, dtype=torch.float32)
    others = [copy.deepcopy(net) for _ in range(2)]
    truth = learned(net, net, images)[1]
    with torch.autocast("cpu", torch.bfloat16):
        usual = learned(others[0], others[0], images)[1]
    found = learned(FusedResNet(others[1], torch.bfloat16), others[1], images)
    assert found[0].dtype == torch.bfloat16

    def error(grads):
        return sum(float((grads[key] - truth[key]).square().sum()) for key in truth) ** 0.5

    assert all(grad.dtype == torch.float32 for grad in found[1].values())
    assert 0 < error(found[1]) < 1.3 * error(usual)


def test_two_batches_may_be_on_their_way_at_once():
    """As where a loss looks at images twice."""
    net = network()
    other = copy.deepcopy(net)
    mine = FusedResNet(other, torch.float64)
    first, second = drawn(4, 3, 16, 16), drawn(4, 3, 16, 16, seed=2)
    wanted = learned(lambda x: torch.cat([net(x), net(second)]), net, first)
    assert alike(learned(lambda x: torch.cat([mine(x), mine(second)]), other, first), wanted)


def test_gradients_are_handed_over_not_copied(monkeypatch):
    """Held anywhere else they would be: sixty more kernels a step."""
    net, given = network(), []
    back = fused_resnet.ForwardBackward.backward

    def seen(self, grad):
        found = back(self, grad)
        given.extend(tensor.data_ptr() for tensor in found)
        return found

    monkeypatch.setattr(fused_resnet.ForwardBackward, "backward", seen)
    FusedResNet(net, torch.float64)(drawn(4, 3, 16, 16)).sum().backward()
    assert len(given) == len(list(net.parameters()))
    assert {p.grad.data_ptr() for p in net.parameters()} == set(given)


def steps_of(net, take, batches, loss=lambda features: features.square().mean()):
    """Some steps of SGD; weights, what is remembered, and how many of them were handed over in a step."""
    mine = FusedResNet(net, torch.float64)
    sgd = SGD(list(net.parameters()), torch.tensor(0.1, dtype=torch.float64), 0.9, 0.01, fused=False)
    mine.set_gradient_sink(sgd if take else None)
    counts = []
    for images in batches:
        sgd.zero_grad()
        loss(torch.cat([mine(part) for part in images])).backward()
        counts.append(len(sgd.applied))
        sgd.step()
    return [*net.parameters(), *(sgd.state[p]["momentum_buffer"] for p in net.parameters())], counts


@pytest.mark.parametrize("parts", [1, 2])
def test_weights_that_are_updated_early_are_updated_the_same(parts):
    """Of two batches at once neither has a weight's whole gradient, so nothing is handed over."""
    net = network()
    batches = [[drawn(4, 3, 16, 16, seed=10 * k + part) for part in range(parts)] for k in range(3)]
    usual, counts = steps_of(copy.deepcopy(net), False, batches)
    assert counts == [0, 0, 0]
    found, counts = steps_of(net, True, batches)
    convolutions = sum(isinstance(module, nn.Conv2d) for module in net.modules())
    assert counts == [convolutions if parts == 1 else 0] * 3
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(found, usual, strict=True))


def test_a_weight_that_the_loss_knows_is_not_updated_early_unnoticed():
    net = network()
    with raises(TrainingError, "--no-compile"):
        steps_of(net, True, [[drawn(4, 3, 16, 16)]], lambda features: features.sum() + net.conv1.weight.square().sum())


class OwnLwF(LwF):
    """Of another package: nobody knows whether its loss looks at weights."""


@pytest.mark.parametrize("kind", [LwF, OwnLwF])
def test_training_hands_weights_over_and_ends_it(monkeypatch, kind):
    monkeypatch.setattr(Cuda, "use_fused_resnet", True)
    taken, backend = [], Cuda(torch.device("cpu"), "bf16")
    monkeypatch.setattr(SGD, "apply", lambda self, parameter, gradient: taken.append(parameter.shape))
    lwf = kind(OPTIONS, 3, backend, 0)
    data = blobs()
    task = TaskStream(data.train, np.arange(6), (2, 2, 2))[0]
    pixels = ImageBatches(backend.tensor(task.images), data.mean, data.std, backend)
    with pytest.raises(TrainingInterrupted):  # after one step
        fit_task(lwf, task, pixels, backend.tensor(task.labels), None, stop=lambda: True)
    convolutions = [module.weight.shape for module in lwf.backbone.modules() if isinstance(module, nn.Conv2d)]
    assert sorted(taken) == (sorted(convolutions) if kind is LwF else [])
    assert lwf.student_features.gradient_sink is None


@pytest.mark.parametrize(
    "case", ["a part is frozen", "a weight is frozen", "no gradient is asked for", "one of the images is"]
)
def test_what_is_not_a_whole_network_learning_takes_another_way(case):
    net, asked = network(), []
    images = drawn(4, 3, 16, 16)
    mine = FusedResNet(net, torch.float64, lambda x: asked.append(1) or net(x))
    assert mine(images).grad_fn is not None
    assert not asked
    with torch.no_grad() if case == "no gradient is asked for" else contextlib.nullcontext():
        if case == "a part is frozen":
            net.layer1.eval()
        elif case == "a weight is frozen":
            net.conv1.weight.requires_grad_(False)
        elif case == "one of the images is":
            images.requires_grad_()
        mine(images)
    assert asked == [1]


def plainly(bn, z, relu, other=None, known_other=None):
    y = bn(z)
    if other is not None:
        y = y + (other if known_other is None else known_other(other))
    return y.relu() if relu else y


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("added", ["nothing", "a map", "a normalized map"])
def test_a_normalization_with_what_follows_is_what_torch_says(added, relu):
    bn, shortcut = (nn.BatchNorm2d(6, dtype=torch.float64) for _ in range(2))
    bn.weight.data, bn.bias.data = drawn(6, seed=2), drawn(6, seed=3)
    own, own_shortcut = (BatchNorm(copy.deepcopy(norm)) for norm in (bn, shortcut))
    z, other = (drawn(3, 6, 5, 4, seed=seed).requires_grad_() for seed in (4, 5))
    grads = drawn(3, 6, 5, 4, seed=6), drawn(3, 6, 5, 4, seed=7)
    y = plainly(bn, z, relu, *([] if added == "nothing" else [other]), *([shortcut] if "normal" in added else []))
    wanted = torch.autograd.grad(y, [z, bn.weight, bn.bias], sum(grads))
    with torch.no_grad():
        known = own.batch_stats(z)
        more = [] if added == "nothing" else [other]
        more += [own_shortcut.batch_stats(other)] if "normal" in added else []
        out = own.normalize(z, known, relu, *more)
        assert torch.allclose(out, y)
        assert torch.allclose(own.bn.running_mean, bn.running_mean)
        assert torch.allclose(own.bn.running_var, bn.running_var)
        for keep, told in product((True, False), (out, None)):
            if relu and told is None and added != "nothing":
                continue  # then z alone does not tell
            sums, before = own.backward_reduce(z, known, relu, *grads, told, keep)
            assert (before is grads[0]) is not keep
            assert torch.allclose(sums[0], wanted[1])
            assert torch.allclose(sums[1], wanted[2])
            if keep:
                assert torch.allclose(own.backward_apply(z, known, False, before, sums), wanted[0])
        if added == "nothing":
            sums, _ = own.backward_reduce(z, known, relu, sum(grads))
            assert torch.allclose(own.backward_apply(z, known, relu, sum(grads), sums), wanted[0])


def test_one_gradient_may_stand_for_all_pixels():
    norm, z, g = BatchNorm(nn.BatchNorm2d(6, dtype=torch.float64)), drawn(3, 6, 5, 4), drawn(3, 6, seed=2)
    with torch.no_grad():
        known = norm.batch_stats(z)
        found = norm.backward_reduce(z, known, True, g, keep=True)
        wanted = norm.backward_reduce(z, known, True, g[:, :, None, None].expand_as(z), keep=True)
    assert all(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("taken", [True, False])
def test_branches_wait_for_what_they_read_and_are_waited_for(monkeypatch, taken):
    """In the order in which a capture records it, without a device."""
    said, now = [], ["main"]

    class Line:  # a stream
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            said.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def switched(line):
        now.append(line.name)
        yield
        now.pop()

    def told(name, call):
        def seen(self, *given, **named):
            what = name + (" weight" if named.get("of_weight") else "")
            said.append(f"{what}, {now[-1]}")
            return call(self, *given, **named)

        return seen

    lines = {name: Line(name) for name in ("main", "weights", "shortcut")}
    monkeypatch.setattr(FusedResNet, "is_capturing", True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: lines[now[-1]])
    monkeypatch.setattr(torch.cuda, "stream", switched)
    monkeypatch.setattr(fused_resnet, "_branch_stream", lambda device, name: lines[name])
    for owner, name in (
        (fused_resnet.ConvNorm, "convolve"),
        (fused_resnet.ConvNorm, "gradient"),
        (BatchNorm, "normalize"),
        (BatchNorm, "backward_apply"),
    ):
        monkeypatch.setattr(owner, name, told(name, getattr(owner, name)))
    monkeypatch.setattr(
        fused_resnet.ForwardBackward,
        "cast_gradients",
        told("cast_gradients", fused_resnet.ForwardBackward.cast_gradients),
    )
    mine = FusedResNet(network(), torch.float64)
    if taken:
        sgd = SGD(mine.parameters, torch.tensor(0.1, dtype=torch.float64), 0.9, 0.0, fused=False)
        monkeypatch.setattr(sgd, "apply", lambda parameter, gradient: said.append(f"taken, {now[-1]}"))
        mine.set_gradient_sink(sgd)
    features = mine(drawn(4, 3, 16, 16))
    # The weights are cast beside the stem; the first block has no shortcut of its own, the second one has.
    stem = ["weights waits for main", "convolve, main", "normalize, main", "main waits for weights"]
    first = ["convolve, main", "normalize, main", "convolve, main", "normalize, main"]
    second = ["shortcut waits for main", "convolve, shortcut", *first[:3], "main waits for shortcut", "normalize, main"]
    assert said == [*stem, *first, *second * 3]
    said.clear()
    features.sum().backward()
    weight = ["weights waits for main", "gradient weight, weights"]
    # An update writes what products read: it comes after the last of them.
    update = ["weights waits for main", *["taken, weights"] * taken]
    plain = ["backward_apply, main", *weight, "gradient, main", *update]
    beside = ["shortcut waits for main", "backward_apply, shortcut", "weights waits for shortcut", *weight[1:]]
    block = [*beside, "gradient, shortcut", "weights waits for shortcut", *update[1:], *plain * 2]
    block.append("main waits for shortcut")
    ends = ["weights waits for main", "cast_gradients, weights", "main waits for weights"]
    assert said == [*block * 3, *plain * 2, "backward_apply, main", *weight, *update, *ends]


def test_what_a_branch_reads_is_kept_while_it_is_recorded(monkeypatch):
    for is_capturing in (False, True):
        monkeypatch.setattr(FusedResNet, "is_capturing", is_capturing)
        monkeypatch.setattr(FusedResNet, "fork", lambda self, name: contextlib.nullcontext())
        monkeypatch.setattr(FusedResNet, "join", lambda self, name: None)
        way = fused_resnet.ForwardBackward(FusedResNet(network(), torch.float64))
        with torch.no_grad():
            way.backward(torch.ones_like(way.forward(drawn(4, 3, 16, 16))))
        held = [tensor for tensors in way.keepalive for tensor in tensors if tensor is not None]
        layers = len(way.net.layers)
        assert len(held) >= 2 * layers if is_capturing else not held  # of each layer dz and its weight's gradient


def test_gradients_are_widened_in_lots(monkeypatch):
    counts = []
    cast_gradients = fused_resnet.ForwardBackward.cast_gradients
    monkeypatch.setattr(
        fused_resnet.ForwardBackward,
        "cast_gradients",
        lambda self: counts.append(len(self.pending)) or cast_gradients(self),
    )
    net = network()
    monkeypatch.setattr(fused_resnet, "CAST_BUCKET", net.layer4[0].conv2.weight.numel())
    learned(FusedResNet(net, torch.float64), net, drawn(4, 3, 16, 16))
    convolutions = sum(isinstance(module, nn.Conv2d) for module in net.modules())
    assert counts[0] <= 2  # the last stage's shortcut and second convolution, or the latter alone
    assert 2 < len(counts) < convolutions
    assert sum(counts) == convolutions


def test_branches_are_for_captured_steps_in_half_precision():
    cuda = torch.device("cuda")
    assert Cuda(cuda, "bf16", compile=True, cuda_graphs=True).use_fused_resnet
    for other in ({"precision": "fp32"}, {"compile": False}, {"cuda_graphs": False}):
        assert not Cuda(cuda, **{"precision": "bf16", "compile": True, "cuda_graphs": True, **other}).use_fused_resnet


def test_a_learner_on_such_a_machine_learns_as_one_function(monkeypatch):
    monkeypatch.setattr(Cuda, "use_fused_resnet", True)
    lwf = LwF(OPTIONS, 3, Cuda(torch.device("cpu"), "bf16"), 0)
    assert isinstance(lwf.student_features, FusedResNet)
    assert lwf.student_features.fallback is lwf.student.backbone
    assert lwf.student_features.dtype is torch.bfloat16


COMPARED = """
import torch
from efcil.accel import fused_lwf_loss, loss_kernels, optim, resnet_kernels, training_kernels
from torch import nn
from efcil import models
from efcil.accel.batch_norm import BatchNorm
from efcil.accel.stem import StemConv

device = "cuda" if torch.cuda.is_available() else "cpu"
draw = torch.Generator().manual_seed(0)

def maps(*shape):
    found = torch.randn(shape, generator=draw).to(device)
    return found.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else found

def near(found, wanted):
    apart = float((found.detach().cpu() - wanted.detach()).abs().max() / wanted.detach().abs().max())
    assert apart < 2e-5, apart

for channels, count, side in ((8, 3, 11), (20, 2, 7), (64, 3, 16), (100, 2, 9), (192, 2, 4)):
    bn = nn.BatchNorm2d(channels)
    bn.weight.data += torch.randn(channels, generator=draw) / 4
    bn.bias.data += torch.randn(channels, generator=draw)
    bn.running_mean += torch.randn(channels, generator=draw)
    own = nn.BatchNorm2d(channels)
    own.load_state_dict(bn.state_dict())
    own = own.to(device)
    norm, room = BatchNorm(bn), resnet_kernels.ReductionWorkspace(own)
    z, o, g, h = (maps(count, channels, side, side) for _ in range(4))
    z = z * 2 + 3
    known = norm.batch_stats(z.cpu())
    near(resnet_kernels.batch_stats(own, room, z), known)
    near(own.running_mean, bn.running_mean)
    near(own.running_var, bn.running_var)
    here = known.detach().to(device)
    for relu in (True, False):
        for other, known_other in ((None, None), (o, None), (o, here)):
            mine, told = resnet_kernels.normalize(z, here, other, known_other, relu)
            assert told is mine
            more = [None if t is None else t.cpu() for t in (other, known_other)]
            near(mine, norm.normalize(z.cpu(), known, relu, *more))
            again, told = resnet_kernels.normalize(z, here, other, known_other, relu, return_mask=True)
            assert torch.equal(again, mine)
            assert (told is again) is (channels % min(64, 2 ** (channels - 1).bit_length()) > 0)
            if told is not again:
                bits = (told[:, None] >> torch.arange(8, device=device)) & 1
                rows = mine.permute(0, 2, 3, 1).reshape(-1)
                assert torch.equal(bits.reshape(-1) > 0, rows > 0)
                for keep in (True, False):
                    last = (z, here, relu, keep)
                    both = [resnet_kernels.backward_reduce(own, room, g, h, out, *last) for out in (mine, told)]
                    assert all(torch.equal(a, b) for a, b in zip(*both))
        for first, second in ((g, None), (g, h), (maps(count, channels), None)):
            for out in (None, o):
                for keep in (True, False):
                    mine = resnet_kernels.backward_reduce(own, room, first, second, out, z, here, relu, keep)
                    given = [None if t is None else t.cpu() for t in (first, second, out)]
                    theirs = norm.backward_reduce(z.cpu(), known, relu, *given, keep)
                    near(mine[0], theirs[0])
                    near(mine[1], theirs[1])
        found = resnet_kernels.backward_apply(g, z, here, mine[0], relu)
        near(found, norm.backward_apply(z.cpu(), known, relu, g.cpu(), mine[0].cpu()))
    assert not room.count.any() and not room.sums.any()

for channels, room in ((3, 32), (1, 16)):
    images = maps(2, channels, 5, 7)
    stem = StemConv.over(models.build("resnet10", width=8, channels=channels).conv1)
    assert stem.is_small
    for given in (images, images.contiguous()):
        found = resnet_kernels.im2col(given, torch.float32, room)
        assert found.is_contiguous(memory_format=torch.channels_last)
        near(found[:, : 9 * channels], stem.im2col(images.cpu(), torch.float32)[:, : 9 * channels])
        assert not found[:, 9 * channels :].any()
    pixels = torch.randint(0, 256, (3, channels, 5, 7), generator=draw).to(torch.uint8)
    scale, offset = (torch.randn(1, channels, 1, 1, generator=draw) for _ in range(2))
    found = training_kernels.normalize(pixels.to(device), scale.to(device), offset.to(device))
    assert found.is_contiguous(memory_format=torch.channels_last)
    near(found, pixels.float() * scale - offset)

for gradient in (torch.float32, torch.bfloat16):
    weights, given = (torch.randn(3, 40, 5, 7, generator=draw) for _ in range(2))
    here, there = weights.clone(), maps(3, 40, 5, 7).copy_(weights)
    rates = [torch.tensor(0.1, device=where) for where in ("cpu", device)]
    mine, theirs = optim.SGD([here], rates[0], 0.9, 0.01, fused=False), torch.zeros_like(there)
    followed = mine.low_precision_copy(here, torch.bfloat16)
    for copied in (None, torch.empty_like(there, dtype=torch.bfloat16), torch.empty_like(there, dtype=torch.float32)):
        mine.apply(here, given.to(gradient))
        low = torch.empty_like(there, dtype=gradient).copy_(given)
        training_kernels.sgd(there, low, theirs, copied, rates[1], 0.9, 0.01)
        if copied is not None:  # the interpreter may round another way
            within = 2**-7 if copied.dtype == torch.bfloat16 else 0
            assert bool(((copied.float() - there).abs() <= within * there.abs()).all())
    near(there, here)
    near(theirs, mine.state[here]["momentum_buffer"])
    assert torch.equal(followed, here.bfloat16())

for count, dim, classes, old in ((5, 33, 7, 0), (5, 33, 7, 1), (9, 64, 150, 130)):
    x, g, cosines, target = (torch.randn(count, size, generator=draw) for size in (dim, dim, classes, old))
    x[0] = 0
    labels, scale = torch.randint(old, classes, (count,), generator=draw), torch.tensor(7.0)
    given = [x, g, cosines, target, labels, scale]
    x_, g_, cosines_, target_, labels_, scale_ = (tensor.to(device) for tensor in given)
    unit, stretch = fused_lwf_loss.unit_rows(x, torch.float32)
    for mine, theirs in zip(loss_kernels.unit_rows(x_, torch.float32, fused_lwf_loss.EPS), (unit, stretch)):
        near(mine, theirs)
    back = loss_kernels.unit_rows_back(g_, x_, stretch.to(device), fused_lwf_loss.EPS)
    near(back[:1], fused_lwf_loss.unit_rows_back(g, x, stretch)[:1])
    near(back[1:], fused_lwf_loss.unit_rows_back(g, x, stretch)[1:])
    teacher, teacher_ = ((target, scale / 2), (target_, scale_ / 2)) if old else ((None, None), (None, None))
    theirs = fused_lwf_loss.loss_and_grad(cosines, scale, labels, *teacher, 10.0, 2.0)
    for mine, wanted in zip(loss_kernels.loss_and_grad(cosines_, scale_, labels_, *teacher_, 10.0, 2.0), theirs):
        near(mine, wanted)
"""


@pytest.mark.triton
def test_the_kernels_of_a_gpu_compute_the_same():
    """On a GPU, or where Triton is installed in its interpreter."""
    pytest.importorskip("triton")
    here = os.environ | {"TRITON_INTERPRET": "0" if torch.cuda.is_available() else "1"}
    done = subprocess.run([sys.executable, "-c", COMPARED], env=here, capture_output=True, text=True, timeout=200)
    if "only 0-dimensional arrays" in done.stderr:
        pytest.skip("Triton's interpreter does not know this numpy")
    assert done.returncode == 0, done.stderr[-2000:]


class Accelerated(Cuda):
    """The arithmetic of a GPU's fast path on a CPU: its losses and its network, neither compiled nor captured."""

    use_fused_resnet = True

    def maybe_compile(self, call):
        return call


@pytest.fixture
def fused_losses(monkeypatch):
    """Losses in few kernels are used here, as their lines for a CPU; nothing is captured."""
    monkeypatch.setattr(criteria, "_works", lambda device, dtype: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.fixture
def accelerated(fused_losses):
    return Accelerated(torch.device("cpu"), compile=True, cuda_graphs=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("held", [0.0, 2.0])
def test_the_loss_from_few_kernels_is_the_loss(fused_losses, known, held, precision):
    """With the teacher's features given to the step, or computed in it."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (80, 3, 8, 8), dtype=np.uint8)
    tasks = TaskStream(ImageSet(pixels, np.arange(80, dtype=np.int64) % 20), np.arange(20), (4, 4, 4, 2, 6))
    kind, options = LwF, OPTIONS
    if held:  # features too, through a linear map
        kind, options = (
            PseudoReplay,
            PseudoReplayOptions(**dict(options), feature_distill_weight=held, pseudo_ratio=0.0),
        )
    eager = Backend(torch.device("cpu"), precision)
    fast = Cuda(torch.device("cpu"), precision, compile=True, cuda_graphs=True)
    lwf = kind(options, 3, eager, 0).train()
    for task in tasks:
        lwf.before_task(task)
        images, labels = torch.from_numpy(task.images[:8]), torch.from_numpy(task.labels[:8]).long()
        store, later = ImageBatches(images, (0.0,) * 3, (1.0,) * 3, eager), lwf.num_old_classes > 0
        with torch.no_grad():
            seen = (lwf.teacher.backbone(store.normalize(images)),) if known and later else ()
        kinds = (FeatureDistillLoss, FusedFeatureDistillLoss) if held and later else (LwFLoss, FusedLwFLoss)
        found = []
        for backend, criterion in zip((eager, fast), kinds, strict=True):
            lwf.backend = backend
            assert type(backend.criterion(lwf.criterion())) is criterion
            lwf.zero_grad()
            step = Step(lwf.loss, None, store, backend, frozen=lwf.frozen_forward())
            with backend.autocast():
                loss = lwf.loss(step.batch(images, labels, *seen))
            loss.backward()
            learning = [p for p in lwf.parameters() if p.grad is not None]
            assert len(learning) == len(list(lwf.student.parameters())) + (2 if held and later else 0)
            found.append([loss.detach(), *(p.grad.clone() for p in learning)])
        assert [usual.dtype for usual in found[0]] == [mine.dtype for mine in found[1]]
        if precision == "fp32":
            for usual, mine in zip(*found, strict=True):
                assert (usual - mine).norm() <= 2e-5 * usual.norm() + 1e-7
        else:  # of what nearly cancels, such as the scale's gradient, little is left in half precision
            usual, mine = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in found)
            assert (usual - mine).norm() <= 0.05 * usual.norm()


CASES = [  # learner, options, and its criterion in the second task on the fast path; None: it has none
    ("finetune", {}, None),
    ("joint", {}, None),
    ("lwf", {"distill_weight": 3.0, "temperature": 1.5}, FusedLwFLoss),
    ("lwf", {"task_classes": [1, 2, 4, 5]}, TaskClassLoss),  # an attribute: old classes come again
    ("lwf-self-freezing", {}, FusedLwFLoss),
    ("first-task", {}, FusedLwFLoss),
    ("adapt-first", {}, FusedLwFLoss),
    ("icarl", {"memory": 12}, None),
    ("foster", {"memory": 12}, None),
    ("podnet", {"memory": 12}, None),
    ("pass", {}, None),
    ("pseudo-replay", {"pseudo_ratio": 0.0}, FusedLwFLoss),
    ("pseudo-replay", {"pseudo_ratio": 0.0, "feature_distill_weight": 2.0}, FusedFeatureDistillLoss),
    ("pseudo-replay", {"pseudo_ratio": 1.0}, TaskClassLoss),
    ("pseudo-replay", {"pseudo_ratio": 1.0, "feature_distill_weight": 2.0}, TaskClassLoss),
]


def losses_of_two_tasks(kind, options, backend, criterion=None):
    """A learner, and loss and gradients of a batch in every stage of two tasks, from weights that depend on no path."""
    own, data, found = dict(options), blobs(), []
    again = own.pop("task_classes", None)
    learner = kind(kind.options_type(**{**TINY, "width": 4, **own}), 3, backend, 0)
    tasks = TaskStream(data.train, np.arange(6), (2, 4))
    for index in range(2):
        task = tasks.upto(index) if learner.all_data else tasks[index]
        learner.before_task(task)
        with torch.no_grad():  # so that the student is not its teacher
            for name, p in learner.student.named_parameters():
                p += 0.1 * (p.abs().mean() + 0.1) * drawn(*p.shape, seed=len(name) + index, dtype=p.dtype)
        pixels, labels = (
            ImageBatches(backend.tensor(task.images), data.mean, data.std, backend),
            backend.tensor(task.labels),
        )
        for stage in range(max(1, len(learner.stages(index)))):
            images, targets = learner.training_data(stage, pixels, labels)
            if index and again:
                learner.task_classes, rows = torch.tensor(again), np.isin(data.train.labels, again)
                images = pixels.with_images(backend.tensor(data.train.images[rows]))
                targets = backend.tensor(data.train.labels[rows])
            if index and criterion is not None:
                assert type(backend.criterion(learner.criterion())) is criterion
            rows = torch.linspace(0, len(targets) - 1, 20).long()  # exemplars and pseudo-images come last
            learner.train()
            learner.zero_grad()
            learner.loss_generator.manual_seed(stage)
            step = Step(learner.loss, None, images, backend, frozen=learner.frozen_forward())
            with backend.autocast():
                loss = learner.loss(step.batch(images.images[rows], targets[rows]))
            loss.backward()
            grads = {name: p.grad.clone() for name, p in learner.named_parameters() if p.grad is not None}
            found.append((loss.detach(), grads))
        features = TaskFeatures(index, labels, 0, learner.eval(), pixels)
        learner.after_task(features)
        learner.old_stats = features.stats() if learner.needs_stats else None
    return learner, found


def assert_same_losses(usual, fast):
    assert len(usual) == len(fast) >= 2
    for (loss, grads), (loss_, grads_) in zip(usual, fast, strict=True):
        torch.testing.assert_close(loss_, loss, rtol=1e-5, atol=1e-6)
        assert grads_.keys() == grads.keys()
        assert sum(bool(grad.any()) for grad in grads.values()) > 10
        longest = max(grad.norm() for grad in grads.values())
        for name, grad in grads.items():
            assert (grads_[name] - grad).norm() <= 1e-3 * grad.norm() + 1e-5 * longest, name


@pytest.mark.parametrize(("name", "options", "criterion"), CASES)
def test_every_learner_has_the_same_loss_and_gradients_on_the_fast_path(accelerated, name, options, criterion):
    usual = losses_of_two_tasks(OWN[name], options, Backend(torch.device("cpu")))[1]
    learner, fast = losses_of_two_tasks(OWN[name], options, accelerated, criterion)
    assert isinstance(learner.student_features, FusedResNet)
    assert (criterion is not None) is hasattr(learner, "criterion")
    assert_same_losses(usual, fast)


def test_every_learner_is_compared():
    assert {name for name, *_ in CASES} == {name for name, kind in OWN.items() if kind.trains}
    assert {criterion for *_, criterion in CASES} >= set(criteria.FUSED.values())


class Tripled(LwFLoss):
    """Distils three times as much."""

    def distillation(self, features, logits, teacher):
        return 3 * super().distillation(features, logits, teacher)


class OwnLoss(LwF):
    """Its equation is a subclass of ours."""

    def lwf_loss(self):
        loss = super().lwf_loss()
        return Tripled(loss.head, loss.teacher_head, loss.num_old_classes, loss.distill_weight, loss.temperature)


class OwnCriterion(LwF):
    """Its equation is a function that calls ours."""

    def criterion(self):
        plain = super().criterion()
        return lambda features, labels, teacher: 2 * plain(features, labels, teacher) + features.square().mean()


@pytest.mark.parametrize("kind", [OwnLoss, OwnCriterion])
def test_a_loss_of_somebody_else_is_computed_as_it_is_written(accelerated, kind):
    """On both paths, and it is not that of LwF, which the fast path would have in its place."""
    eager = Backend(torch.device("cpu"))
    learner, fast = losses_of_two_tasks(kind, {}, accelerated)
    criterion = learner.criterion()
    assert accelerated.criterion(criterion) is criterion
    assert_same_losses(losses_of_two_tasks(kind, {}, eager)[1], fast)
    ours = losses_of_two_tasks(LwF, {}, eager)[1]
    assert abs(fast[1][0] - ours[1][0]) > 0.1 * ours[1][0].abs()


@pytest.mark.parametrize("old", [0, 3])
def test_the_gradients_of_the_loss_are_its_derivatives(old):
    features, weight, scale = drawn(6, 9), drawn(7, 9, seed=2), torch.tensor(3.0, dtype=torch.float64)
    labels = torch.tensor([3, 4, 5, 6, 3, 4])
    target = fused_lwf_loss.cosine_similarity(drawn(6, 9, seed=3), drawn(old, 9, seed=4), torch.float64)
    teacher = (target, torch.tensor(2.0, dtype=torch.float64)) if old else (None, None)

    def loss(*learned):
        return fused_lwf_loss.fused_lwf_loss(learned[0], labels, learned[1:], *teacher, 10.0, 2.0, torch.float64)

    learned = [tensor.requires_grad_() for tensor in (features, weight, scale)]
    assert torch.autograd.gradcheck(loss, learned)
    assert torch.autograd.gradcheck(lambda *given: loss(*given) * 3, learned)


def test_rows_without_a_length_are_as_torch_has_them():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0], [1e-13, 0.0]], dtype=torch.float64, requires_grad=True)
    grad = drawn(3, 2)
    unit, stretch = fused_lwf_loss.unit_rows(x.detach(), torch.float64)
    usual = torch.nn.functional.normalize(x, dim=1)
    assert torch.allclose(unit, usual)
    (wanted,) = torch.autograd.grad(usual, x, grad)
    assert torch.allclose(fused_lwf_loss.unit_rows_back(grad, x.detach(), stretch), wanted)


@pytest.mark.parametrize("spoil", [None, "wrong", "nan", "refused"])
def test_the_loss_from_few_kernels_is_tried_before_it_is_used(monkeypatch, spoil):
    loss_and_grad, calls = fused_lwf_loss.loss_and_grad, []

    def spoilt(*given):
        calls.append(1)
        loss, grad, of_scale = loss_and_grad(*given)
        if len(calls) == 1 or spoil is None:
            return loss, grad, of_scale  # the first is what it should be
        if spoil == "refused":
            raise RuntimeError("no such kernel")
        return loss, grad * (torch.nan if spoil == "nan" else 1.5), of_scale

    monkeypatch.setattr(fused_lwf_loss, "loss_and_grad", spoilt)
    for dtype in (torch.float32, torch.bfloat16):
        calls.clear()
        assert fused_lwf_loss.is_correct_on(torch.device("cpu"), dtype) is (spoil is None)
    assert not fused_lwf_loss.is_supported(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(("compiled", "captured"), list(product((True, False), repeat=2)))
def test_few_kernels_are_for_captured_steps_that_may_be_compiled(fused_losses, compiled, captured):
    backend = Cuda(torch.device("cpu"), compile=compiled, cuda_graphs=captured)
    criterion = LwF(OPTIONS, 3, backend, 0).criterion()
    assert isinstance(backend.criterion(criterion), FusedLwFLoss) is (compiled and captured)


def test_the_compiler_is_loaded_when_it_is_needed(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda call, **how: asked.append(how) or call)
    fast = Cuda(torch.device("cpu"), compile=True).maybe_compile(torch.sin)
    assert not asked
    assert fast(torch.zeros(1)) == 0
    assert fast(torch.ones(1)) > 0
    assert asked == [{"dynamic": False, "options": {"combo_kernels": False}}]


def test_the_loss_of_other_kinds_takes_its_own_way(monkeypatch):
    fast = Cuda(torch.device("cpu"), compile=True, cuda_graphs=True)
    lwf = LwF(OPTIONS, 3, Backend(torch.device("cpu")), 0)
    assert type(fast.criterion(lwf.criterion())) is LwFLoss, "there are no such kernels here"
    monkeypatch.setattr(criteria, "_works", lambda device, dtype: True)
    assert type(fast.criterion(lwf.criterion())) is FusedLwFLoss
    lwf.task_classes = torch.tensor([0])
    assert type(fast.criterion(lwf.criterion())) is TaskClassLoss
    lwf.task_classes, lwf.student.head = None, LinearHead(4)
    assert type(fast.criterion(lwf.criterion())) is LwFLoss, "a head of another kind"
    made = PseudoReplay(PseudoReplayOptions(**dict(OPTIONS)), 3, Backend(torch.device("cpu")), 0)
    assert type(fast.criterion(made.criterion())) is FusedLwFLoss
    made._learned, made._own = 3, 4  # pseudo-images are learned, and have no label
    assert type(fast.criterion(made.criterion())) is TaskClassLoss
