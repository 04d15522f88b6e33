"""Seed every random draw from its purpose and place in a run, so that a resumed run needs no generator state."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch


class RngStream(IntEnum):
    """What randomness is for: streams of different purposes never meet."""

    EPOCH = 1  # (seed, task, epoch): order of the images, augmentation
    WEIGHTS = 2  # (seed, task): new weights
    VIEW = 3  # (seed, task): the augmented view for statistics
    SHIFT = 4  # (seed, task): fitting a shift: first weights, order of the features
    EXPANSION = 5  # (seed): the random matrix that widens features
    NOISE = 6  # (seed, task, epoch): what a loss draws while training
    DRAWS = 7  # (seed): features drawn from statistics, for calibration
    VALIDATION = 8  # (seed, teaching): which pictures of a teaching are held out
    PSEUDO = 9  # (seed, old classes): features that images of old classes are to have


def derive_seed(stream: RngStream, *where: int) -> int:
    """Return a generator's seed as a function of (seed, task, epoch, ...): a resumed run needs no generator state."""
    state = np.random.SeedSequence([int(stream), *(int(w) for w in where)]).generate_state(1, np.uint64)[0]
    return int(state) & (2**63 - 1)


def generator(device: torch.device | str, stream: RngStream, *where: int) -> torch.Generator:
    """Return randomness for a purpose at a place in the run."""
    return torch.Generator(device).manual_seed(derive_seed(stream, *where))
