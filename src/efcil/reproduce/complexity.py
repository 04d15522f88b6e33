"""Measured cost of dual projection and reconstruction against the paper's complexity, for growing N, d and classes.

DP costs O(N d^2 + C (d^3 + c^2 d)) for C old classes in tasks of c classes, RRCR O(d^2 N + d C + d^3), from "Complexity
Analysis" in the paper, without the cost F N of feature extraction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from efcil import accel
from efcil.core.class_stats import ClassStats
from efcil.core.projection import task_shift
from efcil.core.ridge import normalize_columns, ridge_weight

AXES: Mapping[str, Sequence[tuple[int, int, int]]] = {  # (samples of the new task, dimensions, total classes)
    "samples N": [(n, 256, 20) for n in (1000, 2000, 4000, 8000, 16000)],
    "dimensions d": [(5000, d, 20) for d in (64, 128, 256, 512, 1024)],
    "classes": [(5000, 256, c) for c in (20, 40, 80, 160, 320)],
}
NEW = 10  # classes of the new task


def operation_count(part: str, samples: int, dim: int, classes: int) -> float:
    """Return the number of operations by the paper's formula, without constants."""
    old = classes - NEW
    if part == "DP":
        return samples * dim**2 + old * (dim**3 + NEW**2 * dim)
    return samples * dim**2 + dim * classes + dim**3


def _best_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats + 1):  # one more for warm-up
        began = time.perf_counter()
        work()
        accel.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def measure(samples: int, dim: int, classes: int, device: torch.device, repeats: int = 3) -> dict[str, float]:
    """Return the best time in seconds of dual projection and reconstruction for one task."""
    source = torch.Generator().manual_seed(samples + dim + classes)

    def features(count: int) -> Tensor:
        return torch.rand(count, dim, generator=source).to(device)

    per_class = 2 * dim  # full rank, so the rule `positive` retains every direction
    old_labels = torch.arange(classes - NEW).repeat_interleave(2)
    small = ClassStats.from_features(features(len(old_labels)).cpu(), old_labels)
    base = torch.eye(dim, dtype=torch.float64) * per_class
    grams = small.gram + base
    old = ClassStats(small.classes, small.count * per_class, small.mean, grams).to(device)
    before, after = features(samples), features(samples)
    labels = (torch.arange(samples) % NEW + classes - NEW).to(device)

    def project() -> ClassStats:
        return old.transform_projected(task_shift(before, after), "positive")

    moved = project()

    def reconstruct() -> Tensor:
        new = ClassStats.from_features(after, labels)
        return normalize_columns(ridge_weight(moved.merge(new), 200.0))

    return {"DP": _best_seconds(project, device, repeats), "RRCR": _best_seconds(reconstruct, device, repeats)}
