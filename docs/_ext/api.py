"""Show the options of shifts and classifiers in the API reference, and let folders link their own pages."""

from __future__ import annotations

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


def _skip(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    return True if str(getattr(thing, "__module__", "")).startswith("sklearn") else None  # their pages are not here


LINKED = ("results/", "dev/")  # pages that the first page of their folder links, outside of the table of contents


def _orphan(app: Any, doctree: Any) -> None:
    if app.env.docname.startswith(LINKED):
        app.env.metadata[app.env.docname]["orphan"] = True


def setup(app: Any) -> dict[str, bool]:
    """Connect to autodoc."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _options)
    app.connect("autodoc-skip-member", _skip)
    app.connect("doctree-read", _orphan)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
