"""/docs: the routes and the fields of their bodies as a page, made of the document of `/openapi.json`.

It holds no data and no script, so it is open as the page at / is.
"""

from collections.abc import Mapping
from html import escape
from typing import Any

Document = Mapping[str, Any]
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; }
details, .plain { border-top: 1px solid #8884; padding: .4rem 0; margin: 0; }
summary { cursor: pointer; }
.plain { padding-left: 1.1rem; }
code, .method { font-family: ui-monospace, monospace; }
.method { display: inline-block; width: 4.5rem; font-weight: 600; }
.says { opacity: .75; margin-left: .75rem; }
table { border-collapse: collapse; margin: .5rem 0 .5rem 1.1rem; }
td { padding: .1rem 1rem .1rem 0; vertical-align: top; }
"""


def guide(described: Document) -> str:
    parts: dict[str, list[str]] = {}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            entry = _entry(method.upper(), path, operation, described["components"]["schemas"])
            parts.setdefault(operation["tags"][0], []).append(entry)
    listed = "".join(f"<h2>{escape(tag)}</h2>{''.join(entries)}" for tag, entries in parts.items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>afserve: routes</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>afserve {escape(described['info']['version'])}</h1>"
        f'<p>All of it for programs: <a href="/openapi.json">/openapi.json</a>.</p>{listed}</html>'
    )


def _entry(method: str, path: str, operation: Document, schemas: Document) -> str:
    fields = _fields(operation, schemas)
    line = f'<span class="method">{method}</span><code>{escape(path)}</code>'
    line += f'<span class="says">{escape(operation["summary"])}</span>'
    if not fields:
        return f'<p class="plain">{line}</p>'
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td></tr>" for name, kind in fields
    )
    return f"<details><summary>{line}</summary><table>{rows}</table></details>"


def _fields(operation: Document, schemas: Document) -> list[tuple[str, str]]:
    """(name, what it may be) of the query and of the body."""
    query = [(f"?{one['name']}", "string") for one in operation.get("parameters", ()) if one["in"] == "query"]
    body = operation.get("requestBody")
    if body is None:
        return query
    (content,) = body["content"].values()
    schema = _resolved(content["schema"], schemas)
    wanted = schema.get("required", ())
    found = [
        (name, _kind(_resolved(field, schemas)) + (", required" if name in wanted else ""))
        for name, field in schema.get("properties", {}).items()
    ]
    return query + found


def _resolved(schema: Document, schemas: Document) -> Document:
    named = schema.get("$ref")
    return schema if named is None else schemas[named.rpartition("/")[2]]


def _kind(schema: Document) -> str:
    """`integer, 1 to 20`, `one of "a", "b"`, `array or null`."""
    if "enum" in schema:
        return "one of " + ", ".join(f'"{each}"' for each in schema["enum"])
    for joint in ("anyOf", "oneOf"):
        if joint in schema:
            return " or ".join(_kind(each) for each in schema[joint])
    kinds = schema.get("type", "any")
    said = " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{said}, {low} to {high}"
    return said
