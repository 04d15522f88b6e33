"""Fixtures that every test may use."""

import os
import sys

os.environ["SCIPY_ARRAY_API"] = "1"  # read when scipy is imported; without it scikit-learn's checks skip some

import pytest
import torch

from efcil import cli
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


@pytest.fixture
def efcil(monkeypatch, capsys):
    """Run the command in this process: (exit code, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "160")  # tables are not folded

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["efcil", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        return (int(code), *capsys.readouterr())

    return call
