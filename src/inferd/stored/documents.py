"""The JSON of responses and items: no more of it is read than ids and the output."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final

import msgspec

_items_decoder: Final = msgspec.json.Decoder(list[msgspec.Raw])
_fields_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


class _Ident(msgspec.Struct, frozen=True):
    id: str = ""


_ident_decoder: Final = msgspec.json.Decoder(_Ident)


def split_output(body: bytes) -> tuple[bytes, bytes]:
    """The body with an empty output, and its output as a JSON array."""
    fields = _fields_decoder.decode(body)
    output = bytes(fields.get("output", msgspec.Raw(b"[]")))
    fields["output"] = msgspec.Raw(b"[]")
    return msgspec.json.encode(fields), output


def with_fields(body: bytes, **changed: bytes) -> bytes:
    """The body with other values (JSON) of some fields, in their places."""
    fields = _fields_decoder.decode(body)
    for name, value in changed.items():
        fields[name] = msgspec.Raw(value)
    return msgspec.json.encode(fields)


def array(items: Sequence[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"


def elements(items: bytes) -> list[bytes]:
    """The elements of a JSON array, JSON each."""
    return [bytes(item) for item in _items_decoder.decode(items)]


def id_of(item: bytes) -> str:
    """The id of an item; empty: it has none, or none that can be stored."""
    try:
        name = _ident_decoder.decode(item).id
    except msgspec.ValidationError:
        return ""
    return name if is_name(name) else ""


def is_name(text: str) -> bool:
    """Whether a text can be the id of something that is stored."""
    return _NAME.fullmatch(text) is not None


def new_id(prefix: str) -> str:
    """An id that cannot be guessed."""
    return f"{prefix}_{os.urandom(16).hex()}"
