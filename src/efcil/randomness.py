"""Derive the seed of every random draw from its purpose and position in a run."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch


class RngStream(IntEnum):
    """Independent random streams, one for each purpose."""

    EPOCH = 1  # (seed, task, epoch): image order and augmentation
    WEIGHTS = 2  # (seed, task): weight initialization
    VIEW = 3  # (seed, task): augmented view for statistics
    SHIFT = 4  # (seed, task): initialization and batch order of a fitted shift
    EXPANSION = 5  # (seed): random feature expansion
    NOISE = 6  # (seed, task, epoch): random draws of a loss
    DRAWS = 7  # (seed): features sampled from statistics for calibration
    VALIDATION = 8  # (seed, update): held-out images of an update
    PSEUDO = 9  # (seed, old classes): target features of pseudo-images


def derive_seed(stream: RngStream, *where: int) -> int:
    """Derive a seed from (seed, task, epoch, ...), so that a resumed run needs no saved generator state."""
    state = np.random.SeedSequence([int(stream), *(int(w) for w in where)]).generate_state(1, np.uint64)[0]
    return int(state) & (2**63 - 1)


def generator(device: torch.device | str, stream: RngStream, *where: int) -> torch.Generator:
    """Return a generator seeded for a stream and a position in the run."""
    return torch.Generator(device).manual_seed(derive_seed(stream, *where))
