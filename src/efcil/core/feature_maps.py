"""Maps that are applied to features before class statistics are computed.

Tracks with equal maps are shared. After a nonlinear map a linear shift of features is no longer linear, so such a map
needs a frozen backbone or a shift that declares support for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from efcil.core.mahalanobis import tukey


class FeatureMap(Protocol):
    """Hashable map from features (n, dim) to mapped features (n, dim').

    `layout` is the number of features of each extracted stage, the last stage first.
    """

    @property
    def is_linear(self) -> bool:
        """Whether a linear shift of the features stays linear after this map."""

    def __call__(self, features: Tensor, layout: Sequence[int]) -> Tensor:
        """Map features (n, dim) of stages `layout`."""


@dataclass(frozen=True)
class FewerStages:
    """Select the multi-stage features of the last stage and of `stages` before it.

    >>> import torch
    >>> FewerStages(1)(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), (2, 1, 1)).tolist()
    [[1.0, 2.0, 3.0]]
    """

    stages: int
    is_linear: bool = True

    def __call__(self, features: Tensor, layout: Sequence[int]) -> Tensor:
        """Select the leading columns."""
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
    """L2-normalize features in float64."""

    is_linear: bool = False

    def __call__(self, features: Tensor, layout: Sequence[int] = ()) -> Tensor:
        """Divide each row by its norm."""
        return normalize(features.double(), dim=1)


@dataclass(frozen=True)
class TukeyPower:
    """Apply Tukey's transformation, x^power."""

    power: float
    is_linear: bool = False

    def __call__(self, features: Tensor, layout: Sequence[int] = ()) -> Tensor:
        """Raise features to `power`."""
        return tukey(features, self.power)


@dataclass(frozen=True)
class UnitPower:
    """sign(x) |x|^power of features x of length one: a few channels that are strong in an image say less.

    >>> import torch
    >>> UnitPower(0.5)(torch.tensor([[0.0, 7.0], [-9.6, 2.8]]))
    tensor([[ 0.0000,  1.0000],
            [-0.9798,  0.5292]], dtype=torch.float64)
    """

    power: float
    is_linear: bool = False

    def __call__(self, features: Tensor, layout: Sequence[int] = ()) -> Tensor:
        """Transform; 1 leaves the features of length one."""
        unit = normalize(features.double(), dim=1)
        return unit if self.power == 1 else unit.sign() * unit.abs().pow(self.power)


@dataclass(frozen=True)
class RandomReLU:
    """RanPAC's max(0, x @ R) for features x of length one and a fixed matrix R (dim, width) of standard normal numbers.

    >>> behind = RandomReLU(width=5, seed=0)(torch.tensor([[1.0, 2.0], [2.0, 4.0]]))
    >>> tuple(behind.shape), bool((behind >= 0).all()), torch.allclose(behind[0], behind[1])
    ((2, 5), True, True)
    """

    width: int
    seed: int
    is_linear: bool = False

    def __call__(self, features: Tensor, layout: Sequence[int] = ()) -> Tensor:
        """Project."""
        rows = normalize(features.double(), dim=1)
        return (rows @ _normal_matrix(features.shape[1], self.width, self.seed).to(rows)).relu_()


@functools.lru_cache(maxsize=2)
def _normal_matrix(dim: int, width: int, seed: int) -> Tensor:
    """Draw R on the CPU: the same on every device."""
    return torch.randn(dim, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
