"""Other methods evaluated on a finished run: results identical to a joint run; what needs images is refused."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from efcil import data as datasets
from efcil.accel.backend import Backend
from efcil.cli import app
from efcil.experiment.reevaluate import config_of, experiment_of
from efcil.learners import LEARNERS
from efcil.platform_support import file_name
from efcil.report.load import load_summaries, requested_precision
from efcil.tensor_files import load_tensors
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from messages import assert_names

SMALL = [
    "width=4",
    "backbone=resnet10",
    "first.epochs=2",
    "later.epochs=1",
    "first.milestones=[]",
    "later.milestones=[]",
]
METHODS = "dpcr,ldc,sdc,acil,fecam,lwf-ncm,rrcr+tssp+cip,lwf+ldc+ridge"


def run(efcil, *arguments):
    settings = [part for setting in SMALL for part in ("--set", setting)]
    return efcil(*arguments, *settings, "--tasks", "5", "--device", "cpu", "--quiet")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One comparison with features, made once."""
    out = tmp_path_factory.mktemp("reevaluate") / "r"
    settings = [part for setting in SMALL for part in ("--set", setting)]
    command = ["compare", METHODS, "digits", "--save-features", "--orders", "7", "--out", str(out), *settings]
    result = CliRunner().invoke(app, [*command, "--tasks", "5", "--device", "cpu", "--quiet"])
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture
def kept(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "r"))


def of(place, method):
    aside = ("seconds", "command", "commit", "run_dir", "reevaluated_from")
    summary = json.loads((place / file_name(method) / "summary.json").read_text())
    return {k: v for k, v in summary.items() if k not in aside}


def test_reevaluated_methods_have_the_numbers_of_the_joint_run(efcil, kept):
    code, out, err = efcil("reevaluate", kept, METHODS + ",dpcr:ridge=2", "--device", "cpu")
    assert code == 0, err
    for method in METHODS.split(","):
        assert of(kept / "reevaluation", method) == of(kept, method)
    assert of(kept / "reevaluation", "dpcr:ridge=2")["options"]["ridge"] == 2
    assert of(kept / "reevaluation", "dpcr:ridge=2")["matrix"] != of(kept, "dpcr")["matrix"]
    assert "dpcr:ridge=2" in out
    assert (kept / "reevaluation" / "report.html").exists()


def test_settings_and_place_can_be_given(efcil, kept, tmp_path):
    code, _, err = efcil("reevaluate", kept, "dpcr", "--set", "ridge=3", "--out", tmp_path / "there", "--quiet")
    assert code == 0, err
    assert of(tmp_path / "there", "dpcr")["options"]["ridge"] == 3
    assert not (kept / "reevaluation").exists()


def test_a_reevaluation_names_its_run_and_computes_in_its_precision(efcil, tmp_path):
    code, _, err = run(
        efcil, "compare", "dpcr", "digits", "--precision", "fp32", "--save-features", "--out", tmp_path / "r"
    )
    assert code == 0, err
    code, _, err = efcil("reevaluate", tmp_path / "r", "dpcr", "--device", "cpu", "--quiet")
    assert code == 0, err
    (summary,) = load_summaries(tmp_path / "r" / "reevaluation")
    assert "efcil reevaluate" in summary["command"]
    assert summary["reevaluated_from"] == load_summaries(tmp_path / "r" / "dpcr")[0]["command"]
    assert "--precision fp32" in summary["reevaluated_from"]
    assert requested_precision(summary) == "fp32"


def test_features_are_those_of_the_task_and_of_the_test_images_seen(kept):
    files = sorted((kept / "trajectory" / "features").iterdir())
    assert [f.name for f in files] == [f"task-{t:02d}.safetensors" for t in range(1, 6)]
    for number, file in enumerate(files):
        tensors, meta = load_tensors(file)
        assert meta["task"] == number + 1
        assert ("old" in tensors) == (number > 0)
        assert set(tensors["labels"].unique().tolist()) == {2 * number, 2 * number + 1}
        assert set(tensors["test_labels"].unique().tolist()) == set(range(2 * number + 2))
        assert len(tensors["new"]) == len(tensors["labels"])
        assert len(tensors["test"]) == len(tensors["test_labels"])


@pytest.mark.parametrize(
    ("methods", "named"),
    [
        ("adc", ("adc",)),
        ("dpcr:shift_view=augmented", ("augmented",)),
        ("lwf", ("lwf",)),
        ("icarl", ("icarl",)),
        ("dpcr:rigde=1", ("rigde", "'ridge'")),
    ],
)
def test_what_cannot_be_reevaluated_is_refused(efcil, kept, methods, named):
    code, _, err = efcil("reevaluate", kept, methods, "--device", "cpu")
    assert code == 2
    assert_names(err, *named)
    assert not (kept / "reevaluation").exists()


def test_a_run_without_features_says_how_to_keep_them(efcil, tmp_path):
    code, _, err = run(efcil, "run", "dpcr", "digits", "--out", tmp_path / "r")
    assert code == 0, err
    code, _, err = efcil("reevaluate", tmp_path / "r", "dpcr")
    assert code == 2
    assert "--save-features" in err
    code, _, err = efcil("reevaluate", tmp_path, "dpcr")
    assert code == 2
    assert_names(err, "config.yaml")


def test_a_missing_or_damaged_task_is_reported(efcil, kept):
    files = sorted((kept / "trajectory" / "features").iterdir())
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:-9])
    code, _, err = efcil("reevaluate", kept, "dpcr")
    assert code != 0
    assert "task-02" in err
    files[1].unlink()
    code, _, err = efcil("reevaluate", kept, "dpcr")
    assert code != 0
    assert_names(err, "task 2")


def test_a_frozen_method_needs_the_first_backbones_features(efcil, tmp_path):
    code, _, err = run(efcil, "compare", "dpcr,lwf-ncm", "digits", "--save-features", "--out", tmp_path / "r")
    assert code == 0, err
    code, _, err = efcil("reevaluate", tmp_path / "r", "acil")
    assert code == 2
    assert_names(err, "acil", "first task")


# --- the released code's closed forms, research/float32_solves.py -----------------------------------------------------


def tool(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def float32():
    return tool("research/float32_solves")


@pytest.fixture(scope="module")
def oracle():
    return tool("tools/oracle")


def test_both_precisions_are_the_method(float32, made, tmp_path):
    """In float64 the released code's way gives what `dpcr` gave, in float32 nearly: nothing is ill-conditioned here."""
    options, accuracies = (of(made, "dpcr")[key] for key in ("options", "A_t"))
    how = ["--ridge", str(options["ridge"]), "--epsilon", str(options["shift_ridge"])]
    assert float32.main([str(made), *how, "--out", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["float64"]["accuracy"] == pytest.approx(accuracies, abs=1.5)  # of 42 to 355 images
    assert found["float32"]["accuracy"] == pytest.approx(found["float64"]["accuracy"], abs=1.5)
    assert found["command"].startswith("python research/float32_solves.py")


def test_a_run_without_features_cannot_be_read_in_float32(float32, tmp_path, capsys):
    with pytest.raises(SystemExit):
        float32.main([str(tmp_path)])
    assert_names(capsys.readouterr().err, "--save-features")


# --- what is left: tools/oracle.py ------------------------------------------------------------------------------------


def test_of_one_task_the_oracle_knows_no_more(efcil, oracle, tmp_path):
    """Nothing has moved: true statistics are those that the run had."""
    settings = [part for setting in SMALL for part in ("--set", setting)]
    code, _, err = efcil("run", "dpcr", "digits", *settings, "--tasks", "1", "--out", tmp_path / "r", "--quiet")
    assert code == 0, err
    assert oracle.main([str(tmp_path / "r"), "dpcr", "--device", "cpu", "--out", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["oracle"]["dpcr"]
    assert found["A_f"] == pytest.approx(of(tmp_path, "r")["A_f"])


def test_the_oracle_sees_old_images_with_the_last_backbone(oracle, made):
    """All images as one task: the ridge solution of their features, worked out here, has the same accuracy."""
    home = made / "trajectory"
    names = ["dpcr", "rrcr+tssp+cip", "lwf", "acil", "adc", "lwf+ldc+ridge", "dpcr:ridge_view=augmented"]
    found = oracle.measured(made, names, None, Backend.choose("cpu"))
    experiment = experiment_of(config_of(home)["run"], ["rrcr+tssp+cip"], [])
    data = datasets.load("digits", None, experiment.data)
    backbone = LEARNERS["lwf"](experiment.training, data.channels, Backend.choose("cpu"), experiment.seed).backbone
    tensors, _ = load_tensors(home / "checkpoints" / "task-05.safetensors")
    of_backbone = "learner.student.backbone."
    backbone.load_state_dict({k.removeprefix(of_backbone): v for k, v in tensors.items() if k.startswith(of_backbone)})
    ridge = experiment.methods["rrcr+tssp+cip"][1].ridge

    def features(part):
        pixels = ImageBatches(torch.from_numpy(part.images), data.mean, data.std, Backend.choose("cpu"))
        return extract(backbone, pixels, Backend.choose("cpu")).double()

    x, hot = features(data.train), torch.eye(10, dtype=torch.float64)[data.train.labels]
    weights = torch.linalg.solve(x.T @ x + ridge * torch.eye(x.shape[1], dtype=torch.float64), x.T @ hot)
    hits = (features(data.test) @ weights).argmax(1) == torch.from_numpy(data.test.labels)
    assert found["rrcr+tssp+cip"]["A_f"] == pytest.approx(100 * float(hits.double().mean()))
    assert found["dpcr"]["A_f"] != of(made, "dpcr")["A_f"]
    assert 0 < found["dpcr"]["new"] <= 100
    assert found["lwf+ldc+ridge"] == found["dpcr"] != found["dpcr:ridge_view=augmented"], "nothing has moved"
    assert all(0 < found[name]["A_f"] <= 100 for name in names)


def test_the_oracle_reads_what_the_run_read(efcil, oracle, tmp_path):
    """Of one task again: a method that reads more of its backbone is measured with that."""
    settings = [part for setting in [*SMALL, "intermediate_stages=true"] for part in ("--set", setting)]
    asked = ("run", "dpcr-plus", "digits", "--preset", "quick", *settings, "--tasks", "1", "--quiet")
    code, _, err = efcil(*asked, "--out", tmp_path / "r")
    assert code == 0, err
    found = oracle.measured(tmp_path / "r", ["dpcr-plus"], None, Backend.choose("cpu"))["dpcr-plus"]
    assert found["A_f"] == pytest.approx(of(tmp_path, "r")["A_f"])


def test_less_is_read_again_than_was_read(efcil, tmp_path):
    """The numbers that it had in the run; what was not read cannot be asked for."""
    settings = [part for setting in [*SMALL, "intermediate_stages=2"] for part in ("--set", setting)]
    asked = (
        "compare",
        "dpcr-plus,dpcr-plus:use_stages=1",
        "digits",
        "--preset",
        "quick",
        *settings,
        "--tasks",
        "2",
        "--quiet",
    )
    code, _, err = efcil(*asked, "--save-features", "--out", tmp_path / "r")
    assert code == 0, err
    code, _, err = efcil(
        "reevaluate", tmp_path / "r", "dpcr-plus,dpcr-plus:use_stages=1", "--out", tmp_path / "again", "--quiet"
    )
    assert code == 0, err
    for label in ("dpcr-plus", "dpcr-plus:use_stages=1"):
        assert of(tmp_path / "again", label)["A_f"] == of(tmp_path / "r", label)["A_f"]
    code, _, err = efcil("reevaluate", tmp_path / "r", "dpcr-plus:use_stages=3", "--out", tmp_path / "more")
    assert code == 2
    assert_names(err, "use_stages=3", 2)


def test_the_oracle_needs_a_finished_run(oracle, kept, capsys):
    (kept / "trajectory" / "checkpoints" / "task-05.safetensors").unlink()
    with pytest.raises(SystemExit):
        oracle.main([str(kept), "dpcr", "--device", "cpu"])
    assert_names(capsys.readouterr().err, "--resume")
