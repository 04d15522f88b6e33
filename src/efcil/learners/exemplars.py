"""Exemplars: the images that rehearsal methods store, selected by herding.

Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017, Algorithms 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from efcil.training.image_batches import ImageBatches


def herd(features: Tensor, count: int) -> Tensor:
    """Select rows (count,) by herding: their mean approximates the mean of all features (n, dim), most important first.

    The k-th row minimizes the distance between the mean of the first k and the mean of all (Algorithm 4). Minimizing
    |x|^2 - 2 x (k mu - s) instead of |mu - (s + x) / k|^2 takes one matrix-vector product. Computed in float64.

    >>> herd(torch.tensor([[0.0], [1.0], [5.0], [3.0]]), 3).tolist()
    [3, 1, 2]
    """
    x = features.double()
    mean, sum_, square = x.mean(0), x.new_zeros(x.shape[1]), (x * x).sum(1)
    free = torch.zeros_like(square)  # infinite for selected rows
    chosen = []
    for k in range(1, min(count, len(x)) + 1):
        row = (square - 2 * (x @ (k * mean - sum_)) + free).argmin()
        chosen.append(row)
        sum_ = sum_ + x[row]
        free = free.index_fill(0, row, torch.inf)
    return torch.stack(chosen) if chosen else torch.zeros(0, dtype=torch.long, device=features.device)


def l2_normalize(features: Tensor) -> Tensor:
    """L2-normalize features, as herding and the nearest mean of exemplars require."""
    return normalize(features.double(), dim=1)


@dataclass(frozen=True)
class Exemplars:
    """Images of old classes, the most important of each class first."""

    images: Tensor  # (n, channels, height, width) uint8
    labels: Tensor  # (n,) positions in the class order, ascending

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def select(cls, features: Tensor, pixels: ImageBatches, labels: Tensor, per_class: int) -> Exemplars:
        """Herd `per_class` images of each class by their features (n, dim)."""
        rows = []
        for label in labels.unique().tolist():
            members = (labels == label).nonzero()[:, 0]
            rows.append(members[herd(l2_normalize(features[members]), per_class)])
        every = torch.cat(rows)
        return cls(pixels.images[every], labels[every])

    def truncate(self, per_class: int) -> Exemplars:
        """Keep the first `per_class` exemplars of each class (Algorithm 5)."""
        start = torch.searchsorted(self.labels, self.labels)  # start of each row's class
        mask = torch.arange(len(self), device=self.labels.device) - start < per_class
        return Exemplars(self.images[mask], self.labels[mask])

    def merge(self, other: Exemplars) -> Exemplars:
        """Add the exemplars of later classes."""
        return Exemplars(torch.cat([self.images, other.images]), torch.cat([self.labels, other.labels]))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save."""
        return {"images": self.images, "labels": self.labels}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Exemplars:
        """Restore what `state` returned."""
        return cls(state["images"], state["labels"])
