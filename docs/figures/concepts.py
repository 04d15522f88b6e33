"""Figures that explain: points computed with efcil's own functions, and diagrams."""

from __future__ import annotations

from typing import Any

import torch
from colors import Colors
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from efcil.core.class_stats import ClassStats
from efcil.core.projection import task_shift


def nothing() -> str:
    """Return what a diagram carries instead of data."""
    return "diagram"


def shift() -> dict[str, Any]:
    """Return features of two old classes and a new one before and after a task, and means stored, shifted and true."""
    rng = torch.Generator().manual_seed(3)
    centers = torch.tensor([[2.0, 0.6], [0.7, 2.0], [2.1, 2.2]])
    spread = torch.tensor([[[0.26, 0.1], [0.0, 0.18]], [[0.2, -0.08], [0.0, 0.24]], [[0.3, 0.0], [0.0, 0.3]]])
    labels = torch.arange(3).repeat_interleave(60)
    old = centers[labels] + torch.einsum("ni,nij->nj", torch.randn(180, 2, generator=rng), spread[labels])
    move = torch.tensor([[1.28, 0.34], [-0.42, 1.06]])
    new = old @ move + 0.03 * torch.randn(180, 2, generator=rng)
    known = labels == 2  # only the new class's images are at hand
    stats = ClassStats.from_features(old[~known], labels[~known])
    shifted = stats.transform(task_shift(old[known], new[known]))
    points = {"old": old, "new": new, "stored": stats.mean, "shifted": shifted.mean}
    means = torch.stack([new[labels == c].mean(0) for c in range(2)])
    found = {name: [[round(float(v), 3) for v in row] for row in p] for name, p in (points | {"true": means}).items()}
    return found | {"labels": labels.tolist()}


def draw_shift(data: dict[str, Any], colors: Colors) -> Any:
    """Draw features before and after the task side by side."""
    figure, (before, after) = plt.subplots(1, 2, figsize=(6.6, 2.9), sharex=True, sharey=True, layout="constrained")
    labels = torch.tensor(data["labels"])
    paint = [colors.palette[0], colors.palette[2], colors.palette[7]]
    names = ["old class A", "old class B", "new class"]
    for axes, part, title in ((before, "old", "before the task"), (after, "new", "after the task")):
        points = torch.tensor(data[part])
        for label in range(3):
            x, y = points[labels == label].T
            absent = label < 2 and part == "new"
            axes.scatter(
                x,
                y,
                s=9,
                color=paint[label],
                alpha=0.22 if absent else 0.75,
                lw=0,
                label=names[label] if part == "old" else None,
            )
        axes.set_title(title)
        axes.set(xticks=[], yticks=[])
    stored, shifted, true = (torch.tensor(data[key]) for key in ("stored", "shifted", "true"))
    before.scatter(*stored.T, marker="X", s=70, color=colors.text, lw=0, label="stored mean", zorder=3)
    after.scatter(*stored.T, marker="X", s=70, color=colors.faint, lw=0, zorder=3)
    after.scatter(*true.T, marker="o", s=90, facecolor="none", edgecolor=colors.text, label="true mean", zorder=3)
    after.scatter(*shifted.T, marker="X", s=70, color=colors.palette[1], lw=0, label="shifted mean", zorder=4)
    for start, end in zip(stored, shifted, strict=True):
        style = {"arrowstyle": "->", "color": colors.palette[1], "lw": 1.3, "shrinkA": 5, "shrinkB": 6}
        after.annotate("", end.tolist(), start.tolist(), arrowprops=style)
    before.legend(loc="lower left", fontsize=7.5, handletextpad=0.2)
    after.legend(loc="lower left", fontsize=7.5, handletextpad=0.2)
    return figure


# -- diagrams ----------------------------------------------------------------------------------------------------------


def _canvas(width: float, height: float) -> tuple[Any, Axes]:
    figure, axes = plt.subplots(figsize=(width, height))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def _box(axes: Axes, at: tuple[float, float, float, float], text: str, colors: Colors, slot: int | None = None) -> None:
    """Draw a box (left, bottom, width, height) whose first line is bold."""
    x, y, w, h = at
    edge = colors.line if slot is None else colors.palette[slot]
    style = "round,pad=0,rounding_size=0.07"
    axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=style, fc=colors.panel, ec=edge, lw=1.3))
    title, _, rest = text.partition("\n")
    lines = rest.count("\n") + 1 if rest else 0
    middle, step = y + h / 2, 0.165
    axes.text(x + w / 2, middle + step * lines / 2, title, ha="center", va="center", fontsize=8.5, fontweight="bold")
    if rest:
        axes.text(
            x + w / 2,
            middle - step / 2,
            rest,
            ha="center",
            va="center",
            fontsize=7.5,
            color=colors.text,
            linespacing=1.35,
        )


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colors: Colors) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colors.faint, "lw": 1.2})


def draw_dpcr(_: str, colors: Colors) -> Any:
    """Draw DPCR's steps after a task."""
    figure, axes = _canvas(6.6, 2.5)
    _box(axes, (0.1, 1.45, 1.5, 0.9), "New images\nfeatures before: X\nfeatures after: Y", colors)
    _box(axes, (0.1, 0.15, 1.5, 0.9), "Stored per class\ncount, mean,\nGram matrix", colors)
    _box(axes, (2.0, 1.45, 1.35, 0.9), "TSSP\nP = (X'X + εI)⁻¹ X'Y", colors, 0)
    _box(axes, (2.0, 0.15, 1.35, 0.9), "CIP\nrow space of\neach class", colors, 2)
    _box(axes, (3.7, 0.8, 1.3, 0.9), "Shifted statistics\nmean · P\nP' · Gram · P", colors, 3)
    _box(axes, (5.3, 0.8, 1.2, 0.9), "RRCR + CN\nridge regression,\nunit columns", colors, 1)
    _arrow(axes, (1.6, 1.9), (2.0, 1.9), colors)
    _arrow(axes, (1.6, 0.6), (2.0, 0.6), colors)
    _arrow(axes, (3.35, 1.9), (3.72, 1.5), colors)
    _arrow(axes, (3.35, 0.6), (3.72, 1.0), colors)
    _arrow(axes, (5.0, 1.25), (5.3, 1.25), colors)
    return figure


def methods() -> list[list[str]]:
    """Return methods on one LwF backbone as they are registered: name, shift, classifier."""
    from efcil.methods import METHODS

    return [[name, *METHODS[name].parts[1:]] for name in ("dpcr", "dp-ncm", "ldc", "sdc", "lwf-ncm")]


def draw_methods(data: list[list[str]], colors: Colors) -> Any:
    """Draw one training run, the statistics that follow it, and the methods evaluated on them."""
    figure, axes = _canvas(6.6, 2.75)
    for task in range(3):
        _box(axes, (0.1, 1.9 - 0.85 * task, 1.35, 0.62), f"Backbone, task {task + 1}\ntrained once (LwF)", colors, 0)
        if task:
            _arrow(axes, (0.775, 2.75 - 0.85 * task), (0.775, 2.52 - 0.85 * task), colors)
    shifts = list(dict.fromkeys(row[1] for row in data))
    gap = 2.6 / len(shifts)
    places = {name: 2.62 - gap * (number + 0.5) for number, name in enumerate(shifts)}
    for name, y in places.items():
        _box(axes, (2.1, y - 0.24, 1.6, 0.48), f"shift: {name}", colors, 2)
        _arrow(axes, (1.45, 1.36), (2.1, y), colors)
    gap = 2.6 / len(data)
    for number, (method, name, classifier) in enumerate(data):
        y = 2.62 - gap * (number + 0.5)
        _box(axes, (4.4, y - 0.21, 2.1, 0.42), f"{method}   ({classifier})", colors, 1)
        _arrow(axes, (3.7, places[name]), (4.4, y), colors)
    return figure


def draw_dpcr_plus(_: str, colors: Colors) -> Any:
    """Draw what DPCR+ adds to DPCR."""
    figure, axes = _canvas(6.6, 2.6)
    _box(axes, (0.1, 1.6, 1.45, 0.8), "New images", colors)
    _box(axes, (0.1, 0.2, 1.45, 0.9), "Class statistics\nof old classes", colors)
    _box(axes, (2.0, 0.75, 1.55, 1.15), "Pseudo-samples\nimages moved to where\nold classes were", colors, 1)
    _box(axes, (4.0, 1.6, 2.5, 0.8), "Shift\nmap from both, ridge by cross-validation", colors, 0)
    _box(
        axes,
        (4.0, 0.2, 2.5, 0.95),
        "Classifier\nmulti-stage features, flip averaging,\nridge + class Gaussians",
        colors,
        2,
    )
    _arrow(axes, (1.55, 2.0), (4.0, 2.05), colors)
    _arrow(axes, (1.55, 1.75), (2.0, 1.6), colors)
    _arrow(axes, (1.55, 0.8), (2.0, 1.05), colors)
    _arrow(axes, (3.55, 1.5), (4.0, 1.8), colors)
    _arrow(axes, (5.25, 1.6), (5.25, 1.15), colors)
    return figure


def draw_lifecycle(_: str, colors: Colors) -> Any:
    """Draw how a task flows from a data source through learner, features, statistics and classifier to a report."""
    figure, axes = _canvas(6.6, 3.3)
    _box(axes, (0.1, 2.45, 1.3, 0.7), "Data source\ndata/", colors)
    _box(axes, (0.1, 1.3, 1.3, 0.7), "TaskStream\ntasks.py", colors)
    _box(axes, (1.9, 2.45, 1.4, 0.7), "Learner\nlearners/, training/", colors, 0)
    _box(axes, (1.9, 1.3, 1.4, 0.7), "TaskFeatures\nfeatures.py", colors)
    _box(axes, (3.8, 2.45, 1.2, 0.7), "Shift\nshift/", colors, 2)
    _box(axes, (3.8, 1.3, 1.2, 0.7), "Class statistics\ntrajectory.py", colors, 3)
    _box(axes, (5.4, 1.3, 1.1, 0.7), "Classifier\nclassifiers/", colors, 1)
    _box(axes, (3.8, 0.15, 1.2, 0.7), "Test images\nprotocol.py", colors)
    _box(axes, (5.4, 0.15, 1.1, 0.7), "Results\nmetrics, report/", colors)
    _arrow(axes, (0.75, 2.45), (0.75, 2.0), colors)
    _arrow(axes, (1.4, 1.9), (1.9, 2.6), colors)
    _arrow(axes, (1.4, 1.65), (1.9, 1.65), colors)
    _arrow(axes, (2.6, 2.45), (2.6, 2.0), colors)
    _arrow(axes, (3.3, 1.85), (3.8, 2.6), colors)
    _arrow(axes, (3.3, 1.65), (3.8, 1.65), colors)
    _arrow(axes, (4.25, 2.0), (4.25, 2.45), colors)
    _arrow(axes, (4.55, 2.45), (4.55, 2.0), colors)
    _arrow(axes, (5.0, 1.65), (5.4, 1.65), colors)
    _arrow(axes, (5.0, 0.7), (5.45, 1.3), colors)
    _arrow(axes, (5.95, 1.3), (5.95, 0.85), colors)
    for x, y, text in ((1.48, 1.71, "images"), (2.66, 2.13, "old and new\nbackbone"), (3.44, 1.71, "new")):
        axes.text(x, y, text, fontsize=6.5, color=colors.faint)
    axes.text(4.62, 2.2, "shifted", fontsize=6.5, color=colors.faint)
    axes.text(3.98, 2.2, "old", fontsize=6.5, color=colors.faint)
    return figure
