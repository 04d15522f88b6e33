"""Code that was only renamed and moved is equal; each kind of other change is found."""

import subprocess
from textwrap import dedent

import pytest

from tools import compare_syntax as tool

OLD = """
'''The old words.'''
import torch
import triton.language as tl
from efcil.models import updates
from torch import nn

LOT = 3

class Kept:
    'Say something.'
    size: int = 4

    def __init__(self, told: torch.Tensor):
        self.held = told
        self._modules["held"] = None

    def taken(self, x, lot=LOT):
        found = [x * self.held for x in x.split(lot)]  # a comment
        def inner(a: int) -> int:
            return a + len(found)
        return inner(torch.cat(found).sum(0)) if found else updates.SGD(x.dim())

def _kernel(z, count, FULL: tl.constexpr):
    x = tl.load(z + count)
    return tl.maximum(x, 0.0)

def use(kept):
    return kept.taken(x=2), nn.ReLU()
"""
NEW = """
import torch
from efcil.accel.optim import SGD
from triton import language as tl
import torch.nn as nn

CHUNK: int = 3

def _kernel(values, n, FULL: tl.constexpr):
    loaded = tl.load(values + n)
    return tl.maximum(loaded, 0.0)

class SavedActivations:
    size: float = 4

    def __init__(self, saved):
        self.activations = saved
        self._modules["activations"] = None

    def pop(self, x, chunk=CHUNK):
        'Say it in the imperative.'
        parts = [part * self.activations for part in x.split(chunk)]
        def add(number):
            return number + len(parts)
        return add(torch.cat(parts).sum(0)) if parts else SGD(x.dim())

def use(saved: SavedActivations):
    return saved.pop(x=2), nn.ReLU()
"""


@pytest.fixture
def compared(tmp_path, capsys):
    """Compare two texts: (exit code, what was printed)."""

    def call(old, new, names=""):
        (tmp_path / "old.py").write_text(dedent(old))
        (tmp_path / "new.py").write_text(dedent(new))
        (tmp_path / "names.yaml").write_text(f"names: {{{names}}}")
        code = tool.main([str(tmp_path / "old.py"), str(tmp_path / "new.py"), "--names", str(tmp_path / "names.yaml")])
        return code, capsys.readouterr().out

    return call


def test_code_that_was_renamed_and_moved_is_equal(compared):
    code, said = compared(OLD, NEW)
    assert code == 0, said
    assert said.splitlines()[0].endswith(": equal")
    assert [line.strip() for line in said.splitlines()[1:]] == [
        "Kept -> SavedActivations",
        "LOT -> CHUNK",
        "held -> activations",
        "taken -> pop",
    ]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("part * self", "part + self", "Mult became Add"),
        ("loaded, 0.0", "loaded, 1.0", "0.0 became 1.0"),
        (".sum(0)", ".mean(0)", "sum became mean, and is not defined in this file"),
        ("tl.maximum", "tl.minimum", "maximum became minimum"),
        ("FULL: tl.constexpr", "FULL", "constexpr"),
        ("x.dim()", "x.dim(1)", "0 parts became 1"),
        ("pop(x=2)", "pop(y=2)", "keyword 'x' became 'y'"),
        ("number + len", "number + 0 * len", "Call became BinOp"),
        ("from triton import language", "from other import language", "triton.language became other.language"),
        ('_modules["activations"]', '_modules["others"]', "string 'held' became 'others'"),
        ("self.activations = saved", "self.activations = saved; print(1)", "only in the new code"),
        ("size: float = 4", "size = 4", "AnnAssign became Assign"),
        ("if parts else", "if x else", "found became x here, and parts elsewhere"),
    ],
)
def test_other_changes_are_found(before, after, said, compared):
    assert NEW.count(before) == 1
    code, found = compared(OLD, NEW.replace(before, after))
    assert code == 1
    assert said in found


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def f(a, b): return a - b", "def f(a, b): return b - a", "a became b here, and a elsewhere"),
        ("def f(a, b): return a - b", "def f(x, x2): return x - x", "b became x"),
        ("def f(a): return a - a", "def f(x): return x - y", "a variable of another function"),
        ("A = 1\nB = 2\nC = A", "D = 1\nE = 2\nC = E", "A became E"),
        ("A = 1\nB = 2", "D = 1\nD = 2", "B became D, and so did A"),
        ("def f():\n    import math\n    return math.pi", "def f():\n    return math.pi", "no import"),
    ],
)
def test_a_renaming_gives_each_name_one_other(old, new, said, compared):
    code, found = compared(old, new)
    assert code == 1
    assert said in found


def test_declared_names_may_be_several_and_must_be_used(compared):
    old, new = "def f(net): return net.dim, net.dim()", "def f(net): return net.num_features, net.dim()"
    assert compared(old, new)[0] == 1
    assert compared(old, new, "dim: [dim, num_features]")[0] == 0
    code, said = compared(old, new, "dim: num_features")
    assert code == 1
    assert "dim became dim, declared is num_features" in said


def test_definitions_are_selected_from_a_revision(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "old.py").write_text("LOT = 4\n\ndef one(): return LOT\n\ndef two(): return 2\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "Add"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "new.py").write_text("def deux(): return 2\n\nCHUNK = 4\n\ndef un(): return CHUNK\n")
    pairs = "pairs:\n  - {old: 'HEAD:old.py#LOT,one', new: 'new.py#CHUNK,un'}\n  - {old: 'HEAD:old.py#two', new: %s}\n"
    (tmp_path / "names.yaml").write_text(pairs % "'new.py#deux'")
    assert tool.main(["--names", "names.yaml"]) == 0
    (tmp_path / "names.yaml").write_text(pairs % "'new.py#un'")
    assert tool.main(["--names", "names.yaml"]) == 1
    capsys.readouterr()
    for place, said in (("HEAD:none.py", "cannot be read"), ("HEAD:old.py#drei", "does not define drei")):
        with pytest.raises(SystemExit):
            tool.main([place, "new.py"])
        assert said in capsys.readouterr().err
