"""The benchmark of runs beside other programs."""

import json


def test_busy_times_a_command_alone_and_beside_loops(busy, tmp_path, monkeypatch, capsys):
    lines = []
    monkeypatch.setattr(busy, "seconds", lambda command: lines.append(command) or float(len(lines)))
    out = tmp_path / "busy.json"
    assert busy.main(["--repeats", "3", "--loops", "1", "--check", "--out", str(out), "--machine", "a box"]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))["raw"]["busy"]
    assert found["turns"] == {"alone": [1, 3, 5], "beside": [2, 4, 6]}
    assert found["ratio"] == 4 / 3
    monkeypatch.setattr(busy, "LIMIT", 1.3)
    lines.clear()
    assert busy.main(["--repeats", "3", "--loops", "1", "--check"]) == 1
    assert "beside 1 busy loops" in capsys.readouterr().out


def test_busy_leaves_the_choice_of_threads_to_the_command(busy, monkeypatch):
    seen = {}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(busy.subprocess, "run", lambda line, check, env: seen.update(line=line, env=env))
    assert busy.seconds(["run"]) >= 0
    assert "--out" in seen["line"]
    assert not {"OMP_NUM_THREADS", "OMP_WAIT_POLICY"} & seen["env"].keys()
