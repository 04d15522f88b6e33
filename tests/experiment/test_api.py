"""efcil.run and efcil.compare."""

import numpy as np
import pytest
import torch

import efcil
from efcil.errors import ConfigError, RunError
from efcil.experiment.api import ExperimentOptions
from efcil.experiment.specification import ExperimentSpec, by_trajectory
from messages import raises
from problems import blobs

BRIEF = {"epochs": 1, "device": "cpu", "progress": False}
NAMES = ["dpcr", "acil", "finetune", "dpcr-plus"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A comparison of four methods, three backbones and two orders, in a directory."""
    out = tmp_path_factory.mktemp("study") / "out"
    options = {"tasks": 2, "orders": [3, "identity"], "out": out, "options": {"width": 4, "batch_size": 200}}
    return out, options, efcil.compare(NAMES, "digits", **options, **BRIEF)


def test_methods_of_all_learners_stand_in_one_table(kept):
    _, _, results = kept
    assert {*results} == {*NAMES}
    assert all(result.orders == ("3", "identity") for result in results.values())


def test_those_that_share_a_learner_share_a_backbone(kept):
    out, _, _ = kept
    trained = {path.parent.parent.name for path in out.rglob("config.yaml")}
    assert trained == {"lwf", "finetune", "pseudo-replay"}
    assert len([*out.rglob("config.yaml")]) == 6
    assert (out / "report.html").exists()


def test_the_same_call_finds_its_results(kept, monkeypatch):
    out, options, results = kept
    monkeypatch.setattr("efcil.training.trainer.Trainer.fit", None)
    again = efcil.compare(NAMES, "digits", **options, **BRIEF)
    for name in NAMES:
        assert np.array_equal(again[name].accuracy_matrix, results[name].accuracy_matrix, equal_nan=True)
    with raises(RunError, f"{out}/order-3/lwf", "seed is 0 there and 1 here", "choose another out"):
        efcil.compare(NAMES, "digits", **options, **BRIEF, seed=1)


def test_a_method_alone_and_in_a_comparison_is_the_same(kept):
    _, options, results = kept
    alone = efcil.run("acil", "digits", order=3, tasks=2, options=options["options"], **BRIEF)
    assert np.array_equal(alone["acil"].accuracy_matrix, results["acil", 3].accuracy_matrix, equal_nan=True)


def test_without_out_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    results = efcil.run("lwf-ncm", "digits", options={"width": 2}, **BRIEF)
    assert results["lwf-ncm"].is_complete
    assert not [*tmp_path.iterdir()]


def test_settings_of_training_make_a_trajectory_of_their_own():
    methods = ("dpcr", "dpcr:distill_weight=5", "acil:batch_size=64", "lwf-ncm:ridge=2", "dp-ncm")
    parts = by_trajectory(ExperimentSpec(methods, "digits"))
    assert {name: part.methods for name, part in parts.items()} == {
        "lwf": ("dpcr", "lwf-ncm:ridge=2", "dp-ncm"),
        "lwf:2": ("dpcr:distill_weight=5",),
        "first-task": ("acil:batch_size=64",),
    }


def test_settings_go_to_those_who_have_them():
    spec = ExperimentSpec(("dpcr", "icarl"), "digits", overrides={"memory": 20, "ridge": 3.0, "first.lr": 0.1})
    given = {name: dict(part.overrides) for name, part in by_trajectory(spec).items()}
    assert given == {"lwf": {"ridge": 3.0, "first.lr": 0.1}, "icarl": {"memory": 20, "first.lr": 0.1}}


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: efcil.run("dprc", "digits"), ("dprc", "dpcr")),
        (lambda: efcil.run("dpcr", "digit"), ("digit", "digits")),
        (lambda: efcil.run("dpcr", "digits", tasks=3), ("tasks=3", "allow_uneven")),
        (lambda: efcil.run("dpcr", "digits", options={"lr": 1}), ("lr", "first.lr", "later.lr")),
        (lambda: efcil.run("dpcr", "digits", options={"memory": 1}), ("memory", "dpcr", "icarl")),
        (lambda: efcil.run("dpcr", "digits", device="gpu"), ("device", "gpu", "cpu")),
        (lambda: efcil.compare("dpcr", "digits"), ("'dpcr'", "list")),
        (lambda: efcil.compare(["dpcr", "dpcr"], "digits"), ("dpcr,dpcr", "twice")),
        (lambda: efcil.compare(["dpcr"], "digits", orders=[1, "1"]), ("orders", "1")),
        (lambda: efcil.run("dpcr", "digits", order="no-such-file"), ("no-such-file",)),
        (lambda: efcil.run("dpcr", "digits", order=list("0123456789")), ("0, 1, 2", "TaskStream.from_dataset")),
        (lambda: efcil.compare(["dpcr"], "digits", orders="identity"), ("orders", "identity", "list")),
        (lambda: efcil.run("dpcr", efcil.TaskStream.from_dataset(blobs(), tasks=3), tasks=2), ("tasks", "TaskStream")),
        (lambda: efcil.run(["dpcr"], "digits"), ("'dpcr'", "efcil.Method")),
        (lambda: efcil.run(efcil.Method(learner="lfw", classifier="ridge"), "digits"), ("'lfw'", "'lwf'")),
        (lambda: efcil.run("dpcr", "digits", tasks="5"), ("tasks='5'", "whole number")),
        (lambda: efcil.run("dpcr", "digits", increment=[5, 2.5]), ("increment=2.5", "whole number")),
        (lambda: efcil.run("dpcr", "digits", epochs=0), ("epochs=0", "1")),
        (lambda: efcil.run("dpcr", "digits", seed=-1), ("seed=-1", "0")),
        (lambda: efcil.run("dpcr", "digits", preset=3), ("preset=3", "'quick'")),
        (lambda: efcil.run("dpcr", "digits", options=["ridge"]), ("options=['ridge']", "mapping")),
        (lambda: efcil.run("dpcr", "digits", save_features=True), ("save_features=True", "out")),
        (lambda: efcil.LwF(epochs=1.5), ("epochs=1.5", "whole number")),
    ],
)
def test_a_bad_call_is_refused_in_one_line(call, named):
    with raises(ConfigError, *named):
        call()


def test_numbers_of_other_libraries_are_taken(kept):
    _, options, results = kept
    numbers = {"tasks": np.int64(2), "epochs": np.int32(1), "seed": np.uint8(0)}
    found = efcil.run("finetune", "digits", order=np.str_("3"), options=options["options"], **{**BRIEF, **numbers})
    assert np.array_equal(found["finetune"].accuracy_matrix, results["finetune", 3].accuracy_matrix, equal_nan=True)


def test_what_is_refused_is_refused_before_any_method_trains(tmp_path, monkeypatch):
    """A learner that the backbone does not go with, and a class order that is too short, behind what could train."""
    monkeypatch.setattr("efcil.training.trainer.Trainer.fit", None)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    with raises(ConfigError, "podnet", "Sequential", "resnet10"):
        efcil.compare(["lwf-ncm", "podnet"], "digits", options={"backbone": net}, out=tmp_path / "a", **BRIEF)
    (tmp_path / "order.txt").write_text("1\n2\n")
    with raises(ConfigError, tmp_path / "order.txt", "10"):
        efcil.compare(["lwf-ncm"], "digits", orders=[1, tmp_path / "order.txt"], out=tmp_path / "b", **BRIEF)
    assert not [*tmp_path.rglob("config.yaml")]


def test_an_unknown_argument_is_a_type_error():
    with pytest.raises(TypeError, match="ridge.*options="):
        efcil.run("dpcr", "digits", ridge=3)
    assert "ridge" not in ExperimentOptions.__annotations__
