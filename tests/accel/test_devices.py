"""Devices on which not everything works are refused before anything is computed."""

import time

import pytest

from efcil.accel import backend as backends
from efcil.accel.backend import Backend
from efcil.accel.bf16 import _convolve, bf16_problem
from efcil.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "words"), [("mps", "cpu"), ("mps:0", "--device cpu"), ("meta", "cpu"), ("moon", "cpu")]
)
def test_a_device_that_cannot_do_it_is_one_line(device, words):
    with pytest.raises(ConfigError, match=f"--device {device}.*{words}") as caught:
        Backend.choose(device)
    assert "\n" not in str(caught.value)


def test_the_cpu_can():
    assert Backend.choose("cpu").device.type == "cpu"


@pytest.mark.parametrize(("problem", "notes"), [(None, 0), ("a convolution takes 4.0 times as long", 1)])
def test_bf16_on_a_cpu_is_warned_about_where_it_is_wrong_or_slow(monkeypatch, problem, notes):
    heard = []
    monkeypatch.setattr(backends, "bf16_problem", lambda: problem)
    assert Backend.choose("cpu", "bf16", note=heard.append).precision == "bf16"
    assert len(heard) == notes
    assert all("--precision bf16" in text and problem in text for text in heard)


def test_the_trial_of_bf16_looks_at_results_and_time():
    def slow(images, weight):
        time.sleep(0.02 if images.dtype.itemsize == 2 else 0)
        return _convolve(images, weight)

    assert "times as long" in bf16_problem(slow)
    assert "wrong" in bf16_problem(lambda images, weight: _convolve(images, weight) * float("nan"))
    began = time.perf_counter()
    bf16_problem.__wrapped__()
    assert time.perf_counter() - began < 1
