"""The figures of docs/results and the ledger are made of the same summaries, and say the same."""

import json
import re
from pathlib import Path

import pytest

from efcil import reproduce
from efcil.reproduce import NAMES, ReproduceRequest
from efcil.reproduce.result_index import ResultIndex
from tools import results_tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "results"
DRAWN = ("curves", "cip", "balance")  # from stored summaries; the others from what runs kept beside them


@pytest.fixture(scope="module")
def made():
    """Numbers of the figures as they are made now, without the pictures."""
    index, request = ResultIndex(), ReproduceRequest(ROOT)
    cells = [cell for name in DRAWN for cell in NAMES[name].run_keys(request)]
    index.read([ROOT / "results"], cells, ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduce, "curve_figure", lambda *_: None)
        for drawing in ("cip_figure", "balance_figure"):
            patch.setattr(reproduce.figures, drawing, lambda *_: None)
        return {name: NAMES[name].make(NAMES[name], index, request) for name in DRAWN}


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_shows_what_the_summaries_say(name, made):
    assert json.loads((PAGES / f"{name}.json").read_text()) == json.loads(made[name]["json"]), (
        f"run `efcil reproduce {name} --from results --out docs/results`"
    )


def test_figures_and_ledger_agree(made):
    sections = {s.title: s for s in results_tables.sections_of(results_tables.read_entries(ROOT / "results"), {})}
    compared = 0
    for title, methods in json.loads(made["balance"]["json"]).items():
        rows = {row.label: row for row in sections[title].rows}
        for method, numbers in methods.items():
            assert rows[method].value("A_f").mean == pytest.approx(numbers["A_f"], abs=0.005)
            compared += 1
    for curve in json.loads(made["curves"]["json"]):
        rows = {row.label: row for row in sections[f"{curve['dataset']}, T = {curve['tasks']}"].rows}
        runs = rows[curve["method"]].orders[curve["order"]]
        assert sum(run.A_f for run in runs) / len(runs) == pytest.approx(curve["A_t"][-1], abs=0.005)
        compared += 1
    assert compared > 40


def test_what_the_research_log_learned_from_the_ablation_is_in_the_results():
    text = " ".join((ROOT / "docs" / "dev" / "research-log.md").read_text(encoding="utf-8").split())
    entries = results_tables.read_entries(ROOT / "results")
    runs = [entry.run for entry in entries if entry.name.startswith(results_tables.ABLATION)]

    def lost(without, tasks):
        of_split = {run.method: run.A_f for run in runs if run.tasks == tasks}
        return of_split["dpcr-plus"] - of_split[f"dpcr-plus:{without}"]

    said = re.search(r"`dpcr-plus` loses ([\d.]+) points of A\\_f at T = 10 and ([\d.]+) at T = 20", text).groups()
    assert [float(value) for value in said] == pytest.approx([lost("shift_view=clean", t) for t in (10, 20)], abs=0.051)
    said = re.search(r"was not trained for\*\*: ([\d.]+) and ([\d.]+) points", text).groups()
    stages = [lost("use_stages=0:gram_storage=gram:gram_rank=null", tasks) for tasks in (10, 20)]
    assert [float(value) for value in said] == pytest.approx(stages, abs=0.051)


def test_what_flip_averaging_gives_is_in_the_results():
    page = " ".join((ROOT / "docs" / "dpcr-plus.md").read_text(encoding="utf-8").split())
    log = " ".join((ROOT / "docs" / "dev" / "research-log.md").read_text(encoding="utf-8").split())
    runs = [json.loads(line) for line in (ROOT / "results" / "research.jsonl").read_text(encoding="utf-8").splitlines()]

    def mean(what, plus, key="A_f"):
        found = [run for run in runs if run.get("what") == f"ten tasks, 20 + 10 epochs: {what}"]
        values = {run["order"]: run[key] for run in found if (run["method"] == "dpcr-plus") == plus}
        assert sorted(values) == ["4", "5"]
        return sum(values.values()) / 2

    def numbers(key):
        return [mean(what, plus, key) for plus in (True, False) for what in ("no flip averaging", "flip averaging")]

    plus_without, plus_with, dpcr_without, dpcr_with = numbers("A_f")
    said = re.search(r"of DPCR\+ from ([\d.]+) to ([\d.]+), and that of .*? from ([\d.]+) to ([\d.]+)\.", page).groups()
    assert [float(value) for value in said] == pytest.approx(numbers("A_f"), abs=0.051)
    said = re.search(r"its lead there is ([\d.]+) points, of which ([\d.]+) come from", page).groups()
    parts = [plus_with - dpcr_without, plus_with - plus_without]
    assert [float(value) for value in said] == pytest.approx(parts, abs=0.051)
    section = log.partition("## Flip averaging alone")[2].partition(" ## ")[0]
    said = re.findall(r"([\d.]+) / ([\d.]+) with(?:out)?\b", section)
    assert len(said) == 4
    gains = re.search(r"It gains ([\d.]+) and ([\d.]+) points", section).groups()
    assert [float(value) for value in gains] == pytest.approx([parts[1], dpcr_with - dpcr_without], abs=0.051)
    for place, key in enumerate(("A_f", "A_avg")):
        assert [float(pair[place]) for pair in said] == pytest.approx(numbers(key), abs=0.051)


def contradictions(page: str, numbers: dict) -> list[str]:
    """Splits that a page shows and lists as not measured."""
    missing = re.findall(r"^- (.+?, T = \d+)(?:, order \w+)?(?:: all of it)?$", page, re.MULTILINE)
    return [split for split in missing if any(key.startswith(split) for key in numbers)]


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.json")), ids=lambda path: path.stem)
def test_no_page_says_that_what_it_shows_was_not_measured(path):
    numbers = json.loads(path.read_text())
    if isinstance(numbers, list):
        numbers = {f"{one['dataset']}, T = {one['tasks']}": one for one in numbers}
    assert contradictions(path.with_suffix(".md").read_text(), numbers) == []


def test_such_a_page_is_found():
    page = "![x](gamma.png)\n\nNot measured:\n\n- cifar100, T = 10, order 1993\n- cub200, T = 5: all of it\n"
    assert contradictions(page, {"cifar100, T = 10, order 1993": {}}) == ["cifar100, T = 10"]
