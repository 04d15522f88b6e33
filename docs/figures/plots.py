"""Figures of results: every number comes from the summaries in results/."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from efcil.reproduce.result_index import paper

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import results_tables  # noqa: E402
from colors import Colors  # noqa: E402

KEPT_BACK = ("1", "2", "3")
PAPERS = ("identity", "1992", "1993")
SLOTS = {"dpcr-plus": 1, "dpcr": 0, "ldc": 2, "acil": 3, "lwf": 7, "adc": 4, "lwf-ncm": 6}
TITLES = {"dpcr-plus": "DPCR+ (ours)", "dpcr": "DPCR", "ldc": "LDC", "acil": "ACIL", "lwf": "LwF"}


@cache
def sections() -> dict[str, results_tables.Section]:
    """Return the measured splits by title."""
    found = results_tables.sections_of(results_tables.read_entries(ROOT / "results"), paper())
    return {section.title: section for section in found}


def accuracies(split: str, method: str, orders: tuple[str, ...]) -> list[float] | None:
    """Return the mean accuracy after each task over class orders, None unless all of them were measured.

    Repetitions of an order are averaged first. A method has its default preset: `tuned` for `dpcr-plus`, else `paper`.
    """
    label = f"{method} (tuned)" if method == "dpcr-plus" else method
    rows = [row for row in sections()[split].rows if row.label.split(", order")[0] == label]
    by_order: dict[str, list[Any]] = {}
    for row in rows:
        for order, runs in row.orders.items():
            by_order.setdefault(order, []).extend(run.A_t for run in runs)
    if not all(order in by_order for order in orders):
        return None
    means = [np.mean(by_order[order], axis=0) for order in orders]
    return [round(float(value), 2) for value in np.mean(means, axis=0)]


def curves() -> dict[str, dict[str, list[float]]]:
    """Return accuracies on CIFAR-100 in ten tasks: on orders 1, 2, 3, and on the paper's orders."""
    panels = {"orders 1, 2, 3": (KEPT_BACK, tuple(TITLES)), "the paper's orders": (PAPERS, tuple(TITLES)[1:])}
    found = {}
    for title, (orders, methods) in panels.items():
        each = {method: accuracies("cifar100, T = 10", method, orders) for method in methods}
        found[title] = {method: values for method, values in each.items() if values is not None}
    return found


def draw_curves(data: dict[str, dict[str, list[float]]], colors: Colors) -> Any:
    """Draw one panel per set of class orders."""
    figure, panels = plt.subplots(1, len(data), figsize=(6.6, 2.75), sharey=True, layout="constrained")
    for axes, (title, methods) in zip(np.atleast_1d(panels), data.items(), strict=True):
        ends = _apart([values[-1] for values in methods.values()], 4.2)
        for (method, values), end in zip(methods.items(), ends, strict=True):
            color = colors.palette[SLOTS[method]]
            width = 2.4 if method == "dpcr-plus" else 1.6
            axes.plot(range(10, 101, 10), values, color=color, lw=width, marker="o", ms=2.5)
            name = f"{TITLES[method]} {values[-1]:.1f}"
            axes.text(102, end, name, color=color, va="center", fontsize=8, fontweight="bold" if width > 2 else None)
        axes.set(title=f"CIFAR-100, {title}", xlabel="classes learned, 10 per task", xlim=(8, 137), ylim=(20, 95))
        axes.set_xticks(range(20, 101, 20))
    np.atleast_1d(panels)[0].set_ylabel("accuracy on all classes so far (%)")
    return figure


def _apart(values: list[float], gap: float) -> list[float]:
    """Return positions of labels, moved apart to at least `gap`, highest first."""
    places = dict.fromkeys(range(len(values)), 0.0)
    last = float("inf")
    for index in sorted(places, key=lambda i: -values[i]):
        last = places[index] = min(values[index], last - gap)
    return [places[index] for index in range(len(values))]


def ablation() -> dict[str, dict[str, float]]:
    """Return final accuracies of DPCR+ on CIFAR-100 without each part, order 1, by split."""
    found: dict[str, dict[str, float]] = {}
    for tasks in (10, 20):
        section = sections()[f"cifar100, T = {tasks}"]
        read = [e for row in section.rows for e in row.entries if e.name.startswith(results_tables.ABLATION)]
        dpcr = [e for row in section.rows for e in row.entries if e.run.method == "dpcr" and not e.unusual]
        for entry in [*read, *(e for e in dpcr if e.run.order == "1")]:
            label = results_tables._without(entry.run.method)
            found.setdefault(label, {})[f"T = {tasks}"] = entry.run.A_f
    return found


def draw_ablation(data: dict[str, dict[str, float]], colors: Colors) -> Any:
    """Draw bars, one group per variant."""
    splits = list(next(iter(data.values())))
    order = sorted(data, key=lambda label: data[label][splits[0]])
    figure, axes = plt.subplots(figsize=(6.6, 3.4), layout="constrained")
    for offset, split, slot in zip((0.2, -0.2), splits, (1, 5), strict=True):
        values = [data[label][split] for label in order]
        bars = axes.barh(np.arange(len(order)) + offset, values, 0.36, color=colors.palette[slot], label=split)
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=7, color=colors.text)
    axes.set_yticks(range(len(order)), [_wrapped(label) for label in order])
    axes.set(xlabel="final accuracy A_f (%), CIFAR-100, class order 1", xlim=(0, 70))
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.legend(loc="lower right")
    return figure


def _wrapped(label: str) -> str:
    words = {"dpcr-plus": "DPCR+", "dpcr, trained as LwF": "DPCR"}.get(label, label).split(", ")
    return ",\n".join(words)
