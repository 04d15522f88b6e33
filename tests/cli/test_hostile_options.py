"""Values of options that no machine can serve: one line, never a traceback."""

import pytest

from efcil.cli import _too_much
from efcil.config import Options
from efcil.errors import ConfigError
from efcil.product import IncrementalClassifier
from efcil.training.schedule import Schedule

SMALL = {"method": "dpcr", "backbone": "resnet10", "width": 2, "size": 8, "progress": False, "device": "cpu"}
HUGE = (2**31, 2**40, 2**63, 2**64, 10**30)


@pytest.mark.parametrize("name", ["seed", "size", "width", "epochs", "budget", "val_fraction"])
def test_a_new_model_of_impossible_values(name):
    values = [-1, -(2**63), *((float("inf"), float("nan")) if name in ("budget", "val_fraction") else ())]
    values += {"seed": HUGE[2:], "size": HUGE, "width": HUGE, "val_fraction": (0.6, 1e300)}.get(name, ())
    for value in values:
        with pytest.raises(ConfigError) as caught:
            IncrementalClassifier(**{**SMALL, name: value})
        assert "\n" not in str(caught.value)
        assert name.partition("_")[0] in str(caught.value)


def test_a_width_that_no_memory_holds():
    with pytest.raises(ConfigError, match="GiB of weights"):
        IncrementalClassifier(**{**SMALL, "width": 40_000})


def test_a_learning_rate_has_an_end():
    for value in (1e300, 1e7, float("inf"), 0, -1):
        with pytest.raises(ValueError, match="lr"):
            Schedule(epochs=1, lr=value, milestones=(), weight_decay=0.0)
    assert issubclass(Schedule, Options)


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (MemoryError(), "memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1"), "memory"),
        (OverflowError("int too large to convert"), "out of range"),
    ],
)
def test_what_goes_beyond_memory_or_numbers_is_one_line(error, word):
    assert word in _too_much(error)
    assert _too_much(RuntimeError("a fault of ours")) is None
