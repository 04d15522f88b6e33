"""The ledger: every number in it is worked out by hand here from made-up summaries."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

import pytest

from efcil.experiment.specification import ExperimentSpec, resolve
from efcil.files import write_json, write_json_lines
from summaries import summary
from tools import paper_gaps
from tools import results_tables as tool

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/results/accuracy.md"
DASH = "\N{EN DASH}"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / PAGE).write_text("before\n<!-- ledger -->\nold\n<!-- /ledger -->\nafter\n")
    return tmp_path


def store(root, name, *summaries):
    for one in summaries:
        path = root / "results" / f"{one['dataset']}.jsonl"
        write_json_lines(path, [*tool.read_lines(path), {"run": name, **one}])


def run(root, *arguments):
    return tool.main([*map(str, arguments), "--root", str(root)])


def cells(root, label, summary_header="## cifar100, T = 10", file="results/README.md"):
    """Cells of the first row of a label below a heading."""
    text = (root / file).read_text(encoding="utf-8")
    below = text[text.index(summary_header) :]
    line = next(line for line in below.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_mean_spread_and_median_are_those_worked_out_by_hand(root):
    for order, A_f, A_avg, seconds in (("identity", 50, 60, 100), ("1992", 52, 63, 400), ("1993", 54, 66, 130)):
        store(root, f"a-order-{order}", summary(A_f=A_f, A_avg=A_avg, order=order, seconds=seconds))
    assert run(root) == 0
    row = cells(root, "dpcr")
    assert row[1] == "50.24 / 63.21 (Table 1); 51.04 / 64.44 (Table 4); 49.59 / 62.13 (Table 6)"
    assert row[2:4] == ["52.00 ± 2.00", "63.00 ± 3.00"]  # sample deviations: sqrt((4 + 0 + 4) / 2), sqrt(18 / 2)
    assert set(row[4].split(", ")) == {"identity", "1992", "1993"}
    assert row[5:8] == ["3", "130 (GPU, bf16)", "abc123"]
    commands = {f"{n}. `efcil run dpcr cifar100 --order {order}`" for n, order in enumerate(row[4].split(", "), 1)}
    assert row[8] == "1, 2, 3"
    text = (root / "results" / "README.md").read_text()
    assert commands <= set(text.splitlines())
    each = text.split("<summary>Every run</summary>")[1]
    assert re.search(r"\| dpcr \| 1992 \| 0 \| 52.00 \| 63.00 \| 400 \| GPU, bf16 \| abc123 \| a-order-1992 \|", each)
    compact = cells(root, "dpcr", "**cifar100, T = 10**", PAGE)
    assert compact[:5] == ["dpcr", "50.24", "63.21", "52.00 ± 2.00", "63.00 ± 3.00"]
    assert compact[5:] == ["+1.76", "all three", "130"]
    assert "Time per run in seconds on GPU, bf16;" in (root / PAGE).read_text()
    text = (root / PAGE).read_text()
    assert text.startswith("before\n<!-- ledger -->\n")
    assert text.endswith("<!-- /ledger -->\nafter\n")


def test_what_is_said_of_photographs_is_the_mean_over_draws():
    def line(name, head, *accuracies):
        return {"set": name, "part": "test", "shots": 20, "head": head, "classes": 60, "accuracy": list(accuracies)}

    lines = [line("flowers102", "slda", 90, 91), line("flowers102", "logistic", 80), line("cars", "slda", 70, 72, 74)]
    lines += [line("cars", "slda", 1) | {"shots": 5}, line("cars", "logistic", 60) | {"part": "validation"}]
    lines += [line("cars", head, 99) | {"classes": 2} for head in ("slda", "logistic")]
    assert tool.photos_text(lines) == "", "one is missing"
    text = tool.photos_text([*lines, line("cars", "logistic", 61.26)])
    assert "60 flower species **90.5 %**,\n60 car models **72.0 %**" in text
    assert text.endswith("80.0 % and 61.3 %.")


def test_gaps_to_the_paper_are_listed_lowest_first():
    entries = tool.read_entries(ROOT / "results")
    sections = tool.sections_of(entries, tool.read_paper())
    text = tool.gaps_text(sections)
    differences = [float(line.split(" | ")[4]) for line in text.splitlines() if line.startswith("| cifar100")]
    assert differences == sorted(differences)
    assert min(abs(value) for value in differences) > tool.FAR
    assert "imagenet100, T = 10" in text.splitlines()[0]
    assert "cifar100" not in text.splitlines()[0], "it is measured"


def test_no_gap_is_published_without_its_cause():
    entries = tool.read_entries(ROOT / "results")
    rows = [row for row in tool.gaps_text(tool.sections_of(entries, tool.read_paper())).splitlines() if "|" in row]
    assert all(len(re.split(r"(?<!\\)\|", row)) == 9 for row in rows)
    assert paper_gaps.UNKNOWN not in "".join(rows)
    assert paper_gaps.cause_of("cifar100, T = 20", "icarl:memory=500/nme") == "no AutoAugment (one order)"
    assert paper_gaps.cause_of("cifar100, T = 20", "ldc") == paper_gaps.UNKNOWN
    assert "Not examined" not in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("A_f", "marks"), [(52.2, 0), (52.3, 1), (48.2, 1)])
def test_a_row_of_the_readme_has_a_footnote_beyond_two_points(root, A_f, marks):
    store(root, "a", summary(A_f=A_f, order="1993"))
    text = tool.readme_text(tool.sections_of(tool.read_entries(root / "results"), tool.read_paper()))
    assert text.count("¹ Not examined yet.") == marks
    assert len(re.findall(r"[+-]\d\.\d ¹ \|", text)) == marks


def test_repeats_of_an_order_are_averaged_before_the_orders(root):
    store(root, "a", summary(A_f=40, order="identity"))
    store(root, "b", summary(A_f=50, order="1993"))
    store(
        root,
        "c",
        summary(A_f=54, order="1993", commit="def456", device="CPU", precision="fp32", threads=2, seconds=9000),
    )
    run(root)
    row = cells(root, "dpcr")
    assert row[2] == "46.00 ± 8.49"  # 40 and (50 + 54) / 2: 12 / sqrt(2) apart
    assert row[5] == "3"
    assert row[6] == "100 (GPU, bf16); 9000 (CPU, 2 threads, fp32)"  # never a median over machines
    assert row[7] == "abc123, def456"


def test_orders_that_are_kept_back_are_a_row_of_their_own(root):
    """They are not the paper's orders, so its numbers do not stand beside them."""
    for order, A_f in (("identity", 50), ("1993", 52), ("1", 60), ("2", 61), ("3", 62)):
        store(root, f"a-order-{order}", summary(A_f=A_f, order=order))
    store(root, "b", summary("ldc", A_f=40, order="1"))
    assert run(root) == 0
    assert cells(root, "dpcr")[2] == "51.00 ± 1.41"
    assert cells(root, "dpcr")[1].startswith("50.24")
    apart = cells(root, "dpcr, orders 1, 2, 3")
    assert apart[1:3] == [DASH, "61.00 ± 1.00"]
    assert apart[4] == "1, 2, 3"
    assert cells(root, "ldc")[1:3] == [DASH, "40.00"]  # measured in no other order
    text = (root / "results" / "README.md").read_text()
    assert re.search(r"\| ldc \| 46.60 / 61.67[^|]*\| not measured yet", text)


def test_rows_are_sorted_and_what_is_missing_comes_last(root):
    store(root, "a", summary("lwf-ncm", 44), summary("dpcr", 51), summary("joint", 70), summary("dp-ncm", 48))
    run(root)
    text = (root / "results" / "README.md").read_text().split("## cifar100, T = 10")[1].split("###")[0]
    labels = re.findall(r"^\| ([a-z][\w:=/-]*) \|", text, re.M)
    assert labels[:6] == ["joint", "dpcr", "dp-ncm", "lwf-ncm", "adc", "icarl:memory=1000/nme"]
    assert cells(root, "joint")[1] == DASH  # the paper has no such number
    assert cells(root, "adc")[2] == "not measured yet"
    assert "not measured yet" not in (root / PAGE).read_text()


def test_ablations_and_variants_have_a_table_of_their_own(root):
    variant = "dpcr:rank_rule=numerical"
    store(root, "a", summary(), summary("rrcr", 32), summary(variant, 48))
    run(root)
    main, _, ablations = (root / "results" / "README.md").read_text().partition("### Ablations and variants")
    for label in ("rrcr", r"dpcr:rank\_rule=numerical"):
        assert f"| {label} |" not in main
        assert f"| {label} |" in ablations
    assert cells(root, "rrcr", "### Ablations")[1:3] == ["32.17 / 44.89 (Table 4)", "32.00"]
    assert "rrcr" not in (root / PAGE).read_text()


def test_configurations_are_never_averaged(root):
    store(root, "a", summary(A_f=50))
    store(root, "b", summary(A_f=60, options={"ridge": 2000.0}))
    store(root, "c", summary(A_f=55, preset="tuned"))
    run(root)
    assert cells(root, r"dpcr \[ridge=200.0\]")[2] == "50.00"
    assert cells(root, r"dpcr \[ridge=2000.0\]")[2] == "60.00"
    assert cells(root, "dpcr (tuned)")[2] == "55.00"


def test_settings_by_hand_that_are_a_methods_own_preset_are_that_preset(root):
    experiment = resolve(ExperimentSpec(("dpcr-plus",), "cifar100", preset="tuned"))
    options, training = (
        experiment.methods["dpcr-plus"][1].model_dump(mode="json"),
        experiment.training.model_dump(mode="json"),
    )
    given = {"training": training, "data": experiment.data.model_dump(mode="json")}
    store(root, "a", summary(A_f=60, method="dpcr-plus:gaussian=1:gaussian_ridge=1", options=options, **given))
    store(root, "b", summary(A_f=58, method="dpcr-plus:ridge=100", options=options | {"ridge": 100.0}, **given))
    store(root, "c", summary(A_f=50, method="dpcr-plus", options=options | {"moved_bonus": 0.5}, **given))
    run(root)
    assert cells(root, "dpcr-plus (tuned)")[2] == "60.00"
    assert cells(root, "dpcr-plus:ridge=100 (tuned)", "### Ablations")[2] == "58.00"
    assert "moved\\_bonus=0.5" in (root / "results" / "README.md").read_text()
    assert cells(root, "dpcr-plus (tuned)", "**cifar100, T = 10**", PAGE)[3] == "60.00"


def test_the_settings_of_the_released_code_are_a_variant(root):
    store(root, "a", summary(A_f=50))
    store(root, "b", summary(A_f=52, preset="released_code"))
    run(root)
    main, _, variants = (root / "results" / "README.md").read_text().partition("### Ablations and variants")
    assert r"| dpcr (released\_code) |" not in main
    assert r"| dpcr (released\_code) |" in variants
    assert cells(root, "dpcr")[2] == "50.00"
    assert "released" not in (root / PAGE).read_text()


def test_partial_runs_are_refused(root, tmp_path, capsys):
    written(tmp_path / "runs", summary("lwf"), summary(A_f=90, done=3))
    assert run(root, "--add", tmp_path / "runs", "--name", "a") == 1
    assert "dpcr has 3 of 10 tasks; finish it with --resume" in capsys.readouterr().err
    assert not list((root / "results").iterdir()), "nor is the one beside it stored"
    store(root, "b", summary(A_f=90, done=3))
    assert run(root) == 1
    assert "cifar100/10/b/dpcr: dpcr has 3 of 10 tasks" in capsys.readouterr().err


def test_the_two_heads_of_a_method_are_two_rows_with_the_papers_numbers(root):
    heads = {"cnn": {"A_f": 21.0, "A_avg": 44.0}, "nme": {"A_f": 38.0, "A_avg": 57.0}}
    store(root, "a", summary("icarl", options={"memory": 500}, heads=heads))
    run(root)
    assert cells(root, "icarl/nme")[1:4] == ["39.56 / 58.16 (Table 6)", "38.00", "57.00"]
    assert cells(root, "icarl/cnn")[1:4] == ["22.28 / 45.91 (Table 6)", "21.00", "44.00"]
    assert "| icarl:memory=500/nme |" not in (root / "results" / "README.md").read_text().split("T = 20")[0]


def test_uneven_splits_are_not_compared_with_the_paper(root):
    store(root, "a", summary(task_sizes=[55, *[5] * 9]))
    run(root)
    assert cells(root, "dpcr", "## cifar100, T = 10 (55 + 9 x 5)")[1] == DASH


@pytest.mark.parametrize("file", [PAGE, "results/README.md"])
def test_check_finds_an_edited_number(root, capsys, file):
    store(root, "a", summary(A_f=51.25))
    run(root)
    assert run(root, "--check") == 0
    path = root / file
    path.write_text(path.read_text().replace("51.25", "52.25"))
    edited = path.read_text()
    capsys.readouterr()
    assert run(root, "--check") == 1
    said = capsys.readouterr().out
    assert "52.25" in said
    assert "51.25" in said
    assert f"{file} on disk" in said
    assert path.read_text() == edited  # a check writes nothing


def test_check_finds_a_new_summary_and_a_missing_file(root):
    run(root)
    store(root, "a", summary())
    assert run(root, "--check") == 1
    run(root)
    (root / "results" / "README.md").unlink()
    assert run(root, "--check") == 1


def test_a_readme_without_the_block_is_left_alone(root, capsys):
    (root / PAGE).write_text("# efcil\n")
    assert run(root) == 0
    assert (root / PAGE).read_text() == "# efcil\n"
    assert f"{PAGE} has no block" in capsys.readouterr().out
    assert run(root, "--check") == 0


def test_the_readme_says_what_the_ledger_says(root):
    """Means over the orders, differences to the paper, and a note where one is large."""
    blocks = "<!-- headline -->\n<!-- /headline -->\n\n<!-- results -->\n<!-- /results -->\n"
    (root / "README.md").write_text(blocks)
    for order, ours, dpcr in (("1", 60, 50), ("2", 62, 51), ("3", 64, 52)):
        store(root, f"a-order-{order}", summary("dpcr", dpcr, order=order))
        experiment = resolve(ExperimentSpec(("dpcr-plus",), "cifar100", preset="tuned"))
        given = {
            "training": experiment.training,
            "options": experiment.methods["dpcr-plus"][1],
            "data": experiment.data,
        }
        given = {key: value.model_dump(mode="json") for key, value in given.items()}
        store(root, f"b-order-{order}", summary("dpcr-plus", ours, order=order, preset="tuned", **given))
    store(root, "c", summary("dpcr", 49, order="1993"), summary("acil", 45, order="1993"))
    assert run(root) == 0
    text = (root / "README.md").read_text()
    assert "DPCR+ 62.0 %** final accuracy; DPCR 51.0 % on the same class orders.\n" in text
    assert "On class order 1993 DPCR reaches 49.0 %; the paper reports 50.2 %." in text
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    by_name = {(row[0], row[5]): row for row in rows[2:]}
    assert by_name["**DPCR+** (ours)", "1, 2, 3"][2:4] == [DASH, "62.00 ± 2.00"]
    assert by_name["DPCR", "1993"][2:4] == ["50.24 / 63.21", "49.00"]
    assert by_name["DPCR", "1993"][6] == "-1.2"
    assert by_name["ACIL", "1993"][6] == "+9.5 ¹"
    assert text.count("¹") == 2
    (root / "README.md").write_text(text.replace("62.0 %", "63.0 %"))
    assert run(root, "--check") == 1


def written(directory, *summaries):
    for one in summaries:
        place = directory / one["method"]
        place.mkdir(parents=True)
        (place / "summary.json").write_text(json.dumps(one))


def test_add_copies_several_orders_and_no_directory_of_the_machine(root, tmp_path):
    runs = tmp_path / "runs"
    for order in ("identity", "1993"):
        command = f"efcil compare dpcr,lwf cifar100 --data /secret/place --out {runs} --orders {order}"
        both = (summary(m, order=order, command=command) for m in ("dpcr:ridge=1", "lwf"))
        written(runs / f"order-{order}", *both)
    assert run(root, "--add", runs, "--name", "first") == 0
    stored = tool.read_lines(root / "results" / "cifar100.jsonl")
    names = [(f"first-order-{o}", m) for o in ("1993", "identity") for m in ("dpcr:ridge=1", "lwf")]
    assert [(one["run"], one["method"]) for one in stored] == names
    one = stored[0]
    assert one["command"] == "efcil compare dpcr,lwf cifar100 --data DATA --out OUT --orders 1993"
    assert one["A_f"] == 50.0
    assert {"run_dir", "config_text"}.isdisjoint(one)
    everything = "".join(p.read_text() for p in root.rglob("*") if p.is_file() and runs not in p.parents)
    assert "/secret" not in everything
    assert cells(root, "lwf")[4] == "1993, identity"  # and the table was written


def test_add_takes_a_single_run_and_overwrites_nothing(root, tmp_path, capsys):
    place = tmp_path / "runs"
    place.mkdir()
    (place / "summary.json").write_text(json.dumps(summary()))
    assert run(root, "--add", place, "--name", "a") == 0
    assert run(root, "--add", place, "--name", "a") == 0  # the same again is no harm
    (place / "summary.json").write_text(json.dumps(summary(A_f=99.0)))
    assert run(root, "--add", place, "--name", "a") == 1
    assert "choose another --name" in capsys.readouterr().err
    assert [one["A_f"] for one in tool.read_lines(root / "results" / "cifar100.jsonl")] == [50.0]
    assert run(root, "--add", place, "--name", "../a") == 1
    assert run(root, "--add", tmp_path / "none", "--name", "b") == 1


def test_a_benchmark_takes_the_place_of_the_one_before(served, tmp_path, capsys):
    for name, rate in (("augment", 100.0), ("other", 7.0), ("augment", 200.0)):
        raw = {
            "device": "a core",
            "augment": {"images_per_second": {"median": rate, "spread": 0}, "ratio": {"median": 2}},
        }
        (tmp_path / "record.json").write_text(json.dumps({"command": "x", "commit": "abc", "raw": raw}))
        assert run(served, "--add", tmp_path / "record.json", "--name", name) == 0
    assert [one["name"] for one in tool.read_lines(served / "results" / tool.BENCHMARKS)] == ["augment", "other"]
    text = (served / "docs" / "dev" / "performance.md").read_text()
    assert "`results/benchmarks.jsonl#augment`: `x`, a core, commit abc" in text
    assert "Augmentation: 200 images a second" in text
    assert "Augmentation: 100 images" not in text
    (tmp_path / "record.json").write_text("{}")
    assert run(served, "--add", tmp_path / "record.json", "--name", "empty") == 1
    assert "record.json: no record of a benchmark" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dataset", "tasks", "method", "A_f", "A_avg", "source"),
    [
        ("cifar100", 10, "dpcr", 50.24, 63.21, "Table 1"),
        ("cifar100", 20, "lwf-ncm", 36.34, 51.52, "Table 1"),
        ("tiny-imagenet", 20, "ldc", 24.49, 38.04, "Table 1"),
        ("imagenet100", 10, "acil", 44.61, 59.77, "Table 1"),
        ("imagenet100", 20, "dpcr", 38.35, 57.22, "Table 1"),
        ("cub200", 5, "adc", 28.84, 39.44, "Table 2"),
        ("imagenet1k", 10, "ds-al", 33.67, 48.84, "Table 3"),
        ("cifar100", 10, "rrcr+tssp+cip", 45.56, 62.15, "Table 4"),
        ("tiny-imagenet", 10, "dp-ncm", 33.47, 43.86, "Table 5"),
        ("cifar100", 20, "foster:memory=1000/boosted", 41.79, 55.41, "Table 6"),
        ("imagenet100", 20, "icarl:memory=500/nme", 28.44, 48.71, "Table 6"),
    ],
)
def test_the_papers_numbers_are_the_papers(dataset, tasks, method, A_f, A_avg, source):
    numbers = tool.read_paper()[dataset][tasks][method]
    assert (numbers["A_f"], numbers["A_avg"], numbers["source"]) == (A_f, A_avg, source)


def test_the_papers_tables_are_whole():
    paper = tool.read_paper()
    tables: dict[str, int] = {}
    for splits in paper.values():
        for methods in splits.values():
            for numbers in methods.values():
                for one in (numbers, *numbers.get("also", [])):
                    tables[one["source"]] = tables.get(one["source"], 0) + 1
                    assert 0 < one["A_f"] < one["A_avg"] < 100
                    wanted = {"Table 1": 3, "Table 4": 0, "Table 5": 0}.get(one["source"], 1)
                    assert len(one["orders"] or []) == wanted
    # 9 methods x 6; 7; 6; 4 steps; 3 methods x 4; 9 rows x 4
    assert tables == {"Table 1": 54, "Table 2": 7, "Table 3": 6, "Table 4": 4, "Table 5": 12, "Table 6": 36}


def stored_benchmark(root, name, **raw):
    path = root / "results" / tool.BENCHMARKS
    one = {"name": name, "command": "python x.py", "commit": "abc", "raw": {"device": "a machine", **raw}}
    write_json_lines(path, [*tool.read_lines(path), one])


@pytest.fixture
def served(root):
    (root / "docs" / "dev").mkdir(parents=True, exist_ok=True)
    for name in ("serve", "dev/performance"):
        (root / "docs" / f"{name}.md").write_text("top\n<!-- ledger -->\n<!-- /ledger -->\nend\n")
    return root


def test_what_the_service_measured_stands_in_its_page_alone(served):
    one = {"per_second": 80.0, "p50_ms": 300.0, "p90_ms": 400.0, "p99_ms": 500.0, "errors": 0}
    median = {**one, "single": 40.0, "batch": 120.0, "size": 15.25}
    meanwhile = {"alone": {**one, "p50_ms": 11.0}, "teaching": {**one, "p50_ms": 22.0}, "job": "done"}
    found = {"clients": 32, "threads": 2, "backbone": "resnet18", "rounds": [median] * 3, "median": median}
    found |= {"ratio": 2.0, "ratio_to_batches": 0.667, "errors": 0, "meanwhile": meanwhile}
    stored_benchmark(served, "cpu-serve", serve=found)
    soak = {
        **one,
        "clients": 8,
        "backbone": "resnet18",
        "seconds": 1200.0,
        "mib": [420.0, 421.0, 419.5],
        "growth": 0.01,
    }
    stored_benchmark(served, "cpu-soak", soak=soak)
    assert run(served) == 0
    text = (served / "docs" / "serve.md").read_text()
    assert text.startswith("top\n")
    assert text.endswith("end\n")
    assert "**Throughput.** `results/benchmarks.jsonl#cpu-serve`: `python x.py`, a machine, commit abc" in text
    assert "| plain loop over single JPEG files | 40.0 |" in text
    assert "| `efcil serve`, 32 clients | 80.0 | 300 | 400 | 500 | 0 |" in text
    assert "| `efcil serve`, one client, during training | 80.0 | 22 |" in text
    assert (
        "2.00 times the loop over single files, 0.67 times ready batches; 15.2 images per pass. Training job: done."
        in text
    )
    assert "20 minutes, 8 clients, resnet18: 80.0 images per second, 0 errors, p99 500 ms." in text
    assert "Memory 420 to 421 MiB in 3 readings; change from the first to the last third +0.01 %." in text
    assert "not measured yet" not in text
    assert "cpu-serve" not in (served / "docs" / "dev" / "performance.md").read_text()


def test_rounds_and_what_forgetting_did(served):
    gone = [{"class": "a", "before": 60.0, "ruled_out": 62.0, "after": 61.0}]
    gone += [{"class": "b", "before": 50.0, "ruled_out": 50.0, "after": 49.5}]
    row = {"seed": 4, "pictures": 500, "taught": 55.0, "run": 55.004, "forgotten": gone, "settings": []}
    rounds = {"data": "birds", "classes": 20, "val_fraction": 0.1, "rows": [row]}
    stored_benchmark(served, "cpu-rounds", rounds=rounds)
    assert run(served) == 0
    text = (served / "docs" / "dev" / "performance.md").read_text()
    assert "| birds, 20 classes in five rounds: seed | Test pictures |" in text
    assert "| 4 | 500 | 55.00 | 55.00 | 55.00 | 56.00 | 55.25 | -0.50 |" in text
    assert "Kept from training to measure recall: 10 %. Accuracy of the others: mean over 2 forgotten classes." in text


def test_the_repositorys_ledger_is_up_to_date(capsys):
    assert tool.main(["--check"]) == 0, capsys.readouterr().out


def test_what_was_set_by_hand_stands_apart_and_what_was_no_option_then_does_not(root):
    """An older summary without an option is the default's; other training is a variant, without the paper's numbers."""
    experiment = resolve(ExperimentSpec(("dpcr",), "cifar100", preset="paper"))
    training = experiment.training.model_dump(mode="json")
    older = {k: v for k, v in training.items() if k != "optimizer"}
    store(root, "a", summary(A_f=50, order="1992", training=older))
    store(root, "b", summary(A_f=52, order="1993", training=training))
    store(root, "c", summary(A_f=60, order="1993", training={**training, "batch_size": 64}))
    assert run(root) == 0
    main, variants = (root / "results" / "README.md").read_text().split("### Ablations and variants")[:2]
    assert main.count("| dpcr |") == 1
    assert "| dpcr | 50.24 / 63.21 (Table 1)" in main
    assert "51.00 ± 1.41" in main
    assert rf"| dpcr \[batch\_size=64\] | {tool.NONE} | 60.00 |" in variants


def test_other_pictures_stand_apart(root):
    """How pictures are stored decides the crops; whether they were streamed does not."""
    training = resolve(ExperimentSpec(("dpcr",), "cub200", preset="paper")).training.model_dump(mode="json")
    common = {"dataset": "cub200", "tasks": 5, "task_sizes": [40] * 5, "training": training, "order": "1993"}
    store(root, "a", summary(A_f=26, **common))
    store(root, "b", summary(A_f=28, **common, data={"lazy": True, "keep_aspect": None}))
    store(root, "c", summary(A_f=20, **common, data={"keep_aspect": False}))
    assert run(root) == 0
    text = (root / "results" / "README.md").read_text()
    assert "| dpcr | 29.51 / 39.44 (Table 2) | 27.00 |" in text
    assert rf"| dpcr \[data.keep\_aspect=false\] | {tool.NONE} | 20.00 |" in text


def test_an_option_that_is_gone_sets_a_run_apart(root):
    """Its value is not today's default: nobody has said that the experiment is the same."""
    training = resolve(ExperimentSpec(("dpcr",), "cifar100", preset="paper")).training.model_dump(mode="json")
    store(root, "a", summary(A_f=26, training=training))
    store(root, "b", summary(A_f=20, training=training | {"former_option": 4}))
    assert run(root) == 0
    text = (root / "results" / "README.md").read_text()
    assert "| 26.00 |" in text
    assert "| 20.00 |" in text


def test_a_shift_that_was_an_option_is_the_methods_part(root):
    """Runs from before and after are one row; one that left the shift out stands apart."""
    options = resolve(ExperimentSpec(("dpcr",), "cifar100", preset="paper")).methods["dpcr"][1].model_dump(mode="json")
    for name, A_f, own in (
        ("a", 50, options),
        ("b", 52, options | {"shift": True}),
        ("c", 20, options | {"shift": False}),
    ):
        store(root, name, summary(A_f=A_f, order={"a": "1992"}.get(name, "1993"), options=own))
    assert run(root) == 0
    text = (root / "results" / "README.md").read_text().split("## cifar100, T = 10")[1].split("###")[0]
    rows = [row for row in text.splitlines() if row.startswith("| dpcr ") and "Table 1" in row]
    assert ["| 51.00 ± 1.41 |" in row for row in rows] == [True, False]
    assert "| 20.00 |" in rows[1]


def test_another_arithmetic_stands_apart(root):
    training = resolve(ExperimentSpec(("dpcr",), "cifar100", preset="paper")).training.model_dump(mode="json")
    store(root, "a", summary(A_f=50, training=training))
    store(root, "b", summary(A_f=40, training=training, command="efcil run dpcr cifar100 --precision=fp32"))
    assert run(root) == 0
    text = (root / "results" / "README.md").read_text()
    assert cells(root, "dpcr")[2] == "50.00"
    assert rf"| dpcr \[precision=fp32\] | {tool.NONE} | 40.00 |" in text


def test_what_shared_the_device_is_said_beside_the_seconds(root, tmp_path):
    write_json(tmp_path / "summary.json", summary(seconds=300.0))
    assert run(root, "--add", str(tmp_path), "--name", "beside", "--concurrent-runs", "3") == 0
    assert "300 (GPU, bf16, 3 concurrent runs)" in cells(root, "dpcr")
    write_json(tmp_path / "summary.json", summary(seconds=500.0, concurrent_runs=4, order="1992"))
    assert run(root, "--add", str(tmp_path), "--name", "more", "--concurrent-runs", "3") == 0
    assert cells(root, "dpcr")[6] == "300 (GPU, bf16, 3 concurrent runs); 500 (GPU, bf16, 4 concurrent runs)"


def test_many_classes_are_counted_and_all_are_printed(served):
    row = {"dim": 512, "seconds": 9.0, "stored_bytes": 2e8, "of_papers": 0.5, "peak_ratio": 1.1}
    grams = row | {"classes": 1000, "images": 500, "form": "gram", "processor_seconds": 100.0}
    factors = row | {"classes": 100, "images": 64, "form": "factors", "processor_seconds": 0.4, "stored_bytes": 1e6}
    cut = {"error": 0.01, "dim": 512, "images": 400, "rows": 30, "of_gram": 0.1, "left_out": 0.0099}
    found = {"classes": [grams, factors], "dimensions": [], "tenfold_growth": 10.04, "factor_deviation": 2e-13}
    found["compression"] = [cut | {"left_out_after_a_move": 0.0111, "weight_change": 0.02}]
    found["tasks"] = [{"tasks": 5, "classes": 100, "dim": 256, "class_moves": 200, "processor_seconds": 1.5}]
    stored_benchmark(served, "cpu-scale", scale=found)
    assert run(served) == 0
    text = (served / "docs" / "dev" / "performance.md").read_text()
    assert "| 1,000 | 512 | 500 | gram | 9.00 | 100.00 | 200.0 | 0.500 | 1.10 |" in text
    assert "| 100 | 512 | 64 | factors | 9.00 | 0.40 | 1.0 | 0.500 | \u2013 |" in text
    assert "10.0 times the processor time; exact factors differ by 2e-13" in text
    assert "| 0.01 | 30 | 0.100 | 0.0099 | 0.0111 | 0.0200 |" in text
    # 21,841 (512 513 / 2 + 512) 8 bytes; a tenth of a second a class as in the thousand measured
    assert "| ImageNet-21k, 21,841 | 512 | gram | 23.0 | 2,184 |" in text
    assert "| ImageNet-21k, 21,841 | 512 | factors, 64 rows | 5.8 | 87 |" in text
    assert "| ImageNet-1k, 1,000 | 2,048 | gram | 16.8 | 6,400 |" in text


def test_ratios_of_streaming_and_of_several_processes_are_reported_with_their_range(root):
    stream = {"alone": [100.0, 300.0, 200.0], "streamed": [90.0, 280.0, 190.0], "ratio": [0.9, 1.1, 0.95]}
    both = {"images_per_second": {"together": 240.0, "alone": 150.0}, "ratio": 1.6, "ratios": [1.5, 1.6, 1.7]}
    stored_benchmark(root, "a", size=256, workers=2, stream=stream)
    stored_benchmark(root, "b", distributed={"processes": 2, "problem": "LwF", **both})
    text = tool.benchmarks_text(root / "results")
    assert "190 images a second, decoding alone 200, median ratio 0.95 (3 turns, ratios 0.90 to 1.10)" in text
    assert "240 images a second together, 150 alone, median ratio 1.60 (3 turns, ratios 1.50 to 1.70)" in text


def test_an_epochs_share_of_the_step_is_reported(root):
    rates = {"images_per_second": 19_000.4, "resident_images_per_second": 20_000.0, "share": 0.95002}
    epoch = {name: {"images": 10_000, **rates} for name in ("no_teacher", "teacher")}
    stored_benchmark(root, "a", side=64, epoch=epoch)
    text = tool.benchmarks_text(root / "results")
    assert "| An epoch at 64 pixels |" in text
    assert "| 10,000 images, no teacher | 19,000 | 20,000 | 0.95 |" in text


def test_ways_of_a_step_are_a_table(root):
    row = {"way": "branch", "teacher": True, "limit": 0, "ms": 2.2, "first_seconds": 6.54, "race": 0.0, "chance": 0.01}
    ways = [row, row | {"way": "plain", "teacher": False, "limit": 10}]
    ways.append({key: value for key, value in row.items() if key != "limit"} | {"teacher": "beside"})
    stored_benchmark(root, "steps", ways=ways)
    text = tool.benchmarks_text(root / "results")
    assert "| branch | ahead | all | 2.200 | 6.5 | 0 | 0.01 |" in text
    assert "| plain | none | 10 | 2.200 |" in text
    assert "| branch | beside | 10 | 2.200 |" in text


def test_what_goes_beyond_the_paper_stands_beside_dpcr(root):
    page = root / "docs" / "dpcr-plus.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text("before\n<!-- ledger -->\n<!-- /ledger -->\nafter\n")
    store(root, "a", summary(A_f=50), summary("dpcr-plus", A_f=60, preset="tuned", order="2"))
    store(root, "a", summary("dpcr-plus", A_f=62, preset="tuned", order="1"))
    store(root, "b", summary("dpcr-plus", A_f=61, preset="tuned", order="2"))
    store(root, "a", summary("ldc", A_f=45))
    run(root)
    summary_header, file = "<!-- ledger -->", "docs/dpcr-plus.md"
    assert cells(root, "dpcr", summary_header, file) == ["dpcr", "1993", "50.00", "60.00"]
    text = page.read_text()
    assert "| ldc |" not in text
    assert text.index("| dpcr-plus (tuned)") < text.index("| dpcr |")
    assert "1, 2" in text
    store(root, "c", summary(A_f=51, order="1"))
    store(root, "d", summary(A_f=53, order="2"))
    run(root)
    text = page.read_text()
    assert cells(root, "dpcr, orders 1, 2", summary_header, file)[2] == "52.00 ± 1.41"
    assert text.index("| dpcr-plus (tuned)") < text.index("| dpcr, orders") < text.index("| dpcr |")
    assert "tiny-imagenet" not in text
    for A_f, order in ((30, "1993"), (31, "1")):
        store(root, f"t-{order}", summary(A_f=A_f, order=order, dataset="tiny-imagenet"))
    run(root)
    assert "tiny-imagenet" not in page.read_text(), "nothing of it was measured there"
    store(root, "t", summary("dpcr-plus", A_f=40, preset="tuned", order="1", dataset="tiny-imagenet"))
    run(root)
    text = page.read_text()
    assert cells(root, "dpcr-plus (tuned)", "**tiny-imagenet**", file) == ["dpcr-plus (tuned)", "1", "40.00", "60.00"]
    assert cells(root, "dpcr, order 1", "**tiny-imagenet**", file)[1:3] == ["1", "31.00"]
    assert text.index("**cifar100**") < text.index("**tiny-imagenet**")


def test_what_each_part_gives_has_a_table_of_its_own(root):
    page, summary_header = root / "docs" / "dpcr-plus.md", "what each part gives**: order 1; all but the last row"
    page.parent.mkdir(exist_ok=True)
    page.write_text("<!-- ledger -->\n<!-- /ledger -->\n")
    store(root, "z", summary(A_f=50, order="1"), summary("dpcr-plus", A_f=62, preset="tuned", order="1"))
    whole, ridge = ("dpcr-plus", 60), ("dpcr-plus:ridge=3", 59)
    parts = {"dpcr-plus:use_stages=1:gram_rank=84": 58, "dpcr-plus:use_stages=0:gaussian=0:gram_storage=gram": 52}
    store(root, "y", summary(A_f=52, order="1"))
    store(root, "x", summary(A_f=40, order="2"))
    for method, found in (*parts.items(), ridge, whole):
        store(root, "ablation-order-1", summary(method, A_f=found, preset="tuned", order="1"))
    run(root)
    table = page.read_text().split(summary_header)[1]
    rows = re.findall(r"^\| (.*?) \| (\d\S*) \|", table, re.MULTILINE)
    assert rows == [
        ("dpcr-plus", "60.00"),  # of that training alone
        ("dpcr-plus:ridge=3", "59.00"),
        ("1 intermediate stage", "58.00"),
        ("no intermediate stages, no Gaussians", "52.00"),
        ("dpcr, trained as LwF", "51.00"),  # repeats in the same order
    ]
    before = page.read_text().split(summary_header)[0]
    assert "| dpcr-plus (tuned) | 1 | 61.00 |" in before, "repeats are averaged as everywhere"
    assert "use_stages" not in before


def test_its_examples_are_true():
    found = doctest.testmod(tool, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted >= 2
    assert found.failed == 0
