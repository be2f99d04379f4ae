"""The policy for fields without effect: nothing that a request has is dropped without a word.

Dialects whose clients gain fields with each of their releases drop unknown top-level fields. OpenAI's chat and text
completions, and KServe v2, refuse them (``forbid_unknown_fields`` of their structs). In all dialects unknown keys of
the objects within a field are dropped, because clients send back whole messages of other servers. What is dropped is
named in the header ``x-inferd-ignored-params``, each name once and without its position:
``messages.content.cache_control``. A known key in an object of a type that does not have it is treated as an unknown
one (``variants``).
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any, Final, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import UNSET, Raw, UnsetType

from inferd.gateway.body.decode import OFF_LOOP_BYTES, decode
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.variants import Variants
from inferd.predict.codecs.text_wire import Ignored

T = TypeVar("T", bound=msgspec.Struct)

NEUTRAL: Final = frozenset((b"null", b"false", b'""', b"[]", b"{}"))
"""Values with which a field counts as absent, as JSON."""

MAX_LEVELS: Final = 8
"""Levels of objects whose keys are looked at. Each one reads what is within it again, and no dialect has more."""

_top_level: Final = msgspec.json.Decoder(dict[str, Raw])
_list: Final = msgspec.json.Decoder(list[Raw])
_tag: Final = msgspec.json.Decoder(str)
_NO_VARIANTS: Final = Variants("", {})


def ignored_names(wire: type[msgspec.Struct]) -> tuple[str, ...]:
    """The names of the fields of a body that are known and have no effect."""
    return tuple(field.encode_name for field in msgspec.structs.fields(wire) if field.type == Ignored)


def is_given(value: Raw | UnsetType) -> bool:
    """Whether a field that is not decoded has a value other than null, false or empty."""
    return value is not UNSET and bytes(value) not in NEUTRAL


async def decode_open_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> tuple[T, list[str]]:
    """The decoded body, and the names of the fields that were sent and have no effect, at each level that its type
    describes: the unknown ones, and those whose type is ``Ignored``. Raises InvalidRequest, which names the wrong
    field."""
    if len(body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(_decode_open, body, decoder)
    return _decode_open(body, decoder)


def _decode_open(body: bytes, decoder: msgspec.json.Decoder[T]) -> tuple[T, list[str]]:
    decoded = decode(body, decoder)
    found: dict[str, None] = {}
    _find_unused(Raw(body.lstrip()), type(decoded), "", found, MAX_LEVELS)
    return decoded, list(found)


class _Shape(NamedTuple):
    """The keys of an object of the wire."""

    used: frozenset[str]
    inner: dict[str, type[msgspec.Struct]]  # of the objects within its fields
    is_strict: bool  # unknown keys are refused
    tag: str  # the key that says which of them have an effect; empty: all have
    by_kind: dict[str, frozenset[str]]  # those that have, by its value
    default: str  # its value where it is absent

    def used_in(self, fields: dict[str, Raw], at: str) -> frozenset[str]:
        """The keys that have an effect in an object with these fields. All have where the tag is no text: the object is
        JSON of any form, which a union has beside the type. Raises InvalidRequest for keys of another type where
        unknown keys are refused."""
        if not self.tag:
            return self.used
        kind, tag = self.default, fields.get(self.tag, UNSET)
        if tag is not UNSET and is_given(tag):
            if bytes(memoryview(tag)[:1]) != b'"':
                return self.used
            kind = _tag.decode(tag)
        used = self.by_kind.get(kind, self.used)
        for name in fields if self.is_strict else ():
            if name in self.used - used and is_given(fields[name]):
                raise invalid(
                    f"{at}{name}",
                    f"{at}{name} has no effect where {at}{self.tag} is {shown(kind)}; leave it out, or send "
                    f"{self._place_of(name, used, at)}.",
                    "unknown_parameter",
                )
        return used

    def _place_of(self, name: str, used: frozenset[str], at: str) -> str:
        """Where a key of another type has an effect: within the fields ``used``, and beside another tag."""
        inside = (f"{at}{key}.{name}" for key in used if key in self.inner and name in _shape_of(self.inner[key]).used)
        beside = (f"{at}{self.tag} {shown(kind)} with it" for kind, names in self.by_kind.items() if name in names)
        return " or ".join((*inside, *beside))


def _find_unused(value: Raw, wire: type[msgspec.Struct], at: str, found: dict[str, None], levels: int) -> None:
    """Add the keys without effect of an object, or of the objects of a list. The value is valid for its type. Raises
    InvalidRequest for a key of another type where unknown keys are refused.

    ``at``: the name of the object with a dot behind it. ``levels``: of objects that are looked at.
    """
    first = bytes(memoryview(value)[:1])  # without a copy of the rest
    if first == b"[":
        for item in _list.decode(value):
            _find_unused(item, wire, at, found, levels)
    elif first == b"{":
        shape, fields = _shape_of(wire), _top_level.decode(value)
        used = shape.used_in(fields, at)
        for name, inner in fields.items():
            if name not in used:
                if is_given(inner):
                    found[f"{at}{name}"] = None
            elif name in shape.inner and levels > 1:
                _find_unused(inner, shape.inner[name], f"{at}{name}.", found, levels - 1)


@functools.cache
def _shape_of(wire: type[msgspec.Struct]) -> _Shape:
    fields = msgspec.structs.fields(wire)
    inner = {field.encode_name: kind for field in fields if (kind := _struct_in(field.type)) is not None}
    used = frozenset(field.encode_name for field in fields) - frozenset(ignored_names(wire))
    variants: Variants = getattr(wire, "variants", _NO_VARIANTS)
    by_kind = {kind: used & {variants.tag, *names} for kind, names in variants.used.items()}
    is_strict = wire.__struct_config__.forbid_unknown_fields
    return _Shape(used, inner, is_strict, variants.tag, by_kind, variants.default)


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """The struct of a field's type, or of the items of its list."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next((found for part in get_args(kind) if (found := _struct_in(part)) is not None), None)
