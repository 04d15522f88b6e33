"""HTML pages about the accuracy of a model: confusion matrix, misclassified images, recall per class."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from efcil.data.decode import read_image

MOST_CLASSES = 40  # in a matrix: those with the most wrong images
MOST_IMAGES = 60  # wrong images that a page shows, the most confident first
_THUMBNAIL = 112  # pixels of a side
STYLE = """
:root{color-scheme:light dark}
body{max-width:64rem;margin:2rem auto;padding:0 1rem;font:16px/1.5 system-ui,sans-serif}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .7rem;text-align:right;border-bottom:1px solid #8885}
th:first-child,td:first-child,td.t{text-align:left}
.scroll{overflow-x:auto}
code{font:14px ui-monospace,monospace}
.wrong{display:grid;grid-template-columns:repeat(auto-fill,minmax(9rem,1fr));gap:1rem;padding:0;list-style:none}
.wrong img{display:block;width:7rem;height:7rem;border-radius:.4rem}
.wrong li{overflow-wrap:anywhere;font-size:.85rem}
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


def evaluation_page(model: str, found: Mapping[str, Any]) -> str:
    """Return the page of what `efcil.product.commands.evaluate` found, complete in one file."""
    wrong, counts = found["wrong"], found["counts"]
    errors = Counter(name for one in wrong for name in (one["class"], one["answer"]))
    names = sorted({*counts, *errors})
    shown = sorted(sorted(names, key=lambda name: -errors[name])[:MOST_CLASSES])
    truth, answers = [one["class"] for one in wrong], [one["answer"] for one in wrong]
    for name, (right, _) in counts.items():
        truth += [name] * right
        answers += [name] * right
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{right} of {total}</td><td>{100 * right / total:.1f} %</td></tr>"
        for name, (right, total) in sorted(counts.items(), key=lambda item: item[1][0] / item[1][1])
    )
    of = "" if len(shown) == len(names) else f" The {len(shown)} classes with the most wrong images are shown."
    more = len(wrong) - MOST_IMAGES
    rest = f"<p>{more} more are in <code>efcil evaluate --json</code>.</p>" if more > 0 else ""
    items = "".join(_item(one) for one in wrong[:MOST_IMAGES])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{escape(model)}: accuracy {found["accuracy"]:.1f} %</title><style>{STYLE}</style></head><body>
<h1>{escape(model)}: accuracy {found["accuracy"]:.1f} % on {found["images"]:,} images</h1>
<h2>Confusion matrix</h2>
<p>Rows: true class. Columns: predicted class.{of}</p>
{matrix_table(shown, np.array(truth, np.str_), np.array(answers, np.str_))}
<h2>Misclassified images</h2>
<p>{"The most confident first." if wrong else "None."}</p>
<ul class="wrong">{items}</ul>{rest}
<h2>Classes, lowest recall first</h2>
<table><thead><tr><th>Class</th><th>Correct</th><th>Recall</th></tr></thead><tbody>{rows}</tbody></table>
</body></html>
"""


def _item(one: Mapping[str, Any]) -> str:
    pixels = read_image(Path(one["file"]), _THUMBNAIL, 3, name=one["file"])
    jpeg = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(jpeg, "JPEG", quality=80)
    data = base64.b64encode(jpeg.getvalue()).decode("ascii")
    said = f"{escape(one['class'])}, classified as {escape(one['answer'])} ({100 * one['confidence']:.0f} %)"
    name = escape(Path(one["file"]).name)
    return f'<li><img alt="{name}" src="data:image/jpeg;base64,{data}">{said}<br>{name}</li>'
