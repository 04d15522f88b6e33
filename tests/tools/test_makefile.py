"""The Makefile sets itself up, from locked files, and runs each test where it must run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def planned(target, folder):
    """What make would do for a target in a tree without .venv."""
    (folder / "Makefile").write_text((ROOT / "Makefile").read_text())
    (folder / "requirements").mkdir()
    for name in (
        "pyproject.toml",
        "constraints.txt",
        "requirements/run.txt",
        "requirements/dev.txt",
        "requirements/docs.txt",
    ):
        (folder / name).write_text((ROOT / name).read_text())
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}  # not a part of the make we are in
    command = ["make", "-n", target]
    experiment = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=environment).stdout
    return experiment.splitlines()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_sets_itself_up(target, tmp_path):
    """In a tree without .venv, make's plan begins with one, and torch is pinned by the constraints file."""
    lines = planned(target, tmp_path)
    assert lines[0].endswith("-m venv .venv")
    installs = [line for line in lines if "pip install" in line]
    held = ("-c constraints.txt", "--require-hashes", "--no-deps")  # the last: the package itself
    assert all(any(way in line for way in held) for line in installs)
    assert any(line.endswith("-c constraints.txt torch") for line in installs)
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()
    assert any("efcil demo" in line or "pytest" in line for line in lines[2:])


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--fail-on-skip"], 1)])
def test_a_skipped_test_fails_where_it_must_run(options, code, tmp_path):
    body = "import pytest\n\ndef test_here(): pass\n\n@pytest.mark.xfail\ndef test_known(): assert False\n\n"
    (tmp_path / "test_it.py").write_text(body + "def test_away(): pytest.importorskip('no_such_package')\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *options, str(tmp_path)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("tests", "tests/support", "src"))
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout
    assert f"1 passed, 1 {'skipped' if code == 0 else 'xfailed'}" in done.stdout.replace("1 failed, ", "")
    assert ("could not import 'no_such_package'" in done.stdout) is bool(options)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_all_tests_include_the_kernels():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}  # not a part of the make we are in
    command = ["make", "-n", "-W", "requirements/triton.txt", "test-all"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    experiment = done.stdout.splitlines()
    (install,) = (line for line in experiment if "--target .triton" in line)
    (test,) = (line for line in experiment if "PYTHONPATH=.triton" in line)
    assert "--require-hashes" in install
    assert "-m triton --fail-on-skip" in test
    assert experiment.index(install) < experiment.index(test)


def test_the_lock_of_the_kernels_is_what_it_is_made_from():
    asked, lock = ((ROOT / "requirements" / f"triton.{kind}").read_text() for kind in ("in", "txt"))
    pins = [line for line in asked.splitlines() if not line.startswith("#")]
    assert {pin.partition("==")[0] for pin in pins} == {"triton", "numpy"}
    for entry in lock.replace("\\\n", " ").splitlines():
        if entry.startswith("#"):
            continue
        pin, *hashes = entry.split()
        assert pin in pins, "run `make lock`"
        assert hashes
        assert all(word.startswith("--hash=sha256:") for word in hashes)
        pins.remove(pin)
    assert pins == [], "run `make lock`"


@pytest.mark.parametrize(
    ("target", "files"), [("demo", ["run.txt"]), ("docs", ["run.txt", "docs.txt"]), ("test", ["run.txt", "dev.txt"])]
)
def test_a_target_installs_nothing_that_only_others_need(target, files, tmp_path):
    lines = planned(target, tmp_path)
    assert [Path(line.split()[-1]).name for line in lines if " -r requirements/" in line] == files
    assert not any("[dev]" in line for line in lines)
