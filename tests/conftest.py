"""Fixtures that every test may use."""

import pytest
import torch

from efcil.training.machine import Machine
from problems import blobs


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def machine():
    return Machine.choose("cpu")


@pytest.fixture(scope="session")
def data():
    return blobs()
