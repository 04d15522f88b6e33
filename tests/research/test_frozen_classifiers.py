"""The tables of classifiers are what was measured, test images are never learned, and nothing is measured twice."""

import numpy as np
import pytest
from PIL import Image

from efcil import IncrementalClassifier
from efcil.files import read_json_lines
from research import frozen_classifiers as tool


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), [12, 30, 160])
    features = rng.random((3, 8))[labels] + 0.1 * rng.random((len(labels), 8))
    np.savez(tmp_path / "shapes.npz", features=features.astype(np.float32), labels=labels)
    return tmp_path / "shapes.npz"


def test_the_page_is_what_the_stored_results_give():
    assert tool.main(["--check"]) == 0


@pytest.mark.parametrize("shots", tool.SHOTS)
def test_test_images_are_never_learned(photos, shots):
    found = tool.FeatureSet(photos)
    counts = np.bincount(found.labels[found.test])
    assert counts.tolist() == [4, 10, 50]
    learned, left = found.draw(shots, draw=1)
    parts = [set(found.test.tolist()), set(learned.tolist()), set(left.tolist())]
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(found.labels)
    assert np.array_equal(learned, found.draw(shots, draw=1)[0])
    if shots != tool.UNEVEN:
        assert np.bincount(found.labels[learned]).tolist() == [min(shots, 7), min(shots, 18), min(shots, 99)]


def test_features_of_the_parts_of_a_set_are_put_together(tmp_path):
    for part, kind, count in (("train", "a", 2), ("train", "b", 3), ("test", "a", 1), ("train", "c", 1)):
        (tmp_path / part / kind).mkdir(parents=True)
        for number in range(count):
            pixels = np.random.default_rng([number, ord(kind)]).integers(0, 256, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / part / kind / f"{number}.png")
    (tmp_path / "train" / "a" / "damaged.png").write_text("text")
    folders = [str(tmp_path / "train"), str(tmp_path / "test")]
    assert tool.main(["extract", str(tmp_path / "s.npz"), *folders, "--classes", "2", "--largest", "--most", "4"]) == 0
    with np.load(tmp_path / "s.npz") as found:
        assert found["features"].shape == (6, 1280)
        assert np.bincount(found["labels"]).tolist() == [3, 3]
        whole = IncrementalClassifier(progress=False, device="cpu").embed(tmp_path / "train" / "b" / "0.png")
        assert np.isclose(found["features"], whole, atol=1e-4).all(1).sum() == 1


def test_what_is_stored_is_not_measured_again(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, "STORED", tmp_path / "stored.jsonl")
    monkeypatch.setattr(tool, "SHOTS", (5,))
    heads = [head for head in tool.TITLES if head != "ranpac"]
    assert tool.main(["measure", str(photos), "--draws", "2", "--heads", ",".join(heads)]) == 0
    stored = read_json_lines(tmp_path / "stored.jsonl")
    assert [line["head"] for line in stored] == heads
    assert all(line["draws"] == [0, 1] and min(line["accuracy"]) > 90 for line in stored)
    capsys.readouterr()
    tool.main(["measure", str(photos), "--draws", "2", "--heads", ",".join(heads)])
    assert capsys.readouterr().out == ""
    tool.main(["measure", str(photos), "--draws", "1", "--heads", "ncm", "--validation"])
    stored = read_json_lines(tmp_path / "stored.jsonl")
    assert sum(line["part"] == "validation" for line in stored) == 1
    text = tool.tables(stored)
    assert "### shapes: 3 classes" in text
    assert text.count("\n| ") == 2 + len(heads), "validation is not in the tables"
