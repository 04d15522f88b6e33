"""The benchmark of several processes: it measures both ways, and fails below its mark."""

import contextlib
import json
import sys

import pytest


@pytest.mark.slow
def test_the_benchmark_measures_both_ways(distributed):
    found = distributed.measure(distributed.arguments("--width=4 --batch=8 --images=16 --repeats=1".split()))
    rates = found["images_per_second"]
    assert all(rate > 0 for rate in rates.values())
    assert found["ratio"] == pytest.approx(rates["together"] / rates["alone"])
    assert found["wanted"] == 1.5


@pytest.mark.parametrize("ratio", [1.49, 1.5])
def test_the_check_of_the_benchmark_fails_below_its_mark(distributed, monkeypatch, tmp_path, capsys, ratio):
    monkeypatch.setattr(sys, "argv", ["distributed.py", "--check", "--out", str(tmp_path / "found.json")])
    monkeypatch.setattr(distributed, "measure", lambda o: {"ratio": ratio, "wanted": 1.5})
    with contextlib.nullcontext() if ratio >= 1.5 else pytest.raises(SystemExit, match="1.49 .*1.50"):
        distributed.main()
    assert json.loads((tmp_path / "found.json").read_text())["ratio"] == ratio
