"""The policy for fields without effect, of dialects whose clients gain fields with each of their releases.

Such a dialect drops unknown top-level fields and names them in the header ``x-inferd-ignored-params``. It refuses only
what would change the answer. OpenAI's chat and text completions, and KServe v2, refuse unknown fields instead
(``forbid_unknown_fields`` of their structs). Unknown keys of the objects within a chat's messages and tools are dropped
and named: clients send back whole messages of other servers.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import UNSET, Raw, UnsetType

from inferd.gateway.body.decode import OFF_LOOP_BYTES, decode
from inferd.predict.codecs.text_wire import Ignored

T = TypeVar("T", bound=msgspec.Struct)

NEUTRAL: Final = frozenset((b"null", b"false", b'""', b"[]", b"{}"))
"""Values with which a field counts as absent, as JSON."""

_top_level: Final = msgspec.json.Decoder(dict[str, Raw])
_list: Final = msgspec.json.Decoder(list[Raw])


def ignored_names(wire: type[msgspec.Struct]) -> tuple[str, ...]:
    """The names of the fields of a body that are known and have no effect."""
    return tuple(field.encode_name for field in msgspec.structs.fields(wire) if field.type == Ignored)


def is_given(value: Raw | UnsetType) -> bool:
    """Whether a field that is not decoded has a value other than null, false or empty."""
    return value is not UNSET and bytes(value) not in NEUTRAL


async def decode_open_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> tuple[T, list[str]]:
    """The decoded body, and the names of its top-level fields that were sent and have no effect: the unknown ones, and
    those whose type is ``Ignored``. Raises InvalidRequest, which names the wrong field."""
    if len(body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(_decode_open, body, decoder)
    return _decode_open(body, decoder)


def _decode_open(body: bytes, decoder: msgspec.json.Decoder[T]) -> tuple[T, list[str]]:
    decoded = decode(body, decoder)
    used = _used_names(type(decoded))
    given = _top_level.decode(body)
    return decoded, [name for name, value in given.items() if name not in used and bytes(value) not in NEUTRAL]


@functools.cache
def _used_names(wire: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(wire)) - frozenset(ignored_names(wire))


async def decode_closed_body(
    body: bytes, decoder: msgspec.json.Decoder[T], within: Sequence[str]
) -> tuple[T, list[str]]:
    """The decoded body, and the unknown keys of the objects within some of its fields, at each level that its type
    describes: ``messages.content.cache_control``. Raises InvalidRequest, which names the wrong field."""
    if len(body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(_decode_closed, body, decoder, within)
    return _decode_closed(body, decoder, within)


def _decode_closed(body: bytes, decoder: msgspec.json.Decoder[T], within: Sequence[str]) -> tuple[T, list[str]]:
    decoded = decode(body, decoder)
    given, shape = _top_level.decode(body), _shape_of(type(decoded))
    found: dict[str, None] = {}
    for name in within:
        if name in given and name in shape.inner:
            _find_unknown(given[name], shape.inner[name], name, found)
    return decoded, list(found)


class _Shape(NamedTuple):
    """The keys of an object of the wire."""

    known: frozenset[str]
    inner: dict[str, _Shape]  # of the objects within its fields


def _find_unknown(value: Raw, shape: _Shape, at: str, found: dict[str, None]) -> None:
    """Add the unknown keys of an object, or of the objects of a list. The value is valid for its type."""
    first = bytes(memoryview(value)[:1])  # without a copy of the rest
    if first == b"[":
        for item in _list.decode(value):
            _find_unknown(item, shape, at, found)
    elif first == b"{":
        for name, inner in _top_level.decode(value).items():
            if name not in shape.known:
                if is_given(inner):
                    found[f"{at}.{name}"] = None
            elif name in shape.inner:
                _find_unknown(inner, shape.inner[name], f"{at}.{name}", found)


@functools.cache
def _shape_of(wire: type[msgspec.Struct]) -> _Shape:
    fields = msgspec.structs.fields(wire)
    inner = {field.encode_name: kind for field in fields if (kind := _struct_in(field.type)) is not None}
    return _Shape(
        frozenset(field.encode_name for field in fields), {name: _shape_of(kind) for name, kind in inner.items()}
    )


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """The struct of a field's type, or of the items of its list."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next((found for part in get_args(kind) if (found := _struct_in(part)) is not None), None)
