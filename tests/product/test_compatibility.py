"""Models and runs that earlier versions wrote are read as docs/formats.md says."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import efcil
from efcil import IncrementalClassifier, Results
from efcil.experiment import run_directory
from efcil.product import model_directory
from efcil.results import VERSION as RESULTS_FORMAT
from messages import assert_names
from tools import make_fixtures

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
WRITTEN = sorted(path for path in (ROOT / "tests" / "fixtures").iterdir() if path.is_dir())


@pytest.fixture(params=WRITTEN, ids=lambda path: path.name)
def written(request, tmp_path):
    """A copy of what one version wrote."""
    return shutil.copytree(request.param, tmp_path / "written")


def test_the_page_has_the_formats_of_this_version():
    formats = {name: int(number) for name, number in re.findall(r"^\| (.+?) \| .+ \| (\d+) \|$", PAGE, re.MULTILINE)}
    assert formats == {
        "model directory": model_directory.FORMAT,
        "run directory": run_directory.FORMAT,
        "results of `Results.save`": RESULTS_FORMAT,
    }


def test_this_version_has_its_fixture():
    assert efcil.__version__ in {path.name for path in WRITTEN}
    assert sum(path.stat().st_size for path in WRITTEN[0].rglob("*") if path.is_file()) < 200_000
    assert make_fixtures.main([]) == 1, "they are not replaced by accident"


def test_a_model_predicts_what_it_did_and_learns_on(written):
    model = IncrementalClassifier.load(written / "model", device="cpu", progress=False)
    assert model.classes_.tolist() == ["digit 0", "digit 1", "digit 2", "digit 3"]
    images = list(make_fixtures.asked())
    assert np.allclose(model.predict_proba(images), np.load(written / "probabilities.npy"), atol=1e-5)
    model.learn(images[:6], ["new"] * 6, epochs=1)
    model.save(written / "model")
    again = IncrementalClassifier.load(written / "model", device="cpu", progress=False)
    assert again.classes_.tolist()[-1] == "new"
    assert len(again.undo().classes_) == 4


def test_a_model_can_go_back_to_before_its_last_update(written):
    model = IncrementalClassifier.load(written / "model", device="cpu", progress=False)
    assert model.undo().classes_.tolist() == ["digit 0", "digit 1"]


def test_a_run_is_reported(written, efcil, monkeypatch):
    monkeypatch.chdir(written)
    results = Results.load(written / "run")
    assert results["dpcr"].tasks_done == 5
    code, out, err = efcil("report", written / "run")
    assert code == 0, err
    assert f"{results['dpcr'].final_accuracy:.2f}" in out


def test_a_run_is_resumed_or_refused_by_name(written, efcil):
    """With its last checkpoint gone the last task is learned again; another format is refused and nothing touched."""
    (written / "run" / "checkpoints" / "task-05.safetensors").unlink()
    config = (written / "run" / "config.yaml").read_text(encoding="utf-8")
    found = int(re.search(r"^format: (\d+)$", config, re.MULTILINE)[1])
    before = {path.name: path.read_bytes() for path in (written / "run").rglob("*") if path.is_file()}
    code, _, err = efcil("resume", written / "run")
    if found == run_directory.FORMAT:
        assert code == 0, err
        assert (written / "run" / "checkpoints" / "task-05.safetensors").is_file()
    else:
        assert code == 2
        assert_names(err, f"format {found}")
        after = {path.name: path.read_bytes() for path in (written / "run").rglob("*") if path.is_file()}
        assert {name: after[name] for name in before} == before
