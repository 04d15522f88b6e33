"""Fixtures that every test may use."""

import os
import signal
import sys
from pathlib import Path

os.environ["SCIPY_ARRAY_API"] = "1"  # read when scipy is imported; without it scikit-learn's checks skip some

import pytest
import torch
from hypothesis import settings

from efcil import cli
from efcil.accel.backend import Backend
from problems import blobs
from torchvision_on_cpu import define_operators

define_operators()

settings.load_profile("ci")  # the same examples in every run, without a limit of time: no test fails by chance

# The files that take longest, in this order before all others: a long one that comes last keeps one core busy alone.
LONG = ("experiment/test_faults", "serve/page/test_page", "serve/test_serve", "product/test_classifier")
LONG += ("training/test_distributed", "experiment/test_kill", "benchmarks/test_rounds", "reproduce/test_parallel")
LONG += ("learners/test_pseudo_replay", "product/test_commands", "benchmarks/test_benchmarks", "cli/test_cli")
LONG += ("training/test_image_store",)
ORDER = {Path(__file__).parent / f"{name}.py": place for place, name in enumerate(LONG)}


def pytest_collection_modifyitems(items):
    _skip_cuda(items)
    items.sort(key=lambda item: ORDER.get(item.path, len(ORDER)))


def pytest_addoption(parser):
    parser.addoption("--fail-on-skip", action="store_true", help="count a skipped test as failed")


def _skip_cuda(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A test that was asked for and did not run must not pass for one that did."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--fail-on-skip"):
        report.outcome, report.longrepr = "failed", f"--fail-on-skip: {report.longrepr[2]}"
    return report


def pytest_runtest_setup():
    """One thread, whatever the test before has set: two beside another busy process can be ten times slower."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _interruptible():
    """A shell lets what it runs in the background ignore Ctrl-C, and so would every process that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _no_proxy():
    """What tests talk to is on this machine, whatever proxy the caller's environment names."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("no_proxy", "NO_PROXY"):
            patch.setenv(name, "localhost,127.0.0.1,0.0.0.0", prepend=",")
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Nothing is read from or written to the cache of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EFCIL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def backend():
    return Backend.choose("cpu")


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
