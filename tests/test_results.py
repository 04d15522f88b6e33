"""Results: the numbers of the summaries, by method and order, wherever they are shown, saved or loaded."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from statistics import fmean, stdev
from xml.etree import ElementTree

import numpy as np
import pytest

import efcil
from efcil.core.metrics import AccuracyMatrix
from efcil.errors import ConfigError, EfcilError, RunError
from efcil.results import MOST_BYTES, Results
from messages import raises

EVIL = '<script>alert("x")</script> & "A_f"'


def summary(method="dpcr", hits=(90, 80, 70), *, order="1993", dataset="digits", done=3, **more):
    """A run of three tasks of two classes: `hits` of 100 images of a task when it is new, one in ten lost with each."""
    matrix = AccuracyMatrix([100] * 3)
    for t in range(done):
        row = [max(0, hits[i] - 10 * (t - i)) for i in range(t + 1)]
        matrix.record(t, row, row)
    about = {"method": method, "preset": "paper", "dataset": dataset, "tasks": 3, "task_sizes": [2] * 3}
    about |= {"order": order, "seed": 0, "seconds": 12.5, "device": "cpu", "commit": "abc", "command": "efcil run"}
    return about | matrix.summary() | more


@pytest.fixture
def several():
    """Two methods, one of them with two orders."""
    return Results([summary("ldc", (80, 70, 60)), summary(order="1"), summary(hits=(96, 92, 88), order="2")])


class Table(HTMLParser):
    """Rows of cells, and whatever else a page holds."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tags, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        self.text += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_extreme_orders_are_no_part_of_a_mean_over_random_ones():
    finals = {"1": (90, 80, 70), "2": (80, 80, 80), "hard": (60, 50, 40), "easy": (99, 98, 97)}
    found = Results([summary(hits=hits, order=order) for order, hits in finals.items()])
    each = {order: Results([summary(hits=hits, order=order)])["dpcr"].final_accuracy for order, hits in finals.items()}
    titles = ["digits, T = 3", "digits, T = 3, hard order", "digits, T = 3, easy order"]
    assert [benchmark.title for benchmark in found.benchmarks] == titles
    assert list(found) == [f"dpcr on {title}" for title in titles]
    assert found[f"dpcr on {titles[0]}"].final_accuracy == pytest.approx((each["1"] + each["2"]) / 2)
    assert found["dpcr", "hard"].final_accuracy == each["hard"] < found["dpcr", "easy"].final_accuracy == each["easy"]
    alone = Results([summary(order="hard")])
    assert alone["dpcr"].final_accuracy == alone["dpcr", "hard"].final_accuracy
    with raises(KeyError, "dpcr"):
        found["dpcr"]
    assert all(title in text for title in titles for text in (repr(found), found._repr_html_()))


def test_a_run_has_the_numbers_of_its_summary():
    given = summary()
    result = Results([given])["dpcr"]
    assert (result.method, result.dataset, result.tasks, result.tasks_done) == ("dpcr", "digits", 3, 3)
    assert result.is_complete
    assert result.orders == ("1993",)
    assert result.final_accuracy == given["A_f"] == fmean([70, 70, 70])
    assert result.average_accuracy == given["A_avg"]
    assert result.forgetting == given["forgetting"][-1] == 15
    assert result.accuracy_per_task.tolist() == given["A_t"]
    assert result.seconds == 12.5
    expected = [[90, np.nan, np.nan], [80, 80, np.nan], [70, 70, 70]]
    np.testing.assert_array_equal(result.accuracy_matrix, expected)
    assert result.final_accuracy_std is None
    assert result.average_accuracy_std is None
    assert result.accuracy_per_task_std is None


def test_several_orders_have_mean_and_spread(several):
    result = several["dpcr"]
    finals = [run.final_accuracy for run in result.runs]
    assert finals == [70.0, fmean([76, 82, 88])]
    assert result.final_accuracy == fmean(finals)
    assert result.final_accuracy_std == stdev(finals)
    averages = [fmean(run.accuracy_per_task) for run in result.runs]
    assert result.average_accuracy == pytest.approx(fmean(averages))
    assert result.average_accuracy_std == pytest.approx(stdev(averages))
    assert result.forgetting_std == 0.0
    both = np.array([run.accuracy_per_task for run in result.runs])
    np.testing.assert_allclose(result.accuracy_per_task, both.mean(0))
    np.testing.assert_allclose(result.accuracy_per_task_std, both.std(0, ddof=1))
    np.testing.assert_allclose(result.accuracy_matrix, np.mean([run.accuracy_matrix for run in result.runs], 0))


def test_a_method_and_an_order_is_one_run(several):
    assert several["dpcr", 2].final_accuracy == several["dpcr", "2"].final_accuracy == fmean([76, 82, 88])
    assert several["ldc", 1993].orders == ("1993",)
    with raises(ConfigError, "dpcr", 3, "1, 2"):
        several["dpcr", 3]


def test_results_are_a_mapping(several):
    assert list(several) == ["dpcr", "ldc"], "the best first"
    assert len(several) == 2
    assert "dpcr" in several
    assert "acil" not in several
    assert several.get("acil") is None
    assert several["DPCR"] is several["dpcr"]
    for error in (KeyError, ConfigError):
        with pytest.raises(error) as caught:
            several["dprc"]
        assert str(caught.value) == "no result of 'dprc': did you mean 'dpcr'?"


def test_data_sets_splits_and_progress_keep_results_apart():
    glyphs, part = summary(dataset="glyphs"), summary(done=2, order="5")
    results = Results([summary(), glyphs, part, summary("ldc")])
    assert sorted(results) == [
        "dpcr on digits, T = 3",
        "dpcr on digits, T = 3 (partial, 2 of 3 tasks)",
        "dpcr on glyphs, T = 3",
        "ldc",
    ]
    with raises(ConfigError, "dpcr", "'dpcr on digits, T = 3'", "'dpcr on glyphs, T = 3'"):
        results["dpcr"]
    partial = results["dpcr on digits, T = 3 (partial, 2 of 3 tasks)"]
    assert not partial.is_complete
    assert partial.tasks_done == 2
    assert partial.accuracy_matrix.shape == (3, 3)
    assert np.isnan(partial.accuracy_matrix[2]).all()


def test_nothing_measured_is_nan():
    result = Results([summary(done=0)])["dpcr"]
    assert np.isnan([result.final_accuracy, result.average_accuracy, result.forgetting]).all()
    assert len(result.accuracy_per_task) == 0
    assert "no task" in repr(result)


def test_a_method_with_several_classifiers_stands_for_its_main_one():
    nme, cnn = summary(), summary(hits=(50, 50, 50))
    heads = {
        name: {key: one[key] for key in ("A_f", "A_avg", "A_t", "matrix")} for name, one in (("nme", nme), ("cnn", cnn))
    }
    results = Results([summary("icarl") | {"head": "nme", "heads": heads}])
    assert list(results) == ["icarl/nme", "icarl/cnn"]
    assert results["icarl"].final_accuracy == nme["A_f"]
    assert results["icarl/cnn"].final_accuracy == cnn["A_f"]


def test_summaries_are_copied():
    given = summary()
    results = Results([given])
    given["A_t"][0] = 0.0
    assert results.summaries[0]["A_t"][0] == 90.0


# --- shown -----------------------------------------------------------------------------------------------------------


def test_the_terminal_has_an_aligned_table(several):
    lines = repr(several).splitlines()
    assert lines[0] == "digits, T = 3, orders 1, 2, 1993"
    rows = [line for line in lines if line.startswith(("Method", "dpcr", "ldc"))]
    assert len({len(row) for row in rows}) == 1, "every row ends where the header ends"
    result = several["dpcr"]
    assert f"{result.final_accuracy:.2f} ± {result.final_accuracy_std:.2f}" in rows[1]
    assert f"{several['ldc'].average_accuracy:.2f}" in rows[2]
    assert lines[-1].startswith("A_f: ")
    assert "A_avg: " in lines[-1]
    assert all(len(line) <= 80 for line in lines)


def test_long_names_fit_into_eighty_columns():
    runs = [summary("a-method-with-a-very-long-name:rank_rule=numerical", done=2, order=str(o)) for o in (1, 2)]
    assert all(len(line) <= 80 for line in repr(Results(runs)).splitlines())


def test_one_result_shows_its_matrix(several):
    lines = repr(several["ldc"]).splitlines()
    assert re.findall(r"[\d.]+", lines[4]) == ["3", "60.0", "60.0", "60.0"]
    rows = Table(several["ldc"]._repr_html_()).rows
    assert rows[-1] == ["3", "60.0", "60.0", "60.0"]


def test_the_notebook_table_says_the_same(several):
    page = Table(several._repr_html_())
    assert page.rows[0] == ["Method", "Af", "Aavg", "Forgetting", "Time"]
    for method, row in zip(("dpcr", "ldc"), page.rows[1:], strict=True):
        assert row[0] == method
        assert row[1].startswith(f"{several[method].final_accuracy:.2f}")
    assert "after the last task" in page.text


def test_the_notebook_table_has_no_color_of_its_own(several):
    """Ink and paper are the notebook's, light or dark."""
    text = several._repr_html_() + several["dpcr"]._repr_html_()
    assert "#" not in re.sub(r"&#\w+;", "", text)
    assert set(re.findall(r"color:([^;\"]+)", text)) <= {"inherit"}
    assert "<style" not in text


def test_whatever_a_name_holds_is_text():
    results = Results([summary(EVIL, dataset=EVIL, order=EVIL)])
    for text in (results._repr_html_(), next(iter(results.values()))._repr_html_(), results.plot().svg):
        assert "<script" not in text
    assert "script" not in Table(results._repr_html_()).tags
    assert EVIL[:8] in Table(results._repr_html_()).text


def test_curves_are_one_whole_picture(several, tmp_path):
    plot = several.plot(tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text(encoding="utf-8") == plot.svg == plot._repr_svg_()
    root = ElementTree.fromstring(plot.svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(" not in plot.svg, "a drawing program knows no variables of a page"
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    for method, result in several.items():
        assert method in texts
        assert f"{result.final_accuracy:.2f}" in texts
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert sum(len(line.get("points").split()) == 3 for line in lines) == 2, "a point for each task"
    assert "dpcr" in repr(plot)


@pytest.mark.parametrize(("name", "start"), [("c.png", b"\x89PNG"), ("c.pdf", b"%PDF")])
def test_curves_for_papers(several, tmp_path, name, start):
    assert several.plot().save(tmp_path / name).read_bytes().startswith(start)


def test_other_kinds_of_pictures_are_refused(several, tmp_path):
    with raises(ConfigError, "curves.bmp", ".svg", ".png"):
        several.plot(tmp_path / "curves.bmp")


def test_a_data_frame_has_a_row_a_run(several):
    frame = several.to_dataframe()
    assert frame["method"].tolist() == ["dpcr", "dpcr", "ldc"]
    assert frame["order"].tolist() == ["1", "2", "1993"]
    assert frame["final_accuracy"].tolist() == [run.final_accuracy for r in several.values() for run in r.runs]
    assert frame["accuracy_per_task"].iloc[2] == several["ldc"].accuracy_per_task.tolist()
    mean = frame.groupby("method")["average_accuracy"].mean()
    assert mean["dpcr"] == pytest.approx(several["dpcr"].average_accuracy)


def test_a_missing_pandas_is_one_line(several, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with raises(ConfigError, "pandas", "efcil[pandas]"):
        several.to_dataframe()


def test_the_report_is_the_page(several, tmp_path):
    assert several.report(tmp_path) == tmp_path / "report.html"
    page = several.report(tmp_path / "other.html").read_text(encoding="utf-8")
    assert page == (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"{several['dpcr'].final_accuracy:.2f}" in page


# --- files -----------------------------------------------------------------------------------------------------------


def test_saved_results_are_loaded_as_they_were(several, tmp_path):
    again = Results.load(several.save(tmp_path / "results.json"))
    assert again == several
    assert again.summaries == several.summaries
    assert again != Results(several.summaries[:2])
    assert repr(again) == repr(several)
    both = Results.load(tmp_path / "results.json", Results([summary("acil")]).save(tmp_path / "more.json"))
    assert set(both) == {"dpcr", "ldc", "acil"}


def test_run_directories_are_loaded(tmp_path):
    for method in ("dpcr", "ldc"):
        (tmp_path / "runs" / method).mkdir(parents=True)
        (tmp_path / "runs" / method / "summary.json").write_text(json.dumps(summary(method)))
    assert set(Results.load(tmp_path / "runs")) == {"dpcr", "ldc"}
    assert set(Results.load(str(tmp_path / "runs" / "ldc"))) == {"ldc"}
    assert set(Results.load(tmp_path / "runs" / "ldc" / "summary.json")) == {"ldc"}
    with raises(RunError, tmp_path / "nowhere"):
        Results.load(tmp_path / "nowhere")


def saved(**changes):
    return json.dumps({"format": "efcil results", "version": 1, "summaries": [summary() | changes]})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ("damaged",)),
        (saved()[:-20], ("damaged",)),
        ("[" * 100_000, ("damaged",)),
        ("[]", ("Results.save",)),
        ('{"format": "another"}', ("Results.save",)),
        (saved().replace('"version": 1', '"version": 2'), ("version", 1, 2)),
        (saved().replace('"version": 1', '"version": "new"'), ("version", 1, "'new'")),
        ('{"format": "efcil results", "version": 1}', ("damaged",)),
        ('{"format": "efcil results", "version": 1, "summaries": []}', ("damaged",)),
        ('{"format": "efcil results", "version": 1, "summaries": [3]}', ("damaged", "run 1", "int")),
        (saved(seconds="NaN").replace('"NaN"', "NaN"), ("NaN",)),
        (saved(seconds="big").replace('"big"', "1e999"), ("1e999",)),
        (saved(method=""), ("run 1", "method")),
        (saved(method=None), ("run 1", "method")),
        (saved(A_t=[90.0, 101.0, 70.0]), ("run 1", "A_t", 100)),
        (saved(A_t=[90.0]), ("run 1", "A_t", 3)),
        (saved(A_t="90"), ("run 1", "A_t")),
        (saved(A_f=-1), ("run 1", "A_f=-1")),
        (saved(tasks=10**9), ("run 1", "tasks=1000000000")),
        (saved(tasks=2), ("run 1", 2, 3)),
        (saved(tasks=True), ("run 1", "tasks=True")),
        (saved(task_sizes=[2, 2]), ("run 1", "task_sizes")),
        (saved(task_sizes=[2, 2, 0]), ("run 1", "task_sizes")),
        (saved(matrix=[[1.0] * 4] * 3), ("run 1", "matrix")),
        (saved(matrix=[["90"]]), ("run 1", "matrix")),
        (saved(matrix=[[1e300]]), ("run 1", "matrix")),
        (saved(heads={"nme": 3}), ("run 1", "heads")),
        (saved(heads={"nme": {"A_t": [900.0]}}), ("run 1", "A_t")),
    ],
)
def test_a_file_that_is_none_or_damaged_is_one_line(tmp_path, text, named):
    path = tmp_path / "results.json"
    path.write_text(text)
    with raises(RunError, path, *named):
        Results.load(path)


def test_a_file_is_read_only_up_to_a_size(tmp_path):
    path = tmp_path / "results.json"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with raises(RunError, path, f"{MOST_BYTES:,}"):
        Results.load(path)


def test_any_changed_byte_is_read_or_refused_in_one_line(tmp_path):
    """Whatever a file holds, reading it ends in results or in an error of ours."""
    path, refused = tmp_path / "results.json", []
    text = Results([summary()]).save(path).read_bytes()
    for place in range(0, len(text), 7):
        for byte in (b'"', b"9", b"[", b"\xff"):
            path.write_bytes(text[:place] + byte + text[place + 1 :])
            try:
                repr(Results.load(path))
            except EfcilError as error:
                refused.append(str(error))
    assert len(refused) > len(text) // 7, "a byte that is not UTF-8 at least is always refused"
    assert all("\n" not in line and line.startswith(str(path)) for line in refused)


def test_summaries_in_memory_are_checked_as_well():
    with raises(RunError, "list"):
        Results([[]])
    with raises(RunError, "NaN"):
        Results([summary(seconds=float("nan"))])
    with raises(RunError, "A_t"):
        Results([summary(A_t=[101.0])])
    with pytest.raises(RunError):
        Results([])
    assert Results([summary(A_t=np.array([90.0, 85.0, 80.0]))])["dpcr"].final_accuracy == 70.0


def test_a_place_that_cannot_be_written_is_one_line(several, tmp_path):
    (tmp_path / "file").touch()
    for write in (several.save, several.report, several.plot):
        with raises(RunError, tmp_path / "file" / "x.svg"):
            write(tmp_path / "file" / "x.svg")


# --- the package -----------------------------------------------------------------------------------------------------


def test_the_public_names_are_found_and_nothing_heavy_is_imported_before():
    code = "import sys, efcil; print([m for m in ('torch', 'numpy', 'pydantic', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    code = "import sys, efcil; efcil.Results; print([m for m in ('matplotlib', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    assert efcil.Results is Results
    assert efcil.TaskStream.from_dataset("digits").sizes == (2,) * 5
