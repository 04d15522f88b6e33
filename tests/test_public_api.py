"""Public names: each has a docstring with an example, which runs as a doctest with the other tests."""

import doctest
import inspect

import pytest

import efcil

NAMES = [name for name in efcil.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example(name):
    documented = inspect.getdoc(getattr(efcil, name)) or ""
    examples = doctest.DocTestParser().get_examples(documented)
    assert any(name in example.source for example in examples), f"efcil.{name} has no example that uses it"


def test_lazy_names_are_the_public_ones():
    assert sorted([*efcil._MODULES, "__version__"]) == sorted(efcil.__all__)
