"""Write a report in all formats."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from efcil.errors import RunError
from efcil.files import atomic_write_bytes, atomic_write_text, claim_results
from efcil.report.figures import curve_figure, figure_bytes, matrix_figure
from efcil.report.html import html_page
from efcil.report.load import MOST_DRAWN_TASKS, Run, Summary, parse_runs, split_heads
from efcil.report.tables import csv_table, latex_table, markdown_table

__all__ = ["REPORT_FILES", "write_report"]

REPORT_FILES = ("report.html", "report.md", "report.tex", "report.csv", "curves.png", "curves.svg")


def write_report(summaries: Iterable[Summary], out_dir: str | os.PathLike[str]) -> dict[str, Path]:
    """Write report.md, .tex, .csv, .html, curves.png, .svg and a matrix figure per run; return paths by file name."""
    summaries = [one for summary in summaries for one in split_heads(summary)]
    runs = parse_runs(summaries)
    out = Path(out_dir)
    names = _names(runs)
    try:
        claim_results(out, [*REPORT_FILES, *names])
    except OSError as error:
        raise RunError(f"cannot create directory {out} ({error.strerror}); choose another one") from error
    files: dict[str, str | bytes] = {
        "report.html": html_page(summaries),
        "report.md": markdown_table(summaries),
        "report.tex": latex_table(summaries),
        "report.csv": csv_table(summaries),
    }
    curves = curve_figure(summaries)
    files |= {f"curves.{kind}": figure_bytes(curves, kind) for kind in ("png", "svg")}
    for name, run, summary in zip(names, runs, summaries, strict=True):
        if run.matrix and run.tasks <= MOST_DRAWN_TASKS:
            files[name] = figure_bytes(matrix_figure(summary), "png")
    for name, data in files.items():
        if isinstance(data, bytes):
            atomic_write_bytes(out / name, data)
        else:
            atomic_write_text(out / name, data)
    return {name: out / name for name in files}


def _names(runs: list[Run]) -> list[str]:
    """Return ``matrix-<method>.png``, with a suffix if a method has several runs."""
    methods = Counter(_slug(run.method).lower() for run in runs)
    names: list[str] = []
    for run in runs:
        name = _slug(run.method)
        if methods[name.lower()] > 1:
            order = f"order-{run.order}" if run.order else ""
            seed = f"seed-{run.seed}" if run.seed else ""
            parts = (name, run.preset, run.dataset, f"T{run.tasks}", order, seed)
            name = "-".join(_slug(part) for part in parts if part)
        unique, number = f"matrix-{name}.png", 1
        while unique.lower() in {other.lower() for other in names}:
            number += 1
            unique = f"matrix-{name}-{number}.png"
        names.append(unique)
    return names


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:60] or "run"
