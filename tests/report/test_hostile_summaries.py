"""Summaries of strangers: a number in one may stand for a page of any length, a name for a command to the terminal."""

import json
import random
import shutil

import pytest

from efcil.errors import FileRefusedError, RunError
from efcil.experiment.reevaluate import write_results
from efcil.experiment.tuning import TUNE_FILES
from efcil.experiment.tuning import write as write_trials
from efcil.files import MARKER
from efcil.report import load_summaries
from efcil.report.load import MOST_TASKS, Run
from efcil.report.write import REPORT_FILES, write_report

SEED = 29
SOUND = {"method": "dpcr", "dataset": "digits", "tasks": 2, "task_sizes": [5, 5], "A_t": [50.0, 40.0], "seed": 1}


def hostile_summaries():
    """Twenty-four changes that made reports take minutes and gigabytes."""
    rng = random.Random(SEED)
    for number in range(24):
        many = rng.randrange(MOST_TASKS + 1, 40_000)
        yield [
            {"tasks": rng.choice([10**6, 10**18, 1e300, many])},
            {"A_t": [1.0] * many, "tasks": many},
            {"task_sizes": [1] * many},
            {"matrix": [[1.0] * many]},
            {"matrix": [[]] * many},
            {"heads": {str(i): {"A_f": 1.0} for i in range(rng.randrange(33, 3000))}},
            {"options": {str(i): i for i in range(many)}},
            {"class_names": ["a"] * (100_000 + many)},
        ][number % 8]


def write(place, **values):
    place.mkdir()
    (place / "summary.json").write_text(json.dumps({**SOUND, **values}), encoding="utf-8")
    return place


def test_summaries_that_stand_for_more_than_a_page(tmp_path):
    for number, values in enumerate(hostile_summaries()):
        with pytest.raises(RunError, match="|".join(f"'{key}'" for key in values)):
            load_summaries(write(tmp_path / str(number), **values))


def test_odd_summaries_are_read():
    deep: dict = {}
    for _ in range(900):
        deep = {"a": deep}
    run = Run.of({**SOUND, "options": deep, "threads": 1e300, "command": "x" * 10**6})
    assert len(run.command) == 10_000


def test_names_that_a_terminal_would_obey_are_escaped():
    run = Run.of({**SOUND, "method": "dpcr\x1b[2J", "dataset": "\x9b31m", "device": "a\x07b", "commit": "\u202ec"})
    assert (run.method, run.dataset, run.device, run.commit) == ("dpcr\\x1b[2J", "\\x9b31m", "a\\x07b", "\\u202ec")


@pytest.mark.parametrize("seed", range(24))
def test_files_of_others_are_not_replaced_by_results(tmp_path, seed):
    """Before: whatever had the name of a page, a table or a curve was replaced, with rc 0."""
    draw, run = random.Random(seed), load_summaries(write(tmp_path / "run"))
    kind, name = ("report", "evaluation", "tuning")[seed % 3], draw.choice(REPORT_FILES)
    place = tmp_path / "mine"
    if kind == "evaluation":
        name = draw.choice(["report.html", "dpcr/summary.json"])
    elif kind == "tuning":
        name = draw.choice(TUNE_FILES)
    victim = place / name
    victim.parent.mkdir(parents=True)
    (tmp_path / "thesis").write_text("years of work")
    if draw.random() < 0.4:
        victim.symlink_to(tmp_path / draw.choice(["thesis", "nowhere"]))
    else:
        victim.write_text("years of work")
    if draw.random() < 0.5:
        (place / MARKER).write_text(draw.choice(["", "[]", '{"kind": "efcil serving"}', '{"kind": 1}']))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def save():
        if kind == "report":
            write_report(run, place)
        elif kind == "evaluation":
            write_results(run, place, quiet=True)
        else:
            write_trials([], place, "", {"set": []})

    with pytest.raises(FileRefusedError, match=name.partition("/")[0]):
        save()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    if kind != "tuning":  # what was written by efcil is replaced
        shutil.rmtree(place)
        save()
        save()


@pytest.mark.slow
def test_a_report_of_two_hundred_tasks(tmp_path):
    """Before: 5.7 GB, for the picture of its matrix grew with the tasks."""
    matrix = [[50.0] * (row + 1) for row in range(200)]
    place = write(tmp_path / "run", tasks=200, A_t=[50.0] * 200, task_sizes=[1] * 200, matrix=matrix)
    files = write_report(load_summaries(place), tmp_path / "report")
    assert files["matrix-dpcr.png"].stat().st_size < 2_000_000
