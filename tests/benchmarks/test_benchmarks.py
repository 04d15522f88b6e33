"""The benchmarks at a tiny size: what they measure is there, positive and of the right thing. No time is judged."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
import torch

from efcil.core.class_stats import ClassStats
from efcil.core.projection import task_shift
from efcil.core.ridge import normalize_columns, ridge_weight

RESNET18_FORWARD = 2 * (  # multiply-adds at 32 x 32, cifar stem, counted by hand: in * out * kernel * positions
    3 * 64 * 9 * 32**2
    + 4 * (64 * 64 * 9 * 32**2)
    + sum(
        (narrow * 2 * narrow * 9 + 3 * (2 * narrow) ** 2 * 9 + narrow * 2 * narrow) * side**2
        for narrow, side in ((64, 16), (128, 8), (256, 4))
    )
)
RESNET18_STEM = 2 * 3 * 64 * 9 * 32**2


def positive(value):
    """Whether every number in a result is finite and above zero, spreads at or above it."""
    if isinstance(value, dict):
        return all(v >= 0 if k == "spread" else positive(v) for k, v in value.items())
    if isinstance(value, list):
        return bool(value) and all(map(positive, value))
    return not isinstance(value, float) or (math.isfinite(value) and value > 0)


def test_augment_measures_both_ways(augment):
    threads = torch.get_num_threads()
    result = augment.measure(40, "cpu", 1)
    assert set(result) == {"images_per_second", "pillow_images_per_second", "ratio"}
    assert positive(result)
    assert result["ratio"] == pytest.approx(result["images_per_second"] / result["pillow_images_per_second"])
    assert torch.get_num_threads() == threads


def test_the_pillow_chain_keeps_the_shape_and_changes_the_image(augment):
    import random

    import numpy as np

    pixels = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
    images = [augment.pillow_chain(pixels, random.Random(seed)) for seed in range(4)]
    assert all(image.shape == (32, 32, 3) and image.dtype == np.uint8 for image in images)
    assert sum(not np.array_equal(image, pixels) for image in images) >= 3


def test_core_measures_the_update(core):
    result = core.measure(classes=4, dim=16, repeats=1)
    keys = ["naive_seconds", "positive_seconds", "numerical_seconds", "tenfold_seconds", "tenfold_growth"]
    keys += ["positive_speedup", "numerical_speedup", "condition"]
    assert positive({key: result[key] for key in keys})
    assert result["positive_speedup"] == pytest.approx(result["naive_seconds"] / result["positive_seconds"])
    for rule in ("positive", "numerical"):
        assert 0 <= result[f"{rule}_deviation"] <= core.MAX_DEVIATION
    assert (result["classes"], result["dim"], result["device"]) == (4, 16, "cpu")


def test_core_says_which_bound_is_missed(core):
    good = {"positive_speedup": 9.0, "numerical_speedup": 2.0, "tenfold_growth": 10.0}
    good |= {"positive_deviation": 1e-12, "numerical_deviation": 1e-9}
    assert core.missed(good) == []
    for key, bad in (("positive_speedup", 0.1), ("tenfold_growth", 99.0), ("numerical_deviation", 1.0)):
        (said,) = core.missed({**good, key: bad})
        assert said.startswith(f"{key} is ")


@pytest.mark.parametrize("dim", [8, 24])
def test_naive_and_ours_are_the_same_update(core, dim):
    task = core.problem(5, dim)
    grams, means, weight = core.naive_update(task)()
    stats, ours = core.update(task, "positive")
    assert sorted(grams) == stats.classes.tolist()

    def close(mine, theirs):  # the naive one computes in float32, and inverts
        assert float((mine - theirs.double()).abs().max() / mine.abs().max()) < 2e-3

    close(stats.gram, torch.stack([grams[c] for c in sorted(grams)]))
    close(stats.mean, torch.stack([means[c] for c in sorted(means)]))
    close(ours, weight)
    # A test that sees no difference between different updates would be worth nothing.
    unmoved = task.stats.merge(ClassStats.from_features(task.new, task.labels))
    still = normalize_columns(ridge_weight(unmoved, core.RIDGE))
    assert float((still - weight.double()).abs().max() / still.abs().max()) > 2e-2
    assert not torch.allclose(task_shift(task.old, task.new), torch.eye(dim, dtype=torch.float64), atol=0.05)


def test_operations_of_resnet18_are_those_counted_by_hand(gpu):
    flops = gpu.flops_per_image(gpu.Size())
    assert flops["forward"] == RESNET18_FORWARD == 1_110_835_200
    # Backward: a product for the weights and one for the input of every layer, but none for the images.
    assert flops["training"] == 3 * RESNET18_FORWARD - RESNET18_STEM


def test_every_variant_takes_the_products_own_step(gpu):
    result = gpu.measure_steps(gpu.TINY, "cpu", 1)
    rows = result["rows"]
    left_out = [row["variant"] for row in rows if "left_out" in row]
    assert left_out == ["bf16 captured", "bf16 compiled", "bf16 compiled + captured"]
    measured = [row for row in rows if "left_out" not in row]
    assert [(row["variant"], row["teacher"]) for row in measured] == [
        (name, teacher) for name in ("fp32 eager", "bf16 eager") for teacher in (False, True)
    ]
    assert positive([{k: v for k, v in row.items() if k != "teacher"} for row in measured])
    assert positive(result["matmul"])
    flops = result["flops_per_image"]
    assert measured[0]["flops"] == gpu.TINY.batch * flops["training"]
    assert measured[1]["flops"] == gpu.TINY.batch * (flops["training"] + flops["forward"])
    for row in measured:
        assert row["ceiling_seconds"] == pytest.approx(row["flops"] / result["matmul"]["flops_per_second"])
        assert row["share_of_ceiling"] == pytest.approx(row["ceiling_seconds"] / row["seconds"]["median"])
        assert len(row["seconds"]["raw"]) == gpu.TINY.repeats


def test_a_timed_step_trains(gpu, backend):
    lwf = gpu.LwF(gpu.options_of(gpu.TINY), 3, backend, 0)
    task = gpu.stream(gpu.TINY, None)[0]
    lwf.before_task(task)
    before = lwf.backbone.conv1.weight.clone()
    images, labels = (backend.tensor(array[: gpu.TINY.batch]) for array in (task.images, task.labels))
    with gpu.one_step(lwf, images, labels) as call:
        call()
    assert not torch.equal(before, lwf.backbone.conv1.weight)


def test_the_whole_command_writes_every_timing(gpu, tmp_path, capsys):
    out = tmp_path / "deep" / "gpu.json"
    arguments = ["--device", "cpu", "--tiny", "--steps", "1", "--out", str(out)]
    assert gpu.main([*arguments, "--only", "epoch", "together", "augment", "update", "startup"]) == 0
    result = json.loads(out.read_text())
    assert result["torch"] == torch.__version__
    assert {"device", "commit", "threads", "epoch", "together", "augment", "update", "startup"} <= set(result)
    both = [(False, runs) for runs in (1, 2, 3)] + [(True, runs) for runs in (1, 2, 3)]
    assert [(row["teacher"], row["runs"]) for row in result["together"]] == both
    for row in result["together"]:  # 12 images in batches of 8
        assert row["steps"] == 2 * gpu.TINY.repeats * row["runs"]
        assert row["step_seconds"] == pytest.approx(row["seconds"] / row["steps"])
        assert row["seconds"] > 0
    assert "step" not in result
    for name in ("no_teacher", "teacher"):
        assert result["epoch"][name]["images"] == 12
        assert positive(result["epoch"][name])
        epoch = result["epoch"][name]
        assert epoch["images_per_second"] == pytest.approx(12 / epoch["seconds"]["median"])
        resident = gpu.TINY.batch / epoch["step_seconds"]["median"]
        assert epoch["share"] == pytest.approx(epoch["images_per_second"] / resident)
    assert positive(result["augment"])
    assert [row["classes"] for row in result["update"]] == [14, 18]
    assert positive([{k: v for k, v in row.items() if "deviation" not in k} for row in result["update"]])
    assert max(row[f"{rule}_deviation"] for row in result["update"] for rule in ("positive", "numerical")) < 1e-8
    assert positive(result["startup"])
    for state in ("cold", "warm"):
        one = result["startup"][state]
        assert one["process_seconds"] > one["first_step_seconds"]  # a process imports as well
    said = capsys.readouterr().out
    for words in (
        "epoch of 12 images, teacher",
        "3 at once, with teacher:",
        "cifar-autoaugment",
        "14 classes, numerical",
        "compile cache warm",
    ):
        assert words in said


def test_steps_are_printed_as_a_table(gpu):
    raw = {"median": 0.002, "spread": 0.0005, "raw": [0.002]}
    row = {
        "variant": "fp32 eager",
        "teacher": True,
        "seconds": raw,
        "ceiling_seconds": 0.0005,
        "share_of_ceiling": 0.25,
    }
    step = {"batch": 128, "matmul": {"flops_per_second": 5e14}, "flops_per_image": {"forward": 1e9, "training": 3e9}}
    head = {"device": "x", "torch": "y", "commit": "z", "images": "synthetic"}
    text = "\n".join(gpu.lines({**head, "step": {**step, "rows": [row, {"variant": "b", "left_out": "needs CUDA"}]}}))
    assert "500 TFLOP/s" in text
    assert "2.000 (spread 0.500)" in text
    assert "25.0%" in text
    assert "needs CUDA" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_is_said(gpu, capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "CUDA is not available" in capsys.readouterr().err


@pytest.mark.slow
def test_serve_measures_loops_clients_and_a_teaching(serve, tmp_path, monkeypatch, capsys):
    """One short round with a real service; a bound that nothing can meet is missed."""
    pytest.importorskip("uvicorn")
    monkeypatch.setenv("EFCIL_COMMIT", "abc")
    out = tmp_path / "deep" / "serve.json"
    small = ["--seconds", "1", "--rounds", "1", "--clients", "3", "--threads", "1", "--backbone", "resnet10"]
    assert serve.main([*small, "--check", "1e9", "--machine", "a core", "--out", str(out)]) == 1
    stored = json.loads(out.read_text())
    assert stored["command"] == f"python benchmarks/serve.py {' '.join(small)} --check 1e9"
    assert (stored["commit"], stored["raw"]["device"]) == ("abc", "a core")
    found = stored["raw"]["serve"]
    assert (found["clients"], found["threads"], found["backbone"], found["errors"]) == (3, 1, "resnet10", 0)
    median, (only,) = found["median"], found["rounds"]
    assert median == only
    assert positive({key: median[key] for key in median if key != "errors"})
    assert found["ratio"] == pytest.approx(median["per_second"] / median["single"])
    assert found["ratio_to_batches"] == pytest.approx(median["per_second"] / median["batch"])
    assert found["meanwhile"]["job"] == "done"
    assert found["meanwhile"]["teaching"]["per_second"] > 0
    assert "ratio" in capsys.readouterr().out


def test_a_soak_reads_the_memory_and_fails_when_it_grows(serve, tmp_path, monkeypatch, capsys):
    sizes, enough = [100.0, 100.0, 100.0, 100.0, 107.0, 107.0], threading.Event()

    class Still:
        port = 0
        read = 0

        def __init__(self, *_):
            pass

        def metrics(self):
            size = sizes[min(self.read, 5)]
            self.read += 1
            if self.read == len(sizes):
                enough.set()
            elif self.read > len(sizes):  # the end of the soak comes late
                time.sleep(1)
            return {"process_resident_memory_bytes": size * 2**20}

        def close(self):
            pass

    answered = {"per_second": 5.0, "errors": 0, "wall": 1.0, "p50_ms": 1.0, "p90_ms": 2.0, "p99_ms": 3.0}

    def asked(*_):
        assert enough.wait(120)
        return answered

    stubs = {"Service": Still, "asked": asked, "make_model": lambda *_: None, "pictures": lambda _: {"a": [b"x"]}}
    for name, stub in stubs.items():
        monkeypatch.setattr(serve, name, stub)
    out = tmp_path / "soak.json"
    assert serve.main(["--soak", "0.6", "--clients", "2", "--threads", "1", "--out", str(out)]) == 1
    found = json.loads(out.read_text())["raw"]["soak"]
    assert found["growth"] == pytest.approx(7.0)
    assert found["mib"][:5] == [100, 100, 100, 100, 107]
    assert "+7.00 %" in capsys.readouterr().out
    assert serve.growth([300, 100, 100, 100, 100, 102, 102]) == 2.0, "the first sixth does not count"


def test_records_name_nothing_of_the_machine(record):
    given = ["/srv/pictures/birds", "--classes", "20", "--out=/tmp/x.json", "--about", "birds", "--machine", "mine"]
    assert list(record._public(given)) == ["birds", "--classes", "20"]


def scale_row(**changed):
    row = {"classes": 1000, "dim": 512, "images": 500, "form": "gram", "stored_bytes": 10**9, "peak_ratio": 1.1}
    return row | {"of_papers": 0.502} | changed


def test_scale_measures_an_update_and_its_memory(scale):
    made = {}

    def run(size):
        made[size] = scale.measure_one(size)
        return made[size]

    threads = torch.get_num_threads()
    found = scale.measure(tiny=True, threads=threads, run=run)
    assert all(size.threads == threads for size in made)
    assert [row["classes"] for row in found["classes"]] == [10, 100, 10]
    for row in found["classes"] + found["dimensions"]:
        own = row["dim"] * (row["dim"] + 1) // 2 if row["form"] == "gram" else row["images"] * row["dim"]
        assert row["numel"] == row["classes"] * (own + row["dim"])
        assert row["stored_bytes"] == 8 * row["numel"]
        assert row["of_papers"] == pytest.approx(row["numel"] / row["classes"] / (row["dim"] ** 2 + row["dim"]))
        assert row["seconds"] > 0
        assert row["peak_bytes"] >= 0.9 * (row["classes"] - row["classes"] // 10) / row["classes"] * row["stored_bytes"]
    assert [row["class_moves"] for row in found["tasks"]] == [200, 450]  # 20 (1 + 2 + 3 + 4), 10 (1 + ... + 9)
    assert all(0 < row["left_out"] <= row["error"] for row in found["compression"])
    assert found["factor_deviation"] <= scale.MAX_DEVIATION
    assert {line.partition(" ")[0] for line in scale.missed(found)} <= {"tenfold_growth"}, "times are not judged here"


def test_scale_says_which_bound_is_missed(scale):
    good = {"tenfold_growth": 10.0, "factor_deviation": 1e-12, "dimensions": [], "classes": [scale_row()]}
    good["compression"] = [{"error": 0.1, "left_out": 0.09}]
    assert scale.missed(good) == []
    few = {"form": "factors", "images": 50}
    for key, bad, said in (
        ("tenfold_growth", 12.5, "tenfold_growth is 12.50"),
        ("factor_deviation", float("nan"), "factor_deviation is nan"),
        ("compression", [{"error": 0.1, "left_out": 0.11}], "error 0.1 leaves out"),
        ("classes", [scale_row(peak_ratio=2.21)], "peak of 1000 classes, d = 512, gram is 2.21"),
        ("classes", [scale_row(of_papers=0.56)], "storage of 1000 classes, d = 512, gram is 0.560"),
        ("dimensions", [scale_row(of_papers=0.502, **few)], "storage of 1000 classes, d = 512, factors"),
    ):
        (line,) = scale.missed({**good, key: bad})
        assert line.startswith(said)
    assert scale.missed({**good, "classes": [scale_row(of_papers=0.1, **few)]}) == []


@pytest.mark.slow
def test_scale_runs_as_a_command_and_draws(scale, tmp_path):
    record_file, stem = tmp_path / "scale.json", tmp_path / "scale"
    assert scale.main(["--tiny", "--threads", "1", "--out", str(record_file), "--figure", str(stem)]) == 0
    stored = json.loads(record_file.read_text())
    assert stored["command"] == f"python benchmarks/scale.py --tiny --threads 1 --figure {stem.name}"
    assert len(stored["raw"]["scale"]["classes"]) == 3
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in stem.with_suffix(".svg").read_bytes()


@pytest.mark.slow
def test_a_thousand_classes_peak_at_two_copies_and_a_block(scale):
    """In a process of its own, at a size at which the matrices of the solution no longer count: 134 MB of Grams."""
    row = scale.in_own_process(scale.Size(1000, 180, 40, threads=1, repeats=1))
    assert row["stored_bytes"] == 8 * 1000 * (180 * 181 // 2 + 180)
    assert row["peak_ratio"] <= scale.MAX_PEAK


ROOT = Path(__file__).resolve().parents[2]


def gpu_check(*arguments):
    """Run benchmarks/gpu_check.py in a process of its own."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture
def old_tree(tmp_path):
    """This tree as `git archive` writes it."""
    path = tmp_path / "old.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "0123abc"}) as archive:
        for name in ("src", "benchmarks"):
            archive.add(ROOT / name, name, filter=lambda entry: None if "__pycache__" in entry.name else entry)
    return path


@pytest.mark.slow
def test_gpu_check_compares_two_trees(tmp_path, old_tree):
    out = tmp_path / "deep" / "check.json"
    words = ["--tiny", "--device", "cpu", "--old", old_tree, "--new-commit", "new", "--out", out, "--rounds", 1]
    done = gpu_check(*words, "--only", "run", "step", "--limit", 1000)
    assert done.returncode == 0, done.stderr
    done = gpu_check(*words, "--only", "tests", "orders", "compare", "--limit", 1000)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert (found["old"]["commit"], found["new"]["commit"]) == ("0123abc", "new")
    assert found["old"]["digest"] == found["new"]["digest"]
    sections = found["sections"]
    assert set(sections) == {"tests", "run", "step", "orders", "compare"}
    for section in sections.values():
        assert "failed_to_measure" not in section
        assert section["machine"]["torch"] == torch.__version__
    assert sections["tests"]["failed"] == []
    assert sections["tests"]["passed"] + sections["tests"]["skipped"] > 10
    (old,), (new,) = sections["run"]["old"], sections["run"]["new"]
    assert (old["A_f"], old["A_avg"]) == (new["A_f"], new["A_avg"]), "it is the same code"
    assert min(old["seconds"], new["seconds"]) > 0
    for side in ("old", "new"):
        assert {row["teacher"] for row in sections["step"][side][0]["ways"]} == {"none", "ahead", "beside"}
        assert sections["compare"][side]["accuracy"] == sections["compare"]["old"]["accuracy"]
    processes, threads = sections["orders"]["processes"], sections["orders"]["threads"]
    assert sum(one["A_f"] for one in processes["accuracy"].values()) / 3 == pytest.approx(threads["accuracy"]["A_f"])
    assert [line["text"] for line in found["verdicts"] if "points" in line["text"] and not line["passed"]] == []
    said = "\n".join(line["text"] for line in found["verdicts"])
    for words in ("tests: ", "run: ", "run, A_avg: ", "step, teacher ahead: ", "efcil compare, A_f", "against threads"):
        assert words in said


def test_gpu_check_judges_by_its_bounds():
    script = ROOT / "benchmarks" / "gpu_check.py"
    done = subprocess.run([sys.executable, "-m", "doctest", "-v", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


def test_gpu_check_says_what_it_lacks(tmp_path, old_tree):
    usual = ["--tiny", "--device", "cpu", "--only", "step", "--out", tmp_path / "check.json"]
    (tmp_path / "empty").mkdir()
    done = gpu_check(*usual, "--old", tmp_path / "empty")
    assert done.returncode == 2
    assert "src/efcil is missing; git archive" in done.stderr
    done = gpu_check("--device", "cpu", "--old", old_tree, "--out", tmp_path / "check.json")
    assert "--data is missing" in done.stderr
    (tmp_path / "check.json").write_text(json.dumps({"old": {"commit": "another"}}))
    done = gpu_check(*usual, "--old", old_tree)
    assert "has measurements of other trees" in done.stderr
    done = gpu_check(*usual, "--old", old_tree, "--limit", 0, "--out", tmp_path / "late.json")
    assert done.returncode == 1, "what was not measured is not passed"
    assert "step: no time left" in json.loads((tmp_path / "late.json").read_text())["verdicts"][0]["text"]
