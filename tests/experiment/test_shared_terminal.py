"""Several runs on one terminal: each says which it is, and one bar is over all of them."""

import io

import pytest
from rich.console import Console

from efcil.experiment import reporters
from efcil.experiment.reporters import JsonReporter, LineReporter, PrefixReporter, Reporter, TerminalReporter
from efcil.experiment.shared_terminal import reporters_of_runs
from efcil.training.trainer import EpochReport

EPOCHS = [2, 2]
TITLES = ["order 1, lwf", "order 2, lwf"]


@pytest.fixture
def now(monkeypatch):
    """Seconds of a clock that a test moves."""
    clock = [100.0]
    monkeypatch.setattr(reporters.time, "monotonic", lambda: clock[0])
    return clock


@pytest.fixture
def terminal(now):
    """A reporter on a terminal of 80 columns."""
    reporter = TerminalReporter()
    reporter.console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    reporter.bars.live.console = reporter.console
    yield reporter
    reporter.close()


def bars(terminal):
    """What each bar says, by its label."""
    return {bar.description: (bar.completed, bar.fields["words"]) for bar in terminal.bars.tasks}


def epoch(run, task, number):
    run.on_epoch(EpochReport(task, number, 2, 0.5, 0.1))


def test_a_bar_is_over_all_runs_and_one_below_it_of_each(terminal, now):
    one, two = reporters_of_runs(terminal, TITLES)
    one.on_started("title", EPOCHS, 0)
    assert bars(terminal) == {"all 2 runs": (0, "0%"), "order 1, lwf  task 1/2": (0, "")}
    now[0] += 10
    epoch(one, 0, 0)
    assert bars(terminal)["all 2 runs"] == (0.25, "12%  about 0:01:10 left")
    assert bars(terminal)["order 1, lwf  task 1/2"][0] == 1
    epoch(one, 1, 1)
    one.on_finished([], "runs/x")
    two.on_started("title", EPOCHS, 0)
    now[0] += 10
    epoch(two, 0, 1)
    assert {*bars(terminal)} == {"all 2 runs", "order 2, lwf  task 1/2"}
    assert bars(terminal)["all 2 runs"] == (1.5, "75%  about 0:00:06 left")
    assert "loss" not in bars(terminal)["order 2, lwf  task 1/2"][1], "there is no room for it"


def test_what_was_done_before_does_not_make_the_rest_look_short(terminal, now):
    one, two = reporters_of_runs(terminal, TITLES)
    one.on_finished([], "runs/x")  # without a start: it was finished
    two.on_started("title", EPOCHS, 2)
    now[0] += 30
    epoch(two, 1, 0)
    assert bars(terminal)["all 2 runs"] == (1.75, "88%  about 0:00:30 left")


def test_lines_say_of_which_run_they_are_and_measures_are_explained_once(terminal):
    for run, title in zip(reporters_of_runs(terminal, TITLES), TITLES, strict=True):
        run.on_started("title", EPOCHS, 0)
        run.on_task(0, 2, {"dpcr": 50.0, "lwf": 40.0})
        run.note("something")
        assert f"note: {title}: something" in terminal.console.file.getvalue()
        run.close()  # the bars are of all
    told = terminal.console.file.getvalue()
    assert told.count("A_t: accuracy over the classes seen so far") == 1
    for title in TITLES:
        assert f"{title}  task 1/2  A_t  dpcr 50.00  lwf 40.00" in told


def test_elsewhere_lines_have_a_title_and_the_rest_is_as_it_was():
    lines = reporters_of_runs(LineReporter(), TITLES)
    assert [type(one) for one in lines] == [PrefixReporter, PrefixReporter]
    for reporter in (JsonReporter(), Reporter()):
        assert reporters_of_runs(reporter, TITLES) == [reporter, reporter]
    alone = TerminalReporter()
    assert reporters_of_runs(alone, ["order 1"]) == [alone]
