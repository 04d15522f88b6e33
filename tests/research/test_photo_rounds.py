"""The table of photographs is what was measured, and calibration errors are what they are called."""

import numpy as np
import pytest

from research import photo_rounds as tool


def test_the_page_is_what_the_stored_results_give():
    text = tool.PAGE.read_text(encoding="utf-8")
    assert tool.page(text) == text


def test_calibration_error_is_the_gap_between_confidence_and_accuracy():
    sure = np.array([[0.9, 0.1]] * 10 + [[0.4, 0.6]] * 10)
    truth = np.array(["a"] * 9 + ["b"] + ["b"] * 8 + ["a"] * 2)
    assert tool.calibration_error(sure, np.array(["a", "b"]), truth) == pytest.approx(0.5 * 0.0 + 0.5 * 0.2)
