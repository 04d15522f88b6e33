"""Five rounds from the command line alone are the protocol of `efcil run`, and a class is forgotten for good.

Every command is a process of its own, as people use it. Accuracies are on test pictures that no command has learned
from. With nothing held out teaching and protocol do the same arithmetic in the same order, so they are held to be
equal, not only within a point.
"""

import pytest

from efcil.data import digits, glyphs
from messages import raises

OPTIONS = {
    "digits": {"width": 8, "first.epochs": 10, "later.epochs": 6},
    "glyphs": {"width": 16, "first.epochs": 25, "later.epochs": 12, "batch_size": 64},
}


@pytest.fixture(autouse=True)
def _own_cache(rounds, monkeypatch, tmp_path):
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rounds, "THREADS", "1")


def real(rounds, root):
    """Handwritten digits, scanned from paper, as a folder tree."""
    return rounds.write_folders(root, digits.load(), 16)


def drawn(rounds, root):
    data = glyphs.load(classes=20, size=16, train_per_class=150, test_per_class=50)
    return rounds.write_folders(root, data, 16)


@pytest.mark.slow
@pytest.mark.parametrize(("write", "name"), [(real, "digits"), (drawn, "glyphs")], ids=["digits", "glyphs"])
def test_five_rounds_from_the_command_line_equal_the_run_and_a_class_is_forgotten_for_good(
    rounds, tmp_path, write, name
):
    data = write(rounds, tmp_path / "pictures")
    names = rounds.names_of(data, None)
    settings = [word for key, value in OPTIONS[name].items() for word in ("--set", f"{key}={value}")]
    new_model_options = ["--val-fraction", 0, "--size", 16, "--set", f"augment={name}", *settings]
    found = rounds.measure(data, names, 3, new_model_options, tmp_path / "work")
    assert found["pictures"] == sum(1 for _ in (data / "test").rglob("*.png"))
    assert found["taught"] > 3 * 100 / len(names), "three times what chance gives"
    assert found["taught"] == pytest.approx(found["run"], abs=0.01)  # the command rounds to two digits

    # Over one class of each round. Fewer classes are an easier problem, so that a gain is no fault.
    gone = found["forgotten"]
    assert [one["class"] for one in gone] == names[:: len(names) // 5]
    before, after = (sum(one[key] for one in gone) / len(gone) for key in ("before", "after"))
    assert after >= before - 0.5, "the others are found as before"

    for one in gone[:2]:
        model = tmp_path / "work" / f"without {one['class']}" / "model"
        stored = b"".join(file.read_bytes() for file in model.rglob("*") if file.is_file())
        assert one["class"].encode() not in stored
        answers = rounds.answered(model, data / "test" / one["class"])
        assert answers
        assert all(one["class"] not in guesses and len(guesses) == len(names) - 1 for _, guesses in answers)
        with raises(RuntimeError, "undo", model, "exit 2"):
            rounds.efcil("undo", model)
        with raises(RuntimeError, one["class"]):
            rounds.evaluated(model, data / "test")


def test_a_command_that_fails_is_reported(rounds, tmp_path):
    with raises(RuntimeError, "summary", tmp_path / "nothing", "exit 2", "efcil teach"):
        rounds.efcil("summary", tmp_path / "nothing")


def test_the_order_of_classes_is_that_of_a_run(rounds, tmp_path):
    for name in ("class 10", "class 9", "class 1"):
        (tmp_path / "train" / name).mkdir(parents=True)
    assert rounds.names_of(tmp_path, None) == ["class 1", "class 9", "class 10"]
    assert rounds.names_of(tmp_path, 2) == ["class 1", "class 9"]


def test_what_a_struck_class_does_to_accuracy(rounds, tmp_path, monkeypatch):
    """By hand: three of four pictures are of other classes; one of them was taken for the forgotten class."""
    answers = [("a", ["a", "b", "c"]), ("b", ["a", "b", "c"]), ("b", ["c", "a", "b"]), ("c", ["c", "a", "b"])]
    (tmp_path / "model").mkdir()
    (tmp_path / "data" / "test").mkdir(parents=True)
    said = []
    monkeypatch.setattr(rounds, "efcil", lambda *arguments: said.append(arguments[0]) or "")
    monkeypatch.setattr(rounds, "evaluated", lambda model, folder: {"images": 3, "accuracy": 66.67})
    found = rounds.without(tmp_path / "model", tmp_path, tmp_path / "data", ["a", "b", "c"], "a", answers)
    assert found == {"class": "a", "before": 33.33, "ruled_out": 66.67, "after": 66.67}
    assert said == ["forget"]
