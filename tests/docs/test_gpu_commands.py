"""The commands that wait for a GPU resolve: methods, settings, presets and orders; what is read is written before."""

import re
import shlex
from pathlib import Path

import pytest

from command_lines import commands
from efcil.cli.experiments import resolve_comparison, resolve_options
from efcil.errors import ConfigError
from efcil.experiment.reevaluate import experiment_of
from efcil.experiment.tuning import parse_grid, trials
from efcil.tasks import class_order

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "dev" / "gpu-commands.md").read_text(encoding="utf-8")
LINES = [line for line in PAGE.splitlines() if line.startswith(("efcil ", "python "))]
COSTS = [re.search(r"# (\d+) min", line) for line in LINES]
WORDS = [shlex.split(line, comments=True) for line in LINES]
CLASSES = {"cifar100": 100, "tiny-imagenet": 200, "cub200": 200, "mini-imagenet": 100}


def given(words):
    """Options of a command line as the command gets them."""
    context = commands()[words[1]].make_context(words[1], words[2:])
    return words[1], context.params


def experiments(words):
    """What a command would run: (order, experiment)."""
    name, options = given(words)
    orders = [options["order"]] if name == "run" else options["orders"].split(",")
    for order in orders:
        own = {**options, "order": order}
        if name == "tune":
            for trial in trials(options["method"], parse_grid(options["grid"])):
                own["overrides"] = [*options["overrides"], *trial.training]
                yield order, resolve_options([trial.label], options["dataset"], own)
        else:
            methods = [options["method"]] if name == "run" else options["methods"].split(",")
            for experiment in resolve_comparison(methods, options["dataset"], own).values():
                yield order, experiment


def test_there_are_commands_and_each_says_what_it_costs():
    assert len(LINES) > 30
    assert [line for line, cost in zip(LINES, COSTS, strict=True) if cost is None] == []
    places = [words[words.index("--out") + 1] for words in WORDS if "--out" in words]
    assert len({*places}) == len(places), "each has its own place"


@pytest.mark.parametrize("words", [w for w in WORDS if w[:2] in (["efcil", n] for n in ("run", "compare", "tune"))])
def test_a_training_command_resolves(words):
    found = list(experiments(words))
    assert found
    for order, experiment in found:
        classes = CLASSES[experiment.dataset]
        assert sum(experiment.sizes(classes)) == classes
        if order not in ("hard", "easy"):
            class_order(order, [str(c) for c in range(classes)])


def test_ensembles_are_of_runs_that_keep_their_features():
    made = {}
    for words in WORDS:
        if words[:2] == ["efcil", "compare"] and "--save-features" in words:
            (_, options), found = given(words), list(experiments(words))
            made |= {Path(options["out"]) / f"order-{order}": experiment for order, experiment in found}
    wanted = [given(words)[1] for words in WORDS if words[1] == "ensemble"]
    assert len(wanted) == 6
    for options in wanted:
        runs = [made[source].fingerprint() for source in options["sources"]]
        assert len({run["seed"] for run in runs}) == len(runs) == 4
        assert len({repr({k: v for k, v in run.items() if k != "seed"}) for run in runs}) == 1
        assert list(experiment_of(runs[0], [options["methods"]], []).methods) == ["dpcr-plus"]


def test_every_open_question_of_the_paper_has_its_command():
    gaps = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8").partition("<!-- /gaps -->")[0]
    asked = [row.strip("| ").split(" | ") for row in gaps.splitlines() if "| open:" in row]
    assert asked
    measured = set()
    for words in [w for w in WORDS if w[:2] in (["efcil", "compare"], ["efcil", "tune"])]:
        for _, experiment in experiments(words):
            at = (experiment.dataset, len(experiment.sizes(CLASSES[experiment.dataset])))
            measured |= {(*at, method.name) for method, _ in experiment.methods.values()}
    for title, label, *_ in asked:
        dataset, tasks = re.fullmatch(r"(\S+), T = (\d+)", title).groups()
        assert (dataset, int(tasks), re.split("[:/]", label)[0]) in measured, f"{label} on {title}"


def test_scripts_exist_and_read_what_is_kept():
    kept = {words[words.index("--out") + 1]: words for words in WORDS if "--save-features" in words}
    for words in WORDS:
        if words[0] == "python":
            assert (ROOT / words[1]).is_file()
        if words[1] == "research/added_scores.py":
            assert {*words[3].split(",")} <= {*kept[words[2]][2].split(",")}


@pytest.mark.parametrize("wrong", ["--set rigde=1", "--preset papers", "--tasks 10 --try width=0"])
def test_a_command_that_cannot_run_is_noticed(wrong):
    kind = "tune" if "--try" in wrong else "compare"
    words = shlex.split(f"efcil {kind} dpcr cifar100 --data DATA {wrong} --orders 1")
    with pytest.raises(ConfigError):
        list(experiments(words))
