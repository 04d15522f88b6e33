"""Check what a message names, whatever its words.

A test of an error asks for its type and for the values that whoever reads it needs: the argument, the value got, the
file, the option or command that helps. Wording is pinned once per family of errors, with `pytest.raises(match=...)`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def assert_names(text: str, *values: object) -> None:
    """Check that each value occurs in the text, and not only inside a longer word or number."""
    absent = [value for value in map(str, values) if not re.search(_bounded(value), text)]
    assert not absent, f"{text!r} does not name {absent}"


@contextmanager
def raises(error: type[BaseException], *values: object) -> Iterator[Any]:
    """Expect an error whose message is one line and names each of the values."""
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    assert "\n" not in message
    assert_names(message, *values)


def _bounded(value: str) -> str:
    before = r"(?<!\w)(?<!\d[.,])" if re.match(r"\w", value) else ""
    after = r"(?!\w|[.,]\d)" if re.search(r"\w\Z", value) else ""
    return before + re.escape(value) + after
