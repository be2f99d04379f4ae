"""The OpenAPI document, generated from the table of routes and the wire structs."""

from __future__ import annotations

from types import UnionType
from typing import Any

import msgspec

from inferd import __version__
from inferd.gateway.limits import RANGES
from inferd.gateway.route import Route
from inferd.gateway.routes import ROUTES as ALL_ROUTES

_REASONS = {
    400: "The request is not valid; the error names the field, the value and the remedy.",
    401: "An API key is needed, and none came or it is not valid.",
    403: "The API key is valid and does not allow this, or the request came from a foreign web page.",
    404: "There is no such model, or the API key may not use it.",
    405: "The method is not allowed here.",
    408: "The deadline or the time for sending the body passed.",
    409: "A request with this Idempotency-Key is still being worked on.",
    413: "The body is larger than server.max_body_bytes.",
    415: "The body is not JSON.",
    426: "This is a WebSocket, and the request offers none.",
    422: "The Idempotency-Key was used before, with another body.",
    429: "The API key's quota is used up; try again after the time in Retry-After.",
    500: "A defect of the server.",
    502: "A remote server did not answer, or not properly.",
    503: "Nothing can take the request now; try again after the time in Retry-After.",
    504: "A remote server did not answer in time.",
}
_EVENTS = "Events, each 'data: ' and a {name} as JSON; the last is 'data: [DONE]'."
_KEY = "apiKey"
ROUTES = tuple(route for route in ALL_ROUTES if not route.of_console)  # what the console's pages use is no API
Wire = type[msgspec.Struct] | type[list[Any]] | UnionType


def openapi_document() -> bytes:
    """The document as JSON."""
    wires: list[Wire] = []
    for route in ROUTES:
        of_route = (route.errors.wire, route.request, route.response, route.chunk, route.query)
        wires += [wire for wire in of_route if wire is not None and wire not in wires]
    schemas, components = msgspec.json.schema_components(wires, ref_template="#/components/schemas/{name}")
    refs = dict(zip(wires, schemas, strict=True))
    for wire in wires:
        if isinstance(wire, type) and wire.__name__.endswith("Request"):
            _add_limits(components[wire.__name__])
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.pattern, {})[route.method.lower()] = _operation(route, refs, components)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "inferd", "version": __version__, "description": "OpenAI-compatible inference server."},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    _KEY: {
                        "type": "http",
                        "scheme": "bearer",
                        "description": "An API key; also taken from the header x-api-key. Where the server needs no "
                        "keys, any or none.",
                    }
                },
            },
        }
    )


def _add_limits(schema: dict[str, Any]) -> None:
    """Add the limits that ``limits.py`` checks to the numeric fields of a schema."""
    for name, field in schema["properties"].items():
        limits = RANGES.get(name)
        for option in field.get("anyOf", ()):
            if limits is not None and option.get("type") in ("integer", "number"):
                option["exclusiveMinimum" if limits.low_is_open else "minimum"] = limits.low
                option["maximum"] = limits.high


def _query(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameters of a query, from the fields of its struct. Fields that are objects are left out; the struct's
    description explains them."""
    return [
        # A list is one value, with commas.
        {"name": name, "in": "query", "schema": field, "explode": False}
        for name, field in schema["properties"].items()
        if field.get("type") != "object"
    ]


def _operation(route: Route, refs: dict[Wire, Any], components: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {route.media.decode(): {"schema": refs[route.response] if route.response else {}}}
    if route.chunk is not None:
        events = route.events or _EVENTS.format(name=getattr(route.chunk, "__name__", "event"))
        content[route.stream_media.decode()] = {
            # Without a type, because some readers take the body as text, and others as parsed events.
            "schema": {
                "description": events,
            }
        }
    responses: dict[str, Any] = {str(route.success): {"description": "Success.", "content": content}}
    if route.success == 101:
        responses = {"101": {"description": "The connection is a WebSocket from here on (docs/streams.md)."}}
    for status in route.also:
        responses[str(status)] = {"description": "Not now; the answer says why.", "content": content}
    for status in route.statuses:
        responses[str(status)] = {
            "description": _REASONS[status],
            "content": {"application/json": {"schema": refs[route.errors.wire]}},
        }
    place = route.pattern.strip("/").replace("/", "_").replace("{", "").replace("}", "")
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{place or 'start'}",
        "summary": route.summary,
        "responses": responses,
        "security": [] if route.scope == "public" else [{_KEY: [route.scope]}, {}],
    }
    if "{" in route.pattern:
        operation["parameters"] = [
            {
                "name": part.partition("}")[0],
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
            }
            for part in route.pattern.split("{")[1:]
        ]
    if route.query is not None:
        operation.setdefault("parameters", []).extend(_query(components[route.query.__name__]))
    if route.request is not None:
        operation["requestBody"] = {
            "required": route.needs_body,
            "content": {route.request_media: {"schema": refs[route.request]}},
        }
    return operation
