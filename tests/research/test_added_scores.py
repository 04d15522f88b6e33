"""Scores of methods of one run, added: what is printed is what the run measured, and a sum of standardized scores."""

import pytest

import efcil
from efcil.experiment.ensemble import standardized
from efcil.experiment.reevaluate import config_of, evaluated_tasks, experiment_of
from research import added_scores as tool


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    results = efcil.compare(
        ["dpcr", "acil"], "digits", epochs=1, orders=[4], out=out, save_features=True, progress=False
    )
    return out, results


def test_each_method_is_as_measured_and_the_sum_is_of_standardized_scores(run, backend, capsys):
    out, results = run
    (home,) = tool.homes(out)
    found = tool.added(home, ["dpcr", "acil"], "cpu")
    assert list(found) == ["dpcr", "acil", "dpcr + acil"]
    for name in ("dpcr", "acil"):
        assert found[name].A_t == pytest.approx(list(results[name].accuracy_per_task), abs=1e-9)
    config = config_of(home)["run"]
    last = list(evaluated_tasks(home, experiment_of(config, ["dpcr", "acil"], ()), config["learner"], backend))[-1]
    total = standardized(last.scores["dpcr"]) + standardized(last.scores["acil"])
    wanted = 100 * float((total.argmax(1) == last.labels).double().mean())
    assert found["dpcr + acil"].A_t[-1] == pytest.approx(wanted)
    assert tool.main([str(out), "dpcr,acil"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].split() == [f"{wanted:.2f}", printed[2].split()[1], "dpcr", "+", "acil,", "order", "4"]


def test_a_run_without_features_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path), "dpcr"])
    assert "run it with --save-features" in capsys.readouterr().err
