"""The small problem for first looks has only training images in it, and the log's tables say what was stored."""

import pickle

import numpy as np
from PIL import Image

from efcil.errors import RunError
from efcil.files import read_json_lines, write_json, write_json_lines
from messages import raises
from research import half_scale as tool
from summaries import summary


def test_it_is_made_of_training_images_alone(tmp_path):
    names = ["apple", "baby", "worm"]
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 352)
    train = rng.integers(0, 100, (len(labels), 3072), dtype=np.uint8)  # test images are lighter
    test = rng.integers(150, 256, (6, 3072), dtype=np.uint8)
    source = tmp_path / "cifar-100-python"
    source.mkdir()
    for part, content in {
        "train": {"data": train, "fine_labels": labels.tolist()},
        "test": {"data": test, "fine_labels": [0, 1, 2] * 2},
        "meta": {"fine_label_names": names},
    }.items():
        (source / part).write_bytes(pickle.dumps(content))
    tool.make(tmp_path, tmp_path / "half")
    found = sorted(path.relative_to(tmp_path / "half").as_posix() for path in (tmp_path / "half").rglob("*.png"))
    sizes = {f"{part}/{name}": n for part, n in (("train", 250), ("test", 100)) for name in ("apple", "worm")}
    wanted = {f"{folder}/{i:03d}.png" for folder, count in sizes.items() for i in range(count)}
    assert set(found) == wanted, "every second class"
    first = train[labels == 2][250].reshape(3, 16, 2, 16, 2).mean((2, 4)).transpose(1, 2, 0)
    picture = np.asarray(Image.open(tmp_path / "half" / "test" / "worm" / "000.png"))
    assert np.abs(picture - first).max() <= 1, "the 251st training image of the class, at half its size"
    assert max(np.asarray(Image.open(tmp_path / "half" / name)).max() for name in found) < 100


def test_runs_are_stored_once_and_without_where_they_lay(tmp_path):
    (tmp_path / "run").mkdir()
    for A_f in (31.0, 32.5):
        command = "efcil run dpcr folder --data /somewhere/half --out /else/where --seed 0"
        command += "; efcil reevaluate /a/b dpcr; efcil ensemble dpcr /a/b /a/c --set ridge=1"
        shown = summary(A_f=A_f, command=command, old=[None, 30.0], new=[50.0, 40.0], dataset="folder")
        write_json(tmp_path / "run" / "summary.json", shown)
        tool.add(tmp_path / "run", "as it is", tmp_path / "research.jsonl")
    (only,) = read_json_lines(tmp_path / "research.jsonl")
    assert (only["name"], only["what"], only["A_f"], only["commit"]) == ("half-scale", "as it is", 32.5, "abc123")
    assert only["command"].startswith("efcil run dpcr folder --data DIR --out DIR --seed 0; ")
    assert only["command"].endswith("; efcil reevaluate DIR dpcr; efcil ensemble dpcr DIR ... --set ridge=1")
    assert "| as it is | dpcr | 1993 | 10 | 32.50 | 60.00 | 30.00 | 40.00 | 100 |" in tool.table([only])
    write_json(tmp_path / "run" / "summary.json", {**shown, "order": "7"})
    tool.add(tmp_path / "run", "as it is", tmp_path / "research.jsonl")
    found = read_json_lines(tmp_path / "research.jsonl")
    assert [s["order"] for s in found] == ["1993", "7"], "another order stands beside it"


def test_what_was_measured_on_test_images_has_no_place_in_the_log(tmp_path):
    (tmp_path / "run").mkdir()
    more = {"old": [None, 30.0], "new": [50.0, 40.0]}
    write_json(tmp_path / "run" / "summary.json", summary(**more))
    with raises(RunError, "cifar100", "efcil tune"):
        tool.add(tmp_path / "run", "chosen", tmp_path / "research.jsonl")
    assert not (tmp_path / "research.jsonl").exists()
    val_fraction = summary(**more, dataset="cifar100, 10% of training held out")
    write_json(tmp_path / "run" / "summary.json", val_fraction)
    tool.add(tmp_path / "run", "chosen", tmp_path / "research.jsonl")
    assert [line["name"] for line in read_json_lines(tmp_path / "research.jsonl")] == ["held-out"]
    (tmp_path / "run" / "other").mkdir()
    write_json(tmp_path / "run" / "other" / "summary.json", summary(**more, dataset="folder"))
    with raises(RunError, tmp_path / "run", "half-scale", "held-out"):
        tool.add(tmp_path / "run", "both", tmp_path / "research.jsonl")


def test_the_page_is_what_the_summaries_give(tmp_path):
    now = tool.PAGE.read_text(encoding="utf-8")
    assert tool.page(now) == now
    for name in tool.TABLES:
        lines = read_json_lines(tool.STORED)
        lines.remove(next(line for line in lines if line["name"] == name))
        write_json_lines(tmp_path / "research.jsonl", lines)
        assert tool.page(now, tmp_path / "research.jsonl") != now, name
