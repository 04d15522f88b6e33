"""Metrics against matrices worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from efcil.core.metrics import AccuracyMatrix, count_correct
from efcil.errors import DataError, RunError
from messages import raises


def three_tasks() -> AccuracyMatrix:
    """Classes split 3, 1, 2 with ten test images a class."""
    matrix = AccuracyMatrix([30, 10, 20])
    matrix.record(0, [27], [30])
    matrix.record(1, [15, 8], [30, 10])
    matrix.record(2, [18, 2, 14], [27, 9, 18])
    return matrix


def test_three_uneven_tasks_by_hand():
    matrix = three_tasks()
    # R: task 0: 27/30, 15/30, 18/30; task 1: 8/10, 2/10; task 2: 14/20
    expected = [[90, np.nan, np.nan], [50, 80, np.nan], [60, 20, 70]]
    np.testing.assert_array_equal(matrix.R, expected)
    assert matrix.A_t == [90.0, 57.5, 100 * 34 / 60]  # 27/30, 23/40, 34/60: by image
    assert matrix.A_t[1] != (50 + 80) / 2  # not the mean of the tasks
    assert matrix.A_f == 100 * 34 / 60
    assert matrix.A_avg == pytest.approx((90 + 57.5 + 56.6666666666667) / 3, abs=1e-12)
    assert matrix.A5_t == [100.0, 100.0, 90.0]  # 30/30, 40/40, 54/60
    assert [matrix.old(t) for t in range(3)] == [None, 50.0, 50.0]  # 15/30, (18+2)/40
    assert [matrix.new(t) for t in range(3)] == [90.0, 80.0, 70.0]
    # forgetting after task 2: task 0 had its best 90 (not the 50 just before), task 1 its 80: (30 + 60) / 2
    assert [matrix.forgetting(t) for t in range(3)] == [None, 40.0, 45.0]
    # bwt: (60 - 90 + 20 - 80) / 2
    assert [matrix.bwt(t) for t in range(3)] == [None, -40.0, -45.0]


def test_forgetting_and_bwt_part_where_a_task_first_improves():
    matrix = AccuracyMatrix([10, 10, 10])
    matrix.record(0, [5], [5])
    matrix.record(1, [9, 4], [10, 10])
    matrix.record(2, [7, 6, 1], [10, 10, 10])
    assert matrix.forgetting(1) == -40.0  # 50 before, 90 now
    assert matrix.bwt(1) == 40.0
    assert matrix.forgetting(2) == 0.0  # (90 - 70 + 40 - 60) / 2
    assert matrix.bwt(2) == 20.0  # (70 - 50 + 60 - 40) / 2


def test_fifty_and_ten_times_five():
    """50 classes, then ten tasks of 5; 10 images a class. Each later task costs task 0 ten hits of its 500."""
    total = [500] + [50] * 10
    matrix = AccuracyMatrix(total)
    for t in range(11):
        matrix.record(t, [400 - 10 * t] + [25] * t, total[: t + 1])
    assert matrix.A_t[0] == 80.0
    assert matrix.A_t[1] == 100 * 415 / 550
    assert matrix.A_f == 55.0  # (300 + 250) / 1000
    assert matrix.A_avg == pytest.approx(sum(100 * (400 + 15 * t) / (500 + 50 * t) for t in range(11)) / 11, abs=1e-12)
    assert matrix.old(10) == 100 * 525 / 950  # (300 + 9 * 25) of (500 + 450)
    assert matrix.new(10) == 50.0
    assert matrix.forgetting(10) == 2.0  # task 0: 80 - 60 = 20, the nine others 0: 20 / 10
    assert matrix.bwt(10) == -2.0


def test_two_hundred_classes_in_twenty_tasks():
    """From scores: each image's own class wins except in task 7, where the class before it does."""
    classes, tasks = 200, 20
    task_of_class = np.arange(classes) // 10
    labels = np.repeat(np.arange(classes), 3)
    scores = np.zeros((600, classes), dtype=np.float32)
    winner = np.where(task_of_class[labels] == 7, labels - 1, labels)
    scores[np.arange(600), winner] = 2.0
    scores[np.arange(600), labels] += 1.0
    matrix = AccuracyMatrix([30] * tasks)
    for t in range(tasks):
        seen = (t + 1) * 10
        keep = labels < seen
        correct, correct5, total = count_correct(scores[keep][:, :seen], labels[keep], task_of_class)
        assert total.tolist() == [30] * (t + 1)
        matrix.record(t, correct, correct5)
    assert matrix.R[19].tolist() == [100.0] * 7 + [0.0] + [100.0] * 12
    assert matrix.A_t[6] == 100.0
    assert matrix.A_t[7] == 87.5  # 210 of 240
    assert matrix.A_f == 95.0
    assert matrix.A5_t == [100.0] * 20
    assert matrix.forgetting(19) == 0.0


def test_first_task_only():
    matrix = AccuracyMatrix([7, 5])
    matrix.record(0, [3], [7])
    assert matrix.A_t == [100 * 3 / 7]
    assert matrix.A_f == matrix.A_avg == matrix.new(0) == 100 * 3 / 7
    assert matrix.old(0) is None
    assert matrix.forgetting(0) is None
    assert matrix.bwt(0) is None
    assert np.isnan(matrix.R[1]).all()
    assert matrix.R.shape == (2, 2)
    assert matrix.summary()["status"] == "partial"


def test_summary_has_null_above_the_diagonal_and_survives_json():
    summary = json.loads(json.dumps(three_tasks().summary(), allow_nan=False))
    assert summary == {
        "A_f": 100 * 34 / 60,
        "A_avg": pytest.approx((90 + 57.5 + 56.6666666666667) / 3, abs=1e-12),
        "A_t": [90.0, 57.5, 100 * 34 / 60],
        "A5_t": [100.0, 100.0, 90.0],
        "matrix": [[90.0, None, None], [50.0, 80.0, None], [60.0, 20.0, 70.0]],
        "old": [None, 50.0, 50.0],
        "new": [90.0, 80.0, 70.0],
        "forgetting": [None, 40.0, 45.0],
        "bwt": [None, -40.0, -45.0],
        "tasks_done": 3,
        "status": "complete",
    }
    empty = AccuracyMatrix([1]).summary()
    assert empty["A_f"] is None
    assert empty["A_t"] == []


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_json_is_exact_and_partial_matrices_can_go_on(done):
    whole = three_tasks()
    part = AccuracyMatrix(whole.total)
    for t in range(done):
        part.record(t, whole.correct[t, : t + 1], whole.correct5[t, : t + 1])
    again = AccuracyMatrix.from_json(json.loads(json.dumps(part.to_json())))
    assert again == part
    assert again.tasks_done == done
    for t in range(done, 3):
        again.record(t, whole.correct[t, : t + 1], whole.correct5[t, : t + 1])
    assert again == whole
    assert again.A_avg.hex() == whole.A_avg.hex()
    assert (again == part) is (done == 3)


@pytest.mark.parametrize("key", ["total", "correct", "correct5"])
def test_damaged_json_is_one_error(key):
    data = three_tasks().to_json()
    without, shorter = {k: v for k, v in data.items() if k != key}, {**data, key: data[key][:-1]}
    for damaged in (without, shorter, {**data, key: [[99]]}, {**data, key: None}):
        with raises(RunError, "--resume"):
            AccuracyMatrix.from_json(damaged)


def test_wrong_records_are_refused():
    matrix = AccuracyMatrix([4, 4])
    with raises(ValueError, "t", 1, 0):
        matrix.record(1, [1, 1], [1, 1])
    with raises(ValueError, 0, 1, 2):
        matrix.record(0, [1, 1], [1, 1])
    with raises(ValueError, 0, 1, 2):
        matrix.record(0, [1], [1, 1])
    with raises(ValueError, 0, 3, 2, 4):
        matrix.record(0, [3], [2])
    with raises(ValueError, 0, 3, 5, 4):
        matrix.record(0, [3], [5])
    with raises(ValueError, "correct_per_task", (1,), "float64"):
        matrix.record(0, [0.5], [1])
    assert matrix.tasks_done == 0  # a refused row leaves nothing behind
    with raises(ValueError, 0, 2):
        _ = matrix.A_f
    matrix.record(0, [0], [0])
    with raises(ValueError, 1, 2):
        matrix.new(1)
    with raises(DataError, "task 1"):
        AccuracyMatrix([3, 0])
    with raises(DataError):
        AccuracyMatrix([])


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_ties_go_to_the_lowest_index(kind):
    scores = kind(np.zeros((7, 7), dtype=np.float32))
    correct, correct5, total = count_correct(scores, kind(np.arange(7)), [0, 0, 0, 0, 1, 1, 1])
    assert correct.tolist() == [1, 0]  # class 0 only
    assert correct5.tolist() == [4, 1]  # classes 0 to 4
    assert total.tolist() == [4, 3]
    assert correct.dtype == np.int64


def test_nan_and_infinity():
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[nan, 0.0], [nan, 0.0], [nan, nan], [inf, 0.0], [-inf, -inf], [inf, inf]])
    labels = torch.tensor([0, 1, 0, 0, 0, 1])
    correct, correct5, total = count_correct(scores, labels, [0, 1])
    # hits: row 1 (the NaN of another class does not beat 0), rows 3 and 4 (tie, lower index); row 5 loses its tie
    assert correct.tolist() == [2, 1]
    assert correct5.tolist() == [2, 2]  # top-2 of 2 classes, but never a NaN
    assert total.tolist() == [4, 2]


def test_fewer_than_five_classes_and_classes_not_yet_seen():
    scores = np.array([[3.0, 2.0, 1.0]])
    correct, correct5, total = count_correct(scores, np.array([2]), [0, 0, 0, 1, 1])
    assert (correct.tolist(), correct5.tolist(), total.tolist()) == ([0], [1], [1])


def test_counts_agree_with_a_stable_sort_and_add_over_batches():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 6, (300, 12)).astype(np.float64)  # many ties
    labels = rng.integers(0, 12, 300)
    task_of_class = np.array([2, 0, 1, 0, 1, 2, 0, 0, 1, 2, 2, 2])  # classes of a task need not be neighbors
    order = np.argsort(-scores, axis=1, kind="stable")
    expected = np.zeros((3, 3), dtype=int)
    for row, label in zip(order, labels, strict=True):
        expected[0, task_of_class[label]] += row[0] == label
        expected[1, task_of_class[label]] += label in row[:5]
        expected[2, task_of_class[label]] += 1
    np.testing.assert_array_equal(count_correct(scores, labels, task_of_class), expected)
    parts = [count_correct(scores[a:b], labels[a:b], task_of_class) for a, b in ((0, 7), (7, 7), (7, 300))]
    np.testing.assert_array_equal(np.sum(parts, axis=0), expected)


def test_bad_shapes_and_labels_are_refused():
    with raises(ValueError, "labels", 0, 2, 3):
        count_correct(np.zeros((1, 3)), np.array([3]), [0, 0, 0])
    with raises(ValueError, "task_of_class", 3, (2,)):
        count_correct(np.zeros((1, 3)), np.array([0]), [0, 0])
    with raises(ValueError, (2, 3), (1,)):
        count_correct(np.zeros((2, 3)), np.array([0]), [0, 0, 0])
