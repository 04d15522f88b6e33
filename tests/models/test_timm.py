"""timm's models as backbones, with timm itself."""

import builtins
import socket

import huggingface_hub
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from efcil.data.decode import read_image
from efcil.errors import ConfigError
from efcil.models import build, preprocessing
from messages import raises


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "mobilenetv3_small_050", "test_convnext"])
def test_features_are_pooled(name):
    backbone = build(f"timm/{name}", size=None).eval()
    size = backbone.preprocessing.size
    with torch.no_grad():
        assert backbone(torch.zeros(2, 3, size, size)).shape == (2, backbone.num_features)
    assert preprocessing(f"timm/{name}") == backbone.preprocessing


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "tf_efficientnet_lite0", "test_vit"])
def test_a_picture_is_prepared_as_timm_does(name):
    source = torch.Generator().manual_seed(0)
    coarse = torch.randint(256, (16, 20, 3), dtype=torch.uint8, generator=source)
    picture = Image.fromarray(coarse.numpy()).resize((400, 320), Image.Resampling.BICUBIC)
    config = resolve_model_data_config(timm.create_model(name))
    wanted = create_transform(**config, is_training=False)(picture)
    own = preprocessing(f"timm/{name}")
    pixels = torch.from_numpy(read_image(picture, own)).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (own.mean, own.std))
    found = (pixels - mean) / std
    assert found.shape == wanted.shape
    # timm rounds to whole pixels between resizing and cropping: a shift by half a pixel at most
    assert (found - wanted).abs().mean() < 0.08 * wanted.std()


def test_a_size_of_ones_own():
    assert build("timm/resnet18", size=48).preprocessing.size == 48
    with raises(ConfigError, "timm/vit_tiny_patch16_224", "48 x 48"):
        build("timm/vit_tiny_patch16_224", size=48)


def test_a_model_without_pooling_is_refused(monkeypatch):
    class Maps(torch.nn.Conv2d):
        pretrained_cfg = timm.get_pretrained_cfg("resnet18").to_dict()

    class Tokens(Maps):
        def forward(self, images):
            return super().forward(images).flatten(2).transpose(1, 2)

    for kind, shape in ((Maps, (1, 5, 224, 224)), (Tokens, (1, 50176, 5))):
        monkeypatch.setattr(timm, "create_model", lambda *_, kind=kind, **__: kind(3, 5, 1))
        with raises(ConfigError, "timm/x", "not pooled", shape):
            build("timm/x")


def test_an_unknown_model_is_refused():
    with raises(ConfigError, "timm/no_such_model", "list_models"):
        build("timm/no_such_model")


def test_without_a_network_it_is_said_in_a_line_before_anything_is_tried(monkeypatch, tmp_path):
    """Before: a minute of retries, then an error of the Hub's in many lines."""

    def no_address(*place, **_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setattr("efcil.models.timm.getproxies", dict)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    tried = []
    monkeypatch.setattr(timm, "create_model", lambda *names, **_: tried.append(names))
    with raises(ConfigError, "timm/resnet18", "no network", "Name or service not known", "efficientnet-lite0"):
        build("timm/resnet18", weights="pretrained")
    assert tried == []


def test_a_download_that_fails_is_said_in_a_line(monkeypatch):
    def create_model(name, pretrained, **_):
        assert pretrained
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot find the file\nin the local cache")

    monkeypatch.setattr("efcil.models.timm.getproxies", lambda: {"https": "http://proxy"})
    monkeypatch.setattr(timm, "create_model", create_model)
    with raises(ConfigError, "timm/resnet18", "cannot be downloaded", "cannot find the file"):
        build("timm/resnet18", weights="pretrained")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (ImportError("No module named 'timm'"), "efcil[timm]"),
        (RuntimeError("torchvision::nms"), "does not fit this torch"),
    ],
)
def test_a_missing_timm_is_all_that_is_said(error, named, monkeypatch):
    real = builtins.__import__

    def imported(name, *rest):
        if name == "timm":
            raise error
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", imported)
    for ask in (build, preprocessing):
        with raises(ConfigError, "timm/resnet18 needs timm", named):
            ask("timm/resnet18")
