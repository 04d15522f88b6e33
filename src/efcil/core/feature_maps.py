"""Maps in front of class statistics: what a track keeps statistics of, when it is not the features themselves.

A map is a value: tracks with equal maps are one. A linear shift of features is no linear shift behind a nonlinear map,
so such a map goes with a frozen backbone, or with a shift that says it works behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn.functional import normalize

from efcil.core.mahalanobis import tukey


class FeatureMap(Protocol):
    """Features (n, dim) -> what statistics are kept of, (n, dim'); hashable.

    `layout` is how many of the features belong to each stage that is extracted, the last stage's first.
    """

    @property
    def is_linear(self) -> bool:
        """Whether shifts that are linear in the features stay linear behind it."""

    def __call__(self, features: Tensor, layout: Sequence[int]) -> Tensor:
        """Map features."""


@dataclass(frozen=True)
class FewerStages:
    """Of multi-stage features those of the last stage and of `stages` before it.

    >>> import torch
    >>> FewerStages(1)(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), (2, 1, 1)).tolist()
    [[1.0, 2.0, 3.0]]
    """

    stages: int
    is_linear: bool = True

    def __call__(self, features: Tensor, layout: Sequence[int]) -> Tensor:
        """Leave the others out."""
        return features[:, : sum(layout[: self.stages + 1])]


def simplified(feature_map: FeatureMap | None, layout: Sequence[int]) -> FeatureMap | None:
    """Return None for a map that keeps all stages that are extracted, so that it shares the track of all features.

    >>> simplified(FewerStages(2), (2, 1, 1)), simplified(FewerStages(1), (2, 1, 1))
    (None, FewerStages(stages=1, is_linear=True))
    """
    if isinstance(feature_map, FewerStages) and feature_map.stages + 1 >= len(layout):
        return None
    return feature_map


@dataclass(frozen=True)
class UnitLength:
    """Features of length one, in float64."""

    is_linear: bool = False

    def __call__(self, features: Tensor, layout: Sequence[int] = ()) -> Tensor:
        """Divide by the norm."""
        return normalize(features.double(), dim=1)


@dataclass(frozen=True)
class TukeyPower:
    """Tukey's transformation, x^power."""

    power: float
    is_linear: bool = False

    def __call__(self, features: Tensor, layout: Sequence[int] = ()) -> Tensor:
        """Transform."""
        return tukey(features, self.power)
