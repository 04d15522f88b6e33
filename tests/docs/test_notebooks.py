"""The notebooks run from top to bottom, in the version that they name, and say so in any other."""

import json
import re

import pytest

import efcil

pytest.importorskip("jupytext", reason="the extra `dev` is not installed")
from tools import notebooks

PINNED = re.compile(r"efcil==([\w.]+)")


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(notebooks.ROOT / "src"))  # the kernel works in a folder of its own
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")


def printed(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs if output["output_type"] == "stream"), outputs


def test_there_are_two_and_both_pin_this_version():
    assert [path.stem for path in notebooks.SOURCES] == ["folders", "paper"]
    for path in notebooks.SOURCES:
        assert set(PINNED.findall(path.read_text(encoding="utf-8"))) == {efcil.__version__}


def test_they_are_written_as_notebooks_without_outputs(tmp_path, capsys):
    assert notebooks.main(["--out", str(tmp_path)]) == 0
    assert "names no repository" in capsys.readouterr().out
    for path in notebooks.SOURCES:
        cells = json.loads((tmp_path / f"{path.stem}.ipynb").read_text(encoding="utf-8"))["cells"]
        assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
        assert [cell for cell in cells if cell.get("outputs")] == []


def test_without_jupytext_it_says_so(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "jupytext", None)
    assert notebooks.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'efcil[dev]'" in line


@pytest.mark.slow
@pytest.mark.parametrize("path", notebooks.SOURCES, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    text, outputs = printed(notebooks.execute(notebooks.read(path), tmp_path))
    assert [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"] == []
    if path.stem == "folders":
        accuracy = int(re.search(r"accuracy (\d+) %", text)[1])
        assert accuracy >= 80, "chance is 25"
        assert "IncrementalClassifier" in text
    else:
        assert any("text/html" in output.get("data", {}) for output in outputs), "the table"
        assert any("image/svg+xml" in output.get("data", {}) for output in outputs), "the curves"
        forgets = dict(re.findall(r"(\w+)\s+forgets (\d+) points", text))
        assert int(forgets["dpcr"]) < int(forgets["rrcr"])


@pytest.mark.slow
def test_a_notebook_of_another_version_says_so_in_one_line(tmp_path):
    from nbclient.exceptions import CellExecutionError

    notebook = notebooks.read(notebooks.SOURCES[0])
    for cell in notebook.cells:
        cell.source = cell.source.replace(efcil.__version__, "9.9.9")
    with pytest.raises(CellExecutionError) as caught:
        notebooks.execute(notebook, tmp_path)
    assert caught.value.ename == "SystemExit"
    assert caught.value.evalue.splitlines() == [
        f"this notebook is for efcil 9.9.9, and {efcil.__version__} is installed: pip install efcil==9.9.9"
    ]
    assert list(tmp_path.iterdir()) == [], "nothing was drawn"
