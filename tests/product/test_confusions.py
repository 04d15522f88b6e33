"""Estimated confusions against matrices worked out by hand."""

import pytest
import torch

from efcil.product.confusions import CLASSES, confusion_matrix, most_confused
from efcil.product.state import ClassRecord


def records(images):
    return [ClassRecord(chr(97 + place), count, "2026-11-15", None) for place, count in enumerate(images)]


SHARES = torch.tensor(
    [
        [0.97, 0.0, 0.02, 0.01],
        [0.004, 0.896, 0.0, 0.1],
        [0.3, 0.0, 0.7, 0.0],
        [0.01, 0.04, 0.0, 0.95],
    ],
    dtype=torch.float64,
)


def test_the_most_confused_come_first():
    assert most_confused(records([10] * 4), SHARES) == [
        ["c", "a", 30.0],
        ["b", "d", 10.0],
        ["d", "b", 4.0],
        ["a", "c", 2.0],
        ["a", "d", 1.0],
        ["d", "a", 1.0],
    ]
    found = confusion_matrix(records([10] * 4), SHARES)
    assert found == {
        "classes": ["a", "c", "b", "d"],
        "percent": [[97.0, 2.0, 0.0, 1.0], [30.0, 70.0, 0.0, 0.0], [0.4, 0.0, 89.6, 10.0], [1.0, 0.0, 4.0, 95.0]],
        "estimated": 4,
        "unknown": None,
    }


def test_classes_of_few_images_have_no_estimate():
    counts = records([10, 10, 9, 10])
    assert [pair[0] for pair in most_confused(counts, SHARES)] == ["b", "d", "a", "a", "d"]
    found = confusion_matrix(counts, SHARES)
    assert (found["classes"], found["estimated"]) == (["b", "d", "a"], 3)


@pytest.mark.parametrize(
    ("images", "shares", "why"),
    [
        ([], None, "few classes"),
        ([80], None, "few classes"),
        ([80, 9, 3], SHARES[:3, :3], "few images"),
        ([80, 80], None, "not estimated"),
    ],
)
def test_why_there_is_no_matrix(images, shares, why):
    assert confusion_matrix(records(images), shares) == {
        "classes": [],
        "percent": [],
        "estimated": 0,
        "unknown": why,
    }


def test_of_many_classes_those_that_are_confused_most():
    k = 300
    shares = torch.eye(k, dtype=torch.float64)
    wanted = [(7, 290), (290, 12), (50, 51)]
    for place, (one, other) in enumerate(wanted):
        shares[one, one], shares[one, other] = 0.6 + place / 10, 0.4 - place / 10
    found = confusion_matrix(records([20] * k), shares)
    assert len(found["classes"]) == len(found["percent"]) == CLASSES
    assert found["classes"][:5] == [chr(97 + place) for place in (7, 290, 12, 50, 51)]
    assert found["estimated"] == k
    every = torch.full((k, k), 1 / k)  # all alike: any of them, and no more
    assert len(confusion_matrix(records([20] * k), every)["classes"]) == CLASSES
