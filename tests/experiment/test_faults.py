"""Faults that real machines have: kills at every kind of moment, full disks, damaged files, dead workers, clocks.

Real processes throughout. After each fault the run goes on, and its metrics are those of a run that nobody disturbed,
to the last bit. By default there are ten kills; the long version, which also writes down where each kill fell, is
`EFCIL_KILLS=50 EFCIL_KILLS_OUT=kills.json pytest -m slow tests/experiment/test_faults.py -k 'killed_at or fell'`.
"""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from efcil.experiment.specification import commit
from forked import Forked
from messages import assert_names

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("EFCIL_KILLS", "10"))
# One trajectory with many methods, and every learner that has stages or a memory of its own.
RUNS = {
    "trajectory": ["compare", "dpcr,dp-ncm,ldc,adc,sdc,acil,fecam,lwf", "--set", "buffer=32", "--set", "samples=5"],
    "icarl": ["run", "icarl", "--set", "memory=40"],
    "podnet": ["run", "podnet", "--set", "memory=40", "--set", "balance.epochs=2"],
    "foster": ["run", "foster", "--set", "memory=40", "--set", "compression.epochs=2"],
    "pass": ["run", "pass"],
}
SMALL = ["width=4", "first.epochs=3", "first.milestones=[]", "later.epochs=2", "later.milestones=[]"]
MOMENTS = ("in an epoch", "between tasks", "while statistics move", "while a checkpoint is written")
LEFT = ".*.tmp*"  # what a write leaves behind that was never finished
PIPES = {
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "text": True,
    "env": {**os.environ, "OMP_NUM_THREADS": "1"},
}


def arguments(kind, out, *more, dataset=("digits",)):
    command, method, *settings = RUNS[kind]
    given = ["efcil", command, method, *dataset, "--tasks", "5", "--out", str(out), *settings]
    given += [part for setting in SMALL for part in ("--set", setting)]
    return [*given, "--checkpoint-seconds", "0.2", "--json", *more]


def start(kind, out, *more, dataset=("digits",), **how):
    return Forked(arguments(kind, out, *more, dataset=dataset), **how)


def finished(kind, out, *more, **how):
    code, err = start(kind, out, *more, **how).ended()
    assert code == 0, err
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
    """For each kind of run, once: its metrics."""
    known = {}

    def get(kind):
        if kind not in known:
            known[kind] = finished(kind, tmp_path_factory.mktemp("undisturbed") / kind)
        return known[kind]

    return get


@pytest.fixture
def complete(undisturbed, tmp_path_factory, tmp_path):
    """A copy of a finished run of iCaRL."""
    undisturbed("icarl")
    shutil.copytree(next(tmp_path_factory.getbasetemp().glob("undisturbed*/icarl")), tmp_path / "run")
    return tmp_path / "run"


# -- kills -------------------------------------------------------------------------------------------------------------


def checkpoints(out):
    return next(iter(out.rglob("checkpoints")), out / "none")


def being_written(out):
    place = checkpoints(out)
    return place.is_dir() and any(name.startswith(".task") for name in os.listdir(place))


def killed(kind, out, moment, rng):
    """Kill -9 at a moment of this kind, after a few others; return the kind that it really hit, None if it was over.

    That is judged by what the process left: the last thing that it told, and a checkpoint that was never finished.
    """
    often = ["--checkpoint-seconds", "0"] if moment == "while a checkpoint is written" else []
    process = start(kind, out, *often, *(["--resume"] if out.exists() else []))
    wanted = {"between tasks": "task", "while statistics move": "solving"}.get(moment, "epoch")
    passing = rng.randrange(4 if wanted == "epoch" else 2)
    told = None
    for told in process.events():
        if told["event"] == wanted and (passing := passing - 1) < 0:
            break
    if moment == "in an epoch":
        time.sleep(rng.uniform(0, 0.05))
    elif moment == "while a checkpoint is written":
        while not process.over and not being_written(out):
            pass
    else:
        time.sleep(rng.uniform(0, 0.005))
    process.kill()
    told = [told, *process.events()][-1]
    code, _ = process.ended()
    if code != -signal.SIGKILL:
        return None
    if moment != "between tasks" and being_written(out):
        return "while a checkpoint is written"
    after = {"epoch": "in an epoch", "solving": "while statistics move", "task": "between tasks"}
    return after.get(told["event"] if told else None, "while it starts")


@pytest.fixture(scope="module")
def ledger():
    """Where the kills fell; written down where EFCIL_KILLS_OUT says."""
    rows = []
    yield rows
    if path := os.environ.get("EFCIL_KILLS_OUT"):
        command = f"EFCIL_KILLS={KILLS} pytest -m slow tests/experiment/test_faults.py -k 'killed_at or fell'"
        found = {"command": command, "commit": commit(), "machine": os.environ.get("EFCIL_MACHINE", "")}
        found |= {"runs": len(rows), "identical": sum(row["identical"] for row in rows)}
        found |= {"kills": dict(Counter(hit for row in rows for hit in row["hit"])), "each": rows}
        Path(path).write_text(json.dumps(found, indent=2) + "\n")


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_any_moment_nothing_is_lost(undisturbed, ledger, tmp_path, number):
    """Kill -9 in a moment of the kind wanted (three tries, all of them kills), then go on: nothing tells of it."""
    kind, moment = list(RUNS)[number % len(RUNS)], MOMENTS[number % len(MOMENTS)]
    expected, out = undisturbed(kind), tmp_path / "run"
    seed = time.time_ns()
    rng, hits = random.Random(seed), []
    while moment not in hits and len(hits) < 3:
        hit = killed(kind, out, moment, rng)
        if hit is None:
            shutil.rmtree(out)  # it got through: from the start
        else:
            hits.append(hit)
    found = finished(kind, out, *(["--resume"] if out.exists() else []))
    row = {"run": kind, "aim": moment, "hit": hits, "seed": seed, "identical": found == expected}
    ledger.append(row)
    assert found == expected, row
    assert not list(out.rglob(LEFT)), "what the kill left half-written is gone"


def test_the_kills_fell_into_every_kind_of_moment(ledger):
    if len(ledger) < len(MOMENTS):
        pytest.skip("needs the kills before it")
    assert {hit for row in ledger for hit in row["hit"]} >= set(MOMENTS)


# -- signals -----------------------------------------------------------------------------------------------------------


def told_to_stop(process, number, event, rng):
    """Send a signal soon after an event; return the exit code."""
    for told in process.events():
        if told["event"] == event:
            time.sleep(rng.uniform(0, 0.05))
            process.kill(number)
            break
    return process.ended()


@pytest.mark.parametrize("kind", ["icarl", "foster", "pass"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_the_middle_of_an_epoch(undisturbed, tmp_path, kind, number, code):
    """A signal again and again: each time the step is finished and saved, exit 143 or 130, and the end is the same."""
    rng, resume = random.Random(7), []
    for event in ("epoch", "solving", "task", "started"):
        found, err = told_to_stop(start(kind, tmp_path / "run", *resume), number, event, rng)
        assert found == code, err
        assert err.splitlines()[-1].startswith("efcil: ")
        assert_names(err.splitlines()[-1], signal.Signals(number).name, f"efcil resume {tmp_path / 'run'}")
        resume = ["--resume"]
    assert finished(kind, tmp_path / "run", "--resume") == undisturbed(kind)


# -- one directory, two processes --------------------------------------------------------------------------------------


def test_the_lock_of_a_killed_process_is_gone(undisturbed, tmp_path):
    """While one works, even one that hangs, a second is refused; when it is killed the next may go on at once."""
    out = tmp_path / "run"
    first = start("icarl", out)
    next(e for e in first.events() if e["event"] == "epoch")
    first.kill(signal.SIGSTOP)
    code, err = start("icarl", out, "--resume").ended()
    assert code == 2
    assert_names(err, out, "--out")
    first.kill()
    first.ended()
    assert finished("icarl", out, "--resume") == undisturbed("icarl")


# -- disks -------------------------------------------------------------------------------------------------------------


def told_in_one_line(code, err, place):
    """An error of ours that names the place, not a traceback."""
    assert code == 2, err
    assert "Traceback" not in err
    assert_names(err.splitlines()[-1], place)
    return True


@pytest.mark.parametrize("limit", [200, 2_500, 20_000, 60_000])
def test_a_disk_that_fills_up(undisturbed, tmp_path, limit):
    """Files cannot grow beyond a limit: an error that names the place; the run goes on when there is room.

    The smallest limit stops the configuration, the next the log, the largest a checkpoint.
    """
    code, err = start("icarl", tmp_path / "run", limit=limit).ended()
    assert told_in_one_line(code, err, tmp_path / "run")
    assert "--resume" in err
    assert finished("icarl", tmp_path / "run", "--resume") == undisturbed("icarl")


def mounted(place, options):
    """Mount memory as a file system, or skip where this process may not."""
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a file system needs rights that this process does not have")


def test_a_real_disk_that_fills_up(undisturbed, tmp_path):
    """A file system with 600 KB: full in the middle of the run; it is enlarged, and the run goes on."""
    place = tmp_path / "disk"
    mounted(place, "size=600k")
    try:
        code, err = start("foster", place / "run").ended()
        assert told_in_one_line(code, err, place / "run")
        assert "No space left on device" in err
        subprocess.run(["mount", "-o", "remount,size=100m", place], check=True)
        assert finished("foster", place / "run", "--resume") == undisturbed("foster")
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_disk_that_became_read_only(undisturbed, tmp_path):
    """As the kernel does it after an error of the disk: a run that was killed there goes on when it is mended."""
    place = tmp_path / "disk"
    mounted(place, "size=100m")
    try:
        assert killed("icarl", place / "run", "between tasks", random.Random(0))
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        code, err = start("icarl", place / "run", "--resume").ended()
        assert told_in_one_line(code, err, place / "run")
        assert "Read-only file system" in err
        subprocess.run(["mount", "-o", "remount,rw", place], check=True)
        assert finished("icarl", place / "run", "--resume") == undisturbed("icarl")
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def bound_by_permissions(*given):
    """A process that may not write what its permissions forbid, which root may."""
    without = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if without and not shutil.which("setpriv"):
        pytest.skip("root is not bound by permissions, and there is no setpriv to change that")
    return subprocess.Popen([*without, sys.executable, "-m", *given], **PIPES)


def test_a_directory_that_may_not_be_written(undisturbed, tmp_path):
    """By its permissions, from the start and in the middle of a run."""
    tmp_path.chmod(0o555)
    process = bound_by_permissions(*arguments("icarl", tmp_path / "run"))
    _, err = process.communicate()
    assert told_in_one_line(process.returncode, err, tmp_path / "run")
    tmp_path.chmod(0o755)
    process = bound_by_permissions(*arguments("icarl", tmp_path / "run", "--checkpoint-seconds", "0"))
    assert any(json.loads(line)["event"] == "task" for line in process.stdout)
    checkpoints(tmp_path).chmod(0o555)
    _, err = process.communicate()
    assert told_in_one_line(process.returncode, err, tmp_path / "run")
    checkpoints(tmp_path).chmod(0o755)
    assert finished("icarl", tmp_path / "run", "--resume") == undisturbed("icarl")


# -- damaged files -----------------------------------------------------------------------------------------------------


def lengths(data):
    """Where a safetensors file can be cut: nothing, in the length, behind it, in the header, behind it, in the data."""
    header = 8 + int.from_bytes(data[:8], "little")
    return [0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, (header + len(data)) // 2, len(data) - 1]


def test_a_checkpoint_cut_short(undisturbed, complete):
    """The newest one is cut, as after a power cut, in each kind of place: the one before it is used."""
    newest = sorted((complete / "checkpoints").glob("task-*.safetensors"))[-1]
    whole = newest.read_bytes()
    for length in lengths(whole)[::3]:
        newest.write_bytes(whole[:length])
        code, err = start("icarl", complete, "--resume").ended()
        assert code == 0, err
        assert metrics(complete) == undisturbed("icarl")
        newest.with_name(newest.name + ".unused").unlink()  # it was set aside: nothing that was written is thrown away


def places(data):
    """A bit in the length of the header, its first and last character, the data's first and last byte, and between."""
    header = 8 + int.from_bytes(data[:8], "little")
    return [0, 6, 8, header // 2, header, (header + len(data)) // 2, len(data) - 1]


@pytest.mark.parametrize("place", range(7))
def test_a_checkpoint_with_a_flipped_bit(undisturbed, complete, place):
    newest = sorted((complete / "checkpoints").glob("task-*.safetensors"))[-1]
    data = bytearray(newest.read_bytes())
    data[places(data)[place]] ^= 1 << place
    newest.write_bytes(data)
    assert finished("icarl", complete, "--resume") == undisturbed("icarl")


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "config.yaml"])
def test_other_files_of_a_run_that_are_damaged(undisturbed, complete, name):
    """A summary is written again from the checkpoint, a line of the log that is damaged is left out, and what cannot be
    told apart from another run is refused with what to do.
    """
    path = complete / name
    whole = path.read_bytes()
    for data in (b"", whole[: len(whole) // 2], whole.replace(b"A_t", b"A\xfft", 1), whole.replace(b"5", b"6", 1)):
        if data == whole:
            continue
        path.write_bytes(data)
        code, err = start("icarl", complete, "--resume").ended()
        assert "Traceback" not in err
        if name == "summary.json":
            assert code == 0, err
            assert metrics(complete) == undisturbed("icarl")
        elif name == "metrics.jsonl":
            assert code == 0, err  # nothing to do, and the log is not needed for it
            path.write_bytes(whole)
        else:
            assert code == 2
            assert_names(err, "--out" if "--out" in err else path)
            path.unlink()
            assert finished("icarl", complete, "--resume") == undisturbed("icarl")


# -- workers and clocks ------------------------------------------------------------------------------------------------


@pytest.fixture
def photographs(tmp_path):
    """Class folders with small pictures."""
    rng = np.random.default_rng(0)
    for label, part, count in [(c, p, n) for c in range(5) for p, n in (("train", 24), ("test", 6))]:
        place = tmp_path / "photographs" / part / f"class-{label}"
        place.mkdir(parents=True)
        base = rng.integers(0, 255, (1, 1, 3))
        for index in range(count):
            noise = rng.integers(-40, 40, (16, 16, 3))
            pixels = np.clip(base + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(place / f"{index}.png")
    return tmp_path / "photographs"


def decoders(process):
    """The children of a process that decode images."""
    found = subprocess.run(
        ["ps", "-ww", "--ppid", str(process.pid), "-o", "pid=,args="], capture_output=True, text=True
    )
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "spawn_main" in line]


def test_a_worker_that_dies_while_decoding(photographs, tmp_path):
    """Kill -9 for a process that decodes images as they are needed: the run says so, and goes on with --resume."""
    more = ["--set", "data.short_side=16", "--set", "stem=cifar", "--set", "data.lazy=true"]
    source = ("folder", "--data", str(photographs), "--preset", "none")

    def begun(out, *resume):
        given = arguments("icarl", tmp_path / out, *more, *resume, dataset=source)
        return subprocess.Popen([sys.executable, "-m", *given], **PIPES)

    def to_the_end(out, *resume):
        process = begun(out, *resume)
        _, err = process.communicate()
        assert process.returncode == 0, err
        return metrics(tmp_path / out)

    process = begun("run")
    assert any(json.loads(line)["event"] == "epoch" for line in process.stdout)
    process.send_signal(signal.SIGSTOP)  # or it may be over before its workers are found
    try:
        workers = decoders(process)
        assert workers
        os.kill(workers[0], signal.SIGKILL)
    finally:
        process.send_signal(signal.SIGCONT)
    _, err = process.communicate()
    assert process.returncode == 2, err
    assert_names(err, "--resume")
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert to_the_end("run", "--resume") == to_the_end("undisturbed")


CLOCK = (
    "import itertools, os, sys, time\n"
    "real, jumps = time.time, itertools.cycle([0, -3600, 86400, -1e6])\n"
    "time.time = lambda: real() + next(jumps)\n"
    "from efcil.cli import main\n"
    "main()\n"
)


def test_a_clock_that_jumps(undisturbed, tmp_path):
    """An hour back, a day ahead, at every call, and files from the future: nothing depends on the time of day."""
    out = tmp_path / "run"

    def with_jumps(*more):
        given = [sys.executable, "-c", CLOCK, *arguments("icarl", out, *more)[1:]]
        return subprocess.Popen(given, **PIPES)

    first = with_jumps()
    list(itertools.islice((line for line in first.stdout if json.loads(line)["event"] == "task"), 2))
    first.kill()
    first.communicate()
    for age, path in enumerate(sorted(checkpoints(out).iterdir())):  # the newest looks oldest, all are of tomorrow
        os.utime(path, (time.time() + 86400 - age, time.time() + 86400 - age))
    again = with_jumps("--resume")
    _, err = again.communicate()
    assert again.returncode == 0, err
    assert metrics(out) == undisturbed("icarl")
