"""Ensembles of training seeds: standardized scores added, by hand and by command; what is none is refused."""

import json
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from efcil.accel.backend import Backend
from efcil.cli import app
from efcil.experiment.reevaluate import config_of, evaluated_tasks, experiment_of
from efcil.platform_support import file_name
from messages import assert_names

SMALL = ["width=4", "backbone=resnet10", "first.epochs=1", "later.epochs=1", "first.milestones=[]"]
SMALL += ["later.milestones=[]"]
METHODS = "dpcr,lwf-ncm,dpcr:ridge=2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A comparison and a run of another seed."""
    place = tmp_path_factory.mktemp("ensemble")
    settings = [part for setting in SMALL for part in ("--set", setting)]
    for kind, name, seed in (("compare", "a", 0), ("run", "b", 1)):
        about = ["--seed", str(seed), "--order", "7", "--save-features", "--quiet", "--out", str(place / name)]
        result = CliRunner().invoke(app, [kind, "dpcr", "digits", "--tasks", "5", "--device", "cpu", *about, *settings])
        assert result.exit_code == 0, result.output
    return place


def literal(homes, method):
    """Image by image: scores minus their mean by their standard deviation, added."""
    backend, followed = Backend.choose("cpu"), []
    for home in homes:
        config = config_of(home)["run"]
        followed.append(list(evaluated_tasks(home, experiment_of(config, [method], []), config["learner"], backend)))
    accuracies = []
    for tasks in zip(*followed, strict=True):
        hits = 0
        for image, label in enumerate(tasks[0].labels.tolist()):
            total = 0
            for task in tasks:
                row = task.scores[method][image].double().numpy()
                total = total + (row - row.mean()) / row.std()
            hits += int(np.argmax(total) == label)
        accuracies.append(100 * hits / len(tasks[0].labels))
    return accuracies


def test_an_ensemble_is_its_formula_and_says_what_it_costs(efcil, runs, tmp_path):
    code, out, err = efcil("ensemble", METHODS, runs / "a", runs / "b", "--out", tmp_path, "--device", "cpu")
    assert code == 0, err
    homes = [runs / "a" / "trajectory", runs / "b"]
    singles = [json.loads((runs / name / "summary.json").read_text()) for name in ("a/dpcr", "b")]
    for method, label in (("dpcr", "dpcr:ensemble=2"), ("dpcr:ridge=2", "dpcr:ridge=2,ensemble=2")):
        summary = json.loads((tmp_path / file_name(label) / "summary.json").read_text())
        assert summary["A_t"][1:] == pytest.approx(literal(homes, method)[1:])  # two classes: disagreement is a tie
        assert (summary["method"], summary["seed"], summary["order"], summary["tasks_done"]) == (label, "0, 1", "7", 5)
        assert summary["seconds"] > sum(single["seconds"] for single in singles)
        assert f"{label}: A_f of its runs alone" in out
    summary = json.loads((tmp_path / file_name("dpcr:ensemble=2") / "summary.json").read_text())
    wanted = [{"seed": s["seed"], "A_f": s["A_f"], "A_avg": s["A_avg"]} for s in singles]
    assert summary["ensemble"] == wanted
    assert wanted[0]["A_f"] != wanted[1]["A_f"], "seeds differ"
    assert (tmp_path / "report.html").exists()


def test_what_is_no_ensemble_is_refused(efcil, runs, tmp_path):
    def refused(*names, named, method="dpcr"):
        code, _, err = efcil("ensemble", method, *(runs / n for n in names), "--out", tmp_path / "e", "--device", "cpu")
        assert code == 2, err
        assert_names(err, *named)
        assert not (tmp_path / "e").exists()

    refused("a", named=("two", "--seed"))
    refused("a", "a", named=("0, 0", "different"))
    for old, new, word in (("order: '7'", "order: '8'", "order"), ("fingerprint: ", "fingerprint: f", "fingerprint")):
        other = shutil.copytree(runs / "b", tmp_path / word)
        text = (other / "config.yaml").read_text()
        assert old in text
        (other / "config.yaml").write_text(text.replace(old, new))
        refused("a", other, named=(word, "--seed"))
    refused("a", "nowhere", named=("nowhere",))
    refused("a", "b", named=("adc",), method="adc")
    unfinished = shutil.copytree(runs / "b", tmp_path / "unfinished")
    summary = json.loads((unfinished / "summary.json").read_text())
    (unfinished / "summary.json").write_text(json.dumps(summary | {"tasks_done": 3}))
    refused("a", unfinished, named=(unfinished,))
