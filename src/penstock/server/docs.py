"""/docs: the OpenAPI document as one page for people. It is written here, whole, so that it needs no network and no script."""

from html import escape
from typing import Any

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
code,b.m{font-family:ui-monospace,monospace}details{border:1px solid #ddd;border-radius:4px;margin:.4rem 0;padding:.4rem .8rem}
summary{cursor:pointer}b.m{display:inline-block;width:4rem;color:#06c}td,th{text-align:left;vertical-align:top;padding:.2rem
.8rem .2rem 0;border-top:1px solid #eee}table{border-collapse:collapse;width:100%}"""


def docs_page(document: dict[str, Any]) -> str:
    title = f"{document['info']['title']} {document['info']['version']}"
    routes = "".join(_route(path, method, described, document["components"]["schemas"])
                     for path, methods in document["paths"].items() for method, described in methods.items())
    shapes = "".join(f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_fields(schema)}</details>'
                     for name, schema in sorted(document["components"]["schemas"].items()))
    return (f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
            f"<h1>{escape(title)}</h1><p>The same for programs: <a href=openapi.json>openapi.json</a></p>"
            f"<h2>Routes</h2>{routes}<h2>Types</h2>{shapes}")


def _route(path: str, method: str, described: dict[str, Any], schemas: dict[str, Any]) -> str:
    key = " (needs a key)" if described.get("security") else ""
    body = next(iter(described.get("requestBody", {}).get("content", {"": {}}).values())).get("schema")
    answers = described["responses"]["200"]["content"]
    told = "; ".join(f"{escape(kind)}: {_kind(content.get('schema', {}))}" for kind, content in answers.items())
    parts = f"<p>Body: {_kind(body)}</p>{_fields(schemas.get(_name(body), body))}" if body else ""
    return (f"<details><summary><b class=m>{escape(method.upper())}</b> <code>{escape(path)}</code> "
            f"{escape(described['summary'])}{key}</summary>{parts}<p>Answer: {told}</p></details>")


def _name(schema: dict[str, Any]) -> str:
    return escape(schema.get("$ref", "").rpartition("/")[2])


def _fields(schema: dict[str, Any]) -> str:
    about = f"<p>{escape(schema['description'])}</p>" if schema.get("description") else ""
    required = set(schema.get("required", ()))
    rows = "".join(f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}<td>{_kind(field)}"
                   f"<td>{escape(field.get('description', ''))}" for name, field in schema.get("properties", {}).items())
    return f"{about}<table>{rows}</table>" if rows else about


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if name := _name(schema):
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = [f"{sign} {schema[name]}" for name, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
              if name in schema]
    return escape(" ".join([str(schema.get("type", "anything")), *bounds]))
