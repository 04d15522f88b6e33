"""A run survives a kill at any moment: real processes, kill -9 at random times, the same metrics to the last bit."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from efcil.errors import RunError
from efcil.experiment.callbacks import Checkpointer
from efcil.experiment.specification import commit
from messages import assert_names

KILLS = 5
SETTINGS = {
    "width": 4,
    "first.epochs": 4,
    "first.milestones": "[3]",
    "later.epochs": 3,
    "later.milestones": "[2]",
}


def given(out, *more):
    """The arguments of the command."""
    arguments = ["compare", "dpcr,dp-ncm,lwf,fecam", "digits", "--tasks", "5", "--out", str(out)]
    arguments += ["--checkpoint-seconds", "0.2", "--json", *more]
    for key, value in SETTINGS.items():
        arguments += ["--set", f"{key}={value}"]
    return arguments


def start(out, *more):
    command = [sys.executable, "-m", "efcil", *given(out, *more)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "EFCIL_COMMIT": commit()}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def metrics(out):
    """All that a run measured; how long it took is not part of it."""
    found = {"log": [json.loads(line) for line in (out / "trajectory" / "metrics.jsonl").read_text().splitlines()]}
    for method in ("dpcr", "dp-ncm", "lwf", "fecam"):
        summary = json.loads((out / method / "summary.json").read_text())
        found[method] = {k: v for k, v in summary.items() if k not in ("seconds", "command")}
    return found


def events(process):
    """Yield the moments at which the run told of an epoch or a task."""
    for line in process.stdout:
        if json.loads(line)["event"] in ("epoch", "task"):
            yield time.monotonic()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that nobody kills: its metrics, how many events it has, and the longest time between two of them."""
    out = tmp_path_factory.mktemp("kill") / "undisturbed"
    with start(out) as process:
        moments = list(events(process))
        assert process.wait() == 0, process.stderr.read()
    pauses = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return metrics(out), len(moments), sorted(pauses)[len(pauses) // 2]


MIDDLE = KILLS // 2  # the others are for make test-all


@pytest.mark.parametrize(
    "kill", [pytest.param(kill, marks=[] if kill == MIDDLE else pytest.mark.slow) for kill in range(KILLS)]
)
def test_kill_and_resume_is_bit_identical(undisturbed, tmp_path, kill):
    expected, count, pause = undisturbed
    seed = time.time_ns()
    rng = random.Random(seed)
    # Each kill falls at random into its own fifth of the run, so that they cannot all hit one part of it: after some
    # event, and from there after any part of the time that the next one usually takes.
    after, delay = int((kill + rng.random()) / KILLS * (count - 1)), rng.random() * pause
    with start(tmp_path / "run") as process:
        for _ in itertools.islice(events(process), after + 1):
            pass
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "the run was over before the kill"
    again = start(tmp_path / "run", "--resume")
    _, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    assert metrics(tmp_path / "run") == expected, f"seed {seed}: killed {delay:.3f} s after event {after}"


def test_the_comparison_sees_a_difference(undisturbed, efcil, tmp_path):
    """Another seed gives other metrics: the equality above is not empty."""
    code, _, err = efcil(*given(tmp_path / "run", "--seed", "1"))
    assert code == 0, err
    assert metrics(tmp_path / "run")["dpcr"]["matrix"] != undisturbed[0]["dpcr"]["matrix"]


def test_second_process_is_refused(efcil, tmp_path):
    first = start(tmp_path / "run")
    try:
        next(events(first))
        first.send_signal(signal.SIGSTOP)  # or it may be over before the second one has started
        code, _, err = efcil(*given(tmp_path / "run", "--resume"))
    finally:
        first.kill()
        first.communicate()
    assert code == 2
    assert_names(err, tmp_path / "run", "--out")


def test_what_is_resumed_after_an_epoch_has_its_momentum(efcil, tmp_path, monkeypatch):
    """An error at a chosen epoch, not at a random one: without momentum buffers the log goes on with other losses."""
    arguments = ["run", "lwf", "digits", "--tasks", "5", "--device", "cpu", "--checkpoint-seconds", "0"]
    arguments += [f"--set={key}={value}" for key, value in SETTINGS.items()]
    assert efcil(*arguments, "--out", tmp_path / "whole")[0] == 0
    on_epoch_end = Checkpointer.on_epoch_end

    def cut(checkpointer, report, state):
        on_epoch_end(checkpointer, report, state)
        if (report.task, report.epoch) == (1, 0):
            raise RunError("the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "on_epoch_end", cut)
        code, _, said = efcil(*arguments, "--out", tmp_path / "cut")
    assert code == 2
    assert "the power is gone" in said
    assert efcil(*arguments, "--out", tmp_path / "cut", "--resume")[0] == 0
    logs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("cut", "whole")]
    assert logs[0] == logs[1]
