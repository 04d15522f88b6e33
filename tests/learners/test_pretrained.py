"""A backbone that is frozen from the start, one that adapts to the first task, and methods that are moved there."""

import numpy as np
import pytest
import torch

import efcil
from efcil.core.metrics import AccuracyMatrix
from efcil.errors import ConfigError
from efcil.experiment.specification import ExperimentSpec, by_trajectory, resolve
from efcil.learners import LEARNERS
from efcil.methods import find, on_learner
from efcil.protocol import Evaluator
from efcil.tasks import TaskStream
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
