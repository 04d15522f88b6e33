"""The helper that checks what messages name."""

import pytest

from messages import assert_names, raises


@pytest.mark.parametrize(
    "text", ["--tasks 17: no", "--tasks 7.5: no", "--tasks 1,7: no", "--task: 7", "--tasks: seven"]
)
def test_a_value_is_found_whole_or_not_at_all(text):
    assert_names("--tasks 7: no, (7, 1) or m/7.", "--tasks", 7, (7, 1))
    with pytest.raises(AssertionError, match="does not name"):
        assert_names(text, "--tasks", 7)


def test_a_message_is_one_line():
    with raises(ValueError, "ridge=3"):
        raise ValueError("ridge=3")
    with pytest.raises(AssertionError), raises(ValueError):
        raise ValueError("ridge=3\nand more")
