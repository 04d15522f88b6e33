"""IncrementalClassifier: teaching, answering, changing, keeping; and what it refuses."""

import copy
import dataclasses
import datetime
import errno
import functools
import io
import itertools
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import efcil.data.cache as cache
from efcil import models
from efcil.classifiers.ridge import Ridge
from efcil.classifiers.shared_covariance import SharedCovariance
from efcil.core.class_stats import ClassStats
from efcil.core.gram_storage import LowRankGrams
from efcil.core.linear_algebra import pack_symmetric
from efcil.core.metrics import AccuracyMatrix
from efcil.core.projection import task_shift
from efcil.core.ridge import normalize_columns, ridge_weight
from efcil.core.shared_scatter import SharedScatter
from efcil.data import digits, glyphs
from efcil.data.cache import MEAN, STD
from efcil.data.dataset import DataSet, ImageSet
from efcil.data.decode import read_image
from efcil.data.preprocessing import Preprocessing
from efcil.errors import (
    ConfigError,
    DataError,
    DataWarning,
    MissingPackageError,
    ModelError,
    NumericalError,
    TrainingError,
)
from efcil.features import TaskFeatures
from efcil.learners import LEARNERS, pseudo_replay
from efcil.losses import new_class_loss, task_class_loss
from efcil.methods import METHODS
from efcil.product import IncrementalClassifier, Progress, calibration, classifier, evidence, model_directory, teaching
from efcil.product.inputs import read_images, read_labeled_images
from efcil.product.model_config import TEACHABLE
from efcil.product.model_directory import FORMAT
from efcil.protocol import Evaluator
from efcil.shift.dual_projection import DualProjection
from efcil.tasks import Task, TaskStream
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.schedule import Schedule
from efcil.training.trainer import Trainer
from efcil.trajectory import Trajectory
from messages import raises
from problems import Watch, blobs, draw, fit_task, follow_stream

FAMILY = [name for name, m in METHODS.items() if m.learner in TEACHABLE and not m.heads and not m.exemplars]
TINY = {"width": 2, "size": 8, "epochs": 2, "val_fraction": 0.2, "device": "cpu", "progress": False}
DATA = blobs(size=8, per_class=20)


@pytest.fixture(autouse=True, scope="module")
def _one_day():
    """A model notes the day on which it learned: midnight must not come between two that are equal to the last bit."""
    noon = datetime.datetime(2026, 11, 15, 12, tzinfo=datetime.UTC)
    clock = types.SimpleNamespace(datetime=types.SimpleNamespace(now=lambda zone: noon), UTC=datetime.UTC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classifier, "datetime", clock)
        yield


@functools.cache
def random_weights():
    """A file of weights for methods that start from some."""
    path = Path(tempfile.mkdtemp()) / "random.safetensors"
    save_file(models.build("resnet10", width=2, seed=1).state_dict(), path)
    return path


def tiny(method="dpcr", **given):
    options = {"buffer": 32} if method in ("acil", "ds-al") else {"expansion": 32} if method == "ranpac" else {}
    if METHODS.get(method) is not None and LEARNERS[METHODS[method].learner].starts_pretrained:
        given = {"weights": random_weights(), **given}
    return IncrementalClassifier(method, **{**TINY, "options": {**options, **given.pop("options", {})}, **given})


def lesson(*classes, data=DATA):
    """Images and names of some classes."""
    rows = np.isin(data.train.labels, classes)
    return data.train.images[rows], [data.class_names[label] for label in data.train.labels[rows]]


def taught(*rounds, method="dpcr", **given):
    model = tiny(method, **given)
    for classes in rounds:
        model.learn(*lesson(*classes))
    return model


def bits(model):
    """All that a model keeps, as bytes."""
    state = model._snapshot.state
    tensors = {**state.weights, **state.statistics}
    kept = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    return kept, state.classes, state.temperature, state.updates, state.backbone_updates, state.frozen


def stats_of(model):
    """Its class statistics."""
    return model._snapshot.trajectory.stats(model.method)


def weight_of(model):
    """The weight of its ridge classifier."""
    return model._snapshot.trajectory.parts[model.method].classifier.weight


def answers(model):
    return model.predict_proba(DATA.test.images)


@pytest.fixture(scope="module")
def two():
    """DPCR after two rounds of three classes; tests copy it before they change it."""
    return taught((0, 1, 2), (3, 4, 5))


@pytest.fixture
def model(two):
    return copy.copy(two)  # states are values: a shallow copy is a model of its own


# --- teaching ---------------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, efcil; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    import efcil

    assert efcil.IncrementalClassifier is IncrementalClassifier
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        efcil.nothing_of_the_kind  # noqa: B018


def test_it_learns_class_after_class_and_keeps_the_old_ones():
    """Three seeds: of one, the last bit of a product decides what becomes of ten test images."""
    data = blobs(size=8, per_class=20, noise=15.0)
    names = np.array([data.class_names[label] for label in data.test.labels])
    first = list(dict.fromkeys(lesson(0, 1, data=data)[1]))
    found, oldest = [], []
    for seed in range(3):
        model = tiny(width=8, epochs=6, seed=seed, options={"batch_size": 8, "augment": "none"})
        for start in (0, 2, 4):
            model.learn(*lesson(start, start + 1, data=data))
        assert model.classes_[:2].tolist() == first, "in the order in which they came"
        assert sorted(model.classes_) == sorted(data.class_names)
        right = model.predict(data.test.images) == names
        assert right.mean() == model.score(data)
        found.append(right.mean())
        oldest.append(right[data.test.labels < 2].mean())
    assert np.mean(found) > 0.7
    assert np.mean(oldest) >= 0.5, "the oldest too"


def test_probabilities_sum_to_one_whatever_the_features(model):
    """Before: NaN where a score divided by the temperature was infinite."""
    features = torch.from_numpy(model.embed(DATA.test.images))
    for temperature, weight, scale in itertools.product((1e-12, 1.0, 1e12), (1.0, 1e260), (0.0, 1e-38, 1.0, 1e38)):
        snapshot = copy.deepcopy(model._snapshot)
        snapshot.trajectory.parts[model.method].classifier.weight *= weight
        snapshot = dataclasses.replace(snapshot, state=snapshot.state.updated(temperature=temperature))
        proba = model._scored(snapshot, (features * scale).nan_to_num())
        assert np.allclose(proba.sum(1), 1, atol=1e-12), (temperature, weight, scale)


def test_answers_have_their_shapes(model):
    proba, features = answers(model), model.embed(DATA.test.images)
    assert proba.shape == (30, 6)
    assert proba.dtype == np.float64
    assert np.allclose(proba.sum(1), 1, atol=1e-12)
    assert features.shape == (30, model.dim)
    assert (model.classes_[proba.argmax(1)] == model.predict(DATA.test.images)).all()
    assert model.predict([]).shape == (0,)
    assert model.predict_proba([]).shape == (0, 6)


@pytest.mark.parametrize("method", FAMILY)
def test_every_method_of_the_family_learns_twice_and_is_the_same_when_loaded(tmp_path, method):
    model = taught((0, 1), (2, 3, 4), method=method)
    assert answers(model).shape == (30, 5)
    assert np.isfinite(answers(model)).all()
    model.save(tmp_path / "m")
    again = IncrementalClassifier.load(tmp_path / "m", device="cpu", progress=False)
    assert np.array_equal(answers(again), answers(model))
    assert bits(again) == bits(model)
    for one in (model, again):
        one.learn(*lesson(5), epochs=1)
    assert bits(again) == bits(model), "and goes on from there in the same way"


@pytest.mark.parametrize("method", ["pass", "icarl", "finetune", "joint"])
def test_methods_outside_the_family_are_refused(method):
    with raises(ConfigError, method, "dpcr", "ldc"):
        tiny(method)


def test_the_same_seed_gives_the_same_bits_and_another_others(two):
    assert bits(taught((0, 1, 2), (3, 4, 5))) == bits(two)
    assert bits(taught((0, 1, 2), (3, 4, 5), seed=1))[0] != bits(two)[0]


def protocol(model, data, epochs, sizes):
    """The same data, options and seed through the protocol of `efcil run`: its classifier, accuracy after each task."""
    kind, backend = LEARNERS["lwf"], model._backend
    learner = kind(model._config.training.with_epochs(epochs), 3, backend, 0)
    stream = TaskStream(data.train, np.arange(len(data.class_names)), sizes)
    data = DataSet(data.name, data.class_names, data.train, data.test, MEAN, STD)
    evaluator = Evaluator(data, stream, backend)
    trajectory = Trajectory(learner, {"dpcr": (METHODS["dpcr"], model._config.options)})
    matrix = AccuracyMatrix(evaluator.totals())
    follow_stream(stream, data, evaluator, trajectory, {"dpcr": matrix})
    return trajectory.parts["dpcr"].classifier, matrix.A_t


def test_rounds_are_the_tasks_of_the_protocol_to_the_bit():
    """With nothing held out, teaching is the protocol: the same backbone, statistics and classifier."""
    model = tiny(val_fraction=0)
    for start in range(0, 6, 2):
        images, names = lesson(start, start + 1)
        order = np.argsort(names, kind="stable")  # names in the order of classes, as the protocol numbers them
        model.learn(images[order], np.array(names)[order])
    ordered = DataSet("x", DATA.class_names, ImageSet(*(part[np.argsort(DATA.train.labels, kind="stable")] for part in
                      (DATA.train.images, DATA.train.labels))), DATA.test, DATA.mean, DATA.std)  # fmt: skip
    ridge, accuracy = protocol(model, ordered, 2, (2, 2, 2))
    assert torch.equal(weight_of(model), ridge.weight)
    assert 100 * model.score(DATA) == pytest.approx(accuracy[-1])
    assert {record["recall"] for record in model.summary()["classes"]} == {None}


GLYPHS = {"size": 16, "width": 16, "epochs": 25, "device": "cpu", "progress": False}


def five_rounds_of_glyphs(**given):
    data = glyphs.load(classes=20, size=16, train_per_class=150, test_per_class=50)
    model = IncrementalClassifier("dpcr", **GLYPHS, **given, options={"augment": "glyphs", "batch_size": 64})
    for start in range(0, 20, 4):
        model.learn(*lesson(*range(start, start + 4), data=data))
    return model, data


@pytest.mark.slow
def test_five_rounds_of_glyphs_equal_the_protocol_within_a_point():
    model, data = five_rounds_of_glyphs(val_fraction=0)
    _, accuracy = protocol(model, data, 25, (4,) * 5)
    assert accuracy[-1] > 40
    assert abs(100 * model.score(data) - accuracy[-1]) < 1.0


@pytest.mark.slow
def test_five_rounds_of_glyphs_are_calibrated():
    model, data = five_rounds_of_glyphs()
    assert model.score(data) > 0.4
    assert ece(model, data) < min(0.1, ece(model, data, 1.0) / 2)


def test_probabilities_are_calibrated_without_old_pictures():
    """Expected calibration error on test images of digits, taught in two rounds of forty pictures a class."""
    data = digits.load()
    rows = np.concatenate([np.flatnonzero(data.train.labels == label)[:40] for label in range(10)])
    few = DataSet("few", data.class_names, ImageSet(data.train.images[rows], data.train.labels[rows]), data.test,
                  data.mean, data.std)  # fmt: skip
    model = tiny(width=8, size=8, epochs=8, options={"augment": "digits"})
    model.learn(*lesson(*range(5), data=few)).learn(*lesson(*range(5, 10), data=few))
    assert model.score(few) > 0.6
    assert ece(model, few) < min(0.1, ece(model, few, 1.0) / 2)
    forgotten = copy.copy(model).forget(["3", "8"])
    kept = ~np.isin(data.test.labels, [3, 8])
    others = DataSet("others", data.class_names, few.train, data.test, data.mean, data.std)
    object.__setattr__(others, "test", ImageSet(data.test.images[kept], data.test.labels[kept]))
    assert ece(forgotten, others) < 0.12


def softened(model, data, temperature):
    """Probabilities with another temperature."""
    other = copy.copy(model)
    other._snapshot = copy.copy(model._snapshot)
    object.__setattr__(other._snapshot, "state", model._snapshot.state.updated(temperature=temperature))
    return other.predict_proba(data.test.images)


def ece(model, data, temperature=None, bins=10):
    """Expected calibration error of the most likely class."""
    proba = softened(model, data, temperature or model._snapshot.state.temperature)
    names = np.array([data.class_names[label] for label in data.test.labels])
    sure, right = proba.max(1), model.classes_[proba.argmax(1)] == names
    place = np.minimum((sure * bins).astype(int), bins - 1)
    return sum(abs(sure[place == b].sum() - right[place == b].sum()) for b in range(bins)) / len(right)


def test_recall_is_measured_on_pictures_that_were_not_trained_on(monkeypatch):
    seen = []
    fit = Trainer.fit

    def watched(self, data, state=None):
        seen.append((data.images.images.numpy().copy(), data.task))
        return fit(self, data, state)

    monkeypatch.setattr(Trainer, "fit", watched)
    images, names = lesson(0, 1)
    few = [row for row, name in enumerate(names) if name == "class1"][4:]
    images, names = np.delete(images, few, 0), [n for row, n in enumerate(names) if row not in few]
    model = tiny().learn(images, names)
    assert len(seen[0][0]) == 16 + 4, "a fifth of twenty is held out, nothing of four"
    trained = {image.tobytes() for image in seen[0][0]}
    held = np.array([image.tobytes() not in trained for image in images])
    assert np.array(names)[held].tolist() == ["class0"] * 4
    table = {record["name"]: record for record in model.summary()["classes"]}
    assert table["class1"]["recall"] is None
    assert table["class0"]["recall"] in (0, 25, 50, 75, 100)
    stats = stats_of(model)
    assert sorted(stats.count.tolist()) == [4, 20], "then all of them are in the statistics"
    features = torch.from_numpy(model.embed(images)).double()
    order = torch.tensor([model.classes_.tolist().index(name) for name in names])
    assert torch.allclose(stats.gram, ClassStats.from_features(features, order).gram, rtol=1e-5)


def test_recall_is_that_of_a_classifier_that_has_not_seen_them():
    """With the backbone at rest it can be computed anew: classifier from the others, asked about the held-out ones."""
    base = taught((0, 1)).freeze()
    images, names = lesson(2, 3)
    fresh = dict.fromkeys(names)
    positions = torch.tensor([2 + list(fresh).index(name) for name in names])
    held = teaching.UpdateBatch(images, positions, 2, 2, 1, 1, 0.2, Preprocessing(8)).validation_mask(0)
    assert held.sum() == 8
    features = torch.from_numpy(base.embed(images))
    ridge = Ridge(base._config.options)
    ridge.fit(stats_of(base).merge(ClassStats.from_features(features[~held], positions[~held])))
    right = ridge.logits(features[held]).argmax(1) == positions[held]
    expected = [100 * float(right[positions[held] == c].double().mean()) for c in (2, 3)]
    model = base.learn(images, names)
    assert [record["recall"] for record in model.summary()["classes"]][2:] == expected


# --- old classes again ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dpcr", "dpcr-plus", "dp-ncm", "lwf-ncm", "sdc", "adc", "ldc", "acil", "fecam"])
def test_more_pictures_of_old_classes_add_up_and_the_backbone_stays_frozen(method):
    images, names = lesson(0, 1, 2)
    half = np.arange(len(names)) % 2 == 0
    parts = [(images[half], np.array(names)[half]), (images[~half], np.array(names)[~half])]
    base = taught((3, 4), method=method)
    if not METHODS[method].reads_first_backbone:
        base.freeze()
    twice, once = copy.copy(base), copy.copy(base)
    twice.learn(*parts[0]).learn(*parts[1])
    once.learn(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
    assert np.allclose(answers(twice), softened(once, DATA, twice._snapshot.state.temperature), atol=1e-6)
    assert [r["images"] for r in twice.summary()["classes"]] == [20] * 5
    for name, tensor in base._snapshot.state.weights.items():
        assert torch.equal(twice._snapshot.state.weights[name], tensor)


def test_a_call_with_old_classes_only_leaves_the_backbone_alone(model):
    before, trained = bits(model)[0], model._snapshot.state.backbone_updates
    events = []
    model.learn(*lesson(1, 2), callbacks=[events.append])
    after = bits(model)[0]
    assert {name for name in after if after[name] != before[name]} == {
        "tracks.0.count",
        "tracks.0.mean",
        "tracks.0.moves",
        "tracks.0.gram_packed",
        "classifiers/dpcr/weight",
    }
    assert model._snapshot.state.backbone_updates == trained
    assert "training" not in {event.event for event in events}
    assert [r["images"] for r in model.summary()["classes"] if r["name"] in ("class1", "class2")] == [40, 40]


def test_methods_that_keep_nothing_to_add_to_say_so():
    model = taught((0, 1), method="lwf")
    with raises(ModelError, "lwf", "class1", "dpcr"):
        model.learn(*lesson(1, 2))


def test_cross_entropy_is_over_the_classes_of_the_call():
    logits = draw(5, 7).float().requires_grad_()
    labels = torch.tensor([1, 5, 6, 5, 1])
    present = torch.tensor([1, 5, 6])
    loss = task_class_loss(logits, labels, present)
    picked = logits.detach().double()[:, present]
    places = torch.tensor([0, 1, 2, 1, 0])
    expected = (torch.logsumexp(picked, 1) - picked.gather(1, places[:, None])[:, 0]).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    assert (logits.grad[:, [0, 2, 3, 4]] == 0).all()
    late = labels.clamp(min=5)
    assert task_class_loss(logits, late, torch.tensor([5, 6])).item() == new_class_loss(logits, late, 5).item()


def test_new_and_old_classes_in_one_call(monkeypatch):
    seen = []
    fit = Trainer.fit
    monkeypatch.setattr(Trainer, "fit", lambda self, *a: (seen.append(self.learner.task_classes), fit(self, *a))[1])
    model = taught((0, 1, 2), (3, 4))
    assert seen[1] is None
    counts = {r["name"]: r["images"] for r in model.summary()["classes"]}
    model.learn(*lesson(1, 5))
    assert seen[2].tolist() == [model.classes_.tolist().index("class1"), 5]
    after = {r["name"]: r["images"] for r in model.summary()["classes"]}
    assert after == {**counts, "class1": 40, "class5": 20}
    assert stats_of(model).count.tolist() == list(after.values())
    assert model.score(DATA) > 0.3


def test_pseudo_images_come_from_what_is_known_of_old_classes(tmp_path, monkeypatch):
    """DPCR+: also of classes that were forgotten, taught again at rest, loaded, or come again beside new ones."""
    drawn, original = [], pseudo_replay.select_seeds_and_targets
    monkeypatch.setattr(
        pseudo_replay, "select_seeds_and_targets", lambda *given: (drawn.append(given[:2]), original(*given))[1]
    )
    model = taught((0, 1, 2), method="dpcr-plus").learn(*lesson(1)).forget("class0")
    assert not drawn, "nothing was known, or the backbone was frozen"
    for classes in ((3, 4), (4, 5), (0, 1)):  # two new ones, then one that is known and one that is not
        model.save(tmp_path / "m")
        model = IncrementalClassifier.load(tmp_path / "m", device="cpu", progress=False)
        stats = stats_of(model)
        model.learn(*lesson(*classes))
        means, covariance = drawn.pop()
        assert not drawn
        assert torch.equal(means, stats.mean)
        within = (stats.covariance() * stats.count[:, None, None]).sum(0) / stats.count.sum()
        assert torch.allclose(covariance, within, rtol=1e-9, atol=1e-12)
    assert model.score(DATA) > 0.3


def test_a_free_combination_is_a_model_too(tmp_path):
    model = taught((0, 1, 2), (3, 4), method="lwf+ldc+ridge")
    model.save(tmp_path / "m")
    again = IncrementalClassifier.load(tmp_path / "m", device="cpu", progress=False)
    assert again.method == "lwf+ldc+ridge"
    assert np.array_equal(answers(again), answers(model))
    assert bits(again.forget("class1")) == bits(model.forget("class1"))


def test_a_model_that_answers_holds_no_network_that_trained_it(model):
    assert model._snapshot.trajectory.learner is None
    assert model.learn(*lesson(1))._snapshot.trajectory.learner is None


# --- one class, one picture -------------------------------------------------------------------------------------------


def test_one_class_alone_is_learned_without_training(model):
    events = []
    one = taught((0, 1, 2))
    backbone = one._snapshot.state.weights["backbone.conv1.weight"]
    one.learn(*lesson(3), callbacks=[events.append])
    assert torch.equal(one._snapshot.state.weights["backbone.conv1.weight"], backbone)
    assert "training" not in {event.event for event in events}
    head = one._snapshot.state.weights["head.weight"]
    mean = stats_of(one).mean[3]
    assert torch.allclose(head[3].double(), mean / mean.norm(), atol=1e-6), "its row points to its mean"
    one.learn(*lesson(4, 5))
    assert one._snapshot.state.weights["head.weight"].shape[0] == 6
    assert not torch.equal(one._snapshot.state.weights["backbone.conv1.weight"], backbone)


def test_one_class_alone_is_learned_from_several_stages(tmp_path):
    """The auxiliary head sees the last stage alone, the statistics are of all; using all by name changes nothing."""
    models = []
    for used in (None, 2):
        stages = {"intermediate_stages": 2, "use_stages": used, "flip_tta": True}
        one = taught((0, 1, 2), (3,), method="dpcr-plus", options=stages)
        head, mean = one._snapshot.state.weights["head.weight"], stats_of(one).mean[3]
        assert len(mean) > head.shape[1]
        mean = mean[: head.shape[1]]
        assert torch.allclose(head[3].double(), mean / mean.norm(), atol=1e-6), "its row points to its mean"
        models.append(one.learn(*lesson(4, 5)))
    usual, every = models
    assert every._snapshot.state.statistics.keys() == usual._snapshot.state.statistics.keys()
    assert np.array_equal(answers(usual), answers(every))
    every.save(tmp_path / "m")
    assert np.array_equal(answers(IncrementalClassifier.load(tmp_path / "m", device="cpu")), answers(usual))


def test_one_picture_of_a_class_is_enough(model):
    images, _ = lesson(0)
    model.learn(images[:1], ["single"])
    assert model.classes_[-1] == "single"
    assert model.summary()["classes"][-1] == {**model.summary()["classes"][-1], "images": 1, "recall": None}
    assert np.isfinite(answers(model)).all()
    fresh = tiny().learn(images[:2], ["a", "b"])
    assert answers(fresh).shape == (30, 2)
    alone = tiny().learn(images[:1], ["a"])
    assert alone.predict(images[:2]).tolist() == ["a", "a"]
    assert answers(alone).tolist() == [[1.0]] * 30


def test_ten_thousand_pictures_of_a_class_beside_one_of_another(weights):
    """No class is too large or too small; the backbone is frozen, so that it takes seconds."""
    rng = np.random.default_rng(0)
    dark = rng.integers(0, 60, (10_000, 3, 8, 8), dtype=np.uint8)
    bright = np.full((1, 3, 8, 8), 240, np.uint8)
    model = tiny(frozen=True, weights=weights)
    model.learn(np.concatenate([dark, bright]), ["dark"] * 10_000 + ["bright"])
    assert {r["name"]: r["images"] for r in model.summary()["classes"]} == {"dark": 10_000, "bright": 1}
    stats = stats_of(model)
    features = torch.from_numpy(model.embed(dark)).double()
    assert torch.allclose(stats.gram[0], features.T @ features, rtol=1e-5)
    assert model.predict(np.stack([dark[7], bright[0]])).tolist() == ["dark", "bright"]


def test_a_backbone_that_learns_once_needs_two_classes():
    with raises(ModelError, "acil"):
        tiny("acil").learn(*lesson(0))


# --- few images -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drifted(backend):
    """Real features of digits around a task: of its images under both backbones, of old classes, of test images."""
    data = digits.load()
    options = {
        "backbone": "resnet10",
        "width": 16,
        "batch_size": 32,
        "first": Schedule(epochs=4, lr=0.05, lr_schedule="cosine"),
        "later": Schedule(epochs=3, lr=0.01, lr_schedule="cosine"),
    }
    kind = LEARNERS["lwf"]
    r = kind(kind.options_type(**options), 1, backend, 0)
    found = {}
    for index, classes in enumerate((range(5), range(5, 10))):
        rows = np.isin(data.train.labels, classes)
        images, labels = data.train.images[rows], backend.tensor(data.train.labels[rows])
        pixels = ImageBatches(torch.from_numpy(images), data.mean, data.std, backend)
        fit_task(r, Task(index, 5 * index, 5, ImageSet(images, labels.numpy())), pixels, labels, None)
        if not index:
            found["kept"] = ClassStats.from_features(extract(r.backbone, pixels, backend), labels)
    found |= {"old": extract(r.old_backbone, pixels, backend), "new": extract(r.backbone, pixels, backend)}
    found |= {"labels": labels, "learned": ClassStats.from_features(found["new"], labels)}
    test = ImageBatches(torch.from_numpy(data.test.images), data.mean, data.std, backend)
    return found | {"test": extract(r.backbone, test, backend).double(), "truth": backend.tensor(data.test.labels)}


def task_of(drifted, rows=slice(None)):
    """The task with some of its images."""
    return TaskFeatures.from_saved(1, 0, {name: drifted[name][rows] for name in ("labels", "old", "new")}, ())


def of_ten_digits(drifted, count, ridge, shift):
    """Accuracy of DPCR with a shift estimated from so many images of the task, a mean of three draws."""
    found = []
    for seed in range(3):
        rows = torch.randperm(len(drifted["labels"]), generator=torch.Generator().manual_seed(seed))[:count]
        moved = shift(drifted["kept"], task_of(drifted, rows))
        weight = normalize_columns(ridge_weight(moved.merge(drifted["learned"]), ridge))
        found.append(float(((drifted["test"] @ weight).argmax(1) == drifted["truth"]).double().mean()))
    return np.mean(found)


@pytest.mark.parametrize("count", [20, 50, 100, 200, 500])
def test_with_few_images_the_shift_is_better_than_none(drifted, count):
    """Accuracy of DPCR on all ten digits, with the shift estimated from so many images of the task."""
    careful = IncrementalClassifier("dpcr", size=8, device="cpu")._config.options
    assert careful.small_task == "identity"

    def accuracy(shift):
        return of_ten_digits(drifted, count, careful.ridge, shift)

    ours = accuracy(DualProjection(small_task=careful.small_task, small_task_ridge=careful.small_task_ridge))
    assert count < 4 * drifted["kept"].dim
    assert ours >= accuracy(lambda stats, task: stats)
    if count <= 200:
        assert ours > accuracy(DualProjection()) + 0.02, "and better than the paper's formula"


def test_a_chosen_ridge_is_never_worse_than_the_papers_formula(drifted):
    """With fewer images than dimensions it is that of few images, with some hundreds it is better than none.

    With all 719 of the task both are equal to one test image, which rounding decides.
    """
    kept, everything = drifted["kept"], len(drifted["labels"])

    def accuracy(count, **options):
        return of_ten_digits(drifted, count, 10.0, DualProjection(**options))

    for count in (20, 50, 100, kept.dim):
        assert accuracy(count, shift_ridge_rel="auto") == accuracy(count, small_task="identity")
    for count in (200, 500):
        assert accuracy(count, shift_ridge_rel="auto") > accuracy(count) + 0.01
    one_image = 1 / len(drifted["truth"])
    assert accuracy(everything, shift_ridge_rel="auto") >= accuracy(everything) - 1.01 * one_image


def test_the_papers_shift_is_as_it_was_and_many_images_need_no_care(drifted):
    kept, rows = drifted["kept"], slice(0, 100)
    few = task_of(drifted, rows)
    plain = DualProjection(rank_rule="none")(kept, few)
    assert torch.equal(plain.gram, kept.transform(task_shift(few.old(), few.new(), 1e-9)).gram)
    many = task_of(drifted)
    assert len(many.labels) >= 4 * kept.dim
    identity = DualProjection(small_task="identity")(kept, many)
    assert torch.equal(identity.gram, DualProjection()(kept, many).gram)


# --- backbones: weights, frozen, timm ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(two, tmp_path_factory):
    """A backbone we trained, as a file."""
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_file({k: v for k, v in two._snapshot.state.weights.items() if k.startswith("backbone.")}, path)
    return path


def test_a_frozen_backbone_is_one_pass_and_one_solve(two, weights, monkeypatch):
    monkeypatch.setattr(Trainer, "fit", None)
    model = taught((0, 1), (2, 3), frozen=True, weights=weights)
    for name, tensor in two._snapshot.state.weights.items():
        if name.startswith("backbone."):
            assert torch.equal(model._snapshot.state.weights[name], tensor)
    images, names = lesson(0, 1, 2, 3)
    places = torch.tensor([model.classes_.tolist().index(name) for name in names])
    stats = ClassStats.from_features(torch.from_numpy(model.embed(images)), places)
    expected = normalize_columns(ridge_weight(stats, model._config.options.ridge))
    assert torch.allclose(weight_of(model), expected, atol=1e-9), "as if all had come at once"
    assert model.frozen


def test_weights_come_from_models_checkpoints_and_plain_files(two, weights, tmp_path):
    plain = {k.removeprefix("backbone."): v for k, v in load_file(weights).items()}
    for prefix in ("", "learner.student.backbone."):
        save_file({prefix + k: v for k, v in plain.items()}, tmp_path / "w.safetensors")
        model = tiny(weights=tmp_path / "w.safetensors")
        assert model.frozen
        assert torch.equal(model._snapshot.state.weights["backbone.conv1.weight"], plain["conv1.weight"])
    two.save(tmp_path / "m")
    model = tiny(weights=tmp_path / "m" / "weights.safetensors", frozen=False)
    assert np.array_equal(model.embed(DATA.test.images), two.embed(DATA.test.images))
    model.learn(*lesson(0, 1))
    assert not torch.equal(model._snapshot.state.weights["backbone.conv1.weight"], plain["conv1.weight"]), (
        "it learns on"
    )


def test_weights_that_cannot_be_used(weights, tmp_path):
    with raises(ConfigError, weights, "resnet10", "(4, 3, 3, 3)", "(2, 3, 3, 3)"):
        tiny(width=4, weights=weights)
    with raises(ConfigError, tmp_path / "none.pth"):
        tiny(weights=tmp_path / "none.pth")
    (tmp_path / "text.safetensors").write_text("hello")
    with raises(ConfigError, tmp_path / "text.safetensors"):
        tiny(weights=tmp_path / "text.safetensors")
    with raises(ConfigError, "frozen=True", "weights="):
        tiny(frozen=True)
    with raises(ConfigError, "frozen=True", "lwf", "dpcr"):
        tiny("lwf", frozen=True, weights=weights)
    with raises(ModelError, "weights"):
        tiny().freeze()
    with raises(ConfigError, "weights=pretrained", "timm/NAME", "resnet10"):
        tiny(weights="pretrained")
    with raises(ConfigError, "resnet10", "size", 224):
        IncrementalClassifier(backbone="resnet10", weights=weights)


@pytest.mark.parametrize("method", ["dpcr", "dpcr-plus", "dp-ncm", "lwf-ncm", "ldc", "fecam"])
def test_merged_models_equal_one_that_was_taught_on_both(weights, method):
    def frozen(*classes):
        return taught(*classes, method=method, frozen=True, weights=weights)

    one, both = frozen((0, 1)), frozen((0, 1), (2, 3))
    merged = one.merge(frozen((2, 3)))
    assert merged.classes_.tolist() == both.classes_.tolist()
    theirs = softened(both, DATA, merged._snapshot.state.temperature)
    assert np.abs(answers(merged) - theirs).max() < 1e-6
    if method not in ("lwf-ncm", "ldc", "fecam"):
        assert np.abs(answers(merged) - answers(both)).max() < 1e-6, "the temperature too comes from the statistics"
    overlapping = frozen((0, 1)).merge(frozen((1, 2)))
    counts = {r["name"]: r["images"] for r in overlapping.summary()["classes"]}
    assert counts == {"class0": 20, "class1": 40, "class2": 20}
    merged.undo()
    assert len(merged.classes_) == 2


def test_fecam_learns_more_forgets_and_merges_as_if_taught_at_once(weights):
    """Its statistics are counts, means and Grams: they add and can be taken out, so no order of teaching shows."""

    def frozen(*rounds):
        return taught(*rounds, method="fecam", frozen=True, weights=weights, val_fraction=0)

    def scores(model, names):
        columns = [model.classes_.tolist().index(name) for name in names]
        return model._snapshot.logits(torch.from_numpy(model.embed(DATA.test.images)))[:, columns]

    images, names = (np.array(part) for part in lesson(0, 1, 2, 3))
    half = np.arange(len(names)) % 2 == 0
    once = frozen((0, 1, 2, 3))
    parts = [
        tiny("fecam", frozen=True, weights=weights, val_fraction=0).learn(images[h], names[h]) for h in (half, ~half)
    ]
    updated = copy.copy(parts[0]).learn(images[~half], names[~half])
    merged = copy.copy(parts[0]).merge(parts[1])
    apart = frozen((0, 1)).merge(frozen((2, 3)))
    forgotten = frozen((0, 1), (2, 3, 4), (5,)).forget(["class4", "class5"])
    expected = scores(once, once.classes_)
    for model in (updated, merged, apart, forgotten):
        assert torch.allclose(scores(model, once.classes_), expected, rtol=1e-6), model
        counts = {record["name"]: record["images"] for record in model.summary()["classes"]}
        assert counts == dict.fromkeys(once.classes_, 20)
    assert not torch.allclose(scores(parts[0], once.classes_), expected, rtol=1e-2), "half of the pictures is less"


@pytest.mark.parametrize("method", ["first-task+none+slda", "first-task+none+ridge-gcv", "first-task+none+ranpac"])
def test_one_scatter_for_all_classes_learns_more_merges_and_is_saved(weights, tmp_path, method):
    """Taught class by class in another order, in halves, or in two models: the same scores, and a calibration."""

    settings = {"frozen": True, "weights": weights, "options": {"expansion": 32} if "ranpac" in method else {}}

    def frozen(*rounds):
        return taught(*rounds, method=method, **settings)

    def scores(model):
        columns = [model.classes_.tolist().index(name) for name in sorted(model.classes_)]
        return model._snapshot.logits(torch.from_numpy(model.embed(DATA.test.images)))[:, columns]

    once = frozen((0, 1, 2, 3))
    assert once._snapshot.state.temperature > 0
    images, names = (np.array(part) for part in lesson(0, 1, 2, 3))
    half = np.arange(len(names)) % 2 == 0
    halves = tiny(method, **settings).learn(images[half], names[half])
    halves.learn(images[~half], names[~half])
    by_class, merged = frozen((3,), (1,), (0,), (2,)), frozen((3, 0)).merge(frozen((2, 1)))
    for model in (halves, by_class, merged):
        assert torch.allclose(scores(model), scores(once), rtol=1e-8, atol=1e-8), model
    once.save(tmp_path / "m")
    again = IncrementalClassifier.load(tmp_path / "m", device="cpu", progress=False)
    assert torch.equal(scores(again), scores(once))
    again.forget("class1")
    assert scores(again).shape == (30, 3)
    assert again.learn(*lesson(4)).summary()["classes"][-1]["images"] == 20


@pytest.mark.parametrize("method", FAMILY)
def test_methods_can_do_what_they_declare_and_say_what_they_cannot(weights, method):
    """A refusal is one line that names all methods that can, and leaves the model as it was."""
    known = METHODS
    freeze_backbone = {} if known[method].classifier.needs == "learner" else {"frozen": True, "weights": weights}

    def made(*rounds):
        return taught(*rounds, method=method, **freeze_backbone)

    model, other = made((0, 1, 2), (3, 4)), made((4, 5))
    before = {record["name"]: record["images"] for record in model.summary()["classes"]}
    tries = {
        "update": (lambda one: one.learn(*lesson(1)), {**before, "class1": 40}),
        "forget": (lambda one: one.forget("class1"), {k: v for k, v in before.items() if k != "class1"}),
        "merge": (lambda one: one.merge(other), {**before, "class4": 40, "class5": 20}),
    }
    assert known[method].supports <= set(tries)
    for capability, (action, wanted) in tries.items():
        one = copy.copy(model)
        if capability in known[method].supports:
            action(one)
            assert {record["name"]: record["images"] for record in one.summary()["classes"]} == wanted
            assert answers(one).shape == (30, len(wanted))
            assert np.isfinite(answers(one)).all()
            if capability != "forget":
                assert not np.array_equal(answers(one)[:, : len(before)], answers(model)), "it has learned something"
        else:
            with raises(ModelError, method, *(name for name in FAMILY if capability in known[name].supports)):
                action(one)
            assert bits(one) == bits(model)


def test_merge_refuses_what_does_not_add(model, weights):
    frozen = taught((0, 1), frozen=True, weights=weights)
    with raises(ModelError, "frozen=True", "weights"):
        frozen.merge(model)
    with raises(ModelError, "weights"):
        frozen.merge(taught((2, 3), seed=5).freeze())
    with raises(ModelError, "dpcr", "dp-ncm"):
        frozen.merge(taught((2, 3), method="dp-ncm", frozen=True, weights=weights))
    with raises(ModelError, "'ridge': 50.0", "'ridge': 3.0"):
        frozen.merge(taught((2, 3), frozen=True, weights=weights, options={"ridge": 3.0}))
    acil = taught((0, 1), method="acil", frozen=True, weights=weights)
    with raises(ModelError, "acil", "dpcr", "fecam"):
        acil.merge(acil)
    with pytest.raises(DataError, match="differ only in case"):
        frozen.merge(taught((2, 3), frozen=True, weights=weights).rename({"class2": "CLASS0"}))
    with raises(ModelError, "learn"):
        frozen.merge(tiny(frozen=True, weights=weights))


def test_timm_backbones_by_name(monkeypatch, tmp_path):
    """A module with the functions that are called stands in for timm, whose weights need a network."""
    asked = []

    def create_model(name, num_classes, pretrained=False, in_chans=3):
        asked.append((name, pretrained, num_classes, in_chans))
        if name == "nonsense":
            raise RuntimeError("Unknown model (nonsense)")
        net = torch.nn.Sequential(torch.nn.Conv2d(in_chans, 5, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        net.num_features = 5
        return net

    config = {"input_size": (3, 8, 8), "interpolation": "bicubic", "crop_pct": 1.0, "mean": STD, "std": STD}
    resolved = types.SimpleNamespace(resolve_model_data_config=lambda model: config)
    stand_in = types.SimpleNamespace(create_model=create_model, data=resolved, get_pretrained_cfg=lambda name: None)
    monkeypatch.setitem(sys.modules, "timm", stand_in)
    given = {"backbone": "timm/some_net", "device": "cpu", "progress": False}
    model = IncrementalClassifier(weights="none", epochs=2, **given)
    assert (model.method, model.frozen) == ("dpcr", False)
    assert model.preprocessing == Preprocessing(8, 1.0, "bicubic", mean=STD, std=STD)
    assert set(asked) == {("some_net", False, 0, 3)}
    model.learn(*lesson(0, 1)).learn(*lesson(2, 3))
    assert model.embed(DATA.test.images).shape == (30, 5)
    model.save(tmp_path / "m")
    assert np.array_equal(answers(IncrementalClassifier.load(tmp_path / "m", device="cpu")), answers(model))
    pretrained = IncrementalClassifier(**given).learn(*lesson(0))
    assert ("some_net", True, 0, 3) in asked
    assert (pretrained.method, pretrained.frozen) == ("slda", True)
    pretrained.save(tmp_path / "p")
    asked.clear()
    again = IncrementalClassifier.load(tmp_path / "p", device="cpu")
    assert set(asked) == {("some_net", False, 0, 3)}, "its weights are the model's own: nothing is downloaded"
    assert np.array_equal(again.embed(DATA.test.images), pretrained.embed(DATA.test.images))
    with raises(ConfigError, "timm/nonsense", "timm.list_models()"):
        IncrementalClassifier(backbone="timm/nonsense", device="cpu")
    with raises(ConfigError, "timm/some_net", "width=3"):
        IncrementalClassifier(backbone="timm/some_net", width=3, device="cpu")
    monkeypatch.setitem(sys.modules, "timm", None)
    with raises(ConfigError, "timm/some_net", "pip install 'efcil[timm]'"):
        IncrementalClassifier(backbone="timm/some_net", device="cpu")
    with raises(MissingPackageError, "timm/some_net", "pip install 'efcil[timm]'") as said:
        IncrementalClassifier.load(tmp_path / "p", device="cpu")
    assert str(said.value).endswith("pip install 'efcil[timm]'"), "the model is sound: no word of a backup"


def test_options_are_checked():
    with raises(ConfigError, "rigde", "dpcr", "'ridge'"):
        tiny(options={"rigde": 1})
    with raises(ConfigError, "'resnet9'", "timm/NAME"):
        tiny(backbone="resnet9")
    with raises(ConfigError, "'dpcrr'", "'dpcr'"):
        tiny("dpcrr")
    with raises(ConfigError, "size", 4, 8):
        tiny(size=4)
    with raises(ConfigError, "seed", -1):
        tiny(seed=-1)
    with raises(ConfigError, "rrcr", "normalize=False", "dpcr"):
        tiny("rrcr", options={"normalize": True})
    with raises(ConfigError, "use_stages=1", "intermediate_stages=1"):
        tiny("dpcr-plus", options={"use_stages": 1})
    with raises(ConfigError, "use_stages=1", "pseudo-replay", "intermediate_stages=1"):
        tiny("dpcr-plus", options={"use_stages": 1, "intermediate_stages": 2})
    with raises(ConfigError, "pseudo-replay+none+ncm", "dpcr-plus"):
        tiny("pseudo-replay+none+ncm")
    with raises(ConfigError, "val_fraction", 0.9, 0.5):
        tiny(val_fraction=0.9)
    with raises(ConfigError, "epochs=2", "budget=3"):
        tiny(budget=3)
    with raises(ConfigError, "epochs", 0):
        tiny(epochs=0)
    with raises(ConfigError, "budget", 0):
        tiny(epochs=None, budget=0)


# --- how long ---------------------------------------------------------------------------------------------------------


def test_epochs_fix_the_length_and_rates_follow(monkeypatch):
    rates = []
    fit = Trainer.fit

    def watched(self, data, state=None):
        self.callbacks = [*self.callbacks, Watch(lambda report, state: rates.append(report.lr))]
        return fit(self, data, state)

    monkeypatch.setattr(Trainer, "fit", watched)
    losses = []
    model = tiny().learn(*lesson(0, 1), epochs=5, callbacks=[lambda p: losses.append(p.loss)])
    assert rates == [Schedule(epochs=5, lr=0.1, lr_schedule="cosine").lr_at(e) for e in range(5)]
    assert len([loss for loss in losses if loss is not None]) == 5
    rates.clear()
    model.learn(*lesson(2, 3))
    assert len(rates) == 2, "the model's own number again"


def test_a_budget_becomes_epochs_that_fit(monkeypatch):
    """With a clock that shows a second more each time: an epoch of the probe takes one, and steps scale it."""
    ticks = iter(range(100_000))
    clock = types.SimpleNamespace(monotonic=lambda: float(next(ticks)))
    for module in (classifier, teaching):  # theirs alone: other threads look at the real one
        monkeypatch.setattr(module, "time", clock)
    reports = []
    fresh = tiny(epochs=None, options={"batch_size": 4})
    untouched = bits(fresh)
    fresh.learn(*lesson(0, 1), budget=12.0, callbacks=[reports.append])
    epochs = [p.total for p in reports if p.event == "training"]
    # 32 pictures to train on are 8 steps, the probe has 4: an epoch takes 2 s. The clock stood at 0 and is at 3 when
    # epochs are planned: 9 s left, 4 epochs, less one for what follows.
    assert epochs == [3] * 3
    assert untouched[0] != bits(fresh)[0]
    same = tiny(epochs=None, options={"batch_size": 4}).learn(*lesson(0, 1), epochs=3)
    assert bits(same) == bits(fresh), "timing leaves no trace"
    reports.clear()
    tiny(epochs=None).learn(*lesson(0, 1), budget=0.5, callbacks=[reports.append])
    assert len([p for p in reports if p.event == "training"]) == 1, "one epoch at least"


def test_a_real_budget_is_roughly_kept():
    """In seconds of computing: others on the same cores may come after the steps that epochs are planned by."""
    begin = time.process_time()
    tiny(epochs=None).learn(*lesson(0, 1), budget=2.0)
    assert time.process_time() - begin < 6.0


# --- telling, stopping ------------------------------------------------------------------------------------------------


def test_callbacks_see_the_whole_teaching():
    told = []
    tiny(epochs=3).learn(*lesson(0, 1), callbacks=[told.append])
    assert told.pop(0).event == "chosen"
    assert [p.event for p in told] == ["reading", "training", "training", "training", "solving", "learned"]
    assert [p.fraction for p in told] == sorted(p.fraction for p in told)
    assert told[-1].fraction == 1
    assert "epoch 2 of 3" in told[2].message
    assert all((p.loss is not None) == (p.event == "training") for p in told)


def test_a_bar_is_drawn_on_terminals(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    tiny(progress=True).learn(*lesson(0, 1))
    assert capsys.readouterr().err != ""
    tiny(progress=False).learn(*lesson(0, 1))
    assert capsys.readouterr().err == ""


def test_lines_are_printed_elsewhere_and_not_too_many(monkeypatch, capsys):
    monkeypatch.setattr("efcil.product.progress.SECONDS_PER_LINE", 60.0)
    tiny(progress=True, epochs=30).learn(*lesson(0, 1))
    first = capsys.readouterr().err.splitlines()
    assert first.pop(0).startswith("resnet10 with dpcr: trained on these pictures at 8 pixels")
    assert [line.split(",")[0] for line in first] == [
        "reading images: 40 of 40",
        "epoch 1 of 30",
        "updating statistics",
    ]
    monkeypatch.setattr("efcil.product.progress.SECONDS_PER_LINE", 0.0)
    tiny(progress=True, epochs=3).learn(*lesson(0, 1))
    later = capsys.readouterr().err
    assert [line.split(",")[0] for line in later.splitlines()[2:5]] == [f"epoch {i} of 3" for i in (1, 2, 3)]
    assert "\r" not in later


@pytest.mark.parametrize("event", ["reading", "training", "solving", "learned"])
def test_an_interrupt_anywhere_leaves_the_model_as_it_was(event):
    model = taught((0, 1))
    before, expected = bits(model), answers(model)

    def stop(progress):
        assert np.array_equal(answers(model), expected) or progress.event == "learned", "it answers meanwhile"
        if progress.event == event:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.learn(*lesson(2, 3), callbacks=[stop])
    if event == "learned":  # it is over by then
        assert len(model.classes_) == 4
        return
    assert bits(model) == before
    assert np.array_equal(answers(model), expected)
    model.learn(*lesson(2, 3))
    assert bits(model) == bits(taught((0, 1), (2, 3))), "and learns as if nothing had happened"


def test_an_error_anywhere_leaves_the_model_as_it_was(monkeypatch):
    model = taught((0, 1))
    before = bits(model)
    hasty = copy.copy(model)
    hasty._config = tiny(options={"later.lr": 1e6, "later.weight_decay": 1e6})._config
    with raises(TrainingError, "task 2"):
        hasty.learn(*lesson(2, 3))
    assert bits(hasty) == before
    monkeypatch.setattr(Ridge, "fit", lambda *a: (_ for _ in ()).throw(NumericalError("broken")))
    for step in (lambda: model.learn(*lesson(2, 3)), lambda: model.forget("class0")):
        with pytest.raises(NumericalError):
            step()
        assert bits(model) == before


# --- forgetting, undoing, renaming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dpcr", "dpcr-plus", "dp-ncm", "lwf-ncm", "sdc", "adc", "ldc", "lwf", "fecam"])
def test_forget_drops_the_class_and_leaves_the_others(method, tmp_path):
    model = taught((0, 1, 2), (3, 4, 5), method=method)
    rows = ~np.isin(DATA.test.labels, [1, 4])
    others = DATA.test.images[rows]
    before, head = model.predict_proba(others), model._snapshot.state.weights["head.weight"]
    kept = [place for place, name in enumerate(model.classes_) if name not in ("class1", "class4")]
    names = model.classes_[kept].tolist()
    assert copy.copy(model).forget(["class1", "class4"]).undo().classes_.tolist() == model.classes_.tolist()
    model.forget(["class1", "class4"], for_good=True)
    assert model.classes_.tolist() == names
    after = model.predict_proba(others)
    assert after.shape == (20, 4)
    if method not in ("dpcr", "dpcr-plus"):  # fitted again; the others' scores do not depend on each other
        assert (after.argmax(1) == before[:, kept].argmax(1)).all()
    rows_left = [place for place in kept if place < len(head)]
    assert torch.equal(model._snapshot.state.weights["head.weight"], head[rows_left])
    model.save(tmp_path / "m")
    stored = b"".join(path.read_bytes() for path in sorted((tmp_path / "m").rglob("*")) if path.is_file())
    assert b"class1" not in stored
    assert not (tmp_path / "m" / "previous").exists()
    with pytest.raises(ModelError, match="nothing to undo.*forgotten"):
        model.undo()
    model.learn(*lesson(1))
    assert model.classes_.tolist() == [*names, "class1"]


def test_forgetting_solves_again_without_the_class(model):
    stats = stats_of(model)
    place = model.classes_.tolist().index("class2")
    model.forget("class2")
    expected = normalize_columns(ridge_weight(stats.drop([place]), model._config.options.ridge))
    assert torch.equal(weight_of(model), expected)
    assert stats_of(model).classes.tolist() == [0, 1, 2, 3, 4]
    assert [r["name"] for r in model.summary()["classes"]] == model.classes_.tolist()


def test_forgetting_everything_and_nothing_known(model):
    with raises(DataError, "'class9'", "class5"):
        model.forget(["class0", "class9"])
    assert len(model.classes_) == 6
    model.forget(model.classes_)
    assert model.classes_.tolist() == []
    with raises(ModelError, "learn"):
        model.predict(DATA.test.images)
    model.learn(*lesson(0, 1))
    assert len(model.classes_) == 2


@pytest.mark.parametrize("method", ["acil", "ds-al"])
def test_sums_over_all_classes_cannot_forget_one(method):
    with raises(ModelError, method, "dpcr"):
        taught((0, 1), (2, 3), method=method).forget("class1")


@pytest.mark.parametrize("method", ["dpcr", "acil"])
def test_what_is_loaded_lies_as_what_was_learned(tmp_path, method):
    """A product may round differently in another layout or at another alignment: it would not be the same model."""
    model = taught((0, 1), (2, 3), method=method)
    model.save(tmp_path / "m")
    loaded = IncrementalClassifier.load(tmp_path / "m", device="cpu", progress=False)
    mine, theirs = model._snapshot.state.statistics, loaded._snapshot.state.statistics
    assert len(mine) >= 3
    for name, own in mine.items():
        assert own.stride() == theirs[name].stride(), name
    for name, own in (loaded._snapshot.state.weights | theirs).items():
        assert own.data_ptr() % 64 == 0, name


def test_undo_is_the_state_before_the_last_teaching(tmp_path):
    model = taught((0, 1))
    before = bits(model)
    model.learn(*lesson(2, 3))
    model.save(tmp_path / "m")
    loaded = IncrementalClassifier.load(tmp_path / "m", device="cpu", progress=False)
    for one in (model, loaded):
        after = bits(one)
        one.undo()
        assert bits(one) == before
        earlier = copy.copy(one).undo()
        assert earlier.classes_.tolist() == []
        with raises(ModelError):
            earlier.undo()
        one.learn(*lesson(2, 3), epochs=2)
        assert bits(one) == after, "the same again"
    with raises(ModelError):
        tiny().undo()


def test_rename(model, tmp_path):
    proba = answers(model)
    names = model.classes_.tolist()
    model.rename({"class0": "class1", "class1": "class0", "class2": "Äpfel & Birnen"})
    swap = {"class0": "class1", "class1": "class0", "class2": "Äpfel & Birnen"}
    assert model.classes_.tolist() == [swap.get(name, name) for name in names]
    assert np.array_equal(answers(model), proba)
    model.save(tmp_path / "m")
    again = IncrementalClassifier.load(tmp_path / "m", device="cpu")
    assert again.classes_.tolist() == model.classes_.tolist()
    again.undo()
    assert set(again.classes_) == {"class0", "class1", "Äpfel & Birnen"}, "also before the last teaching"
    with raises(DataError, "'x'", "class0"):
        model.rename({"x": "y"})
    with raises(DataError, "class3"):
        model.rename({"class4": "class3"})
    with raises(DataError, "'class3'", "'CLASS3'"):
        model.rename({"class4": "CLASS3"})
    with raises(DataError, "'a/b'", "'/'"):
        model.rename({"class4": "a/b"})


# --- answering --------------------------------------------------------------------------------------------------------


def test_none_of_these_below_a_confidence(model):
    proba = answers(model)
    middle = float(np.median(proba.max(1)))
    names = model.predict(DATA.test.images, reject_below=middle)
    assert (names == "").tolist() == (proba.max(1) < middle).tolist()
    assert 0 < (names == "").sum() < len(names)
    assert (model.predict(DATA.test.images, reject_below=0) != "").all()
    with raises(ConfigError, "reject_below", 3, 0, 1):
        model.predict(DATA.test.images, reject_below=3)


def test_score_refuses_classes_that_it_does_not_know(model):
    with raises(DataError, "zebra"):
        model.score(DATA.test.images[:2], ["class0", "zebra"])
    with raises(ModelError, "learn"):
        tiny().score(DATA)


def test_the_temperature_is_the_most_likely_one_for_drawn_features(model):
    stats = stats_of(model)
    features, places = calibration.draw_features(stats, 0)
    again, _ = calibration.draw_features(stats, 0)
    assert torch.equal(features, again)
    scores = model._snapshot.logits(features)
    best = model._snapshot.state.temperature / model._snapshot.state.calibration_offset.factor

    def cost(temperature):
        return float(torch.nn.functional.cross_entropy(scores / temperature, places))

    assert cost(best) <= min(cost(best * 1.05), cost(best / 1.05)) + 1e-4


def test_draws_are_corrected_by_what_held_out_pictures_show():
    """At rest: the ratio of the temperatures that fit the held-out pictures and draws of their classes."""
    base = taught((0, 1))
    images, names = lesson(2)
    positions = torch.full((20,), 2)
    held = teaching.UpdateBatch(images, positions, 2, 1, 1, 1, 0.2, Preprocessing(8)).validation_mask(0)
    features = torch.from_numpy(base.embed(images))
    ridge, stats = Ridge(base._config.options), ClassStats.from_features(features[~held], positions[~held])
    ridge.fit(stats_of(base).merge(stats))
    seen = calibration.fit_temperature(ridge.logits(features[held]), positions[held])
    drawn, places = calibration.draw_features(stats, 0)
    ratio = np.log(seen / calibration.fit_temperature(ridge.logits(drawn), places + 2))
    before = base._snapshot.state.calibration_offset
    after = base.learn(images, names)._snapshot.state.calibration_offset
    assert after.images == before.images + 4
    assert after.log_ratio * after.images == pytest.approx(before.log_ratio * before.images + 4 * ratio)
    frozen = base.freeze().learn(*lesson(3))
    assert frozen._snapshot.state.calibration_offset == after, (
        "of a frozen backbone the statistics alone decide, so that models add"
    )


def test_drawn_features_have_the_mean_and_the_spread_of_their_class(monkeypatch):
    monkeypatch.setattr(calibration, "DRAWS", 40_000)
    features = torch.cat(
        [draw(4000, 3) @ torch.diag(torch.tensor([1.0, 2.0, 0.1]).double()) + 5, draw(4000, 3, seed=1)]
    )
    stats = ClassStats.from_features(features, torch.arange(2).repeat_interleave(4000))
    drawn, places = calibration.draw_features(stats, 3)
    assert torch.allclose(drawn[places == 0].mean(0), stats.mean[0], atol=0.05)
    assert torch.allclose(torch.cov(drawn[places == 0].T), stats.covariance()[0], atol=0.1)


def test_draws_do_not_depend_on_the_order_of_classes(monkeypatch):
    """Also where there are more classes than can be drawn from."""
    features, order = draw(300, 6), torch.tensor([4, 2, 0, 5, 1, 3])
    labels = torch.arange(6).repeat(50)
    features[labels == 5] += 2
    one, other = (ClassStats.from_features(features, own) for own in (labels, order.argsort()[labels]))
    for draws in (600, 3):
        monkeypatch.setattr(calibration, "DRAWS", draws)
        (mine, places), (theirs, others) = (calibration.draw_features(stats, 0) for stats in (one, other))
        assert torch.allclose(mine, theirs, rtol=1e-9)
        assert torch.equal(places, order[others])
        assert len(places.unique()) == min(6, draws)


def many_classes(classes, dim):
    """Statistics of classes with one covariance for all."""
    means, scatter = draw(classes, dim), 20 * classes * torch.eye(dim).double()
    shared = SharedScatter(pack_symmetric(scatter), 20 * classes, classes)
    count, none = torch.full((classes,), 20), LowRankGrams.zero(classes, means[:1])
    return ClassStats(torch.arange(classes), count, means, [none], None, shared)


def test_calibration_is_linear_in_classes():
    for classes in (100, 3000):
        drawn, places = calibration.draw_features(many_classes(classes, 4), 0)
        assert len(drawn) * classes <= calibration.SCORES
        assert 300 < len(drawn) <= calibration.DRAWS
        assert len(places.unique()) == min(classes, len(drawn))


def test_evidence_in_parts_is_the_whole(monkeypatch):
    """Scores of all images and classes at once would take gigabytes; of many classes some tell the temperature."""
    features, labels = draw(600, 8), torch.arange(12).repeat(50)
    features = features + 2 * draw(12, 8)[labels]
    head = SharedCovariance()
    head.fit(ClassStats.from_features(features, labels))
    whole, right = evidence.gather(head, features, labels)
    warm = evidence.temperature(head, whole)
    scores = head.mapped_logits(head.means)
    margins = (scores.diag()[:, None] - scores).fill_diagonal_(float("inf"))
    monkeypatch.setattr(evidence, "SCORES", 60)
    delta, rival = evidence.class_rivals(head, torch.arange(12))
    assert torch.allclose(delta, margins.min(1).values, rtol=1e-12)
    assert torch.equal(rival, margins.argmin(1))
    parts, hits = evidence.gather(head, features, labels)
    assert hits == right
    assert np.allclose(dataclasses.astuple(parts), dataclasses.astuple(whole), rtol=1e-12)
    assert math.isclose(evidence.temperature(head, whole), warm, rel_tol=1e-12)
    monkeypatch.setattr(evidence, "_CLASSES", 6)
    assert 0.5 < evidence.temperature(head, whole) / warm < 2  # from five of the twelve


TEN_THOUSAND = """
import resource, sys, time
import numpy as np, torch
from efcil.product import IncrementalClassifier
torch.set_num_threads(2)
k, n = 10_000, 20_000
features = torch.from_numpy(np.random.default_rng(0).normal(size=(n, 1280)).astype("f4"))
IncrementalClassifier._features_of_many = lambda self, images: features[: len(images)]
model = IncrementalClassifier(
    method="slda", backbone="efficientnet-lite0", size=32, frozen=True, device="cpu", progress=False
)
images, names = np.zeros((n, 3, 32, 32), np.uint8), [f"class {i % k}" for i in range(n)]
began = time.process_time()
model.learn(images, names)
learned = time.process_time()
model.forget("class 17")
print(learned - began, time.process_time() - learned, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.slow
def test_ten_thousand_classes_are_learned_and_one_is_forgotten():
    """Two images of each class, 1,280 features: seconds of both cores together, and MiB of the process."""
    found = subprocess.run([sys.executable, "-c", TEN_THOUSAND], capture_output=True, text=True, check=True)
    learn, forget, most = map(float, found.stdout.split())
    assert learn < 60  # 12 on two busy cores
    assert forget < 5  # 2.6 on two busy cores, a second of wall time on two idle ones
    assert most < 1907  # 2 GB


def test_grams_that_do_not_fit_are_refused_before_memory_is_taken(monkeypatch):
    monkeypatch.setattr(classifier, "memory", lambda: 10_000)
    model = tiny()
    with raises(ModelError, "16 features", "6 classes", "gram_storage", "slda"):
        model.learn(*lesson(*range(6)))
    assert len(model.classes_) == 0
    tiny(options={"gram_storage": "factors"}).learn(*lesson(0, 1))


def test_similar_classes_are_the_same_in_parts(model, monkeypatch):
    whole = model.summary()["similar"]
    monkeypatch.setattr(classifier, "SIMILAR_ROWS", 2)
    assert model.summary()["similar"] == whole


def test_scores_that_are_always_right_give_a_finite_temperature():
    scores, labels = torch.eye(4).repeat(10, 1), torch.arange(4).repeat(10)
    temperature = calibration.fit_temperature(scores, labels)
    assert 0 < temperature < 1
    sure = torch.softmax(scores / temperature, 1).max()
    assert 0.9 < sure < 1
    assert calibration.fit_temperature(torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)) == 1.0


def test_the_whole_model_as_one_module(model):
    images = torch.from_numpy(DATA.test.images)
    assert np.allclose(model.network()(images).numpy(), answers(model), atol=1e-5)


def test_summary_is_plain(model):
    summary = json.loads(json.dumps(model.summary()))
    assert summary["method"] == "dpcr"
    assert summary["format"] == FORMAT
    assert (summary["backbone"], summary["size"], summary["dim"], summary["updates"]) == ("resnet10", 8, 16, 2)
    assert summary["bytes"] > 10_000
    assert set(summary["classes"][0]) == {"name", "images", "learned", "recall", "checked", "expected"}
    assert summary["classes"][0]["learned"] == "2026-11-15"
    assert summary["classes"][0]["images"] == 20
    one, other, cosine = summary["similar"][0]
    means = dict(zip(model.classes_, stats_of(model).mean, strict=True))
    assert cosine == pytest.approx(float(torch.cosine_similarity(means[one], means[other], 0)), abs=1e-4)
    assert [pair[2] for pair in summary["similar"]] == sorted((pair[2] for pair in summary["similar"]), reverse=True)
    assert tiny().summary()["similar"] == []


# --- pictures of every kind -------------------------------------------------------------------------------------------


def png(image, **info):
    buffer = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(buffer, "PNG", **info)
    return buffer.getvalue()


def forms(tmp_path):
    images = DATA.test.images[:6]
    paths = []
    for row, image in enumerate(images):
        paths.append(tmp_path / f"p{row}.png")
        paths[-1].write_bytes(png(image))
    last = images.transpose(0, 2, 3, 1)
    return images, {
        "channels first": images,
        "channels last": last,
        "float": (images / 255).astype(np.float32),
        "float64": images / 255,
        "torch": torch.from_numpy(images),
        "torch float": torch.from_numpy(images).float() / 255,
        "paths": paths,
        "strings": [str(path) for path in paths],
        "array of strings": np.array([str(path) for path in paths]),
        "bytes": [path.read_bytes() for path in paths],
        "pillow": [Image.open(path) for path in paths],
        "mixed": [paths[0], images[1].transpose(1, 2, 0), torch.from_numpy(images[2]), *map(str, paths[3:])],
        "image set": ImageSet(images, np.zeros(6, np.int64)),
    }


def test_pictures_of_every_kind_are_the_same(model, tmp_path):
    images, given = forms(tmp_path)
    for kind, value in given.items():
        assert np.array_equal(read_images(value, 8), images), kind
    for single in (given["paths"][0], given["bytes"][0], given["pillow"][0]):
        assert model.predict(single).tolist() == model.predict(images[:1]).tolist()


def test_any_size_mode_and_orientation():
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 256, (3, 40, 60), dtype=np.uint8)
    expected = read_image(png(wide), 16)
    assert np.array_equal(read_images(wide[None], 16)[0], expected)
    assert np.array_equal(read_images(wide.transpose(1, 2, 0)[None], 16)[0], expected)
    grey = rng.integers(0, 256, (2, 16, 16), dtype=np.uint8)
    assert np.array_equal(read_images(grey, 16), np.repeat(grey[:, None], 3, 1))
    assert np.array_equal(read_images(grey[:, None], 16), np.repeat(grey[:, None], 3, 1))
    alpha = np.dstack([wide.transpose(1, 2, 0), np.zeros((40, 60), np.uint8)])
    assert (read_images(alpha[None], 16) == 255).all(), "transparent is white"
    exif = Image.Exif()
    exif[0x0112] = 3
    turned = read_images([png(wide, exif=exif)], 16)[0]
    assert np.array_equal(turned, expected[:, ::-1, ::-1])


def heic(pixels, **options):
    """A photograph as telephones keep them, encoded by pillow-heif."""
    heif = pytest.importorskip("pillow_heif", reason="no pillow-heif here: pip install 'efcil[heic]'")
    file = io.BytesIO()
    heif.from_pillow(Image.fromarray(pixels)).save(file, quality=100, **options)
    return file.getvalue()


def test_heic_is_read_with_its_extra(tmp_path):
    left = np.zeros((48, 64, 3), np.uint8)
    left[:, :32] = (200, 40, 90)
    data = heic(left)
    assert data[4:12] == b"ftypheic"
    (tmp_path / "IMG_0001.HEIC").write_bytes(data)
    expected = read_images(left[None], 24)[0].astype(int)
    for source in (data, tmp_path / "IMG_0001.HEIC"):
        assert np.abs(read_images([source], 24)[0] - expected).max() < 12, "lossy, and no further off"
    exif = Image.Exif()
    exif[0x0112] = 6  # held upright: to be turned by a quarter
    upright = read_images([heic(left, exif=exif.tobytes())], 24)[0].astype(int)
    assert np.abs(upright - np.rot90(expected, -1, (1, 2))).max() < 12
    assert (read_images([heic(np.dstack([left, np.zeros((48, 64), np.uint8)]))], 24) > 243).all(), "clear is white"


def test_heic_in_folders_and_damaged(tmp_path):
    """In a folder beside other pictures; one that was cut short is named."""
    place = folder(tmp_path / "lesson")
    data = heic(np.full((16, 16, 3), 90, np.uint8))
    (place / "class0" / "telephone.heic").write_bytes(data)
    images, names = read_labeled_images(place, None, 8)
    assert names.count("class0") == 7
    assert (np.abs(images.astype(int) - 90).max((1, 2, 3)) < 12).sum() == 1
    with raises(DataError, "16 x 16", 100):
        read_image(data, 8, max_pixels=100)
    (place / "class0" / "telephone.heic").write_bytes(data[: len(data) // 2])
    with raises(DataError, "class0/telephone.heic", "skip_bad=True"):
        read_labeled_images(place, None, 8)


def test_heic_without_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with raises(DataError, "pillow-heif", "pip install 'efcil[heic]'"):
        read_images([b"\0\0\0\x18ftypheic" + bytes(20)], 8)


def folder(root, data=DATA, classes=(0, 1), per_class=6, prefix="secret-holiday"):
    for label in classes:
        (root / data.class_names[label]).mkdir(parents=True)
        rows = np.flatnonzero(data.train.labels == label)[:per_class]
        for row in rows:
            (root / data.class_names[label] / f"{prefix}-{row}.png").write_bytes(png(data.train.images[row]))
    return root


def in_order(place):
    return sorted(place.iterdir(), key=lambda path: int(path.stem.rpartition("-")[2]))


def test_a_folder_is_learned_and_scored(tmp_path):
    root = folder(tmp_path / "pictures")
    model = tiny().learn(root)
    assert model.classes_.tolist() == ["class0", "class1"]
    assert [r["images"] for r in model.summary()["classes"]] == [6, 6]
    names = [name for name in model.classes_ for _ in range(6)]
    paths = [
        path for name in model.classes_ for path in sorted((root / name).iterdir(), key=lambda p: int(p.stem[15:]))
    ]
    assert model.score(root) == model.score(paths, names)
    assert bits(tiny().learn(paths, names)) == bits(model)
    split = tmp_path / "split"
    folder(split / "train", classes=(0, 1))
    folder(split / "test", classes=(0, 1), per_class=3)
    assert [r["images"] for r in tiny().learn(split).summary()["classes"]] == [6, 6], "of train/ and test/ the first"


def test_data_sets_are_learned_from_their_training_part(two):
    images, names = lesson(0, 1, 2)
    part = DataSet("x", DATA.class_names[:3], ImageSet(images, np.array([int(n[-1]) for n in names])),
                   ImageSet(DATA.test.images[DATA.test.labels < 3], DATA.test.labels[DATA.test.labels < 3]),
                   DATA.mean, DATA.std)  # fmt: skip
    model = tiny().learn(part)
    assert [r["images"] for r in model.summary()["classes"]] == [20] * 3
    assert tiny().learn(part.train).classes_.tolist() == [n[-1] for n in dict.fromkeys(names)], "numbers are names too"
    assert model.score(part) == model.score(part.test.images, [f"class{label}" for label in part.test.labels])


def test_many_paths_are_decoded_by_several_processes_and_nothing_stays(tmp_path, monkeypatch):
    root = folder(tmp_path / "pictures", per_class=20)
    alone = tiny().learn(root)
    monkeypatch.setattr(cache, "MIN_PARALLEL", 8)
    monkeypatch.setattr(cache, "cores", lambda: 2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    (root / "class0" / "broken.png").write_bytes(b"no picture")
    told = []
    with raises(DataError, "class0/broken.png", "skip_bad=True"):
        tiny().learn(root)
    with pytest.warns(DataWarning, match="skipped 1 file: class0/broken.png"):
        together = tiny().learn(root, skip_bad=True, callbacks=[told.append])
    assert bits(together) == bits(alone)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not (tmp_path / "cache").exists(), "decoded pictures are not kept"
    assert [progress.event for progress in told[:2]] == ["chosen", "reading"]
    assert told[1].total == 41


# --- bad input --------------------------------------------------------------------------------------------------------

ONE = np.zeros((2, 16, 16, 3), np.uint8)


@pytest.mark.parametrize(
    ("data", "labels", "named"),
    [
        ([], [], ("images",)),
        (np.zeros((0, 16, 16, 3), np.uint8), [], ("images",)),
        (ONE, None, ("labels",)),
        (ONE, ["a"], (1, 2)),
        (iter(ONE), ["a", "b", "c"], (3, 2)),
        (ONE, "ab", ("labels", "'ab'")),
        (ONE, [1.5, 2.0], (1.5, 0, "float")),
        (ONE, [True, False], (True, 0, "bool")),
        (ONE, [None, "a"], (None, 0, "NoneType")),
        (np.full((2, 16, 16, 3), np.nan), ["a", "b"], ("NaN", 0, 2)),
        (ONE.astype(float) + 7, ["a", "b"], ("float64", 7, 0, 1, "uint8", 255)),
        (ONE.astype(np.int64), ["a", "b"], ("int64", "uint8")),
        (np.zeros((16, 16, 3), np.uint8), ["a"] * 16, ((16, 16, 3),)),
        (np.zeros((2, 16, 16, 7), np.uint8), ["a", "b"], ((2, 16, 16, 7), 1, 3, 4)),
        (np.zeros((2, 16), np.uint8), ["a", "b"], ((2, 16), "(n, h, w)", "(n, h, w, c)")),
        (3, ["a"], ("images", "int")),
        ([3], ["a"], ("class a", "image 0", "int")),
        ([b"hello"], ["a"], ("class a", "image 0", "JPEG")),
        (["/nowhere/x.png"], ["a"], ("class a", "/nowhere/x.png")),
        ("/nowhere/at/all", None, ("/nowhere/at/all",)),
        (ONE, ["cat", "Cat"], ("'cat'", "'Cat'")),
        (ONE, ["caf\u00e9", "cafe\u0301"], ("'caf\u00e9'", "'cafe\u0301'")),
        (ONE, ["a/b", "c"], ("'a/b'", "'/'")),
        (ONE, ["a\\b", "c"], (repr("a\\b"), repr("\\"))),
        (ONE, ["a\0b", "c"], (repr("a\0b"), repr("\0"))),
        (ONE, ["", "c"], ("class name",)),
        (ONE, [" a", "c"], ("' a'",)),
        (ONE, ["..", "c"], ("'..'",)),
        (DATA, ["a"], ("labels",)),
    ],
)
def test_bad_input_is_reported_in_one_line_and_changes_nothing(data, labels, named):
    model = tiny()
    before = bits(model)
    with raises(DataError, *named):
        model.learn(data, labels)
    assert bits(model) == before


def test_names_clash_with_what_the_model_knows(model):
    with raises(DataError, "'class0'", "'CLASS0'"):
        model.learn(ONE, ["CLASS0", "new"])


def test_bad_files_in_folders(tmp_path):
    root = folder(tmp_path / "p")
    (root / "class0" / "text.jpg").write_text("this is text")
    with raises(DataError, "class0/text.jpg", "skip_bad=True"):
        tiny().learn(root)
    with pytest.warns(DataWarning, match="skipped 1 file: class0/text.jpg"):
        assert [r["images"] for r in tiny().learn(root, skip_bad=True).summary()["classes"]] == [6, 6]
    (root / "class2").mkdir()
    with raises(DataError, "class2", root):
        tiny().learn(root, skip_bad=True)
    (root / "class2" / "text.jpg").write_text("this is text")
    with raises(DataError, "class2", "class2/text.jpg"):
        tiny().learn(root, skip_bad=True)
    (root / "class2" / "text.jpg").rename(root / "class2" / "notes.txt")
    with raises(DataError, "class2", "class2/notes.txt"):
        tiny().learn(root)
    with raises(DataError, root):
        taught((0, 1)).predict(root)


# --- the directory ----------------------------------------------------------------------------------------------------


def files(place):
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(Path(place).rglob("*")) if p.is_file()}


def test_a_directory_is_safetensors_and_json_and_survives_a_round_trip_bit_for_bit(two, tmp_path):
    two.save(tmp_path / "m")
    names = {"model.json", "weights.safetensors", "statistics.safetensors"}
    steps = ("", "previous/", "previous/previous/")  # two updates, and before them nothing
    assert set(files(tmp_path / "m")) == {f"{step}{name}" for step in steps for name in names}
    IncrementalClassifier.load(tmp_path / "m", device="cpu").save(tmp_path / "n")
    assert files(tmp_path / "n") == files(tmp_path / "m")
    card = json.loads((tmp_path / "m" / "model.json").read_text())
    assert card["format"] == FORMAT
    assert card["id"] == json.loads((tmp_path / "m" / "previous" / "model.json").read_text())["id"], "through updates"
    tiny().save(tmp_path / "other")
    assert card["id"] != json.loads((tmp_path / "other" / "model.json").read_text())["id"]
    shutil.rmtree(tmp_path / "other")
    parts = {name.partition("/")[0].rpartition(".")[0] for name in load_file(tmp_path / "m" / "statistics.safetensors")}
    assert parts == {"tracks.0", ""}
    assert [record["name"] for record in card["classes"]] == two.classes_.tolist()
    for name in names - {"model.json"}:
        load_file(tmp_path / "m" / name)
    assert list(tmp_path.iterdir()) == [tmp_path / "m", tmp_path / "n"] or len(list(tmp_path.iterdir())) == 2


def test_an_untaught_model_can_be_kept(tmp_path):
    model = tiny()
    model.save(tmp_path / "m")
    again = IncrementalClassifier.load(tmp_path / "m", device="cpu", progress=False)
    assert again.classes_.tolist() == []
    assert bits(again.learn(*lesson(0, 1), epochs=2)) == bits(model.learn(*lesson(0, 1)))


def test_no_picture_and_no_file_name_is_in_it(tmp_path):
    root = folder(tmp_path / "where-they-were", classes=(0, 1, 2), per_class=8)
    model = tiny().learn(root)
    model.learn(*lesson(3, 4))
    model.save(tmp_path / "m")
    stored = b"\0".join(files(tmp_path / "m").values())
    for path in (p for p in root.rglob("*") if p.is_file()):
        assert path.stem.encode() not in stored
        assert path.read_bytes()[-64:-16] not in stored
    assert b"where-they-were" not in stored
    assert b"secret-holiday" not in stored
    assert os.fsencode(tmp_path) not in stored
    images = np.concatenate([DATA.train.images, DATA.train.images[..., ::-1]])
    for image in images:
        for rows in (image, image.transpose(1, 2, 0)):  # either order of channels
            assert np.ascontiguousarray(rows[0]).tobytes()[:24] not in stored
            for kind in (np.float32, np.float64):
                assert np.ascontiguousarray(rows[0], dtype=kind).tobytes()[:32] not in stored
                assert np.ascontiguousarray(rows[0] / 255, dtype=kind).tobytes()[:32] not in stored
    kept = model._snapshot.state
    numbers = sum(t.numel() for t in kept.statistics.values())
    assert numbers == 5 * (16 * 17 // 2 + 16 + 3 + 16), "per class a Gram, a mean, count, number, moves and a column"


def test_loading_never_unpickles(two, tmp_path, monkeypatch):
    two.save(tmp_path / "m")
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("unpickled"))
    IncrementalClassifier.load(tmp_path / "m", device="cpu")


def damaged_json(place, **changes):
    path = place / "model.json"
    card = json.loads(path.read_text())
    path.write_text(json.dumps({**card, **changes}))


def test_what_is_no_model_is_refused(two, tmp_path):
    def refused(*named, place=tmp_path / "m"):
        with raises(ModelError, *named):
            IncrementalClassifier.load(place, device="cpu")

    refused(tmp_path / "nothing", place=tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "model.json", place=tmp_path / "folder")

    def fresh():
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        two.save(tmp_path / "m")

    card = tmp_path / "m" / "model.json"
    fresh()
    damaged_json(tmp_path / "m", format=FORMAT + 1, efcil="9.9")
    refused(card, f"format {FORMAT + 1}", "9.9", "pip install --upgrade efcil")
    for earlier in range(1, FORMAT):
        fresh()
        damaged_json(tmp_path / "m", format=earlier)
        refused(card, f"format {earlier}", "earlier version", "train the model again")
    fresh()
    damaged_json(tmp_path / "m", format=0)
    refused(card, "format 0")
    fresh()
    damaged_json(tmp_path / "m", kind="something else")
    refused(card)
    fresh()
    damaged_json(tmp_path / "m", temperature=-1)
    refused(card, "temperature")
    fresh()
    damaged_json(tmp_path / "m", config={})
    refused(card, "'method'")
    fresh()
    card.write_text("{")
    refused(card, "JSON")
    for name in ("weights.safetensors", "statistics.safetensors", "previous/weights.safetensors"):
        fresh()
        path = tmp_path / "m" / name
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(content)
        refused(path, "model.json")
        path.unlink()
        refused(tmp_path / "m", path.name)
    fresh()
    settings = json.loads(card.read_text())["config"]
    settings["training"]["width"] = 4
    damaged_json(tmp_path / "m", config=settings)
    refused(tmp_path / "m", "model.json", "resnet10")


def test_saving_never_takes_the_place_of_something_else(model, tmp_path):
    (tmp_path / "file").write_text("x")
    with raises(ModelError, tmp_path / "file"):
        model.save(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "diary.txt").write_text("x")
    with raises(ModelError, tmp_path / "folder", "diary.txt"):
        model.save(tmp_path / "folder")
    assert (tmp_path / "folder" / "diary.txt").read_text() == "x"
    (tmp_path / "empty").mkdir()
    model.save(tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    model.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("what", ["weights.safetensors", "statistics.safetensors", "model.json", "swap"])
@pytest.mark.parametrize("exchange", [True, False])
def test_the_old_model_survives_a_full_disk(model, tmp_path, monkeypatch, what, exchange):
    if not exchange:
        monkeypatch.setattr(model_directory, "exchange", lambda one, other: False)
    model.save(tmp_path / "m")
    before = files(tmp_path / "m")
    model.learn(*lesson(0))

    def full(*a, **k):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if what == "model.json":
            patch.setattr(model_directory, "write_json", full)
        elif what == "swap":
            patch.setattr(model_directory, "exchange", lambda one, other: False)
            original = os.replace
            patch.setattr(
                os, "replace", lambda a, b, **where: full() if str(a).endswith(".new") else original(a, b, **where)
            )
        else:
            original = model_directory.save_file

            def some(tensors, path):
                original(tensors, path)
                if what.removesuffix(".safetensors") in path.name:
                    path.write_bytes(path.read_bytes()[:100])
                    full()

            patch.setattr(model_directory, "save_file", some)
        with raises(ModelError, tmp_path / "m", "No space left on device"):
            model.save(tmp_path / "m")
    assert files(tmp_path / "m") == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"], "and nothing is left beside it"
    model.save(tmp_path / "m")
    assert files(tmp_path / "m") != before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_swap_in_two_steps_that_was_cut_short_is_found(model, tmp_path):
    model.save(tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / ".m.old")
    again = IncrementalClassifier.load(tmp_path / "m", device="cpu")
    assert np.array_equal(answers(again), answers(model))
    again.save(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_the_swap_is_one_step_here(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    if not model_directory.exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange two names")
    assert (tmp_path / "a" / "b").read_text() == "b"
    assert (tmp_path / "b" / "a").read_text() == "a"


def test_progress_is_exported():
    assert Progress("training", 1, 2, "").fraction == pytest.approx(0.5)


@pytest.mark.cuda
def test_models_travel_between_cpu_and_gpu(tmp_path):
    there = taught((0, 1, 2), device="cuda", precision="fp32")
    there.learn(*lesson(3, 4))
    there.save(tmp_path / "m")
    here = IncrementalClassifier.load(tmp_path / "m", device="cpu", progress=False)
    near = {"atol": 0.01}  # on a GPU the products of convolutions have ten bits, torch's default
    assert np.allclose(answers(here), answers(there), **near)
    here.learn(*lesson(5, 0))
    here.save(tmp_path / "m")
    assert np.allclose(answers(IncrementalClassifier.load(tmp_path / "m", device="cuda", precision="fp32")),
                       answers(here), **near)  # fmt: skip


@pytest.mark.alone
def test_five_classes_of_a_hundred_pictures_take_under_two_minutes():
    """Of the clock, or of computing in both threads together, which is more where nobody else is at work."""
    data = glyphs.load(classes=10, size=64, train_per_class=100, test_per_class=2)
    torch.set_num_threads(2)
    try:
        model = IncrementalClassifier("dpcr", device="cpu", progress=False)
        for start in (0, 5):
            begin = time.monotonic(), time.process_time()
            model.learn(*lesson(*range(start, start + 5), data=data))
            assert min(time.monotonic() - begin[0], time.process_time() - begin[1]) < 120
    finally:
        torch.set_num_threads(1)
