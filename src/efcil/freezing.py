"""Whether a task's training is worth its shift, estimated by cross-validation on the images of that task alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from efcil.features import TaskFeatures

if TYPE_CHECKING:
    from efcil.trajectory import Trajectory


class Worth(NamedTuple):
    """Estimated accuracies on all classes, in percent."""

    move: float  # with the backbone after the task, and statistics shifted
    stay: float  # with the backbone before it, and exact statistics


def estimate(trajectory: Trajectory, label: str, features: TaskFeatures, num_old: int) -> Worth | None:
    """Estimate the accuracy of a method with and without the training of a task; None if it cannot be estimated.

    Old classes have no images, so each new class in turn simulates one: the statistics of half of its images, extracted
    with the backbone before the task, are shifted by the map that the other new classes give, and the other half is
    classified. For the accuracy on new classes the same half is learned with the new backbone. Both are averaged by the
    number of old and new classes (`move`). For `stay` everything uses the backbone before the task. The estimate of
    `move` is optimistic, since the simulated class was trained on, and pessimistic, since the map has fewer images.
    """
    labels, before = features.labels, features.before()
    classes = labels.unique().tolist()
    if len(classes) < 2:  # no others to estimate a shift from
        return None
    half = torch.zeros_like(labels, dtype=torch.bool)
    half[::2] = True
    hits = {"old": 0.0, "new": 0.0, "stay": 0.0}
    method, measured = trajectory.only(label), 0
    for c in classes:
        held = labels == c
        known, asked, others = (mask.nonzero()[:, 0] for mask in (held & half, held & ~half, ~held))
        if not len(known) or not len(asked):
            continue
        all_but_asked = torch.cat([others, known])
        candidates = {
            "old": method.preview(before.subset(known)).preview(features.subset(others)),
            "new": method.preview(features.subset(all_but_asked)),
            "stay": method.preview(before.subset(all_but_asked)),
        }
        for name, candidate in candidates.items():
            images = (before if name == "stay" else features).new()[asked]
            hits[name] += float((candidate.logits(label, images).argmax(1) == c).double().mean())
        measured += 1
    if not measured:
        return None
    rates = {name: 100 * total / measured for name, total in hits.items()}
    move = (num_old * rates["old"] + len(classes) * rates["new"]) / (num_old + len(classes))
    return Worth(move, rates["stay"])
