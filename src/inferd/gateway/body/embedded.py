"""JSON in a text of a request: the arguments of a call, a schema that is sent as a text."""

from __future__ import annotations

from typing import Any

import msgspec

from inferd.gateway.body.decode_cost import MAX_DEPTH, is_too_deep

JSON = dict[str, Any]


def decoded_text(text: str) -> Any:
    """The value. Raises ValueError, which says why there is none."""
    try:
        value = msgspec.json.decode(text.encode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if is_too_deep(value):
        raise ValueError(f"it has more than {MAX_DEPTH} levels of lists and objects within each other")
    return value


def call_arguments(text: str) -> str | JSON:
    """A call's arguments as an object, which templates expect. Text that is not a JSON object stays unchanged."""
    try:
        value = decoded_text(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
