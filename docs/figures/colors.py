"""Colors and type of the figures, on light and dark pages."""

from __future__ import annotations

from typing import Any

from efcil.report.styles import COLORS, DARK_COLORS


class Colors:
    """Colors of one kind of page; backgrounds are opaque, so that a picture can be read on any page."""

    def __init__(self, dark: bool):
        self.dark = dark
        self.page = "#131416" if dark else "#ffffff"
        self.text = "#e6e6e6" if dark else "#1c1e21"
        self.faint = "#8d939b" if dark else "#6a7078"
        self.line = "#3a3d42" if dark else "#dcdfe4"
        self.panel = "#1d2025" if dark else "#f5f7fa"
        self.palette = DARK_COLORS if dark else COLORS

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of matplotlib."""
        return {
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "text.color": self.text,
            "axes.facecolor": self.page,
            "figure.facecolor": self.page,
            "savefig.facecolor": self.page,
            "axes.edgecolor": self.line,
            "axes.labelcolor": self.text,
            "axes.titlesize": 9,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": self.line,
            "grid.linewidth": 0.6,
            "xtick.color": self.faint,
            "ytick.color": self.faint,
            "legend.frameon": False,
        }
