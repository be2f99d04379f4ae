"""The fields of a protobuf message in a mapped file, read within the file's bounds.

The wire format: https://protobuf.dev/programming-guides/encoding/. Knows no message's meaning.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Final, NamedTuple

from inferd.registry.content import varint

_MAX_TEXT_BYTES: Final = 65536


class Field(NamedTuple):
    """One field: its number, its wire type, and the place of its bytes."""

    number: int
    wire: int
    value: int  # of a varint
    begin: int
    end: int


class Malformed(ValueError):
    """Bytes that are no protobuf of the expected kind."""


class Wire:
    """A mapped file as protobuf fields. All methods raise Malformed for bytes that do not fit."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data

    def fields(self, begin: int, end: int) -> Iterator[Field]:
        """The fields between two places."""
        data, at = self.data, begin
        while at < end:
            key, at = varint(data, at)
            number, wire, value = key >> 3, key & 7, 0
            start = at
            if at < 0:
                raise Malformed("a field is cut off")
            if wire == 0:
                value, at = varint(data, at)
            elif wire == 1:
                at += 8
            elif wire == 5:
                at += 4
            elif wire == 2:
                length, start = varint(data, at)
                at = start + length if start >= 0 else -1
            else:
                raise Malformed(f"there is no field of the kind {wire}")
            if number == 0 or at < 0 or at > end:
                raise Malformed("a field is longer than the file")
            yield Field(number, wire, value, start, at)

    def raw(self, field: Field) -> bytes:
        """The bytes of a field."""
        if field.wire != 2:
            raise Malformed("a text is missing")
        return self.data[field.begin : field.end]

    def text(self, field: Field) -> str:
        """The text of a field, at most 64 KiB. Raises UnicodeDecodeError."""
        if field.end - field.begin > _MAX_TEXT_BYTES:
            raise Malformed("a name is too long")
        return self.raw(field).decode()

    def named(self, field: Field, number: int) -> str:
        """The text of one field of a message; empty when the field is missing."""
        return next((self.text(sub) for sub in self.fields(field.begin, field.end) if sub.number == number), "")

    def varints(self, field: Field) -> Iterator[int]:
        """The numbers of a repeated field, packed or one by one."""
        if field.wire == 0:
            yield field.value
            return
        at = field.begin
        while 0 <= at < field.end:
            value, at = varint(self.data, at)
            yield value


def signed(value: int) -> int:
    """A varint as a two's complement number of 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
