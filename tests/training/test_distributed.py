"""Several processes learn what one learns: gloo, two processes, real commands, real kills."""

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.run import get_args_parser

import distributed_worker as worker
from command_lines import misspelt
from efcil.accel.backend import Backend
from efcil.accel.cuda import Cuda
from efcil.data.workers import own_cores
from efcil.errors import ConfigError, Interrupted
from efcil.experiment.interruption import stoppable
from efcil.experiment.specification import commit
from efcil.platform_support import cores
from efcil.randomness import RngStream, generator
from efcil.tensor_files import load_tensors
from efcil.training.distributed import BUCKET_NUMEL, SINGLE_PROCESS, World, running_statistics
from efcil.training.loader import epoch_batches, several_epochs
from messages import assert_names, raises
from problems import gap

ROOT = Path(__file__).resolve().parents[2]
LOST = "another process of the run has died"


def environment(rank, size, port, **more):
    """What torchrun would tell a process."""
    own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    own |= {"OMP_NUM_THREADS": 1, "EFCIL_COMMIT": commit(), **more}
    paths = os.pathsep.join([str(ROOT / "tests" / "support"), str(ROOT / "src")])
    return {**os.environ, "PYTHONPATH": paths, **{name: str(value) for name, value in own.items()}}


def started(arguments, size=2, **more):
    """Start a command in each of `size` processes, without torchrun between them and the test.

    As torchrun does, the test has the store through which they meet: its port is taken before they start.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *map(str, arguments)]
    places = [environment(rank, size, store.port, **more) for rank in range(size)]
    found = [subprocess.Popen(command, env=place, **pipes) for place in places]
    found[0].store = store  # which ends with the last that knows of it
    return found


def ended(processes, timeout=240):
    """Wait for all: (exit code, standard output, standard error) of each."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=timeout)
        found.append((process.returncode, out, err))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes computed; see tests/support/distributed_worker.py."""
    out = tmp_path_factory.mktemp("ranks")
    cases = ["statistics", "images", "training", "normalization", "talk"]
    for code, _, err in ended(started([ROOT / "tests" / "support" / "distributed_worker.py", out, *cases])):
        assert code == 0, err
    return [load_tensors(out / f"rank-{rank}.safetensors")[0] for rank in range(2)]


def of(tensors, case):
    return {name.partition("/")[2]: value for name, value in tensors.items() if name.startswith(f"{case}/")}


# --- shares, without any process --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shares_are_all_rows_once_and_their_weights_add_to_one(count, size):
    groups = [World(rank, size) for rank in range(size)]
    rows = [list(range(count))[world.shard(count)] for world in groups]
    if count < size:
        assert rows == [list(range(count))] * size
    else:
        assert list(itertools.chain(*rows)) == list(range(count))
        assert max(map(len, rows)) - min(map(len, rows)) <= 1
    if count:
        weights = [world.begin_batch(count) for world in groups]
        assert sum(weights) == pytest.approx(1)
        assert weights == pytest.approx([len(own) / sum(map(len, rows)) for own in rows])


@pytest.mark.parametrize("last", ["wrap", "keep", "drop"])
def test_the_shares_of_all_processes_are_the_batches_of_one(last):
    images, labels = torch.arange(23 * 12, dtype=torch.uint8).view(23, 3, 2, 2), torch.arange(23)
    transform = worker.augment.make_transform("crop-flip", 2)
    how = (images, labels, transform, 8, last)

    def source():
        return generator("cpu", RngStream.EPOCH, 0, 0, 0)

    whole = list(epoch_batches(*how, source()))
    shares = [list(epoch_batches(*how, source(), World(rank, 3))) for rank in range(3)]
    several = [several_epochs(*how, [source(), source()], World(rank, 3)) for rank in range(3)]
    for index, (pixels, targets) in enumerate(whole):
        assert torch.equal(torch.cat([share[index][0] for share in shares]), pixels)
        assert torch.equal(torch.cat([share[index][1] for share in shares]), targets)
        for epoch in range(2):
            assert torch.equal(torch.cat([share[epoch][index][0] for share in several]), pixels)


def test_statistics_of_frozen_normalizations_are_left_alone():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(3), nn.BatchNorm1d(4, track_running_stats=False))
    module[1].eval()
    assert [len(statistic) for statistic in running_statistics(module)] == [2, 2]


def test_many_tensors_are_summed_a_bucket_at_a_time():
    """Counted in a group that doubles: no tensor is left out or summed twice, and no bucket grows beyond its size."""
    sizes = []

    class Doubling(World):
        def all_reduce_(self, tensor):
            sizes.append(tensor.numel())
            return tensor.mul_(2)

    tensors = [
        torch.ones(2, 3),
        torch.ones(BUCKET_NUMEL // 2),
        torch.ones(BUCKET_NUMEL // 2),
        torch.ones(BUCKET_NUMEL + 1),
        torch.ones(()),
    ]
    strided = torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last)
    Doubling(0, 2).all_reduce_many_([*tensors, strided])
    assert sizes == [6 + BUCKET_NUMEL // 2, BUCKET_NUMEL // 2, BUCKET_NUMEL + 1, 25]
    assert all(bool((tensor == 2).all()) for tensor in [*tensors, strided])
    Doubling(0, 1).all_reduce_many_(tensors)
    assert len(sizes) == 4


# --- two processes against one ----------------------------------------------------------------------------------------


def test_statistics_of_the_same_features_agree_to_1e_10(ranks):
    alone = worker.statistics(SINGLE_PROCESS)
    for found in (of(r, "statistics") for r in ranks):
        assert set(found) == set(alone)
        for name in ("classes", "count"):
            assert torch.equal(found[name], alone[name])
        assert gap(found["mean"], alone["mean"]) < 1e-10
        assert gap(found["gram"], alone["gram"]) < 1e-10
        assert torch.equal(found["one"], alone["one"])


def test_features_statistics_and_predictions_from_images_agree(ranks):
    alone = worker.images(SINGLE_PROCESS)
    for found in (of(r, "images") for r in ranks):
        assert set(found) == set(alone)
        for name in ("features", "augmented", "mean", "gram_packed"):
            assert gap(found[name], alone[name]) < 1e-6, name
        assert torch.equal(found["count"], alone["count"])
        assert torch.equal(found["scores"].argmax(1), alone["scores"].argmax(1))
        assert torch.equal(found["hits"], alone["hits"])


def test_training_in_shares_is_training_on_the_whole_batch(ranks):
    """Without batch normalization: cross-entropy and a norm over the batch, odd batches, augmentation, momentum."""
    alone = worker.training(SINGLE_PROCESS)
    first, second = (of(r, "training") for r in ranks)
    assert set(first) == set(second) == set(alone)
    for name, value in alone.items():
        assert torch.equal(first[name], second[name]), name
        assert gap(first[name], value) < 2e-5, name


def test_running_statistics_are_the_weighted_mean_of_the_shares(ranks):
    pixels = worker.normalization  # the five rows, in the order of the epoch
    data = worker.blobs()
    rows = torch.randperm(5, generator=generator("cpu", RngStream.EPOCH, 0, 0, 0))
    x = (torch.from_numpy(data.train.images[:5].copy())[rows] / 255 - 0.5) / 0.25
    shares = [x[:3], x[3:]]
    mean = sum(w * share.mean((0, 2, 3)) for w, share in zip((0.6, 0.4), shares, strict=True))
    variance = sum(w * share.var((0, 2, 3)) for w, share in zip((0.6, 0.4), shares, strict=True))
    for found in (of(r, "normalization") for r in ranks):
        torch.testing.assert_close(found["mean"], 0.1 * mean)
        torch.testing.assert_close(found["variance"], 0.9 + 0.1 * variance)
    torch.testing.assert_close(pixels(SINGLE_PROCESS)["mean"], 0.1 * mean)  # the mean of the whole batch


def test_what_processes_say_to_each_other(ranks):
    for rank, found in enumerate(of(r, "talk") for r in ranks):
        assert found["rows"].tolist() == [0, 1, 2, 3, 4]
        assert found["few"].tolist() == [1]
        assert [bool(found["none"]), bool(found["second"]), int(found["first"])] == [False, True, 0]
        assert found["given.a"].tolist() == [[7.0] * 3] * 2
        assert found["given.b"].tolist() == [True, False]
        assert found["given.c"].shape == (0, 4)
        told = bytes(found["told"].tolist()).decode()
        expected = [
            ["DataError 2 0 fails", "FailedOnOtherRank 2 ", "FailedOnOtherRank "],
            ["FailedOnOtherRank 2 ", "DataError 2 1 fails", "ConfigError it differs: 1 here, 0 in the first process"],
        ]
        assert told.startswith("; ".join(expected[rank]))


def test_one_process_of_a_machine_goes_first(ranks):
    assert [int(of(r, "turns")["before"]) for r in ranks] == [0, 1]


@pytest.mark.slow
def test_every_kind_of_training_runs_and_leaves_the_processes_equal(tmp_path):
    for code, _, err in ended(started([ROOT / "tests" / "support" / "distributed_worker.py", tmp_path, "methods"])):
        assert code == 0, err
    first, second = (of(load_tensors(tmp_path / f"rank-{rank}.safetensors")[0], "methods") for rank in range(2))
    assert set(first) == set(second)
    assert {name.partition(".")[0] for name in first if "." in name} == set(worker.WHOLE)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert not value.is_floating_point() or torch.isfinite(value).all(), name


# --- the command ------------------------------------------------------------------------------------------------------


def test_options_that_do_not_fit_several_processes_are_refused(monkeypatch):
    pair = World(1, 2, 1)
    with raises(ConfigError, "--sync-bn", "cpu"):
        Backend.choose("cpu", sync_bn=True)
    with raises(ConfigError, "--device cuda:1", 2, "--device cuda"):
        Backend.choose("cuda:1", world=pair)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with raises(ConfigError, "process 2", 1, "--nproc-per-node", "--device cpu"):
        Backend.choose("cuda", world=pair)
    assert Backend.choose("cpu", world=pair).name.endswith(", 2 processes")


def test_synchronized_normalization_takes_the_place_of_the_plain_one():
    backend = Cuda(torch.device("cpu"), world=World(0, 2), sync_bn=True)
    plain = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    names = list(plain.state_dict())
    module = backend.place(plain)
    assert isinstance(module[1], nn.SyncBatchNorm)
    assert list(module.state_dict()) == names  # checkpoints fit either
    alone = replace(backend, world=SINGLE_PROCESS).place(nn.Sequential(nn.BatchNorm2d(4)))
    assert type(alone[0]) is nn.BatchNorm2d


@pytest.mark.parametrize("command", ["reproduce", "demo", "teach"])
def test_commands_that_work_alone_say_so_under_torchrun(efcil, monkeypatch, command, tmp_path):
    for name, value in environment(0, 2, 1, TORCHELASTIC_RUN_ID="x").items():
        monkeypatch.setenv(name, value)
    code, _, err = efcil(command, *(["m", tmp_path] if command == "teach" else []))
    assert code == 2
    assert_names(err, f"efcil {command}", 2, "torchrun")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "works alone" not in efcil("reproduce")[2]


def test_a_repeated_signal_says_nothing_new_to_several_processes():
    """A cluster and torchrun both tell a process to end: the second one must not cut the saving short."""

    class Task:
        training, notes = True, []

        def __init__(self):
            self.stop = threading.Event()
            self.reporter = self

        def note(self, text):
            self.notes.append(text)

    run = Task()
    with stoppable([run], "", force_on_second=False):
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert run.stop.is_set()
    assert run.notes == ["finishing the step and saving"]
    with pytest.raises(Interrupted), stoppable([run], ""):  # noqa: PT012 (the second one raises)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)


def test_processes_of_one_machine_share_its_cores(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cores()))
    assert own_cores() == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert own_cores() == cores()


RUN = ["run", "dpcr", "digits", "--tasks", "5", "--json", "--checkpoint-seconds", "0"]
SETTINGS = ["width=4", "first.epochs=4", "first.milestones=[3]", "later.epochs=3", "later.milestones=[2]"]


def command(out, *more, methods=None):
    chosen = RUN if methods is None else ["compare", methods, *RUN[2:]]
    return ["-m", "efcil", *chosen, "--out", out, *(p for s in SETTINGS for p in ("--set", s)), *more]


def launched(out, *more, size=2, **how):
    """Start a run with torchrun itself."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--standalone"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    own = {**os.environ, "OMP_NUM_THREADS": "1", "EFCIL_COMMIT": commit()}
    return subprocess.Popen([*launcher, *map(str, command(out, *more, **how))], env=own, **pipes)


def children(pid):
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def told(process, wanted):
    """Read events until one fits."""
    for line in process.stdout:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if wanted(event):
                return event
    raise AssertionError(process.stderr.read())


def metrics(out):
    log = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    return log, {k: v for k, v in summary.items() if k not in ("seconds", "command")}


def whole(out):
    """No file of a run is half written, and none is a leftover."""
    for path in (out / "checkpoints").glob("*.safetensors"):
        load_tensors(path)
    assert not list(out.rglob(".*.tmp*"))
    assert all(json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("distributed") / "undisturbed"
    process = launched(out)
    ((code, said, err),) = ended([process])
    assert code == 0, err
    return out, said


@pytest.mark.slow
def test_under_torchrun_only_the_main_process_reports_and_writes(undisturbed):
    out, said = undisturbed
    events = [json.loads(line)["event"] for line in said.splitlines()]
    assert events.count("started") == events.count("finished") == 1
    assert events.count("epoch") == 4 + 4 * 3
    log, summary = metrics(out)
    assert len(log) == 16 + 5
    assert summary["world_size"] == 2
    assert summary["status"] == "complete"
    assert yaml.safe_load((out / "config.yaml").read_text())["machine"]["world_size"] == 2
    whole(out)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_one_process_killed_ends_all_and_the_run_goes_on(undisturbed, tmp_path, killed):
    out = tmp_path / "run"
    process = launched(out)
    told(process, lambda event: (event["event"], event.get("task"), event.get("epoch")) == ("epoch", 2, 1))
    (workers,) = [pids] if len(pids := children(process.pid)) == 2 else [pids[-2:]]
    os.kill(workers[killed], signal.SIGKILL)
    ((code, _, err),) = ended([process])
    assert code == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert "SIGKILL" in err
    # What a killed process was writing is a temporary file; nothing with a real name is half there.
    for path in (out / "checkpoints").glob("task-*.safetensors"):
        load_tensors(path)
    alone = tmp_path / "alone"
    shutil.copytree(out, alone)
    ((code, said, err),) = ended([launched(out, "--resume")])
    assert code == 0, err
    assert "resuming after task" in said
    assert metrics(out) == metrics(undisturbed[0])  # the same number of processes: to the last bit
    ((code, said, err),) = ended(
        [
            subprocess.Popen(
                [sys.executable, *map(str, command(alone, "--resume"))],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        ]
    )
    assert code == 0, err
    assert "the run began on another machine" in said
    log, summary = metrics(alone)
    assert summary["status"] == "complete"
    assert [(e["task"], e.get("epoch")) for e in log] == [(e["task"], e.get("epoch")) for e in metrics(out)[0]]
    whole(alone)


@pytest.mark.slow
def test_a_signal_to_torchrun_saves_and_the_run_goes_on(undisturbed, tmp_path):
    out, more = tmp_path / "run", []
    for _ in range(4):  # tasks are short: on a busy machine the signal may come after the one that it was sent in
        process = launched(out, "--checkpoint-seconds", "1000", *more)
        told(process, lambda event: event["event"] == "epoch" and event["epoch"] == 1 < event["task"])
        process.send_signal(signal.SIGTERM)
        ((_, said, err),) = ended([process])
        assert "finishing the step and saving" in said
        (line,) = [line for line in err.splitlines() if line.startswith("efcil: ")]  # torchrun names the signal as well
        assert_names(line, "SIGTERM", f"efcil resume {out}")
        whole(out)
        if in_the_middle := list((out / "checkpoints").glob("task-*-epoch-*.safetensors")):
            break
        more = ["--resume"]
    assert in_the_middle, "of a task"
    ((code, _, err),) = ended([launched(out, "--resume")])
    assert code == 0, err
    assert metrics(out) == metrics(undisturbed[0])


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_the_same_step(undisturbed, tmp_path):
    """Also where only one of several machines is taken away; each process ends with 128 + the signal's number."""
    out = tmp_path / "run"
    processes = started(command(out))
    told(processes[0], lambda event: (event["event"], event.get("task"), event.get("epoch")) == ("epoch", 2, 1))
    processes[1].send_signal(signal.SIGTERM)
    found = ended(processes)
    assert [code for code, _, _ in found] == [128 + signal.SIGTERM] * 2, found
    whole(out)
    assert "interrupted" in found[0][2] + found[1][2]
    # One process may become several.
    ((code, _, err),) = ended(started(command(out, "--resume"), size=1))
    assert code == 0, err
    assert metrics(out)[1]["status"] == "complete"


@pytest.mark.slow
def test_a_process_whose_partner_is_gone_ends_by_itself(tmp_path):
    processes = started(command(tmp_path / "run"))
    told(processes[0], lambda event: event["event"] == "epoch")
    processes[1].kill()
    (code, _, err), _ = ended(processes)
    assert code == 3
    assert_names(err, f"efcil: {LOST}", "--resume")


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_two(tmp_path):
    out = tmp_path / "run"
    (process,) = started(command(out), size=1)
    told(process, lambda event: (event["event"], event.get("task"), event.get("epoch")) == ("epoch", 2, 1))
    process.send_signal(signal.SIGTERM)
    assert ended([process])[0][0] == 128 + signal.SIGTERM
    found = ended(started(command(out, "--resume")))
    assert [code for code, _, _ in found] == [0, 0], found
    assert found[1][1] == found[1][2] == ""
    assert metrics(out)[1]["status"] == "complete"
    (again,) = ended(started(command(out, "--resume"), size=1))
    assert "this run is finished" in again[1]
    refused = ended(started(command(out)))
    assert [code for code, _, _ in refused] == [2, 2]
    assert_names(refused[0][2], out, "dpcr", "--resume", "--out")
    assert refused[1][2] == ""  # it is told once


@pytest.mark.slow
def test_several_methods_and_orders_are_compared(tmp_path):
    methods = "dpcr,ldc,adc,sdc,fecam,lwf"
    found = ended(started(command(tmp_path / "run", "--orders", "identity,7", "--tasks", "2", methods=methods)))
    assert [code for code, _, _ in found] == [0, 0], found
    for order in ("identity", "7"):
        for method in methods.split(","):
            summary = json.loads((tmp_path / "run" / f"order-{order}" / method / "summary.json").read_text())
            assert summary["status"] == "complete"
    assert (tmp_path / "run" / "report.html").exists()
    refused = ended(
        started(command(tmp_path / "no", "--orders", "identity,7", "--concurrent-runs", "2", methods="dpcr,lwf"))
    )
    assert_names(refused[0][2], "--concurrent-runs 2", "2 processes")


@pytest.mark.slow
def test_a_decoded_cache_is_built_once(tmp_path):
    from PIL import Image

    colors = {"red": (200, 0, 0), "blue": (0, 0, 200), "green": (0, 200, 0), "grey": (90, 90, 90)}
    for name, color in colors.items():
        (tmp_path / "images" / name).mkdir(parents=True)
        for index in range(12):
            Image.new("RGB", (16, 16), tuple(c + index for c in color)).save(
                tmp_path / "images" / name / f"{index}.png"
            )
    arguments = ["-m", "efcil", "run", "lwf-ncm", "folder", "--data", tmp_path / "images", "--tasks", "2", "--json"]
    arguments += ["--set=data.short_side=8", "--set=width=4", "--set=first.epochs=1", "--set=later.epochs=1"]
    arguments += ["--set", "first.milestones=[]", "--set", "later.milestones=[]", "--out", tmp_path / "run"]
    found = ended(started(arguments, EFCIL_CACHE=tmp_path / "cache"))
    assert [code for code, _, _ in found] == [0, 0], found
    decoded = [line for _, out, err in found for line in (out + err).splitlines() if "decoding" in line]
    assert len(list((tmp_path / "cache").rglob("*.npy"))) == 1, decoded


# A thread of the group that lets go of a tensor while Python ends aborts the process: none may be left by then.
LEFT = """
import contextlib, os, sys, time, torch
from efcil.errors import EfcilError
from efcil.training.distributed import init_distributed
torch.set_num_threads(1)
try:
    with init_distributed() as group:
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # imports what keeps a group that exists
        group.barrier()
        if sys.argv[1] == "refused":
            raise EfcilError("refused")
except EfcilError as error:
    print(error)
def left():
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            with open(f"/proc/self/task/{thread}/comm") as file:
                names.append(file.read())
    return [name for name in names if "gloo" in name]
end = time.monotonic() + 10
while left() and time.monotonic() < end:  # one that was waited for is listed a moment longer
    time.sleep(0.01)
print(left())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed in /proc")
@pytest.mark.parametrize("end", ["done", "refused"])
def test_no_thread_of_the_group_outlives_it(end):
    for rank, (code, out, err) in enumerate(ended(started(["-c", LEFT, end]))):
        assert (code, err) == (0, "")
        said = [] if end == "done" else ["process 2 of 2: refused" if rank else "refused"]
        assert out.splitlines() == [*said, "[]"]


# --- examples ---------------------------------------------------------------------------------------------------------

CLUSTER = ROOT / "examples" / "cluster"
DOC = ROOT / "docs" / "distributed.md"


def torchrun_commands(text):
    """The one call of torchrun in a text: its own options, read by its own parser, and the words after `efcil`."""
    (found,) = re.findall(r"\btorchrun (-[^\n|&;]+)", text.replace("\\\n", " ").replace("$(NODE_RANK)", "1"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = get_args_parser().parse_args(shlex.split(found.replace("'", "")))
    assert (read.module, read.training_script) == (True, "efcil")
    return read, read.training_script_args


@pytest.mark.parametrize("path", sorted(CLUSTER.glob("*.sbatch")), ids=lambda path: path.name)
def test_slurm_examples_are_sound(path):
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text(encoding="utf-8")
    for needed in ("#SBATCH --requeue", "#SBATCH --signal=B:TERM@", "#SBATCH --open-mode=append", "scontrol requeue"):
        assert needed in text
    (launcher, words) = torchrun_commands(text)
    assert f"#SBATCH --gpus-per-node={launcher.nproc_per_node}\n" in text
    assert launcher.rdzv_backend == "c10d"
    assert misspelt(words) == []
    assert "--resume" in words


def test_the_commands_of_the_page_exist_with_their_options():
    lines = [line for line in DOC.read_text(encoding="utf-8").splitlines() if line.startswith("torchrun -")]
    assert len(lines) > 3
    for line in lines:
        assert misspelt(torchrun_commands(line)[1]) == []


STUBS = {
    "scontrol": 'echo "$@" >> "$LOG"; [[ $1 == show ]] && echo node7 || true',
    "srun": 'exec "$@"',  # as srun does, a signal reaches what it runs
    "torchrun": """trap 'echo saved >> "$LOG"; exit 1' TERM; echo "$@" >> "$LOG"; echo up >> "$LOG"
        for _ in $(seq 1200); do sleep 0.1; [[ -e "$LOG.end" ]] && exit "$(cat "$LOG.end")"; done""",
}


@pytest.mark.parametrize(("ending", "code", "again"), [("TERM", 1, True), ("0", 0, False), ("3", 3, False)])
def test_the_slurm_example_is_requeued_when_it_is_asked_to_end(tmp_path, ending, code, again):
    """The script itself, with stand-ins for Slurm and torchrun: a signal is handed on, waited for, and requeued."""
    log = tmp_path / "log"
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    own = {"LOG": log, "DATA": "d d", "OUT": "o", "SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[7-8]"}
    own |= {"SLURM_JOB_NUM_NODES": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
    with subprocess.Popen(["bash", CLUSTER / "slurm.sbatch"], env=environment) as process:
        deadline = time.monotonic() + 120
        while not (log.exists() and "up" in log.read_text().splitlines()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if ending == "TERM":
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
        else:
            Path(f"{log}.end").write_text(ending)
        assert process.wait(120) == code
    lines = log.read_text().splitlines()
    assert ("saved" in lines, "requeue 41" in lines) == (again, again)
    assert "--rdzv-endpoint node7:29500 --rdzv-id 41-0" in lines[1]


def test_the_kubernetes_example_is_sound():
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text(encoding="utf-8"))
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert service["spec"]["clusterIP"] == "None"  # a word, not null
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy demands
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    (container,) = pod["containers"]
    launcher, words = torchrun_commands(shlex.join([*container["command"], *container["args"]]))
    assert spec["completionMode"] == "Indexed"
    assert int(launcher.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(launcher.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert launcher.master_addr == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert {"name": "NODE_RANK", "valueFrom": container["env"][0]["valueFrom"]} == container["env"][0]
    assert misspelt(words) == []
    assert "--resume" in words
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    patience = next(int(e["value"]) for e in container["env"] if e["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert patience < pod["terminationGracePeriodSeconds"]
