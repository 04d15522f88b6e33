"""HTML pages about how well a model does: the style they share, and the matrix of what was taken for what."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

STYLE = """
:root{color-scheme:light dark}
body{max-width:64rem;margin:2rem auto;padding:0 1rem;font:16px/1.5 system-ui,sans-serif}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .7rem;text-align:right;border-bottom:1px solid #8885}
th:first-child,td:first-child,td.t{text-align:left}
.scroll{overflow-x:auto}
code{font:14px ui-monospace,monospace}
"""


def matrix_table(names: Sequence[str], truth: npt.NDArray[np.str_], answers: npt.NDArray[np.str_]) -> str:
    """Return a table with a row for each class and a column for each answer."""
    counts = np.array([[int(((truth == one) & (answers == other)).sum()) for other in names] for one in names])
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(_cell(count, row.sum()) for count in row)}</tr>"
        for name, row in zip(names, counts, strict=True)
    )
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(count: int, total: int) -> str:
    share = count / total if total else 0.0
    return f'<td style="background:rgb(0 114 178/{0.6 * share:.2f})">{count or ""}</td>'
