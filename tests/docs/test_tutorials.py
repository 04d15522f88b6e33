"""Tutorials run from top to bottom, as a reader would type them, and print what they say they print.

All `python` blocks of a docs/tutorial-*.md share one namespace and one temporary directory. A `text` block right after
one is what it prints, `...` standing for anything; blocks with >>> are doctests.
"""

import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
TUTORIALS = sorted(DOCS.glob("tutorial-*.md"))
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def follow(text: str, name: str = "tutorial") -> int:
    """Run the blocks of a tutorial and compare what they print; return how many outputs were compared."""
    space = {"__name__": "tutorial"}
    blocks = FENCE.findall(text)
    compared = 0
    for number, (language, block) in enumerate(blocks):
        if language != "python":
            continue
        where = f"{name}, block {number}"
        if ">>>" in block:
            example = doctest.DocTestParser().get_doctest(block, space, where, None, 0)
            said: list[str] = []
            ran = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=said.append, clear_globs=False)
            assert ran.failed == 0, "".join(said)
            space.update(example.globs)
            compared += ran.attempted
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block, where, "exec"), space)
        wanted = blocks[number + 1][1] if number + 1 < len(blocks) and blocks[number + 1][0] == "text" else None
        if wanted is not None:
            got = printed.getvalue()
            assert doctest.OutputChecker().check_output(wanted, got, FLAGS), f"{where} printed:\n{got}\nnot:\n{wanted}"
            compared += 1
        else:
            assert printed.getvalue() == "", f"{where} prints, and no text block says what"
    return compared


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs_and_prints_what_it_says(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert follow(path.read_text(encoding="utf-8"), path.name) > 0


def test_there_is_one_for_users_of_scikit_learn():
    assert DOCS / "tutorial-scikit-learn.md" in TUTORIALS


def test_there_is_one_for_each_audience():
    assert {path.stem for path in TUTORIALS} >= {"tutorial-research", "tutorial-folders", "tutorial-scikit-learn"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```python\nx = 1\n```\n```python\nprint(x)\n```\n```text\n2\n```", "printed"),
        ("```python\nprint(1)\n```", "no text block"),
        ("```python\nx = 1\n```\n```python\n>>> x\n2\n```", "Expected"),
    ],
)
def test_a_tutorial_that_lies_is_found(text, words):
    with pytest.raises(AssertionError, match=words):
        follow(text)
    assert follow(text.replace("\n2\n", "\n1\n").replace("print(1)", "pass")) == ("2" in text)
