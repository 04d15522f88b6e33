"""Trackers: every step once, in the right place, wherever the run was stopped; a missing package is told."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from efcil.accel.backend import Backend
from efcil.errors import ConfigError
from efcil.experiment.reporters import Reporter
from efcil.experiment.run import Run, RunOptions
from efcil.experiment.run_directory import MetricsLog
from efcil.experiment.specification import ExperimentSpec, resolve
from efcil.experiment.tracking import TensorBoard, Tracker, trackers
from messages import assert_names, raises

EPOCH = {"loss": 0.5, "lr": 0.1}
LINES = [
    {"task": 1, "epoch": 1, **EPOCH},
    {"task": 1, "epoch": 2, **EPOCH},
    {"task": 1, "A_t": {"dpcr": 90.0, "lwf": 80.0}},
    {"task": 2, "epoch": 1, "loss": 0.25, "lr": 0.01},
    {"task": 2, "A_t": {"dpcr": 70.0, "lwf": 60.0}},
]


class Kept(Tracker):
    """Remembers what it is told."""

    def __init__(self):
        super().__init__()
        self.seen, self.closed = [], 0

    def write(self, values):
        self.seen += [(self.step, name, value) for name, value in values.items()]

    def close(self):
        self.closed += 1


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package: runs by id, each with a history of (step, values); steps only rise."""

    class FakeRun:
        def __init__(self):
            self.history, self.finished = [], 0

        @property
        def step(self):
            return max((step for step, _ in self.history), default=-1) + 1

        def define_metric(self, name, step_metric=None):
            assert (name, step_metric) in (("epoch", None), ("*", "epoch"))

        def log(self, values, step):
            assert step >= self.step, "W&B drops what comes for a step that is closed"
            self.history.append((step, values))

        def finish(self):
            self.finished += 1

    runs, calls = {}, []

    def init(**arguments):
        calls.append(arguments)
        return runs.setdefault(arguments["id"], FakeRun())

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return SimpleNamespace(runs=runs, calls=calls)


def scalars(directory):
    """What TensorBoard reads from a directory: (tag, step) -> values."""
    from tensorboard.backend.event_processing.directory_watcher import DirectoryWatcher
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = {}
    for event in DirectoryWatcher(str(directory), EventFileLoader).Load():
        for value in event.summary.value:
            number = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
            found.setdefault((value.tag, event.step), []).append(pytest.approx(number))
    return found


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_step_is_an_epoch_and_accuracies_stand_where_the_task_ends():
    tracker = Kept()
    tracker.begin(LINES[:3])
    for line in LINES[3:]:
        tracker.add(line)
    assert tracker.seen == [
        *[(1, "train/loss", 0.5), (1, "train/lr", 0.1), (2, "train/loss", 0.5), (2, "train/lr", 0.1)],
        *[(2, "A_t/dpcr", 90.0), (2, "A_t/lwf", 80.0), (3, "train/loss", 0.25), (3, "train/lr", 0.01)],
        *[(3, "A_t/dpcr", 70.0), (3, "A_t/lwf", 60.0)],
    ]


def test_a_task_without_epochs_is_a_step_of_its_own():
    tracker = Kept()
    tracker.begin([LINES[0], *({"task": task, "A_t": {"acil": float(task)}} for task in (1, 2, 3))])
    assert tracker.seen[2:] == [(1, "A_t/acil", 1.0), (2, "A_t/acil", 2.0), (3, "A_t/acil", 3.0)]


def test_the_log_tells_what_is_left_after_a_cut_and_each_new_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES) + '{"task": 3, "ep')
    tracker = Kept()
    log = MetricsLog(path, [tracker])
    log.truncate(1, 0)
    log.add(task=2, epoch=1, loss=0.125, lr=0.01)
    log.close()
    assert [entry for entry in tracker.seen if entry[1] == "train/loss"] == [
        (1, "train/loss", 0.5),
        (2, "train/loss", 0.5),
        (3, "train/loss", 0.125),
    ]
    assert tracker.closed == 1
    assert [json.loads(line) for line in path.read_text().splitlines()][:3] == LINES[:3]


# --- a run that is stopped and goes on --------------------------------------------------------------------------------

TINY = ("width=2", "first.epochs=2", "later.epochs=1", "first.milestones=[]", "later.milestones=[]")


def stopped_and_resumed(out, names):
    """Run three tasks' epochs: stop in the second task, as after a kill, then go on."""
    experiment = resolve(ExperimentSpec(("lwf-ncm",), "digits", tasks=5, overrides=TINY))

    class Stops(Reporter):
        def on_epoch(self, report):
            if report.task == 2:
                raise KeyboardInterrupt

    def run(voice):
        follow = trackers(names, out, experiment.fingerprint())
        return Run(experiment, out, Backend.choose("cpu"), voice, RunOptions(command="efcil test", trackers=follow))

    with pytest.raises(KeyboardInterrupt):
        run(Stops()).execute(False)
    run(Reporter()).execute(True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def expected(lines):
    tracker = Kept()
    tracker.begin(lines)
    return {(name, step): [pytest.approx(value)] for step, name, value in tracker.seen}


def test_tensorboard_holds_every_step_once_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    lines = stopped_and_resumed(tmp_path / "run", ["tensorboard"])
    found = {
        key: [float(str(v.expected)) for v in values] for key, values in scalars(tmp_path / "run/tensorboard").items()
    }
    assert found == expected(lines)
    assert sorted({step for _, step in found}) == [1, 2, 3, 4, 5, 6]


def test_wandb_takes_the_run_up_and_logs_every_step_once(tmp_path, wandb):
    lines = stopped_and_resumed(tmp_path / "run", ["wandb"])
    ((name, run),) = wandb.runs.items()
    assert [call["resume"] for call in wandb.calls] == ["allow", "allow"]
    assert (tmp_path / "run/wandb-id").read_text() == name
    found = {}
    for _, values in run.history:
        for key in set(values) - {"epoch"}:
            found.setdefault((key, values["epoch"]), []).append(values[key])
    assert found == expected(lines)
    assert [step for step, _ in run.history] == list(range(len(lines)))
    assert run.finished == 2
    assert wandb.calls[0]["config"]["dataset"] == "digits"


def test_another_run_is_another_wandb_run(tmp_path, wandb):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tracker,) = trackers(["wandb"], tmp_path / name, {})
        tracker.begin(LINES)
    assert len(wandb.runs) == 2


def test_files_of_others_stay(tmp_path):
    pytest.importorskip("tensorboard")
    place = tmp_path / "tensorboard"
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    (place / "events.out.tfevents.1.old").write_bytes(b"")
    tracker = TensorBoard(tmp_path, {})
    tracker.begin([])
    tracker.close()
    left = sorted(path.name for path in place.iterdir())
    assert "notes.txt" in left
    assert "events.out.tfevents.1.old" not in left


# --- the option -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_reported_before_anything_is_written(efcil, tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    code, _, err = efcil("run", "dpcr", "digits", "--log", name, "--out", tmp_path / "run")
    assert code == 2
    assert_names(err, f"--log {name}", f"pip install 'efcil[{name}]'")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_an_unknown_name_is_reported(tmp_path):
    with raises(ConfigError, "--log tensorbord", "'tensorboard'"):
        trackers(["tensorbord"], tmp_path, {})


def test_compare_logs_every_method(efcil, tmp_path, wandb):
    quick = [part for setting in TINY for part in ("--set", setting)]
    (tmp_path / "c.yaml").write_text("log: wandb\ntasks: 2\n")
    out = tmp_path / "all"
    code, _, err = efcil(
        *(
            "compare",
            "lwf-ncm,lwf",
            "digits",
            "--config",
            tmp_path / "c.yaml",
            "--out",
            out,
            "--quiet",
            "--log",
            "wandb",
        ),
        *quick,
    )
    assert (code, err) == (0, "")
    (run,) = wandb.runs.values()
    names = {name for _, values in run.history for name in values}
    assert names == {"epoch", "train/loss", "train/lr", "A_t/lwf-ncm", "A_t/lwf"}
    assert (out / "wandb-id").exists()
    assert wandb.calls[0]["project"] == "efcil"


def test_nothing_of_it_is_imported_before_it_is_asked_for():
    optional = ("tensorboard", "wandb", "torch")
    code = f"import sys, efcil.experiment.tracking; print([m for m in {optional} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
