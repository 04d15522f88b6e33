"""A run's directory belongs to one run, and to this version of efcil."""

import os
import random
import shutil

import pytest
import yaml

from efcil import cli, platform_support
from efcil.errors import CheckpointError, EfcilError, FileRefusedError, RunError
from efcil.experiment.checkpoints import CheckpointStore
from efcil.experiment.run_directory import FORMAT, RunDirectory, differences, remove_demo
from efcil.tensor_files import load_tensors, save_tensors
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
    (run,) = {meta["run"] for meta in metas}
    assert run.startswith(f"{identity}-"), "and what is run"
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


def test_a_run_of_another_version_is_not_resumed_by_its_command(copy, efcil):
    """The command is not even read: it may have options that are gone."""
    config = copy / "run" / "config.yaml"
    rewritten(config, format=None, command="efcil run dpcr digits --keep-everything")
    before = listing(copy)
    code, _, err = efcil("resume", copy / "run")
    assert code == 2
    assert_names(err, config, "earlier version")
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
    assert_names(err, copy / "run" / "checkpoints" / "task-05.safetensors", "another run", "--out")


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


def everything(root):
    """Contents of files, targets of links, kinds of the rest."""
    return {
        path.relative_to(root).as_posix(): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else path.is_dir()
        for path in root.rglob("*")
    }


@pytest.fixture(params=["openat", "paths"])
def system(request, monkeypatch):
    if request.param == "paths":
        monkeypatch.setattr(platform_support, "_can_open_directories", lambda: False)


PLACES = [
    "config.yaml",
    "metrics.jsonl",
    "checkpoints",
    "features",
    "snapshots",
    "report.html",
    "summary.json",
    ".lock",
]


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("seed", range(32))
def test_a_run_of_a_stranger_that_leads_elsewhere_is_refused(tmp_path, seed):
    """A link, a FIFO or a folder in the place of anything that a resumed run writes, cuts back or prunes."""
    draw, compare = random.Random(seed), seed % 3 == 0
    directory, other = RunDirectory(tmp_path / "run", compare), tmp_path / "other"
    directory.claim({"seed": 1}, {}, "efcil run", print)
    for folder in (directory.checkpoints, directory.features, directory.snapshots, other / "checkpoints"):
        folder.mkdir(parents=True)
    for name in ("task-01.safetensors", "task-02.safetensors", "task-03-epoch-0001.safetensors"):
        (directory.checkpoints / name).write_bytes(b"ours")
        (other / "checkpoints" / name).write_bytes(b"theirs")
    for name in ("report.html", "config.yaml", "summary.json", "metrics.jsonl"):
        (other / name).write_bytes(b"theirs")
    victim = PLACES[seed % len(PLACES)]
    if compare and victim == "summary.json":
        (directory.out / "lwf").symlink_to(other)
        victim = "lwf"
    elif compare and draw.random() < 0.4:
        shutil.copytree(directory.home, other / "trajectory")
        shutil.rmtree(directory.home)
        directory.home.symlink_to(other / "trajectory")
        victim = "trajectory"
    else:
        home = directory.out if victim in ("report.html", "snapshots", "summary.json", ".lock") else directory.home
        path = home / victim
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if path.suffix and draw.random() < 0.3:
            os.mkfifo(path)
        else:
            path.symlink_to(draw.choice([other / victim, os.path.relpath(other / victim, home)]))
    before = everything(tmp_path)
    with raises(FileRefusedError, victim), directory.hold(resume=True):
        pytest.fail("held")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("seed", range(24))
def test_a_directory_with_something_else_in_it_is_not_claimed(tmp_path, seed):
    draw, directory = random.Random(seed), RunDirectory(tmp_path / "run", compare=seed % 2 == 0)
    names = ["report.html", "summary.json", "metrics.jsonl", "checkpoints/x", "features/a.csv", "snapshots/may"]
    if directory.compare:
        names = ["report.html", "summary.json", "dpcr/summary.json", "trajectory/notes", "trajectory/checkpoints/x"]
    name = names[seed % len(names)]
    path = directory.out / name
    path.parent.mkdir(parents=True)
    path.write_text(draw.choice(["", "years of work", "{}", "<!doctype html>"]))
    (directory.out / "unrelated.txt").write_text("stays, and is in nobody's way")
    before = everything(tmp_path)
    resume = seed % 4 == 0 and "checkpoints" not in name
    with raises(RunError, name.split("/")[0], "--out"), directory.hold(resume):
        pytest.fail("held")
    assert everything(tmp_path) == before


def test_a_report_that_is_not_the_runs_stays(efcil, tmp_path):
    (tmp_path / "report.html").write_text("years of work")
    code, _, err = efcil("run", *ARGUMENTS, "--out", tmp_path)
    assert code == 2
    assert_names(err, tmp_path / "report.html", "--out")
    assert everything(tmp_path) == {"report.html": b"years of work"}


def test_checkpoints_of_other_options_whose_configuration_is_lost_are_refused(copy, efcil):
    """Another seed, another ridge: what they hold is not what is asked for."""
    (copy / "run" / "config.yaml").unlink()
    before = everything(copy)
    code, _, err = efcil("run", *ARGUMENTS, "--seed", "3", "--out", copy / "run", "--resume")
    assert code == 2
    assert_names(err, "other options", "config.yaml", "--out")
    assert {name: content for name, content in everything(copy).items() if not name.endswith(".lock")} == {
        name: content for name, content in before.items() if not name.endswith(".lock")
    }
    assert efcil("run", *ARGUMENTS, "--out", copy / "run", "--resume")[0] == 0


@pytest.mark.parametrize("seed", range(24))
def test_a_checkpoint_is_bound_to_its_run_and_its_position(tmp_path, seed):
    """Of another run, of another task, of another epoch, or brought from a run with other options: refused by name."""
    draw, store = random.Random(seed), CheckpointStore(tmp_path / "checkpoints")
    for task in (1, 2):
        store.save_task(task, {}, {"run": "a-1"})
    store.save_epoch(3, 5, {}, {"run": "a-1"})
    store.wait()
    assert store.latest("a-1").epoch == 5
    old = store.directory / draw.choice(["task-01", "task-02", "task-03-epoch-0005"]).__add__(".safetensors")
    if seed % 2:
        new = draw.choice(["task-03", "task-99", "task-03-epoch-0009", "task-04-epoch-0001", "task-7", "task-100"])
        old.rename(store.directory / f"{new}.safetensors")
        named = f"{new}.safetensors"
    else:
        tensors, meta = load_tensors(old)
        save_tensors(old, tensors, {**meta, "run": draw.choice(["a-2", "b-1", "", None, 3, ["a-1"]])})
        named = old.name
        if named == "task-01.safetensors":  # not read as long as a later one is sound
            assert store.latest("a-1").epoch == 5
            (store.directory / "task-02.safetensors").unlink()
            (store.directory / "task-03-epoch-0005.safetensors").unlink()
    with raises(CheckpointError, named, "--out"):
        store.latest("a-1")


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("seed", range(20))
def test_a_demo_takes_nothing_else_with_it(tmp_path, seed):
    draw, out, other = random.Random(seed), tmp_path / "demo", tmp_path / "other"
    for place in (out / "lwf", other):
        for name in ("trajectory/checkpoints", "dpcr"):
            (place / name).mkdir(parents=True)
        (place / "trajectory" / "config.yaml").write_text("command: efcil demo --out demo\n")
        (place / "dpcr" / "summary.json").write_text("{}")
        (place / "trajectory" / "checkpoints" / "task-01.safetensors").write_text("x")
    kind = ["file", "link", "folder link", "linked demo"][seed % 4]
    folder = draw.choice([out / "lwf/trajectory", out / "lwf/trajectory/checkpoints", out / "lwf/dpcr"])
    if kind == "file":
        (folder / "thesis").write_text("years of work")
    elif kind == "link":
        (folder / "task-02.safetensors").symlink_to(other / "dpcr" / "summary.json")
    elif kind == "folder link":
        (folder / "more").symlink_to(other)
    else:
        (out / "joint").symlink_to(other)
    before = everything(tmp_path)
    with pytest.raises(EfcilError):
        remove_demo(out, ["dpcr", "lwf"])
    assert everything(tmp_path) == before
    for path in (folder / "thesis", folder / "task-02.safetensors", folder / "more", out / "joint"):
        path.unlink(missing_ok=True)
    remove_demo(out, ["dpcr", "lwf"])
    assert everything(out) == {"lwf": True}
