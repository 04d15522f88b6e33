"""The scripts of benchmarks/, each as a fixture of its name."""

import importlib

import pytest


def script(name):
    @pytest.fixture(scope="session", name=name)
    def load():
        return importlib.import_module(f"benchmarks.{name}")

    return load


augment, busy, core, cpu, distributed, gpu, record, rounds, scale, serve, steps = map(
    script, ("augment", "busy", "core", "cpu", "distributed", "gpu", "record", "rounds", "scale", "serve", "steps")
)
