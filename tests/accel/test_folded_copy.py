"""On the CPU, networks of ours are channels-last, and frozen ones have no batch normalization: the same features."""

import copy

import pytest
import torch
from torch import nn

from efcil import models
from efcil.accel.backend import Backend
from efcil.models.multi_stage import MultiStageFeatures

CPU = Backend(torch.device("cpu"))


def trained(network):
    """Statistics and factors of normalization as after some training."""
    source = torch.Generator().manual_seed(0)
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for tensor, low in (
                (norm.running_mean, -0.5),
                (norm.running_var, 0.5),
                (norm.weight, 0.5),
                (norm.bias, -0.5),
            ):
                tensor.data.uniform_(low, low + 1, generator=source)
    return network


def made(name):
    if name == "multi-stage":
        return MultiStageFeatures(models.build("resnet10", width=8), stages=2, flip_tta=True)
    name, _, stem = name.partition(" ")
    return models.build(name, width=None if "lite" in name else 8, stem=stem or "cifar")


NETWORKS = [*models.NAMES, "resnet10 imagenet", "resnet10 small", "efficientnet-lite0", "multi-stage"]


@pytest.mark.parametrize("name", NETWORKS)
def test_the_cpu_changes_the_form_of_a_network_and_not_what_it_computes(name):
    plain = trained(made(name)).eval()
    images = torch.randn(3, 3, 17, 15, generator=torch.Generator().manual_seed(1))
    wanted = plain(images).detach()
    placed = CPU.place(copy.deepcopy(plain))
    assert any(p.ndim == 4 and not p.is_contiguous() for p in placed.parameters())
    assert torch.allclose(placed(images), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    folded = CPU.inference(placed).call
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert not any(p.requires_grad for p in folded.parameters())
    assert torch.allclose(folded(images), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    assert folded.num_features == plain.num_features
    assert CPU.fold(folded) is folded, "a network is folded once"
    assert CPU.frozen(placed, placed).call(images).equal(folded(images))


def test_narrow_networks_stay_contiguous():
    """A backward pass of theirs would write past its memory on CPUs with AVX2 (`MIN_CHANNELS_LAST`)."""
    for width, is_contiguous in ((4, True), (7, True), (8, False)):
        placed = CPU.place(models.build("resnet10", width=width))
        assert placed.layer2[0].conv1.weight.is_contiguous() is is_contiguous


def test_gradients_are_those_of_the_contiguous_network():
    plain = trained(models.build("resnet10", width=8)).train()
    placed = CPU.place(copy.deepcopy(plain))
    images = torch.randn(6, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    for network in (plain, placed):
        network(images).square().sum().backward()
    for name, wanted in plain.named_parameters():
        found = placed.get_parameter(name).grad
        assert (found - wanted.grad).norm() <= 1e-4 * wanted.grad.norm(), name


class Viewed(nn.Module):
    """A network of somebody else that relies on the layout of what a convolution returns."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, images):
        features = self.norm(self.conv(images))
        return features.view(len(features), -1)


class Doubled(models.ResNet):
    """A subclass that does something else behind its last layer."""

    def forward(self, images):
        return 2 * super().forward(images)


def test_networks_of_others_stay_as_they_are():
    own = Viewed().eval()
    placed = CPU.place(own)
    assert placed is own
    assert all(p.is_contiguous() for p in placed.parameters())
    assert placed(torch.zeros(2, 3, 5, 5)).shape == (2, 36)
    subclass = models.build("resnet10", width=4)
    subclass.__class__ = Doubled
    for network in (own, subclass):
        assert CPU.fold(network) is network
        assert CPU.inference(network).call is network
        call = object()
        assert CPU.frozen(network, call).call is call
    assert all(p.is_contiguous() for p in CPU.place(subclass).parameters())
