"""The documents tell the truth: what they name exists, what they show runs, what they list is what the code has.

`PYTHONPATH=tests/support python tests/docs/test_docs.py` writes the option tables of docs/cli.md from the command.
"""

import ast
import doctest
import functools
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_lines import commands, misspelt, options

ROOT = Path(__file__).resolve().parents[2]
DOCS = [
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name != "options.md"),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
CLI = ROOT / "docs" / "cli.md"
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
TOKEN = re.compile(r"`([^`\n]+)`")
SOURCE = re.compile(r"[\w.-]+(?:/[\w.-]+)*/[\w-]+\.(?:py|md|ya?ml|toml|txt|css)")
FOLDER = re.compile(r"(?:src|tests|docs|tools|benchmarks)/(?:[\w-]+/)*")
DOTTED = re.compile(r"efcil(?:\.\w+)+")
NODE = re.compile(r"(tests/[\w/]+\.py)::(?:\w+::)?(test_\w+)")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def named_in(text: str) -> list[str]:
    """What stands in backticks outside of code blocks."""
    return TOKEN.findall(FENCE.sub("", text))


# --- (a) what is named exists -----------------------------------------------------------------------------------------


@functools.cache  # thousands of names, fifty files
def functions_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute (of an attribute) of one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        module = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and not module.startswith(error.name):
                raise  # the module is there, something that it imports is not
            continue
        for attribute in parts[cut:]:
            fields = {**getattr(found, "__annotations__", {}), **getattr(found, "model_fields", {})}
            if not hasattr(found, attribute):
                return attribute in fields and attribute == parts[-1]
            found = getattr(found, attribute)
        return True
    return False


def missing_names(text: str) -> list[str]:
    """Paths, tests and dotted names in backticks that do not exist."""
    missing = []
    for token in named_in(text):
        path, _, test = token.partition("::")
        if FOLDER.fullmatch(path):
            there = (ROOT / path).is_dir()
        elif SOURCE.fullmatch(path) and not path.startswith(("OUT/", "DIR/")):
            # beside the repository's paths, those inside the package may be named in short
            file = next((f for f in (ROOT / path, ROOT / "src" / "efcil" / path) if f.is_file()), None)
            there = file is not None and (not test or test.split("[")[0].split("::")[-1] in functions_in(file))
        elif DOTTED.fullmatch(token.removesuffix("()")):
            there = resolves(token.removesuffix("()"))
        else:
            continue
        if not there:
            missing.append(token)
    return missing


@pytest.mark.parametrize("path", DOCS, ids=name)
def test_everything_named_exists(path):
    assert missing_names(path.read_text(encoding="utf-8")) == []


def test_what_does_not_exist_is_found():
    wrong = [
        "src/efcil/nowhere.py",
        "tests/docs/test_docs.py::test_nothing",
        "efcil.core.projection.nothing",
        "docs/nowhere/",
    ]
    right = [
        "src/efcil/cli/__init__.py",
        "shift/dual_projection.py",
        "efcil.core.class_stats.ClassStats.transform",
        "efcil.core.projection",
        "tests/",
        "ridge",
    ]
    right += [
        "tests/docs/test_docs.py::test_what_does_not_exist_is_found",
        "efcil.classifiers.ridge.RidgeOptions.ridge",
    ]
    assert missing_names(" ".join(f"`{token}`" for token in wrong + right)) == wrong


# --- (b) the promises -------------------------------------------------------------------------------------------------


def test_every_promise_of_reliability_names_its_test():
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| guarantee")]
    assert len(rows) > 25
    assert [row for row in rows if not NODE.search(row)] == []
    assert [f"{f}::{t}" for f, t in NODE.findall(text) if t not in functions_in(ROOT / f)] == []


# --- (c) the command --------------------------------------------------------------------------------------------------


def shown_commands(text: str) -> Iterator[list[str]]:
    """Words of each line of a code block that begins with `efcil `; a backslash joins lines, # ends them."""
    for _, block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("efcil "):
                yield shlex.split(line, comments=True)[1:]


@pytest.mark.parametrize("path", DOCS, ids=name)
def test_commands_shown_exist_with_their_options(path):
    assert [w for words in shown_commands(path.read_text(encoding="utf-8")) for w in misspelt(words)] == []


def test_misspelt_commands_are_found():
    text = "```\nefcil run dpcr digits --sead 1 \\\n  --resume  # on\nefcil walk\nefcil data list\nefcil --version\n```"
    assert [misspelt(words) for words in shown_commands(text)] == [["--sead"], ["walk"], [], []]


def test_every_command_has_an_example():
    shown = [" ".join(words) + " " for words in shown_commands(CLI.read_text(encoding="utf-8"))]
    assert [key for key in commands() if not any(line.startswith(key + " ") for line in shown)] == []


def option_table(command: Any, without: Any = None) -> str:
    """The options of a command as a Markdown table, less those that `without` has with the same words."""
    rows = ["| option | default | what it does |", "|---|---|---|"]
    there = {p.name: p.help for p in without.params} if without is not None else {}
    for p in command.params:
        if p.param_type_name != "option" or (p.name in there and there[p.name] == p.help):
            continue
        spelling = ", ".join(f"`{s}`" for s in (*p.opts, *p.secondary_opts))
        empty = p.default is None or p.default is False or p.default in ("", [])
        default = "" if empty else f"`{p.default}`"
        rows.append(f"| {spelling} | {default} | {p.help} |")
    return "\n".join(rows)


MARKED = re.compile(
    r"(<!-- options of (?P<words>[\w ]+?)(?: beyond (?P<beyond>\w+))? -->\n)(?:(?!<!--).)*(<!-- end -->)", re.DOTALL
)


def with_option_tables(text: str) -> str:
    """docs/cli.md with every marked table written anew."""
    known = commands()

    def table(match: re.Match[str]) -> str:
        return match[1] + option_table(known[match["words"]], known.get(match["beyond"])) + "\n" + match[4]

    return MARKED.sub(table, text)


def test_option_tables_are_those_of_the_command():
    text = CLI.read_text(encoding="utf-8")
    assert text == with_option_tables(text), "run `python tests/docs/test_docs.py` and look at the difference"
    marked = {match["words"] for match in MARKED.finditer(text)}
    with_options = {key for key, command in commands().items() if len(options(command)) > 1}
    assert marked == with_options, "a command with options has no table in docs/cli.md"


# --- (d) examples run -------------------------------------------------------------------------------------------------

EXAMPLES = [
    pytest.param(block, id=f"{name(path)}-{number}")
    for path in DOCS
    if path.is_file()
    and not path.name.startswith("tutorial-")  # those run whole, in tests/docs/test_tutorials.py
    and path != ROOT / "README.md"  # tests/docs/test_readme.py
    for number, (language, block) in enumerate(FENCE.findall(path.read_text(encoding="utf-8")))
    if language in ("python", "pycon")
]


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("block", EXAMPLES)
def test_example_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if ">>>" not in block:
        exec(compile(block, "<example>", "exec"), {"__name__": "example"})
        return
    example = doctest.DocTestParser().get_doctest(block, {}, "example", None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    said: list[str] = []
    assert runner.run(example, out=said.append).failed == 0, "".join(said)


# --- (e) no machine's own paths ---------------------------------------------------------------------------------------

# Directories of one person's machine; the home of `me` is an example. A path inside the repository may have such a
# part, so it must start there.
OWN_PATH = re.compile(r"(?<![\w.~)/-])(?:/(?:home|Users|root|work|workspace)/(?!me/)[\w.]|[A-Z]:\\+Users\\)")
LEFT_OUT = {".git", ".venv", "__pycache__", "build", "dist", "runs", "demo"}


def text_files() -> Iterator[Path]:
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        format_list = subprocess.run(git, capture_output=True, check=True).stdout.decode().split("\0")
        files = [ROOT / line for line in format_list if line]
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        files = [f for f in ROOT.rglob("*") if not LEFT_OUT.intersection(f.relative_to(ROOT).parts)]
    for file in files:
        if file.is_file() and not file.is_symlink() and b"\0" not in file.read_bytes()[:8192]:
            yield file


def test_no_file_holds_a_path_of_a_developers_machine():
    found = []
    for file in text_files():
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if OWN_PATH.search(line):
                found.append(f"{name(file)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_such_paths_are_seen():
    def at(*parts: str) -> str:
        return "/".join(("", *parts))

    own = [at("home", "anna", "x"), f"see {at('work', 'main')}", f"`{at('root', '.cache')}`", at("Users", "anna")]
    fine = ["src/efcil/home/x", "https://example.org" + at("home", "x"), "~" + at("work", "x"), at("tmp", "x"), "a / b"]
    assert [bool(OWN_PATH.search(text)) for text in own] == [True] * len(own)
    assert [bool(OWN_PATH.search(text)) for text in fine] == [False] * len(fine)
    assert name(Path(__file__).resolve()) in map(name, text_files())


if __name__ == "__main__":
    CLI.write_text(with_option_tables(CLI.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
