"""The policy for fields without effect, of dialects whose clients gain fields with each of their releases.

Such a dialect drops unknown top-level fields and names them in the header ``x-inferd-ignored-params``. It refuses only
what would change the answer. OpenAI's chat and text completions, and KServe v2, refuse unknown fields instead
(``forbid_unknown_fields`` of their structs).
"""

from __future__ import annotations

import asyncio
import functools
from typing import Final, TypeVar

import msgspec

from inferd.gateway.body.decode import OFF_LOOP_BYTES, decode
from inferd.predict.codecs.text_wire import Ignored

T = TypeVar("T", bound=msgspec.Struct)

NEUTRAL: Final = frozenset((b"null", b"false", b'""', b"[]", b"{}"))
"""Values with which a field counts as absent, as JSON."""

_top_level: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def ignored_names(wire: type[msgspec.Struct]) -> tuple[str, ...]:
    """The names of the fields of a body that are known and have no effect."""
    return tuple(field.encode_name for field in msgspec.structs.fields(wire) if field.type == Ignored)


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
