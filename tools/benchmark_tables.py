"""Tables of benchmark results for docs/dev/performance.md and docs/serve.md, written by `results_tables.py`.

results/benchmarks.jsonl has one named record or text per line.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from efcil.errors import RunError
from efcil.files import read_json, read_json_lines, write_json_lines
from efcil.report.groups import NONE
from efcil.report.tables import md as escaped
from efcil.report.tables import row as row_of

BENCHMARKS = "benchmarks.jsonl"
BEGIN, END = "<!-- ledger -->", "<!-- /ledger -->"

Raw = Mapping[str, Any]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON Lines file; return an empty list if it does not exist."""
    return read_json_lines(path, error=RunError) if path.is_file() else []


def table(head: str, rows: Iterable[list[str]]) -> list[str]:
    """Return a Markdown table; columns with a head starting with > are right-aligned."""
    heads = head.split(" | ")
    align = ["---:" if cell.startswith(">") else "---" for cell in heads]
    return [row_of(cell.removeprefix(">") for cell in heads), row_of(align), *map(row_of, rows)]


def filled(head: str, cells: str, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a table with formatted cells and a trailing empty line."""
    return [*table(head, (cells.format(**row).split(" | ") for row in rows)), ""]


def _origin(stored: Raw) -> str:
    """Return the origin of a stored benchmark."""
    about = f"`{stored['command']}`, {stored['raw']['device']}, commit {stored['commit']}"
    return f"`results/{BENCHMARKS}#{stored['name']}`: {about}"


def _rounds(raw: Raw) -> list[str]:
    """Return the table of benchmarks/rounds.py: incremental updates against a run, and the effect of forgetting."""
    found, rows = raw["rounds"], []
    for row in found["rows"]:
        gone = row["forgotten"]
        means = {key: statistics.mean(one[key] for one in gone) for key in ("before", "ruled_out", "after")}
        rows.append({**row, **means, "worst": min(one["after"] - one["before"] for one in gone)})
    head = f"{escaped(found['data'])}, {found['classes']} classes in five rounds: seed | >Test pictures"
    head += " | >`efcil evaluate`, % | >`efcil run`, % | >Others before a class is forgotten, %"
    head += " | >Its name struck out, % | >After `efcil forget`, % | >Worst change, points"
    cells = "{seed} | {pictures} | {taught:.2f} | {run:.2f} | {before:.2f} | {ruled_out:.2f} | {after:.2f}"
    held, gone = f"{100 * found['val_fraction']:.0f} %", len(found["rows"][0]["forgotten"])
    words = f"Kept from training to measure recall: {held}. Accuracy of the others: mean over {gone} forgotten classes."
    return [*filled(head, cells + " | {worst:+.2f}", rows), words]


def _serve(found: Raw) -> list[str]:
    """Return the table of benchmarks/serve.py: plain loops, many clients, one client during an update."""
    median, meanwhile = found["median"], found["meanwhile"]
    latency = "{per_second:.1f} | {p50_ms:.0f} | {p90_ms:.0f} | {p99_ms:.0f} | {errors:.0f}"
    served = (
        (f"{found['clients']} clients", median),
        ("one client", meanwhile["alone"]),
        ("one client, during training", meanwhile["teaching"]),
    )
    rows = [
        ["plain loop over single JPEG files", f"{median['single']:.1f}", *[NONE] * 4],
        ["plain loop over ready batches of 32", f"{median['batch']:.1f}", *[NONE] * 4],
        *([f"`efcil serve`, {who}", *latency.format(**one).split(" | ")] for who, one in served),
    ]
    what = f"{found['backbone']}, {found['threads']} threads, median of {len(found['rounds'])} rounds"
    ratios = (
        f"{found['ratio']:.2f} times the loop over single files, {found['ratio_to_batches']:.2f} times ready batches"
    )
    words = (
        f"Throughput of the service: {ratios}; {median['size']:.1f} images per pass. Training job: {meanwhile['job']}."
    )
    return [*table(f"{what} | >Images per second | >p50, ms | >p90, ms | >p99, ms | >Errors", rows), "", words]


def _soak(found: Raw) -> list[str]:
    """Return the summary of benchmarks/serve.py --soak."""
    sizes = found["mib"]
    return [
        f"{found['seconds'] / 60:.0f} minutes, {found['clients']} clients, {found['backbone']}: "
        f"{found['per_second']:.1f} images per second, {found['errors']} errors, p99 {found['p99_ms']:.0f} ms. "
        f"Memory {min(sizes):.0f} to {max(sizes):.0f} MiB in "
        f"{len(sizes)} readings; change from the first to the last third {found['growth']:+.2f} %."
    ]


def _ways(raw: Raw) -> list[str]:
    rows = []
    for row in raw["ways"]:
        how = row["teacher"]  # mode of the teacher; older records only say that there is one
        teacher = how if isinstance(how, str) else "ahead" if how else "none"
        rows.append({**row, "teacher": teacher, "limit": row.get("limit", 10) or "all"})
    head = "Way of a captured step | Teacher | cuDNN's trials | >ms | >First step, s | >Against in order | >Chance"
    cells = "{way} | {teacher} | {limit} | {ms:.3f} | {first_seconds:.1f} | {race:.1g} | {chance:.1g}"
    return filled(head, cells, rows)


def _ratios(values: list[float]) -> str:
    return f"({len(values)} turns, ratios {min(values):.2f} to {max(values):.2f})"


def _augment(raw: Raw) -> list[str]:
    rate = "{median:,.0f} images a second (spread {spread:,.0f})".format(**raw["augment"]["images_per_second"])
    return [f"Augmentation: {rate}, {raw['augment']['ratio']['median']:.1f} times Pillow's on one core."]


def _extraction(raw: Raw) -> list[str]:
    rates = {name: statistics.median(found) for name, found in raw["pictures_per_cpu_second"].items()}
    words = f"{rates['cached']:.0f} pictures for each second of computing, a bare loop over the same network"
    return [f"Features into the cache: {words} {rates['bare']:.0f}; ratio {raw['ratio']:.2f}, at least 0.85 is wanted."]


def _adapted(raw: Raw) -> list[str]:
    rows = [{**row, "after": " / ".join(f"{value:.1f}" for value in row["accuracy"])} for row in raw["adapted"]]
    heads = "Set | Pictures a class | adapt | >Accuracy after each of three updates, % | >Seconds of computing"
    return filled(heads, "{set} | {pictures} | {adapt} | {after} | {cpu_seconds:.0f}", rows)


def _stream(raw: Raw) -> list[str]:
    found = raw["stream"]
    alone, streamed, ratio = (statistics.median(found[key]) for key in ("alone", "streamed", "ratio"))
    rates = f"{streamed:.0f} images a second, decoding alone {alone:.0f}, median ratio {ratio:.2f}"
    what = f"Streaming JPEGs at {raw['size']} pixels with {raw['workers']} workers"
    return [f"{what}: {rates} {_ratios(found['ratio'])}."]


def _distributed(raw: Raw) -> list[str]:
    found = raw["distributed"]
    rates = "{together:.0f} images a second together, {alone:.0f} alone".format(**found["images_per_second"])
    what = f"{found['processes']} processes, {found['problem']}"
    return [f"{what}: {rates}, median ratio {found['ratio']:.2f} {_ratios(found['ratios'])}."]


def _busy(raw: Raw) -> list[str]:
    found = raw["busy"]
    rows = (
        [
            what,
            *(f"{value:.1f}" for value in (statistics.median(turns), min(turns), max(turns), statistics.median(loads))),
        ]
        for what, turns, loads in (
            ("alone", found["turns"]["alone"], found["loads"]["alone"]),
            (f"beside {found['loops']} busy loops", found["turns"]["beside"], found["loads"]["beside"]),
        )
    )
    what = f"`{found['command']}`, {found['cores']} cores, in turns"
    head = f"{what} | >Median, s | >Fastest, s | >Slowest, s | >Load before"
    return [
        *table(head, rows),
        "",
        f"{found['ratio']:.1f} times as long; at most {found['limit']:.0f} times is allowed.",
    ]


def _epoch(raw: Raw) -> list[str]:
    rows = [{"name": key.replace("_", " "), **raw["epoch"][key]} for key in ("no_teacher", "teacher")]
    cells = "{images:,} images, {name} | {images_per_second:,.0f} | {resident_images_per_second:,.0f} | {share:.2f}"
    head = f"An epoch at {raw.get('side')} pixels | >Images a second | >The step on one batch | >Share"
    return filled(head, cells, rows) if "share" in rows[1] else []


def _update(raw: Raw) -> list[str]:
    rows = [["SVD and inverse a class, float32", f"{1e3 * raw['naive_seconds']:.1f}", "1", NONE]]
    for rule in ("positive", "numerical"):
        seconds, speedup, deviation = (raw[f"{rule}_{what}"] for what in ("seconds", "speedup", "deviation"))
        rows.append([f"ours, rule {rule}", f"{1e3 * seconds:.1f}", f"{speedup:.1f}", f"{deviation:.1e}"])
    head = f"Class update, {raw['classes']} + 10 classes, d = {raw['dim']} | >ms | >Times faster | >Deviation"
    return [*table(head, rows), "", f"Ten times the classes take {raw['tenfold_growth']:.1f} times as long."]


ON_PAPER = (("ImageNet-1k", 1_000), ("ImageNet-21k", 21_841), ("a hundred thousand classes", 100_000))
ROWS_ON_PAPER = 64  # of a factor


def _scale(raw: Raw) -> list[str]:
    """Return tables for many classes: measured, and extrapolated to larger sizes."""
    found = raw["scale"]
    rows = [
        {**r, "mb": r["stored_bytes"] / 1e6, "peak": f"{r['peak_ratio']:.2f}" if r["classes"] >= 1000 else NONE}
        for r in (*found["classes"], *found["dimensions"])
    ]
    head = ">Classes | >d | >Images | Kept as | >Update, s | >Processor, s | >Stored, MB | >Of the paper's | >Peak"
    cells = "{classes:,} | {dim:,} | {images} | {form} | {seconds:.2f} | {processor_seconds:.2f} | {mb:,.1f}"
    lines = filled(head, cells + " | {of_papers:.3f} | {peak}", rows)
    growth, apart = f"{found['tenfold_growth']:.1f}", f"{found['factor_deviation']:.0e}"
    lines += [f"Ten times the classes take {growth} times the processor time; exact factors differ by {apart} from"]
    lines += ["Grams after an update. Peak: what the update takes beside one block, times what is stored after it.", ""]
    first = found["tasks"][0]
    head = f">Tasks ({first['classes']} classes, d = {first['dim']}) | >Classes moved | >All updates, s"
    lines += filled(head, "{tasks} | {class_moves:,} | {processor_seconds:.2f}", found["tasks"])
    first = found["compression"][0]
    head = f">`gram_tolerance` (d = {first['dim']}, {first['images']} images) | >Rows | >Of a Gram | >Left out"
    head += " | >After a move | >Change of the classifier"
    cells = "{error:g} | {rows} | {of_gram:.3f} | {left_out:.4f} | {left_out_after_a_move:.4f} | {weight_change:.4f}"
    return [*lines, *filled(head, cells, found["compression"]), *_on_paper(found)]


def _on_paper(found: Raw) -> list[str]:
    """Return extrapolated sizes: bytes from formulas, seconds from the rate of the largest measured update."""
    rate = {}
    for form in ("gram", "factors"):
        r = max((r for r in found["classes"] if r["form"] == form), key=lambda r: r["classes"])
        rate[form] = r["classes"] * _operations(form, r["dim"], r["images"]) / r["processor_seconds"]
    rows = []
    for name, classes in ON_PAPER:
        for dim in (512, 2048):
            for form, own in (("gram", dim * (dim + 1) // 2), ("factors", ROWS_ON_PAPER * dim)):
                seconds = classes * _operations(form, dim, ROWS_ON_PAPER) / rate[form]
                kept = form if form == "gram" else f"factors, {ROWS_ON_PAPER} rows"
                size = f"{8 * classes * (own + dim) / 1e9:,.1f}"
                rows.append([f"{name}, {classes:,}", f"{dim:,}", kept, size, f"{seconds:,.0f}"])
    words = ", ".join(f"{form} {rate[form] / 1e9:.0f} GFLOP/s" for form in rate)
    lines = table("On paper | >d | Kept as | >Stored, GB | >Update, processor s", rows)
    return [*lines, "", f"At the rate of a core in the largest updates above: {words}."]


def _operations(form: str, dim: int, rows: int) -> float:
    """Return the operations of shifting one class and adding its Gram to the sum."""
    return 3.25 * dim**3 if form == "gram" else 4.0 * rows * dim**2


SERVED: dict[str, tuple[str, Callable[[Raw], list[str]]]] = {"serve": ("Throughput", _serve), "soak": ("Soak", _soak)}
MEASURED: dict[str, Callable[[Raw], list[str]]] = {  # by key of the record, in page order
    "rounds": _rounds,
    "step": lambda raw: filled(
        "Step of 128 images | Teacher | >ms | >Spread | >Ceiling, ms",
        "{variant} | {words} | {median:.3f} | {spread:.3f} | {ceiling:.3f}",
        (
            {**row, "words": "yes" if row["teacher"] else "no", "ceiling": 1e3 * row["ceiling_seconds"]}
            | {key: 1e3 * row["seconds"][key] for key in ("median", "spread")}
            for row in raw["step"]["rows"]
        ),
    ),
    "ways": _ways,
    "compiler": lambda raw: filled(
        "Compiler option | >Compile and capture, s | >Step with teacher, ms",
        "{variant} | {compile_and_capture_seconds} | {step_ms:.3f}",
        raw["compiler"],
    ),
    "augment": _augment,
    "stream": _stream,
    "epoch": _epoch,
    "distributed": _distributed,
    "busy": _busy,
    "cpu_forms": lambda raw: filled(
        f"{raw['threads']['count']} thread, OMP_WAIT_POLICY={raw['threads']['policy']}, in turns | What"
        " | >Plain, s | >Ours, s | >Times as fast | >At least",
        "{name} | {what} | {plain:.3f} | {ours:.3f} | {ratio:.2f} | {bound:g}",
        raw["cpu_forms"],
    ),
    "runs": lambda raw: filled(
        "Command | >Wall-clock time, s | >GPU memory at most, MiB",
        "`{what}` | {seconds:.1f} | {peak_gpu_mib}",
        ({"peak_gpu_mib": NONE, **row} for row in raw["runs"]),
    ),
    "startup": lambda raw: [
        *filled(
            "Compile cache | >Until the loop, s | >First step, s | >The whole process, s",
            "{cache} | {build_seconds:.1f} | {first_step_seconds:.1f} | {process_seconds:.1f}",
            ({"cache": cache, **raw["startup"][cache]} for cache in ("cold", "warm")),
        ),
        f"Imports: {raw['startup']['import_seconds']['median']:.1f} s.",
    ],
    "naive_seconds": _update,
    "scale": _scale,
    "pictures_per_cpu_second": _extraction,
    "adapted": _adapted,
}


def serve_text(results: Path) -> str:
    """Return the block of docs/serve.md with the results of benchmarks/serve.py."""
    lines = []
    for stored in read_lines(results / BENCHMARKS):
        for key, (title, lines_of) in SERVED.items():
            if found := stored.get("raw", {}).get(key):
                lines += [f"**{title}.** {_origin(stored)}", "", *lines_of(found), ""]
    return "\n".join([BEGIN, "", *lines, END])


def benchmarks_text(results: Path) -> str:
    """Return the block of docs/dev/performance.md with the results of benchmarks/."""
    lines = []
    for stored in read_lines(results / BENCHMARKS):
        raw = stored.get("raw", {})
        if raw and not SERVED.keys() & raw.keys():  # texts have no table; service results are in docs/serve.md
            lines += [_origin(stored), ""]
            for made in (lines_of(raw) for key, lines_of in MEASURED.items() if key in raw):
                lines += [*made, ""] if made and made[-1] else made
    return "\n".join([BEGIN, "", *lines, END])


def add_benchmark(file: Path, name: str, results: Path) -> list[str]:
    """Store the record of a benchmark, replacing an earlier one with the same name."""
    record = read_json(file, error=RunError)
    if not isinstance(record, dict) or "raw" not in record:
        raise RunError(f"{file}: no record of a benchmark; give a file written by --out")
    lines = {one["name"]: one for one in read_lines(results / BENCHMARKS)}
    write_json_lines(results / BENCHMARKS, {**lines, name: {"name": name, **record}}.values())
    return [f"{BENCHMARKS}#{name}"]
