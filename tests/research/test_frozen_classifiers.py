"""The tables of classifiers are what was measured, test images are never learned, and nothing is measured twice."""

import numpy as np
import pytest

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
