"""Folders of images: what is read, how it is split, what the cache keeps and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from efcil.data import cache, workers
from efcil.data.cache import cache_directory
from efcil.data.dataset import DataSet
from efcil.data.decode import read_image
from efcil.data.folder import load, natural_key, split_sides
from efcil.errors import ConfigError, DataError
from efcil.files import read_json
from messages import assert_names, raises

SIZE = 8


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pets"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(path: Path, value: int) -> Path:
    """A picture that can be told from every other: its red and green channels spell `value`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (value % 256, value // 256, 7)).save(path)
    return path


def fill(root: Path, counts: dict[str, int], start: int = 0) -> dict[int, str]:
    """Images in class folders; says which value lies in which class."""
    classes = {}
    value = start
    for name, count in counts.items():
        for i in range(count):
            put(root / name / f"{i}.png", value)
            classes[value] = name
            value += 1
    return classes


def values(images: Any) -> list[int]:
    return [int(image[0, 0, 0]) + 256 * int(image[1, 0, 0]) for image in images]


def shown(data: DataSet) -> dict[int, str]:
    """Value -> class of every image of the data set."""
    return {
        value: data.class_names[label]
        for part in (data.train, data.test)
        for value, label in zip(values(part.images), part.labels, strict=True)
    }


def kept(cache: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in cache.rglob(pattern) if path.is_file())


def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(workers, "read_image", refuse)


# --- what is read


def test_class_folders_are_read_split_and_labeled(root: Path) -> None:
    classes = fill(root, {"cat": 10, "dog": 5, "ant": 2})
    data = load(root, size=SIZE)
    assert data.name == "pets"
    assert data.class_names == ("ant", "cat", "dog")
    assert shown(data) == classes
    assert np.bincount(data.test.labels).tolist() == [1, 2, 1]  # a fifth of each, at least one
    assert np.bincount(data.train.labels).tolist() == [1, 8, 4]
    assert (data.channels, data.size) == (3, SIZE)
    assert data.mean == (0.485, 0.456, 0.406)
    assert data.std == (0.229, 0.224, 0.225)
    assert data.notes == ()
    assert not data.train.images.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        data.train.images[0] = 0


def test_pixels_are_those_of_the_decoder(root: Path) -> None:
    noise = np.random.default_rng(0)
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(root / name)
    data = load(root, size=SIZE)
    found = {image.tobytes() for part in (data.train, data.test) for image in part.images}
    assert found == {read_image(path, SIZE).tobytes() for path in root.rglob("*.png")}


def test_every_suffix_is_recognized_in_either_case(root: Path) -> None:
    suffixes = ["jpg", "JPEG", "png", "bmp", "GIF", "tif", "tiff", "webp", "ppm"]
    for i, suffix in enumerate(suffixes):
        put(root / "a" / f"{i}.{suffix}", 0)
    Image.new("L", (9, 9)).save(root / "a" / "grey.PGM", "PPM")
    data = load(root, size=SIZE)
    assert len(data.train) + len(data.test) == len(suffixes) + 1


@pytest.mark.parametrize("test_name", ["test", "val", "Test"])
def test_the_users_own_split(root: Path, test_name: str) -> None:
    train = fill(root / "train", {"cat": 3, "dog": 2})
    test = fill(root / test_name, {"cat": 1, "dog": 4}, start=100)
    data = load(root, size=SIZE)
    assert sorted(values(data.train.images)) == sorted(train)
    assert sorted(values(data.test.images)) == sorted(test)
    assert shown(data) == train | test


def test_test_comes_before_val_and_the_rest_is_noted(root: Path) -> None:
    fill(root / "train", {"cat": 2})
    fill(root / "test", {"cat": 1}, start=10)
    fill(root / "val", {"cat": 1}, start=20)
    data = load(root, size=SIZE)
    assert values(data.test.images) == [10]
    assert "val" in data.notes[0]


def test_train_may_be_the_name_of_a_class(root: Path) -> None:
    classes = fill(root, {"bus": 2, "train": 3})
    assert shown(load(root, size=SIZE)) == classes


def test_nested_hidden_linked_and_unicode(root: Path, tmp_path: Path) -> None:
    put(root / "猫" / "a" / "b" / "ä 1.png", 1)
    put(root / "猫" / "2.png", 2)
    put(root / "猫" / ".hidden.png", 3)
    put(root / "猫" / ".git" / "x.png", 4)
    (root / "猫" / "Thumbs.db").write_bytes(b"x")
    put(root / ".cache" / "x.png", 5)
    elsewhere = tmp_path / "elsewhere"
    put(elsewhere / "6.png", 6)
    (root / "猫" / "more").symlink_to(elsewhere)
    put(root / "Ünder" / "7.png", 7)
    (root / "Ünder" / "8.png").symlink_to(put(tmp_path / "other" / "8.png", 8))
    assert shown(load(root, size=SIZE)) == {1: "猫", 2: "猫", 6: "猫", 7: "Ünder", 8: "Ünder"}


def test_one_name_written_in_two_ways_is_one_class(root: Path) -> None:
    fill(root / "train", {"caf\u00e9": 2})
    fill(root / "test", {"cafe\u0301": 1}, start=10)
    assert load(root, size=SIZE).class_names == ("caf\u00e9",)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_file_names_that_are_not_unicode(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(2):
        path = put(root / "a" / f"{i}.png", i)
        os.rename(path, os.fsencode(path.parent) + b"/caf\xe9%d.png" % i)
    classes = shown(load(root, size=SIZE))
    assert classes == {0: "a", 1: "a"}
    no_decoding(monkeypatch)
    assert shown(load(root, size=SIZE)) == classes


def test_class_names_are_sorted_naturally(root: Path) -> None:
    fill(root, {"c10": 2, "c9": 2, "C1": 2, "b": 2})
    assert load(root, size=SIZE).class_names == ("b", "C1", "c9", "c10")
    names = ["a1b2", "a1b10", "10", "9", "", "a", "²"]
    assert sorted(names, key=natural_key) == ["", "9", "10", "a", "a1b2", "a1b10", "²"]


# --- the split


def test_the_split_depends_on_seed_and_share_alone(root: Path) -> None:
    fill(root, {"a": 40, "b": 10})
    first = load(root, size=SIZE)
    again = load(root, size=SIZE, cache=root.parent / "other")
    assert values(first.test.images) == values(again.test.images)
    assert values(first.test.images) != values(load(root, size=SIZE, seed=1).test.images)
    half = load(root, size=SIZE, test_share=0.5)
    assert np.bincount(half.test.labels).tolist() == [20, 5]
    larger = load(root, size=SIZE + 1)
    assert values(larger.test.images) == values(first.test.images)


def test_images_keep_their_side_when_others_come_and_go(root: Path) -> None:
    fill(root, {"a": 10, "b": 10})
    before = load(root, size=SIZE)
    train, test = set(values(before.train.images)), set(values(before.test.images))
    for i in range(30):
        put(root / "a" / f"new{i}.png", 100 + i)
    after = load(root, size=SIZE)
    assert train <= set(values(after.train.images))
    assert test <= set(values(after.test.images))
    assert np.bincount(after.test.labels).tolist() == [8, 2]  # a fifth of 40 and of 10
    # half of the images gone: nothing moves, although the rule alone would choose otherwise now
    for i in range(0, 30, 2):
        (root / "a" / f"new{i}.png").unlink()
    fewer = load(root, size=SIZE)
    assert set(values(fewer.train.images)) <= set(values(after.train.images))
    assert set(values(fewer.test.images)) <= set(values(after.test.images))
    # and back again
    for i in range(0, 30, 2):
        put(root / "a" / f"new{i}.png", 100 + i)
    assert set(values(load(root, size=SIZE).test.images)) == set(values(after.test.images))


def test_the_record_is_a_readable_file_that_decides(root: Path, own_cache: Path) -> None:
    fill(root, {"a": 4})
    before = load(root, size=SIZE, test_share=0.25)
    (path,) = own_cache.rglob("split-*.json")
    record = read_json(path)
    assert sorted(record["train"] + record["test"]) == [f"a/{i}.png" for i in range(4)]
    (old,) = record["test"]
    new = record["train"][0]
    path.write_text(path.read_text().replace(old, "@").replace(new, old).replace("@", new))
    after = load(root, size=SIZE, test_share=0.25)
    assert [f"a/{v}.png" for v in values(after.test.images)] == [new]
    assert values(after.test.images) != values(before.test.images)
    path.write_text("{}")
    with raises(DataError, path):
        load(root, size=SIZE, test_share=0.25)


def test_a_side_that_is_gone_is_not_refilled_with_images_seen_before(root: Path) -> None:
    fill(root, {"a": 5, "b": 5})
    data = load(root, size=SIZE)
    (gone,) = (v for v, label in zip(values(data.test.images), data.test.labels, strict=True) if label == 0)
    (root / "a" / f"{gone}.png").unlink()
    with raises(DataError, "'a'", root):
        load(root, size=SIZE)
    put(root / "a" / "fresh.png", 99)
    assert 99 in values(load(root, size=SIZE).test.images)


@pytest.mark.parametrize("count", range(2, 30))
@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.99])
def test_both_sides_have_an_image(count: int, share: float) -> None:
    names = [str(i) for i in range(count)]
    sides = split_sides(names, [0] * count, {}, test_share=share, seed=3)
    tests = sum(side == "test" for side in sides.values())
    assert 1 <= tests <= count - 1
    assert abs(tests - share * count) <= 1
    # with only one side recorded, new images make up the other
    for side in ("train", "test"):
        grown = split_sides([*names, "x", "y"], [0] * (count + 2), dict.fromkeys(names, side), test_share=share, seed=3)
        assert set(grown.values()) == {"train", "test"}
        assert all(grown[name] == side for name in names)


# --- the cache


def test_the_second_call_maps_the_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root, {"a": 5, "b": 3})
    calls: list[tuple[int, int]] = []
    first = load(root, size=SIZE, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (8, 8)
    calls.clear()
    no_decoding(monkeypatch)
    second = load(root, size=SIZE, progress=lambda done, total: calls.append((done, total)))
    assert calls == []
    assert isinstance(second.train.images, np.memmap)
    assert second.fingerprint() == first.fingerprint()
    np.testing.assert_array_equal(second.train.images, first.train.images)
    np.testing.assert_array_equal(second.test.labels, first.test.labels)


def test_a_changed_file_is_decoded_again(root: Path, own_cache: Path) -> None:
    fill(root, {"a": 5})
    load(root, size=SIZE)
    arrays = kept(own_cache, "*.npy")
    put(root / "a" / "3.png", 77)
    os.utime(root / "a" / "3.png", ns=(1, 1))
    data = load(root, size=SIZE)
    assert 77 in shown(data)
    assert 3 not in shown(data)
    assert len(kept(own_cache, "*.npy")) == 1  # the old array is gone
    assert kept(own_cache, "*.npy") != arrays


def test_sizes_have_arrays_of_their_own(root: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root, {"a": 2})
    load(root, size=SIZE)
    load(root, size=SIZE + 1)
    assert len(kept(own_cache, "*.npy")) == 2
    no_decoding(monkeypatch)
    assert load(root, size=SIZE).size == SIZE
    assert load(root, size=SIZE + 1).size == SIZE + 1


@pytest.mark.parametrize("damage", ["no index", "half an index", "no array", "half an array"])
def test_a_damaged_cache_is_built_again(root: Path, own_cache: Path, damage: str) -> None:
    classes = fill(root, {"a": 5, "b": 5})
    load(root, size=SIZE)
    (array,) = own_cache.rglob("*.npy")
    path = array if "array" in damage else array.with_suffix(".json")
    data = path.read_bytes()
    path.unlink()
    if damage.startswith("half"):
        path.write_bytes(data[: len(data) // 2])
    assert shown(load(root, size=SIZE)) == classes


class Crash(Exception):
    pass


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("error", [Crash, KeyboardInterrupt])
def test_a_build_that_fails_midway_leaves_no_cache(
    root: Path, own_cache: Path, workers: int, error: type[BaseException]
) -> None:
    classes = fill(root, {"a": 40, "b": 40})

    def fail(done: int, total: int) -> None:
        assert done < total
        raise error

    with pytest.raises(error):
        load(root, size=SIZE, workers=workers, progress=fail)
    assert kept(own_cache) == []
    assert shown(load(root, size=SIZE)) == classes


def test_several_workers_give_the_same_bytes_as_one(root: Path, tmp_path: Path) -> None:
    fill(root, {"a": 70, "b": 3, "c": 41})
    (root / "b" / "2.png").write_bytes(b"broken")
    totals: list[int] = []
    several = load(
        root, size=SIZE, workers=3, cache=tmp_path / "3", skip_bad=True, progress=lambda done, _: totals.append(done)
    )
    one = load(root, size=SIZE, workers=1, cache=tmp_path / "1", skip_bad=True)
    assert totals == sorted(totals)
    assert totals[-1] == 114
    assert several.notes == one.notes
    for part in (several.train, several.test):
        assert all(image.any() for image in part.images)  # each row was written
    assert kept(tmp_path / "3") == kept(tmp_path / "1")
    for a, b in zip(sorted((tmp_path / "3").rglob("*.*")), sorted((tmp_path / "1").rglob("*.*")), strict=True):
        assert a.read_bytes() == b.read_bytes()


def test_a_worker_that_dies_is_one_line(root: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root, {"a": 40})
    monkeypatch.setattr(workers, "_start_worker", os.abort)
    with raises(DataError, "workers=1") as caught:
        load(root, size=SIZE, workers=2)
    assert "\n" not in str(caught.value)
    assert kept(own_cache) == []


SCRIPT = """
import sys
from efcil.data.folder import load

print("started", flush=True)
data = load(sys.argv[1], size=8, workers=2, progress=lambda done, total: print(done, flush=True))
print("loaded", len(data.train) + len(data.test), flush=True)
"""


def start(script: Path, root: Path) -> subprocess.Popen[str]:
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_script_without_a_main_guard(root: Path, tmp_path: Path) -> None:
    fill(root, {"a": 70})
    out, err = start(tmp_path / "script.py", root).communicate(timeout=240)
    assert out.count("started") == 1
    assert out.endswith("loaded 70\n")
    assert err == ""


@pytest.mark.skipif(os.name == "nt", reason="process groups and signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_build_ends_its_workers_and_leaves_no_cache(
    root: Path, own_cache: Path, tmp_path: Path, number: signal.Signals
) -> None:
    # Large pictures, so that the build would go on for twenty seconds, and on a busy machine for longer.
    (root / "a").mkdir(parents=True)
    Image.new("RGB", (900, 900), "red").save(root / "a" / "0.png")
    for i in range(1, 4_000):
        os.link(root / "a" / "0.png", root / "a" / f"{i}.png")
    process = start(tmp_path / "script.py", root)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    assert process.stdout.readline().strip().isdigit()
    began = time.monotonic()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # what Ctrl-C does
    else:
        os.kill(process.pid, number)  # only the parent: the workers must notice
    _, err = process.communicate(timeout=240)  # ends when the last holder of the pipes has gone
    assert time.monotonic() - began < 20
    assert process.returncode != 0
    assert err.count("Traceback") <= (1 if number == signal.SIGINT else 0), err
    assert [name for name in kept(own_cache) if not name.startswith(".")] == []
    if number == signal.SIGINT:
        assert kept(own_cache) == []


def test_what_a_killed_build_left_is_removed_in_time(root: Path, own_cache: Path) -> None:
    fill(root, {"a": 2})
    load(root, size=SIZE)
    (array,) = own_cache.rglob("*.npy")
    old, young = array.with_name(".x.1-ab.tmp.npy"), array.with_name(".y.1-ab.tmp.npy")
    for path in (old, young):
        path.write_bytes(b"")
    os.utime(old, (1, 1))
    put(root / "a" / "2.png", 2)
    load(root, size=SIZE)
    assert not old.exists()
    assert young.exists()  # another process may be writing it


def test_two_builds_at_once_do_not_disturb_each_other(root: Path, own_cache: Path) -> None:
    classes = fill(root, {"a": 40, "b": 30})
    inner: list[DataSet] = []

    def meanwhile(done: int, total: int) -> None:
        if not inner:
            inner.append(load(root, size=SIZE, workers=1))

    outer = load(root, size=SIZE, workers=1, progress=meanwhile)
    assert shown(outer) == shown(inner[0]) == classes
    assert len(kept(own_cache, "*.npy")) == 1


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: Path) -> None:
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("EFCIL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "efcil"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory().is_relative_to(Path.home())
    fill(root, {"a": 2})
    with raises(DataError, root / "cache", "EFCIL_CACHE"):
        load(root, size=SIZE, cache=root / "cache")
    (tmp_path / "file").write_text("")
    with raises(DataError, tmp_path / "file" / "x", "Not a directory", "EFCIL_CACHE"):
        load(root, size=SIZE, cache=tmp_path / "file" / "x")


def test_a_full_disk_is_reported_before_decoding(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root, {"a": 2})
    no_decoding(monkeypatch)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: Usage)
    with raises(DataError, 2, "EFCIL_CACHE", "--set data.lazy=true"):
        load(root, size=SIZE, lazy=False)


def test_what_would_fill_the_disk_is_read_as_it_is_needed(
    root: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being told; with the same images, and the same recorded split."""
    fill(root, {"a": 3, "b": 4})
    with monkeypatch.context() as patch:
        patch.setattr(cache.shutil, "disk_usage", lambda path: Usage)
        data = load(root, size=SIZE)
    assert any("7 images are decoded on access" in note for note in data.notes)
    assert kept(own_cache, "*.npy") == []
    assert len(kept(own_cache, "split-*.json")) == 1
    whole = load(root, size=SIZE)
    assert not any("decoded on access" in note for note in whole.notes)
    for part, other in ((data.train, whole.train), (data.test, whole.test)):
        assert np.array_equal(np.asarray(part.images), other.images)
        assert np.array_equal(part.labels, other.labels)
    assert load(root, size=SIZE, lazy=True).fingerprint() == whole.fingerprint()


class Usage:
    free = 2 * 3 * SIZE * SIZE - 1


# --- what is refused or skipped


def test_bad_images_are_listed_or_skipped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = fill(root, {"a": 12, "b": 5})
    whole = (root / "a" / "0.png").read_bytes()
    for i in range(6):
        (root / "a" / f"{i}.png").write_bytes(whole[:-20])
    (root / "b" / "1.png").write_text("text")
    with pytest.raises(DataError) as caught:
        load(root, size=SIZE)
    message = str(caught.value)
    assert_names(message, "7 files", "a/0.png", "2 more", "--skip-bad")
    assert message.count("truncated image") == 5
    data = load(root, size=SIZE, skip_bad=True)
    good = {value: name for value, name in classes.items() if value > 5 and value != 13}
    assert shown(data) == good
    assert np.bincount(data.test.labels).tolist() == [1, 1]  # a fifth of six and of four
    assert "and 2 more" in data.notes[0]
    # and from the cache: the same answers, with the bad files alone tried again
    tried: list[str] = []

    def seen(source: Any, size: int, channels: int, *, name: str, **options: Any) -> Any:
        tried.append(name)
        return read_image(source, size, channels, name=name, **options)

    monkeypatch.setattr(workers, "read_image", seen)
    assert shown(load(root, size=SIZE, skip_bad=True)) == good
    assert set(tried) == {*(f"a/{i}.png" for i in range(6)), "b/1.png"}
    with raises(DataError, "7 files", "--skip-bad"):
        load(root, size=SIZE)


def test_the_split_is_made_of_the_good_images(root: Path, own_cache: Path) -> None:
    classes = fill(root, {"a": 5, "b": 5})
    names = [f"{name}/{i}.png" for name in "ab" for i in range(5)]
    sides = split_sides(names, [0] * 5 + [1] * 5, {}, test_share=0.2, seed=0)
    bad = next(name for name in names if sides[name] == "test")  # the whole test side of class a
    (root / bad).write_bytes(b"broken")
    data = load(root, size=SIZE, skip_bad=True)
    assert shown(data) == {value: name for value, name in classes.items() if value != int(bad[2])}
    assert np.bincount(data.test.labels).tolist() == [1, 1]
    (record,) = own_cache.rglob("split-*.json")
    written = read_json(record)["test"]
    assert sorted(f"{classes[value]}/{value % 5}.png" for value in values(data.test.images)) == written


def test_a_file_that_could_not_be_read_once_gets_another_chance(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = fill(root, {"a": 5})

    def failing(source: Any, size: int, channels: int, *, name: str, **options: Any) -> Any:
        if name == "a/2.png":
            raise DataError(f"{name}: cannot be read: Input/output error")
        return read_image(source, size, channels, name=name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(workers, "read_image", failing)
        assert 2 not in shown(load(root, size=SIZE, skip_bad=True))
    assert shown(load(root, size=SIZE)) == classes


def test_one_bad_image_is_named_with_the_remedy(root: Path) -> None:
    fill(root, {"a": 3})
    (root / "a" / "1.png").write_bytes(b"")
    with raises(DataError, "a/1.png", "--skip-bad"):
        load(root, size=SIZE)


def test_too_few_good_images(root: Path) -> None:
    fill(root, {"a": 2, "b": 2})
    (root / "a" / "1.png").write_text("text")
    with raises(DataError, "a/1.png", "--skip-bad"):
        load(root, size=SIZE)
    with raises(DataError, root, "'a'"):
        load(root, size=SIZE, skip_bad=True)


def test_files_that_are_no_images(root: Path) -> None:
    classes = fill(root, {"a": 3})
    (root / "a" / "notes.txt").write_text("x")
    with raises(DataError, "a/notes.txt", "--skip-bad"):
        load(root, size=SIZE)
    put(root / "stray.png", 9)
    with raises(DataError, "2 files", "a/notes.txt", "stray.png", "--skip-bad"):
        load(root, size=SIZE)
    data = load(root, size=SIZE, skip_bad=True)
    assert shown(data) == classes
    assert "a/notes.txt is not an image" in data.notes[0]
    assert "stray.png" in data.notes[0]


def test_a_read_me_beside_the_classes_is_only_noted(root: Path) -> None:
    fill(root, {"a": 3})
    (root / "README.md").write_text("x")
    assert load(root, size=SIZE).notes == ("README.md is not an image and was ignored",)


def test_links_in_a_circle_and_to_nothing(root: Path) -> None:
    classes = fill(root, {"a": 3})
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "self").symlink_to(root / "a")
    (root / "a" / "top").symlink_to("/")
    (root / "a" / "gone.png").symlink_to(root / "nowhere.png")
    with raises(DataError, "4 files", "a/gone.png", "a/self", "a/top", "a/up", "--skip-bad"):
        load(root, size=SIZE)
    assert shown(load(root, size=SIZE, skip_bad=True)) == classes


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({}, ()),
        ({"a": 2, "b": 0}, ("'b'", "add images to b")),
        ({"a": 2, "b": 1}, ("'b'", "add images to b")),
        ({"train/a": 2}, ("train/", "test/", "val/", "pets/train")),
        ({"train/a": 2, "train/b": 2, "test/a": 2}, ("'b'", "test/b")),
        ({"train/a": 2, "val/a": 2, "val/b": 2}, ("'b'", "train/b")),
        ({"train/a": 2, "val/a": 0}, ("'a'", "val/a")),
    ],
)
def test_trees_that_cannot_be_used(root: Path, tree: dict[str, int], named: tuple[str, ...]) -> None:
    root.mkdir()
    for name in tree:
        (root / name).mkdir(parents=True)
    fill(root, tree)
    with raises(DataError, root, *named):
        load(root, size=SIZE)


def test_what_is_not_a_directory(root: Path) -> None:
    with raises(DataError, root):
        load(root)
    root.write_text("x")
    with raises(DataError, root):
        load(root)


@pytest.mark.parametrize("options", [{"size": 0}, {"test_share": 0.0}, {"test_share": 1.0}, {"workers": 0}])
def test_impossible_options(root: Path, options: dict[str, Any]) -> None:
    with raises(ConfigError, *options, *options.values()):
        load(root, **options)


def test_an_array_that_does_not_fit_its_index_is_built_again(root: Path, own_cache: Path) -> None:
    classes = fill(root, {"a": 5, "b": 5})
    load(root, size=SIZE)
    (array,) = own_cache.rglob("*.npy")
    np.save(array, np.zeros((7, 3, SIZE, SIZE), np.uint8))
    assert shown(load(root, size=SIZE)) == classes
