"""The command, end to end: what it prints, what it writes, and one clear line for every bad input."""

import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from PIL import Image

from efcil.cli import experiments
from efcil.errors import Interrupted
from efcil.experiment.interruption import stoppable
from efcil.experiment.reporters import JsonReporter, LineReporter, PrefixReporter
from efcil.methods import METHODS, measured
from messages import assert_names

QUICK = ["width=2", "first.epochs=2", "later.epochs=1", "first.milestones=[]", "later.milestones=[]"]
TINY = [part for setting in QUICK for part in ("--set", setting)]


@pytest.fixture
def one_line(efcil):
    """Run a command that must fail: return its one line."""

    def call(*arguments, code=2):
        got, out, err = efcil(*arguments)
        assert got == code, (got, out, err)
        assert err.startswith("efcil: ")
        assert err.count("\n") == 1, err
        assert "Traceback" not in out + err
        return err

    return call


def pictures(root, classes=("cat", "dog"), count=8, size=12):
    rng = np.random.default_rng(0)
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.normal(100 + 60 * c, 30, (size, size, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


# --- what people get --------------------------------------------------------------------------------------------------


def spent(*arguments):
    """Processor time of a Python process, since a busy machine takes longer by the clock; and what it said."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime, done.stdout


def test_help_is_instant():
    """Half a second; where even that time is long, five times what the library takes that reads the command line."""
    best, library = 9.0, 9.0
    for _ in range(5):
        seconds, said = spent("-m", "efcil", "--help")
        best, library = min(best, seconds), min(library, spent("-c", "import typer, rich.console")[0])
    assert "demo" in said
    assert best < max(0.5, 5 * library), f"{best:.2f} s, {library:.2f} s of them for the library"


def test_help_imports_nothing_heavy():
    heavy = ("torch", "numpy", "matplotlib", "sklearn", "pydantic")
    code = f"import sys, efcil.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version(efcil):
    code, out, _ = efcil("--version")
    assert code == 0
    assert re.fullmatch(r"efcil \d+\.\d+\.\d+\n", out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One finished run of a real process."""
    out = tmp_path_factory.mktemp("runs") / "one"
    command = [
        sys.executable,
        "-m",
        "efcil",
        "run",
        "dpcr",
        "digits",
        "--tasks",
        "5",
        "--order",
        "1993",
        "--out",
        str(out),
    ]
    done = subprocess.run([*command, *TINY], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return out, done


def test_run_directory_is_the_contract(finished):
    out, _ = finished
    summary = json.loads((out / "summary.json").read_text())
    keys = "method preset dataset tasks order seed A_f A_avg A_t matrix forgetting seconds commit command".split()
    assert set(keys) <= set(summary)
    backend = {"precision": "fp32", "threads": 1, "world_size": 1, "concurrent_runs": 1}
    assert backend.items() <= summary.items()
    assert summary["device"] == f"{platform.machine()} CPU"
    assert (summary["method"], summary["dataset"], summary["tasks"], summary["order"]) == ("dpcr", "digits", 5, "1993")
    assert summary["status"] == "complete"
    assert summary["A_f"] == summary["A_t"][-1]
    assert summary["A_avg"] == pytest.approx(sum(summary["A_t"]) / 5)
    assert all(0 <= a <= 100 for a in summary["A_t"])
    assert [len(row) for row in summary["matrix"]] == [5] * 5
    assert summary["matrix"][0][1:] == [None] * 4
    assert summary["command"].startswith("efcil run dpcr digits --tasks 5 --order 1993")
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["run"]["methods"]["dpcr"]["ridge"] > 0
    assert config["run"]["training"]["first.epochs"] == 2
    assert {"torch", "python", "efcil"} <= set(config["versions"])
    assert config["machine"]["threads"] == 1
    assert config["commit"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(e["task"], e["epoch"]) for e in lines if "epoch" in e] == [(1, 1), (1, 2), (2, 1), (3, 1), (4, 1), (5, 1)]
    assert [e["A_t"]["dpcr"] for e in lines if "A_t" in e] == summary["A_t"]
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["task-04.safetensors", "task-05.safetensors"]
    page = (out / "report.html").read_text()
    assert f"{summary['A_f']:.2f}" in page


def test_plain_lines_where_there_is_no_terminal(finished):
    _, done = finished
    assert "\x1b" not in done.stdout
    assert len(re.findall(r"^task \d of 5: A_t dpcr \d+\.\d\d$", done.stdout, re.M)) == 5
    assert re.search(r"^dpcr: A_f \d+\.\d\d, A_avg \d+\.\d\d, \d+ s$", done.stdout, re.M)
    assert [done.stdout.count(f"{name}: ") for name in ("A_t", "A_f", "A_avg")] == [1, 1, 1], "explained once each"
    assert done.stderr == ""


def test_report_of_runs(finished, efcil, tmp_path):
    out, _ = finished
    code, text, _ = efcil("report", out, "--out", tmp_path / "r")
    summary = json.loads((out / "summary.json").read_text())
    assert code == 0
    assert f"{summary['A_f']:.2f}" in text
    assert "<svg" in (tmp_path / "r" / "report.html").read_text()
    for name in ("report.md", "report.csv", "report.tex", "curves.png", "curves.svg"):
        assert (tmp_path / "r" / name).stat().st_size > 100


def test_json_lines(efcil, tmp_path):
    code, out, _ = efcil("run", "lwf-ncm", "digits", "--tasks", 2, "--json", "--out", tmp_path / "r", *TINY)
    assert code == 0
    events = [json.loads(line) for line in out.splitlines()]
    kinds = [e["event"] for e in events]
    assert kinds == ["started", "epoch", "epoch", "solving", "task", "epoch", "solving", "task", "finished"]
    assert events[-1]["summaries"][0]["A_t"] == [e["A_t"]["lwf-ncm"] for e in events if e["event"] == "task"]


@pytest.mark.parametrize(
    "voice", [JsonReporter(), LineReporter(), PrefixReporter("order 7")], ids=lambda voice: type(voice).__name__
)
def test_a_line_is_printed_in_one_piece(monkeypatch, voice):
    """Where nothing is buffered, what another run prints at the same time would come before its end."""
    pieces = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=pieces.append, flush=lambda: None))
    voice.note("so")
    (line,) = filter(None, pieces)
    assert "so" in line
    assert line.endswith("\n")


def test_quiet(efcil, tmp_path):
    assert efcil("run", "lwf", "digits", "--tasks", 2, "--quiet", "--out", tmp_path / "r", *TINY) == (0, "", "")
    assert (tmp_path / "r" / "summary.json").exists()


def test_bars_on_a_terminal(tmp_path):
    """A real pseudo-terminal: bars with the time left, then the table."""
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm", COLUMNS="110", OMP_NUM_THREADS="1")
        arguments = ["-m", "efcil", "run", "dpcr", "digits", "--tasks", "5", "--out", str(tmp_path / "r"), *TINY]
        os.execv(sys.executable, [sys.executable, *arguments])
    text = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:
            break
        if not part:
            break
        text += part
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, text.decode()
    shown = text.decode()
    assert "━" in shown
    assert "left" in shown
    assert re.search(r"task\s+5/5", shown)
    assert "forgetting" in shown


def test_compare_is_one_trajectory(efcil, tmp_path):
    out = tmp_path / "c"
    labels = ["dpcr", "lwf-ncm", "dpcr:rank_rule=numerical"]
    code, _, err = efcil("compare", ",".join(labels), "digits", "--tasks", 2, "--out", out, *TINY)
    assert code == 0, err
    folders = [label.replace(":", "-") for label in labels]
    assert sorted(p.name for p in out.iterdir() if p.is_dir()) == sorted([*folders, "trajectory"])
    assert (out / "trajectory" / "checkpoints" / "task-02.safetensors").exists()
    for folder, label in zip(folders, labels, strict=True):
        assert json.loads((out / folder / "summary.json").read_text())["method"] == label
    alone = tmp_path / "alone"
    efcil("run", "dpcr", "digits", "--tasks", 2, "--out", alone, *TINY)
    ours, theirs = (json.loads((p / "summary.json").read_text()) for p in (out / "dpcr", alone))
    assert ours["matrix"] == theirs["matrix"], "a method must score the same alone and in a comparison"


def test_a_label_that_begins_another_resumes_as_itself(efcil, tmp_path):
    """ridge=1 and ridge=1.5: the state of one must not leak into the other when a run goes on."""
    from efcil.tensor_files import load_tensors

    out, labels = tmp_path / "c", ["dpcr:ridge=1", "dpcr:ridge=1.5"]
    summaries = {label: out / label.replace(":", "-") / "summary.json" for label in labels}
    arguments = ["compare", ",".join(labels), "digits", "--tasks", 5, "--out", out, "--quiet", *TINY]
    assert efcil(*arguments)[0] == 0
    want = {label: json.loads(path.read_text())["matrix"] for label, path in summaries.items()}
    tensors, _ = load_tensors(out / "trajectory" / "checkpoints" / "task-05.safetensors")
    for label in labels:
        own = sorted(k for k in tensors if f"classifiers/{label}/" in k)
        assert [k.removeprefix("trajectory.") for k in own] == [f"classifiers/{label}/weight"]
    (out / "trajectory" / "checkpoints" / "task-05.safetensors").unlink()
    assert efcil(*arguments, "--resume")[0] == 0
    assert {label: json.loads(path.read_text())["matrix"] for label, path in summaries.items()} == want


def test_compare_several_orders_at_once(efcil, tmp_path):
    out = tmp_path / "c"
    arguments = ["--orders", "identity,1993", "--tasks", 2, "--out", out, "--concurrent-runs", 2, *TINY]
    code, text, err = efcil("compare", "dpcr,lwf", "digits", *arguments)
    assert code == 0, err
    places = {order: out / f"order-{order}" / "dpcr" / "summary.json" for order in ("identity", "1993")}
    assert {o: json.loads(p.read_text())["order"] for o, p in places.items()} == {
        "identity": "identity",
        "1993": "1993",
    }
    assert "±" in text
    assert "order 1993: task 2 of 2" in text
    assert (out / "report.html").exists()
    assert len(list(out.glob("matrix-*.png"))) == 4
    assert all((out / name).stat().st_size > 1000 for name in ("curves.png", "curves.svg"))
    alone = tmp_path / "alone"
    assert efcil("run", "dpcr", "digits", "--order", "1993", "--tasks", 2, "--out", alone, "--quiet", *TINY)[0] == 0
    both = [json.loads(p.read_text())["matrix"] for p in (alone / "summary.json", places["1993"])]
    assert both[0] == both[1], "a comparison changes no result"


def test_config_file_and_what_is_typed_wins(efcil, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "method: dpcr\ndataset: digits\ntasks: 2\norder: 1993\nset: {width: 2, first.epochs: 1, first.milestones: [],"
        " later.epochs: 1, later.milestones: [], shift_ridge: 1.0e-6}\n"
    )
    out = tmp_path / "r"
    code, _, err = efcil("run", "--config", path, "--order", "identity", "--set", "ridge=7", "--out", out, "--quiet")
    assert code == 0, err
    run = yaml.safe_load((out / "config.yaml").read_text())["run"]
    assert (run["order"], run["split"], run["training"]["width"]) == ("identity", {"tasks": 2}, 2)
    assert (run["methods"]["dpcr"]["ridge"], run["methods"]["dpcr"]["shift_ridge"]) == (7.0, 1e-6)
    again = tmp_path / "again"
    assert efcil("run", "--config", out / "config.yaml", "--out", again, "--quiet")[0] == 0
    same = [json.loads((p / "summary.json").read_text())["matrix"] for p in (out, again)]
    assert same[0] == same[1], "the config.yaml of a run must give the same run"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tasks: five", ("tasks='five'", "int")),
        ("taks: 5", ("taks", "'tasks'")),
        ("- a", ("c.yaml",)),
        ("a: [", ("c.yaml", "YAML")),
        ("set: 3", ("set",)),
        ("quiet: 1", ("quiet=1", "bool")),
    ],
)
def test_bad_config_file(one_line, tmp_path, text, named):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    line = one_line("run", "dpcr", "digits", "--config", path, "--out", tmp_path / "r")
    assert_names(line, *named)


def test_increments_from_the_command_line(efcil, tmp_path):
    out = tmp_path / "r"
    arguments = ["run", "lwf-ncm", "digits", "--init-cls", 4, "--increment", "3,2", "--out", out, "--quiet", *TINY]
    assert efcil(*arguments)[0] == 0
    assert json.loads((out / "summary.json").read_text())["task_sizes"] == [4, 3, 2, 1]


@pytest.mark.parametrize("dataset", ["digits", "glyphs"])
def test_built_in_sets_have_a_preset_that_needs_no_option(efcil, tmp_path, dataset):
    small = ["--set", "data.classes=6", "--set", "data.train_per_class=10"] if dataset == "glyphs" else []
    code, _, err = efcil("run", "dpcr", dataset, "--tasks", 2, "--out", tmp_path / "r", "--quiet", *small, *TINY)
    assert code == 0, err
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["preset"] == "quick"


def test_folder_end_to_end(efcil, tmp_path, monkeypatch):
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path / "cache"))
    root = pictures(tmp_path / "pictures", ("a", "b", "c", "d"))
    arguments = ["run", "dpcr", "folder", "--data", root, "--tasks", 2, "--set", "data.short_side=12", "--quiet", *TINY]
    code, _, err = efcil(*arguments, "--out", tmp_path / "r")
    assert code == 0, err
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["task_sizes"] == [2, 2]


def test_methods_data_and_doctor(efcil):
    code, out, _ = efcil("methods")
    assert code == 0
    assert all(name in out for name in METHODS)
    row = next(line for line in out.splitlines() if line.startswith("dpcr "))
    assert "d(d+1)/2 + d" in row
    assert "50.24 / 63.21" in row, "the paper's number"
    assert_names(row, *(f"{value:.2f}" for value in measured()["dpcr"]["ours"]))
    own = measured()["dpcr-plus (tuned)"]["ours"]  # with the preset that it has where it is not told another
    assert_names(next(line for line in out.splitlines() if line.startswith("dpcr-plus ")), *(f"{v:.2f}" for v in own))
    code, out, _ = efcil("data", "list")
    assert code == 0
    assert all(name in out for name in ("digits", "glyphs", "cifar100", "folder", "license"))
    code, out, _ = efcil("doctor")
    assert code == 0
    for words in ("torch 2.", "CPU cores", "cache of decoded images"):
        assert words in out


def test_data_verify(efcil, tmp_path, monkeypatch):
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path / "cache"))
    code, out, _ = efcil("data", "verify", "folder", pictures(tmp_path / "p"))
    assert code == 0
    assert "folder: 2 classes, 12 training and 4 test images" in out
    assert "digits: 10 classes" in efcil("data", "verify", "digits")[1]


def test_data_fetch_from_a_server(efcil, tmp_path, monkeypatch):
    """The command itself, against a server on loopback; tests/data/test_fetch.py has the broken connections."""
    import functools
    import hashlib
    import http.server
    import threading

    from efcil import data
    from efcil.data.fetch import Remote

    served = tmp_path / "served"
    served.mkdir()
    (served / "x.bin").write_bytes(b"pixels" * 1000)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=served)
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *a: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        checksum = "md5:" + hashlib.md5(b"pixels" * 1000).hexdigest()
        address = f"http://127.0.0.1:{server.server_address[1]}/x.bin"
        monkeypatch.setattr(data, "remote", lambda name: Remote(address, "x.bin", checksum))
        code, out, err = efcil("data", "fetch", "cifar100", "--data", tmp_path / "got")
        server.shutdown()
    assert code == 0, err
    assert (tmp_path / "got" / "x.bin").read_bytes() == b"pixels" * 1000
    assert f"use it with --data {tmp_path / 'got'}" in out


# --- bad input: one clear line, a non-zero exit, nothing lost ---------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run", "dcpr", "digits", "--tasks", "5"], ("'dcpr'", "'dpcr'")),
        (["run", "dpcr", "digit", "--tasks", "5"], ("'digit'", "'digits'")),
        (
            ["run", "dpcr", "digits", "--preset", "quik"],
            ("'quik'", "digits", "'quick'"),
        ),
        (["run", "dpcr", "digits", "--set", "rigde=3"], ("rigde", "'ridge'")),
        (["run", "dpcr", "digits", "--set", "ridge"], ("--set ridge", "key=value")),
        (["run", "dpcr", "digits", "--set", "ridge=-1"], ("ridge=-1", 0)),
        (["run", "dpcr", "digits", "--set", "later.lr=fast"], ("later.lr='fast'",)),
        (["run", "dpcr", "digits", "--set", "rank_rule=posotive"], ("rank_rule='posotive'", "'positive'")),
        (["run", "dpcr", "digits", "--tasks", "3"], ("--tasks 3", 10, 1, 2, 5)),
        (["run", "dpcr", "digits", "--order", "nowhere.txt"], ("'nowhere.txt'", "'identity'")),
        (["run", "dpcr", "digits", "--order", "99999999999"], (99999999999, 4294967296)),
        (["run", "dpcr", "digits", "--set", "rank_tolerance=0.1"], ("rank_rule=positive", "rank_tolerance")),
        (["run", "dpcr", "digits", "--increment", "two"], ("--increment two",)),
        (["run", "dpcr", "digits", "--device", "warp"], ("--device warp", "--device cpu")),
        (["run", "dpcr", "digits", "--device", "meta"], ("--device meta", "--device cpu")),
        (["run", "dpcr", "digits", "--device", ""], ("--device", "--device cpu")),
        (["compare", "dpcr,lwf", "digits", "--orders", "1,2", "--device", "cpu:x"], ("cpu:x", "--device cpu")),
        (["run", "dpcr", "digits", "--set", "backbone=resnet81"], ("resnet81",)),
        (["run", "dpcr", "digits", "--set", "augment=cifr"], ("cifr", "'cifar'")),
        (
            ["run", "acil", "digits", "--set", "shift_ridge=1"],
            ("shift_ridge", "acil", "dpcr", "dpcr-plus", "dp-ncm"),
        ),
        (
            ["compare", "dpcr,fecam:rank_rule=none", "digits"],
            ("rank_rule", "fecam", "dpcr", "dpcr-plus", "dp-ncm"),
        ),
        (["run"], ("METHOD", "DATASET", "efcil run dpcr digits")),
        (["run", "dpcr", "cifar100"], ("cifar100", "--data DIR")),
        (["run", "dpcr", "cifar100", "--data", "/nonexistent"], ("/nonexistent", "efcil data fetch cifar100")),
        (["run", "dpcr", "folder", "--data", "/nonexistent"], ("/nonexistent",)),
        (["run", "--config", "nowhere.yaml"], ("--config nowhere.yaml", "No such file")),
        (["compare", "dpcr,dpcr", "digits"], ("dpcr,dpcr",)),
        (["report", "/nonexistent"], ("/nonexistent",)),
        (["data", "fetch", "digits"], ("digits",)),
    ],
)
def test_bad_input_gets_one_clear_line(one_line, tmp_path, arguments, named):
    if arguments[0] in ("run", "compare"):
        arguments = [*arguments, "--out", str(tmp_path / "r")]
        if arguments[0] == "run" and not {"--tasks", "--increment", "--config"} & set(arguments):
            arguments += ["--tasks", "5"]
    assert_names(one_line(*arguments), *named)
    assert not (tmp_path / "r" / "config.yaml").exists(), "nothing may be claimed by a run that cannot start"


def test_all_errors_of_a_command_are_reported_together(one_line, tmp_path):
    line = one_line("run", "dpcr", "digits", "--set", "rigde=3", "--set", "epoch=2", "--out", tmp_path)
    assert_names(line, "rigde", "epoch")
    line = one_line("run", "dpcr", "digits", "--set", "ridge=-3", "--set", "batch_size=0", "--out", tmp_path)
    assert_names(line, "ridge=-3", "batch_size=0")


def test_half_downloaded_data(one_line, tmp_path):
    (tmp_path / "cifar-100-python.tar.gz.part").write_bytes(b"x" * 1000)
    line = one_line("run", "dpcr", "cifar100", "--data", tmp_path, "--tasks", 10, "--out", tmp_path / "r")
    assert_names(line, "1,000", "169,001,437", f"efcil data fetch cifar100 --data {tmp_path}")


def test_empty_class(one_line, tmp_path, monkeypatch):
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path / "cache"))
    root = pictures(tmp_path / "p")
    (root / "empty").mkdir()
    assert "empty" in one_line("run", "dpcr", "folder", "--data", root, "--tasks", 1, "--out", tmp_path / "r")


def test_bad_image_is_named_and_skipped_only_when_asked(one_line, efcil, tmp_path, monkeypatch):
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path / "cache"))
    root = pictures(tmp_path / "p")
    (root / "cat" / "broken.png").write_bytes((root / "cat" / "0.png").read_bytes()[:60])
    (root / "dog" / "text.jpg").write_text("not an image")
    arguments = ["run", "dpcr", "folder", "--data", root, "--tasks", 2, "--set", "data.short_side=12", *TINY]
    line = one_line(*arguments, "--out", tmp_path / "r")
    assert "broken.png" in line
    assert "text.jpg" in line
    assert "--skip-bad" in line
    code, out, err = efcil(*arguments, "--out", tmp_path / "r", "--skip-bad")
    assert code == 0, err
    assert "broken.png" in out


def test_directory_that_holds_another_run(one_line, efcil, tmp_path):
    out = tmp_path / "r"
    arguments = ["run", "lwf", "digits", "--tasks", 2, "--out", out, "--quiet", *TINY]
    assert efcil(*arguments)[0] == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    line = one_line(*arguments)
    assert_names(line, out, "lwf", "digits", "2 of 2 tasks", "--resume", "--out")
    line = one_line("run", "dpcr", "digits", "--tasks", 2, "--out", out, "--resume", *TINY)
    assert_names(line, out, "methods.dpcr", "--out")
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before, "nothing may be lost"
    assert efcil(*arguments, "--resume")[0] == 0, "a finished run can be taken up and is still finished"


def test_resuming_a_finished_run_claims_nothing_anew(efcil, tmp_path):
    out = tmp_path / "r"
    arguments = ["run", "lwf", "digits", "--tasks", 2, "--out", out, *TINY]
    assert efcil(*arguments)[0] == 0
    before = (out / "summary.json").read_bytes()
    code, text, _ = efcil(*arguments, "--resume")
    assert code == 0
    assert "this run is finished" in text
    assert (out / "summary.json").read_bytes() == before


def test_order_file_that_changed_is_another_run(one_line, efcil, tmp_path):
    order = tmp_path / "order.txt"
    order.write_text("\n".join("0123456789"))
    arguments = ["run", "lwf", "digits", "--tasks", 2, "--order", order, "--out", tmp_path / "r", "--quiet", *TINY]
    assert efcil(*arguments)[0] == 0
    order.write_text("\n".join("9876543210"))
    assert_names(one_line(*arguments, "--resume"), "class_order", "--out")


def test_another_machine_is_reported(efcil, tmp_path):
    arguments = ["run", "lwf", "digits", "--tasks", 2, "--out", tmp_path / "r", *TINY]
    assert efcil(*arguments)[0] == 0
    code, text, _ = efcil(*arguments, "--resume", "--precision", "bf16")
    assert code == 0
    assert "the run began on another machine" in text


def test_demo_replaces_only_a_demo(efcil, tmp_path, monkeypatch):
    executed = []
    monkeypatch.setattr(experiments, "_execute", lambda names, dataset, *_, **more: executed.append((names, dataset)))
    for learner, command in (("lwf", "efcil demo --out demo"), ("joint", "efcil run joint digits")):
        (tmp_path / learner / "trajectory").mkdir(parents=True)
        (tmp_path / learner / "trajectory" / "config.yaml").write_text(f"command: {command}\n")
        (tmp_path / learner / "letter.txt").write_text("keep me")
    assert efcil("demo", "--out", tmp_path, "--quiet")[0] == 0
    assert executed == [(experiments.DEMO, "digits")]
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"lwf/letter.txt", "joint/letter.txt", "joint/trajectory/config.yaml"}


def test_loss_that_is_not_finite(one_line, efcil, tmp_path, monkeypatch):
    """On a slow disk: what was being written when the run failed is there before the directory is let go."""
    from efcil.experiment import checkpoints

    out, store, failed = tmp_path / "r", checkpoints.CheckpointStore, threading.Event()
    write, save, settle, last = checkpoints.write_tensors, store.save_task, store.settle, []

    def slow(path, *what):
        if path.name == "task-01.safetensors":
            failed.wait(30)
        write(path, *what)

    def saved(self, *what):
        save(self, *what)
        last.append(what[0])

    def settled(self):
        if last:  # from here on nothing waits for the disk but the end of the run
            failed.set()
        settle(self)

    monkeypatch.setattr(checkpoints, "write_tensors", slow)
    monkeypatch.setattr(store, "save_task", saved)
    monkeypatch.setattr(store, "settle", settled)
    arguments = [
        "run",
        "lwf",
        "digits",
        "--tasks",
        2,
        "--out",
        out,
        "--set",
        "later.lr=1e6",
        "--set",
        "later.weight_decay=1e6",
        "--checkpoint-seconds",
        0,
    ]
    line = one_line(*arguments, *TINY, code=3)
    assert_names(line, "nan", "task 2", "epoch 1", "later.lr=")
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["task-01.safetensors"], "the last good state is kept"
    assert json.loads((out / "summary.json").read_text())["status"] == "partial"


def test_out_of_memory(tmp_path):
    """A real process that may not have the memory it asks for."""
    code = (
        "import resource, sys, torch, efcil.experiment.run, efcil.report.html, matplotlib.figure\n"
        "from efcil.cli import main\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20,) * 2)\n"
        "main()\n"
    )
    arguments = ["run", "lwf", "glyphs", "--tasks", "2", "--set", "data.classes=8", "--set", "data.size=64"]
    arguments += ["--set", "width=64", "--set", "batch_size=256", "--threads", "1", "--out", str(tmp_path / "r")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 3, done.stderr
    assert_names(done.stderr, "task 1", "--set batch_size=", "--resume")
    assert done.stderr.count("\n") == 1


def test_out_that_cannot_be_written(one_line, tmp_path):
    (tmp_path / "file").write_text("")
    line = one_line("run", "lwf", "digits", "--tasks", 2, "--out", tmp_path / "file" / "r", *TINY)
    assert_names(line, tmp_path / "file" / "r", "Not a directory")


def test_damaged_checkpoint_is_passed_over(efcil, tmp_path):
    out = tmp_path / "r"
    arguments = ["run", "dpcr", "digits", "--tasks", 5, "--out", out, *TINY]
    assert efcil(*arguments)[0] == 0
    want = json.loads((out / "summary.json").read_text())["matrix"]
    newest = out / "checkpoints" / "task-05.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 16
    newest.write_bytes(data)
    code, text, _ = efcil(*arguments, "--resume")
    assert code == 0
    assert_names(text, newest.name, "task 4")
    assert json.loads((out / "summary.json").read_text())["matrix"] == want
    newest.write_bytes(newest.read_bytes()[:-100])
    code, text, _ = efcil(*arguments, "--resume")
    assert code == 0
    assert json.loads((out / "summary.json").read_text())["matrix"] == want


def test_other_files_of_a_run_that_are_damaged_or_left(efcil, tmp_path):
    """A summary is made again from the checkpoint, a damaged line of the log is left out, half-written files go."""
    out = tmp_path / "r"
    arguments = ["run", "dpcr", "digits", "--tasks", 2, "--out", out, *TINY]
    assert efcil(*arguments)[0] == 0
    summary, log, config = out / "summary.json", out / "metrics.jsonl", out / "config.yaml"
    want = summary.read_text()
    left = out / "checkpoints" / ".task-02.12-0123456789ab.tmp.safetensors"
    left.write_bytes(b"half")
    for damage in (want.replace('"A_f": ', '"A_f": 1'), want.replace('"seed": 0', '"seed": 1'), "[]", "{"):
        summary.write_text(damage)
        assert efcil(*arguments, "--resume")[0] == 0
        aside = ("seconds", "commit", "command")
        found, wanted = (
            {k: v for k, v in json.loads(t).items() if k not in aside} for t in (summary.read_text(), want)
        )
        assert found == wanted
    assert not left.exists()
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0] + b"\xff\n[]\n{}\n" + b"".join(lines[1:]))
    (out / "checkpoints" / "task-02.safetensors").unlink()
    assert efcil(*arguments, "--resume")[0] == 0
    assert log.read_bytes() == b"".join(lines)
    config.write_bytes(config.read_bytes().replace(b"ridge", b"\xff"))
    code, _, err = efcil(*arguments, "--resume")
    assert code == 2
    assert_names(err, config, "--resume")
    config.unlink()
    assert efcil(*arguments, "--resume")[0] == 0


def test_a_checkpoint_of_something_else(efcil, tmp_path):
    """Sound, but not of this run: one line, whatever is in it."""
    from efcil.tensor_files import load_tensors, save_tensors

    out = tmp_path / "r"
    arguments = ["run", "dpcr", "digits", "--tasks", 2, "--out", out, *TINY]
    assert efcil(*arguments)[0] == 0
    path = out / "checkpoints" / "task-02.safetensors"
    tensors, meta = load_tensors(path)
    for other in ({}, {**meta, "matrices": 3}, {**meta, "matrices": {}}):
        save_tensors(path, tensors, other)
        code, _, err = efcil(*arguments, "--resume")
        assert code == 2
        assert_names(err, path.parent)
        assert err.count("\n") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_lets_the_step_finish_and_the_run_go_on(efcil, tmp_path, monkeypatch, number, code):
    """Signaled in the middle of an epoch: the step is finished and saved, and the rest is what it would have been."""
    from efcil.training.step import Step

    arguments = ["run", "dpcr", "digits", "--tasks", 2, *TINY]
    assert efcil(*arguments, "--out", tmp_path / "whole", "--quiet")[0] == 0
    steps = []
    original = Step.__call__

    def signalled(self, batch, labels):
        original(self, batch, labels)
        steps.append(len(labels))
        if len(steps) in (3, 20):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Step, "__call__", signalled)
    for _ in range(2):
        found, _, err = efcil(*arguments, "--out", tmp_path / "r", "--resume")
        assert found == code
        assert_names(err, signal.Signals(number).name, f"efcil resume {tmp_path / 'r'}")
        assert list((tmp_path / "r" / "checkpoints").glob("task-*-epoch-*.safetensors"))
    assert efcil(*arguments, "--out", tmp_path / "r", "--resume")[0] == 0
    assert (tmp_path / "r" / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()
    matrices = [json.loads((tmp_path / name / "summary.json").read_text())["matrix"] for name in ("r", "whole")]
    assert matrices[0] == matrices[1]


def test_a_second_signal_ends_at_once(efcil, tmp_path, monkeypatch):
    from efcil.training.step import Step

    def signalled(self, batch, labels):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second one must not wait")

    monkeypatch.setattr(Step, "__call__", signalled)
    before = signal.getsignal(signal.SIGINT)
    code, _, err = efcil("run", "lwf", "digits", "--tasks", 2, "--out", tmp_path / "r", *TINY)
    assert code == 130
    assert_names(err, "SIGINT", f"efcil resume {tmp_path / 'r'}")
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_learned_again_is_logged_once(efcil, tmp_path):
    out = tmp_path / "r"
    arguments = ["run", "lwf-ncm", "digits", "--tasks", 2, "--out", out, "--quiet", *TINY]
    assert efcil(*arguments)[0] == 0
    want = (out / "metrics.jsonl").read_text()
    (out / "checkpoints" / "task-02.safetensors").unlink()
    assert efcil(*arguments, "--resume")[0] == 0
    assert (out / "metrics.jsonl").read_text() == want


def test_true_in_a_file_is_no_number(one_line, tmp_path):
    (tmp_path / "c.yaml").write_text("method: lwf\ndataset: digits\ntasks: true\n")
    line = one_line("run", "--config", tmp_path / "c.yaml", "--out", tmp_path / "r", *TINY)
    assert_names(line, "tasks=True", "int")


def test_a_signal_in_the_middle_of_a_print_does_no_harm():
    """Python refuses to print from a handler that interrupted a print: the signal is heard all the same."""

    def note(text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    run = SimpleNamespace(training=True, stop=threading.Event(), reporter=SimpleNamespace(note=note))
    with stoppable([run], "go on"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert run.stop.is_set()


@pytest.mark.parametrize("force_on_second", [True, False])
def test_a_signal_while_another_is_handled_does_not_hang(force_on_second):
    """An event that is being set has a lock, and a handler that came between would wait for it for ever."""
    lock, told = threading.Lock(), []

    class Event:
        def set(self):
            assert lock.acquire(blocking=False), "this would wait for itself"
            try:
                told.append(1)
                if len(told) == 1:
                    signal.raise_signal(signal.SIGTERM)
            finally:
                lock.release()

    run = SimpleNamespace(training=True, stop=Event(), reporter=SimpleNamespace(note=lambda text: None))
    with pytest.raises(Interrupted) if force_on_second else nullcontext(), stoppable([run], "go on", force_on_second):
        signal.raise_signal(signal.SIGTERM)
    assert told == [1]


def test_the_run_in_progress_says_that_it_was_asked_to_stop():
    """Of several runs one after the other: not the first one, which is over."""
    said = {"over": [], "busy": []}
    runs = [
        SimpleNamespace(
            training=name == "busy", stop=threading.Event(), reporter=SimpleNamespace(note=said[name].append)
        )
        for name in said
    ]
    with stoppable(runs, "go on"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert said["over"] == []
    assert len(said["busy"]) == 1
    assert all(run.stop.is_set() for run in runs)


def test_epochs_are_those_of_every_task(efcil, tmp_path):
    run = tmp_path / "run"
    code, _, error = efcil("run", "lwf-ncm", "digits", "--epochs", 1, "--tasks", 2, "--quiet", "--out", run)
    assert code == 0, error
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if "epoch" in line] == [1, 1]
