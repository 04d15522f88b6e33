"""Values of options that no machine can serve: one line, never a traceback."""

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.main import get_command

from efcil.cli import _too_much, app, main
from efcil.cli.config_file import merged
from efcil.cli.directories import stored_command
from efcil.config import Options
from efcil.data.imagenet100 import read_list
from efcil.errors import ConfigError, RunError
from efcil.experiment.run_directory import FORMAT
from efcil.product import IncrementalClassifier
from efcil.resolution import resolve
from efcil.training.schedule import Schedule

SMALL = {"method": "dpcr", "backbone": "resnet10", "width": 2, "size": 8, "progress": False, "device": "cpu"}
HUGE = (2**31, 2**40, 2**63, 2**64, 10**30)


@pytest.mark.parametrize("name", ["seed", "size", "width", "epochs", "budget", "val_fraction"])
def test_a_new_model_of_impossible_values(name):
    values = [-1, -(2**63), *((float("inf"), float("nan")) if name in ("budget", "val_fraction") else ())]
    values += {"seed": HUGE[2:], "size": HUGE, "width": HUGE, "val_fraction": (0.6, 1e300)}.get(name, ())
    for value in values:
        with pytest.raises(ConfigError) as caught:
            IncrementalClassifier(**{**SMALL, name: value})
        assert "\n" not in str(caught.value)
        assert name.partition("_")[0] in str(caught.value)


def test_a_width_that_no_memory_holds():
    with pytest.raises(ConfigError, match="GiB of weights"):
        IncrementalClassifier(**{**SMALL, "width": 40_000})


def test_a_schedule_has_an_end():
    for value in (1e300, 1e7, float("inf"), 0, -1):
        with pytest.raises(ValueError, match="lr"):
            Schedule(epochs=1, lr=value, milestones=(), weight_decay=0.0)
    for value in (1e300, 1e7, float("inf"), -1):  # a traceback of the optimizer before
        with pytest.raises(ValueError, match="weight_decay"):
            Schedule(epochs=1, lr=0.1, weight_decay=value)
    for value in (10**7, 2**64, 0):
        with pytest.raises(ValueError, match="epochs"):
            Schedule(epochs=value, lr=0.1)
    assert issubclass(Schedule, Options)


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (MemoryError(), "memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1"), "memory"),
        (OverflowError("int too large to convert"), "out of range"),
        (OSError(36, "File name too long", "9" * 5000), "too long"),
        (OSError(13, "Permission denied", b"/nowhere"), "/nowhere"),
        (OSError(28, "No space left on device"), "No space"),
    ],
)
def test_what_goes_beyond_memory_numbers_or_places_is_one_line(error, word):
    assert word in _too_much(error)
    assert len(_too_much(error)) < 300
    for ours in (RuntimeError("a fault of ours"), OSError("a fault of ours")):
        assert _too_much(ours) is None


LONG = "9" * 5000
PLACES = (
    "/",
    "",
    LONG,
    f"a/{LONG}",
    "\x1b[2Jx",
    "/dev/null",
    "/proc/self/mem",
    "fifo",
    "link",
    "file",
    "file/below",
    "a\nb",
)
COMMANDS = {
    "summary": ("{}",),
    "undo": ("{}",),
    "rename": ("{}", "a", "b"),
    "forget": ("--yes", "{}", "a"),
    "export": ("{}", "--onnx", "x.onnx"),
    "predict": ("{}", "x.png"),
    "evaluate": ("{}", "pictures"),
    "merge": ("{}", "{}"),
    "report": ("{}",),
    "resume": ("{}",),
    "reevaluate": ("{}", "dpcr"),
    "ensemble": ("dpcr", "{}", "{}"),
    "data verify": ("folder", "{}"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_is_none_of_ours_is_one_line(command, tmp_path, monkeypatch, capfd):
    """A traceback before: the root directory as a model, a path that is too long for the system."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("link").symlink_to("nowhere")
    Path("file").write_text("{}")
    for place in PLACES:
        arguments = [part.format(place) for part in COMMANDS[command]]
        monkeypatch.setattr(sys, "argv", ["efcil", *command.split(), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert ended.value.code not in (0, None), (place[:20], out)
        assert "Traceback" not in out + err
        assert "\x1b[2J" not in out + err
        assert sum(line.startswith("efcil: ") for line in err.splitlines()) == 1 or "Usage" in err, (place[:20], err)


NUMBERS = ("inf", "nan", "-1", "0", "1e300", str(2**64), "0x" + "F" * 300)
WORDS = ("", LONG, "\x1b[2Jx", "a\nb", "%s", ",", "=", "a=" * 50)
FILES = (
    ".",
    "..",
    "/dev/zero",
    "/dev/null",
    "/proc/self/mem",
    "fifo",
    "link",
    "loop",
    "file",
    "file/below",
    "deep/" * 200,
)
VALUES = (*NUMBERS, *WORDS, *FILES, "list.yaml", "zero.yaml", "bytes.yaml")
SETTINGS = tuple(
    f"{key}={value}"
    for key in ("ridge", "first.lr", "first.epochs", "first.milestones", "batch_size", "width", "seed", "augment")
    for value in ("nan", "-1", "1e300", str(2**64), "0x" + "F" * 300, LONG, "\x1b[2J", "[", "{a: 1}", "!!binary x")
) + ("", "=", "a", "=1", "first=1", "__class__=1", f"{LONG}=1", "a.b.c=1")
SMALL_RUN = ("--quiet", "--tasks", "5", "--epochs", "1", "--device", "cpu")
BASES = {  # what is not replaced, and the arguments
    "run": (SMALL_RUN, ("dpcr", "digits")),
    "compare": (SMALL_RUN, ("dpcr,lwf-ncm", "digits")),
    "tune": ((*SMALL_RUN, "--try", "ridge=1"), ("dpcr", "digits")),
    "reproduce": ((), ("digits",)),
    "demo": (("--quiet",), ("digits",)),
    "pull": ((), ("a/b",)),
    "push": ((), ("model", "a/b")),
}


def variants(command, number, seed):
    """Commands with one hostile value each, of an option or an argument."""
    draw = random.Random(f"{command} {seed}")
    own = get_command(app).commands[command]
    places = [p for p in own.params if p.name != "help" and not getattr(p, "is_flag", False)]
    fixed, arguments = BASES[command]
    for index in range(number):
        place = places[index % len(places)]
        value = draw.choice(SETTINGS if place.opts[0] in ("--set", "--try") else VALUES)
        if place.opts[0].startswith("--"):
            yield [command, *fixed, f"{place.opts[0]}={value}", *arguments]
        else:
            changed = list(arguments) + [""] * (len(own.params) - len(arguments))
            which = [p for p in own.params if not p.opts[0].startswith("-")].index(place)
            changed[which] = value
            yield [command, *fixed, "--", *changed[: max(len(arguments), which + 1)]]


@pytest.fixture
def hostile_place(tmp_path, monkeypatch):
    """A directory of files that are not what they seem; what would be trained or sent ends where it begins."""
    place = tmp_path / "a" / "b" / "c"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    os.mkfifo("fifo")
    Path("link").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    Path("file").write_text("{}")
    Path("list.yaml").write_text("[" * 5000)
    Path("zero.yaml").touch()
    Path("bytes.yaml").write_bytes(bytes(range(256)))

    def begun(*_, **__):
        raise RunError("begun")

    monkeypatch.setattr("efcil.experiment.run.Run._learn", begun)
    the_hub = SimpleNamespace(get_token=lambda: "t", HfApi=lambda **_: SimpleNamespace(model_info=begun))
    monkeypatch.setattr("efcil.product.hub.hub", lambda: the_hub)
    return place


@pytest.mark.parametrize("command", BASES)
def test_a_hostile_value_of_any_option_is_one_line(command, hostile_place, monkeypatch, capfd):
    """A hang before: a FIFO as --config. Values are drawn, each option and argument gets at least one."""
    for arguments in variants(command, 24, seed=1):
        monkeypatch.setattr(sys, "argv", ["efcil", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        shown = [word[:40] for word in arguments]
        assert "Traceback" not in out + err, shown
        assert "\x1b[2J" not in out + err, shown
        assert ended.value.code or command == "reproduce", shown  # which lists its names without one
        lines = [line for line in err.splitlines() if line.startswith("efcil: ")]
        assert len(lines) == bool(ended.value.code) or "Usage" in err, (shown, err)
        assert max(map(len, err.splitlines()), default=0) < 2000, shown


@pytest.mark.parametrize("name", ["fifo", "/dev/zero", "."])
def test_a_file_of_options_is_a_regular_file(name, hostile_place):
    with pytest.raises(ConfigError, match="not a regular file"):
        merged(Path(name), {"overrides": []}, ())
    with pytest.raises(ConfigError, match="not a regular file"):
        read_list(name)


def test_a_large_file_of_options_is_refused_before_it_is_parsed(hostile_place):
    Path("many.yaml").write_text("a: [" + "1," * 500_000 + "]")
    with pytest.raises(ConfigError, match=r"more than 100,000 values"):
        merged(Path("many.yaml"), {"overrides": []}, ())
    Path("large.yaml").write_text("a: " + "x" * 5_000_000)
    with pytest.raises(ConfigError, match="bytes"):
        merged(Path("large.yaml"), {"overrides": []}, ())


def test_resume_takes_no_run_from_somewhere_below(tmp_path, monkeypatch):
    """`efcil resume /` searched the whole disk and resumed the first run of it."""
    place = tmp_path / "far" / "o"
    place.mkdir(parents=True)
    (place / "config.yaml").write_text(f"format: {FORMAT}\nrun: {{}}\ncommand: efcil run dpcr digits --out o\n")
    assert stored_command(place)[0] == ["run", "dpcr", "digits"]
    for above in (tmp_path, tmp_path / "far"):
        with pytest.raises(RunError, match="no run in it"):
            stored_command(above)
    place.rename(tmp_path / "far" / "renamed")
    assert stored_command(tmp_path / "far" / "renamed")[0] == ["run", "dpcr", "digits"]
    deep = tmp_path / "1/2/3/4/5"
    deep.mkdir(parents=True)
    (deep / "config.yaml").write_text("command: efcil run dpcr digits\n")
    with pytest.raises(RunError, match="no run in it"):
        stored_command(tmp_path / "1")


def test_no_method_is_one_line():
    with pytest.raises(ConfigError, match="no method was named"):
        resolve({}, lambda section: {}, {})
