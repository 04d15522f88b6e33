"""Class orders by the similarity of classes: `hard` puts similar classes into one task, `easy` into different tasks.

Lai et al., "The Lie of the Average: How Class Incremental Learning Evaluation Deceives You?", ICLR 2026: a few random
orders show neither the best nor the worst case, and accuracy grows with the similarity between tasks. The sum of all
similarities is fixed, so tasks are least similar to each other where the classes within a task are most similar.

    similarity   cosine of the class means of a frozen EfficientNet-Lite0, minus the mean of all classes; unit-length
                 features of at most `PER_CLASS` training images of each class, brought to `SIDE` pixels
    grouping     tasks are filled one after the other, then pairs of classes of two tasks are swapped as long as this
                 raises (`hard`) or lowers (`easy`) the sum of the similarities within tasks
    order        tasks as they were filled, classes of a task by label

The result is a function of the training images and the sizes of the tasks; no test image is used. It is no search for
the very best or worst order of one method, as the paper's protocol is: every method gets the same two orders.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import normalize

from efcil.data.augment import CenterCrop
from efcil.data.dataset import ImageSet
from efcil.errors import ConfigError
from efcil.models import efficientnet_lite
from efcil.models.pretrained import PRETRAINED, load_weights

BACKBONE = "efficientnet-lite0"
SIDE = 64  # pixels: a seventh of the time of 128, and enough to tell classes apart
PER_CLASS = 20
CHUNK = 64  # images of a forward pass

Matrix = npt.NDArray[np.float64]


def similarity_order(kind: str, train: ImageSet, sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the labels in the order in which they are learned; `kind` is "hard" or "easy"."""
    if max(sizes) < 2:
        raise ConfigError(f"class order {kind}: every task has one class, so no two classes share one; use fewer tasks")
    return grouped_order(class_similarity(train, sum(sizes)), sizes, alike=kind == "hard")


@torch.no_grad()
def class_similarity(train: ImageSet, classes: int) -> Matrix:
    """Return the similarity (classes, classes) of class means, between -1 and 1."""
    backbone = efficientnet_lite.build(BACKBONE)
    load_weights(backbone, BACKBONE, PRETRAINED)
    backbone.eval()
    expected = efficientnet_lite.preprocessing(BACKBONE)
    mean, std = (torch.tensor(moment).view(1, -1, 1, 1) for moment in (expected.mean, expected.std))
    crop = CenterCrop(SIDE, SIDE)
    means = []
    for label in range(classes):
        rows = np.flatnonzero(train.labels == label)
        rows = rows[np.linspace(0, len(rows) - 1, min(PER_CLASS, len(rows))).astype(np.int64)]
        found = []
        for part in np.array_split(rows, -(-len(rows) // CHUNK)):
            images = crop.apply(torch.from_numpy(np.ascontiguousarray(train.images[part])), {}).float() / 255
            if images.shape[1] != len(expected.mean):
                images = images.mean(1, keepdim=True).expand(-1, len(expected.mean), -1, -1)
            found.append(backbone((images - mean) / std))
        means.append(normalize(torch.cat(found).double(), dim=1).mean(0))
    centered = torch.stack(means) - torch.stack(means).mean(0)
    directions = normalize(centered, dim=1)
    return (directions @ directions.T).numpy()


def grouped_order(similarity: Matrix, sizes: Sequence[int], alike: bool) -> npt.NDArray[np.int64]:
    """Return the classes task by task: `alike` maximizes the sum of the similarities within tasks, else minimizes it.

    >>> kin = np.kron(np.eye(2), np.ones((2, 2)))[:, [0, 2, 1, 3]][[0, 2, 1, 3]]  # 0 is like 2, and 1 like 3
    >>> grouped_order(kin, (2, 2), alike=True).tolist(), grouped_order(kin, (2, 2), alike=False).tolist()
    ([0, 2, 1, 3], [0, 1, 2, 3])
    """
    value = similarity if alike else -similarity
    value = value - np.diag(np.diag(value))
    task = _filled(value, sizes)
    rows = np.arange(len(value))
    while True:
        within = np.stack([value[:, task == t].sum(1) for t in range(len(sizes))], 1)  # (classes, tasks)
        stays, moves = within[rows, task], within[:, task]  # moves[i, j]: of class i with the task of class j
        gain = moves + moves.T - 2 * value - stays[:, None] - stays[None]
        gain[task[:, None] == task[None]] = 0
        one, other = np.unravel_index(gain.argmax(), gain.shape)
        if gain[one, other] <= 1e-9:
            return np.argsort(task, kind="stable")
        task[[one, other]] = task[[other, one]]


def _filled(value: Matrix, sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the task of each class: the first class that is left, and those of the highest value to its task."""
    task = np.full(len(value), -1)
    for number, size in enumerate(sizes):
        for _ in range(size):
            free = np.flatnonzero(task < 0)
            task[free[value[np.ix_(free, task == number)].sum(1).argmax()]] = number
    return task
