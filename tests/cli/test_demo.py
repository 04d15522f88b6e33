"""The first command a newcomer types."""

import json
import os
import resource
import subprocess
import sys
import time

import pytest


def clocks():
    """What the clock shows, and the seconds of computing of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic(), used.ru_utime + used.ru_stime


def seconds_since(began):
    """By the clock; but where others are at work on the same cores, no more than was computed, by both threads."""
    return min(now - then for now, then in zip(clocks(), began, strict=True))


@pytest.mark.alone
def test_demo_shows_dpcr_above_its_baselines(tmp_path):
    began = clocks()
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "efcil", "demo", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    seconds = seconds_since(began)
    assert done.returncode == 0, done.stderr
    final = {}
    for method in ("dpcr", "dp-ncm", "lwf-ncm", "lwf"):
        summary = json.loads((tmp_path / "demo" / method / "summary.json").read_text())
        assert (summary["tasks"], summary["task_sizes"]) == (5, [2] * 5)
        final[method] = summary["A_f"]
    assert final["dpcr"] > final["lwf"]
    assert final["dpcr"] > final["lwf-ncm"], "on held-out images 6 points and more, over seeds and orders"
    assert "report.html" in done.stdout
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000
    assert seconds < 180


@pytest.mark.alone
def test_glyphs_preset_learns(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "efcil", "compare", "dpcr,lwf-ncm,lwf", "glyphs", "--tasks", "5", "--quiet"]
    began = clocks()
    subprocess.run([*command, "--out", str(tmp_path / "g")], check=True, env=environment)
    assert seconds_since(began) < 240, "about a minute on two idle cores"
    final = {m: json.loads((tmp_path / "g" / m / "summary.json").read_text())["A_f"] for m in ("dpcr", "lwf")}
    assert final["dpcr"] > 30, "chance is 5"
    assert final["dpcr"] > final["lwf"]
