"""The ways to take a training step: each is measured, and those of a GPU compute the same."""

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from efcil.accel.streams import thread_stream


def test_the_benchmark_compares_every_way(steps, tmp_path, capsys):
    out = tmp_path / "deep" / "steps.json"
    assert steps.main(["--device", "cpu", "--tiny", "--steps", "1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["raw"]["ways"]
    assert [row["way"] for row in rows[:3]] == ["compiled", "in order", "branches"]
    assert [row["teacher"] for row in rows] == ["none", "none", "none", "ahead", "beside"]
    for row in rows:
        assert row["ms"] > 0
        assert row["again"] == row["race"] == row["chance"] == 0
        assert row["deviation"] < 1
    assert rows[1]["deviation"] == rows[2]["deviation"] > 0
    assert "deviation" in capsys.readouterr().out


@pytest.mark.cuda
def test_a_captured_step_with_branches_is_the_step(steps, gpu):
    ways = steps.Ways(replace(gpu.TINY, width=16, side=16), "cuda")
    ways.begin("none")
    for way in ("compiled", "in order", "branches"):
        row = ways.measured(way, 1)
        assert row["race"] < 0.05 + 2 * row["chance"], row


@pytest.mark.cuda
def test_steps_of_concurrent_runs_are_those_of_each_alone(steps, gpu):
    """To the bit: what the graph of one run writes, a library's workspace too, none of another reads."""
    size, alone, meet = gpu.Size(classes=1000, per_class=2), threading.Lock(), threading.Barrier(3, timeout=200)

    def ends(ways, call, kept, guard):
        ways.restore(kept, ways.start)
        torch.cuda.synchronize()
        meet.wait()
        with guard:
            for _ in range(30):
                call()
            torch.cuda.synchronize()
        meet.wait()
        return ways.weights()

    def one(place):
        with torch.cuda.stream(thread_stream(torch.device("cuda"), "run")):
            ways = steps.Ways(size, "cuda")
            ways.begin("none")
            ways.begin("ahead")  # a hundred old classes: products with the head are split
            ways.images = ways.images.roll(place, 0)  # each learns something else
            with ways.recorded("use_fused_resnet") as (_, call, kept):
                meet.wait()  # nobody else records any more
                return ends(ways, call, kept, alone), ends(ways, call, kept, contextlib.nullcontext())

    with ThreadPoolExecutor(3) as pool:
        for in_turn, together in pool.map(one, range(3)):
            assert all(torch.equal(a, b) for a, b in zip(in_turn, together, strict=True))
