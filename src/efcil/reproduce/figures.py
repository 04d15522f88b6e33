"""The paper's figures, from summaries and snapshots; all numbers are also saved as JSON."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from efcil.errors import ConfigError
from efcil.report.figures import FAINT, INK, style_axes
from efcil.report.groups import Value
from efcil.report.styles import COLORS, MARKERS
from efcil.reproduce.result_index import ResultIndex

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]


def panels(count: int, width: float = 5.2, height: float = 3.9) -> tuple[Figure, list[Any]]:
    """Create a figure with panels side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, height), dpi=150, layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def by_task(
    index: ResultIndex, dataset: str, tasks: int, orders: Sequence[str], methods: Sequence[str], key: str
) -> dict[str, list[float | None]]:
    """Return `old` or `new` accuracy after each task by method, averaged over measured orders."""
    curves: dict[str, list[float | None]] = {}
    for method in methods:
        runs = [s for o in orders if (s := index.summary(dataset, tasks, o, method))]
        if runs:
            columns = zip(*(run[key] for run in runs), strict=True)
            curves[method] = [None if None in column else statistics.fmean(column) for column in columns]
    return curves


def cip_figure(
    numbers: Mapping[str, Mapping[str, Mapping[str, Sequence[float | None]]]], words: Mapping[str, str]
) -> Figure:
    """Plot old and new accuracy by task, one line per projection: data set -> method -> old, new."""
    figure, axes = panels(2 * len(numbers))
    for place, (dataset, methods) in enumerate(numbers.items()):
        for offset, side in enumerate(("old", "new")):
            own = axes[2 * place + offset]
            for slot, (method, lines) in enumerate(methods.items()):
                y = [np.nan if v is None else v for v in lines[side]]
                style = {"color": COLORS[slot], "marker": MARKERS[slot], "markersize": 4.5, "linewidth": 1.8}
                own.plot(range(1, len(y) + 1), y, label=words[method], linestyle=("-", "--", ":")[slot % 3], **style)
            style_axes(own, f"{dataset}: {side} classes")
            own.set_xticks(range(1, 1 + max(len(lines[side]) for lines in methods.values())))
            own.set_xlabel("task")
            own.set_ylabel("accuracy, %")
            own.grid(axis="y", color=FAINT, linewidth=0.8)
    axes[0].legend(frameon=False, fontsize=8.5)
    return figure


def balance_figure(numbers: Mapping[str, Mapping[str, Mapping[str, Value]]], words: Mapping[str, str]) -> Figure:
    """Plot old, new and final accuracy after the last task: data set -> method -> values."""
    figure, axes = panels(len(numbers))
    for own, (dataset, methods) in zip(axes, numbers.items(), strict=True):
        for slot, part in enumerate(("old", "new", "A_f")):
            x = [place + (slot - 1) * 0.26 for place in range(len(methods))]
            values = [found[part] for found in methods.values()]
            heights = [value.mean for value in values]
            spread = [value.spread or 0.0 for value in values]
            label = {"old": "old classes", "new": "new classes", "A_f": "all classes"}[part]
            hatch = ("", "//", "..")[slot]
            bars = own.bar(x, heights, 0.25, label=label, color=COLORS[slot], hatch=hatch, edgecolor="white")
            shown = [more or np.nan for more in spread]  # no error bar for a single order
            if any(spread):
                own.errorbar(x, heights, shown, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
            for bar, height, more in zip(bars, heights, spread, strict=True):  # above the error bar
                where = (bar.get_x() + bar.get_width() / 2, height + more)
                how = {"textcoords": "offset points", "xytext": (0, 3), "ha": "center", "fontsize": 8, "color": INK}
                own.annotate(f"{height:.0f}", where, **how)
        own.set_xticks(range(len(methods)), [words[name] for name in methods])
        style_axes(own, dataset)
        own.set_ylabel("accuracy after the last task, %")
        own.grid(axis="y", color=FAINT, linewidth=0.8)
        own.set_axisbelow(True)
    axes[-1].legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def gamma_figure(numbers: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plot final accuracy against gamma: data set -> gamma, with_cn, without_cn, chosen."""
    figure, axes = panels(len(numbers))
    for own, (dataset, found) in zip(axes, numbers.items(), strict=True):
        for slot, (key, label) in enumerate((("with_cn", "with CN"), ("without_cn", "without CN"))):
            style = {"color": COLORS[slot], "marker": MARKERS[slot], "linestyle": ("-", "--")[slot]}
            own.plot(found["gamma"], found[key], label=label, markersize=4.5, linewidth=1.8, **style)
        own.axvline(found["chosen"], color="#888888", linewidth=1, linestyle=":")
        where = {"xycoords": own.get_xaxis_transform(), "textcoords": "offset points", "xytext": (4, -2), "va": "top"}
        own.annotate("paper", (found["chosen"], 1.0), fontsize=8, color="#555555", **where)
        own.set_xscale("log")
        low, high = own.get_ylim()
        own.set_ylim(low, high + 0.06 * (high - low))  # space for the label
        style_axes(own, dataset)
        own.set_xlabel(r"$\gamma$")
        own.set_ylabel("final accuracy, %")
        own.grid(axis="y", color=FAINT, linewidth=0.8)
    axes[0].legend(frameon=False, fontsize=9)
    return figure


def embed(features: Array, kind: str, seed: int = 0) -> Array:
    """Embed features (n, dim) in two dimensions by `pca` or `umap` (extra `umap`)."""
    if kind == "pca":
        centered = features - features.mean(0)
        _, _, axes = np.linalg.svd(centered, full_matrices=False)
        flat: Array = centered @ axes[:2].T
        return flat
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of UMAP and its dependencies
        try:
            from umap import UMAP
        except ImportError:
            raise ConfigError("this figure needs UMAP: pip install 'efcil[umap]'") from None
        embedded = UMAP(n_neighbors=30, min_dist=0.3, metric="cosine", random_state=seed, n_jobs=1).fit_transform(
            features
        )
    return np.asarray(embedded, dtype=np.float64)


def regions(
    points: Array, predicted: npt.NDArray[np.int64], classes: int, side: int = 220, near: int = 15
) -> tuple[Any, Any]:
    """Return a grid over the points and the majority prediction of the `near` nearest points at each position."""
    low, high = points.min(0), points.max(0)
    pad = 0.04 * (high - low)
    x, y = (np.linspace(low[i] - pad[i], high[i] + pad[i], side) for i in (0, 1))
    grid = np.stack(np.meshgrid(x, y), -1).reshape(-1, 2)
    scaled, places = points / (high - low), grid / (high - low)
    votes = np.zeros((len(grid), classes))
    for begin in range(0, len(grid), 4096):
        part = places[begin : begin + 4096]
        distance = ((part[:, None] - scaled[None]) ** 2).sum(-1)
        nearest = np.argpartition(distance, min(near, len(points) - 1), axis=1)[:, :near]
        weight = 1 / (np.take_along_axis(distance, nearest, 1) + 1e-6)
        for c in range(classes):
            votes[begin : begin + len(part), c] = (weight * (predicted[nearest] == c)).sum(1)
    return (x, y), votes.argmax(1).reshape(side, side)


def boundaries_figure(
    points: Array,
    labels: npt.NDArray[np.int64],
    predicted: Mapping[str, npt.NDArray[np.int64]],
    names: Sequence[str],
    old: int,
) -> Figure:
    """Plot embedded test images of a few classes with decision regions, one panel per classifier.

    `labels` and `predicted` (title -> (n,)) are indices of the shown classes, the first `old` of which are old.
    """
    from matplotlib.colors import ListedColormap

    figure, axes = panels(len(predicted), 5.0, 4.4)
    colors = [COLORS[c] for c in range(len(names))]
    for own, (title, guess) in zip(axes, predicted.items(), strict=True):
        (x, y), area = regions(points, guess, len(names))
        own.pcolormesh(
            x, y, area, cmap=ListedColormap(colors), vmin=-0.5, vmax=len(names) - 0.5, alpha=0.22, rasterized=True
        )
        own.contour(x, y, area, levels=np.arange(len(names) - 1) + 0.5, colors="white", linewidths=0.8)
        for c, name in enumerate(names):
            own_points = points[labels == c]
            label = f"{name} ({'old' if c < old else 'new'})"
            own.scatter(*own_points.T, s=11, color=colors[c], marker=MARKERS[c % 8], linewidths=0, label=label)
        share = 100 * (guess == labels).mean()
        among_old = 100 * (guess == labels)[labels < old].mean()
        style_axes(own, f"{title}: accuracy {share:.0f} %, old classes {among_old:.0f} %")
        own.set_xticks([])
        own.set_yticks([])
    axes[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def shift_figure(
    before: Array, after: Array, moved: Array, shares: Mapping[str, Mapping[str, float]], name: str
) -> Figure:
    """Plot Figure 1: test images of an old class under the old and new backbone, and their predictions.

    `before` and `after` (n, 2) are embedded in one plane with `moved` (2,), the class mean shifted by DP; `shares`:
    classifier -> own class, other old classes, new classes, in percent.
    """
    figure, (left, right) = panels(2, 5.2, 4.0)
    for points, slot, label in ((before, 0, "before the task"), (after, 1, "after the task")):
        left.scatter(*points.T, s=14, color=COLORS[slot], marker=MARKERS[slot], linewidths=0, alpha=0.75, label=label)
    start, end = before.mean(0), after.mean(0)
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.6}
    left.annotate("", end, start, arrowprops=arrow)
    left.plot(
        *moved,
        marker="*",
        markersize=15,
        color=COLORS[2],
        markeredgecolor="white",
        linestyle="none",
        label="mean shifted by DP",
    )
    style_axes(left, f"(a) embeddings of '{name}', the old class that loses most")
    left.set_xticks([])
    left.set_yticks([])
    left.legend(frameon=False, fontsize=8.5)
    bottom = np.zeros(len(shares))
    for slot, part in enumerate(("own class", "other old classes", "new classes")):
        heights = np.array([found[part] for found in shares.values()])
        hatch = ("", "..", "//")[slot]
        bars = right.bar(
            range(len(shares)),
            heights,
            0.6,
            bottom=bottom,
            label=part,
            color=COLORS[(2, 7, 1)[slot]],
            hatch=hatch,
            edgecolor="white",
        )
        texts = [f"{h:.0f}" if h >= 4 else "" for h in heights]
        plain = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # readable on hatched bars
        for text in right.bar_label(bars, texts, label_type="center", fontsize=9, color=INK):
            text.set_bbox(plain if text.get_text() else None)
        bottom += heights
    right.set_xticks(range(len(shares)), list(shares), fontsize=9)
    style_axes(right, "(b) what they are classified as")
    right.set_ylabel("test images, %")
    right.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def complexity_figure(numbers: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Plot measured time against the paper's formula, both relative to the smallest size: axis -> x, parts."""
    figure, axes = panels(len(numbers), 4.6)
    for own, (axis, found) in zip(axes, numbers.items(), strict=True):
        x = found["x"]
        for slot, part in enumerate(("DP", "RRCR")):
            own.plot(x, found[part], color=COLORS[slot], marker=MARKERS[slot], linewidth=1.8, label=f"{part} measured")
            formula = np.array(found[f"{part} formula"])
            scale = found[part][-1] / formula[-1]
            own.plot(x, formula * scale, color=COLORS[slot], linestyle="--", linewidth=1.2, label=f"{part} formula")
        own.set_xscale("log")
        own.set_yscale("log")
        own.set_xticks(x, [f"{value:g}" for value in x])
        own.minorticks_off()
        style_axes(own, f"against {axis}")
        own.set_xlabel(axis)
        own.set_ylabel("seconds")
        own.grid(color=FAINT, linewidth=0.8)
    axes[0].legend(frameon=False, fontsize=8.5)
    return figure
