"""A small model of drawn glyphs, and clients of services that serve it."""

import shutil

import numpy as np
import pytest
import torch

from efcil.data import glyphs
from efcil.product import IncrementalClassifier
from served import KNOWN, SIZE, client_of, png


@pytest.fixture(scope="session")
def drawn():
    """PNG files of glyphs by class: a dozen of each."""
    data = glyphs.load(classes=6, size=SIZE, train_per_class=12, test_per_class=1)
    found = {}
    for image, label in zip(data.train.images, data.train.labels, strict=True):
        found.setdefault(str(label), []).append(png(np.asarray(image)))
    return found


@pytest.fixture(scope="session")
def taught(drawn, tmp_path_factory):
    """A model of three glyphs. Never changed: `model` is a copy of it."""
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("serve") / "taught"
    make_learner = IncrementalClassifier(
        backbone="resnet10", width=8, size=SIZE, epochs=2, device="cpu", progress=False
    )
    images = [data for name in KNOWN for data in drawn[name]]
    make_learner.learn(images, [name for name in KNOWN for _ in drawn[name]])
    make_learner.save(place)
    return place


@pytest.fixture
def model(taught, tmp_path):
    return shutil.copytree(taught, tmp_path / "model")


@pytest.fixture
def client(model):
    with client_of(model) as found:
        yield found


@pytest.fixture(scope="module")
def reader(taught, tmp_path_factory):
    """A client for tests that change nothing."""
    with client_of(shutil.copytree(taught, tmp_path_factory.mktemp("reader") / "model")) as found:
        yield found
