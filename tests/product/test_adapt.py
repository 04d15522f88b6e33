"""A pretrained backbone that is trained gently: in the first teaching alone, in each, or never."""

import itertools

import numpy as np
import pytest
import torch

from efcil import IncrementalClassifier
from efcil.errors import ConfigError, DataWarning
from messages import raises

CLASSES = {"dark": 40, "gray": 120, "light": 200, "white": 240}


def lesson(*names, count=6):
    source = np.random.default_rng(0)
    pictures = [
        np.clip(CLASSES[name] + source.integers(-30, 30, (32, 32, 3)), 0, 255).astype(np.uint8)
        for name in names
        for _ in range(count)
    ]
    return pictures, [name for name in names for _ in range(count)]


def weights(model):
    return torch.cat([value.flatten().float() for value in model._snapshot.backbone.state_dict().values()])


@pytest.mark.parametrize(
    ("adapt", "moved"), [("none", [False, False]), ("first", [True, False]), ("always", [True, True])]
)
def test_when_the_backbone_is_trained(adapt, moved, tmp_path, recwarn):
    model = IncrementalClassifier(size=32, adapt=adapt, epochs=1, val_fraction=0, progress=False)
    states = [weights(model).clone()]
    for names in (("dark", "light"), ("gray", "white")):
        model.learn(*lesson(*names))
        states.append(weights(model).clone())
    assert [not torch.equal(*pair) for pair in itertools.pairwise(states)] == moved
    warned = [str(warning.message) for warning in recwarn if warning.category is DataWarning]
    assert len(warned) == sum(moved)
    assert all("6 pictures" in text and "adapt=none" in text for text in warned)
    model.save(tmp_path / "model")
    again = IncrementalClassifier.load(tmp_path / "model", progress=False)
    pictures, _ = lesson(*CLASSES, count=2)
    assert np.abs(again.predict_proba(pictures) - model.predict_proba(pictures)).max() < 1e-6


def test_adapting_and_a_method_are_exclusive():
    for given in ({"method": "slda"}, {"frozen": True}):
        with raises(ConfigError, "adapt=first", next(iter(given)).split("_")[0]):
            IncrementalClassifier(adapt="first", **given)
    with raises(ConfigError, "adapt=sometimes", "none, first, always"):
        IncrementalClassifier(adapt="sometimes")
