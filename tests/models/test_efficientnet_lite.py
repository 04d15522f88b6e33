"""EfficientNet-Lite against timm, with the same weights."""

import pytest
import timm
import torch

from efcil.models import build, preprocessing, pretrained
from efcil.models.efficientnet_lite import NAMES

LITE = ["efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2"]


def counterpart(name):
    """timm's network with the package's weights; both list their tensors in the order of the layers."""
    network = timm.create_model("tf_" + name.replace("-", "_")).eval()
    tensors = pretrained._read_package(name)
    own = network.state_dict()
    assert len(own) == len(tensors)
    network.load_state_dict(dict(zip(own, tensors.values(), strict=True)))
    return network, tensors


@pytest.mark.parametrize("name", LITE)
def test_logits_are_those_of_timm(name):
    network, tensors = counterpart(name)
    size = preprocessing(name).size
    images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    backbone = build(name, weights="pretrained").eval()
    with torch.no_grad():
        features = backbone(images)
        logits = features @ tensors["_fc.weight"].T + tensors["_fc.bias"]
        wanted = network(images)
    assert features.shape == (2, backbone.num_features)
    assert wanted.std() > 0.5, "random images tell classes apart"
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [31, 64, 75])
def test_any_size_is_padded_as_timm_does(size):
    network, _ = counterpart("efficientnet-lite0")
    images = torch.randn(1, 3, size, size + 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = build("efficientnet-lite0", weights="pretrained").eval()(images)
        torch.testing.assert_close(found, network.forward_head(network.forward_features(images), pre_logits=True))


def test_timms_own_tensors_load():
    network, _ = counterpart("efficientnet-lite1")
    backbone = build("efficientnet-lite1")
    backbone.load_state_dict(pretrained.fitting(network.state_dict(), backbone.state_dict(), "timm", "lite1"))
    assert torch.equal(backbone.conv_head.weight, network.conv_head.weight)


def test_the_input_is_timms_but_for_the_authors_scale():
    for name in NAMES:
        own, theirs = preprocessing(name), timm.get_pretrained_cfg("tf_" + name.replace("-", "_"))
        assert (3, own.size, own.size) == theirs.input_size
        assert own.interpolation == theirs.interpolation
        assert own.mean == pytest.approx(theirs.mean, abs=0.003)
        assert own.std == pytest.approx(theirs.std, abs=0.003)


def test_the_same_seed_gives_the_same_network():
    drawn = torch.get_rng_state()
    one, two, other = (build("efficientnet-lite0", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(one.conv_head.weight, two.conv_head.weight)
    assert not torch.equal(one.conv_head.weight, other.conv_head.weight)


def test_a_fresh_network_learns():
    backbone = build("efficientnet-lite0").train()
    backbone(torch.randn(4, 3, 32, 32)).square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in backbone.parameters())
