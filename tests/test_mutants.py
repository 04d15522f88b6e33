"""The list of deliberate breakages is sound, and the tool that runs it tells killed from survived."""

import ast
import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


def load_tool():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tool = load_tool()
MUTANTS = tool.read(tool.LIST)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_the_text_to_break_occurs_once_and_the_result_is_code(mutant):
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.find) == 1
    broken = text.replace(mutant.find, mutant.replace)
    assert broken != text
    if mutant.file.endswith(".py"):
        ast.parse(broken)  # a mistake in syntax would prove nothing
    elif mutant.file.endswith(".yaml"):
        yaml.safe_load(broken)


@functools.cache
def functions_in(file):
    return {node.name for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if hasattr(node, "name")}


def test_named_tests_exist():
    missing = []
    for name in {test for mutant in MUTANTS for test in mutant.tests}:
        path, _, test = name.partition("::")
        file = ROOT / path
        if not file.is_file() or (test and test.split("[")[0] not in functions_in(file)):
            missing.append(name)
    assert missing == []


def test_every_part_of_the_package_is_broken_somewhere():
    """Modules without a mutant are named here, so that a new one is not forgotten."""
    left_out = {
        "__init__.py": "imports when asked for, test_model.py and test_estimators.py",
        "backbones/__init__.py": "a registry",
        "backbones/kernels.py": "for a GPU or Triton's interpreter, which may both be missing; test_learning.py",
        "representations/kernels.py": "the same",
        "training/kernels.py": "the same",
        "doctor.py": "says what the machine is",
        "serve/command.py": "binds and prints; whole processes in test_serve.py",
        "serve/limits.py": "numbers",
        "serve/reference.py": "a page to read",
        "serve/worker.py": "a process of its own, started from the installed package: the copy is not what runs",
        "data/__init__.py": "a registry",
        "representations/finetune.py": "one line over what is shared",
        "methods/base.py": "types",
        "methods/own_head.py": "copies the head that test_training.py tests",
        "report/figures.py": "drawings",
        "report/load.py": "tested with broken files in test_report.py",
        "report/styles.py": "colours",
        "report/svg.py": "drawings",
        "report/write.py": "file names",
    }
    package = ROOT / "src" / "efcil"
    files = [path for path in package.rglob("*.py") if "def " in path.read_text(encoding="utf-8")]
    broken = {mutant.file.removeprefix("src/efcil/") for mutant in MUTANTS}
    names = {path.relative_to(package).as_posix() for path in files}
    assert sorted(names - broken - set(left_out)) == []


def test_the_page_is_of_this_list():
    """docs/mutants.md has every mutant, in its order, and none that survived."""
    rows = [line.split(" | ") for line in tool.PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = [row[0].removeprefix("| ") for row in rows if row[0] not in ("| Mutant", "| ---")]
    files = list(dict.fromkeys(mutant.file for mutant in MUTANTS))
    assert named == [mutant.id for file in files for mutant in MUTANTS if mutant.file == file]
    assert "**" not in tool.PAGE.read_text(encoding="utf-8")


def a_mutant(**changes):
    mutant = {
        "id": "sum-for-mean",
        "broken": "a mean is a sum",
        "file": "src/efcil/metrics.py",
        "find": "return sum(values) / len(values)",
        "replace": "return sum(values)",
        "tests": ["tests/test_metrics.py::test_three_uneven_tasks_by_hand"],
    }
    return {**mutant, **changes}


@pytest.mark.slow
def test_killed_is_told_from_survived_and_from_error(tmp_path, capsys):
    """The whole tool on three mutants: a real one, a harmless one and one whose code cannot be read."""
    harmless = {"find": "# Python integers divide", "replace": "# Whole numbers divide"}
    mutants = [
        a_mutant(),
        a_mutant(id="comment", **harmless),
        a_mutant(id="syntax", replace="return sum(values"),
        a_mutant(id="again", broken="the copy was put back"),
    ]
    path = tmp_path / "mutants.yaml"
    path.write_text(yaml.safe_dump(mutants), encoding="utf-8")
    page = tool.PAGE.read_bytes()
    before = (ROOT / "src" / "efcil" / "metrics.py").read_bytes()
    assert tool.main(["--mutants", str(path), "--check"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["killed", "SURVIVED", "error", "killed"]
    assert lines[0].endswith(" tests/test_metrics.py::test_three_uneven_tasks_by_hand")
    assert lines[4] == "1 SURVIVED, 1 error, 2 killed"
    assert (ROOT / "src" / "efcil" / "metrics.py").read_bytes() == before
    assert tool.PAGE.read_bytes() == page


@pytest.mark.slow
def test_a_test_that_fails_anyway_proves_nothing(tmp_path, capsys):
    mutants = [a_mutant(tests=["tests/test_metrics.py::test_there_is_no_such_test"])]
    path = tmp_path / "mutants.yaml"
    path.write_text(yaml.safe_dump(mutants), encoding="utf-8")
    assert tool.main(["--mutants", str(path)]) == 1
    assert "with nothing broken pytest ends with 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([{**a_mutant(), "why": "?"}], "sum-for-mean: has"),
        ([a_mutant(tests=[])], "names no test"),
        ([a_mutant(replace="return sum(values) / len(values)")], "changes nothing"),
        ([a_mutant(), a_mutant()], "several mutants sum-for-mean"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(tmp_path, entries, words):
    path = tmp_path / "mutants.yaml"
    path.write_text(yaml.safe_dump(entries), encoding="utf-8")
    with pytest.raises(tool.MutantError, match=words):
        tool.read(path)
