"""A run's directory belongs to one run, and to this version of efcil."""

import shutil

import pytest
import yaml

from efcil import cli
from efcil.errors import CheckpointError, RunError
from efcil.experiment.run_directory import FORMAT, RunDirectory, differences
from efcil.tensor_files import load_tensors
from messages import assert_names, raises

ARGUMENTS = ["lwf-ncm", "digits", "--tasks", "5", "--device", "cpu", "--checkpoint-seconds", "0"]
ARGUMENTS += [f"--set={text}" for text in ("backbone=resnet10", "width=2", "first.epochs=1", "later.epochs=2")]


def listing(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def rewritten(config, **changes):
    """Change the top level of a config.yaml; None removes a key."""
    tree = {**yaml.safe_load(config.read_text()), **changes}
    config.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value is not None}))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run and a finished comparison."""
    home = tmp_path_factory.mktemp("done")
    for kind, methods in (("run", "lwf-ncm"), ("compare", "lwf-ncm,lwf")):
        with pytest.MonkeyPatch.context() as patch:
            arguments = [kind, methods, *ARGUMENTS[1:], "--quiet", "--out", str(home / kind)]
            patch.setattr("sys.argv", ["efcil", *arguments])
            with pytest.raises(SystemExit) as end:
                cli.main()
            assert not end.value.code
    return home


@pytest.fixture
def copy(done, tmp_path):
    shutil.copytree(done, tmp_path / "done")
    return tmp_path / "done"


@pytest.mark.parametrize("kind", ["run", "compare"])
def test_checkpoints_carry_their_run_and_their_position(done, kind):
    home = done / kind / ("trajectory" if kind == "compare" else "")
    identity = yaml.safe_load((home / "config.yaml").read_text())["id"]
    metas = [load_tensors(path)[1] for path in sorted((home / "checkpoints").glob("*.safetensors"))]
    assert {meta["run"] for meta in metas} == {identity}
    assert metas[-1]["position"] == {"task": 5, "stage": 0, "epoch": 0, "step": 0}


def test_every_run_has_an_identity_of_its_own(done):
    configs = [yaml.safe_load(path.read_text()) for path in done.rglob("config.yaml")]
    assert len({config["id"] for config in configs}) == len(configs) == 2
    assert {config["format"] for config in configs} == {FORMAT}


@pytest.mark.parametrize("resume", [[], ["--resume"]])
@pytest.mark.parametrize(("found", "age"), [(None, "earlier"), (FORMAT - 1, "earlier"), (FORMAT + 1, "later")])
def test_a_run_of_another_version_is_refused_and_left_alone(copy, efcil, resume, found, age):
    rewritten(copy / "run" / "config.yaml", format=found)
    before = listing(copy)
    code, _, err = efcil("run", *ARGUMENTS, "--out", copy / "run", *resume)
    assert code == 2
    assert_names(err, copy / "run", f"made by a{'n' * (age == 'earlier')} {age} version", "--out")
    assert listing(copy) == before


def test_features_of_a_run_of_another_version_are_refused(copy, efcil):
    rewritten(copy / "compare" / "trajectory" / "config.yaml", format=None)
    code, _, err = efcil("reevaluate", copy / "compare", "rrcr")
    assert code == 2
    assert_names(err, "earlier version", "config.yaml")


def test_checkpoints_of_another_run_are_refused(copy, efcil):
    """As after copying a folder of checkpoints into the directory of a run with the same options."""
    rewritten(copy / "run" / "config.yaml", id="0123456789abcdef")
    code, _, err = efcil("run", *ARGUMENTS, "--out", copy / "run", "--resume")
    assert code == CheckpointError("").exit_code
    assert_names(err, copy / "run" / "checkpoints", "another run", "--out")


def test_a_config_without_its_identity_is_refused(copy, efcil):
    rewritten(copy / "run" / "config.yaml", id=None)
    code, _, err = efcil("run", *ARGUMENTS, "--out", copy / "run", "--resume")
    assert code == 2
    assert_names(err, copy / "run" / "config.yaml", "--out")


def test_a_directory_is_claimed_once(tmp_path):
    notes, directory = [], RunDirectory(tmp_path / "run")
    identity = directory.claim({"seed": 1}, {"threads": 1}, "efcil run", notes.append)
    assert directory.claim({"seed": 1}, {"threads": 2}, "efcil run", notes.append) == identity
    (note,) = notes
    assert_names(note, "threads is 1 there and 2 here")
    with raises(RunError, tmp_path / "run", "seed is 1 there and 2 here", "--out"):
        directory.claim({"seed": 2}, {"threads": 1}, "efcil run", notes.append)


def test_differences_name_the_nested_value():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == [
        "a.c is 2 there and 3 here",
        "d is nothing there and 4 here",
    ]
