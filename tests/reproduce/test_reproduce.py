"""The paper's tables and figures by name: which runs they need, what is never mixed into them, and their files."""

import csv
import io
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection

import standins
from efcil.core.class_stats import ClassStats
from efcil.errors import ConfigError
from efcil.files import write_json_lines
from efcil.methods import METHODS
from efcil.reference import ridge_joint
from efcil.report.groups import NONE, Value
from efcil.reproduce import NAMES, ReproduceRequest, find
from efcil.reproduce.command import _joined
from efcil.reproduce.complexity import measure, operation_count
from efcil.reproduce.figures import balance_figure, embed, regions
from efcil.reproduce.result_index import EXEMPLARS, GROUPS, SNAPSHOT_GROUPS, ResultIndex, RunKey, published
from efcil.reproduce.snapshots import Snapshot, gamma_grid
from efcil.reproduce.tables import Benchmark, Table
from messages import assert_names, raises
from problems import draw

SMALL = (
    *("backbone=resnet10", "width=2", "first.epochs=1", "first.milestones=[]", "later.epochs=1", "later.milestones=[]"),
    *("augment=none", "buffer=16", "crop=16", "data.short_side=16", "batch_size=8"),
)


def summary(cell, method, A_f, **more):
    """A complete summary, as a run of the cell would write it."""
    experiment = cell.experiment()
    options = experiment.methods[method][1].model_dump(mode="json")
    A_t = [A_f + 10.0 * (cell.tasks - t - 1) for t in range(cell.tasks)]
    return {
        **{"method": method, "preset": "paper", "dataset": cell.dataset, "tasks": cell.tasks, "order": cell.order},
        **{"seed": 0, "A_f": A_f, "A_avg": A_f + 5, "A_t": A_t, "old": [None] + [40.0] * (cell.tasks - 1)},
        **{"new": [60.0] * cell.tasks, "status": "complete", "tasks_done": cell.tasks, "seconds": 100.0},
        **{"device": "GPU", "options": options, "training": experiment.training.model_dump(mode="json"), **more},
    }


def stored(place, *summaries):
    for number, one in enumerate(summaries):
        path = place / f"{number}" / "summary.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(one))
    return place


CELL = RunKey("cifar100", 10, "1993", "trajectory")


# -- which runs --------------------------------------------------------------------------------------------------------


def test_every_table_and_figure_is_there():
    tables = "table1 table-cub table-imagenet1k ablation table-ncm table-ebcil"
    figures = "curves cip balance boundaries gamma shift complexity"
    assert sorted(NAMES) == sorted(f"{tables} {figures}".split())
    with raises(ConfigError, "'tabel1'", "'table1'"):
        find("tabel1")


def test_a_trajectory_serves_all_that_can_be_read_from_it():
    """What shares a backbone is measured together, and every label is one that can be run."""
    for group, labels in GROUPS.items():
        kinds = {METHODS[label.split(":")[0]].learner for label in labels}
        assert kinds <= {"lwf", "first-task"} if group == "trajectory" else len(kinds) == 1
        RunKey("cifar100", 10, "identity", group).experiment()
    assert {m.name for m in METHODS.values() if m.learner in ("lwf", "first-task")} <= {
        *(label.split(":")[0] for label in GROUPS["trajectory"]),
        "rrcr+tssp+cip+cn",  # the same as dpcr
    }
    assert len(EXEMPLARS) == 6


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("table1", 3 * 2 * 3 * 2),  # data sets, splits, orders, trajectory and PASS
        ("table-cub", 1),
        ("table-imagenet1k", 1),
        ("ablation", 3),
        ("table-ncm", 2 * 2 * 3),
        ("table-ebcil", 2 * 2 * 7),
        ("gamma", 3),
        ("complexity", 0),
    ],
)
def test_the_papers_grids(tmp_path, name, runs):
    assert len(find(name).run_keys(ReproduceRequest(tmp_path))) == runs


def test_orders_tasks_and_only_choose(tmp_path):
    r = find("table1")
    wanted = ReproduceRequest(tmp_path, orders=("1993",), tasks=(20,))
    assert {(c.tasks, c.order) for c in r.run_keys(wanted)} == {(20, "1993")}
    one = r.to_run(replace(wanted, only=("cifar100", "pass")))
    assert one == [RunKey("cifar100", 20, "1993", "pass")]
    assert {c.group for c in r.to_run(replace(wanted, only=("dpcr",)))} == {"trajectory"}
    with raises(ConfigError, "--only dpcrr", "table1", "'dpcr'"):
        r.to_run(replace(wanted, only=("dpcrr",)))


def test_every_number_of_the_papers_tables_has_its_row():
    """A method that a table prints is one of its rows, with the paper's numbers beside it."""
    for name, source, blocks in (("table1", "Table 1", 6), ("table-ebcil", "Table 6", 4), ("table-ncm", "Table 5", 4)):
        lines = find(name).make(find(name), ResultIndex(), ReproduceRequest(None))["csv"]
        rows = [row for row in csv.DictReader(io.StringIO(lines)) if row["metric"] == "A_f"]
        assert all(row["paper"] for row in rows), name
        assert len({(row["dataset"], row["tasks"]) for row in rows}) == blocks
        assert published(rows[0]["dataset"], int(rows[0]["tasks"]), rows[0]["method"], source)
        assert {row["ours"] for row in rows} == {""}
    assert published("cifar100", 10, "dpcr", "Table 6")["A_f"] == 49.59
    assert published("cifar100", 10, "dpcr", "Table 2") is None


# -- what counts as measured -------------------------------------------------------------------------------------------


def read(place, *cells, overrides=()):
    measured = ResultIndex()
    measured.read([place], cells or [CELL], overrides)
    return measured


def test_a_summary_of_the_same_experiment_counts(tmp_path):
    measured = read(stored(tmp_path, summary(CELL, "dpcr", 50.0)))
    assert measured.get("cifar100", 10, "1993", "dpcr").A_f == 50.0
    assert measured.get("cifar100", 10, "1992", "dpcr") is None
    assert measured.excluded == []


def test_repeats_are_averaged_and_copies_are_not(tmp_path):
    first, second = summary(CELL, "dpcr", 50.0), summary(CELL, "dpcr", 53.0) | {"seconds": 7.0}
    for name, one in (("a", first), ("b", second), ("copy", first)):
        (tmp_path / name).mkdir()
        stored(tmp_path / name, one)
    measured = read(tmp_path).summary("cifar100", 10, "1993", "dpcr")
    assert measured["A_f"] == 51.5
    assert measured["A_t"] == [(a + b) / 2 for a, b in zip(first["A_t"], second["A_t"], strict=True)]
    assert measured["seconds"] == 7.0
    assert measured["device"] == "GPU"


def test_seconds_of_a_device_that_was_shared_say_so(tmp_path):
    slow = summary(CELL, "dpcr", 50.0) | {"seconds": 9.0, "device": "old GPU"}
    fast = summary(CELL, "dpcr", 53.0) | {"seconds": 7.0, "precision": "bf16", "concurrent_runs": 4}
    for name, one in (("a", slow), ("b", fast)):
        (tmp_path / name).mkdir()
        stored(tmp_path / name, one)
    assert read(tmp_path).get("cifar100", 10, "1993", "dpcr").timed_on == "GPU, bf16, 4 concurrent runs"
    assert read(tmp_path / "b").get("cifar100", 10, "1993", "dpcr").timed_on == "GPU, bf16, 4 concurrent runs"
    assert read(tmp_path / "a").get("cifar100", 10, "1993", "dpcr").timed_on == "old GPU"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, ("seed 1",)),
        ({"preset": "released_code"}, ("preset released_code",)),
        ({"options": {"ridge": 100.0}}, ("ridge", 100.0, 200.0)),
        ({"training": {"batch_size": 64}}, ("batch_size", 64, 128)),
        ({"training": {"width": "wide"}}, ("training",)),
    ],
)
def test_a_result_measured_in_another_way_is_not_mixed_in(tmp_path, change, named):
    one = summary(CELL, "dpcr", 50.0)
    for key, value in change.items():
        one[key] = {**one[key], **value} if isinstance(value, dict) else value
    measured = read(stored(tmp_path, one))
    assert measured.get("cifar100", 10, "1993", "dpcr") is None
    assert_names(measured.excluded[0], *named)


def test_other_pictures_are_another_way(tmp_path):
    """How a picture is stored decides the crops; whether it is decoded once or as needed does not."""
    cell = RunKey("cub200", 5, "1993", "trajectory")
    one = summary(cell, "dpcr", 20.0)
    measured = read(stored(tmp_path / "streamed", one | {"data": {"lazy": True}}), cell)
    assert measured.get("cub200", 5, "1993", "dpcr").A_f == 20.0
    squares = stored(tmp_path / "squares", one | {"data": {"keep_aspect": False}})
    measured = read(squares, cell)
    assert measured.get("cub200", 5, "1993", "dpcr") is None
    assert "keep_aspect false, not null" in measured.excluded[0]
    assert read(squares, cell, overrides=["data.keep_aspect=false"]).get("cub200", 5, "1993", "dpcr").A_f == 20.0


def test_another_arithmetic_is_another_way(tmp_path):
    """What was told to compute in float32 stands apart from what took the machine's best."""
    one = summary(CELL, "dpcr", 50.0)
    left = read(stored(tmp_path, one | {"command": "efcil run dpcr cifar100 --precision fp32 --tasks 10"}))
    assert left.get("cifar100", 10, "1993", "dpcr") is None
    assert "(--precision fp32)" in left.excluded[0]


def test_what_is_left_out_of_one_comparison_is_one_line(tmp_path):
    changed = [summary(CELL, method, 50.0) | {"seed": 1} for method in ("dpcr", "ldc", "adc")]
    place = stored(tmp_path, *changed, summary(CELL, "sdc", 50.0) | {"seed": 2})
    words = "measured with other options (preset paper, seed"
    assert read(place).excluded == [
        f"excluded 3 summaries in {place}: {words} 1)",
        f"excluded {place / '3' / 'summary.json'}: {words} 2)",
    ]


def test_stored_results_count_and_a_runs_log_does_not(tmp_path):
    """Of results/ a line is a summary; the log of a run that is being written may end in half a line."""
    (tmp_path / "metrics.jsonl").write_text('{"task": 1, "epo')
    lines = [{"run": "first", **summary(CELL, "dpcr", 50.0)}]
    lines += [{"run": "other", **summary(CELL, method, 40.0, seed=1)} for method in ("ldc", "adc")]
    write_json_lines(tmp_path / "cifar100.jsonl", [*lines, "something else"])
    measured = read(tmp_path)
    assert measured.get("cifar100", 10, "1993", "dpcr").A_f == 50.0
    where = f"excluded 2 summaries in {tmp_path / 'cifar100.jsonl'}#other: measured with other options"
    assert measured.excluded == [f"{where} (preset paper, seed 1)"]
    write_json_lines(tmp_path / "cifar100.jsonl", lines[1:2])
    assert (
        read(tmp_path).excluded[0].startswith(f"excluded {tmp_path / 'cifar100.jsonl'}:1: measured with other options")
    )


def test_unfinished_and_foreign_files_do_not_count(tmp_path):
    stored(tmp_path, summary(CELL, "dpcr", 50.0, status="partial"), {"some": "thing"}, [1, 2])
    assert read(tmp_path).get("cifar100", 10, "1993", "dpcr") is None


def test_an_option_that_did_not_exist_yet_counts_as_its_default(tmp_path):
    one = summary(CELL, "dpcr", 50.0)
    del one["training"]["optimizer"]
    assert read(stored(tmp_path, one)).get("cifar100", 10, "1993", "dpcr")
    one["training"]["optimizer"] = "adam"
    other = read(stored(tmp_path / "b", one))
    assert other.get("cifar100", 10, "1993", "dpcr") is None


def test_both_classifiers_of_a_method_are_there(tmp_path):
    cell = RunKey("cifar100", 10, "1993", "icarl-memory=500")
    heads = {"nme": {"A_f": 39.0, "A_avg": 58.0}, "cnn": {"A_f": 22.0, "A_avg": 45.0}}
    measured = read(stored(tmp_path, summary(cell, "icarl:memory=500", 39.0, heads=heads)), cell)
    assert measured.get("cifar100", 10, "1993", "icarl:memory=500/cnn").A_f == 22.0


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ncm(tmp_path):
    """ADC in three orders, LDC in one, DP-NCM in none."""
    cells = [RunKey("cifar100", 10, order, "trajectory") for order in ("identity", "1992", "1993")]
    found = [summary(cell, "adc", 46.0 + i) for i, cell in enumerate(cells)] + [summary(cells[2], "ldc", 48.0)]
    measured = read(stored(tmp_path, *found), *cells)
    names = {"adc": "ADC", "ldc": "LDC", "dp-ncm": "DP_NCM"}
    orders = ("identity", "1992", "1993")
    return Table("t", "A table", "Table 5", (Benchmark("cifar100", 10),), names, orders), measured


def test_markdown_has_the_papers_numbers_ours_and_the_difference(ncm):
    table, measured = ncm
    text = table.markdown(measured, "efcil reproduce t")
    rows = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]]
        for line in text.splitlines()
        if "|" in line
    }
    assert rows["ADC"][:3] == ["47.65", "47.00 ± 1.00", "-0.65"]
    assert rows["ADC"][6:] == ["identity, 1992, 1993", "100"]
    assert rows["LDC"][:3] == ["47.40", "48.00", "+0.60"]
    assert rows["LDC"][6] == "1993"
    assert rows[r"DP\_NCM"][:3] == ["49.19", "not measured", NONE]
    assert "`efcil reproduce t`" in text
    assert not table.complete(measured)


def test_latex_and_csv_have_the_same_numbers(ncm):
    table, measured = ncm
    tex = table.latex(measured)
    assert r"ADC & 47.00 {\scriptsize(47.65)} & 52.00 {\scriptsize(62.63)} \\" in tex
    assert r"LDC & \textbf{48.00} {\scriptsize(47.40)}" in tex
    assert r"DP\_NCM & -- {\scriptsize(49.19)}" in tex
    rows = {(r["method"], r["metric"]): r for r in csv.DictReader(io.StringIO(table.csv(measured)))}
    assert float(rows["adc", "A_f"]["ours"]) == 47.0
    assert float(rows["adc", "A_f"]["spread"]) == pytest.approx(1.0)
    assert float(rows["adc", "A_f"]["difference"]) == pytest.approx(-0.65)
    assert rows["dp-ncm", "A_f"]["ours"] == ""


# -- figures -----------------------------------------------------------------------------------------------------------


def snapshot(dim=6, classes=4):
    labels = torch.arange(classes).repeat_interleave(12)
    centers = draw(classes, dim) * 3
    before = centers[labels] + draw(len(labels), dim, seed=1) * 0.3
    after = before @ (torch.eye(dim, dtype=torch.float64) + 0.4 * draw(dim, dim, seed=2))
    moved, stale = ClassStats.from_features(after, labels), ClassStats.from_features(before, labels)
    return Snapshot(before.float(), after.float(), labels, {"dpcr": moved, "rrcr": stale}), before, after, labels


def test_gamma_grid_is_one_ridge_solution_each():
    shot, _, after, labels = snapshot()
    grid = gamma_grid(shot, 200.0)
    assert 200.0 in grid["gamma"]
    assert grid["gamma"] == sorted(grid["gamma"])
    for gamma, with_cn, without in zip(grid["gamma"], grid["with_cn"], grid["without_cn"], strict=True):
        weight = ridge_joint(after, labels, range(4), gamma)
        unit = weight / weight.norm(dim=0)
        assert torch.allclose(shot.weight("dpcr", gamma, normalize=False), weight)
        assert torch.allclose(shot.weight("dpcr", gamma, normalize=True), unit)
        for found, w in ((without, weight), (with_cn, unit)):
            right = (shot.after.double() @ w).argmax(1) == labels
            assert found == pytest.approx(100 * right.double().mean().item())


def test_principal_axes_and_regions():
    points = draw(50, 5).numpy() * np.array([10, 5, 1, 1, 1])
    flat = embed(points, "pca")
    centered = points - points.mean(0)
    values, vectors = np.linalg.eigh(centered.T @ centered)
    expected = centered @ vectors[:, ::-1][:, :2]
    assert np.allclose(np.abs(flat), np.abs(expected))
    assert values[-1] > values[-2]
    corners = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    (_, _), area = regions(corners, np.array([0, 1, 2, 3]), 4, side=10, near=1)
    assert [area[0, 0], area[0, -1], area[-1, 0], area[-1, -1]] == [0, 1, 2, 3]


def test_umap_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", None)
    with raises(ConfigError, "pip install 'efcil[umap]'"):
        embed(np.zeros((4, 3)), "umap")


def test_costs_follow_the_papers_formula():
    assert operation_count("DP", 1000, 10, 30) == 1000 * 100 + 20 * (1000 + 100 * 10)
    assert operation_count("RRCR", 1000, 10, 30) == 1000 * 100 + 10 * 30 + 1000
    times = measure(200, 16, 20, torch.device("cpu"), repeats=1)
    assert set(times) == {"DP", "RRCR"}
    assert all(t > 0 for t in times.values())


# -- the whole command, on small copies of the real sets ---------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small Tiny-ImageNet of ten classes, so that it can be split into ten tasks."""
    home = tmp_path_factory.mktemp("reproduce")
    names = tuple(f"n{i:08d}" for i in range(10))
    standins.tiny_imagenet(home / "tiny", names=names, train=4, test=2, size=16)
    return home


@pytest.fixture
def command(made, monkeypatch, efcil):
    monkeypatch.setenv("EFCIL_CACHE", str(made / "cache"))

    def call(*arguments, out="out", small=SMALL):
        overrides = [part for setting in small for part in ("--set", setting)]
        return efcil("reproduce", *arguments, "--out", made / out, "--device", "cpu", *overrides)

    return call


def test_a_grid_runs_resumes_and_is_not_done_again(made, command):
    names = "table-ncm,cip,gamma,curves,balance"
    arguments = (
        names,
        "--data",
        f"tiny-imagenet={made / 'tiny'}",
        "--tasks",
        "10",
        "--orders",
        "1993",
        "--only",
        "dpcr",
    )
    code, _, err = command(*arguments)
    assert code == 0, err
    run = made / "out" / "runs" / "tiny-imagenet" / "T10" / "order-1993" / "trajectory"
    assert len(list(run.glob("*/summary.json"))) == len(GROUPS["trajectory"])
    assert (run / "snapshots" / "task-02.safetensors").exists()
    assert (run / "snapshots" / "task-10.safetensors").exists()
    for name, kinds in (("table-ncm", "md tex csv"), ("gamma", "md json png svg"), ("cip", "md json png svg")):
        assert all((made / "out" / f"{name}.{kind}").stat().st_size for kind in kinds.split())
    text = (made / "out" / "table-ncm.md").read_text()
    assert "efcil reproduce table-ncm" in text
    assert "tiny-imagenet=DIR" in text
    assert str(made) not in text
    assert "not measured" in text.split("## tiny-imagenet, T = 10")[0]  # CIFAR-100 was not run
    assert "not measured" not in text.split("## tiny-imagenet, T = 10")[1].split("##")[0]
    assert "pass" in (made / "out" / "balance.md").read_text()
    grid = json.loads((made / "out" / "gamma.json").read_text())
    final = json.loads((run / "dpcr" / "summary.json").read_text())["A_f"]
    (own,) = grid.values()
    assert own["with_cn"][own["gamma"].index(own["chosen"])] == pytest.approx(final)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    code, _, err = command(*arguments)
    assert code == 0, err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_results_from_elsewhere_are_used(made, command):
    data = ("--data", f"tiny-imagenet={made / 'tiny'}", "--tasks", "10", "--orders", "1993")
    assert command("cip", *data)[0] == 0  # done already where the test above was run
    code, _, err = command("cip", "--from", str(made / "out"), *data, out="second")
    assert code == 0, err
    assert not (made / "second" / "runs").exists()
    numbers = json.loads((made / "second" / "cip.json").read_text())
    assert list(numbers) == ["tiny-imagenet, T = 10"]


def test_without_data_it_says_what_is_needed_and_how_to_get_it(made, command):
    code, out, err = command("table1", "--tasks", "10", out="third")
    assert code == 2
    assert_names(err, "--data NAME=DIR", "cifar100", "efcil data fetch cifar100 --data DIR", "tiny-imagenet")
    assert out == ""
    assert not (made / "third").exists()


def test_without_data_what_was_measured_elsewhere_is_shown(made, command):
    data = ("--data", f"tiny-imagenet={made / 'tiny'}", "--tasks", "10", "--orders", "1993")
    assert command("cip", *data)[0] == 0  # done already where a test above was run
    code, out, err = command("table-ncm", "--from", made / "out", "--tasks", "10", "--orders", "1993", out="fourth")
    assert code == 0, err
    assert_names(out, "--data NAME=DIR", "cifar100", "efcil data fetch cifar100 --data DIR")
    assert "not measured" in out
    assert not (made / "fourth" / "runs").exists()


def test_gamma_trains_only_what_it_draws(made, command):
    arguments = ("gamma", "--data", f"tiny-imagenet={made / 'tiny'}", "--orders", "1993")
    small = [setting for setting in SMALL if not setting.startswith("buffer")]  # an option of acil
    code, _, err = command(*arguments, out="gamma", small=small)
    assert code == 0, err
    place = made / "gamma" / "runs" / "tiny-imagenet" / "T10" / "order-1993"
    assert sorted(path.name for path in place.iterdir()) == ["dpcr"]
    assert [path.parent.name for path in place.rglob("summary.json")] == ["dpcr"]
    assert list(json.loads((made / "gamma" / "gamma.json").read_text())) == ["tiny-imagenet, T = 10, order 1993"]
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}
    assert command(*arguments, out="gamma", small=small)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()} == before


def test_a_run_that_a_larger_one_covers_is_not_trained_apart(tmp_path):
    small, middle, large = (RunKey("cifar100", 10, "1993", group) for group in SNAPSHOT_GROUPS)
    assert _joined([small, middle], tmp_path) == [middle]
    assert _joined([small, large, middle], tmp_path) == [large]
    assert _joined([small], tmp_path) == [small]
    assert _joined([small, RunKey("cifar100", 20, "1993", "trajectory")], tmp_path)[0] == small
    (tmp_path / large.directory).mkdir(parents=True)
    assert _joined([small], tmp_path) == [large]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nothing",), ("'nothing'",)),
        (("table1", "--data", "somewhere"), ("--data somewhere", "NAME=DIR")),
        (("table1", "--data", "cifar=x"), ("'cifar'", "'cifar100'")),
        (("table1", "--tasks", "7"), ("--tasks 7", "table1", 10, 20)),
        (("table1", "--tasks", "ten"), ("--tasks ten",)),
        (("table1", "--from", "nowhere"), ("--from nowhere",)),
    ],
)
def test_bad_input(made, command, arguments, named):
    code, _, err = command(*arguments, out="bad")
    assert code == 2
    assert_names(err, *named)
    assert not (made / "bad").exists()


def test_the_names_are_listed(efcil):
    code, out, _ = efcil("reproduce")
    assert code == 0
    assert all(name in out for name in NAMES)


@pytest.mark.slow
def test_boundaries_and_shift_are_drawn(made, command):
    """On the snapshots of a run: a stand-in for CIFAR-100 would need its own format, so the cell is put in place."""
    code, _, err = command("cip", "--data", f"tiny-imagenet={made / 'tiny'}", "--tasks", "10", "--orders", "1993")
    assert code == 0, err
    own = made / "out" / "runs" / "tiny-imagenet" / "T10" / "order-1993" / "trajectory" / "snapshots"
    place = made / "drawn" / CELL.directory / "snapshots"
    place.mkdir(parents=True)
    (place / "task-02.safetensors").write_bytes((own / "task-02.safetensors").read_bytes())
    code, _, err = command("boundaries,shift", out="drawn")
    assert code == 0, err
    shares = json.loads((made / "drawn" / "shift.json").read_text())
    ((_, found),) = shares.items()
    for kind in ("classified as", "all old classes"):
        for parts in found[kind].values():
            assert sum(parts.values()) == pytest.approx(100)
    lost, mean = (
        found[kind]["before the task"]["own class"] - found[kind]["after, without DP"]["own class"]
        for kind in ("classified as", "all old classes")
    )
    assert lost >= mean  # the class that is shown loses most
    right = json.loads((made / "drawn" / "boundaries.json").read_text())
    ((_, numbers),) = right.items()
    assert set(numbers["right"]) == {"without DP", "with DP"}
    for name in ("boundaries", "shift"):
        assert (made / "drawn" / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert "<svg" in (made / "drawn" / f"{name}.svg").read_text()[:600]


def test_a_bar_of_one_order_has_no_line_of_its_spread():
    once, often = Value(40.0), Value(50.0, 2.0)
    parts = ("old", "new", "A_f")
    numbers = {"set": {"a": dict.fromkeys(parts, once), "b": dict.fromkeys(parts, often)}}
    figure = balance_figure(numbers, {"a": "A", "b": "B"})
    drawn = [lines for lines in figure.axes[0].collections if isinstance(lines, LineCollection)]
    segments = [segment for lines in drawn for segment in lines.get_segments() if len(segment)]
    assert [segment[:, 1].tolist() for segment in segments] == [[48.0, 52.0]] * 3, "of the one that was run often"
