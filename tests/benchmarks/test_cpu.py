"""The benchmark of the forms that networks have on a CPU."""

import json


def test_cpu_times_both_forms_in_turns(cpu, tmp_path, capsys):
    out = tmp_path / "cpu.json"
    given = ["--repeats", "1", "--images", "16", "--only", "digits", "--out", str(out), "--machine", "a box"]
    assert cpu.main(given) == 0
    raw = json.loads(out.read_text(encoding="utf-8"))["raw"]
    assert [row["what"] for row in raw["cpu_forms"]] == ["train", "distill", "extract"]
    assert all(row["ratio"] == row["plain"] / row["ours"] > 0 for row in raw["cpu_forms"])
    assert "digits extract" in capsys.readouterr().out


def test_cpu_fails_below_a_bound(cpu, monkeypatch, capsys):
    slower = {what: {"plain": [1.0, 1.0], "ours": [0.8, 0.8]} for what in ("train", "distill", "extract")}
    monkeypatch.setattr(cpu, "measure_network", lambda *given: slower)
    assert cpu.main(["--only", "digits", "--check"]) == 0
    assert cpu.main(["--only", "resnet18-16", "--check"]) == 1, "1.25 is below 1.4 for features"
    assert "1.25 x" in capsys.readouterr().out


def test_plain_is_the_network_as_it_is(cpu):
    both = cpu.forms()
    trial = cpu.Trial(cpu.NETWORKS["digits"], both["plain"], 64)
    assert all(p.is_contiguous() for p in trial.learner.parameters())
    assert both["plain"].inference(trial.learner.backbone).call is trial.learner.backbone
    assert both["ours"].inference(trial.learner.backbone).call is not trial.learner.backbone
