"""Faults that real machines have: kills in every stage of every kind of training, full disks, damaged files, clocks.

`EFCIL_KILLS=50 pytest -m slow tests/test_faults.py` is the long version; by default there are ten kills.
"""

import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("EFCIL_KILLS", "10"))
# One trajectory with many readouts, and every representation that has stages or a memory of its own.
RUNS = {
    "trajectory": ["compare", "dpcr,dp-ncm,ldc,adc,sdc,acil,fecam,lwf", "--set", "buffer=32", "--set", "samples=5"],
    "icarl": ["run", "icarl", "--set", "memory=40"],
    "podnet": ["run", "podnet", "--set", "memory=40", "--set", "balance.epochs=3"],
    "foster": ["run", "foster", "--set", "memory=40", "--set", "compression.epochs=4"],
    "pass": ["run", "pass"],
}
SMALL = ["width=4", "first.epochs=5", "first.milestones=[]", "later.epochs=4", "later.milestones=[]"]


def start(kind, out, *more, limit=None):
    command, method, *settings = RUNS[kind]
    arguments = [sys.executable, "-m", "efcil", command, method, "digits", "--tasks", "5", "--out", str(out), *settings]
    arguments += [part for setting in SMALL for part in ("--set", setting)]
    arguments += ["--checkpoint-seconds", "0.2", "--json", *more]

    def limited():
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    return subprocess.Popen(arguments, preexec_fn=limited, **pipes)


def finished(kind, out, *more):
    process = start(kind, out, *more)
    _, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    return metrics(out)


def metrics(out):
    """All that was measured and logged; how long it took is not part of it."""
    found = {}
    for path in sorted(out.rglob("summary.json")):
        summary = json.loads(path.read_text())
        aside = ("seconds", "command", "commit")
        found[str(path.relative_to(out))] = {k: v for k, v in summary.items() if k not in aside}
    for path in sorted(out.rglob("metrics.jsonl")):
        found[str(path.relative_to(out))] = path.read_text()
    assert len(found) >= 2
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """For each kind of run, once: its metrics, and how many seconds it takes."""
    known = {}

    def get(kind):
        if kind not in known:
            out = tmp_path_factory.mktemp("undisturbed") / kind
            began = time.monotonic()
            known[kind] = (finished(kind, out), time.monotonic() - began)
        return known[kind]

    return get


@pytest.mark.parametrize("kill", range(KILLS))
def test_killed_at_any_moment_nothing_is_lost(undisturbed, tmp_path, kill):
    """Kill -9 at a random moment between the first epoch and the end, again and again until it gets through."""
    kind = list(RUNS)[kill % len(RUNS)]
    expected, seconds = undisturbed(kind)
    seed = time.time_ns()
    rng = random.Random(seed)
    kills = 0
    for attempt in itertools.count():
        process = start(kind, tmp_path / "run", *(["--resume"] if attempt else []))
        try:
            process.communicate(timeout=rng.uniform(0.25, 1.0) * seconds if attempt < 2 else 280)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
            continue
        assert process.returncode == 0
        break
    assert metrics(tmp_path / "run") == expected, f"seed {seed}, {kind}, {kills} kills"


@pytest.mark.parametrize("kind", ["icarl", "foster", "pass"])
def test_told_to_stop_in_the_middle_of_an_epoch(undisturbed, tmp_path, kind):
    """SIGTERM again and again: each time the step is finished and saved, exit 143, and the end is the same."""
    expected, seconds = undisturbed(kind)
    rng = random.Random(7)
    for attempt in itertools.count():
        process = start(kind, tmp_path / "run", *(["--resume"] if attempt else []))
        try:
            _, err = process.communicate(timeout=rng.uniform(0.4, 0.9) * seconds if attempt < 3 else 280)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=60)
            # Before there is anything to save, the signal ends the process as it ends any other.
            assert process.returncode in (143, -signal.SIGTERM, 0), err
            continue
        assert process.returncode == 0, err
        break
    assert metrics(tmp_path / "run") == expected


def test_a_disk_that_fills_up(undisturbed, tmp_path):
    """Files cannot grow beyond a limit: an error that names the directory; the run goes on when there is room."""
    expected, _ = undisturbed("icarl")
    process = start("icarl", tmp_path / "run", limit=100_000)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert "cannot be written" in err
    assert "--resume" in err
    assert finished("icarl", tmp_path / "run", "--resume") == expected


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_checkpoint_cut_short(undisturbed, tmp_path, share):
    """The newest one is cut to a share of its length, as after a power cut: the one before it is used."""
    expected, _ = undisturbed("icarl")
    finished("icarl", tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").glob("task-*.safetensors"))[-1]
    whole = newest.read_bytes()
    newest.write_bytes(whole[: int(share * len(whole))])
    assert finished("icarl", tmp_path / "run", "--resume") == expected


def test_a_clock_that_jumps(undisturbed, tmp_path, monkeypatch):
    """An hour back, a day ahead, at every call: nothing depends on the time of day."""
    code = (
        "import time, itertools, sys\n"
        "real, jumps = time.time, itertools.cycle([0, -3600, 86400, -1e6])\n"
        "time.time = lambda: real() + next(jumps)\n"
        "from efcil.cli import main\n"
        "main()\n"
    )
    expected, _ = undisturbed("icarl")
    _, method, *settings = RUNS["icarl"]
    out = tmp_path / "run"
    arguments = [sys.executable, "-c", code, "run", method, "digits", "--tasks", "5", "--out", str(out), *settings]
    arguments += [part for setting in SMALL for part in ("--set", setting)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    assert metrics(out) == expected
