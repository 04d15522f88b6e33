"""Figures for papers and slides with matplotlib, without pyplot and imported lazily."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from efcil.report.groups import COLUMNS, Benchmark, group_runs
from efcil.report.load import Run, Summary, parse_runs
from efcil.report.styles import shorten, styles_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FAINT", "INK", "curve_figure", "figure_bytes", "matrix_figure", "plot_text", "style_axes"]

INK, FAINT = "#222222", "#dddddd"


def curve_figure(summaries: Iterable[Summary]) -> Figure:
    """Plot A_t against the number of classes: one panel per benchmark, one line per method, a band for the spread."""
    from matplotlib.figure import Figure

    benchmarks = group_runs(parse_runs(summaries))
    styles = styles_for(group for benchmark in benchmarks for group in benchmark.groups)
    heights = [
        max(4.6, 1.0 + 0.22 * len(benchmark.groups)) for benchmark in benchmarks
    ]  # inches, at least the height of the legend
    figure = Figure(figsize=(9.0, sum(heights)), dpi=150, layout="constrained")
    panels = figure.subplots(len(benchmarks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, benchmark in zip(panels, benchmarks, strict=True):
        _curves(axes, benchmark, styles)
    return figure


def _curves(axes: Any, benchmark: Benchmark, styles: dict[str, Any]) -> None:
    ticks = benchmark.classes_seen or tuple(range(1, benchmark.tasks + 1))
    lines, names = [], []
    for group in benchmark.groups:
        style, curve = styles[group.label], group.curve
        if not curve:
            continue
        x = ticks[: len(curve)]
        y = [point.mean for point in curve]
        (line,) = axes.plot(x, y, color=style.color, marker=style.marker, markersize=4.5, linewidth=1.8, clip_on=False)
        if style.dash:
            line.set_dashes(style.dash)
        if len(group.runs) > 1:
            spread = [point.spread or 0.0 for point in curve]
            low, high = ([a + sign * b for a, b in zip(y, spread, strict=True)] for sign in (-1, 1))
            axes.fill_between(x, low, high, color=style.color, alpha=0.13, linewidth=0)
        final = group.value(COLUMNS[0])
        lines.append(line)
        names.append(
            plot_text(shorten(group.label)) + (f"  {final.text()}" if final else "") + _partial_suffix(group.partial)
        )
    style_axes(axes, f"Accuracy after each task: {plot_text(shorten(benchmark.title, 60))}")
    step = -(-len(ticks) // 10)
    axes.set_xticks(ticks[::-step])
    axes.set_xlabel("classes seen" if benchmark.classes_seen else "task")
    axes.set_ylabel("accuracy over all classes seen, %")
    axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]), top=min(100.0, axes.get_ylim()[1]))
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    if lines:
        legend = axes.legend(
            lines, names, title="final accuracy $A_f$", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False
        )
        legend.get_title().set_fontsize(9)


def matrix_figure(summary: Summary) -> Figure:
    """Plot R, accuracy on each task (columns) after each task (rows), with numbers for up to 30 tasks."""
    from matplotlib.figure import Figure

    run = Run.of(summary)
    size = max(run.tasks, 1)
    cell = 0.5 if size <= 12 else 0.38
    side = max(2.6, cell * min(size, 40))
    figure = Figure(figsize=(side + 1.9, side + 1.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    rows = [[_cell(run, t, i) for i in range(size)] for t in range(size)]
    image = axes.imshow(rows, cmap="Blues", vmin=0, vmax=100)
    if size <= 30:
        for t, row in enumerate(rows):
            for i, value in enumerate(row):
                if value == value:
                    text = f"{value:.1f}" if size <= 12 else f"{value:.0f}"
                    color = "black" if value < 69 else "white"  # the better contrast on the blue color map
                    axes.text(i, t, text, ha="center", va="center", fontsize=9 if size <= 12 else 8, color=color)
    style_axes(axes, None)
    axes.tick_params(length=0, labelsize=9 if size <= 12 else 8)
    step = -(-size // 30)
    axes.set_xticks(range(0, size, step), [str(i + 1) for i in range(0, size, step)])
    axes.set_yticks(range(0, size, step), [str(i + 1) for i in range(0, size, step)])
    axes.spines[:].set_visible(False)
    axes.set_xlabel("accuracy on task")
    axes.set_ylabel("after task")
    state = f", partial: {run.tasks_done} of {run.tasks} tasks" if run.partial else ""
    width = int(13 * (side + 1.9) / 1.15)  # characters per title line
    lines = [shorten(run.method, width), shorten(f"{run.dataset}, order {run.order or '?'}{state}", width)]
    axes.set_title(plot_text("\n".join(lines)), loc="left", fontsize=10, color=INK)
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, label="accuracy, %")
    bar.outline.set_visible(False)
    return figure


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """Render a figure as ``png``, ``svg`` or ``pdf``, deterministically."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "efcil"}), warnings.catch_warnings():
        # Missing glyphs in the default font are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure.savefig(buffer, format=kind, metadata=dates.get(kind), bbox_inches="tight", pad_inches=0.12)
    return buffer.getvalue()


def _cell(run: Run, t: int, i: int) -> float:
    value = run.matrix[t][i] if t < len(run.matrix) and i < len(run.matrix[t]) and i <= t else None
    return float("nan") if value is None else value


def style_axes(axes: Any, title: str | None) -> None:
    """Apply the common style to axes."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#888888")
    axes.tick_params(colors=INK, labelsize=9)
    if title:
        axes.set_title(title, loc="left", fontsize=11, color=INK)


def plot_text(text: str) -> str:
    """Escape dollar signs, which matplotlib would parse as formulas."""
    return text.replace("$", r"\$")


def _partial_suffix(partial: bool) -> str:
    return " (partial)" if partial else ""
