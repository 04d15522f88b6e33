"""Devices on which not everything works are refused before anything is computed."""

import pytest

from efcil.accel.backend import Backend
from efcil.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "words"), [("mps", "float64"), ("mps:0", "--device cpu"), ("meta", "cpu"), ("moon", "cpu")]
)
def test_a_device_that_cannot_do_it_is_one_line(device, words):
    with pytest.raises(ConfigError, match=f"--device {device}.*{words}") as caught:
        Backend.choose(device)
    assert "\n" not in str(caught.value)


def test_the_cpu_can():
    assert Backend.choose("cpu").device.type == "cpu"
