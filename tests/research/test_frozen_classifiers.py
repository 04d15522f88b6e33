"""The tables of classifiers are what was measured, test images are never learned, and nothing is measured twice."""

import numpy as np
import pytest
import torch
from PIL import Image

from efcil import IncrementalClassifier
from efcil.classifiers import CLASSIFIERS
from efcil.core.class_stats import ClassStats
from efcil.files import read_json_lines
from research import frozen_classifiers as tool


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), [12, 30, 160])
    features = rng.random((3, 40))[labels] + 0.1 * rng.random((len(labels), 40))
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


def test_few_classes_are_drawn_anew_for_each_draw(photos):
    found = tool.FeatureSet(photos)
    kinds = [np.unique(found.labels[found.draw(5, draw, classes=2)[0]]).tolist() for draw in range(5)]
    assert all(len(kind) == 2 for kind in kinds)
    assert len(set(map(tuple, kinds))) > 1


@pytest.mark.parametrize("head", ["gaussian", "mahalanobis"])
@pytest.mark.parametrize("shots", [1, 5, 80])
def test_scores_without_a_matrix_for_each_class_are_the_classifiers(photos, head, shots):
    found = tool.FeatureSet(photos)
    learned, _ = found.draw(shots, draw=0)
    classifier = CLASSIFIERS[head](**tool.OPTIONS.get(head, {}))
    labels = torch.from_numpy(found.labels[learned])
    stats = [
        ClassStats.from_features(rows if behind is None else behind(rows, ()), labels)
        for rows, behind in ((found.features[learned], behind) for behind in classifier.feature_maps)
    ]
    classifier.fit(*stats)
    expected = classifier.logits(found.features[found.test]).numpy()
    np.testing.assert_allclose(tool.scores(found, head, learned, found.test), expected, rtol=1e-6)


def test_the_default_is_compared_on_the_same_draws():
    def line(head, *accuracy, draws=None):
        own = {"set": "a", "part": "test", "shots": 5, "head": head, "classes": 3, "images": 15}
        return {**own, "accuracy": list(accuracy), "draws": draws or list(range(len(accuracy)))}

    lines = [line("slda", 80.0, 82.0, 84.0), line("ridge-gcv", 82.0, 84.0, 86.0), line("ncm", 70.0, 82.0, 76.0)]
    worse = tool.Difference.of(lines, "a", 5, ["ridge-gcv", "ncm"])
    assert worse == ("ridge-gcv", -2.0, 0.0)
    assert not worse.reaches(1)
    assert worse.reaches(2)
    noisy = tool.Difference.of([*lines, line("gaussian", 86.0, 78.0, 88.0)], "a", 5, ["gaussian"])
    assert noisy.mean == -2.0
    assert round(noisy.error, 2) == 3.06
    assert noisy.reaches(1), "the standard error is larger"
    assert tool.Difference.of([*lines, line("gaussian", 86.0, draws=[0])], "a", 5, ["gaussian"]) is None


def test_the_same_file_in_several_classes_is_left_out(tmp_path):
    for kind in "ab":
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for number, color in enumerate(["gray", "red" if kind == "a" else "blue"]):
            Image.new("RGB", (40, 50), color).save(tmp_path / "photos" / kind / f"{number}.png")
    assert tool.main(["extract", str(tmp_path / "s.npz"), str(tmp_path / "photos")]) == 0
    with np.load(tmp_path / "s.npz") as found:
        assert found["labels"].tolist() == [0, 1]
        assert not np.allclose(*found["features"])


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
    assert text.split("### shapes: 3 classes")[1].count("\n| ") == 2 + len(heads), "validation is not in the tables"
