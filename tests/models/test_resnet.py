"""Backbones: torchvision's parameters, the paper's shapes, and nothing drawn from the process's generator."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from efcil.accel import folded_resnet
from efcil.accel.backend import Backend
from efcil.accel.cuda import Cuda
from efcil.accel.folded_resnet import FoldedConv, FoldedResNet, fold, is_correct_on, supports_fused_conv
from efcil.accel.stem import IM2COL_CHANNELS, StemConv
from efcil.errors import ConfigError
from efcil.models import NAMES, STEMS, ResNet, build, wrap_backbone
from messages import raises


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "with_classifier", "classifier", "dim"),
    [
        ("resnet18", 11_689_512, 513_000, 512),
        ("resnet34", 21_797_672, 513_000, 512),
        ("resnet50", 25_557_032, 2_049_000, 2048),
    ],
)
def test_parameter_counts_are_torchvisions(name, with_classifier, classifier, dim):
    model = build(name, stem="imagenet")
    assert model.num_features == dim
    assert parameters(model) == with_classifier - classifier
    # The other stems differ by the first convolution only: 7x7 against 3x3, three channels to 64.
    assert parameters(build(name)) == with_classifier - classifier - 3 * 64 * (49 - 9)


def test_resnet32_is_the_papers_with_parameter_free_shortcuts():
    model = build("resnet32")
    assert parameters(model) == 464_154 - 650
    assert model.num_features == 64
    assert not [key for key in model.state_dict() if "downsample" in key]
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 31  # and the classifier makes 32


def test_resnet18_has_torchvisions_keys_in_its_order():
    bn = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    expected = ["conv1.weight"] + [f"bn1.{k}" for k in bn]
    for stage in range(1, 5):
        for block in range(2):
            at = f"layer{stage}.{block}"
            for i in (1, 2):
                expected += [f"{at}.conv{i}.weight"] + [f"{at}.bn{i}.{k}" for k in bn]
            if stage > 1 and block == 0:
                expected += [f"{at}.downsample.0.weight"] + [f"{at}.downsample.1.{k}" for k in bn]
    state = build("resnet18", stem="imagenet").state_dict()
    assert list(state) == expected
    assert tuple(state["conv1.weight"].shape) == (64, 3, 7, 7)
    assert tuple(state["layer2.0.downsample.0.weight"].shape) == (128, 64, 1, 1)
    assert tuple(state["layer4.1.conv2.weight"].shape) == (512, 512, 3, 3)


def test_resnet50_keeps_the_stride_in_the_3x3():
    model = build("resnet50", width=4)
    assert model.get_submodule("layer2.0.conv1").stride == (1, 1)
    assert model.get_submodule("layer2.0.conv2").stride == (2, 2)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert shapes["layer1.0.downsample.0.weight"] == (16, 4, 1, 1)
    assert shapes["layer4.2.conv3.weight"] == (128, 32, 1, 1)


def test_initialization_is_kaiming_fan_out():
    model = build("resnet18", stem="imagenet")
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            outputs, _, height, width = module.weight.shape
            wanted = math.sqrt(2 / (outputs * height * width))
            got = module.weight.std().item()
            assert abs(got / wanted - 1) < 6 / math.sqrt(2 * module.weight.numel())
        elif isinstance(module, torch.nn.BatchNorm2d):
            assert bool((module.weight == 1).all())
            assert bool((module.bias == 0).all())


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_alone_decides_the_weights(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build(name, width=4, seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = build(name, width=4, seed=7).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = build(name, width=4, seed=8).state_dict()
    weights = [key for key, value in first.items() if value.ndim == 4]
    assert weights
    assert not any(torch.equal(first[key], other[key]) for key in weights)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stem", STEMS)
def test_features_have_the_right_shape_and_every_parameter_a_gradient(name, stem):
    model = build(name, stem=stem, width=4, channels=1)
    images = torch.randn(3, 1, 33, 40, generator=torch.Generator().manual_seed(0))
    features = model(images)
    assert features.shape == (3, model.num_features)
    assert bool((features >= 0).all())  # averages of rectified values
    features.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    assert all(float(p.grad.abs().sum()) > 0 for n, p in model.named_parameters() if n.endswith("conv1.weight"))


@pytest.mark.parametrize(("stem", "size"), [("cifar", 32), ("small", 16), ("imagenet", 8)])
def test_the_stem_sets_the_size_of_the_maps(stem, size):
    sizes = []
    model = build("resnet18", stem=stem, width=4)
    model.get_submodule("layer1").register_forward_hook(lambda *a: sizes.append(tuple(a[2].shape)))
    model.get_submodule("layer4").register_forward_hook(lambda *a: sizes.append(tuple(a[2].shape)))
    model(torch.zeros(1, 3, 32, 32).expand(2, -1, -1, -1))
    assert sizes == [(2, 4, size, size), (2, 32, size // 8, size // 8)]


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("channels", [1, 3, 8])
def test_the_filled_stem_of_the_gpu_is_the_same_convolution(stem, channels):
    backbone = build("resnet10", stem=stem, width=8, channels=channels)
    images = torch.rand(2, channels, 16, 16, generator=torch.Generator().manual_seed(1))
    plain, filled = backbone.conv1(images), StemConv.over(backbone.conv1).conv_padded(images)
    assert plain.shape == filled.shape
    torch.testing.assert_close(filled, plain, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad((y * y).sum(), backbone.conv1.weight)[0] for y in (plain, filled)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-4)


class Placed(torch.nn.Module):
    """A module with a backbone that says where it is to be, and stays where it is."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def to(self, device, memory_format=None):
        self.place = device
        return self


class OtherNet(ResNet):
    """A network of somebody else, whose stem may be used otherwise."""


@pytest.mark.parametrize(("place", "way", "kind"), [("cuda", Cuda, StemConv), ("cpu", Backend, torch.nn.Conv2d)])
def test_a_network_gets_a_filled_stem_when_it_is_placed_on_a_gpu(place, way, kind):
    module = Placed(build("resnet10", stem="imagenet", width=4).eval())
    before, weight, state = module.state_dict(), module.backbone.conv1.weight, torch.get_rng_state()
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    wanted = module.backbone(images)
    assert way(torch.device(place)).place(module).place == torch.device(place)
    assert type(module.backbone.conv1) is kind
    assert module.backbone.conv1.weight is weight
    assert list(module.state_dict()) == list(before)
    assert not module.backbone.conv1.training
    assert torch.equal(module.backbone(images), wanted)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn for the new stem"
    assert type(copy.deepcopy(module).backbone.conv1) is kind


def test_only_networks_of_exactly_this_kind_are_accelerated(monkeypatch):
    monkeypatch.setattr(folded_resnet, "supports_fused_conv", lambda device, dtype: True)
    backbone = build("resnet10", width=4)
    assert isinstance(fold(backbone, torch.device("cpu"), torch.float32), FoldedResNet)
    backbone.__class__ = OtherNet
    assert fold(backbone, torch.device("cpu"), torch.float32) is None
    Cuda(torch.device("cuda")).place(Placed(backbone))
    assert type(backbone.conv1) is torch.nn.Conv2d


def test_pad_shortcut_takes_every_second_pixel_between_zero_channels():
    block = build("resnet32", width=2).get_submodule("layer2.0.downsample")
    x = torch.arange(2 * 4 * 4, dtype=torch.float32).reshape(1, 2, 4, 4)
    y = block(x)
    assert y.shape == (1, 4, 2, 2)
    assert torch.equal(y[:, 1:3], x[:, :, ::2, ::2])
    assert float(y[:, 0].abs().sum() + y[:, 3].abs().sum()) == 0


def test_a_block_adds_its_input():
    """With both normalizations silenced a block is the rectified identity; the input itself is left as it was."""
    block = build("resnet18", width=4).get_submodule("layer1.1")
    torch.nn.init.zeros_(block.bn2.weight)
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    kept = x.clone()
    assert torch.equal(block(x), x.relu())
    assert torch.equal(x, kept)


def test_train_and_eval_are_batch_norms():
    model = build("resnet10", width=4)
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0)) + 1
    model.eval()
    still = model(images)
    torch.testing.assert_close(model(images[:1]), still[:1])  # an image's features do not depend on its batch
    assert model.bn1.num_batches_tracked == 0
    model.train()
    assert not torch.allclose(model(images[:4]), model(images)[:4])
    assert model.bn1.num_batches_tracked == 2


def test_channels_last_gives_the_same_features():
    model = build("resnet32", width=8).eval()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(images)
        model = model.to(memory_format=torch.channels_last)
        got = model(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_bf16_autocast_is_close():
    model = build("resnet18", width=8).eval()
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(images)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = model(images)
    assert got.dtype == torch.bfloat16
    assert float((got.float() - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("name", ["resnet10", "resnet32", "resnet50"])  # one of each block and shortcut
def test_the_graph_does_not_depend_on_the_data(name):
    """One graph without a break, traced in training mode; the code generator is left out, it takes a minute."""
    model = build(name, stem="small", width=4).train()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for batch in (images, images.flip(0) * 3):
        torch.testing.assert_close(compiled(batch), model(batch))


def test_unknown_names_and_sizes_are_reported():
    with raises(ConfigError, "backbone", "'resnet81'", "'resnet18'"):
        build("resnet81")
    with raises(ConfigError, "stem", "'imagnet'", "'imagenet'"):
        build("resnet18", stem="imagnet")
    with raises(ConfigError, "width", 0):
        build("resnet18", width=0)
    with raises(ConfigError, "channels", -1):
        build("resnet18", channels=-1)


# --- at rest ---------------------------------------------------------------------------------------------------------


def lived(name: str, stem: str, last_relu: bool = True) -> torch.nn.Module:
    """A small backbone whose normalizations have seen something."""
    backbone = build(name, stem=stem, width=8, last_relu=last_relu)
    source = torch.Generator().manual_seed(1)
    for module in backbone.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for tensor in (module.weight.data, module.running_var):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=source))
            for tensor in (module.bias.data, module.running_mean):
                tensor.copy_(torch.randn(tensor.shape, generator=source))
    return backbone.eval()


@pytest.mark.parametrize("last_relu", [True, False])
@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("name", ["resnet10", "resnet32", "resnet50"])
def test_folded_normalization_is_the_same_function(name, stem, last_relu):
    backbone = lived(name, stem, last_relu).double()
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            FoldedResNet(backbone, torch.float64)(images), backbone(images), rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize(
    ("stem", "channels", "small"), [("cifar", 3, True), ("small", 1, True), ("cifar", 4, False), ("imagenet", 3, False)]
)
def test_small_stems_are_laid_out_and_larger_ones_are_not(stem, channels, small):
    conv = StemConv.over(build("resnet10", stem=stem, width=4, channels=channels).conv1.double())
    assert conv.is_small is small
    if small:
        images = torch.randn(2, channels, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        laid_out, weight = conv.im2col(images, torch.float64), conv.weight_to_im2col(conv.weight)
        assert laid_out.shape == (2, IM2COL_CHANNELS, 5, 7)
        torch.testing.assert_close(torch.nn.functional.conv2d(laid_out, weight), conv(images), rtol=1e-12, atol=1e-12)
        assert torch.equal(conv.weight_from_im2col(weight), conv.weight)


def test_the_frozen_network_is_what_the_backbone_was():
    backbone, images = lived("resnet10", "cifar"), torch.ones(2, 3, 8, 8)
    folded = FoldedResNet(backbone)
    before = folded(images)
    for parameter in backbone.parameters():
        parameter.data.mul_(2)
    assert torch.equal(folded(images), before)
    assert not before.requires_grad


@pytest.mark.parametrize("spoil", [None, "wrong", "nan", "refused"])
def test_fused_layers_are_tried_before_they_are_used(monkeypatch, spoil):
    """A device without them, with wrong ones, or with ones that read memory nobody wrote is found out."""
    right = FoldedConv.__call__

    def spoilt(layer, x, shortcut=None):
        if spoil == "refused":
            raise RuntimeError("no engine for this")
        return right(layer, x, None if spoil == "wrong" else shortcut) + (math.nan if spoil == "nan" else 0)

    monkeypatch.setattr(FoldedConv, "__call__", spoilt)
    assert is_correct_on(torch.device("cpu"), torch.bfloat16) == (spoil is None)
    assert not supports_fused_conv(torch.device("cpu"), torch.bfloat16)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cuda_frozen_network_is_the_same_function(dtype):
    backbone = lived("resnet18", "cifar").cuda().to(memory_format=torch.channels_last)
    images = torch.randn(64, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    assert supports_fused_conv(torch.device("cuda"), dtype)
    with torch.no_grad():
        found, wanted = FoldedResNet(backbone, dtype)(images).float(), backbone(images)
    assert (found - wanted).norm() < (0.02 if dtype == torch.bfloat16 else 2e-3) * wanted.norm()


# --- modules of one's own --------------------------------------------------------------------------------------------


class OtherInTraining(torch.nn.Module):
    """Returns its linear features twice in training mode."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(12, 5)

    def forward(self, images):
        features = self.linear(images.flatten(1))
        return torch.cat([features, features], 1) if self.training else features


class Auxiliary(OtherInTraining):
    """Returns an auxiliary output beside the features in training mode, as GoogLeNet does."""

    def forward(self, images):
        features = self.linear(images.flatten(1))
        return (features, features) if self.training else features


class Undefined(OtherInTraining):
    """Divides zero by zero."""

    def forward(self, images):
        features = self.linear(images.flatten(1)) * 0
        return features / features


def frozen():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5)).requires_grad_(False)


def small():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 1), torch.nn.BatchNorm2d(6), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )


def test_a_module_is_wrapped_as_it_is_and_left_alone():
    module = small().eval()
    state, drawn = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    backbone = wrap_backbone(module, size=2)
    assert backbone.num_features == 6
    assert backbone.training
    assert not module.training
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), "the trial changed the module"
        assert torch.equal(value, backbone.module.state_dict()[name]), "the trial changed the copy"
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(1)
    assert torch.equal(module[0].weight, state["0.weight"]), "the copy shares weights with the module"


def test_a_factory_draws_by_the_seed():
    one, two, other = (wrap_backbone(lambda channels: small(), size=2, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.module[0].weight, two.module[0].weight)
    assert not torch.equal(one.module[0].weight, other.module[0].weight)


def test_build_takes_names_modules_and_factories():
    assert isinstance(build("resnet10", width=4), ResNet)
    assert build(small(), size=2).num_features == 6
    assert (
        build(lambda channels: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(7)), size=2).num_features
        == 7
    )
    with raises(ConfigError, "Sequential", "width=4"):
        build(small(), size=2, width=4)
    with raises(ConfigError, "Sequential", "size"):
        build(small())


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (OtherInTraining(), ("OtherInTraining", 5, 10, "eval mode", "training mode")),
        (Auxiliary(), ("Auxiliary", "tuple", "training mode")),
        (Undefined(), ("Undefined", "NaN")),
        (torch.nn.Conv2d(3, 4, 1), ("Conv2d", (2, 4, 2, 2), "nn.Flatten()")),
        (torch.nn.Conv2d(1, 4, 1), ("Conv2d", (2, 3, 2, 2), "RuntimeError")),
        (torch.nn.Flatten(), ("Flatten", "parameters")),
        (torch.nn.Sequential(), ("Sequential", (2, 3, 2, 2))),
        (frozen(), ("Sequential", "requires_grad=False")),
        (lambda channels: "net", ("str", "nn.Module")),
        (7, (7, "nn.Module")),
    ],
)
def test_a_module_that_cannot_be_a_backbone_is_refused(module, named):
    with raises(ConfigError, *named):
        wrap_backbone(module, size=2)
    with raises(ConfigError, *named):
        build(module, size=2)
