"""Directories of runs: their names never collide, and a run is resumed from its directory alone."""

import json
import re
import shlex

import pytest

from efcil.cli.directories import directory_stem
from efcil.errors import RunError
from efcil.experiment.run_directory import FORMAT
from messages import assert_names, raises

SMALL = ["width=2", "first.epochs=2", "later.epochs=1", "first.milestones=[]", "later.milestones=[]"]
SMALL = [part for setting in SMALL for part in ("--set", setting)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def interrupted(monkeypatch):
    """End the next runs after their first task, as a signal would."""
    from efcil.experiment.run import Run
    from efcil.training.trainer import TrainingInterrupted

    def begin():
        patch = pytest.MonkeyPatch()
        original = Run.on_task_end

        def stopped(self, task):
            original(self, task)
            raise TrainingInterrupted

        patch.setattr(Run, "on_task_end", stopped)
        return patch

    return begin


def summary(place):
    return json.loads((place / "summary.json").read_text())


def command_in(text):
    """The command that a message tells to type."""
    return shlex.split(re.search(r"efcil resume .*", text)[0].split("`")[0])[1:]


def test_names_have_method_data_split_and_order():
    spec = {"dataset": "digits", "tasks": 5, "seed": 0}
    assert directory_stem(["dpcr"], spec, ["1993"]) == "dpcr-digits-5-1993"
    assert directory_stem(["dpcr"], spec | {"seed": 3}, ["identity"]) == "dpcr-digits-5-seed3"
    assert directory_stem(["a:b/c"], {"dataset": "folder", "init_cls": 4, "increment": "3,3"}, ["o.txt"]) == (
        "a-b-c-folder-4+3-3-o"
    )


def test_the_same_command_with_other_options_or_again_takes_another_directory(efcil, here):
    run = ["run", "lwf", "digits", "--tasks", 2, "--order", 1993, "--quiet", *SMALL]
    for more in ([], ["--set", "batch_size=32"], []):  # the third is complete: it is run once more
        code, _, err = efcil(*run, *more)
        assert code == 0, err
    names = ["lwf-digits-2-1993", "lwf-digits-2-1993-2", "lwf-digits-2-1993-3"]
    assert sorted(path.name for path in (here / "runs").iterdir()) == names
    first, other, again = (summary(here / "runs" / name) for name in names)
    assert first["matrix"] == again["matrix"]
    assert other["training"]["batch_size"] == 32
    code, _, err = efcil(*run, "--resume")
    assert code == 0, err
    assert len(list((here / "runs").iterdir())) == 3


def test_an_unfinished_run_of_the_same_options_is_named_with_the_command_that_resumes_it(efcil, here, interrupted):
    run = ["run", "dpcr", "digits", "--tasks", 2, *SMALL]
    patch = interrupted()
    code, _, err = efcil(*run, "--quiet")
    patch.undo()
    assert code == 130
    assert command_in(err) == ["resume", "runs/dpcr-digits-2"]
    code, _, err = efcil(*run)
    assert code == 2
    assert_names(err, "runs/dpcr-digits-2", "--out")
    code, out, err = efcil(*command_in(err))
    assert code == 0, err
    assert "resuming after task 1" in out
    found = summary(here / "runs" / "dpcr-digits-2")
    assert found["status"] == "complete"
    assert found["command"].startswith("efcil run dpcr digits --tasks 2 --set width=2")
    assert efcil(*run, "--quiet", "--out", here / "whole")[0] == 0
    assert found["matrix"] == summary(here / "whole")["matrix"]


def test_a_run_that_is_interrupted_before_it_wrote_anything_is_started_again(efcil, here, monkeypatch):
    from efcil.experiment.run import Run

    def early(self, data):
        raise KeyboardInterrupt

    run = ["run", "lwf-ncm", "digits", "--tasks", 2, "--quiet", *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_prepare", early)
        code, _, err = efcil(*run)
    assert code == 130
    assert "resume" not in err, "there is nothing to resume"
    assert_names(err, "start it again")
    code, _, err = efcil(*run)
    assert code == 0, err
    assert [path.name for path in (here / "runs").iterdir()] == ["lwf-ncm-digits-2"]


def test_a_comparison_in_several_orders_is_resumed_from_a_path_with_spaces_and_from_elsewhere(
    efcil, here, interrupted, monkeypatch
):
    (here / "my order.txt").write_text("\n".join("9876543210"))
    orders = ["--orders", "identity,my order.txt", "--tasks", 2, "--out", "my runs/one", "--concurrent-runs", 1]
    patch = interrupted()
    code, _, err = efcil("compare", "dpcr,lwf-ncm", "digits", *orders, "--quiet", *SMALL)
    patch.undo()
    assert code == 130
    assert "efcil resume 'my runs/one'" in err
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    place = here / "my runs" / "one"
    code, _, err = efcil("resume", place / "order-identity", "--quiet")  # a part of it: the whole is resumed
    assert code == 0, err
    for order in ("order-identity", "order-my order"):
        for method in ("dpcr", "lwf-ncm"):
            assert summary(place / order / method)["status"] == "complete"
    assert (place / "report.html").exists()
    assert list((here / "elsewhere").iterdir()) == []


def test_a_search_is_resumed_and_says_so(efcil, here, interrupted):
    patch = interrupted()
    code, _, err = efcil("tune", "lwf-ncm", "digits", "--tasks", 2, "--try", "batch_size=32,64", "--orders", 7, *SMALL)
    patch.undo()
    assert code == 130
    code, _, err = efcil(*command_in(err))
    assert code == 0, err
    assert (here / "runs" / "tune-lwf-ncm-digits-2" / "best.yaml").exists()


def test_what_cannot_be_resumed_is_refused(efcil, here):
    (here / "empty").mkdir()
    for name, words in (("nowhere", "nowhere"), ("empty", "config.yaml")):
        code, _, err = efcil("resume", name)
        assert code == 2
        assert_names(err, name, words)
    (here / "empty" / "config.yaml").write_text(f"format: {FORMAT}\nrun: {{}}\ncommand: efcil.run('dpcr')\n")
    code, _, err = efcil("resume", "empty")
    assert code == 2
    assert_names(err, "empty", "efcil.run('dpcr')")


def test_a_name_is_refused_only_for_equal_options(here):
    from efcil.cli.directories import new_directory

    options = {"methods": {"a": {"ridge": 1.0}}, "split": {"tasks": 2}}
    place = here / "runs" / "x"
    assert new_directory("x", {"": options}, False).as_posix() == "runs/x"
    place.mkdir(parents=True)
    (place / ".lock").touch()
    assert new_directory("x", {"": options}, False).as_posix() == "runs/x"
    (place / "config.yaml").write_text(json.dumps({"run": {**options, "class_order": "f", "fingerprint": "g"}}))
    with raises(RunError, "runs/x", "efcil resume runs/x"):
        new_directory("x", {"": options}, False)
    assert new_directory("x", {"": options}, True).as_posix() == "runs/x"
    assert new_directory("x", {"": {**options, "split": {"tasks": 3}}}, True).as_posix() == "runs/x-2"
    (place / "summary.json").write_text(json.dumps({"status": "complete"}))
    assert new_directory("x", {"": options}, False).as_posix() == "runs/x-2"
    (place / "config.yaml").write_text("{")
    assert new_directory("x", {"": options}, True).as_posix() == "runs/x-2"
