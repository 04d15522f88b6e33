"""Accuracy metrics of a class-incremental run, computed from integer counts.

After task t, all test images of tasks 0 to t are classified. ``correct[t, i]`` is the number of correct predictions for
task i and ``total[i]`` its number of test images. All metrics, in percent, follow from these counts::

    R[t, i]       = 100 correct[t, i] / total[i]                          i <= t
    A_t           = 100 sum_{i<=t} correct[t, i] / sum_{i<=t} total[i]    by image, not the mean of R[t, :]
    A_f, A_avg    = A of the last task done, mean of A_t
    forgetting(t) = mean_{i<t} (max_{i<=s<t} R[s, i] - R[t, i])
    bwt(t)        = mean_{i<t} (R[t, i] - R[i, i])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from efcil.errors import DataError, RunError

__all__ = ["AccuracyMatrix", "count_correct"]

Counts = NDArray[np.int64]


def _counts(name: str, values: ArrayLike) -> list[int]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name}: want a flat sequence of integers, got shape {array.shape} of {array.dtype}")
    return [int(value) for value in array]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class AccuracyMatrix:
    """Counts of a run, one row per completed task; an unfinished run has fewer rows than tasks.

    >>> matrix = AccuracyMatrix([10, 30])
    >>> matrix.record(0, [9], [10])
    >>> matrix.record(1, [5, 27], [8, 30])
    >>> matrix.A_t, matrix.old(1), matrix.new(1), matrix.forgetting(1)
    ([90.0, 80.0], 50.0, 90.0, 40.0)
    """

    def __init__(self, total: ArrayLike) -> None:
        self._total = _counts("total", total)
        empty = [i for i, count in enumerate(self._total) if count < 1]
        if empty or not self._total:
            which = f"task {empty[0]} has no test images" if empty else "there is no task"
            raise DataError(f"cannot measure accuracy: {which}; every task needs at least one test image")
        self._correct: list[list[int]] = []
        self._correct5: list[list[int]] = []

    @property
    def total(self) -> Counts:
        """Test images of each task, (T,)."""
        return np.array(self._total, dtype=np.int64)

    @property
    def tasks(self) -> int:
        """T, the number of tasks of the whole run."""
        return len(self._total)

    @property
    def tasks_done(self) -> int:
        """Number of tasks recorded so far."""
        return len(self._correct)

    @property
    def correct(self) -> Counts:
        """Correct top-1 predictions, (tasks_done, T); zero above the diagonal."""
        return self._square(self._correct)

    @property
    def correct5(self) -> Counts:
        """Correct top-5 predictions, (tasks_done, T); zero above the diagonal."""
        return self._square(self._correct5)

    def record(self, t: int, correct_per_task: ArrayLike, correct5_per_task: ArrayLike) -> None:
        """Append the row of task t, the next task: correct predictions on tasks 0 to t."""
        if t != self.tasks_done or t >= self.tasks:
            raise ValueError(f"t: got {t}, want {self.tasks_done}, the next of {self.tasks} tasks")
        correct, correct5 = (
            _counts("correct_per_task", correct_per_task),
            _counts("correct5_per_task", correct5_per_task),
        )
        if len(correct) != t + 1 or len(correct5) != t + 1:
            raise ValueError(f"after task {t} want {t + 1} counts, got {len(correct)} top-1 and {len(correct5)} top-5")
        for i, (hits, hits5) in enumerate(zip(correct, correct5, strict=True)):
            if not 0 <= hits <= hits5 <= self._total[i]:
                raise ValueError(
                    f"task {i}: want 0 <= top-1 <= top-5 <= {self._total[i]} images, got top-1 {hits}, top-5 {hits5}"
                )
        self._correct.append(correct)
        self._correct5.append(correct5)

    @property
    def R(self) -> NDArray[np.float64]:
        """Accuracy on task i after task t in percent, (T, T); NaN where not measured."""
        matrix = np.full((self.tasks, self.tasks), np.nan)
        for t in range(self.tasks_done):
            matrix[t, : t + 1] = [self._r(t, i) for i in range(t + 1)]
        return matrix

    @property
    def A_t(self) -> list[float]:
        """Accuracy over all classes so far, after each completed task."""
        return [self._over(row, 0, len(row)) for row in self._correct]

    @property
    def A5_t(self) -> list[float]:
        """Top-5 accuracy over all classes so far, after each completed task."""
        return [self._over(row, 0, len(row)) for row in self._correct5]

    @property
    def A_f(self) -> float:
        """Accuracy after the last completed task."""
        self._need(0)
        return self.A_t[-1]

    @property
    def A_avg(self) -> float:
        """Mean of A_t over the completed tasks."""
        self._need(0)
        return _mean(self.A_t)

    def old(self, t: int) -> float | None:
        """Return the accuracy after task t on classes of earlier tasks; None for the first task."""
        self._need(t)
        return self._over(self._correct[t], 0, t) if t else None

    def new(self, t: int) -> float:
        """Return the accuracy after task t on the classes of task t."""
        self._need(t)
        return self._r(t, t)

    def forgetting(self, t: int) -> float | None:
        """Return the mean over earlier tasks of the best accuracy before task t minus the accuracy after it, or
        None."""
        self._need(t)
        drops = [max(self._r(s, i) for s in range(i, t)) - self._r(t, i) for i in range(t)]
        return _mean(drops) if drops else None

    def bwt(self, t: int) -> float | None:
        """Return backward transfer: the mean over earlier tasks of final minus initial accuracy; None for the first
        task."""
        self._need(t)
        gains = [self._r(t, i) - self._r(i, i) for i in range(t)]
        return _mean(gains) if gains else None

    def summary(self) -> dict[str, Any]:
        """Return the accuracy section of ``summary.json``: numbers in percent, null where undefined."""
        done = range(self.tasks_done)
        return {
            "A_f": self.A_f if done else None,
            "A_avg": self.A_avg if done else None,
            "A_t": self.A_t,
            "A5_t": self.A5_t,
            "matrix": [[self._r(t, i) if i <= t else None for i in range(self.tasks)] for t in done],
            "old": [self.old(t) for t in done],
            "new": [self.new(t) for t in done],
            "forgetting": [self.forgetting(t) for t in done],
            "bwt": [self.bwt(t) for t in done],
            "tasks_done": self.tasks_done,
            "status": "complete" if self.tasks_done == self.tasks else "partial",
        }

    def to_json(self) -> dict[str, Any]:
        """Return the counts as lists of integers, the input of ``from_json``."""
        return {
            "total": list(self._total),
            "correct": [list(row) for row in self._correct],
            "correct5": [list(row) for row in self._correct5],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AccuracyMatrix:
        """Build a matrix from the output of ``to_json``; raise RunError if it is damaged."""
        try:
            matrix = cls(data["total"])
            for t, (correct, correct5) in enumerate(zip(data["correct"], data["correct5"], strict=True)):
                matrix.record(t, correct, correct5)
        except (KeyError, TypeError, ValueError, DataError) as error:
            raise RunError(f"accuracy counts are damaged: {error}; run again without --resume") from error
        return matrix

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AccuracyMatrix) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"AccuracyMatrix({self.tasks_done} of {self.tasks} tasks, A_t={[round(a, 2) for a in self.A_t]})"

    def _r(self, t: int, i: int) -> float:
        return self._over(self._correct[t], i, i + 1)

    def _over(self, row: Sequence[int], first: int, end: int) -> float:
        # Division of Python integers is correctly rounded, so equal counts give equal bits on every machine.
        return 100 * sum(row[first:end]) / sum(self._total[first:end])

    def _need(self, t: int) -> None:
        if not 0 <= t < self.tasks_done:
            raise ValueError(f"task {t} is not recorded; {self.tasks_done} of {self.tasks} tasks are")

    def _square(self, rows: list[list[int]]) -> Counts:
        square = np.zeros((len(rows), self.tasks), dtype=np.int64)
        for t, row in enumerate(rows):
            square[t, : t + 1] = row
        return square


def count_correct(
    scores: torch.Tensor | NDArray[Any],  # (n, classes)
    labels: torch.Tensor | NDArray[Any],  # (n,) column of the true class
    task_of_class: ArrayLike | torch.Tensor,  # (at least classes,) task of each column
) -> tuple[Counts, Counts, Counts]:
    """Count top-1 hits, top-5 hits and images of each task among the scored classes.

    The rank of the true class is the number of classes with a higher score, or an equal score and a lower index; an
    image is a top-k hit if the rank is below k. Ties are therefore resolved identically on every device, and a NaN is
    never a hit. Counts add over batches.

    >>> scores = np.array([[0.9, 0.1, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.1]])
    >>> [counts.tolist() for counts in count_correct(scores, np.array([0, 1, 1]), [0, 0, 1])]
    [[2, 0], [3, 0], [3, 0]]
    """
    score = torch.as_tensor(scores)
    device = score.device
    label = torch.as_tensor(labels).to(device, torch.int64)
    task = torch.as_tensor(task_of_class).to(device, torch.int64)
    if score.ndim != 2 or label.shape != score.shape[:1]:
        raise ValueError(f"want scores (n, classes) and labels (n,), got {tuple(score.shape)} and {tuple(label.shape)}")
    classes = score.shape[1]
    if task.ndim != 1 or len(task) < classes or not classes:
        raise ValueError(f"task_of_class: want a task for each of {classes} classes, got shape {tuple(task.shape)}")
    task = task[:classes]
    if bool(((label < 0) | (label >= classes)).any()):
        raise ValueError(f"labels: want 0 to {classes - 1}, got {int(label.min())} to {int(label.max())}")
    mine = score.gather(1, label[:, None])
    lower = torch.arange(classes, device=device) < label[:, None]
    rank = ((score > mine) | ((score == mine) & lower)).sum(1)
    rank = torch.where(mine[:, 0] == mine[:, 0], rank, classes)  # NaN ranks last
    tasks = int(task.max()) + 1
    # bincount on CUDA adds atomically; on the CPU the few numbers are counted deterministically.
    of_image = task[label].cpu()
    top1, top5 = (rank < 1).cpu(), (rank < min(5, classes)).cpu()
    counts = [torch.bincount(of_image[keep], minlength=tasks).numpy() for keep in (top1, top5, slice(None))]
    return counts[0], counts[1], counts[2]
