"""Folders at the wrong level, test images, skipped files, and pictures in two folders."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from efcil.data.class_folders import check_duplicates, scan_classes
from efcil.data.duplicates import find_duplicates
from efcil.errors import DataError, DataWarning
from messages import raises


@pytest.fixture
def pets(tmp_path):
    """Return a function that makes empty image files below pets/ and returns pets."""

    def make(*names):
        for name in names:
            path = tmp_path / "pets" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return tmp_path / "pets"

    return make


def names(tree):
    return [tree.class_names[file.label] + ":" + Path(file.name).name for file in tree.files]


def test_a_folder_of_class_folders(pets):
    root = pets("pug/1.jpg", "beagle/2.jpg", "beagle/more/3.png", "README.md")
    tree = scan_classes(root)
    assert names(tree) == ["beagle:2.jpg", "beagle:3.png", "pug:1.jpg"]
    assert names(scan_classes(root, "test")) == names(tree)


ROUNDS = ("may/beagle/1.jpg", "may/pug/1.jpg", "june/boxer/1.jpg", "june/samoyed/1.jpg")


@pytest.mark.parametrize(
    ("files", "given", "split", "named"),
    [
        (ROUNDS, "", "train", ("june, may", "rounds", "pets/june or", "pets/may", "boxer, samoyed")),
        (ROUNDS, "", "test", ("june, may", "pets/may")),
        (ROUNDS, "may/beagle", "train", ("may/beagle", "one class", "pets/may?")),
        (ROUNDS, "may/beagle", "test", ("may/beagle", "pets/may?")),
        ((*ROUNDS, "test/pug/1.jpg"), "", "train", ("june, may", "pets/june or", "pets/may?")),
        ((*ROUNDS, "test/pug/1.jpg"), "", "test", ("pets/test?",)),
        (("pug/1.jpg", "june/boxer/1.jpg", "june/samoyed/1.jpg"), "", "train", ("boxer, samoyed", "pets/june?")),
        (("photos/pug/1.jpg", "photos/boxer/1.jpg"), "", "train", ("photos holds", "pets/photos?")),
        (("data/train/pug/1.jpg", "data/test/pug/1.jpg"), "", "train", ("data", "pets/data?")),
        (("train/may/pug/1.jpg", "train/may/boxer/1.jpg", "test/pug/1.jpg"), "", "train", ("pets/train/may?",)),
        (("train/pug/1.jpg", "train/boxer/1.jpg"), "", "test", ("train", "pets/train?")),
        (("only.jpg",), "", "train", ("pets", "one class")),
    ],
)  # fmt: skip
def test_a_wrong_level_is_refused_with_a_guess(pets, files, given, split, named):
    root = pets(*files)
    with raises(DataError, *(n if "pets/" not in n else f"{root.parent}/{n}" for n in named)):
        scan_classes(root / given, split)


def test_training_images_are_found_beside_test_images(pets):
    root = pets("Train/pug/1.jpg", "Train/boxer/2.jpg", "validation/pug/3.jpg", "extra/notes.txt")
    assert names(scan_classes(root)) == ["boxer:2.jpg", "pug:1.jpg"]
    assert names(scan_classes(root, "test")) == ["pug:3.jpg"]
    pets("test/boxer/4.jpg")
    assert names(scan_classes(root, "test")) == ["boxer:4.jpg"], "test comes before validation"


def test_training_images_without_test_images(pets):
    assert names(scan_classes(pets("train/pug/1.jpg", "train/boxer/2.jpg"))) == ["boxer:2.jpg", "pug:1.jpg"]


@pytest.mark.parametrize("name", ["test", "val", "Validation"])
def test_a_test_folder_is_not_taught_but_measured_on(pets, name):
    root = pets("may/pug/1.jpg", "may/boxer/1.jpg", f"{name}/pug/2.jpg", f"{name}/boxer/2.jpg")
    with raises(DataError, root / name, root / "may", f"`efcil evaluate MODEL {root / name}`"):
        scan_classes(root / name)
    assert names(scan_classes(root / name, "test")) == ["boxer:2.jpg", "pug:2.jpg"]
    assert names(scan_classes(root / "may")) == ["boxer:1.jpg", "pug:1.jpg"]


def test_test_folders_beside_classes_are_not_a_class(pets):
    root = pets("pug/1.jpg", "boxer/1.jpg", "test/pug/2.jpg", "test/boxer/2.jpg")
    with raises(DataError, root / "test", "boxer, pug"):
        scan_classes(root)
    with raises(DataError, f"{root / 'test'}?"):
        scan_classes(root, "test")


def test_test_and_train_may_be_names_of_classes_and_of_a_first_trial(pets):
    root = pets("test/1.jpg", "train/1.jpg", "bus/1.jpg")
    assert [*scan_classes(root).class_names] == ["bus", "test", "train"]
    trial = pets("x/test/pug/1.jpg", "x/test/boxer/1.jpg") / "x" / "test"
    assert names(scan_classes(trial)) == ["boxer:1.jpg", "pug:1.jpg"], "no folder beside it has the same classes"


def test_each_class_may_have_one_folder_of_the_same_name_inside(pets):
    root = pets("pug/images/1.jpg", "boxer/images/2.jpg")
    assert names(scan_classes(root)) == ["boxer:2.jpg", "pug:1.jpg"]


def test_links_that_never_end_and_folders_that_cannot_be_listed(pets, monkeypatch):
    root = pets("pug/1.jpg", "boxer/1.jpg")
    (root / "pug" / "up").symlink_to(root)
    (root / "boxer" / "top").symlink_to("/")
    assert [*scan_classes(root).class_names] == ["boxer", "pug"]
    with raises(DataError, root / "none"):
        scan_classes(root / "none")
    with raises(DataError, root / "pug" / "1.jpg"):
        scan_classes(root / "pug" / "1.jpg")


# --- the same pictures in two folders


def noise(*seeds):
    return np.stack([np.random.default_rng(seed).integers(0, 256, (3, 16, 16), dtype=np.uint8) for seed in seeds])


def test_a_picture_in_two_classes_is_named():
    files = ["a/0", "a/1", "b/0", "b/1", "b/2"]
    with pytest.warns(DataWarning, match="1 picture is in two classes: a/1 = b/0; keep each") as caught:
        check_duplicates(find_duplicates(noise(0, 1, 1, 2, 2)), files, [file[0] for file in files])
    assert len(caught) == 1, "twice in one class does no harm"


def test_many_pictures_are_named_up_to_a_bound():
    files = [f"a/{i}" for i in range(9)] + [f"b/{i}" for i in range(9)]
    with pytest.warns(DataWarning, match=r"8 pictures are in two classes: a/1 = b/1, .*, a/5 = b/5 and 3 more;"):
        check_duplicates(find_duplicates(noise(0, *range(1, 9), 99, *range(1, 9))), files, [file[0] for file in files])


def test_two_folders_with_the_same_pictures_are_refused():
    files = ["cat/0", "cat/1", "kitten/0", "kitten/1", "kitten/2", "dog/0"]
    classes = [file.split("/")[0] for file in files]
    with raises(DataError, "all 2 pictures", "cat", "kitten"):
        check_duplicates(find_duplicates(noise(0, 1, 1, 0, 2, 3)), files, classes)
    with pytest.warns(DataWarning, match="2 pictures are in two classes"):  # test images only count twice
        check_duplicates(find_duplicates(noise(0, 1, 1, 0, 2, 3)), files, classes, refuse=False)


def test_what_was_skipped_is_named(pets, efcil, tmp_path):
    root = pets()
    for name, seed in (("pug/1", 1), ("pug/2", 2), ("boxer/1", 3), ("boxer/2", 4)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(seed)[0].transpose(1, 2, 0)).save(f"{root / name}.png")
    pets(*(f"pug/{i}.txt" for i in range(7)))
    small = ("--size", 8, "--width", 2, "--epochs", 1)
    code, _, err = efcil("teach", tmp_path / "model", root, *small)
    assert code == 0, err
    assert "note: skipped 7 files: pug/0.txt is not an image, " in err
    assert "and 2 more" in err
    (root / "pug" / "3.jpg").write_text("text")
    code, _, err = efcil("teach", tmp_path / "other", root, *small)
    assert (code, "pug/3.jpg" in err, "--skip-bad" in err) == (2, True, True)
    code, _, err = efcil("evaluate", tmp_path / "model", root, "--skip-bad")
    assert code == 0, err
    assert "note: skipped 8 files: " in err


def test_a_terminal_gets_errors_and_notes_cut_between_words(pets, efcil, tmp_path, monkeypatch):
    root = pets(*ROUNDS)
    whole = efcil("teach", tmp_path / "model", root)[2]
    assert whole.count("\n") == 1
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    cut = efcil("teach", tmp_path / "model", root, "--quiet")[2]
    assert cut.split() == whole.split()
    assert all(len(line) <= 80 or " " not in line for line in cut.splitlines())
    assert cut.count("\n") > 1
