"""Finds the entries of lists and objects at which a body does not have the form of its struct.

The decoder's own messages name neither the number nor the key of an entry: ``input[...].content``, ``metadata[...]``.
"""

from __future__ import annotations

from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

_encode = msgspec.json.Encoder().encode


def path_of_fault(value: Any, wire: Any) -> str | None:
    """The path of the first part of ``value`` that does not have the form of ``wire``, as ``.input[3].content``; None:
    it was not found, or all has the form."""
    said = _said_of(value, wire)
    if said is None or "[...]" not in said:
        return None if said is None or " - at `$" not in said else said.rpartition(" - at `$")[2].removesuffix("`")
    if not isinstance(value, dict) or not _is_struct(wire):
        return None
    for field in msgspec.structs.fields(wire):
        part = value.get(field.encode_name)
        path = _path_within(part, field.type)
        if path is not None:
            return f".{field.encode_name}{path}"
    return None


def _path_within(part: Any, kind: Any) -> str | None:
    for one in _alternatives(kind):
        if isinstance(part, list) and get_origin(one) is list:
            (entry_kind,) = get_args(one)
            for i, entry in enumerate(part):
                if _said_of(entry, entry_kind) is not None:
                    return f"[{i}]{_path_in_entry(entry, entry_kind)}"
        elif isinstance(part, dict) and get_origin(one) is dict:
            _, entry_kind = get_args(one)
            for key, entry in part.items():
                if _said_of(entry, entry_kind) is not None:
                    return f".{key}{_path_in_entry(entry, entry_kind)}"
        elif isinstance(part, dict) and _is_struct(one):
            return path_of_fault(part, one)
    return None


def _path_in_entry(entry: Any, kind: Any) -> str:
    for one in _alternatives(kind):
        if isinstance(entry, dict) and _is_struct(one):
            return path_of_fault(entry, one) or ""
    return ""


def _said_of(value: Any, kind: Any) -> str | None:
    """What the decoder says of a value; None: it has the form."""
    try:
        msgspec.json.decode(_encode(value), type=kind)
    except msgspec.ValidationError as error:
        return str(error)
    return None


def _alternatives(kind: Any) -> list[Any]:
    """The types of a union, without annotations."""
    origin = get_origin(kind)
    if origin is Union or origin is UnionType:
        return [one for part in get_args(kind) for one in _alternatives(part)]
    if hasattr(kind, "__metadata__"):
        return _alternatives(kind.__origin__)
    return [kind]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
