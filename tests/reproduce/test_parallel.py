"""Many runs at once: processes that are killed, fail, are stopped and go on; several GPUs; Ray on two machines."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import standins
from efcil.errors import ConfigError, Interrupted, RunsFailed
from efcil.experiment.reporters import Reporter
from efcil.experiment.specification import commit
from efcil.reproduce import on_ray, parallel, worker
from efcil.reproduce.job import Job
from efcil.reproduce.parallel import LOG, Processes, Slot, gpus, run_all, slots
from efcil.reproduce.result_index import RunKey
from messages import assert_names, raises

# A process that behaves as the order of its job says, and leaves a line for each attempt.
STUB = """
import json, os, pathlib, signal, sys, time
job = json.loads(sys.stdin.readline())
order, out = job["key"]["order"], pathlib.Path(job["out"])
with open(out / f"{order}.attempts", "a") as file:
    file.write(os.environ["OMP_NUM_THREADS"] + " " + os.environ.get("CUDA_VISIBLE_DEVICES", "-") + "\\n")
first = len((out / f"{order}.attempts").read_text().split("\\n")) == 2
print(order, "works", flush=True)
if order == "killed" and first:
    os.kill(os.getpid(), signal.SIGKILL)
if order == "fails":
    raise ValueError("never")
if order.startswith("waits"):
    sys.stdin.read()
    (out / "saved").touch()
    sys.exit(130)
if order == "deaf":
    time.sleep(600)
(out / f"{order}.done").touch()
"""


class RecordingReporter(Reporter):
    """Keeps what is said."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def job(out, order):
    return Job(key=RunKey("tiny-imagenet", 10, order, "pass"), out=out, command="efcil reproduce table1")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(parallel, "POLL", 0.02)
    monkeypatch.setattr(parallel, "PAUSE", 0.05)


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(parallel, "WORKER", (sys.executable, "-S", "-c", STUB))


def attempts(out, order):
    return (out / f"{order}.attempts").read_text().splitlines()


# -- retries -----------------------------------------------------------------------------------------------------------


def test_a_killed_run_is_tried_again_and_a_failing_one_blocks_no_other(tmp_path, stub):
    voice = RecordingReporter()
    orders = ("fails", "killed", "first", "second")
    jobs, room = [job(tmp_path, order) for order in orders], [Slot(None, 1), Slot(None, 1)]
    with pytest.raises(RunsFailed) as failure:
        run_all(jobs, Processes(room, quiet=True), 2, voice)
    assert {path.stem for path in tmp_path.glob("*.done")} == {"killed", "first", "second"}
    assert [len(attempts(tmp_path, order)) for order in orders] == [3, 2, 1, 1]
    assert failure.value.exit_code == 4
    assert_names(str(failure.value), 1, 4, 3, "tiny-imagenet T=10 order fails pass")
    log = job(tmp_path, "fails").directory / LOG
    assert any("killed pass: " in n and "SIGKILL" in n and "2 of 3" in n for n in voice.notes)
    assert_names(voice.notes[-1], "ValueError: never", 3, log)
    assert log.read_text().count("--- attempt ") == 3
    assert log.read_text().count("ValueError: never") == 3


def test_without_retries_a_failure_is_reported_immediately(tmp_path, stub):
    with raises(RunsFailed, 1, "fails"):
        run_all([job(tmp_path, "fails")], Processes([Slot(None, 1)], quiet=True), 0, RecordingReporter())
    assert len(attempts(tmp_path, "fails")) == 1


def test_a_directory_that_cannot_be_written_fails_that_run_alone(tmp_path, stub):
    place = job(tmp_path, "first").directory
    place.parent.mkdir(parents=True)
    place.write_text("a file where the directory should be")
    voice = RecordingReporter()
    with raises(RunsFailed, 1, 2, "first"):
        run_all([job(tmp_path, o) for o in ("first", "second")], Processes([Slot(None, 1)], quiet=True), 1, voice)
    assert (tmp_path / "second.done").exists()
    assert any("cannot start" in note for note in voice.notes)


def test_the_lines_of_all_runs_are_shown_unless_quiet(tmp_path, stub, capfd):
    run_all([job(tmp_path, "first")], Processes([Slot(None, 1)], quiet=False), 0, RecordingReporter())
    assert "first works" in capfd.readouterr().out
    run_all([job(tmp_path, "second")], Processes([Slot(None, 1)], quiet=True), 0, RecordingReporter())
    assert "second works" not in capfd.readouterr().out
    assert "second works" in (job(tmp_path, "second").directory / LOG).read_text()


# -- one process -------------------------------------------------------------------------------------------------------


def test_paths_hold_in_every_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = job(Path("out"), "1993").model_copy(update={"data": Path("data")}).absolute()
    assert (one.out, one.data) == (tmp_path / "out", tmp_path / "data")
    assert Job.model_validate_json(one.model_dump_json()) == one


@pytest.mark.parametrize("training", [True, False])
def test_a_worker_whose_input_ends_stops_its_run(monkeypatch, training):
    """While it trains it is asked to; before that there is nothing to finish, and a signal ends it."""
    read, write = os.pipe()
    kept, sent = os.dup(0), []
    run = SimpleNamespace(stop=threading.Event(), training=training)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    os.dup2(read, 0)
    try:
        thread = threading.Thread(target=worker._follow, args=(run,))
        thread.start()
        os.write(write, b"ignored")
        time.sleep(0.05)
        assert not run.stop.is_set()
        os.close(write)
        thread.join(10)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(read)
    assert run.stop.is_set()
    assert sent == ([] if training else [(os.getpid(), signal.SIGTERM)])


def test_a_worker_tells_its_error_and_code(tmp_path, monkeypatch, capsys):
    one = job(tmp_path, "1993").model_copy(update={"overrides": ("buffer=16",)})
    monkeypatch.setattr(sys, "stdin", io.StringIO(one.model_dump_json() + "\n"))
    assert worker.main() == 2
    assert_names(capsys.readouterr().err, "efcil: buffer", "pass")


# -- signals -----------------------------------------------------------------------------------------------------------


def signalled(*moments):
    """Send SIGTERM to this process when each condition is met, one after the other."""

    def send():
        for met in moments:
            while not met():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_a_signal_stops_every_run_after_its_step_and_starts_no_other(tmp_path, stub):
    jobs = [job(tmp_path, order) for order in ("waits", "waits-too", "first")]
    thread = signalled(lambda: all((tmp_path / f"{o}.attempts").exists() for o in ("waits", "waits-too")))
    with raises(Interrupted, "SIGTERM") as stop:
        run_all(jobs, Processes([Slot(None, 1)] * 2, quiet=True), 2, RecordingReporter())
    thread.join()
    assert stop.value.exit_code == 143
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "first.attempts").exists()
    assert len(attempts(tmp_path, "waits")) == 1  # what was stopped has not failed


def test_a_second_signal_ends_them_at_once(tmp_path, stub, monkeypatch):
    reporter, looked, ended = RecordingReporter(), threading.Event(), parallel.Process.ended

    def seen(self):  # from now on the process is known, and can be ended
        looked.set()
        return ended(self)

    monkeypatch.setattr(parallel.Process, "ended", seen)
    begun = tmp_path / "deaf.attempts"
    thread = signalled(lambda: begun.exists() and looked.is_set(), lambda: reporter.notes)
    began = time.monotonic()
    with pytest.raises(Interrupted):
        run_all([job(tmp_path, "deaf")], Processes([Slot(None, 1)], quiet=True), 2, reporter)
    thread.join()
    assert time.monotonic() - began < 60


# -- where they run ----------------------------------------------------------------------------------------------------


class Scripted:
    """In place of a process: goes on until the test says otherwise."""

    def __init__(self, job, number, threads, gpu=None, *, echo):
        self.job, self.number, self.gpu, self.why = job, number, gpu, None

    def ended(self):
        return self.why


def test_an_attempt_goes_where_there_are_fewest_and_the_last_one_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "Process", Scripted)
    room = Processes([Slot(gpu, 1) for gpu in ("0", "1", "0", "1")], quiet=True)
    started = [room.start(job(tmp_path, str(i)), 1, False) for i in range(4)]
    assert [p.gpu for p in started] == ["0", "1", "0", "1"]
    assert [p.job.concurrent_runs for p in started] == [2, 2, 2, 2]
    assert room.start(job(tmp_path, "4"), 1, False) is None
    started[1].why = ""
    assert room.start(job(tmp_path, "5"), 3, True) is None  # a neighbor is still there
    started[3].why = ""
    last = room.start(job(tmp_path, "5"), 3, True)
    assert (last.gpu, last.job.concurrent_runs) == ("1", 1)
    assert room.start(job(tmp_path, "6"), 1, False) is None  # the only free slot is beside it
    last.why = "failed"
    assert room.start(job(tmp_path, "6"), 1, False).gpu == "1"


def test_a_last_attempt_waits_until_all_others_have_begun(tmp_path):
    """One that is to be tried again later goes first, even where there is room: the last attempt would keep it out."""
    began, failed = [], []

    class Made(Scripted):
        def ended(self):
            if self.job.key.order == "fails":
                self.why = "failed"
                failed.append(time.monotonic())
            elif self.number == 1:  # until the last attempt of the other one would be ready
                late = len(failed) == 2 and time.monotonic() > failed[1] + 2 * parallel.PAUSE + 0.02
                self.why = "failed" if late else None
            else:
                self.why = ""
            return self.why

    class Pool:
        made = []  # noqa: RUF012

        def start(self, job, number, alone):
            if alone and any(one.why is None for one in self.made):
                return None
            began.append((job.key.order, number, alone))
            self.made.append(Made(job, number, 1, echo=False))
            return self.made[-1]

        def close(self):
            began.append("closed")

    with pytest.raises(RunsFailed):
        run_all([job(tmp_path, order) for order in ("fails", "once")], Pool(), 2, RecordingReporter())
    assert began[:3] == [("fails", 1, False), ("once", 1, False), ("fails", 2, False)]
    assert began[3:] == [("once", 2, False), ("fails", 3, True), "closed"]


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(parallel, "cores", lambda: 12)


def test_gpus_are_filled_in_turn(two_gpus, monkeypatch):
    assert slots("auto", "auto", 100) == [Slot(str(i % 2), 2) for i in range(6)]
    assert slots("3", "cuda", 100) == [Slot("0", 4), Slot("1", 4), Slot("0", 4)]
    assert slots("auto", "cuda:1", 100) == [Slot("1", 4)] * 3
    assert slots("auto", "cuda", 1) == [Slot("0", 12)]
    assert slots("4", "cpu", 100) == [Slot(None, 3)] * 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert gpus("cuda:1") == ["GPU-b"]
    with raises(ConfigError, "--device cuda:2", "cuda:0", "cuda:1"):
        gpus("cuda:2")


def test_a_cpu_is_shared_by_threads(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert slots("auto", "auto", 100) == [Slot(None, 1)] * 12
    assert slots("auto", "auto", 3) == [Slot(None, 4)] * 3
    assert slots("40", "auto", 100) == [Slot(None, 1)] * 40
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert slots("3", "cpu", 100) == [Slot(None, 2)] * 3
    with raises(ConfigError, "--device cuda", "cpu"):
        gpus("cuda")


def test_a_process_sees_its_gpu_and_its_threads(tmp_path, stub):
    run_all([job(tmp_path, "first")], Processes([Slot("GPU-b", 3)], quiet=True), 0, RecordingReporter())
    assert attempts(tmp_path, "first") == ["3 GPU-b"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--parallel", "many"), ("--parallel many", "auto", "ray", "ray://HOST:PORT")),
        (("--parallel", "0"), ("--parallel 0", "auto")),
        (("--parallel", "2", "--concurrent-runs", "2"), ("--parallel", "--concurrent-runs")),
        (("--parallel", "2", "--set", "buffer=16"), ("buffer", "pass")),
        (("--parallel", "2", "--device", "cuda:7"), ("--device cuda:7", "cpu")),
    ],
)
def test_bad_input(tmp_path, efcil, arguments, named):
    only = ("--only", "pass", "--tasks", "10", "--data", f"tiny-imagenet={tmp_path}", "--out", tmp_path / "out")
    code, _, err = efcil("reproduce", "table1", *only, *arguments)
    assert code == 2
    assert_names(err, *named)
    assert not (tmp_path / "out").exists()


# -- Ray without Ray ---------------------------------------------------------------------------------------------------


def test_ray_is_an_extra(tmp_path, efcil, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    only = ("--only", "pass", "--tasks", "10", "--data", f"tiny-imagenet={tmp_path}", "--out", tmp_path / "out")
    code, _, err = efcil("reproduce", "table1", *only, "--parallel", "ray")
    assert code == 2
    assert_names(err, "--parallel ray", "pip install 'efcil[ray]'")


def test_what_a_run_takes_of_a_cluster():
    nodes = [{"CPU": 8.0}, {"CPU": 4.0, "GPU": 1.0}]
    with_gpu, alone = on_ray.attempt_resources(nodes, "auto", 3)
    assert 3 * with_gpu.num_gpus <= 1 < 4 * with_gpu.num_gpus
    assert alone.num_gpus == 1
    assert on_ray.attempt_resources(nodes, "cpu", 1) == (
        on_ray.Resources(4, 0),
        on_ray.Resources(8, 0),
    )  # it fits on each machine
    assert on_ray.attempt_resources(nodes, "cpu", 100)[0] == on_ray.Resources(1, 0)
    for device, given, named in (
        ("cuda:1", nodes, ("--device cuda:1", "auto", "cpu", "cuda")),
        ("cuda", nodes[:1], ("--device cuda",)),
        ("auto", [{"memory": 1.0}], ("--parallel ray",)),
    ):
        with raises(ConfigError, *named):
            on_ray.attempt_resources(given, device, 1)


def test_files_come_back_from_a_machine_that_shares_no_directory(tmp_path, stub):
    from efcil import __version__

    there, here = tmp_path / "there", tmp_path / "here"
    one = job(there, "first")
    (one.directory / "checkpoints").mkdir(parents=True)
    (one.directory / "checkpoints" / "task-01.safetensors").write_bytes(b"large")
    (one.directory / "pass").mkdir()
    (one.directory / "pass" / "summary.json").write_text("{}")
    why, files = on_ray.attempt(one.model_dump_json(), 1, 1, ".driver-x", __version__, True)
    assert why == ""
    assert sorted(files) == ["pass/summary.json", LOG]
    on_ray.receive(here, files)
    assert (here / "pass" / "summary.json").read_text() == "{}"
    assert "first works" in (here / LOG).read_text()
    (one.directory / ".driver-x").touch()  # seen there: the directory is shared
    assert on_ray.attempt(one.model_dump_json(), 1, 1, ".driver-x", __version__, True) == ("", {})
    failing = job(there, "fails").model_dump_json()
    why, _ = on_ray.attempt(failing, 1, 1, ".driver-x", __version__, True)
    assert_names(why, "code 1", "ValueError: never")
    why, _ = on_ray.attempt(failing, 1, 1, ".driver-x", "0.0.1", True)
    assert_names(why, __version__, "0.0.1")


def test_a_file_outside_of_the_run_is_refused(tmp_path):
    with raises(ConfigError, "../escaped"):
        on_ray.receive(tmp_path / "run", {"../escaped": b"x"})
    assert not (tmp_path / "escaped").exists()


# -- whole runs --------------------------------------------------------------------------------------------------------

SETTINGS = (  # several epochs, so that a run is not over before a test has found its process
    *("backbone=resnet10", "width=2", "first.epochs=1", "first.milestones=[]", "later.epochs=12"),
    *("later.milestones=[]", "augment=none", "crop=16", "data.short_side=16", "batch_size=8"),
)
ON_TWO_MACHINES = """
import sys
import ray
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, logging_level="warning")
assert len(ray.nodes()) == 2
from efcil.cli import main
try:
    main()
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A small Tiny-ImageNet of ten classes, so that it can be split into ten tasks."""
    home = tmp_path_factory.mktemp("parallel")
    names = tuple(f"n{i:08d}" for i in range(10))
    standins.tiny_imagenet(home / "tiny", names=names, train=4, test=2, size=16)
    return home


def start(home, out, *more, orders="1992,1993", program=("-m", "efcil")):
    arguments = ["reproduce", "table1", "--only", "pass", "--tasks", "10", "--orders", orders, "--device", "cpu"]
    arguments += ["--data", f"tiny-imagenet={home / 'tiny'}", "--out", str(home / out), *more]
    for setting in SETTINGS:
        arguments += ["--set", setting]
    own = {"OMP_NUM_THREADS": "1", "EFCIL_CACHE": str(home / "cache"), "EFCIL_COMMIT": commit()}
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **own},
        cwd=home,
    )


def place(home, out, order):
    return home / out / "runs" / "tiny-imagenet" / "T10" / f"order-{order}" / "pass"


def measured(home, out, order):
    """All that a run measured, epoch by epoch; how long it took, and beside how many others, is not part of it."""
    own = place(home, out, order)
    summary = json.loads((own / "pass" / "summary.json").read_text())
    log = (own / "trajectory" / "metrics.jsonl").read_text()
    return {k: v for k, v in summary.items() if k not in ("seconds", "concurrent_runs", "command")}, log


def processes_of(home, out):
    """Return the processes of all runs of a grid, each with its run directory."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            log = Path(os.readlink(process / "fd" / "1"))
            if log.name == LOG and log.is_relative_to(home / out):
                found[int(process.name)] = log.parent
    return found


def at_work(grid, home, out, *orders, tasks):
    """Return the processes of these runs that live, when one of them has measured so many tasks.

    One, not each: a process that starts late on a busy machine may find the run of the other one over.
    """

    def far(own):
        log = own / "trajectory" / "metrics.jsonl"
        return log.exists() and log.read_text().count("A_t") >= tasks

    runs = [place(home, out, order) for order in orders]
    end = time.monotonic() + 600  # a cluster of Ray takes its time on a busy machine
    while time.monotonic() < end:
        time.sleep(0.02)
        if any(far(own) for own in runs):
            found = {pid: own for pid, own in processes_of(home, out).items() if own in runs}
            if any(far(own) for own in found.values()):
                return list(found)
        assert grid.poll() is None, f"over before a process was found: {grid.communicate()[0]}"
    raise AssertionError(f"no process works in any of {runs}")


def gone(home, out, pids):
    """Whether these processes and all others of a grid end by themselves, without anybody who waits for them."""
    end = time.monotonic() + 240
    while there := any(Path(f"/proc/{pid}").exists() for pid in pids) or processes_of(home, out):
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    return not there


def all_done(home, out):
    return all((place(home, out, order) / "report.html").exists() for order in ("1992", "1993"))


@pytest.fixture(scope="module")
def undisturbed(home):
    process = start(home, "undisturbed", "--concurrent-runs", "1")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return {order: measured(home, "undisturbed", order) for order in ("1992", "1993")}


@pytest.mark.slow
def test_kill_9_of_one_and_failure_of_another_leave_the_same_bits(home, undisturbed):
    broken = place(home, "killed", "identity") / "trajectory" / "config.yaml"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")  # this run fails every time
    options = ("--parallel", "2", "--retries", "1")
    process = start(home, "killed", *options, orders="identity,1992,1993")
    os.kill(at_work(process, home, "killed", "1992", tasks=2)[0], signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 4, said
    assert "order 1992 pass: was killed by SIGKILL" in said
    assert "1 of 3 runs failed 2 times: tiny-imagenet T=10 order identity pass" in said
    assert "order 1992 pass: note: resuming after task" in said
    assert {order: measured(home, "killed", order) for order in ("1992", "1993")} == undisturbed
    assert "written: " in said  # the tables are made of what there is
    broken.unlink()
    process = start(home, "killed", *options, orders="identity,1992,1993")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "order 1992" not in said.split("#")[0]  # what is done is not done again


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_stopped_by_a_signal_and_resumed(home, undisturbed, number):
    """Each run finishes its step and saves, and the same command goes on; so it does where the grid is killed."""
    out = number.name
    process = start(home, out, "--parallel", "2")
    pids = at_work(process, home, out, "1992", "1993", tasks=1)
    process.send_signal(number)
    said, _ = process.communicate(timeout=300)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + number, said
        assert f"interrupted by {number.name}; resume with the same command" in said
    assert gone(home, out, pids), "a grid that was killed leaves nobody behind"
    assert not all_done(home, out)
    process = start(home, out, "--parallel", "2")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert {order: measured(home, out, order) for order in ("1992", "1993")} == undisturbed


@pytest.mark.slow
def test_two_machines_of_a_local_ray(home, undisturbed):
    pytest.importorskip("ray", reason="the extra `ray` is not installed: pip install 'efcil[ray]'")
    broken = place(home, "ray", "identity") / "trajectory" / "config.yaml"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    options = ("--parallel", "ray", "--retries", "1")
    process = start(home, "ray", *options, orders="identity,1992,1993", program=("-c", ON_TWO_MACHINES))
    os.kill(at_work(process, home, "ray", "1993", tasks=2)[0], signal.SIGKILL)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 4, said
    assert "order 1993 pass: was killed by SIGKILL" in said
    assert "1 of 3 runs failed 2 times: tiny-imagenet T=10 order identity pass" in said
    assert {order: measured(home, "ray", order) for order in ("1992", "1993")} == undisturbed
    assert not list((home / "ray").rglob(".driver-*"))


@pytest.mark.slow
def test_a_signal_stops_the_runs_of_ray(home, undisturbed):
    pytest.importorskip("ray", reason="the extra `ray` is not installed: pip install 'efcil[ray]'")
    process = start(home, "stopped", "--parallel", "ray", program=("-c", ON_TWO_MACHINES))
    pids = at_work(process, home, "stopped", "1992", "1993", tasks=1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "resume with the same command" in said
    assert gone(home, "stopped", pids)
    assert not all_done(home, "stopped")
    assert "finishing the step and saving" in said
    process = start(home, "stopped", "--parallel", "2")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert {order: measured(home, "stopped", order) for order in ("1992", "1993")} == undisturbed
