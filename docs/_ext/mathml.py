"""Write formulas as MathML, which browsers show without a script and without a network."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert


def mathml(text: str, display: str) -> str:
    """Return a formula of TeX as MathML.

    >>> mathml("x^2", "inline").startswith('<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline"')
    True
    """
    found: str = convert(text, display=display)
    return found


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register the two writers with Sphinx."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
