"""Model directories: whose files are replaced, and what a load sees while models are saved."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest
import torch

from efcil import platform_support
from efcil.errors import ModelError
from efcil.product import IncrementalClassifier, commands, model_directory
from efcil.product.calibration import CalibrationOffset
from efcil.product.model_config import ModelConfig, Request, resolve
from efcil.product.model_directory import CARD, PREVIOUS, STATISTICS, WEIGHTS
from efcil.product.state import UNDO_STEPS, ClassRecord, State
from messages import raises

CONFIG = resolve(Request("dpcr", width=2, size=8, val_fraction=0.0).completed(), None)


def state(number: int, *, size: int = 50, previous: bool = True) -> State:
    """Return a state of which everything says `number`."""
    made = State(
        classes=(ClassRecord(f"class {number}", number + 1, "2026-01-01", None),),
        weights={"backbone.x": torch.full((size,), float(number)), "none": torch.zeros(0, 3)},
        statistics={"y": torch.full((size, 2), number, dtype=torch.int64)},
        temperature=1.0 + number,
        calibration_offset=CalibrationOffset(),
        backbone_updates=1,
        updates=number,
        frozen=False,
        previous=None,
        identity="0123456789abcdef",
    )
    return made.with_previous(state(number - 1, size=size, previous=False)) if previous else made


def says(found: State) -> set[float]:
    """Return the numbers that a state says."""
    told = {found.updates, found.temperature - 1, found.classes[0].images - 1, float(found.classes[0].name.split()[1])}
    return told | set(found.weights["backbone.x"].tolist()) | set(found.statistics["y"].flatten().tolist())


@pytest.fixture(params=["one step", "two steps", "paths"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Swap two directories in one step, in two, and in two where no directory can be held open."""
    if request.param != "one step":
        monkeypatch.setattr(model_directory, "exchange", lambda one, other: False)
    if request.param == "paths":
        monkeypatch.setattr(platform_support, "_can_open_directories", lambda: False)
    return str(request.param)


def entries(root: Path) -> dict[str, bytes | str]:
    """Return everything below a directory: contents of files, targets of links, kinds of the rest."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        else:
            found[name] = path.read_bytes() if path.is_file() else "directory" if path.is_dir() else "special"
    return found


def disturb(model: Path, draw: random.Random, kind: str) -> str:
    """Put something into a model directory that is not the model's; return the name that a refusal must give."""
    thesis = model.parent / "thesis.tex"
    thesis.write_text("years of work")
    folder = draw.choice([model, model / PREVIOUS])
    name = draw.choice(
        ["thesis.tex", "Thumbs.db", ".notes", "model.json.bak", "weights.pt", "données", "a\tb", "previous.old"]
    )
    if kind == "file":
        (folder / name).write_text("years of work")
        return name
    if kind == "folder":
        (folder / name).mkdir()
        (folder / name / WEIGHTS).write_text("years of work")
        return name
    if kind == "too many levels":
        shutil.copytree(model / PREVIOUS, model.parent / "earlier")
        place = model / PREVIOUS
        for _ in range(UNDO_STEPS):
            place /= PREVIOUS
            shutil.copytree(model.parent / "earlier", place)
        return PREVIOUS
    if kind == "another tool's card":
        (folder / CARD).write_text(draw.choice(['{"kind": "keras"}', "[]", "", "{", "1", '{"model_type": "bert"}']))
        return CARD
    if kind == "no card":
        (folder / CARD).unlink()
        return CARD
    if kind == "another model's":
        card = json.loads((model / PREVIOUS / CARD).read_text())
        (model / PREVIOUS / CARD).write_text(json.dumps({**card, "id": "f" * 16}))
        return PREVIOUS
    if kind == "link to a folder":
        shutil.move(model / PREVIOUS, model.parent / "elsewhere")
        (model / PREVIOUS).symlink_to(draw.choice(["../elsewhere", str(model.parent / "elsewhere"), "nowhere"]))
        return PREVIOUS
    victim = draw.choice([CARD, WEIGHTS, STATISTICS])
    (folder / victim).unlink()
    if kind == "link":
        (folder / victim).symlink_to(thesis)
    elif kind == "FIFO":
        os.mkfifo(folder / victim)
    else:
        (folder / victim).mkdir()
    return victim


KINDS = ["file", "folder", "too many levels", "another tool's card", "no card", "another model's", "link to a folder"]
KINDS += ["link", "FIFO", "folder for a file"]


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("seed", range(30))
def test_what_is_not_the_models_is_never_replaced(tmp_path: Path, seed: int) -> None:
    draw, model = random.Random(seed), tmp_path / "model"
    model_directory.save(model, CONFIG, state(1))
    named = disturb(model, draw, KINDS[seed % len(KINDS)])
    if draw.random() < 0.3:  # where a swap in two steps was cut short
        model.rename(tmp_path / ".model.old")
    before = entries(tmp_path)
    with raises(ModelError, named):
        model_directory.save(model, CONFIG, state(2))
    assert entries(tmp_path) == before


@pytest.mark.parametrize(("changed", "named"), [({"format": 1, "id": None}, "earlier version"), ({"format": 99}, "99")])
def test_a_model_of_another_version_is_not_taught(tmp_path: Path, monkeypatch, changed, named) -> None:
    monkeypatch.setattr(IncrementalClassifier, "learn", lambda *_, **__: pytest.fail("trained"))
    model = tmp_path / "model"
    model_directory.save(model, CONFIG, state(1))
    for card in (model / CARD, model / PREVIOUS / CARD):
        written = {**json.loads(card.read_text()), **changed}
        card.write_text(json.dumps({key: value for key, value in written.items() if value is not None}))
    before = entries(tmp_path)
    with raises(ModelError, model / CARD, named):
        commands.teach(model, tmp_path, {}, epochs=1, budget=None, device="cpu", skip_bad=False, quiet=True)
    with raises(ModelError, model / CARD, named):
        model_directory.save(model, CONFIG, state(2))
    assert entries(tmp_path) == before | {".model.lock": b""}


@pytest.mark.parametrize("seed", range(20))
def test_commands_refuse_before_they_train(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IncrementalClassifier, "learn", lambda *_, **__: pytest.fail("trained"))
    draw, model = random.Random(seed), tmp_path / "model"
    model_directory.save(model, CONFIG, state(1))
    named = disturb(model, draw, KINDS[seed % len(KINDS)])
    before = entries(tmp_path)
    with raises(ModelError, named):
        commands.teach(model, tmp_path, {}, epochs=1, budget=None, device="cpu", skip_bad=False, quiet=True)
    assert entries(tmp_path) == before | {".model.lock": b""}


@pytest.mark.usefixtures("system")
def test_what_comes_in_while_a_model_is_saved_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model_directory.save(model, CONFIG, state(1))
    write = model_directory._write

    def late(*given: object) -> None:
        write(*given)  # type: ignore[arg-type]
        (model / PREVIOUS / "thesis").write_text("years of work")

    monkeypatch.setattr(model_directory, "_write", late)
    with raises(ModelError, "thesis"):
        model_directory.save(model, CONFIG, state(2))
    assert (model / PREVIOUS / "thesis").read_text() == "years of work"
    assert says(read(model / PREVIOUS)) == {0}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model"]


def read(folder: Path) -> State:
    """Read one state, without what is before it."""
    with contextlib.ExitStack() as opened, platform_support.HeldDirectory(folder) as held:
        return model_directory._read(folder, model_directory._open(held, opened))[1]


@pytest.mark.usefixtures("system")
def test_sound_models_are_replaced(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for number in range(1, 4):
        model_directory.save(model, CONFIG, state(number))
        found = model_directory.load(model)[1]
        assert found.previous is not None
        assert (says(found), says(found.previous)) == ({number}, {number - 1})
    model.rename(tmp_path / ".model.old")
    assert says(model_directory.load(model)[1]) == {3}
    assert model_directory.exists(model)
    model_directory.save(model, CONFIG, state(4, previous=False))
    assert says(model_directory.load(model)[1]) == {4}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model"]


@pytest.mark.usefixtures("system")
def test_a_load_while_models_are_saved_gives_one_of_them_whole(tmp_path: Path) -> None:
    model, over, saved, wrong = tmp_path / "model", threading.Event(), itertools.count(2), list[str]()
    model_directory.save(model, CONFIG, state(1))
    loads = [0] * 3
    last = 1

    def load(place: int) -> None:
        while not over.is_set():
            try:
                found = model_directory.load(model)[1]
                told = (says(found), says(found.previous) if found.previous else None)
                if told != ({found.updates}, {found.updates - 1}):
                    wrong.append(f"mixed: {told}")
                assert model_directory.fingerprint(model)
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")
            loads[place] += 1

    threads = [threading.Thread(target=load, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 1.0
    try:
        while not wrong and (time.monotonic() < end or min(loads) < 5 or last < 5):
            last = next(saved)
            model_directory.save(model, CONFIG, state(last))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert min(loads) >= 5
    assert says(model_directory.load(model)[1]) == {last}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model"]


def test_a_model_in_the_middle_of_a_swap_has_its_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: none, if the directory was renamed after it had been looked for."""
    model, current = tmp_path / "model", model_directory._current
    model_directory.save(model, CONFIG, state(1))
    wanted, moved = model_directory.fingerprint(model), iter([tmp_path / "moved"])
    monkeypatch.setattr(model_directory, "_current", lambda place: next(moved, None) or current(place))
    assert model_directory.fingerprint(model) == wanted
    assert model_directory.fingerprint(tmp_path / "none") == ""


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o700, 0o775, 0o555, 0o2755])
def test_whoever_may_enter_a_model_may_read_all_of_it(tmp_path: Path, mode: int) -> None:
    model = tmp_path / "model"
    model_directory.save(model, CONFIG, state(1))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in model.rglob("*") if path.is_file()}
    assert modes == {stat.S_IMODE(model.stat().st_mode) & 0o666}
    model.chmod(mode)
    model_directory.save(model, CONFIG, state(2))
    now = stat.S_IMODE(model.stat().st_mode)
    assert now == mode | 0o700, "a model keeps its permissions when it is replaced"
    assert stat.S_IMODE((model / PREVIOUS).stat().st_mode) == now
    assert {stat.S_IMODE(path.stat().st_mode) for path in model.rglob("*") if path.is_file()} == {now & 0o666}


def test_a_model_is_read_where_nothing_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_directory.save(tmp_path / "model", CONFIG, state(1))
    real = os.open

    def reading(path: object, flags: int, *given: int, **where: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *given, **where)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", reading)
    for name in ("rename", "replace", "mkdir", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, lambda *_, **__: pytest.fail("wrote"))
    assert says(model_directory.load(tmp_path / "model")[1]) == {1}


@pytest.mark.parametrize("seed", range(20))
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, seed: int) -> None:
    draw, model = random.Random(seed), state(1)
    which = draw.choice(["weights", "statistics"])
    dtype = draw.choice([torch.float64, torch.float32, torch.float16, torch.bfloat16])
    bad = torch.zeros(draw.randint(1, 5), draw.randint(1, 5), dtype=dtype)
    bad.flatten()[draw.randrange(bad.numel())] = draw.choice([float("nan"), float("inf"), -float("inf")])
    model = model.updated(**{which: {**getattr(model, which), "bad": bad}})
    model_directory.save(tmp_path / "model", CONFIG, model)
    with raises(ModelError, f"{which}.safetensors", "bad", "not finite"):
        model_directory.load(tmp_path / "model")


def test_the_configuration_survives(tmp_path: Path) -> None:
    model_directory.save(tmp_path / "model", CONFIG, state(1))
    found = model_directory.load(tmp_path / "model")[0]
    assert isinstance(found, ModelConfig)
    assert found.to_dict() == CONFIG.to_dict()
