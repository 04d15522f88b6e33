"""What the command shows of itself: methods, options, help; complete, at every width, and at once."""

import json
import re
import resource
import subprocess
import sys

import pytest
import typer.main

from efcil import data
from efcil.classifiers import CLASSIFIERS
from efcil.cli import app, catalog
from efcil.cli.console import print_markdown, print_runs
from efcil.config import keys, presets
from efcil.errors import ConfigError
from efcil.learners import LEARNERS
from efcil.methods import METHODS, find
from efcil.shift import SHIFTS
from messages import assert_names, raises
from summaries import summary


def rows(groups):
    return {row.key: row for group in groups for row in group.rows}


def test_the_stored_table_of_methods_is_that_of_the_registry():
    assert catalog.stored_rows() == catalog.registered_rows(), "run `python -m efcil.cli.catalog`"


def test_a_plug_in_makes_the_table_come_from_the_registry(monkeypatch):
    monkeypatch.setattr(catalog.metadata, "entry_points", lambda group: ["one"] * (group == "efcil.shifts"))
    monkeypatch.setattr(catalog, "registered_rows", lambda: ["registry"])
    assert catalog.method_rows() == ["registry"]


def test_methods_answers_at_once_without_torch():
    """Half a second; where even that time is long, five times what the library takes that reads the command line."""

    def spent(*words):
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime

    own = min(spent("-m", "efcil", "methods") for _ in range(3))
    library = min(spent("-c", "import typer, rich.console") for _ in range(3))
    assert own < max(0.5, 5 * library)
    code = "import sys; from efcil.cli import main; sys.argv = ['efcil', 'methods']\n"
    code += "try:\n    main()\nexcept SystemExit:\n    print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_methods_fits(efcil, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = efcil("methods")
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out
    listed = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert set(METHODS) <= set(listed)
    assert ("memory per class" in out) is (width == 120)
    assert "A_f: accuracy over all classes after the last task" in " ".join(out.split())


def test_methods_as_json(efcil):
    _, out, _ = efcil("methods", "--json")
    assert [row["method"] for row in json.loads(out)] == list(METHODS)
    _, out, _ = efcil("methods", "dpcr", "--json")
    (ridge,) = [row for row in json.loads(out) if row["key"] == "ridge"]
    assert (ridge["of"], ridge["default"]) == ("classifier ridge", 200.0)


@pytest.mark.parametrize("name", [*METHODS, "lwf+ldc+ridge"])
def test_every_option_of_a_method_is_listed_with_its_meaning(name):
    method = find(name)
    wanted = {*keys(LEARNERS[method.learner].options_type), *keys(method.options)} - {*method.overrides}
    found = rows(catalog.method_options(name))
    assert set(found) == wanted
    assert [key for key, row in found.items() if not row.meaning.endswith(".")] == []


def test_defaults_and_preset_values_are_those_that_a_run_has():
    found = rows(catalog.method_options("dpcr"))
    assert found["ridge"].default == 200.0
    assert found["ridge"].presets["quick"]["digits"] == presets()["quick"]["digits"]["dpcr"]["ridge"][0]
    assert found["first.epochs"].presets["quick"]["digits"] == 20
    assert found["rank_rule"].choices[0] == "positive"
    assert "tuned" not in found["ridge"].presets, "it says nothing of dpcr"
    assert rows(catalog.method_options("dpcr-plus"))["pseudo_ratio"].presets.keys() >= {"tuned"}
    assert "normalize" not in rows(catalog.method_options("rrcr")), "what a method fixes cannot be set"


def test_parts_and_data_sets_have_their_options():
    parts = {"learner": LEARNERS, "shift": SHIFTS, "classifier": CLASSIFIERS}
    found = {group.title: group for group in catalog.all_options()}
    for kind, registry in parts.items():
        for name, part in registry.items():
            wanted = [] if part is None else keys(part.options_type)
            assert [row.key for row in getattr(found.get(f"{kind} {name}"), "rows", ())] == wanted
    for name, spec in data.DATASETS.items():
        wanted = [f"data.{key}" for key in keys(spec.options)]
        assert [row.key for row in getattr(found.get(f"data {name}"), "rows", ())] == wanted
    assert [row.key for group in found.values() for row in group.rows if not row.meaning] == []
    assert [group.title for group in catalog.part_options("foster")] == ["learner foster"]
    with raises(ConfigError, "'foldr'", "'folder'"):
        catalog.part_options("foldr")


@pytest.mark.parametrize("width", [80, 120])
def test_options_fit(efcil, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for words in ("methods foster", "methods rrcr", "options", "options digits", "options folder", "data list"):
        code, out, err = efcil(*words.split())
        assert code == 0, err
        assert max(map(len, out.splitlines())) <= width
        assert "…" not in out


def every_command():
    def walk(command, words):
        yield words, command
        for word, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, [*words, word])

    return {" ".join(words): command for words, command in walk(typer.main.get_command(app), [])}


@pytest.mark.parametrize("words", every_command())
def test_help_has_every_option_in_full_at_80_columns(efcil, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    code, out, _ = efcil(*words.split(), "--help")
    assert code == 0
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", out).split())
    for param in every_command()[words].params:
        for spelling in (*param.opts, *param.secondary_opts):
            if spelling.startswith("--"):
                assert re.search(rf"{spelling}[ ,]", said)
    assert_names(out, "--help")


def test_commands_and_options_stand_in_panels(efcil, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = efcil("--help")
    for panel in ("Experiments", "Models", "Look around", "Data sets"):
        assert f"╭─ {panel} ─" in out
    _, out, _ = efcil("run", "--help")
    for panel in ("Data and tasks", "Settings", "Output", "Machine"):
        assert f"╭─ {panel} ─" in out


def test_markdown_of_ours_is_printed_as_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_markdown("### x\\_y\n\n| Method | A\\_f |\n| --- | ---: |\n| a\\|b | **52.10 ± 1.00** |\n\n± is so.  \n")
    out = capsys.readouterr().out
    assert [line.strip() for line in out.splitlines() if line.strip()][:1] == ["x_y"]
    assert re.search(r"^Method +A_f$", out, re.M)
    assert re.search(r"^a\|b +52\.10 ± 1\.00$", out, re.M)
    assert "\\" not in out
    assert "*" not in out


def test_names_are_read_in_any_case(efcil):
    for upper, lower in (
        ("DPCR", "dpcr"),
        ("Foster", "foster"),
        ("DIGITS", "digits"),
        ("LWF+LDC+Ridge", "lwf+ldc+ridge"),
    ):
        _, wanted, _ = efcil("options", lower)
        code, out, err = efcil("options", upper)
        assert code == 0, err
        assert out.casefold() == wanted.casefold()


@pytest.mark.parametrize("width", [80, 120])
def test_tables_of_runs_and_of_the_paper_fit_and_say_what_they_leave_out(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    seeds = [{"order": str(order), "method": name} for order in (1, 2, 3) for name in ("dpcr-plus", "lwf-ncm")]
    print_runs([summary(**seed) for seed in seeds])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert "A_f: accuracy after the last task" in out
    assert "50.00 ± 0.00" in out
    assert ("BWT" in out) is (width == 120)
    head = ["Method", "A\\_f paper", "A\\_f ours", "difference", "A\\_avg paper", "A\\_avg ours", "difference"]
    cells = ["RRCR + TSSP", "47.65", "48.01 ± 0.71", "+0.36", "62.63", "62.68 ± 0.35", "+0.05"]
    align = ["---", *["---:"] * 6, "---", "---:"]
    table = [[*head, "orders", "seconds"], align, [*cells, "identity, 1992, 1993", "165"]]
    print_markdown("\n".join("| " + " | ".join(line) + " |" for line in table))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert all(cell in out for cell in cells)
    assert ("not shown here: orders, seconds" in out) is (width == 80)
    assert ("identity, 1992, 1993" in out) is (width == 120)
