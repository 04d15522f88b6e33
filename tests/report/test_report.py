"""Reports: what they print is what the summaries say."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import shutil
import struct
import subprocess
import sys
from html import escape, unescape
from html.parser import HTMLParser
from statistics import fmean, stdev
from xml.etree import ElementTree

import pytest

from efcil.core.metrics import AccuracyMatrix
from efcil.errors import RunError
from efcil.files import MARKER
from efcil.report import (
    csv_table,
    curve_figure,
    html_page,
    latex_table,
    load_summaries,
    markdown_table,
    matrix_figure,
    write_report,
)
from efcil.report.figures import figure_bytes
from efcil.report.groups import COLUMNS, group_runs
from efcil.report.load import parse_runs
from efcil.report.styles import styles_for
from messages import raises

EVIL = '<script>alert("x")</script> & $a_b$ | c%'


def summary(method="dpcr", level=0.8, *, sizes=(2, 1, 3), done=None, dataset="digits", order="1993", **more):
    """A run with 100 test images a class that loses ten points on each old task with every new one."""
    total = [100 * size for size in sizes]
    matrix = AccuracyMatrix(total)
    for t in range(len(sizes) if done is None else done):
        hits = [max(0, sizes[i] * (round(100 * level) - 10 * (t - i))) for i in range(t + 1)]
        matrix.record(t, hits, [min(total[i], hits[i] + 10) for i in range(t + 1)])
    return {
        **{"method": method, "preset": "paper", "dataset": dataset, "tasks": len(sizes), "order": order, "seed": 0},
        **matrix.summary(),
        **{"seconds": 12.5, "device": "cpu", "commit": "abc1234", "command": f"efcil run {method} {dataset}"},
        **{"task_sizes": list(sizes), "something_new": {"ignored": True}},
        **more,
    }


def rows_of(markdown):
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in markdown.splitlines() if "|" in line]


class Page(HTMLParser):
    """Tags, attributes and text of a page, and whether its tags are closed in order."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


# --- reading ---------------------------------------------------------------------------------------------------


def test_runs_and_comparisons_are_collected_once(tmp_path):
    for name in ("compare/dpcr", "compare/ldc", "single"):
        directory = tmp_path / name
        directory.mkdir(parents=True)
        (directory / "summary.json").write_text(json.dumps(summary(directory.name)))
    (tmp_path / "compare/dpcr/config.yaml").write_text("ridge: 200\n")
    (tmp_path / "compare/trajectory").mkdir()
    loaded = load_summaries([tmp_path / "single", tmp_path / "compare", tmp_path / "compare/ldc/summary.json"])
    assert [one["method"] for one in loaded] == ["single", "dpcr", "ldc"]
    assert loaded[1]["config_text"] == "ridge: 200\n"
    assert "config_text" not in loaded[2]
    assert loaded[1]["A_t"] == summary("dpcr")["A_t"]
    assert load_summaries(str(tmp_path / "single"))[0]["method"] == "single"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", ("summary.json",)),
        (b"\xff\xfe\xfa", ("summary.json",)),
        ("[1]", ("summary.json", "list")),
        ('{"method": "dpcr", "dataset": "digits"}', ("summary.json", "'A_t'")),
        ('{"dataset": "digits", "A_t": []}', ("summary.json", "'method'")),
        ('{"method": "dpcr", "dataset": "digits", "A_t": ["x"]}', ("summary.json", "'A_t'")),
        ('{"method": "dpcr", "dataset": "digits", "A_t": [NaN]}', ("summary.json", "'A_t'")),
        ('{"method": "dpcr", "dataset": "digits", "A_t": [1], "matrix": [1]}', ("summary.json", "'matrix'")),
    ],
)
def test_broken_summaries_are_reported_in_one_line(tmp_path, content, named):
    file = tmp_path / "run" / "summary.json"
    file.parent.mkdir()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with raises(RunError, tmp_path / "run", *named):
        load_summaries([tmp_path])


def test_missing_and_empty_places_are_reported(tmp_path):
    with raises(RunError, tmp_path / "nowhere"):
        load_summaries([tmp_path / "nowhere"])
    with raises(RunError, tmp_path, "summary.json", "efcil run --out"):
        load_summaries([tmp_path])
    with raises(RunError):
        load_summaries([])
    for make in (markdown_table, latex_table, csv_table, curve_figure, html_page):
        with raises(RunError):
            make([])


# --- grouping --------------------------------------------------------------------------------------------------


def test_same_order_and_seed_is_never_averaged():
    twice = [summary(level=0.8, run_dir="/r/gamma-200"), summary(level=0.6, run_dir="/r/gamma-2000")]
    (benchmark,) = group_runs(parse_runs(twice))
    assert [group.label for group in benchmark.groups] == ["dpcr [gamma-200]", "dpcr [gamma-2000]"]
    seeds = [summary(level=0.8), summary(level=0.6, seed=1)]
    (benchmark,) = group_runs(parse_runs(seeds))
    assert len(benchmark.groups) == 1


def test_runs_of_other_settings_are_never_averaged_and_their_labels_name_these():
    small, large = {"first": {"lr": 0.1}, "batch_size": 32}, {"first": {"lr": 0.1}, "batch_size": 64}
    runs = [
        summary(level=0.8, training=small, order="1"),
        summary(level=0.6, training=large, order="1"),
        summary(level=0.5, training=large, order="2"),
        summary("lwf", training=small, data={"lazy": True}),
        summary("lwf", training=small, data={"lazy": False}, seed=1),
    ]
    (benchmark,) = group_runs(parse_runs(runs))
    found = {group.label: len(group.runs) for group in benchmark.groups}
    assert found == {"dpcr (batch_size=32)": 1, "dpcr (batch_size=64)": 2, "lwf": 2}
    many = [summary(options={f"o{i}": level for i in range(6)}, level=level) for level in (0.5, 0.6)]
    (benchmark,) = group_runs(parse_runs(many))
    assert [group.label for group in benchmark.groups] == [
        f"dpcr (o0={level}, o1={level}, o2={level}, 3 more, configuration {number})"
        for number, level in ((2, 0.6), (1, 0.5))
    ]


def test_the_measures_are_explained_in_tables_and_on_the_page():
    text = html_page([summary()])
    for column in COLUMNS:
        assert f": {column.help}" in text
    assert "<i>A</i><sub>f</sub>: accuracy over all classes after the last task" in text
    assert r"A\_f: accuracy after the last task, A\_avg: mean accuracy over all tasks (%)." in markdown_table(
        [summary()]
    )


def test_splits_presets_and_progress_keep_runs_apart():
    runs = parse_runs(
        [
            summary(sizes=(2, 2, 2)),
            summary(sizes=(3, 3)),
            summary(sizes=(3, 3), preset="tuned", level=0.9),
            summary(sizes=(3, 3), order="1992", done=1),
        ]
    )
    first, second = group_runs(runs)
    assert first.groups[0].label == "dpcr (paper)"  # the same label as beside the other preset
    assert (first.title, second.title) == ("digits, T = 3", "digits, T = 2")
    labels = [(group.label, group.status) for group in second.groups]
    assert labels == [
        ("dpcr (tuned)", "complete"),
        ("dpcr (paper)", "complete"),
        ("dpcr (paper)", "partial, 1 of 2 tasks"),
    ]
    (uneven,) = group_runs(parse_runs([summary(sizes=(50, 5, 5, 5))]))
    assert uneven.title == "digits, T = 4 (50 + 3 x 5)"
    assert uneven.classes_seen == (50, 55, 60, 65)


def test_a_method_keeps_its_color_whatever_else_is_drawn():
    names = ["dpcr", "ldc", "adc", "sdc", "dp-ncm", "acil", "ds-al", "lwf-ncm", "lwf", "fecam", "mine", "yours"]
    (benchmark,) = group_runs(parse_runs(summary(name) for name in names))
    together = styles_for(benchmark.groups)
    assert len({(style.slot, style.dash) for style in together.values()}) == len(names)
    for group in benchmark.groups:
        if group.method not in ("mine", "yours"):
            assert styles_for([group])[group.label] == together[group.label]


def test_classifiers_and_variants_have_the_methods_color_and_a_line_of_their_own():
    names = ["dpcr:ridge=1", "dpcr", "icarl/nme", "icarl/cnn"]
    (benchmark,) = group_runs(parse_runs(summary(name) for name in names))
    styles = styles_for(benchmark.groups)
    assert len({styles[name].slot for name in names if name.startswith("dpcr")}) == 1
    assert styles["icarl/nme"].slot == styles["icarl/cnn"].slot
    assert styles["dpcr"].dash == ()
    assert len({(style.slot, style.dash) for style in styles.values()}) == len(names)


# --- tables ----------------------------------------------------------------------------------------------------


def test_markdown_holds_the_numbers_and_the_best_is_bold():
    good, bad = summary("dpcr", 0.9), summary("ldc", 0.7)
    rows = rows_of(markdown_table([bad, good]))
    assert rows[0][:4] == ["Method", r"A\_f", r"A\_avg", "Top-5"]
    assert [row[0] for row in rows[2:]] == ["dpcr", "ldc"]  # best first
    assert rows[2][1:3] == [f"**{good['A_f']:.2f}**", f"**{good['A_avg']:.2f}**"]
    assert rows[3][1:3] == [f"{bad['A_f']:.2f}", f"{bad['A_avg']:.2f}"]
    assert rows[2][4:6] == [f"{good['old'][-1]:.2f}", f"{good['new'][-1]:.2f}"]
    # Both forget 20 points of the first task and 10 of the second: an equal print shares the bold.
    assert rows[2][6] == rows[3][6] == "**15.00**"
    assert rows[2][8:] == ["1993", "12", "complete"]  # 12.5 rounds to even


def test_lower_forgetting_is_the_better_one():
    rows = rows_of(markdown_table([summary("a", forgetting=[None, 9.0, 3.0]), summary("b", forgetting=4.0)]))
    assert {row[0]: row[6] for row in rows[2:]} == {"a": "**3.00**", "b": "4.00"}


def test_a_single_row_is_not_its_own_best():
    assert "**" not in markdown_table([summary()])


def test_several_orders_give_mean_and_spread():
    runs = [summary(level=level, order=order) for level, order in ((0.9, "identity"), (0.8, "1992"), (0.73, "1993"))]
    finals = [run["A_f"] for run in runs]
    expected = f"{fmean(finals):.2f} ± {stdev(finals):.2f}"
    (row,) = rows_of(markdown_table(runs))[2:]
    assert row[1] == expected
    assert row[8] == "identity, 1992, 1993"
    assert "sample standard deviation" in markdown_table(runs)
    assert rf"{fmean(finals):.2f} {{\scriptsize$\pm${stdev(finals):.2f}}}" in latex_table(runs)
    text = re.sub(r"<[^>]*>", "", html_page(runs))
    assert expected in text
    assert "mean of 3 runs" in text
    assert f"{fmean(run['matrix'][2][0] for run in runs):.1f}" in text


def test_different_orders_are_pointed_out():
    runs = [summary("dpcr"), summary("ldc", order="1992")]
    assert "use different class orders" in markdown_table(runs)
    assert "use different class orders" in html_page(runs)
    assert "use different class orders" not in markdown_table([summary("dpcr"), summary("ldc")])


def test_partial_runs_say_so_and_win_nothing():
    runs = [summary("dpcr", 0.6), summary("ldc", 0.5), summary("adc", 0.95, done=1), summary("sdc", done=0)]
    rows = {row[0]: row for row in rows_of(markdown_table(runs))[2:]}
    assert rows["adc"][1] == "95.00"
    assert rows["adc"][-1] == "partial, 1 of 3 tasks"
    assert rows["dpcr"][1].startswith("**")
    assert rows["sdc"][1:8] == ["\N{EN DASH}"] * 7
    assert "95.00$^{*}$" in latex_table(runs)
    page = html_page(runs)
    assert "4 runs, 2 of them partial" in page
    assert "<strong>95.00" not in page
    assert page.count("partial, 1 of 3 tasks") >= 3  # the table, the matrix, the details


def test_latex_is_booktabs_with_benchmarks_side_by_side():
    runs = [summary("dp_cr%", 0.9), summary("ldc", 0.7), summary("ldc", 0.6, sizes=(3, 3), dataset="a&b")]
    text = latex_table(runs)
    assert r"\begin{tabular}{lrrrr}" in text
    assert r"\multicolumn{2}{c}{digits, $T = 3$ (2 + 1 + 3)} & \multicolumn{2}{c}{a\&b, $T = 2$}" in text
    assert r"\cmidrule(lr){2-3} \cmidrule(lr){4-5}" in text
    assert rf"dp\_cr\% & \textbf{{{runs[0]['A_f']:.2f}}} & \textbf{{{runs[0]['A_avg']:.2f}}} & -- & -- \\" in text
    both = f"{runs[1]['A_f']:.2f} & {runs[1]['A_avg']:.2f} & {runs[2]['A_f']:.2f} & {runs[2]['A_avg']:.2f}"
    assert rf"ldc & {both} \\" in text
    body = text.split(r"\toprule")[1].split(r"\bottomrule")[0]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", row)) + row.count(r"\multicolumn{2}") for row in rows} == {4}


def test_csv_has_a_row_a_run_and_every_digit():
    runs = [summary("dpcr", 0.77), summary(EVIL, 0.7, done=2), summary("adc", order=[2, 0, 1])]
    rows = list(csv.DictReader(io.StringIO(csv_table(runs))))
    assert [row["method"] for row in rows] == ["dpcr", EVIL, "adc"]
    for run, row in zip(runs, rows, strict=True):
        assert [float(row[f"A_{t + 1}"]) for t in range(len(run["A_t"]))] == run["A_t"]
        for key in ("A_f", "A_avg", "seconds"):
            assert float(row[key]) == run[key]
        assert float(row["bwt"]) == run["bwt"][-1]
        assert row["task_sizes"] == "2 1 3"
    assert (rows[1]["status"], rows[1]["tasks_done"], rows[1]["A_3"]) == ("partial", "2", "")
    assert rows[2]["order"] == "custom"


def test_the_machine_is_described_in_words_and_in_columns():
    about = {"device": "x86_64 CPU", "precision": "fp32", "threads": 2, "world_size": 3, "concurrent_runs": 4}
    cpu, gpu, unknown = parse_runs([summary(**about), summary(device="H200", precision="bf16"), summary(device=None)])
    assert cpu.execution == "x86_64 CPU, 2 threads, fp32, 3 processes"
    assert cpu.timed_on == f"{cpu.execution}, 4 concurrent runs"
    assert gpu.timed_on == gpu.execution == "H200, bf16"
    assert unknown.timed_on == ""
    (row,) = csv.DictReader(io.StringIO(csv_table([summary(**about)])))
    assert {key: row[key] for key in about} == {key: str(value) for key, value in about.items()}
    assert "x86_64 CPU, 2 threads, fp32, 3 processes, 4 concurrent runs" in html_page([summary(**about)])


# --- figures ---------------------------------------------------------------------------------------------------


def test_a_curve_that_never_leaves_100_is_drawn():
    page = html_page([summary(level=1.0, sizes=(3, 2), done=1)])
    assert "<svg" in page
    assert "nan" not in page.lower()


def png_size(data):
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_curves_are_the_means_against_the_classes_seen():
    runs = [summary("dpcr", 0.9), summary("dpcr", 0.7, order="1992"), summary("ldc", 0.5, done=2)]
    (axes,) = curve_figure(runs).axes
    means = [fmean(pair) for pair in zip(runs[0]["A_t"], runs[1]["A_t"], strict=True)]
    lines = [line.get_xydata().tolist() for line in axes.get_lines()]
    assert lines[0] == [[2, means[0]], [3, means[1]], [6, means[2]]]
    assert lines[1] == [[2, runs[2]["A_t"][0]], [3, runs[2]["A_t"][1]]]
    assert len(axes.collections) == 1  # the band of the two orders
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[0].startswith(f"dpcr  {means[2]:.2f} ± ")
    assert labels[1].endswith("(partial)")
    assert axes.get_xlabel() == "classes seen"


def test_the_legend_of_many_methods_fits_beside_its_panel():
    runs = [summary(f"method {i}", 0.5 + 0.01 * i) for i in range(40)] + [summary(dataset="other")]
    figure = curve_figure(runs)
    figure_bytes(figure, "png")  # warnings are errors: an axis that vanished would be told
    many, few = figure.axes
    assert many.get_window_extent().height > 1.5 * few.get_window_extent().height
    for axes in figure.axes:
        legend = axes.get_legend().get_window_extent()
        assert legend.y1 - legend.y0 < 1.15 * axes.get_tightbbox().height
    assert many.get_legend().get_window_extent().y0 > few.get_legend().get_window_extent().y1


def test_each_benchmark_has_its_panel_and_tasks_are_counted_without_sizes():
    runs = [summary(), summary(dataset="other", task_sizes=None)]
    first, second = curve_figure(runs).axes
    assert "digits" in first.get_title(loc="left")
    assert second.get_xlabel() == "task"
    assert second.get_lines()[0].get_xdata().tolist() == [1, 2, 3]


@pytest.mark.parametrize(("tasks", "done", "texts"), [(3, 3, 6), (20, 13, 91), (40, 40, 0)])
def test_matrix_shows_numbers_up_to_thirty_tasks(tasks, done, texts):
    run = summary(level=0.99, sizes=(1,) * tasks, done=done)
    run["matrix"] = [[50.0 + i if i <= t else None for i in range(tasks)] for t in range(done)]
    figure = matrix_figure(run)
    axes = figure.axes[0]
    assert len(axes.texts) == texts
    if texts:
        assert axes.texts[-1].get_text() == (f"{49.0 + done:.1f}" if tasks <= 12 else f"{49 + done}")
        assert min(text.get_fontsize() for text in axes.texts) >= 8
    data = axes.images[0].get_array()
    assert data.shape == (tasks, tasks)
    assert data[done - 1, 0] == 50.0
    assert data.mask[0, 1]
    assert ("partial" in axes.get_title(loc="left")) is (done < tasks)


def test_figures_draw_whatever_a_name_holds():
    runs = [summary(name) for name in (EVIL, "_hidden", "$", "$$", r"\frac{", "方法", "x" * 300, "a\nb\tc")]
    figure = curve_figure(runs)
    assert len(figure.axes[0].get_legend().get_texts()) == len(runs)
    width, height = png_size(figure_bytes(figure, "png"))
    assert 1000 < width < 2000  # the longest name does not blow up the picture
    assert 500 < height < 1200
    png_size(figure_bytes(matrix_figure(runs[0]), "png"))


def test_the_same_summaries_give_the_same_bytes():
    runs = [summary("dpcr"), summary("ldc", 0.6)]
    first, second = (figure_bytes(curve_figure(runs), "svg") for _ in range(2))
    assert first == second
    assert figure_bytes(curve_figure(runs), "png") == figure_bytes(curve_figure(runs), "png")


def test_nothing_of_matplotlib_is_imported_before_it_is_needed():
    code = "import sys, efcil.report; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- the page --------------------------------------------------------------------------------------------------


def test_page_holds_the_numbers_the_best_in_bold_and_the_details():
    good, bad = summary("dpcr", 0.9, config_text="ridge: 200 # <b>"), summary("ldc", 0.7, class_names=["a<b", "c"])
    text = html_page([good, bad])
    page = Page(text)
    body = "".join(page.text)
    assert f'<td class="n" data-v="{good["A_f"]!r}"><strong>{good["A_f"]:.2f}</strong>' in text
    assert f'<td class="n" data-v="{bad["A_f"]!r}">{bad["A_f"]:.2f}</td>' in text
    for run in (good, bad):
        assert run["command"] in body
        assert ", ".join(f"{value:.2f}" for value in run["A_t"]) in body
        for row in run["matrix"]:
            assert all(f">{value:.1f}</td>" in text for value in row if value is not None)
        assert f"{run['old'][-1]:.1f} " in body
    assert page.tags.count("details") == 2
    assert page.tags.count("polyline") == 2 * 2 + 4  # the two curves, wide and narrow; swatches in table and legend
    assert "ridge: 200 # <b>" in body
    assert "a<b, c" in body
    assert "prefers-color-scheme:dark" in text


def test_page_loads_nothing_and_runs_only_its_own_script():
    text = html_page([summary(), summary("ldc", done=1), summary(sizes=(1,) * 20)])
    page = Page(text)
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert not {"link", "iframe", "img", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    assert ("content", policy) in page.attributes


@pytest.mark.parametrize("key", ["method", "preset", "dataset", "order", "device", "commit", "command", "config_text"])
def test_every_text_is_escaped(key):
    runs = [summary("ldc"), summary(**{"preset": "other", key: EVIL}), summary(order="2", run_dir=f"/r/{EVIL}")]
    text = html_page(runs)
    page = Page(text)
    assert page.tags.count("script") == text.count("<script") == 1  # the page's own
    assert EVIL in "".join(page.text)
    assert "<script" not in markdown_table(runs)


def table_of(text):
    """The first table of results as {head: (attributes, [data-v of each row])}, in the order of its columns."""
    (table,) = re.findall(r'<table class="results">(.*?)</table>', text, flags=re.DOTALL)[:1]
    head, body = table.split("<tbody>")
    heads = [
        (re.sub("<[^>]*>", "", inner), attributes) for attributes, inner in re.findall("<th( [^>]*)>(.*?)</th>", head)
    ]
    rows = [re.findall(r'<t[hd][^>]* data-v="([^"]*)"', row) for row in body.split("</tr>")[:-1]]
    assert {len(row) for row in rows} == {len(heads)}
    return {name: (attributes, [row[i] for row in rows]) for i, (name, attributes) in enumerate(heads)}


def test_cells_carry_what_they_are_sorted_by():
    runs = [summary("dpcr", 0.9), summary("ldc", 0.7, forgetting=None, seconds=None), summary("adc", done=0)]
    table = table_of(html_page(runs))
    assert list(table) == ["Method", "Af", "Aavg", "Top-5", "Old", "New", "Forgetting", "BWT", "Time"]
    assert table["Method"][1] == ["dpcr", "ldc", "adc"]
    assert [float(v) for v in table["Af"][1][:2]] == [runs[0]["A_f"], runs[1]["A_f"]]
    assert table["Af"][1][2] == ""
    assert table["Forgetting"][1][1:] == ["", ""]
    assert table["Time"][1] == ["12.5", "", "12.5"]
    first = {name: re.search('data-first="(.*?)"', attributes)[1] for name, (attributes, _) in table.items()}
    assert [name for name, way in first.items() if way == "rising"] == ["Method", "Forgetting", "Time"]
    assert all('scope="col"' in attributes for attributes, _ in table.values())


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CLICKS = """<script>
const said = [];
const names = () => [...document.querySelectorAll(".results tbody th")].map((th) => th.dataset.v).join(" ");
for (const column of [1, 1, 6, 0, 0]) {
  const head = document.querySelectorAll(".results thead th")[column];
  head.querySelector("button").click();
  said.push(head.getAttribute("aria-sort") + ": " + names());
}
said.push(document.querySelectorAll("[aria-sort]").length + " " + document.querySelectorAll(".command button").length);
document.title = said.join("; ");
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_sorts_the_table_and_unknown_values_come_last(tmp_path):
    runs = [
        summary("b", 0.9, forgetting=5.0),
        summary("c", 0.7, forgetting=40.0),
        summary("a", 0.8, forgetting=9.0),
        summary("none", done=0),
    ]
    page = html_page(runs).replace("</body>", CLICKS)
    page = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)  # which would not let the test click
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
    command = [CHROMIUM, *quiet, f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert re.search("<title>(.*?)</title>", done.stdout)[1].split("; ") == [
        "descending: b a c none",
        "ascending: c a b none",
        "ascending: b a c none",  # 5 < 9 < 40, as numbers
        "ascending: a b c none",
        "descending: none c b a",  # names are all known
        "1 4",
    ]


MEASURES = """<script>
const seen = (element) => element.getClientRects().length > 0;
const wide = [...document.querySelectorAll(".chart, .bar, .balance, .tile, .legend")].filter(seen);
const out = wide.filter((e) => e.getBoundingClientRect().right > innerWidth || e.getBoundingClientRect().left < 0);
const charts = [...document.querySelectorAll(".chart")].filter(seen).map((chart) => chart.classList[1]);
const text = Math.min(...[...document.querySelectorAll("svg.chart .tick")].filter(seen).map(
  (tick) => tick.getBoundingClientRect().height));
parent.document.title = [innerWidth, charts, out.length, document.documentElement.scrollWidth, text > 9].join("; ");
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize(("width", "chart"), [(390, "narrow"), (1200, "wide")])
def test_the_whole_curve_is_on_the_screen_of_a_phone_and_of_a_desktop(tmp_path, width, chart):
    page = html_page([summary(sizes=(5,) * 20), summary("lwf", 0.9, sizes=(5,) * 20)]).replace("</body>", MEASURES)
    page = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    frame = f'<iframe width="{width}" height="900" style="border:0" srcdoc="{escape(page)}"></iframe>'  # any width
    (tmp_path / "page.html").write_text(f"<!doctype html><title></title>{frame}", encoding="utf-8")
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars")
    command = [CHROMIUM, *quiet, f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert re.search("<title>(.*?)</title>", done.stdout)[1] == f"{width}; {chart}; 0; {width}; true"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_lets_the_pages_own_script_run(tmp_path):
    (tmp_path / "page.html").write_text(html_page([summary()]), encoding="utf-8")
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
    command = [CHROMIUM, *quiet, f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.count('<button type="button">') == len(COLUMNS) + 2 + 1  # heads, and the command's


def test_page_tells_time_device_and_commands_once():
    both = "efcil compare dpcr,ldc digits --out 'a b'"
    runs = [summary("dpcr", seconds=90.0, command=both), summary("ldc", 0.7, seconds=45.0, command=both, device="H200")]
    text = html_page(runs)
    assert '<span class="bar" style="--w:100.0%"></span><span class="pair">1 min 30 s</span>' in text
    assert '<span class="bar" style="--w:50.0%"></span><span class="pair">45.0 s</span>' in text
    assert '<span class="under">H200</span>' in text
    commands = re.findall(r'<p class="muted">(.*?)</p><div class="command"><code tabindex="0">(.*?)</code>', text)
    assert [(who, unescape(re.sub("<[^>]*>", "", what))) for who, what in commands] == [("dpcr, ldc", both)]
    same = html_page([summary("dpcr"), summary("ldc")])
    assert "On cpu. Methods that share" in same
    assert '<span class="under">cpu' not in same
    assert "Time per run" not in html_page([summary(seconds=None)])
    assert "<h3>Commands" not in html_page([summary(command="")])


def test_a_method_with_two_classifiers_has_two_rows_everywhere(tmp_path):
    nme, cnn = summary("icarl", 0.8), summary("icarl", 0.6)
    numbers = ("A_t", "A5_t", "A_f", "A_avg", "matrix", "old", "new", "forgetting", "bwt")
    both = {**nme, "heads": {name: {key: one[key] for key in numbers} for name, one in (("nme", nme), ("cnn", cnn))}}
    written = write_report([both, summary("dpcr", 0.9)], tmp_path)
    assert {"matrix-icarl-nme.png", "matrix-icarl-cnn.png"} <= set(written)
    table = table_of(written["report.html"].read_text(encoding="utf-8"))
    assert table["Method"][1] == ["dpcr", "icarl/nme", "icarl/cnn"]
    assert [float(v) for v in table["Af"][1][1:]] == [nme["A_f"], cnn["A_f"]]
    assert html_page([both]).count("<figcaption>") == 2
    rows = rows_of(markdown_table([both]))[2:]
    assert [(row[0], row[1].strip("*")) for row in rows] == [
        ("icarl/nme", f"{nme['A_f']:.2f}"),
        ("icarl/cnn", f"{cnn['A_f']:.2f}"),
    ]
    assert [row["method"] for row in csv.DictReader(io.StringIO(csv_table([both])))] == ["icarl/nme", "icarl/cnn"]
    assert rf"icarl/cnn & {cnn['A_f']:.2f} &" in latex_table([both])
    labels = [text.get_text() for text in curve_figure([both]).axes[0].get_legend().get_texts()]
    assert [label.split()[0] for label in labels] == ["icarl/nme", "icarl/cnn"]


def test_class_orders_read_the_same_however_they_came():
    orders = ("identity", "3", "5", "20", "31", "200", "1993")  # a set of seven hardly ever comes in this order
    runs = [summary("dpcr", order=order) for order in reversed(orders)]
    runs += [summary("ldc", 0.7, order=order) for order in sorted(orders)]
    runs += [summary("adc", 0.6)]
    rows = {row[0]: row for row in rows_of(markdown_table(runs))[2:]}
    assert rows["dpcr"][8] == rows["ldc"][8] == ", ".join(orders)
    page = html_page(runs)
    assert f"class orders: {', '.join(orders)}</li>" in page
    assert page.count('<span class="under">order') == 1
    assert '<span class="under">order 1993</span>' in page


def test_the_ink_of_a_matrix_has_the_better_contrast():
    text = html_page([summary(matrix=[[53.9, None, None], [54.0, 68.9, None], [69.0, 90.0, 10.0]])])
    assert re.findall(r'<td class="(lo|mid|hi)" style', text) == ["lo", "mid", "mid", "hi", "hi", "lo"]


def test_page_is_fit_for_print_and_the_dark():
    text = html_page([summary()])
    sheet = text[text.index("<style>") : text.index("</style>")]
    assert "@media print{" in sheet
    assert "print-color-adjust:exact" in sheet  # else the matrices are white on white
    assert sheet.count("@media screen and (prefers-color-scheme:dark)") == 2  # paper is never dark
    assert "@media(prefers-color-scheme" not in sheet


def test_names_stay_inside_their_markdown_cell():
    (row,) = rows_of(markdown_table([summary(EVIL)]))[2:]
    assert row[0] == r'&lt;script&gt;alert("x")&lt;/script&gt; &amp; \$a\_b\$ \| c%'
    assert len(row) == len(COLUMNS) + 4


def test_inline_drawings_are_well_formed():
    runs = [summary(name, 0.3 + 0.05 * i) for i, name in enumerate(["dpcr", "ldc", "adc", "sdc", "m<1>", "acil", "x"])]
    drawings = re.findall(r"<svg.*?</svg>", html_page([*runs, summary(order="1992")]), flags=re.DOTALL)
    assert len(drawings) > 3 * len(runs)
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    numbers = re.findall(r'(?:cx|cy|x1|x2|y1|y2)="([^"]*)"', " ".join(drawings))
    assert all(0 <= float(number) <= 760 for number in numbers)


# --- everything at once ----------------------------------------------------------------------------------------


def test_write_report_writes_every_form(tmp_path):
    runs = [
        summary("dpcr"),
        summary("dpcr", 0.7, order="../1992"),
        summary("dpcr", 0.7, order="../1992"),
        summary("..", 0.6, done=2),
        summary("new", done=0),
    ]
    written = write_report(runs, tmp_path / "deep" / "out")
    assert set(written) == {
        *("report.html", "report.md", "report.tex", "report.csv", "curves.png", "curves.svg"),
        "matrix-dpcr-paper-digits-T3-order-1993-seed-0.png",
        "matrix-dpcr-paper-digits-T3-order-..-1992-seed-0.png",
        "matrix-dpcr-paper-digits-T3-order-..-1992-seed-0-2.png",
        "matrix-run.png",
    }
    assert sorted(path.name for path in (tmp_path / "deep/out").iterdir()) == sorted([*written, MARKER])
    assert written["report.html"].read_text(encoding="utf-8") == html_page(runs)
    assert written["report.md"].read_text(encoding="utf-8") == markdown_table(runs)
    assert written["report.tex"].read_text(encoding="utf-8") == latex_table(runs)
    assert written["report.csv"].read_text(encoding="utf-8") == csv_table(runs)
    root = ElementTree.fromstring(written["curves.svg"].read_bytes())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    width, height = png_size(written["curves.png"].read_bytes())
    assert width > 1000
    assert height > 500
    side, _ = png_size(written["matrix-run.png"].read_bytes())
    assert 300 < side < 1000


def test_a_place_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(RunError, tmp_path / "file", "File exists"):
        write_report([summary()], tmp_path / "file")
