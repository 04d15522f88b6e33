"""The benchmarks at a tiny size: what they measure is there, positive and of the right thing. No time is judged."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import augment, core, gpu
from efcil.linalg import normalise_columns, ridge_weight, task_shift
from efcil.stats import ClassStats

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


def test_augment_measures_both_ways():
    threads = torch.get_num_threads()
    result = augment.measure(40, "cpu", 1)
    assert set(result) == {"images_per_second", "pillow_images_per_second", "ratio"}
    assert positive(result)
    assert result["ratio"] == pytest.approx(result["images_per_second"] / result["pillow_images_per_second"])
    assert torch.get_num_threads() == threads


def test_the_pillow_chain_keeps_the_shape_and_changes_the_image():
    import random

    import numpy as np

    pixels = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
    images = [augment.pillow_chain(pixels, random.Random(seed)) for seed in range(4)]
    assert all(image.shape == (32, 32, 3) and image.dtype == np.uint8 for image in images)
    assert sum(not np.array_equal(image, pixels) for image in images) >= 3


def test_core_measures_the_update():
    result = core.measure(classes=4, dim=16, repeats=1)
    keys = ["naive_seconds", "positive_seconds", "numerical_seconds", "tenfold_seconds", "tenfold_growth"]
    keys += ["positive_speedup", "numerical_speedup", "condition"]
    assert positive({key: result[key] for key in keys})
    assert result["positive_speedup"] == pytest.approx(result["naive_seconds"] / result["positive_seconds"])
    for rule in ("positive", "numerical"):
        assert 0 <= result[f"{rule}_deviation"] <= core.MAX_DEVIATION
    assert (result["classes"], result["dim"], result["device"]) == (4, 16, "cpu")


def test_core_says_which_bound_is_missed():
    good = {"positive_speedup": 9.0, "numerical_speedup": 2.0, "tenfold_growth": 10.0}
    good |= {"positive_deviation": 1e-12, "numerical_deviation": 1e-9}
    assert core.missed(good) == []
    for key, bad in (("positive_speedup", 0.1), ("tenfold_growth", 99.0), ("numerical_deviation", 1.0)):
        (said,) = core.missed({**good, key: bad})
        assert said.startswith(f"{key} is ")


@pytest.mark.parametrize("dim", [8, 24])
def test_naive_and_ours_are_the_same_update(dim):
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
    unmoved = task.stats.joined(ClassStats.from_features(task.new, task.labels))
    still = normalise_columns(ridge_weight(unmoved, core.RIDGE))
    assert float((still - weight.double()).abs().max() / still.abs().max()) > 2e-2
    assert not torch.allclose(task_shift(task.old, task.new), torch.eye(dim, dtype=torch.float64), atol=0.05)


def test_operations_of_resnet18_are_those_counted_by_hand():
    flops = gpu.flops_per_image(gpu.Size())
    assert flops["forward"] == RESNET18_FORWARD == 1_110_835_200
    # Backward: a product for the weights and one for the input of every layer, but none for the images.
    assert flops["training"] == 3 * RESNET18_FORWARD - RESNET18_STEM


def test_every_variant_takes_the_products_own_step():
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


def test_a_timed_step_trains(machine):
    lwf = gpu.LwF(gpu.options_of(gpu.TINY), 3, machine, 0)
    task = gpu.stream(gpu.TINY, None)[0]
    lwf.begin(task)
    before = lwf.backbone.conv1.weight.clone()
    images, labels = (machine.tensor(array[: gpu.TINY.batch]) for array in (task.images, task.labels))
    gpu.one_step(lwf, images, labels)()
    assert not torch.equal(before, lwf.backbone.conv1.weight)


def test_the_whole_command_writes_every_timing(tmp_path, capsys):
    out = tmp_path / "deep" / "gpu.json"
    arguments = ["--device", "cpu", "--tiny", "--steps", "1", "--out", str(out)]
    assert gpu.main([*arguments, "--only", "epoch", "augment", "update", "startup"]) == 0
    result = json.loads(out.read_text())
    assert result["torch"] == torch.__version__
    assert {"device", "commit", "threads", "epoch", "augment", "update", "startup"} <= set(result)
    assert "step" not in result
    for name in ("no_teacher", "teacher"):
        assert result["epoch"][name]["images"] == 12
        assert positive(result["epoch"][name])
    assert positive(result["augment"])
    assert [row["classes"] for row in result["update"]] == [14, 18]
    assert positive([{k: v for k, v in row.items() if "deviation" not in k} for row in result["update"]])
    assert max(row[f"{rule}_deviation"] for row in result["update"] for rule in ("positive", "numerical")) < 1e-8
    assert positive(result["startup"])
    for state in ("cold", "warm"):
        one = result["startup"][state]
        assert one["process_seconds"] > one["first_step_seconds"]  # a process imports as well
    said = capsys.readouterr().out
    for words in ("epoch of 12 images, teacher", "cifar-autoaugment", "14 classes, numerical", "compile cache warm"):
        assert words in said


def test_steps_are_printed_as_a_table():
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
def test_no_cuda_is_said(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "there is no CUDA device" in capsys.readouterr().err
