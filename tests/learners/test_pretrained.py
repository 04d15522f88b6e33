"""A backbone that is frozen from the start, one that adapts to the first task, and methods that are moved there."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import efcil
from efcil import models
from efcil.core.metrics import AccuracyMatrix
from efcil.data.dataset import DataSet, ImageSet
from efcil.data.preprocessing import Preprocessing
from efcil.errors import ConfigError
from efcil.experiment.specification import ExperimentSpec, by_trajectory, joining_methods, resolve
from efcil.learners import LEARNERS
from efcil.learners.pretrained import PretrainedOptions
from efcil.methods import find, on_learner
from efcil.protocol import Evaluator
from efcil.tasks import TaskStream
from efcil.training.image_batches import ImageBatches
from efcil.trajectory import Trajectory
from messages import raises
from problems import TINY, blobs, copied, follow_stream

SIZES = (2, 3, 1)


class Weights:
    """Keeps the backbone's weights after each task."""

    def __init__(self, learner):
        self.learner, self.kept = learner, [copied(learner.backbone.state_dict())]

    def on_epoch_end(self, report, state): ...

    def on_step_end(self, state, steps): ...

    def on_training_end(self, task):
        self.kept.append(copied(self.learner.backbone.state_dict()))

    def on_features(self, features): ...

    def on_task_end(self, task): ...

    def moved(self):
        pairs = zip(self.kept, self.kept[1:], strict=False)
        return [any(not torch.equal(old[key], new[key]) for key in old) for old, new in pairs]


def learn(kind, backend, data, *methods):
    """Learn the tasks; return the accuracies and in which tasks the backbone moved."""
    learner = LEARNERS[kind](LEARNERS[kind].options_type(**TINY), data.channels, backend, 0)
    stream = TaskStream(data.train, np.arange(sum(SIZES)), SIZES)
    evaluator = Evaluator(data, stream, backend)
    trajectory = Trajectory(learner, {m.name: (m, m.options()) for m in methods}, freezes=True)
    matrices = {label: AccuracyMatrix(evaluator.totals()) for label in trajectory.parts}
    watch = Weights(learner)
    follow_stream(stream, data, evaluator, trajectory, matrices, watch)
    return matrices, watch.moved()


@pytest.mark.parametrize(("kind", "moved"), [("pretrained", [False] * 3), ("adapt-first", [True, False, False])])
def test_when_the_backbone_is_trained(backend, kind, moved):
    matrices, found = learn(kind, backend, blobs(seed=3), on_learner(find("simplecil"), kind))
    assert found == moved
    assert matrices["simplecil"].tasks_done == 3


def test_behind_a_frozen_backbone_a_method_is_its_classifier(backend):
    names = ("dpcr", "dp-ncm", "ldc", "simplecil")
    methods = [on_learner(find(name), "pretrained") for name in (*names, "pretrained+none+ridge")]
    matrices, _ = learn("pretrained", backend, blobs(seed=3), *methods)
    assert matrices["dpcr"] == matrices["pretrained+none+ridge"]
    assert matrices["dp-ncm"] == matrices["ldc"] == matrices["simplecil"]


def test_a_method_that_is_moved_keeps_its_name_and_what_it_fixes():
    moved = on_learner(find("rrcr+tssp"), "pretrained")
    assert moved.name == "rrcr+tssp"
    assert moved.parts == ("pretrained", "none", "ridge")
    assert moved.overrides == {"normalize": False}
    assert on_learner(find("dpcr"), "lwf") is find("dpcr")
    assert on_learner(find("slda"), "first-task").reads_first_backbone


def test_what_needs_a_trained_head_is_refused():
    with raises(ConfigError, "lwf", "head", "pretrained"):
        on_learner(find("lwf"), "pretrained")
    with raises(ConfigError, "icarl", "exemplar-means", "pretrained"):
        on_learner(find("icarl"), "pretrained")
    with raises(ConfigError, "'pretraned'", "'pretrained'"):
        on_learner(find("dpcr"), "pretraned")


def test_one_learner_for_all_methods_is_one_trajectory():
    spec = ExperimentSpec(("ranpac", "fecam", "dpcr"), "digits", learner="Pretrained", overrides={"expansion": 64})
    (part,) = by_trajectory(spec).values()
    experiment = resolve(part)
    assert experiment.learner == "pretrained"
    assert {m.learner for m, _ in experiment.methods.values()} == {"pretrained"}
    assert len(by_trajectory(ExperimentSpec(("ranpac", "fecam", "dpcr"), "digits"))) == 2


def test_a_module_with_weights_of_its_own(backend):
    """Features of a module are those it has: classes apart in its output are told apart without training."""
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        module[1].weight.copy_(torch.eye(64))
    results = efcil.compare(
        ["slda", "simplecil"], "digits", tasks=5, options={"backbone": module}, learner="pretrained", progress=False
    )
    assert results["slda"].final_accuracy > 85
    assert results["slda"].final_accuracy > results["simplecil"].final_accuracy


# --- weights, and what they were trained to see


def test_a_run_begins_with_the_weights_that_were_named(tmp_path, backend):
    """Trained features tell more than random ones do; a run without them has another network."""
    data, named = blobs(seed=3), tmp_path / "net.safetensors"
    network = models.build("resnet10", width=2, seed=7)
    save_file(network.state_dict(), named)
    options = PretrainedOptions(**TINY, weights=str(named))
    learner = LEARNERS["pretrained"](options, data.channels, backend, 0)
    assert not torch.equal(learner.backbone.conv1.weight, network.conv1.weight)
    learner.load_weights()
    assert torch.equal(learner.backbone.conv1.weight, network.conv1.weight)


@pytest.mark.parametrize("weights", ["pretrained", "/nowhere/net.safetensors"])
def test_weights_that_are_not_there_are_said_before_anything_is_computed(weights, tmp_path):
    with raises(ConfigError, "weights", "resnet10" if weights == "pretrained" else weights):
        efcil.compare(
            ["slda"], "digits", options={"backbone": "resnet10", "weights": weights}, progress=False, out=tmp_path / "r"
        )
    assert not list(tmp_path.rglob("config.yaml"))


def test_what_the_network_sees():
    assert PretrainedOptions().preprocessing() == models.preprocessing("efficientnet-lite0")
    assert PretrainedOptions(weights=None).preprocessing() is None
    changed = PretrainedOptions(input={"crop": 1.0, "mean": (0, 0, 0)}).preprocessing()
    assert (changed.crop, changed.mean, changed.size) == (1.0, (0, 0, 0), 224)
    assert PretrainedOptions(backbone="resnet18", weights="x.pth", input={"size": 64}).preprocessing().size == 64
    with raises(ConfigError, "input.size", "resnet18"):
        PretrainedOptions(backbone="resnet18", weights="x.pth", input={"crop": 0.5}).preprocessing()


def test_small_and_gray_images_are_what_the_network_expects(backend):
    """As if they had been enlarged and colored before: the features are the same."""
    gray = np.random.default_rng(0).integers(0, 256, (4, 1, 12, 12), dtype=np.uint8)
    wanted = Preprocessing(32, crop=0.8, interpolation="bilinear", mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    part = ImageSet(gray, np.arange(4))
    data = DataSet("gray", tuple("abcd"), part, part, (0.1,), (0.1,)).prepared(wanted)
    pixels = ImageBatches.of(torch.from_numpy(data.train.images), data, backend)
    found = pixels.normalize(pixels.images)
    larger = torch.nn.functional.interpolate(
        torch.from_numpy(gray).double(), (40, 40), mode="bilinear", antialias=True
    )[..., 4:36, 4:36]
    by_hand = (larger / 255 - torch.tensor(wanted.mean).view(3, 1, 1)) / torch.tensor(wanted.std).view(3, 1, 1)
    assert found.shape == (4, 3, 32, 32)
    assert (found - by_hand).abs().max() < 1e-4


def test_methods_join_a_frozen_backbone_that_was_named():
    methods = ("ranpac", "slda", "simplecil", "fecam", "dpcr", "lwf")
    spec = ExperimentSpec(methods, "digits", overrides=("backbone=efficientnet-lite0", "expansion=64"))
    assert {name: part.methods for name, part in by_trajectory(spec).items()} == {
        "pretrained": methods[:-1],
        "lwf": ("lwf",),
    }
    assert joining_methods(spec) == ["fecam", "dpcr"]
    alone = ExperimentSpec(("dpcr", "fecam"), "digits", overrides=("backbone=efficientnet-lite0",))
    assert joining_methods(alone) == []


@pytest.mark.parametrize("dataset", ["cifar100", "cub200", "imagenet-r", "imagenet-a"])
def test_published_settings_of_vision_transformers(dataset):
    methods = ("ranpac", "simplecil", "fecam", "acil")
    found = resolve(ExperimentSpec(methods, dataset, tasks=10, learner="pretrained", preset="vit_b16"))
    assert found.training.backbone == "timm/vit_base_patch16_224.augreg_in21k"
    seen = found.training.input
    assert (seen.size, seen.crop, seen.mean) == (224, 1.0 if dataset == "cifar100" else 0.875, (0, 0, 0))
    options = {label: own for label, (_, own) in found.methods.items()}
    assert (options["ranpac"].expansion, options["acil"].buffer, options["fecam"].power) == (10_000, 10_000, None)
    assert options["fecam"].shrink_diagonal == (10 if dataset == "imagenet-r" else 1)
    other = ("backbone=efficientnet-lite0",)
    mine = resolve(ExperimentSpec(methods, dataset, learner="pretrained", preset="vit_b16", overrides=other))
    assert mine.training.preprocessing() == models.preprocessing("efficientnet-lite0")
    assert resolve(ExperimentSpec(("slda",), dataset)).preset != "vit_b16"
