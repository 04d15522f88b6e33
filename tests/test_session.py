"""Methods made in Python: of names, classes and instances, with backbones of one's own, taught task by task."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import efcil
from efcil.classifiers.ridge import Ridge as RidgeClass
from efcil.errors import ConfigError, DataError
from efcil.methods import METHODS
from efcil.tasks import TaskStream as LowLevelStream
from messages import raises
from problems import TINY, blobs

SMALL = {"backbone": "resnet10", "width": 2, "batch_size": 8, "augment": "crop-flip"}


def net(outputs=6, train_outputs=None):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x):
            x = self.norm(self.conv(x)).relu().mean((2, 3))
            return x[:, :train_outputs] if self.training and train_outputs else x[:, :outputs]

    with torch.random.fork_rng():  # the same weights whichever tests ran before
        torch.manual_seed(0)
        return Net()


@pytest.fixture(scope="module")
def stream():
    return efcil.TaskStream.from_dataset(blobs(), tasks=3)


# --- descriptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["ridge", RidgeClass, efcil.Ridge()])
def test_parts_are_names_classes_or_instances(part):
    method = efcil.Method(learner="lwf", shift=efcil.DualProjection, classifier=part)
    assert (method.name, method.classifier) == ("lwf+dual-projection+ridge", RidgeClass)


def test_a_name_alone_is_a_known_method():
    method = efcil.Method("DPCR-plus")
    assert method.parts == METHODS["dpcr-plus"].parts
    assert method.preset == "tuned"


def test_options_of_instances_are_those_that_were_given():
    method = efcil.Method(
        "mine", efcil.LwF(batch_size=32, first={"lr": 0.1}), efcil.DualProjection(), efcil.Ridge(ridge=7)
    )
    assert method.settings == {"batch_size": 32, "first.lr": 0.1, "ridge": 7.0}
    assert repr(method) == "Method('mine', batch_size=32, first.lr=0.1, ridge=7.0)"


def test_bad_descriptions_are_refused_before_training():
    with raises(ConfigError, "classifier", "mine"):
        efcil.Method("mine", "lwf")
    with raises(ConfigError, "dprc", "dpcr"):
        efcil.Method("dprc")
    with raises(ConfigError, "first-task", "none"):
        efcil.Method(learner=efcil.FirstTask(), shift=efcil.DualProjection(), classifier="ridge")
    with raises(ConfigError, "lwff", "lwf"):
        efcil.LearnerConfig("lwff")


# --- task by task -----------------------------------------------------------------------------------------------------


def test_task_by_task_equals_a_run(stream):
    """The same lifecycle, options and seed: the same accuracies, to the last bit."""
    options = {**SMALL, "first": dict(TINY["first"]), "later": dict(TINY["later"])}
    method = efcil.Method("it", efcil.LwF(**options), "dual-projection", "ridge")
    rows = [method.learn(task, device="cpu").evaluate(stream) for task in stream]
    results = efcil.run(method, stream, device="cpu", progress=False)
    assert np.array_equal(results["it"].accuracy_matrix, np.round(method.accuracy_matrix, 4), equal_nan=True) or (
        np.nanmax(np.abs(results["it"].accuracy_matrix - method.accuracy_matrix)) < 0.006
    ), "summaries are rounded to two digits"
    assert [len(row) for row in rows] == [1, 2, 3]
    assert rows[-1].mean() > 30


def test_a_description_learns_nothing_and_a_method_can_begin_anew(stream):
    method = efcil.Method("it", efcil.LwF(**SMALL, epochs=1), "none", "ncm")
    with raises(ConfigError, "it", "learn(stream[0])"):
        method.evaluate(stream)
    first = method.learn(stream[0]).evaluate(stream)
    weights = {k: v.clone() for k, v in method.trajectory.learner.student.state_dict().items()}
    again = method.learn(stream[0]).evaluate(stream)
    assert np.array_equal(first, again)
    assert all(torch.equal(v, weights[k]) for k, v in method.trajectory.learner.student.state_dict().items())
    with raises(ConfigError, "task 3", "task 1"):
        method.learn(stream[2])


def test_a_stream_without_test_images_cannot_be_measured(stream):
    bare = LowLevelStream(stream.train, stream.order, stream.sizes)
    method = efcil.Method("it", efcil.LwF(**SMALL, epochs=1), "none", "ncm")
    with raises(DataError, "from_dataset"):
        method.learn(bare[0])
    method.learn(stream[0])
    with raises(DataError, "from_dataset"):
        method.evaluate(bare)


# --- backbones of one's own -------------------------------------------------------------------------------------------


def test_a_module_of_ones_own_learns_and_is_left_alone(stream):
    backbone = net()
    before = {k: v.clone() for k, v in backbone.state_dict().items()}
    results = efcil.run(
        efcil.Method("mine", efcil.LwF(backbone=backbone, epochs=16, batch_size=8), "dual-projection", "ridge"),
        stream,
        progress=False,
    )
    assert all(torch.equal(v, before[k]) for k, v in backbone.state_dict().items()), "it is copied"
    assert results["mine"].runs[0].average_accuracy > 50, "chance is 31"


@pytest.mark.parametrize("order", [1, 2])
def test_every_run_begins_with_the_weights_that_were_given(stream, order):
    method = efcil.Method("mine", efcil.LwF(backbone=net(), epochs=1, batch_size=8), "none", "ncm")
    runs = [efcil.run(method, stream, progress=False)["mine"].accuracy_matrix for _ in range(2)]
    assert np.array_equal(*runs, equal_nan=True)


@pytest.mark.parametrize(
    ("backbone", "named"),
    [
        (nn.Conv2d(3, 4, 3), ("Conv2d",)),
        (net(outputs=6, train_outputs=4), ("Net", "6", "4")),
        (nn.Flatten(), ("Flatten",)),
        ("resnet1O", ("resnet1O", "resnet18")),
        (3, ("backbone", "int")),
    ],
)
def test_a_backbone_that_cannot_work_is_refused_before_training(stream, backbone, named, tmp_path):
    method = efcil.Method("mine", efcil.LwF(backbone=backbone, epochs=1), "none", "ncm")
    with raises(ConfigError, *named):
        efcil.run(method, stream, out=tmp_path / "out", progress=False)
    assert not [*tmp_path.rglob("config.yaml")]


def test_a_torch_data_set_of_ones_own():
    data = blobs()
    train, test = (TensorDataset(torch.tensor(p.images), torch.tensor(p.labels)) for p in (data.train, data.test))
    method = efcil.Method(learner=efcil.LwF(**SMALL, epochs=2), shift="ldc", classifier="ncm")
    results = efcil.run(method, (train, test), tasks=2, progress=False)
    assert results["lwf+ldc+ncm"].accuracy_matrix.shape == (2, 2)
