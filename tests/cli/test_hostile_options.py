"""Values of options that no machine can serve: one line, never a traceback."""

import os
import sys
from pathlib import Path

import pytest

from efcil.cli import _too_much, main
from efcil.config import Options
from efcil.errors import ConfigError
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


def test_a_learning_rate_has_an_end():
    for value in (1e300, 1e7, float("inf"), 0, -1):
        with pytest.raises(ValueError, match="lr"):
            Schedule(epochs=1, lr=value, milestones=(), weight_decay=0.0)
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


def test_no_method_is_one_line():
    with pytest.raises(ConfigError, match="no method was named"):
        resolve({}, lambda section: {}, {})
