"""Items as they are stored: each with its type and an id, its content in parts."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.items import InputItem, Placed, kind_of, messages_of
from inferd.stored.documents import is_name, new_id

PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "additional_tools": "at",
    "configuration_update": "cu",
}
_CALLS: Final = ("function_call", "custom_tool_call")
_RESULTS: Final = ("function_call_output", "custom_tool_call_output")


def kept_item(fields: dict[str, Any], at: str) -> bytes:
    """An item as it is stored. Raises InvalidRequest for what no model here could read."""
    try:
        item = msgspec.convert(fields, InputItem)
    except msgspec.ValidationError as error:
        raise invalid(at, f"{at} is not an item: {error}.") from None
    kind = kind_of(item)
    if kind not in PREFIXES:
        raise invalid(
            f"{at}.type",
            f"{at}.type is {shown(kind)}; the models served here read items of type {', '.join(PREFIXES)}.",
            "unsupported_content",
        )
    needed = ("call_id", "name") if kind in _CALLS else ("call_id", "output") if kind in _RESULTS else ()
    for name in needed:
        if not getattr(item, name):
            raise invalid(f"{at}.{name}", f"{at}.{name} is missing.", "missing_required_parameter")
    _check_text(item, kind, at)
    given = fields.get("id")
    name = given if isinstance(given, str) and is_name(given) else new_id(PREFIXES[kind])
    return as_stored(fields, item, name)


def as_stored(fields: dict[str, Any], item: InputItem, name: str) -> bytes:
    """The fields of an item, which ``item`` has decoded, as they are stored under an id."""
    made = {**fields, "id": name, "type": kind_of(item), "status": fields.get("status") or "completed"}
    if isinstance(made.get("content"), str):
        made["content"] = [_part(item.role, made["content"])]
    return msgspec.json.encode(made)


def _check_text(item: InputItem, kind: str, at: str) -> None:
    """Raises InvalidRequest for a part that is no text."""
    if kind in _RESULTS:
        messages_of(None, [Placed(at, InputItem(role="user", content=item.output))])
    elif kind in ("message", "reasoning"):
        messages_of(None, [Placed(at, item)])


def _part(role: str | None, text: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}
