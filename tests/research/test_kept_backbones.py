"""Features of a trajectory whose drift is known: linear maps compose, and what does not move may be frozen anywhere."""

import pytest
import torch

from efcil.tensor_files import save_tensors
from problems import draw
from research import kept_backbones as tool

SIZES, DIM, IMAGES = [2, 2, 2], 5, 24


def write(folder, maps):
    """Images of six classes under three backbones: `maps[k]` leads from the one before to the k-th."""
    centers = 2 * draw(sum(SIZES), DIM, seed=1)
    labels, test_labels = (torch.arange(sum(SIZES)).repeat_interleave(n) for n in (IMAGES, 10))
    features = {
        "train": centers[labels] + draw(len(labels), DIM, seed=2),
        "test": centers[test_labels] + draw(len(test_labels), DIM, seed=3),
    }
    tensors = {"labels": labels, "test_labels": test_labels}
    total = torch.eye(DIM).double()
    for task, turn in enumerate(maps):
        own = features["train"][labels // 2 == task]
        for point in range(1, tool.POINTS):
            part = total @ ((tool.POINTS - point) * torch.eye(DIM).double() + point * turn) / tool.POINTS
            tensors[f"point/{task}/{point}"] = (own @ part).float()
        total = total @ turn
        for part, rows in features.items():
            tensors[f"{part}/{task}"] = (rows @ total).float()
            tensors[f"{part}-mirrored/{task}"] = (rows @ total).float()
    meta = {"sizes": SIZES, "order": "4", "seed": 0, "seconds": 1.0, "commit": "abc", "dataset": "digits"}
    folder.mkdir()
    save_tensors(folder / "features.safetensors", tensors, meta | {"ridge": 1.0, "shift_ridge": 1e-9})
    return folder


def lines(folder):
    return {line["method"]: line["A_t"] for line in tool.measure(folder)}


@pytest.fixture
def found(tmp_path):
    one = torch.eye(DIM).double()
    turns = [one, *(one + 0.2 * draw(DIM, DIM, seed=seed) for seed in (4, 5))]
    return lines(write(tmp_path / "linear", turns))


@pytest.mark.parametrize("other", ["2 maps a task", "4 maps a task", "true statistics", "mirrored"])
def test_drift_that_is_linear_is_found_in_one_map_or_in_many(found, other):
    assert found[f"dpcr, {other}"] == pytest.approx(found["dpcr"], abs=2.0)  # float32 features of sixty test images
    assert found["dpcr"][-1] > 40  # chance is 17


def test_a_backbone_that_rests_may_be_frozen_anywhere(tmp_path):
    still = lines(write(tmp_path / "still", [torch.eye(DIM).double()] * 3))
    for name, accuracies in still.items():
        if name.startswith("dpcr") and "together" not in name:
            assert accuracies == still["dpcr"], name
    assert still["acil:buffer=1000"][-1] > 40


def test_until_it_is_frozen_it_is_the_one_that_moves(found):
    assert found["dpcr, frozen after task 2"][:2] == found["dpcr"][:2]
    assert found["dpcr, frozen after task 1"][0] == found["dpcr"][0]


def test_lines_are_stored_by_what_and_order(tmp_path, monkeypatch, found):
    monkeypatch.setattr(tool, "STORED", tmp_path / "research.jsonl")
    (tmp_path / "research.jsonl").write_text('{"name": "other", "what": "kept"}\n')
    arguments = ["kept_backbones.py", "measure", str(tmp_path / "linear"), "--store", "digits"]
    monkeypatch.setattr("sys.argv", arguments)
    tool.main()
    first = (tmp_path / "research.jsonl").read_text()
    tool.main()
    assert (tmp_path / "research.jsonl").read_text() == first
    assert first.splitlines()[0] == '{"name": "other", "what": "kept"}'
    assert len(first.splitlines()) == 1 + len(found)
