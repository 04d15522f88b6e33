"""Self-contained HTML report, with light, dark and print styles.

Its only script sorts tables and copies commands (page.js) and is optional.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from html import escape
from importlib import resources

import efcil
from efcil.report.groups import COLUMNS, NONE, Benchmark, Group, Value, duration, group_runs
from efcil.report.load import MOST_DRAWN_TASKS, Run, Summary, parse_runs
from efcil.report.styles import COLORS, DARK_COLORS, Style, shorten, styles_for
from efcil.report.svg import NARROW, balance_svg, curves_svg, scale_svg, swatch_svg

__all__ = ["html_page"]

# Defense in depth: even with an escaping bug, the browser runs only page.js and loads nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{}'"
_SHARED = {column.key: column for column in COLUMNS}


def html_page(summaries: Iterable[Summary]) -> str:
    """Return the report as a self-contained HTML page."""
    runs = parse_runs(summaries)
    benchmarks = group_runs(runs)
    styles = styles_for(group for benchmark in benchmarks for group in benchmark.groups)
    methods = list(dict.fromkeys(run.method for run in runs))
    datasets = list(dict.fromkeys(run.dataset for run in runs))
    what = shorten(methods[0], 60) if len(methods) == 1 else f"{len(methods)} methods"
    title = f"{what} on {', '.join(shorten(dataset, 40) for dataset in datasets[:3])}"
    title += f" and {len(datasets) - 3} more" if len(datasets) > 3 else ""
    body = "".join(_section(benchmark, styles) for benchmark in benchmarks)
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    unfinished = sum(run.partial for run in runs)
    if unfinished:
        count += ", partial" if unfinished == len(runs) else f", {unfinished} of them partial"
    script = _file("page.js")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(allowed)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{_style_sheet()}</style></head>\n<body><main>\n"
        f'<header><p class="eyebrow">Class-incremental learning report</p><h1>{escape(title)}</h1>'
        f'<p class="lead">{count}. Accuracies in percent, on the test images of all classes seen.</p></header>\n'
        f"{body}"
        f"<footer>Created with efcil {escape(efcil.__version__)}.</footer>\n</main>\n"
        f"<script>{script}</script></body></html>\n"
    )


def _file(name: str) -> str:
    return resources.files("efcil.report").joinpath(name).read_text(encoding="utf-8")


def _style_sheet() -> str:
    light, dark = (
        "".join(f"--c{slot}:{color};" for slot, color in enumerate(colors)) for colors in (COLORS, DARK_COLORS)
    )
    return f"{_file('page.css')}:root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _section(benchmark: Benchmark, styles: dict[str, Style]) -> str:
    facts = [f"{benchmark.tasks} tasks"]
    if benchmark.classes_seen:
        facts.insert(0, f"{benchmark.classes_seen[-1]} classes")
    orders = benchmark.orders
    facts.append(f"class order{'s' if ',' in orders else ''}: {orders}")
    chips = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    return (
        f'<section><h2>{escape(benchmark.title)}</h2><ul class="chips">{chips}</ul>\n'
        f"{_tiles(benchmark)}{_table(benchmark, styles)}{_curves(benchmark, styles)}"
        f"{_balance(benchmark, styles)}{_matrices(benchmark)}{_times(benchmark)}{_commands(benchmark)}"
        f"{_details(benchmark)}</section>\n"
    )


def _tiles(benchmark: Benchmark) -> str:
    """Return tiles with the best method per metric, or the values of a single group."""
    tiles = []
    for key, title in (("A_f", "Final accuracy"), ("A_avg", "Average accuracy"), ("forgetting", "Forgetting")):
        column = _SHARED[key]
        chosen = [group for group in benchmark.groups if benchmark.is_best(group, column)] or list(benchmark.groups[:1])
        value = chosen[0].value(column)
        if value is None:
            continue
        lead = "" if benchmark.best(column) is None else "lowest: " if column.better < 0 else "best: "
        title = f"{title} {_title(column.title)}" if "_" in column.title else title
        if chosen[0].partial:
            title = f"{title} so far"
        who = lead + ", ".join(shorten(group.label, 34) for group in chosen[:3])
        if chosen[0].partial:
            who += f", {chosen[0].status}"
        spread = "" if value.spread is None else f" <small>± {value.spread:.2f}</small>"
        tiles.append(
            f'<div class="tile"><span>{title}</span><strong>{value.mean:.2f}{spread}</strong>'
            f"<em>{escape(who)}</em></div>"
        )
    return f'<div class="tiles">{"".join(tiles)}</div>\n' if tiles else ""


def _table(benchmark: Benchmark, styles: dict[str, Style]) -> str:
    head = "".join(
        f'<th scope="col" class="n" data-first="{"rising" if column.better < 0 else "falling"}" '
        f'title="{escape(column.help)}">{_title(column.title)}</th>'
        for column in COLUMNS
    )
    rows = []
    for group in benchmark.groups:
        cells = []
        for column in COLUMNS:
            value = group.value(column)
            text = NONE if value is None else f"{value.mean:.2f}"
            if benchmark.is_best(group, column):
                text = f"<strong>{text}</strong>"
            if value is not None and value.spread is not None:
                text += f'<span class="spread"> ± {value.spread:.2f}</span>'
            cells.append(f'<td class="n" data-v="{_raw(value)}">{text}</td>')
        seconds = group.seconds
        state = f'<span class="badge">{escape(group.status)}</span>' if group.partial else ""
        if group.orders != benchmark.orders:  # otherwise shown in the chips
            state += f'<span class="under">order {escape(group.orders)}</span>'
        rows.append(
            f'<tr><th scope="row" data-v="{escape(group.label)}"><div>{swatch_svg(styles[group.label])}'
            f'<span class="name">{escape(group.label)}{state}</span></div></th>{"".join(cells)}'
            f'<td class="n" data-v="{_raw(seconds)}">{duration(seconds.mean) if seconds else NONE}</td></tr>'
        )
    meanings = "; ".join(f"{_title(column.title)}: {escape(column.help)}" for column in COLUMNS)
    caption = f'<p class="note">{meanings}. {escape(" ".join(benchmark.notes))}</p>'
    return (
        f'<div class="card"><div class="scroll"><table class="results"><thead><tr>'
        f'<th scope="col" data-first="rising">Method</th>{head}'
        f'<th scope="col" class="n" data-first="rising" title="per run">Time</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{caption}</div>\n"
    )


def _raw(value: Value | None) -> str:
    """Return the sort key of a cell."""
    return "" if value is None else repr(value.mean)


def _title(title: str) -> str:
    letter, _, index = title.partition("_")
    return f"<i>{letter}</i><sub>{index}</sub>" if index else escape(title)


def _curves(benchmark: Benchmark, styles: dict[str, Style]) -> str:
    chart = curves_svg(benchmark, styles) + curves_svg(benchmark, styles, NARROW)  # the style sheet shows one
    if not chart:
        return ""
    items = []
    for group in benchmark.groups:
        final = group.value(_SHARED["A_f"])
        if final is not None and group.curve:
            state = ' <span class="badge">partial</span>' if group.partial else ""
            items.append(
                f'<li title="{escape(group.label)}">{swatch_svg(styles[group.label])}'
                f"<span>{escape(shorten(group.label, 34))}{state}</span><b>{final.mean:.2f}</b></li>"
            )
    band = " The band is the spread over runs." if any(len(group.runs) > 1 for group in benchmark.groups) else ""
    return (
        "<h3>Accuracy after each task</h3>"
        f'<figure class="card curves"><div>{chart}</div><ul class="legend">{"".join(items)}</ul></figure>'
        f'<p class="note">Over all classes seen so far; the number is <i>A<sub>f</sub></i>.{band}</p>\n'
    )


def _balance(benchmark: Benchmark, styles: dict[str, Style]) -> str:
    rows = []
    for group in benchmark.groups:
        old, new = group.value(_SHARED["old"]), group.value(_SHARED["new"])
        if old is None or new is None:
            continue
        picture = balance_svg(old.mean, new.mean, styles[group.label], group.label)
        rows.append(
            f'<li><span class="name" title="{escape(group.label)}">{escape(shorten(group.label, 34))}</span>{picture}'
            f'<span class="pair">{old.mean:.1f} <i>/</i> {new.mean:.1f}</span></li>'
        )
    if not rows:
        return ""
    scale = f'<li class="scale"><span></span>{scale_svg()}<span></span></li>'
    return (
        "<h3>Old and new classes</h3>"
        f'<ul class="card balance-list">{"".join(rows)}{scale}</ul>'
        '<p class="note">After the last completed task: the dot is the accuracy on classes of earlier tasks, the ring '
        "that on new classes. The closer they are, the better the balance.</p>\n"
    )


def _matrices(benchmark: Benchmark) -> str:
    if benchmark.tasks > MOST_DRAWN_TASKS:
        return f'<p class="note">Accuracy matrices are shown of up to {MOST_DRAWN_TASKS} tasks.</p>\n'
    cards = [_matrix(group, benchmark.tasks) for group in benchmark.groups if group.matrix]
    if not cards:
        return ""
    size = "few" if benchmark.tasks <= 10 else "many"
    return (
        "<h3>Accuracy matrices</h3>"
        f'<div class="matrices {size}">{"".join(cards)}</div>'
        '<p class="note">Rows: last learned task. Columns: evaluated task.</p>\n'
    )


def _matrix(group: Group, tasks: int) -> str:
    matrix = group.matrix
    head = "".join(f"<th>{i + 1}</th>" for i in range(tasks))
    rows = []
    for t, row in enumerate(matrix):
        cells = []
        for i in range(tasks):
            value = row[i] if i < len(row) and i <= t else None
            if value is None:
                cells.append("<td></td>")
                continue
            side = "lo" if value < 54 else "mid" if value < 69 else "hi"  # for text contrast
            text = f"{value:.1f}" if tasks <= 10 else f"{value:.0f}"
            hint = f"task {i + 1} after task {t + 1}: {value:.2f} %"
            cells.append(f'<td class="{side}" style="--v:{min(max(value, 0), 100):.1f}%" title="{hint}">{text}</td>')
        rows.append(f"<tr><th>{t + 1}</th>{''.join(cells)}</tr>")
    count = len(group.runs)
    about = f"mean of {count} runs" if count > 1 else f"order {group.runs[0].order or '?'}"
    about += f", {group.status}" if group.partial else ""
    return (
        f'<figure class="card scroll"><figcaption><b title="{escape(group.label)}">'
        f"{escape(shorten(group.label, 44))}</b>"
        f' <span class="muted">{escape(about)}</span></figcaption>'
        f'<table class="matrix"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></figure>'
    )


def _times(benchmark: Benchmark) -> str:
    """Return bars of the time per run, with devices."""
    timed = [(group, seconds) for group in benchmark.groups if (seconds := group.seconds) is not None]
    if not timed:
        return ""
    longest = max(seconds.mean for _, seconds in timed) or 1.0
    devices = {
        group.label: ", ".join(dict.fromkeys(run.timed_on for run in group.runs if run.timed_on)) for group, _ in timed
    }
    shared = len(set(devices.values())) == 1
    rows = []
    for group, seconds in timed:
        device = "" if shared else f'<span class="under">{escape(devices[group.label])}</span>'
        rows.append(
            f'<li><span class="name" title="{escape(group.label)}">{escape(shorten(group.label, 34))}{device}</span>'
            f'<span class="bar" style="--w:{100 * seconds.mean / longest:.1f}%"></span>'
            f'<span class="pair">{duration(seconds.mean)}</span></li>'
        )
    where = f"On {escape(devices[timed[0][0].label])}. " if shared and devices[timed[0][0].label] else ""
    return (
        f'<h3>Time per run</h3><ul class="card balance-list">{"".join(rows)}</ul>'
        f'<p class="note">{where}Methods that share a backbone have the same time.</p>\n'
    )


def _commands(benchmark: Benchmark) -> str:
    """List each command once, with its rows."""
    rows_of: dict[str, list[str]] = {}
    for group in benchmark.groups:
        for run in group.runs:
            if run.command:
                rows_of.setdefault(run.command, []).append(group.label)
    if not rows_of:
        return ""
    blocks = []
    for command, labels in rows_of.items():
        rows = list(dict.fromkeys(labels))
        names = ", ".join(shorten(label, 34) for label in rows[:6]) + (f" and {len(rows) - 6} more" if rows[6:] else "")
        words = " ".join(f"<span>{escape(word)}</span>" for word in command.split(" "))  # breaks lines between words
        blocks.append(
            f'<p class="muted">{escape(names)}</p><div class="command"><code tabindex="0">{words}</code></div>'
        )
    return f'<h3>Commands</h3><div class="card commands">{"".join(blocks)}</div>\n'


def _details(benchmark: Benchmark) -> str:
    folded = [_run(group, run) for group in benchmark.groups for run in group.runs]
    return f"<h3>Runs and configuration</h3>{''.join(folded)}\n"


def _run(group: Group, run: Run) -> str:
    state = f"partial, {run.tasks_done} of {run.tasks} tasks" if run.partial else "complete"
    facts = {
        "Status": state,
        "Preset": run.preset,
        "Data set": run.dataset,
        "Class order": run.order,
        "Seed": run.seed,
        "Task sizes": ", ".join(map(str, run.task_sizes)),
        "Time": "" if run.seconds is None else f"{duration(run.seconds)} ({run.seconds:.1f} s)",
        "Device": run.timed_on,
        "Commit": run.commit,
        "A_t": ", ".join(f"{value:.2f}" for value in run.A_t),
        "Top-5 A_t": ", ".join(f"{value:.2f}" for value in run.A5_t),
        "Classes": ", ".join(run.class_names),
    }
    items = "".join(
        f"<dt>{_title(key) if key == 'A_t' else escape(key)}</dt><dd>{escape(value)}</dd>"
        for key, value in facts.items()
        if value
    )
    if run.command:
        items += f"<dt>Command</dt><dd><code>{escape(run.command)}</code></dd>"
    config = f"<pre>{escape(run.config_text)}</pre>" if run.config_text else ""
    final = "" if run.A_f is None else f"{run.A_f:.2f}"
    about = ", ".join(
        part for part in (f"order {run.order}" if run.order else "", state if run.partial else "") if part
    )
    return (
        f'<details class="card"><summary><b>{escape(group.label)}</b> <span class="muted">{escape(about)}</span>'
        f'<span class="end">{final}</span></summary><dl>{items}</dl>{config}</details>'
    )
