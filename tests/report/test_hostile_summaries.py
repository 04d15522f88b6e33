"""Summaries of strangers: a number in one may stand for a page of any length, a name for a command to the terminal."""

import json
import random

import pytest

from efcil.errors import RunError
from efcil.report import load_summaries
from efcil.report.load import MOST_TASKS, Run
from efcil.report.write import write_report

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


@pytest.mark.slow
def test_a_report_of_two_hundred_tasks(tmp_path):
    """Before: 5.7 GB, for the picture of its matrix grew with the tasks."""
    matrix = [[50.0] * (row + 1) for row in range(200)]
    place = write(tmp_path / "run", tasks=200, A_t=[50.0] * 200, task_sizes=[1] * 200, matrix=matrix)
    files = write_report(load_summaries(place), tmp_path / "report")
    assert files["matrix-dpcr.png"].stat().st_size < 2_000_000
