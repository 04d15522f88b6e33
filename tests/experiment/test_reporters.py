"""What a run says as it goes: the task in training, how fast it is, and the time that is left."""

import io

import pytest
from rich.console import Console

from efcil.experiment import reporters
from efcil.experiment.reporters import LineReporter, Pace, TerminalReporter
from efcil.training.trainer import EpochReport

EPOCHS = [3, 2, 2]


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""

    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(reporters.time, "monotonic", clock)
    return clock


@pytest.fixture
def terminal(clock):
    """A reporter on a terminal of 80 columns; `shown` is what its bar says."""
    reporter = TerminalReporter()
    reporter.console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    reporter.bars.live.console = reporter.console
    yield reporter
    reporter.close()


def shown(reporter):
    (bar,) = reporter.bars.tasks
    return bar.description, bar.completed, bar.fields["words"]


def test_pace_counts_epochs_and_images(clock):
    pace = Pace(EPOCHS, 3)
    assert pace.seconds_left is None
    assert pace.task_in_training() == 1
    pace.count(600)
    clock.now += 2
    pace.advance(1, 0.5)
    pace.measure()
    assert pace.rate == 300
    assert pace.seconds_left == pytest.approx(2 / 0.5 * 3.5)
    pace.count(50)
    clock.now += 100
    pace.restart()  # statistics were updated meanwhile
    pace.measure()
    assert pace.rate == 300
    pace.advance(2, 2)
    assert pace.seconds_left == 0


def test_a_long_epoch_advances_the_bar_and_has_a_time_left(terminal, clock):
    terminal.on_started("title", EPOCHS, 0)
    assert shown(terminal) == ("task 1/3", 0, "")
    for step in range(1, 51):
        clock.now += 1
        terminal.on_step(0, 0, step, 100, 128)
    description, completed, words = shown(terminal)
    assert description == "task 1/3"
    assert completed == 0.5
    assert words == "epoch 1/3  128 images/s  0:10:50 left"


def test_steps_are_looked_at_ten_times_a_second_at_most(terminal, clock):
    terminal.on_started("title", EPOCHS, 0)
    clock.now += 1
    for step in range(1, 90):
        terminal.on_step(0, 0, step, 100, 1)
        clock.now += 0.001
    assert shown(terminal)[1] == 0.01


def test_the_label_is_that_of_the_task_in_training(terminal, clock):
    terminal.on_started("title", EPOCHS, 3)  # resumed after the first task
    assert shown(terminal)[:2] == ("task 2/3", 3)
    clock.now += 1
    terminal.on_epoch(EpochReport(1, 1, 2, 1.25, 0.1))
    assert shown(terminal)[0] == "task 2/3"
    assert "loss 1.250" in shown(terminal)[2]
    terminal.on_solve(1)
    assert shown(terminal)[0] == "task 2/3"
    assert "updating statistics" in shown(terminal)[2]
    terminal.on_task(1, 3, {"dpcr": 50.0})
    assert shown(terminal)[0] == "task 3/3"
    assert "loss" not in shown(terminal)[2]


def test_the_measures_are_explained_where_they_are_first_seen(terminal):
    terminal.on_started("title", EPOCHS, 0)
    for task in range(2):
        terminal.on_task(task, 3, {"dpcr": 50.0})
    told = terminal.console.file.getvalue()
    assert told.count("A_t: accuracy over the classes seen so far") == 1
    assert told.index("A_t: ") < told.index("task  1/3")
    summary = {"method": "dpcr", "A_f": 1.0, "A_avg": 2.0, "old": [None], "new": [3.0], "forgetting": [None]}
    terminal.on_finished([summary], "runs/x")
    told = " ".join(terminal.console.file.getvalue().split())
    assert "A_f: accuracy after the last task, A_avg: mean accuracy over all tasks (%)." in told


def test_lines_say_how_far_a_long_epoch_is(capsys, clock):
    reporter = LineReporter()
    reporter.on_started("title", EPOCHS, 0)
    for step in range(1, 101):
        clock.now += 0.4
        reporter.on_step(0, 0, step, 100, 64)
    assert capsys.readouterr().out.splitlines() == [
        "title",
        "task 1, epoch 1 of 3, step 38 of 100, 160 images/s, 0:04:24 left",
        "task 1, epoch 1 of 3, step 76 of 100, 160 images/s, 0:04:09 left",
    ]


def test_a_run_reports_its_steps(tmp_path, backend):
    """Each step of each epoch once, in order, with the images that it saw."""
    from efcil.experiment.run import Run
    from efcil.experiment.specification import ExperimentSpec, resolve

    steps = []

    class Recorder(reporters.Reporter):
        def on_step(self, *about):
            steps.append(about)

    small = ("width=2", "batch_size=200", "first.epochs=2", "later.epochs=1", "first.milestones=[]")
    experiment = resolve(ExperimentSpec(("lwf",), "digits", tasks=5, overrides=(*small, "later.milestones=[]")))
    Run(experiment, tmp_path / "r", backend, Recorder()).execute(resume=False)
    first = [about for about in steps if about[0] == 0]
    assert first == [(0, epoch, step, 2, 200) for epoch in range(2) for step in (1, 2)]
    assert {about[0] for about in steps} == set(range(5))


@pytest.mark.parametrize(
    ("method", "increment", "noted"), [("dpcr", "2,1,1", True), ("dpcr", "2,2", False), ("fecam", "2,1,1", False)]
)
def test_tasks_of_one_class_get_a_note(efcil, tmp_path, method, increment, noted):
    small = ["width=2", "backbone=resnet10", "first.epochs=1", "later.epochs=1"]
    small += ["data.classes=4", "data.size=8", "data.train_per_class=12", "data.test_per_class=2"]
    settings = [part for setting in small for part in ("--set", setting)]
    code, out, err = efcil(
        "run", method, "glyphs", "--increment", increment, "--device", "cpu", "--out", tmp_path / "r", *settings
    )
    assert code == 0, err
    assert ("--init-cls" in out + err) == noted
