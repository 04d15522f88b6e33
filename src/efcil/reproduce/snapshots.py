"""Snapshots for figures: test features of two backbones and DPCR's statistics after a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from efcil.core.class_stats import ClassStats
from efcil.core.ridge import normalize_columns, ridge_weight
from efcil.errors import CheckpointError, ConfigError
from efcil.tensor_files import load_tensors


@dataclass(frozen=True)
class Snapshot:
    """Snapshot of a trajectory after a task."""

    before: Tensor  # (n, dim) test features of all classes so far, from the backbone before the task
    after: Tensor  # (n, dim) from the backbone after the task
    labels: Tensor  # (n,) positions in the class order
    stats: Mapping[str, ClassStats]  # method -> statistics

    @classmethod
    def read(cls, path: Path) -> tuple[Snapshot, list[str]]:
        """Load a snapshot and the class names in class order."""
        try:
            return cls._of(*load_tensors(path))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, ConfigError) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise CheckpointError(f"{path} is not a snapshot ({why}); run it again") from error

    @classmethod
    def _of(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> tuple[Snapshot, list[str]]:
        names = sorted({name.split("/")[1] for name in tensors if name.startswith("stats/")})
        below = {
            name: {k.removeprefix(f"stats/{name}/"): v for k, v in tensors.items() if k.startswith(f"stats/{name}/")}
            for name in names
        }
        stats = {name: ClassStats.from_state(own) for name, own in below.items()}
        before, after, labels = tensors["before"], tensors["after"], tensors["labels"]
        seen = int(labels.max()) + 1
        dims = {tuple(before.shape[1:]), tuple(after.shape[1:]), *((own.dim,) for own in stats.values())}
        if len(dims) > 1 or labels.ndim != 1 or not len(before) == len(after) == len(labels):
            raise ValueError(f"features of shapes {sorted(dims)}, {len(before)}, {len(after)} and {len(labels)} rows")
        return cls(before, after, labels, stats), list(meta["class_names"][:seen])

    def weight(self, method: str, ridge: float, normalize: bool) -> Tensor:
        """Solve for a classifier (dim, classes) from the statistics of a method (Eq. 18-22)."""
        weight = ridge_weight(self.stats[method], ridge)
        return normalize_columns(weight) if normalize else weight

    def accuracy(self, weight: Tensor) -> float:
        """Return the test accuracy of a classifier in percent."""
        right = (self.after.to(weight) @ weight).argmax(1) == self.labels
        return 100 * float(right.double().mean())


GAMMAS = tuple(float(f"{10.0**k:.3g}") for k in torch.arange(-2, 6.1, 0.5).tolist())


def gamma_grid(snapshot: Snapshot, chosen: float) -> dict[str, object]:
    """Return the final accuracy for each gamma, with and without CN, without training."""
    gammas = sorted({*GAMMAS, chosen})
    found = {
        key: [snapshot.accuracy(snapshot.weight("dpcr", gamma, normalize)) for gamma in gammas]
        for key, normalize in (("with_cn", True), ("without_cn", False))
    }
    return {"gamma": gammas, **found, "chosen": chosen}
