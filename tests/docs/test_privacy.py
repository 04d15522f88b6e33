"""What docs/privacy.md says that statistics reveal: exactly that much, and no more."""

import math
from pathlib import Path

import pytest
import torch

from efcil.core.class_stats import ClassStats
from problems import draw

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")


def stats_of(x):
    return ClassStats.from_features(x, torch.zeros(len(x), dtype=torch.long))


def test_one_picture_is_its_mean():
    x = draw(1, 6)
    assert torch.equal(stats_of(x).mean[0], x[0])


def test_two_pictures_follow_from_the_statistics():
    """x = m +- h with h h' = G / 2 - m m'."""
    x = draw(2, 6)
    kept = stats_of(x)
    m = kept.mean[0]
    values, vectors = torch.linalg.eigh(kept.gram[0] / 2 - torch.outer(m, m))
    h = vectors[:, -1] * values[-1].sqrt()
    found = torch.stack([m + h, m - h])
    assert min((found - x).abs().max(), (found.flip(0) - x).abs().max()) < 1e-10


@pytest.mark.parametrize("pictures", [3, 5])
def test_more_pictures_leave_a_rotation_open(pictures):
    """Features that are mixed by a rotation around the vector of ones have the same statistics, and differ."""
    x = draw(pictures, 8)
    ones = torch.ones(pictures, 1, dtype=torch.float64) / math.sqrt(pictures)
    basis = torch.linalg.qr(torch.cat([ones, draw(pictures, pictures - 1, seed=1)], 1))[0]
    turn = torch.linalg.qr(draw(pictures - 1, pictures - 1, seed=2))[0]
    inner = torch.eye(pictures, dtype=torch.float64)
    inner[1:, 1:] = turn
    mixed = basis @ inner @ basis.T @ x
    a, b = stats_of(x), stats_of(mixed)
    assert (a.mean - b.mean).abs().max() < 1e-12
    assert (a.gram - b.gram).abs().max() < 1e-11
    assert (x - mixed).abs().max() > 0.1
    assert (pictures - 1) * (pictures - 2) // 2 == torch.triu_indices(pictures - 1, pictures - 1, 1).shape[1]


def test_the_counts_of_numbers_are_right():
    d = 512
    most = (d + 3) // 2
    assert most == 257
    assert f"({most} for d = {d})" in TEXT
    assert d * (d + 1) // 2 + d >= most * d
    assert d * (d + 1) // 2 + d < (most + 1) * d
