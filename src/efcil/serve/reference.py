"""OpenAPI reference as a static page; FastAPI's page loads external scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any


def reference_page(description: Mapping[str, Any]) -> str:
    """Render an OpenAPI description as HTML."""
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    body = "\n".join(_operations(description))
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: reference</title><link rel="stylesheet" href="page/style.css"></head>
<body><main>
<h1>{title}</h1>
<p>{escape(description["info"].get("description", ""))}</p>
<p><a href="openapi.json">OpenAPI description</a>, <a href="./">the page</a></p>
{body}
<h2>Schemas</h2>
{_schemas(description)}
</main></body>
</html>
"""


def _operations(description: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            lock = " (with the token)" if operation.get("security") else ""
            yield f"<section><h2><code>{method.upper()} {escape(path)}</code>{lock}</h2>"
            yield f"<p>{escape(operation.get('description', ''))}</p>"
            rows = [
                (p["name"], p["in"], p.get("description", ""), p["schema"]) for p in operation.get("parameters", ())
            ]
            if rows:
                yield "<h3>Parameters</h3><ul>"
                for name, place, about, schema in rows:
                    yield f"<li><code>{escape(name)}</code> ({place}): {escape(about)} {_code(schema)}</li>"
                yield "</ul>"
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                yield f"<h3>Body: {escape(kind)}</h3>{_block(content['schema'])}"
            yield "<h3>Answers</h3><ul>"
            for status, answer in operation["responses"].items():
                kinds = [_code(content.get("schema", {})) for content in answer.get("content", {}).values()]
                yield f"<li>{escape(str(status))}: {escape(answer['description'])} {' '.join(kinds)}</li>"
            yield "</ul></section>"


def _schemas(description: Mapping[str, Any]) -> str:
    schemas = description.get("components", {}).get("schemas", {})
    return "\n".join(f'<h3 id="{escape(name)}">{escape(name)}</h3>{_block(schema)}' for name, schema in schemas.items())


def _code(schema: Any) -> str:
    """Render a schema on one line, with links for references."""
    if isinstance(schema, Mapping) and "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    return f"<code>{escape(json.dumps(schema))}</code>"


def _block(schema: Any) -> str:
    return f"<pre>{escape(json.dumps(schema, indent=2))}</pre>"
