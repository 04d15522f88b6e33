"""The official sets of image files: each layout, what is refused and why, class lists, verify, presets, whole runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import standins
from efcil import data as datasets
from efcil.config import flat
from efcil.data import DATASETS, cache, cifar100, cub200, imagenet1k, imagenet100, mini_imagenet, tiny_imagenet, workers
from efcil.data.dataset import DataSet, Official
from efcil.data.decode import read_image
from efcil.errors import ConfigError, DataError
from efcil.experiment.specification import Experiment, ExperimentSpec, resolve
from messages import assert_names, raises
from standins import BIRDS, WNIDS, Written

SIZE = 12
NEW = ("tiny-imagenet", "mini-imagenet", "imagenet100", "imagenet1k", "cub200")
OFFICIAL = Official(4, 24, 8, train_each=6, test_each=2)  # of the stand-ins
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "sets"


def shown(data: DataSet) -> list[set[tuple[str, bytes]]]:
    """(class, pixels) of the images of each side."""
    return [
        {(data.class_names[label], image.tobytes()) for image, label in zip(part.images, part.labels, strict=True)}
        for part in (data.train, data.test)
    ]


def expected(written: tuple[Written, Written], size: int = SIZE) -> list[set[tuple[str, bytes]]]:
    return [{(c, read_image(path, size).tobytes()) for c, files in side.items() for path in files} for side in written]


def write(name: str, root: Path) -> None:
    """The stand-in of a set, in its usual layout."""
    if name == "tiny-imagenet":
        standins.tiny_imagenet(root)
    elif name == "cub200":
        standins.cub200(root)
    else:
        standins.class_folders(root)


def an_image(root: Path) -> Path:
    """A training image."""
    return min(p for p in root.rglob("*.[Jj]*") if "train" in p.parts or "CUB_200_2011" in p.parts)


# --- layouts


@pytest.mark.parametrize("val", ["official", "folders", "images"])
def test_tiny_imagenet_in_each_layout(root: Path, val: str) -> None:
    written = standins.tiny_imagenet(root, val=val)
    (root / "tiny-imagenet-200" / "val" / "images").mkdir(exist_ok=True)  # scripts that move the files leave it behind
    data = tiny_imagenet.load(root / "tiny-imagenet-200", size=SIZE)
    assert data.class_names == tuple(sorted(WNIDS))  # as ImageFolder sorts, not as wnids.txt
    assert shown(data) == expected(written)
    assert (len(data.train), len(data.test), data.channels) == (24, 8, 3)
    assert (data.name, data.mean, data.std) == ("tiny-imagenet", cache.MEAN, cache.STD)
    assert shown(tiny_imagenet.load(root, size=SIZE)) == shown(data)  # the folder that holds it


def test_tiny_imagenet_without_wnids_and_with_images_one_level_up(root: Path) -> None:
    written = standins.tiny_imagenet(root)
    home = root / "tiny-imagenet-200"
    (home / "wnids.txt").unlink()
    before = expected(written)
    for wnid in WNIDS:
        for path in list((home / "train" / wnid / "images").iterdir()):
            path.rename(home / "train" / wnid / path.name)
        (home / "train" / wnid / "images").rmdir()
    assert shown(tiny_imagenet.load(home, size=SIZE)) == before


@pytest.mark.parametrize("inner", ["", "ILSVRC/Data/CLS-LOC"])
def test_imagenet1k(root: Path, inner: str) -> None:
    written = standins.class_folders(root / inner)
    data = imagenet1k.load(root, size=SIZE)
    assert data.class_names == tuple(sorted(WNIDS))
    assert shown(data) == expected(written)
    assert datasets.find("imagenet1k").options().short_side == 256  # type: ignore[attr-defined]


def test_mini_imagenet(root: Path) -> None:
    written = standins.class_folders(root)
    data = mini_imagenet.load(root, size=SIZE)
    assert (data.name, data.class_names) == ("mini-imagenet", tuple(sorted(WNIDS)))
    assert shown(data) == expected(written)
    assert data.notes[-1].startswith("not the official mini-imagenet: 4 classes")
    assert datasets.find("mini-imagenet").options().short_side == 84  # type: ignore[attr-defined]
    assert (mini_imagenet.OFFICIAL.train, mini_imagenet.OFFICIAL.test) == (100 * 500, 100 * 100)
    (root / "val").rename(root / "test")
    with raises(DataError, "mini-imagenet", "val/"):
        mini_imagenet.scan(root)


@pytest.mark.parametrize("layout", ["official", "test", "val"])
def test_cub200_in_each_layout(root: Path, layout: str) -> None:
    if layout == "official":
        written = standins.cub200(root)
        assert shown(cub200.load(root / "CUB_200_2011", size=SIZE)) == expected(written)
    else:
        written = standins.class_folders(root, parts=("train", layout), names=BIRDS)
    data = cub200.load(root, size=SIZE)
    assert data.class_names == BIRDS
    assert shown(data) == expected(written)


@pytest.mark.parametrize("name", ["imagenet-r", "imagenet-a"])
def test_sets_of_wnid_folders_with_and_without_a_split(root: Path, name: str) -> None:
    load = datasets.module(name).load
    written = standins.class_folders(root / name, parts=("train", "test"))
    data = load(root, size=SIZE)
    assert (data.name, data.class_names) == (name, tuple(sorted(WNIDS)))
    assert shown(data) == expected(written)
    assert any("official" in note for note in data.notes)
    whole = root / "whole" / name
    standins.class_folders(root / "other", parts=("train", "test"))
    (root / "other" / "train").rename(whole.parent)  # the archive as released: class folders and a README
    whole = whole.parent
    (whole / "README.txt").write_text("as released")
    split = load(whole, size=SIZE, test_share=0.34)
    assert split.class_names == data.class_names
    assert (split.train.labels.max(), len(split.train) + len(split.test)) == (len(WNIDS) - 1, len(data.train))
    assert len(split.test) == 2 * len(WNIDS)
    (whole / "birds").mkdir()
    with raises(DataError, name, "birds"):
        load(whole, size=SIZE)


def test_labels_that_change_are_read_again(root: Path) -> None:
    """The cache knows files by name and time; labels and sides may lie in another file."""
    standins.cub200(root)
    before = cub200.load(root, size=SIZE)
    home = root / "CUB_200_2011"
    labels = (home / "image_class_labels.txt").read_text()
    swapped = labels.replace("1 1\n", "1 2\n", 1)
    (home / "image_class_labels.txt").write_text(swapped)
    after = cub200.load(root, size=SIZE)
    assert before.train.labels.tolist().count(0) == 6
    assert after.train.labels.tolist().count(0) == 5
    sides = (home / "train_test_split.txt").read_text()
    (home / "train_test_split.txt").write_text(sides.replace("2 1\n", "2 0\n", 1))
    assert len(cub200.load(root, size=SIZE).test) == 9


def test_the_decoded_images_are_mapped_the_second_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standins.tiny_imagenet(root)
    first = tiny_imagenet.load(root, size=SIZE)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(workers, "read_image", refuse)
    second = tiny_imagenet.load(root, size=SIZE)
    assert isinstance(second.train.images, np.memmap)
    assert second.fingerprint() == first.fingerprint()


# --- what is refused, and what is only noted


@pytest.mark.parametrize("name", NEW)
def test_a_directory_that_is_not_it(root: Path, name: str) -> None:
    load = datasets.module(name).load
    with pytest.raises(DataError, match=f"^{name}: .*sets does not exist; unpack it there or give .* to get it: "):
        load(root)
    root.mkdir()
    with raises(DataError, name, root, "--data"):
        load(root)
    (root / "photos").mkdir()
    (root / "a.zip").write_text("x")
    with raises(DataError, name, "a.zip", "photos/", "--data"):
        load(root)
    with raises(DataError, name, root / "a.zip", "--data"):
        load(root / "a.zip")
    with raises(DataError, name, "--data DIR"):
        datasets.load(name, None, datasets.find(name).options())


@pytest.mark.parametrize("name", NEW)
def test_a_corrupt_image_is_named_or_skipped(root: Path, name: str) -> None:
    write(name, root)
    path = an_image(root)
    path.write_bytes(path.read_bytes()[:-60])
    load = datasets.module(name).load
    with raises(DataError, path.name, "--skip-bad"):
        load(root, size=SIZE)
    data = load(root, size=SIZE, skip_bad=True)
    assert len(data.train) == 23
    assert any(note.startswith("skipped ") and path.name in note for note in data.notes)


@pytest.mark.parametrize("name", NEW)
def test_other_counts_than_the_official_ones_are_a_note(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(name, root)
    module = datasets.module(name)
    wanted = module.OFFICIAL.classes
    (note,) = [n for n in module.load(root, size=SIZE).notes if n.startswith("not the official")]
    assert_names(note, name, 4, f"{wanted:,}", 8, f"{module.OFFICIAL.test:,}")
    monkeypatch.setattr(module, "OFFICIAL", OFFICIAL)
    assert not any(n.startswith("not the official") for n in module.load(root, size=SIZE).notes)
    # a class with too few is named, even where it is not the only one and the sum is right
    monkeypatch.setattr(module, "OFFICIAL", Official(4, 24, 8, train_each=5))
    assert "4 classes without 5 training images: " in module.load(root, size=SIZE).notes[-1]


def test_tiny_imagenet_incomplete(root: Path) -> None:
    standins.tiny_imagenet(root)
    home = root / "tiny-imagenet-200"
    annotations = home / "val" / "val_annotations.txt"
    whole = annotations.read_text()

    def refused(*named: object) -> None:
        with raises(DataError, *named):
            tiny_imagenet.load(root, size=SIZE)

    annotations.write_text(whole + "val_99.JPEG\tn01000001\t0\t0\t9\t9\n")
    refused(annotations, "val/images", "val_99.JPEG", "tiny-imagenet-200.zip")
    annotations.write_text(whole.replace("n01000001", "n09999999"))
    refused(annotations, "line 3", "'val_1.JPEG n09999999'", 4, "tiny-imagenet-200.zip")
    annotations.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    refused("val/images/val_7.JPEG", "--skip-bad")
    annotations.unlink()
    refused(annotations, "tiny-imagenet-200.zip")
    shutil.rmtree(home / "val" / "images")
    (home / "val" / "images").mkdir()
    refused(home / "val", "images/", "tiny-imagenet-200.zip")
    shutil.rmtree(home / "train" / "n02000002")
    refused(1, 4, home / "train", "n02000002")
    shutil.rmtree(home / "val")
    refused(home, "train/", "val/", "tiny-imagenet-200.zip")
    shutil.rmtree(home / "train")
    (home / "train").mkdir()
    (home / "val").mkdir()
    refused(home / "train", "tiny-imagenet-200.zip")


def test_imagenet_incomplete(root: Path) -> None:
    standins.class_folders(root)

    def refused(*named: object) -> None:
        with raises(DataError, *named):
            imagenet1k.load(root, size=SIZE)

    shutil.rmtree(root / "train" / "n01000003")
    refused("imagenet1k", 1, 4, root / "train", "n01000003")
    (root / "train" / "n01000003").mkdir()
    refused("'n01000003'", "train/n01000003")
    shutil.rmtree(root / "train" / "n01000003")
    shutil.rmtree(root / "val" / "n01000003")
    for path in list((root / "val").glob("*/*")):
        path.rename(root / "val" / path.name)
    for wnid in folders_of(root / "val"):
        (root / "val" / wnid).rmdir()
    refused(root / "val", 6, "valprep.sh")
    shutil.rmtree(root / "val")
    refused(root, "train/", "val/<wnid>/")
    (root / "val").mkdir()
    shutil.rmtree(root / "train")
    (root / "train").mkdir()
    (root / "train" / "n01000003.tar").write_text("x")
    refused(root / "train", 1, "train/<wnid>/")


def folders_of(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.is_dir())


def test_files_that_do_not_belong_there(root: Path) -> None:
    standins.class_folders(root)
    (root / "train" / WNIDS[0] / "notes.doc").write_text("x")
    (root / "train" / WNIDS[0] / "gone.JPEG").symlink_to(root / "nowhere.JPEG")
    (root / "train" / WNIDS[0] / ".hidden.JPEG").write_text("x")
    (root / "train" / WNIDS[0] / "Thumbs.db").write_text("x")
    with raises(DataError, "2 files", "gone.JPEG", "notes.doc", "--skip-bad"):
        imagenet1k.load(root, size=SIZE)
    assert len(imagenet1k.load(root, size=SIZE, skip_bad=True).train) == 24


def test_cub200_incomplete(root: Path) -> None:
    standins.cub200(root)
    home = root / "CUB_200_2011"

    def refused(*named: object) -> None:
        with raises(DataError, *named):
            cub200.load(root, size=SIZE)

    def replaced(name: str, old: str, new: str) -> str:
        before = (home / name).read_text()
        assert old in before
        (home / name).write_text(before.replace(old, new, 1))
        return before

    before = replaced("train_test_split.txt", "3 1\n", "")
    refused(home / "train_test_split.txt", "images.txt", 3, "CUB_200_2011.tgz")
    (home / "train_test_split.txt").write_text(before.replace("3 1\n", "3 7\n", 1))
    refused(3, "'1'", "'7'", 4, "CUB_200_2011.tgz")
    (home / "train_test_split.txt").write_text(before)
    before = replaced("image_class_labels.txt", "3 1\n", "3 77\n")
    refused(3, "'77'", "'1'", 4, "CUB_200_2011.tgz")
    (home / "image_class_labels.txt").write_text(before)
    before = replaced("classes.txt", "4 ", "5 005.Crested_Auklet\n4 ")
    refused(home, "'005.Crested_Auklet'", "train", "CUB_200_2011.tgz")
    (home / "classes.txt").write_text(before)
    before = replaced("classes.txt", "2 ", "two ")
    refused(home / "classes.txt", "line 2", "'two 002.Laysan_Albatross'", "CUB_200_2011.tgz")
    (home / "classes.txt").write_text(before)
    gone = sorted((home / "images" / BIRDS[0]).iterdir())[0]
    gone.unlink()
    refused("images.txt", home / "images", f"{BIRDS[0]}/{gone.name}", "CUB_200_2011.tgz")
    (home / "classes.txt").unlink()
    shutil.rmtree(home / "images")
    refused(home, "classes.txt", "images", "CUB_200_2011.tgz")
    shutil.rmtree(home)
    standins.class_folders(root, parts=("train", "elsewhere"), names=BIRDS)
    refused(root, "train/", "test/", "val/")


# --- class lists


def test_the_lists_we_ship() -> None:
    assert imagenet100.bundled_lists() == ["cmc", "first-100", "kaggle", "seed-1993"]
    lists = {name: imagenet100.read_list(name) for name in imagenet100.bundled_lists()}
    for name, classes in lists.items():
        assert len(set(classes)) == 100, name
        assert classes == sorted(classes)
        assert all(len(c) == 9 and c[0] == "n" and c[1:].isdigit() for c in classes)
        text = Path(imagenet100.__file__).with_name("class_lists").joinpath(f"{name}.txt").read_text()
        assert text.startswith("# ImageNet-100 ")
        assert "https://" in text, "where it comes from"
    # the places of the first 100 sorted wnids in numpy's permutation of 1993 are known, and so are the classes there
    np.random.seed(1993)  # noqa: NPY002 (the rule of the literature)
    places = sorted(p for p in np.random.permutation(1000)[:100] if p < 100)  # noqa: NPY002
    assert [lists["first-100"][p] for p in places] == [c for c in lists["seed-1993"] if c <= lists["first-100"][-1]]
    assert len(set(lists["cmc"]) & set(lists["seed-1993"])) == 7


@pytest.mark.parametrize(
    ("which", "kept"),
    [("folders", WNIDS), ("file", ("n02000004", "n01000003")), ("relative", ("n02000004", "n01000003"))],
)
def test_which_classes_imagenet100_has(
    root: Path, which: str, kept: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = standins.class_folders(root)
    file = root / "mine.txt"
    file.write_text("# mine\n\nn02000004 some words, as some lists have\n  n01000003  \n")
    monkeypatch.chdir(root)
    class_list = {"folders": "folders", "file": str(file), "relative": "mine.txt"}[which]
    data = imagenet100.load(root, size=SIZE, class_list=class_list)
    assert data.class_names == tuple(sorted(kept))
    chosen = tuple({c: files for c, files in side.items() if c in kept} for side in written)
    assert shown(data) == expected(chosen)  # type: ignore[arg-type]


def test_imagenet100_says_which_list_the_folders_are(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(imagenet100.read_list("cmc"))
    standins.class_folders(root, names=names[:4])
    assert "the 4 class folders are none of the known lists (cmc, first-100" in imagenet100.scan(root).notes[0]
    for part in ("train", "val"):
        for name in names:
            (root / part / name).mkdir(exist_ok=True)
    assert imagenet100.scan(root).notes == ["the 100 class folders are those of the list 'cmc'"]
    monkeypatch.setattr(imagenet100, "IMAGENET1K", Official(100, 1, 1))
    with raises(ConfigError, 100, "--set data.class_list=LIST", "first-100"):
        imagenet100.scan(root)


def test_two_lists_of_one_tree_do_not_push_each_other_out(root: Path, own_cache: Path) -> None:
    standins.class_folders(root)
    for name, text in (("a", "n02000004\nn01000003\n"), ("b", "n01000001\nn01000003\n")):
        (root / name).write_text(text)
        imagenet100.load(root, size=SIZE, class_list=str(root / name))
    imagenet1k.load(root, size=SIZE)
    assert len(list(own_cache.rglob("*.npy"))) == 3


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        (None, ConfigError, ("sets/list", "folders", "cmc", "No such file")),
        ("# nothing\n", ConfigError, ("sets/list",)),
        ("n01000001\nn01000001 x\n", ConfigError, ("sets/list", "'n01000001'")),
        (
            "n01000001\n" + "".join(f"n0900000{i}\n" for i in range(7)),
            DataError,
            (7, 8, "sets/train", "n09000000", "n09000004", 2),
        ),
    ],
)
def test_bad_class_lists(root: Path, text: str | None, error: type[Exception], named: tuple[object, ...]) -> None:
    standins.class_folders(root)
    if text is not None:
        (root / "list").write_text(text)
    with raises(error, *named):
        imagenet100.load(root, size=SIZE, class_list=str(root / "list"))


# --- verify


@pytest.mark.parametrize("name", NEW)
def test_verify_a_sound_copy(root: Path, efcil: Command, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(name, root)
    monkeypatch.setattr(datasets.module(name), "OFFICIAL", OFFICIAL)
    code, out, err = efcil("data", "verify", name, "--data", root)
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if not line.startswith("note: ")]
    counts = "4 classes, 24 training and 8 test images (6 and 2 per class)"
    assert lines == [f"{name}: {counts}, all readable, as in the official set"]
    assert efcil("data", "verify", name, root)[1] == out  # the place alone will do


@pytest.mark.parametrize("name", NEW)
def test_verify_finds_what_is_wrong(root: Path, efcil: Command, name: str) -> None:
    write(name, root)
    datasets.load(name, root, datasets.find(name).options(short_side=SIZE))  # type: ignore[call-arg] # a cache hides nothing
    path = an_image(root)
    path.write_bytes(path.read_bytes()[:-60])
    code, out, err = efcil("data", "verify", name, "--data", root)
    assert code == 2
    problems = [line for line in out.splitlines() if line.startswith("problem: ")]
    assert_names(problems[0], path.name)
    assert_names(problems[1], 4, f"{datasets.module(name).OFFICIAL.classes:,}")
    assert_names(err, name, root, f"{len(problems)} problems")
    assert err.count("\n") == 1
    code, out, _ = efcil("data", "verify", name, "--data", root, "--skip-bad")
    assert code == 2, "the counts still differ"
    assert any(line.startswith("note: ") and path.name in line for line in out.splitlines())
    assert "problem: 4 classes" in out
    assert not any(line.startswith("problem: ") and path.name in line for line in out.splitlines())


def test_verify_folders_and_pixels(root: Path, efcil: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    standins.class_folders(root)
    assert efcil("data", "verify", "folder", "--data", root)[1].startswith("folder: 4 classes, 24 training and 8 test")
    code, out, err = efcil("data", "verify", "folder", "--data", root / "train")
    assert (code, err) == (0, "")
    assert out == "folder: 4 classes, 20 training and 4 test images (5 and 1 per class), all readable\n"
    an_image(root / "train").write_bytes(b"")
    code, out, _ = efcil("data", "verify", "folder", "--data", root / "train")
    assert code == 2
    assert_names(out, an_image(root / "train").name)
    code, out, _ = efcil("data", "verify", "folder", "--data", root / "train", "--skip-bad")
    assert code == 0
    assert_names(out, an_image(root / "train").name)
    for path in sorted((root / "train" / WNIDS[0]).iterdir())[1:]:
        path.unlink()
    code, out, _ = efcil("data", "verify", "folder", "--data", root / "train")
    assert code == 2
    assert_names(out, f"'{WNIDS[0]}'")

    binary = root / "cifar-100-binary"
    binary.mkdir()
    (binary / "fine_label_names.txt").write_text("a\nb\n")
    for part, count in (("train", 6), ("test", 2)):
        records = np.zeros((count, 3074), np.uint8)
        records[:, 1] = np.arange(count) % 2
        (binary / f"{part}.bin").write_bytes(records.tobytes())
    code, out, _ = efcil("data", "verify", "cifar100", "--data", root)
    assert code == 2
    assert_names(out, "problem: 6", "50,000")
    monkeypatch.setattr(cifar100, "OFFICIAL", Official(2, 6, 2))
    code, out, err = efcil("data", "verify", "cifar100", "--data", root)
    assert (code, err) == (0, "")
    assert out.startswith("cifar100: 2 classes, 6 training and 2 test images (3 and 1 per class), all readable")


def test_verify_takes_a_class_list_and_one_directory(root: Path, efcil: Command) -> None:
    standins.class_folders(root)
    (root / "list").write_text("n02000004\nn01000003\n")
    _, out, _ = efcil("data", "verify", "imagenet100", "--data", root, "--set", f"data.class_list={root / 'list'}")
    assert_names(out, "problem: 2", 100)
    code, _, err = efcil("data", "verify", "imagenet100", root, "--data", root)
    assert code == 2
    assert_names(err, "--data")
    code, _, err = efcil("data", "verify", "imagenet100")
    assert code == 2
    assert_names(err, "imagenet100", "--data DIR")


def test_data_list_says_what_each_set_is(efcil: Command) -> None:
    _, out, _ = efcil("data", "list")
    rows = re.split(r"\n(?=\S)", out)  # a row begins in the first column
    assert "license" in rows[0]
    for name in NEW:
        (row,) = (" ".join(row.split()) for row in rows if row.startswith(f"{name} "))
        assert "decoded" in row, "its size"
        assert DATASETS[name].license.split()[0] in row
        assert DATASETS[name].url.split()[0] in row


# --- presets


def planned(dataset: str, preset: str | None = None, methods: tuple[str, ...] = ("dpcr",)) -> Experiment:
    return resolve(ExperimentSpec(methods, dataset, tasks=10, preset=preset))


@pytest.mark.parametrize(
    ("dataset", "stem", "augment", "crop", "stored", "lr", "weight", "ridge", "sigma", "compensation"),
    [
        ("tiny-imagenet", "cifar", "crop-flip", None, 64, 0.001, 10, 2000, 0.3, 1.5),
        ("mini-imagenet", "small", "crop-flip", None, 84, 0.05, 5, 2000, 1.0, 1.0),  # ours: the paper has none
        ("imagenet100", "small", "resized-crop", 224, 256, 0.05, 5, 2000, 1.0, 1.0),
        ("imagenet1k", "small", "resized-crop", 224, 256, 0.05, 5, 2000, 1.0, 1.0),
        ("cub200", "imagenet", "resized-crop", 224, 256, 0.05, 10, 200, 1.0, 1.0),
    ],
)
def test_the_papers_settings(
    dataset: str,
    stem: str,
    augment: str,
    crop: int | None,
    stored: int,
    lr: float,
    weight: float,
    ridge: float,
    sigma: float,
    compensation: float,
) -> None:
    experiment = planned(dataset, methods=("dpcr", "sdc", "ds-al"))
    t, o = experiment.training, {name: options for name, (_, options) in experiment.methods.items()}
    assert experiment.preset == "paper"
    assert (t.stem, t.augment, t.crop, flat(experiment.data)["short_side"]) == (stem, augment, crop, stored)
    assert (t.backbone, t.batch_size, t.first.epochs, t.first.lr, t.first.milestones) == (
        "resnet18",
        128,
        200,
        0.1,
        (60, 120, 160),
    )
    assert (t.later.epochs, t.later.lr, t.later.milestones, t.distill_weight) == (100, lr, (45, 90), weight)
    found = flat(o["dpcr"]) | flat(o["sdc"]) | {"compensation": flat(o["ds-al"])["compensation"]}
    assert flat(o["dpcr"])["ridge"] == ridge
    assert (found["sigma"], found["compensation"]) == (sigma, compensation)
    assert planned(dataset, methods=("pass",)).training.proto_weight == (0.1 if dataset == "tiny-imagenet" else 10)


@pytest.mark.parametrize(
    ("dataset", "different"),
    [
        (
            "tiny-imagenet",
            {"later.lr": 0.05},
        ),  # its settings for Tiny-ImageNet and ImageNet never take effect there
        ("imagenet100", {"distill_weight": 10}),
        ("imagenet1k", {"distill_weight": 10}),
        ("cub200", {}),
    ],
)
def test_the_released_codes_settings(dataset: str, different: dict[str, Any]) -> None:
    paper, released = (flat(planned(dataset, preset).training) for preset in ("paper", "released_code"))
    assert {k: v for k, v in released.items() if paper[k] != v} == {"last_batch": "keep", **different}


# --- whole runs


@pytest.mark.parametrize("name", NEW)
def test_a_whole_run_on_a_stand_in(root: Path, tmp_path: Path, efcil: Command, name: str) -> None:
    write(name, root)
    quick = ["width=2", "backbone=resnet10", "first.epochs=1", "later.epochs=1", "crop=16", "data.short_side=20"]
    settings = [
        part for setting in (*quick, "first.milestones=[]", "later.milestones=[]") for part in ("--set", setting)
    ]
    arguments = ["run", "dpcr", name, "--data", root, "--tasks", 2, "--order", "1993", "--device", "cpu", *settings]
    code, out, err = efcil(*arguments, "--out", tmp_path / "r")
    assert code == 0, err
    assert f"not the official {name}: 4 classes" in out
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert (summary["dataset"], summary["preset"], summary["task_sizes"]) == (name, "paper", [2, 2])
    assert len(summary["A_t"]) == 2
    # and once more with the images read as they are needed
    code, out, err = efcil(*arguments, "--out", tmp_path / "s", "--set", "data.lazy=true")
    assert code == 0, err
    assert "images are decoded on access" in out
    streamed = json.loads((tmp_path / "s" / "summary.json").read_text())
    assert (streamed["A_t"], streamed["matrix"]) == (summary["A_t"], summary["matrix"])
    log = [(tmp_path / run / "metrics.jsonl").read_text() for run in ("r", "s")]
    assert log[0] == log[1]


def test_skip_bad_reaches_the_loader(root: Path, tmp_path: Path, efcil: Command) -> None:
    standins.tiny_imagenet(root)
    an_image(root).write_bytes(b"no image")
    arguments = [
        "run",
        "lwf-ncm",
        "tiny-imagenet",
        "--data",
        root,
        "--tasks",
        2,
        "--out",
        tmp_path / "r",
        "--device",
        "cpu",
    ]
    small = ["width=2", "backbone=resnet10", "first.epochs=1", "later.epochs=1", "data.short_side=16"]
    settings = [part for setting in small for part in ("--set", setting)]
    code, _, err = efcil(*arguments, *settings)
    assert code == 2
    assert_names(err, "--skip-bad")
    settings += [part for setting in ("first.milestones=[]", "later.milestones=[]") for part in ("--set", setting)]
    code, out, err = efcil(*arguments, *settings, "--skip-bad")
    assert code == 0, err
    assert "skipped train/" in out
