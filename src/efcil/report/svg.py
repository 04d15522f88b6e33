"""Inline SVG charts of the HTML report, colored by CSS variables to follow its theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from efcil.report.groups import Benchmark
from efcil.report.styles import Style

__all__ = [
    "NARROW",
    "WIDE",
    "balance_svg",
    "curve_elements",
    "curves_svg",
    "scale_svg",
    "swatch_elements",
    "swatch_svg",
]

WIDE, NARROW = (760, 400), (360, 300)  # width and height of the curves: beside a legend, and on a phone
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 14, 50


def curves_svg(benchmark: Benchmark, styles: dict[str, Style], size: tuple[int, int] = WIDE) -> str:
    """Plot A_t of every group against the number of classes, with tooltips."""
    elements = curve_elements(benchmark, styles, size)
    if not elements:
        return ""
    return (
        f'<svg class="chart {"wide" if size == WIDE else "narrow"}" viewBox="0 0 {size[0]} {size[1]}" role="img" '
        f'aria-label="Accuracy after each task, {escape(benchmark.title)}">{elements}</svg>'
    )


def curve_elements(benchmark: Benchmark, styles: dict[str, Style], size: tuple[int, int] = WIDE) -> str:
    """What `curves_svg` draws, without its frame; nothing where no task is done."""
    width, height = size
    drawn = [(group, group.curve) for group in benchmark.groups if group.curve]
    if not drawn:
        return ""
    ticks = benchmark.classes_seen or tuple(range(1, benchmark.tasks + 1))
    ends = [point.mean + sign * (point.spread or 0.0) for _, curve in drawn for point in curve for sign in (-1, 1)]
    low = min(max(0.0, 10 * math.floor(min(ends) / 10)), 90.0)  # margin for constant curves at 100
    high = min(100.0, max(10 * math.ceil(max(ends) / 10), low + 10))
    first, last = ticks[0], ticks[-1]

    def x(value: float) -> float:
        part = (value - first) / (last - first) if last > first else 0.5
        return LEFT + 10 + part * (width - LEFT - RIGHT - 20)

    def y(value: float) -> float:
        return TOP + (high - min(max(value, low), high)) / (high - low) * (height - TOP - BOTTOM)

    parts = []
    step = 10 if high - low > 20 else 5 if high - low > 10 else 2
    for value in range(int(low), int(high) + 1, step):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value}</text>')
    every = -(-len(ticks) // (10 if size == WIDE else 5))
    parts += [
        f'<text class="tick" x="{x(tick):.1f}" y="{height - BOTTOM + 20}" text-anchor="middle">{tick}</text>'
        for tick in ticks[::-every]
    ]
    unit = "classes seen" if benchmark.classes_seen else "task"
    middle = (LEFT + width - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{height - 8}" text-anchor="middle">{unit}</text>')
    center = (TOP + height - BOTTOM) / 2
    parts.append(
        f'<text class="axis" x="14" y="{center}" text-anchor="middle" transform="rotate(-90 14 {center})">'
        "accuracy, %</text>"
    )
    for group, curve in reversed(drawn):  # best on top
        parts.append(_line([(x(t), y(p.mean)) for t, p in zip(ticks, curve, strict=False)], styles[group.label]))
        if len(group.runs) > 1:
            upper = [(x(t), y(p.mean + (p.spread or 0))) for t, p in zip(ticks, curve, strict=False)]
            lower = [(x(t), y(p.mean - (p.spread or 0))) for t, p in zip(ticks, curve, strict=False)]
            color = styles[group.label].slot
            parts.append(
                f'<polygon class="band" style="fill:var(--c{color})" points="{_points(upper + lower[::-1])}"/>'
            )
        for index, (tick, point) in enumerate(zip(ticks, curve, strict=False)):
            seen = f", {tick} classes" if benchmark.classes_seen else ""
            hint = escape(f"{group.label}: {point.text()} % after task {index + 1}{seen}")
            style = styles[group.label]
            parts.append(_marker(style, x(tick), y(point.mean), 4.0, hint))
    return "".join(parts)


def _line(points: Sequence[tuple[float, float]], style: Style) -> str:
    dash = f' stroke-dasharray="{" ".join(f"{2 * part:g}" for part in style.dash)}"' if style.dash else ""
    return f'<polyline class="line" style="stroke:var(--c{style.slot})"{dash} points="{_points(points)}"/>'


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)


_UNIT: dict[str, list[tuple[float, float]]] = {  # corners of polygon markers
    "s": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    "D": [(0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)],
    "^": [(0, -1.3), (1.25, 1), (-1.25, 1)],
    "v": [(0, 1.3), (1.25, -1), (-1.25, -1)],
    "P": [
        *((-0.45, -1.3), (0.45, -1.3), (0.45, -0.45), (1.3, -0.45), (1.3, 0.45), (0.45, 0.45)),
        *((0.45, 1.3), (-0.45, 1.3), (-0.45, 0.45), (-1.3, 0.45), (-1.3, -0.45), (-0.45, -0.45)),
    ],
}
_UNIT["X"] = [((a - b) * 0.707, (a + b) * 0.707) for a, b in _UNIT["P"]]
_UNIT["*"] = [
    (
        (1.6 if i % 2 == 0 else 0.7) * math.sin(math.pi * i / 5),
        -(1.6 if i % 2 == 0 else 0.7) * math.cos(math.pi * i / 5),
    )
    for i in range(10)
]


def _marker(style: Style, x: float, y: float, size: float, hint: str = "") -> str:
    title = f"<title>{hint}</title>" if hint else ""
    fill = f'class="dot" style="fill:var(--c{style.slot})"'
    corners = _UNIT.get(style.marker)
    if corners is None:
        return f'<circle {fill} cx="{x:.1f}" cy="{y:.1f}" r="{size}">{title}</circle>'
    points = _points([(x + a * size * 0.9, y + b * size * 0.9) for a, b in corners])
    return f'<polygon {fill} points="{points}">{title}</polygon>'


def swatch_svg(style: Style) -> str:
    """A short piece of a group's line, for legends and table rows."""
    return f'<svg class="swatch" viewBox="0 0 34 14" aria-hidden="true">{swatch_elements(style)}</svg>'


def swatch_elements(style: Style) -> str:
    """What `swatch_svg` draws, on 34 x 14."""
    return _line([(1, 7), (33, 7)], style) + _marker(style, 17, 7, 3.8)


SCALE = 560  # width of the balance rows
_MARKS = (0, 25, 50, 75, 100)


def _x_of(value: float) -> float:
    return 14 + min(max(value, 0.0), 100.0) / 100 * (SCALE - 28)


def balance_svg(old: float, new: float, style: Style, label: str) -> str:
    """Plot old (dot) and new (ring) accuracy on a scale from 0 to 100."""
    hint = escape(f"{label}: old {old:.2f} %, new {new:.2f} %")
    color = f"var(--c{style.slot})"
    marks = "".join(f'<line class="grid" x1="{_x_of(m):.1f}" x2="{_x_of(m):.1f}" y1="0" y2="26"/>' for m in _MARKS)
    return (
        f'<svg class="balance" viewBox="0 0 {SCALE} 26" role="img" aria-label="{hint}"><title>{hint}</title>{marks}'
        f'<line class="link" style="stroke:{color}" x1="{_x_of(old):.1f}" x2="{_x_of(new):.1f}" y1="13" y2="13"/>'
        f'<circle style="fill:{color}" cx="{_x_of(old):.1f}" cy="13" r="6"/>'
        f'<circle class="ring" style="stroke:{color}" cx="{_x_of(new):.1f}" cy="13" r="5"/></svg>'
    )


def scale_svg() -> str:
    """Return the scale below the rows of `balance_svg`."""
    marks = "".join(f'<text class="tick" x="{_x_of(m):.1f}" y="15" text-anchor="middle">{m}</text>' for m in _MARKS)
    return f'<svg class="balance" viewBox="0 0 {SCALE} 20" aria-hidden="true">{marks}</svg>'
