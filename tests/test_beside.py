"""Convolutions whose weights' gradients may run beside the rest compute what plain convolutions compute."""

import contextlib
import importlib
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.functional import conv2d

from benchmarks import gpu, steps
from efcil import backbones
from efcil.backbones import beside
from efcil.backbones.beside import InTraining, both_gradients, convolved, gathered, spread
from efcil.data.dataset import ImageSet
from efcil.representations.lwf import LwF, judged
from efcil.representations.pseudo_replay import PseudoReplay, PseudoReplayOptions
from efcil.tasks import TaskStream
from efcil.training.machine import Machine

FORMATS = (torch.contiguous_format, torch.channels_last)
LAYERS = [(size, stride) for size in (1, 3) for stride in (1, 2)]


def layer(size, stride, dtype=torch.float32, form=torch.contiguous_format):
    """Input, weight, and how they are convolved."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 8, 6, 6, generator=draw).to(dtype).contiguous(memory_format=form)
    weight = torch.randn(16, 8, size, size, generator=draw).to(dtype).contiguous(memory_format=form)
    return x.requires_grad_(), weight.requires_grad_(), [stride, stride], [size // 2, size // 2]


def network(name="resnet10", form=torch.contiguous_format, **options):
    return backbones.build(name, width=8, **options).train().to(memory_format=form)


def learned(features, net, images, dtype=torch.float32):
    """Features, and the gradient of every parameter that has one."""
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        found = features(images)
    found.float().square().sum().backward()
    return found.detach(), {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def pictures(form=torch.contiguous_format, count=6):
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1)).contiguous(memory_format=form)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "stride"), LAYERS)
def test_the_operation_is_the_convolution_with_its_gradients(size, stride, dtype, form):
    x, weight, *how = layer(size, stride, dtype, form)
    mine = convolved(x, weight, *how)
    grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(2)).to(mine)
    found = torch.autograd.grad(mine, (x, weight), grad)
    theirs = conv2d(x, weight, None, *how)
    wanted = torch.autograd.grad(theirs, (x, weight), grad)
    assert torch.equal(mine, theirs)
    assert mine.stride() == theirs.stride()
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("which", [0, 1])
def test_only_what_is_asked_for_has_a_gradient(which):
    x, weight, *how = layer(3, 1)
    still, learns = (x, weight) if which else (weight, x)
    still.requires_grad_(False)
    (found,) = torch.autograd.grad(convolved(x, weight, *how).square().sum(), learns)
    (wanted,) = torch.autograd.grad(conv2d(x, weight, None, *how).square().sum(), learns)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("form", FORMATS)
def test_a_compiler_is_told_the_truth_about_the_operations(form):
    for size, stride in LAYERS:
        x, weight, *how = layer(size, stride, form=form)
        torch.library.opcheck(convolved, (x, weight, *how))
        grad = convolved(x, weight, *how).detach()
        torch.library.opcheck(both_gradients, (grad, x.detach(), weight.detach(), *how))
    weights = [layer(size, 1, form=form)[1] for size in (1, 3)]
    torch.library.opcheck(spread, (weights, torch.bfloat16))
    torch.library.opcheck(gathered, ([w.detach() for w in weights], torch.float64))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["resnet10", "resnet32", "resnet50"])
def test_a_resnet_that_learns_this_way_learns_the_same(name, dtype, form):
    net, images = network(name, form), pictures(form)
    buffers = {key: value.clone() for key, value in net.named_buffers()}
    wanted = learned(net, net, images, dtype)
    after = {key: value.clone() for key, value in net.named_buffers()}
    net.load_state_dict(buffers, strict=False)
    found = learned(InTraining(net, dtype).features, net, images, dtype)
    assert torch.equal(found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys() == dict(net.named_parameters()).keys()
    for key, grad in wanted[1].items():
        assert torch.equal(found[1][key], grad), key
        assert found[1][key].stride() == grad.stride(), key
    assert all(torch.equal(value, after[key]) for key, value in net.named_buffers())


@pytest.mark.parametrize("options", [{"last_relu": False}, {"stem": "imagenet"}, {"stem": "small", "channels": 1}])
def test_every_kind_of_resnet_is_told_apart(options):
    net = network(**options)
    images = pictures()[:, : options.get("channels", 3)]
    wanted, found = (learned(call, net, images) for call in (net, InTraining(net, torch.float32).features))
    assert torch.equal(found[0], wanted[0])
    assert all(torch.equal(found[1][key], grad) for key, grad in wanted[1].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stages", [1, 2])
def test_weights_that_do_not_learn_have_no_gradient_and_the_others_theirs(stages, dtype):
    net = network()
    for part in net.beginning(stages):
        part.requires_grad_(False).eval()
    wanted, found = (learned(call, net, pictures(), dtype) for call in (net, InTraining(net, dtype).features))
    assert found[1].keys() == wanted[1].keys()
    assert not any(key.startswith(("conv1", "layer1")) for key in found[1])
    assert all(torch.equal(found[1][key], grad) for key, grad in wanted[1].items())
    net.requires_grad_(False)
    assert torch.equal(InTraining(net, torch.float32).features(pictures()), net(pictures()))


def test_the_network_keeps_its_names_and_weights():
    net = network()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with torch.no_grad():
        InTraining(net.eval(), torch.float32).features(pictures())
    assert list(net.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_one_graph_holds_the_whole_network():
    """A gradient that left the graph before it is gathered might be read before it is there."""
    net, images = network(form=torch.channels_last), pictures(torch.channels_last)
    torch._dynamo.reset()
    compiled = torch.compile(
        InTraining(net, torch.float32).features, dynamic=False, fullgraph=True, backend="aot_eager"
    )
    wanted, found = learned(net, net, images), learned(compiled, net, images)
    for key, grad in wanted[1].items():
        assert torch.allclose(found[1][key], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max())), key
    torch._dynamo.reset()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit")  # the compiler's own imports
def test_what_is_compiled_is_what_is_not():
    x, first, *how = layer(3, 1, form=torch.channels_last)
    second = layer(3, 1, form=torch.channels_last)[1].detach()[:8].clone().requires_grad_()

    def function(x, first, second):
        half, other = torch.ops.efcil.spread([first, second], torch.bfloat16)
        y = torch.ops.efcil.convolved(x.to(torch.bfloat16), other, *how).relu()
        return torch.ops.efcil.convolved(y, half, *how).float().square().mean()

    torch._dynamo.reset()
    compiled = Machine(torch.device("cpu"), compile=True).compiled(function, branches=True)
    wanted = torch.autograd.grad(function(x, first, second), (x, first, second))
    found = torch.autograd.grad(compiled(x, first, second), (x, first, second))
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() < 0.02 * theirs.norm()
    torch._dynamo.reset()


def test_the_branch_waits_for_what_it_reads_and_is_waited_for(monkeypatch):
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

    class Stored:  # a tensor on a device
        is_cuda, device = True, "cuda:0"

        def record_stream(self, line):
            said.append(f"kept for {line.name}")

    main, branch = Line("main"), Line("branch")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", switched)
    monkeypatch.setattr(beside, "_branch", lambda device: branch)
    monkeypatch.setattr(beside, "_gradient", lambda *how: said.append(f"{'weight' if how[-1] else 'input'}, {now[-1]}"))
    monkeypatch.setattr(beside, "_copies", lambda tensors, dtype: [])
    monkeypatch.setattr(torch, "_foreach_copy_", lambda copies, tensors: said.append(f"gathered, {now[-1]}"))
    both_gradients._init_fn(Stored(), Stored(), Stored(), [1, 1], [1, 1])
    gathered._init_fn([Stored()], torch.float32)
    branched = ["branch waits for main", "input, main", *3 * ["kept for branch"], "weight, branch"]
    assert said == [*branched, "main waits for branch", "gathered, main"]


def test_branches_are_for_captured_steps_in_half_precision():
    cuda = torch.device("cuda")
    assert Machine(cuda, "bf16", compile=True, capture=True).branches
    for other in ({"precision": "fp32"}, {"compile": False}, {"capture": False}):
        assert not Machine(cuda, **{"precision": "bf16", "compile": True, "capture": True, **other}).branches


def test_buffers_of_branches_are_written_once(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda call, **how: asked.append(how["options"]) or call)
    machine = Machine(torch.device("cpu"), compile=True)
    machine.compiled(functional.relu)
    machine.compiled(functional.relu, branches=True)
    assert asked[0] == {"combo_kernels": False}
    assert asked[1] == {"combo_kernels": False, "allow_buffer_reuse": False, "inplace_buffers": False}
    for option in asked[1]:
        assert isinstance(getattr(torch._inductor.config, option), bool)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, but not from warnings that are errors
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("held", [0.0, 2.0])
def test_the_loss_as_one_function_is_the_loss(known, held):
    """Compiled at most once for the first task and once for all others, however many classes there are."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (80, 3, 8, 8), dtype=np.uint8)
    tasks = TaskStream(ImageSet(pixels, np.arange(80, dtype=np.int64) % 20), np.arange(20), (4, 4, 4, 2, 6))
    kind, options = LwF, gpu.options_of(gpu.TINY)
    if held:  # features too, through a linear map
        kind, options = PseudoReplay, PseudoReplayOptions(**dict(options), feature_weight=held, pseudo=0.0)
    lwf = kind(options, 3, Machine(torch.device("cpu"), "bf16"), 0).train()
    counter = importlib.import_module("torch._dynamo.testing").CompileCounterWithBackend  # which torch does not load
    torch._dynamo.reset()
    counts = counter("aot_eager")
    compiled = torch.compile(judged, dynamic=False, backend=counts)
    for task in tasks:
        lwf.begin(task)
        images, labels = torch.from_numpy(task.images[:8]).float() / 255, torch.from_numpy(task.labels[:8]).long()
        before = lwf.teacher.backbone(images) if known and lwf.old else None
        found = []
        for way in (None, compiled):
            lwf.judged = way
            lwf.zero_grad()
            with lwf.machine.autocast():
                loss = lwf.loss(images, labels, before)
            loss.backward()
            learning = [p for p in lwf.parameters() if p.grad is not None]
            assert len(learning) == len(list(lwf.student.parameters())) + (2 if held and lwf.old else 0)
            found.append([loss.detach(), *(p.grad.clone() for p in learning)])
        assert all(torch.allclose(a, b, rtol=0.02, atol=1e-5) for a, b in zip(*found, strict=True))
    assert counts.frame_count == 2
    torch._dynamo.reset()


def test_the_loss_of_other_kinds_takes_its_own_way():
    lwf = LwF(gpu.options_of(gpu.TINY), 3, Machine(torch.device("cpu")), 0)
    assert lwf.judged is None
    assert lwf._plain()
    lwf.present = torch.tensor([0])
    assert not lwf._plain()

    class Other(LwF):
        def held(self, features, before, logits, target):
            return super().held(features, before, logits, target)

    assert not Other(gpu.options_of(gpu.TINY), 3, Machine(torch.device("cpu")), 0)._plain()
    made = PseudoReplay(PseudoReplayOptions(**dict(gpu.options_of(gpu.TINY))), 3, Machine(torch.device("cpu")), 0)
    assert made._plain()
    made._learned = 3  # made images are learned, and have no label
    assert not made._plain()


def test_the_benchmark_compares_every_way(tmp_path, capsys):
    out = tmp_path / "deep" / "steps.json"
    assert steps.main(["--device", "cpu", "--tiny", "--steps", "1", "--limit", "0", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["raw"]["ways"]
    assert [row["way"] for row in rows[:3]] == ["plain", "branch", "judged"]
    assert [row["teacher"] for row in rows] == [False, False, False, True]
    for row in rows:
        assert row["ms"] > 0
        assert row["deviation"] == row["again"] == row["race"] == row["chance"] == 0
    assert "deviation" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_with_a_branch_is_the_step():
    ways = steps.Ways(replace(gpu.TINY, width=16, side=16), "cuda")
    ways.begin(teacher=False)
    for way in ("plain", "branch", "judged"):
        row = ways.measured(way, 1)
        assert row["race"] < 0.05 + 2 * row["chance"], row
