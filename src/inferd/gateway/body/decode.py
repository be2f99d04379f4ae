"""Decodes JSON bodies into wire structs, and turns the decoder's errors into messages for clients.

One msgspec pass decodes and checks types. ``document`` checks the defects that it accepts.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import re
from typing import Any, Final, TypeVar

import msgspec

from inferd.errors import InvalidRequest, type_remedy
from inferd.gateway.body.decode_cost import CHEAP_BYTES, MAX_DECODE_COST, check_decode_cost
from inferd.gateway.body.document import check_document, no_json
from inferd.gateway.body.faults import path_of_fault
from inferd.gateway.call import Call, read_body, require_json
from inferd.gateway.errors import invalid, printable, shown

T = TypeVar("T")

# A larger body is decoded on another thread, so that the event loop is not blocked.
OFF_LOOP_BYTES: Final = 128 * 1024

_AT = re.compile(r"^(?P<what>.*?)(?: - at (?P<at>.*))?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
_STEP = re.compile(r"\.([A-Za-z0-9_]+)|\[(\d+)\]|\[\.\.\.\]")


_decode = msgspec.json.Decoder().decode


async def decode_body(body: bytes, decoder: msgspec.json.Decoder[T], *, texts: bool = True) -> T:
    """The decoded body. Raises InvalidRequest, which names the wrong field.

    ``texts``: False where the decoder's type keeps texts as they stand in the body (``msgspec.Raw``) or skips them.
    """
    if len(body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(decode, body, decoder, texts=texts)
    return decode(body, decoder)


def decode(body: bytes, decoder: msgspec.json.Decoder[T], *, texts: bool = True) -> T:
    """As ``decode_body``, on the calling thread."""
    if not body:
        raise InvalidRequest("The request body is empty; send a JSON object.", code="invalid_json")
    if len(body) > CHEAP_BYTES:
        check_decode_cost(body, texts=texts)
    try:
        decoded = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error), body, decoder.type) from None
    except (ValueError, RecursionError) as error:
        raise no_json(error) from None
    check_document(body)
    return decoded


async def json_body(call: Call, max_bytes: int, timeout_s: float) -> bytes:
    """The body of a request for JSON. Raises what ``require_json``, ``read_body`` and ``within_decode_cost`` raise."""
    if not call.facts.is_json:
        require_json(call)
    body = await read_body(call, max_bytes, timeout_s)
    return body if len(body) <= MAX_DECODE_COST else await within_decode_cost(body)


async def within_decode_cost(body: bytes) -> bytes:
    """The body, unchanged, after ``check_decode_cost`` for a decoder that steps over texts. To be called before any
    decoder reads it. Raises InvalidRequest."""
    if len(body) > MAX_DECODE_COST:
        await asyncio.to_thread(check_decode_cost, body, texts=False)
    return body


def _explain(text: str, body: bytes, wire: Any) -> InvalidRequest:
    """The error for a msgspec message such as "Expected `int`, got `str` - at `$.n`"."""
    match = _AT.match(text)
    what, at = (match["what"], match["at"] or "") if match else (text, "")
    path = at.replace("`", "").removeprefix("key in ").removeprefix("$")
    if "[...]" in path and len(body) <= OFF_LOOP_BYTES:
        with contextlib.suppress(ValueError, RecursionError):  # another part of the body cannot be decoded either
            path = path_of_fault(_decode(body), wire) or path
    param = path.removeprefix(".")
    if unknown := _UNKNOWN.match(what):
        name = printable(unknown["name"])
        full = f"{param}.{name}" if param else name
        fields = list(getattr(wire, "__struct_fields__", ())) if not param else []
        close = difflib.get_close_matches(name, fields, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "Remove it."
        return invalid(full, f"Unrecognized request argument: {full!r}. {hint}", "unknown_parameter")
    if missing := _MISSING.match(what):
        full = f"{param}.{missing['name']}" if param else missing["name"]
        return invalid(full, f"The required field {full!r} is missing; add it.", "missing_required_parameter")
    if not param:
        return InvalidRequest(f"The request body must be a JSON object: {what}.", code="invalid_type")
    value = _value_at(path, body)
    got = f" ({shown(value[0])})" if value else ""
    return invalid(
        printable(param, 200), f"Invalid value for {param!r}{got}: {what}. {type_remedy(what)}", "invalid_type"
    )


def _value_at(path: str, body: bytes) -> tuple[Any] | None:
    """The value at a path such as ``.messages[0].content``, in a tuple of one. None: there is no value at the path, or
    the body is too large to decode it again."""
    if len(body) > OFF_LOOP_BYTES:
        return None
    try:
        value = msgspec.json.decode(body)
        for name, index in _STEP.findall(path):
            if name:
                value = value[name]
            elif index:
                value = value[int(index)]
            else:
                return None
    except (msgspec.DecodeError, ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return (value,)
