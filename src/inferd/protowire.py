"""Protocol buffers' wire format, as much as the server needs: fields in, fields out, nothing copied on the way.

Knows tags, varints and lengths (protobuf.dev/programming-guides/encoding); knows no message. A tensor of a request
is a slice of its bytes, and the parts of the request that no caller asks for are stepped over. What google.protobuf
refuses to read is refused here as well; a fuzz test in ``tests/predict`` compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

from inferd.errors import InvalidRequest

VARINT: Final = 0
FIXED64: Final = 1
LENGTH: Final = 2
_GROUP: Final = 3
_END_GROUP: Final = 4
FIXED32: Final = 5

_MAX_DEPTH: Final = 100  # of groups within groups, which no client sends
_TAG_BYTES: Final = 5  # of 32 bits; more would be padding zeros, which google.protobuf refuses
_ALL_64: Final = (1 << 64) - 1

Field = tuple[int, int, int, int]
"""Number, wire type, and for a varint its value and 0; for everything else where its bytes begin and end."""


def fields(body: bytes, start: int, end: int, most: int = sys.maxsize) -> list[Field]:
    """The fields of the message in ``body[start:end]``, in the order in which they came, groups left out.

    Reading stops at the field after the first ``most``; those within groups count. Raises InvalidRequest where that is
    no message, or one of more fields.
    """
    found: list[Field] = []
    at, left = start, most
    while at < end:
        if left <= 0:
            raise _too_many(most)
        left -= 1
        tag = body[at]
        at += 1
        if tag >= 128:
            began = at - 1
            tag, at = varint(body, began, end)
            if tag >= 1 << 32 or at - began > _TAG_BYTES:
                raise broken(at, "a field's tag has more than 32 bits")
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise broken(at, "there is no field 0")
        if wire == LENGTH:
            if at >= end:
                raise broken(at, "it ends within a field")
            size = body[at]
            at += 1
            if size >= 128:
                size, at = varint(body, at - 1, end)
            stop = at + size
            if stop > end:
                raise broken(at, f"a field of {size} bytes has {end - at}")
            found.append((number, LENGTH, at, stop))
            at = stop
        elif wire == VARINT:
            value, at = varint(body, at, end)
            found.append((number, VARINT, value, 0))
        elif wire in (FIXED32, FIXED64):
            stop = at + (4 if wire == FIXED32 else 8)
            if stop > end:
                raise broken(at, "it ends within a number")
            found.append((number, wire, at, stop))
            at = stop
        elif wire == _GROUP:
            at, left = _skip_group(body, at, end, number, left)
            if left < 0:
                raise _too_many(most)
        else:
            raise broken(at, f"there is no wire type {wire} here")
    return found


def varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """The number that begins at ``at``, and where it ends."""
    value = shift = 0
    while at < end:
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & _ALL_64, at
        shift += 7
        if shift == 70:
            raise broken(at, "a number has more than ten bytes")
    raise broken(at, "it ends within a number")


def _skip_group(body: bytes, at: int, end: int, number: int, left: int) -> tuple[int, int]:
    """Where the group ends, and how many of the ``left`` fields remain; less than 0: it has more, and goes on."""
    open_groups = [number]
    while open_groups and left >= 0:
        left -= 1
        began = at
        tag, at = varint(body, began, end)
        if tag >= 1 << 32 or tag < 8 or at - began > _TAG_BYTES:
            raise broken(at, "a field's tag is none")
        number, wire = tag >> 3, tag & 7
        if wire == _GROUP:
            open_groups.append(number)
            if len(open_groups) > _MAX_DEPTH:
                raise broken(at, f"groups are nested more than {_MAX_DEPTH} deep")
        elif wire == _END_GROUP:
            if open_groups.pop() != number:
                raise broken(at, "a group ends that did not begin")
        elif wire == VARINT:
            _, at = varint(body, at, end)
        elif wire == LENGTH:
            size, at = varint(body, at, end)
            at += size
        elif wire in (FIXED32, FIXED64):
            at += 4 if wire == FIXED32 else 8
        else:
            raise broken(at, f"there is no wire type {wire}")
        if at > end:
            raise broken(at, "it ends within a group")
    return at, left


def _too_many(most: int) -> InvalidRequest:
    return InvalidRequest(
        f"The request has a message of more than {most} fields; send fewer, and tensors as raw_input_contents.",
        code="too_many_fields",
    )


def broken(at: int, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"The request is no protobuf message of this call: {why} (at byte {at}); send a ModelInferRequest.",
        code="invalid_protobuf",
    )


def text(body: bytes, start: int, end: int) -> str:
    try:
        return str(body[start:end], "utf-8")
    except UnicodeDecodeError:
        raise broken(start, "a text is not UTF-8") from None


def signed(value: int) -> int:
    """An int64 from its varint."""
    return value - (1 << 64) if value >= 1 << 63 else value


# -- writing -------------------------------------------------------------------------------------


def number(value: int) -> bytes:
    """A varint; negative numbers have ten bytes, as in int64."""
    if 0 <= value < 128:
        return _ONE_BYTE[value]
    value &= _ALL_64
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


_ONE_BYTE: Final = tuple(bytes((value,)) for value in range(128))


def sized(field: int, content: bytes) -> bytes:
    """A field of bytes, a text or a message."""
    return number(field << 3 | LENGTH) + number(len(content)) + content


def head(field: int, size: int) -> bytes:
    """What goes before the ``size`` bytes of such a field, where these are written without a copy."""
    return number(field << 3 | LENGTH) + number(size)


def packed(field: int, values: Iterable[int]) -> bytes:
    """A repeated field of varints; nothing for no values."""
    content = b"".join([number(value) for value in values])
    return sized(field, content) if content else b""
