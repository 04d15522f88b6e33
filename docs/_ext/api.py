"""Write the page of options, show options in the API reference, and let folders link their own pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from efcil.components import Component


def _signature(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> Any:
    if what == "class" and isinstance(thing, type) and issubclass(thing, Component):
        fields = thing.options_type.model_fields.items()
        return f"({', '.join(f'{key}={field.get_default()!r}' for key, field in fields)})", None
    return signature, returns


def _options(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    if what == "class" and isinstance(thing, type) and issubclass(thing, Component):
        from efcil.cli.catalog import _rows

        rows = _rows(thing.options_type, {})
        lines += ["", *(f":param {row.key}: {row.meaning}" for row in rows), ""] if rows else []


OPTIONS_HEAD = """# Options

Every option of every learner, shift, classifier and data set, as `--set KEY=VALUE` takes it, generated from the typed
options. `efcil options METHOD` adds the values of each preset. What several parts share is listed once, where it first
occurs.
"""


def options_page() -> str:
    """Return the page of options: a table for each part, less what an earlier one has listed."""
    from efcil.cli import catalog

    seen: set[tuple[str, str, str]] = set()
    lines = [OPTIONS_HEAD]
    for group in catalog.all_options():
        rows = [(row.key, catalog.show_value(row.default), " ".join(row.meaning.split())) for row in group.rows]
        new = [row for row in rows if row not in seen]
        seen.update(rows)
        if new:
            lines += [f"## {group.title}", "", "| option | default | what it does |", "|---|---|---|"]
            lines += [f"| `{key}` | `{default}` | {meaning.replace('|', '/')} |" for key, default, meaning in new]
            lines += [""]
    return "\n".join(lines)


def _write_options(app: Any) -> None:
    page = Path(app.srcdir) / "options.md"
    if not page.is_file() or page.read_text(encoding="utf-8") != options_page():
        page.write_text(options_page(), encoding="utf-8")


def _skip(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    return True if str(getattr(thing, "__module__", "")).startswith("sklearn") else None  # their pages are not here


LINKED = ("results/", "dev/")  # pages that the first page of their folder links, outside of the table of contents


def _orphan(app: Any, doctree: Any) -> None:
    if app.env.docname.startswith(LINKED):
        app.env.metadata[app.env.docname]["orphan"] = True


def setup(app: Any) -> dict[str, bool]:
    """Connect to autodoc."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("builder-inited", _write_options)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _options)
    app.connect("autodoc-skip-member", _skip)
    app.connect("doctree-read", _orphan)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
