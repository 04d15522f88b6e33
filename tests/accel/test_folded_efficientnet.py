"""A folded EfficientNet-Lite has the features of the network itself, also after its weights have changed."""

import pytest
import torch

from efcil import models
from efcil.accel.folded_efficientnet import fold

CPU = torch.device("cpu")


@pytest.fixture
def network():
    """Batch normalization that does something: its statistics are not those of an untrained network."""
    network = models.build("efficientnet-lite0")
    with torch.no_grad():
        network.train()(torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    return network.eval()


@torch.no_grad()
def test_features_are_those_of_the_network(network):
    images = torch.randn(3, 3, 61, 75, generator=torch.Generator().manual_seed(1))
    folded, wanted = fold(network, CPU), network(images)
    assert (folded(images) - wanted).norm() < 1e-4 * wanted.norm()
    assert fold(network, CPU) is folded
    network.bn1.bias += 1
    assert (fold(network, CPU)(images) - network(images)).norm() < 1e-4 * wanted.norm()
    assert (network(images) - wanted).norm() > 1e-2 * wanted.norm()


def test_other_networks_are_left_alone():
    assert fold(models.build("resnet10", width=2), CPU) is None
