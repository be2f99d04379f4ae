"""OTLP's messages for traces as protobuf bytes (opentelemetry-proto: collector/trace/v1, trace/v1, common/v1)."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Final

from inferd.errors import InvalidRequest
from inferd.protowire import FIXED32, FIXED64, LENGTH, VARINT, fields, head, number, signed, sized

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]

INTERNAL: Final = 1
SERVER: Final = 2
OK: Final = 1
ERROR: Final = 2

_HAS_IS_REMOTE: Final = 0x100
_IS_REMOTE: Final = 0x200

_MAX_PAIRS: Final = 1024


def _tag(field: int, wire: int) -> bytes:
    return number(field << 3 | wire)


_TRACE_ID: Final = _tag(1, LENGTH) + number(16)
_PARENT_ID: Final = _tag(4, LENGTH) + number(8)
_STATUS: Final = _tag(3, VARINT)
_FLAGS: Final = _tag(16, FIXED32)
_pack_double: Final = struct.Struct("<d").pack
_pack_fixed32: Final = struct.Struct("<I").pack

_SPAN_ID: Final = _tag(2, LENGTH) + number(8)
_KIND: Final = _tag(6, VARINT)
_BEGIN: Final = _tag(7, FIXED64)
_END: Final = _tag(8, FIXED64)
_pack_own: Final = struct.Struct("<2s8s1sB1sQ1sQ").pack
_OWN_BYTES: Final = 30
"""The id, the kind and the times of a span, with their tags."""

_SPAN: Final = _tag(2, LENGTH)  # of the spans of a scope


# -- spans -------------------------------------------------------------------------------------


def span_field(context: bytes, span_id: bytes, kind: int, begin: float, end: float, rest: bytes) -> bytes:
    """A span as a field of the scope that it belongs to. Times are in seconds since the epoch.

    ``context``: of ``context_fields``. ``rest``: the other fields, in any order: of ``parent_field``, ``name_field``,
    ``status_field`` and attributes.
    """
    own = _pack_own(_SPAN_ID, span_id, _KIND, kind, _BEGIN, _nanoseconds(begin), _END, _nanoseconds(end))
    return b"".join((_SPAN, number(len(context) + _OWN_BYTES + len(rest)), context, own, rest))


def context_fields(trace_id: bytes, state: str, flags: int, is_parent_remote: bool = False) -> bytes:
    """The fields of a span that all spans of its trace here have. ``state``, ``flags``: of the trace context."""
    flags |= _HAS_IS_REMOTE | (_IS_REMOTE if is_parent_remote else 0)
    return _TRACE_ID + trace_id + _text(3, state) + _FLAGS + _pack_fixed32(flags)


def parent_field(span_id: bytes) -> bytes:
    return _PARENT_ID + span_id


def name_field(name: str) -> bytes:
    return _text(5, name)


def status_field(status: int, message: str = "") -> bytes:
    """``status``: 0 is unset."""
    return sized(15, _text(2, message) + _STATUS + number(status)) if status else b""


def encode_request(resource: Attributes, scope: tuple[str, str], schema_url: str, spans: Sequence[bytes]) -> bytes:
    """An ExportTraceServiceRequest. ``scope``: the name and the version of what made the spans."""
    schema = _text(3, schema_url)
    told = sized(1, b"".join([sized(1, _pair(key, value)) for key, value in resource.items()]))
    scope_field = sized(1, _text(1, scope[0]) + _text(2, scope[1]))
    size = len(scope_field) + sum(map(len, spans), 0) + len(schema)
    scope_head = head(2, size)
    whole_head = head(1, len(told) + len(scope_head) + size + len(schema))
    return b"".join((whole_head, told, scope_head, scope_field, *spans, schema, schema))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9) if seconds > 0.0 else 0


def _text(field: int, text: str) -> bytes:
    return sized(field, text.encode("utf-8", "replace")) if text else b""


# -- the attributes of a span ------------------------------------------------------------------


class Doubles:
    """The attributes of one key whose values are doubles: all that precedes a value is made once."""

    __slots__ = ("_head",)

    def __init__(self, key: str) -> None:
        self._head = attribute(key, 0.0)[:-8]

    def of(self, value: float) -> bytes:
        return self._head + _pack_double(value)


class Integers:
    """The attributes of one key whose values are integers: all that precedes a value is made once per length."""

    __slots__ = ("_heads",)

    def __init__(self, key: str) -> None:
        # By the number of bytes of a value; only negative numbers have ten.
        samples = [1 << 7 * (size - 1) for size in range(1, 10)] + [-1]
        self._heads = [b""] + [attribute(key, sample)[:-size] for size, sample in enumerate(samples, start=1)]

    def of(self, value: int) -> bytes:
        digits = number(value)
        return self._heads[len(digits)] + digits


def attribute(key: str, value: Value) -> bytes:
    """An attribute of a span. Most texts come often, so that their bytes are kept."""
    if isinstance(value, str):
        return _frequent(key, value)
    return sized(9, _pair(key, value))


@functools.lru_cache(maxsize=_MAX_PAIRS)
def _frequent(key: str, value: str) -> bytes:
    return text_attribute(key, value)


def text_attribute(key: str, value: str) -> bytes:
    """An attribute whose value is hardly ever the same."""
    return sized(9, _pair(key, value))


def _pair(key: str, value: Value) -> bytes:
    """A KeyValue."""
    return _text(1, key) + sized(2, _value(value))


def _value(value: Value) -> bytes:
    """An AnyValue."""
    if isinstance(value, str):
        return sized(1, value.encode("utf-8", "replace"))
    if isinstance(value, bool):
        return _tag(2, VARINT) + number(value)
    if isinstance(value, int):
        return _tag(3, VARINT) + number(value)
    if isinstance(value, float):
        return _tag(4, FIXED64) + _pack_double(value)
    return sized(5, b"".join([sized(1, _value(item)) for item in value]))


# -- the collector's answer --------------------------------------------------------------------


def rejected(body: bytes) -> tuple[int, str]:
    """Of an ExportTraceServiceResponse: the number of spans that the collector rejected, and why.

    An answer that is no such message tells of no rejection.
    """
    count, message = 0, ""
    try:
        for field, wire, begin, end in fields(body, 0, len(body)):
            if field != 1 or wire != LENGTH:
                continue
            for inner, kind, start, stop in fields(body, begin, end):
                if inner == 1 and kind == VARINT:
                    count = max(0, signed(start))
                elif inner == 2 and kind == LENGTH:
                    message = body[start:stop].decode("utf-8", "replace")
    except InvalidRequest:
        return 0, ""
    return count, message
