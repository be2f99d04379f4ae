"""Reads and writes the protocol's messages for the methods other than predictions: the same answers as over REST.

The descriptors (descriptors.binpb, made by .ci/proto.py) drive reading and writing, so the fields are not repeated
here. The tests compare with protobuf's own classes. Reflection sends the same descriptors to clients.
"""

from __future__ import annotations

import base64
import functools
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from inferd.errors import InvalidRequest
from inferd.protowire import (
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    fields,
    number,
    signed,
    sized,
    text,
    varint,
)

DESCRIPTORS: Final = Path(__file__).with_name("descriptors.binpb")
PACKAGE: Final = "inference"

# Types of fields, as descriptor.proto numbers them.
_DOUBLE: Final = 1
_FLOAT: Final = 2
_BOOL: Final = 8
_STRING: Final = 9
_MESSAGE: Final = 11
_BYTES: Final = 12
_ENUM: Final = 14
_SIGNED: Final = frozenset((3, 5, _ENUM))  # int64, int32
_WIRE: Final = {
    **dict.fromkeys((3, 4, 5, 13, _BOOL, _ENUM), VARINT),
    _DOUBLE: FIXED64,
    _FLOAT: FIXED32,
    **dict.fromkeys((_STRING, _BYTES, _MESSAGE), LENGTH),
}
_REPEATED: Final = 3
_MAX_DEPTH: Final = 32  # of messages within messages
_MAX_FIELDS: Final = 2048  # of a message that is read

Value: TypeAlias = object
_Bounds = tuple[int, int]


class File(NamedTuple):
    """A compiled descriptor file, the files that it imports (``needs``), and its services."""

    name: str
    content: bytes
    needs: tuple[str, ...]
    services: tuple[str, ...]


class _Field(NamedTuple):
    name: str
    number: int
    type: int
    is_repeated: bool
    of: str  # the name of its message or enum type
    is_choice: bool  # in a oneof: it has no default


class _Message(NamedTuple):
    fields: dict[int, _Field]
    is_entry: bool  # an entry of a map: a key and a value


class Protocol:
    """The messages, enums and services of the descriptors."""

    def __init__(self, descriptors: bytes) -> None:
        self._messages: dict[str, _Message] = {}
        self._enums: dict[str, dict[int, str]] = {}
        self._file_of: dict[str, str] = {}
        self.files: dict[str, File] = {}
        for _, _, start, end in fields(descriptors, 0, len(descriptors)):
            self._add(descriptors[start:end])

    def file_of(self, symbol: str) -> File | None:
        """The file of a service, method, message, field or enum; None: it is unknown."""
        name = self._file_of.get(symbol)
        return self.files[name] if name is not None else None

    def read(self, name: str, body: bytes, package: str = PACKAGE) -> dict[str, Value]:
        """A message's fields by name, with the values of protobuf's JSON form, except that 64-bit numbers are numbers.
        Fields that were left out have their defaults. Raises InvalidRequest."""
        try:
            return self._read(f".{package}.{name}", body, (0, len(body)), 0)
        except InvalidRequest:
            raise InvalidRequest(
                f"The request is no protobuf message of the type {package}.{name}; send one.", code="invalid_protobuf"
            ) from None

    def write(self, name: str, answer: Mapping[str, Value], package: str = PACKAGE) -> bytes:
        """A message's bytes, from the same answer over REST. Values without a field in the protocol are left out."""
        return self._write(f".{package}.{name}", answer)

    # -- messages ---------------------------------------------------------------------------

    def _read(self, name: str, body: bytes, bounds: _Bounds, depth: int) -> dict[str, Value]:
        if depth > _MAX_DEPTH:
            raise InvalidRequest(f"Messages are nested more than {_MAX_DEPTH} deep.")
        known = self._messages[name].fields
        found: dict[str, Value] = {}
        for field in known.values():
            if field.is_repeated:
                found[field.name] = {} if self._is_map(field) else []
            elif not field.is_choice and field.type != _MESSAGE:
                found[field.name] = self._value(field, 0, 0, b"", depth)
        for key, wire, start, end in fields(body, *bounds, _MAX_FIELDS):
            one = known.get(key)
            if one is None:
                continue
            if wire == LENGTH and _WIRE[one.type] != LENGTH and one.is_repeated:
                at = start
                while at < end:
                    at = self._packed(one, found, body, at, end, depth)
            elif wire == _WIRE[one.type]:
                self._keep(one, found, self._value(one, start, end, body, depth))
        return found

    def _packed(self, field: _Field, found: dict[str, Value], body: bytes, at: int, end: int, depth: int) -> int:
        if _WIRE[field.type] == VARINT:
            value, stop = varint(body, at, end)
            self._keep(field, found, self._value(field, value, 0, body, depth))
            return stop
        stop = at + (8 if field.type == _DOUBLE else 4)
        if stop > end:
            raise InvalidRequest("It ends within a number.")
        self._keep(field, found, self._value(field, at, stop, body, depth))
        return stop

    def _keep(self, field: _Field, found: dict[str, Value], value: Value) -> None:
        held = found.get(field.name)
        if isinstance(held, dict) and field.is_repeated and isinstance(value, dict):
            held[value["key"]] = value.get("value", {})
        elif isinstance(held, list):
            held.append(value)
        else:
            found[field.name] = value

    def _value(self, field: _Field, start: int, end: int, body: bytes, depth: int) -> Value:
        """The value of one field. For a varint, ``start`` is the number."""
        kind = field.type
        if kind == _MESSAGE:
            return self._read(field.of, body, (start, end), depth + 1)
        if kind == _STRING:
            return text(body, start, end)
        if kind == _BYTES:
            return base64.b64encode(body[start:end]).decode("ascii")
        if kind == _BOOL:
            return bool(start)
        if kind in (_DOUBLE, _FLOAT):
            return struct.unpack("<d" if kind == _DOUBLE else "<f", body[start:end])[0] if end else 0.0
        if kind == _ENUM:
            return self._enums[field.of].get(start, signed(start))
        return signed(start) if kind in _SIGNED else start

    def _write(self, name: str, answer: Mapping[str, Value]) -> bytes:
        out = []
        for field in self._messages[name].fields.values():
            given = answer.get(field.name)
            if given is None:
                continue
            if isinstance(given, Mapping) and self._is_map(field):
                for key, value in given.items():
                    out.append(sized(field.number, self._write(field.of, {"key": key, "value": value})))
            elif not field.is_repeated:
                content = self._encoded(field, given)
                # A number's default is all zeros; a text's default is empty, and a text of zero bytes is no default.
                is_given = content if _WIRE[field.type] == LENGTH else content.strip(b"\0")
                if is_given or field.is_choice or field.type == _MESSAGE:
                    out.append(_tagged(field, content))
            elif _WIRE[field.type] == LENGTH:
                out += [_tagged(field, self._encoded(field, one)) for one in _listed(given)]
            elif packed := b"".join([self._encoded(field, one) for one in _listed(given)]):
                out.append(sized(field.number, packed))
        return b"".join(out)

    def _encoded(self, field: _Field, value: Value) -> bytes:
        """A value without its field's number and length."""
        kind = field.type
        if kind == _MESSAGE:
            assert isinstance(value, Mapping), f"{field.name} is a message"
            return self._write(field.of, value)
        if kind == _STRING:
            return str(value).encode()
        if kind == _BYTES:
            return base64.b64decode(str(value))
        if kind in (_DOUBLE, _FLOAT):
            assert isinstance(value, int | float), f"{field.name} is a number"
            return struct.pack("<d" if kind == _DOUBLE else "<f", value)
        if kind == _ENUM and isinstance(value, str):
            value = next(known for known, name in self._enums[field.of].items() if name == value)
        assert isinstance(value, int | str), f"{field.name} is a whole number"
        return number(int(value))

    def _is_map(self, field: _Field) -> bool:
        return field.is_repeated and field.type == _MESSAGE and self._messages[field.of].is_entry

    # -- descriptors ------------------------------------------------------------------------

    def _add(self, file: bytes) -> None:
        name, package = _text_in(file, 1), _text_in(file, 2)
        within = f"{package}." if package else ""
        services = []
        for key, _, start, end in fields(file, 0, len(file)):
            part = file[start:end]
            if key == 4:
                self._add_message(part, within, name)
            elif key == 5:
                self._add_enum(part, within, name)
            elif key == 6:
                service = within + _text_in(part, 1)
                services.append(service)
                self._file_of[service] = name
                for method in _parts(part, 2):
                    self._file_of[f"{service}.{_text_in(method, 1)}"] = name
        needs = tuple(part.decode() for part in _parts(file, 3))
        self.files[name] = File(name, file, needs, tuple(services))

    def _add_message(self, part: bytes, within: str, file: str) -> None:
        name = within + _text_in(part, 1)
        self._file_of[name] = file
        known = {}
        for one in _parts(part, 2):
            numbers = {key: start for key, wire, start, _ in fields(one, 0, len(one)) if wire == VARINT}
            field = _Field(
                _text_in(one, 1), numbers[3], numbers[5], numbers.get(4) == _REPEATED, _text_in(one, 6), 9 in numbers
            )
            known[field.number] = field
            self._file_of[f"{name}.{field.name}"] = file
        is_entry = any((7, VARINT, 1, 0) in fields(options, 0, len(options)) for options in _parts(part, 7))
        self._messages[f".{name}"] = _Message(known, is_entry)
        for nested in _parts(part, 3):
            self._add_message(nested, f"{name}.", file)
        for enum in _parts(part, 4):
            self._add_enum(enum, f"{name}.", file)

    def _add_enum(self, part: bytes, within: str, file: str) -> None:
        name = within + _text_in(part, 1)
        self._file_of[name] = file
        values = {}
        for one in _parts(part, 2):
            known = next((signed(start) for key, _, start, _ in fields(one, 0, len(one)) if key == 2), 0)
            values[known] = _text_in(one, 1)
        self._enums[f".{name}"] = values


@functools.cache
def protocol() -> Protocol:
    """The protocol of ``DESCRIPTORS``, which is read once."""
    return Protocol(DESCRIPTORS.read_bytes())


def _tagged(field: _Field, content: bytes) -> bytes:
    wire = _WIRE[field.type]
    return sized(field.number, content) if wire == LENGTH else number(field.number << 3 | wire) + content


def _listed(given: Value) -> list[Value]:
    assert isinstance(given, list | tuple), "the field is repeated"
    return list(given)


def _parts(message: bytes, field: int) -> list[bytes]:
    return [
        message[start:end]
        for key, wire, start, end in fields(message, 0, len(message))
        if key == field and wire == LENGTH
    ]


def _text_in(message: bytes, field: int) -> str:
    return next((part.decode() for part in _parts(message, field)), "")
