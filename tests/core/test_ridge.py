"""The ridge classifier's weight from any statistics: against the literal transcription, and on too few images."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from efcil import reference
from efcil.core.ridge import normalize_columns, ridge_weight
from efcil.errors import ConfigError, NotFiniteError, NotPositiveDefiniteError
from messages import raises
from problems import draw, gap


def stats_of(features: Tensor, labels: Tensor) -> SimpleNamespace:
    groups = [features[labels == c] for c in labels.unique()]
    gram = sum((x.T @ x for x in groups[1:]), groups[0].T @ groups[0])
    return SimpleNamespace(
        count=torch.tensor([len(x) for x in groups]),
        mean=torch.stack([x.mean(0) for x in groups]),
        gram_sum=lambda: gram,
    )


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 200.0])
def test_ridge_weight_takes_any_statistics_and_equals_the_literal_equations(ridge: float) -> None:
    features, labels = draw(60, 7), torch.arange(60) % 11 % 4  # unequal classes
    stats = stats_of(features, labels)
    joint = reference.ridge_joint(features, labels, range(4), ridge)
    assert gap(ridge_weight(stats, ridge), joint) < 1e-10
    prototypes = [reference.prototype(features[labels == c]) for c in range(4)]
    means, grams = [p[0] for p in prototypes], [p[1] for p in prototypes]
    literal = reference.ridge_from_statistics(stats.count.tolist(), means, grams, ridge)
    assert gap(ridge_weight(stats, ridge), literal) < 1e-10


def test_ridge_without_gamma_on_too_few_images_says_what_to_do() -> None:
    stats = stats_of(draw(6, 7), torch.arange(6))
    with raises(NotPositiveDefiniteError, "7 x 7", "ridge"):
        ridge_weight(stats, 0.0)
    assert torch.isfinite(ridge_weight(stats, 1e-3)).all()
    with raises(ConfigError, "ridge", -1.0):
        ridge_weight(stats, -1.0)
    with raises(NotFiniteError, 40, 9, 49):
        ridge_weight(stats_of(draw(6, 7) / 0.0, torch.arange(6)), 1.0)


def test_normalize_columns() -> None:
    weight = draw(6, 4)
    weight[:, 2] = 0.0
    ours = normalize_columns(weight)
    assert gap(ours, reference.normalize_columns(weight)) < 1e-14
    assert torch.equal(ours[:, 2], torch.zeros(6, dtype=torch.float64))
    scale = torch.tensor([1e-200, 7.0, 1.0, 1e200], dtype=torch.float64)
    assert gap(normalize_columns(weight * scale), ours) < 1e-14  # also where squares under- and overflow
    with raises(NotFiniteError, "weight", 6, 18, 24):
        normalize_columns(weight / 0.0)
