"""Color-blind-safe line styles for light and dark backgrounds, consistent per method across figures."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from efcil.report.groups import Group

__all__ = ["COLORS", "DARK_COLORS", "Style", "shorten", "styles_for"]

# After Okabe and Ito, Color Universal Design; yellow and black are replaced, as each is invisible on one background.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#c2549b", "#b98600", "#56b4e9", "#5e3c99", "#767676")
DARK_COLORS = ("#5aaef0", "#ff8a47", "#2fcf9f", "#ee9ccb", "#f2b632", "#a5dcff", "#b9a3f0", "#b8b8b8")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))
MARKERS = "osD^vPX*"

# The order defines the slots: methods often compared are fewer than eight apart.
_KNOWN = (
    *("dpcr", "ldc", "adc", "sdc", "dp-ncm", "acil", "ds-al", "lwf-ncm"),
    *("icarl", "podnet", "foster", "pass", "fecam", "rrcr", "joint", "lwf"),
)


@dataclass(frozen=True)
class Style:
    """Line style; `slot` is the index of the color."""

    slot: int
    dash: tuple[float, ...]
    marker: str

    @property
    def color(self) -> str:
        """Color on a white background."""
        return COLORS[self.slot]


def styles_for(groups: Iterable[Group]) -> dict[str, Style]:
    """Return a style per label, all different for fewer than 32 labels.

    The slot depends on the method; a second line of the method, or a collision of an unknown name, gets another dash.
    """
    wanted = {group.label: group.method for group in groups}
    first = sorted(wanted, key=lambda label: (wanted[label].split("/")[0] not in _KNOWN, label != wanted[label], label))
    taken: set[int] = set()
    result = {}
    for label in first:
        method = re.split("[/:]", wanted[label])[0]  # variants of a method share its color
        start = _KNOWN.index(method) if method in _KNOWN else zlib.crc32(method.encode()) % 16
        # Try other dashes of the same color, then the next color.
        tries = ((start + 8 * dash) % 32 // 8 * 8 + (start + color) % 8 for color in range(8) for dash in range(4))
        slot = next((slot for slot in tries if slot not in taken), start)
        taken.add(slot)
        result[label] = Style(slot % 8, DASHES[slot // 8], MARKERS[(slot + slot // 8) % 8])
    return result


def shorten(text: str, limit: int = 30) -> str:
    """Shorten a name by omitting its middle.

    >>> shorten("abcdefghij", 7)
    'abc…hij'
    """
    if len(text) <= limit:
        return text
    head = limit // 2
    return f"{text[:head]}…{text[len(text) - (limit - head - 1) :]}"
