"""KServe v2's parameters as protobuf: the entries of a ``map<string, InferParameter>``.

Knows no tensor, because the gateway's process reads parameters with it too.
"""

from __future__ import annotations

import struct
from typing import Final

from inferd.protowire import FIXED64, LENGTH, VARINT, fields, number, signed, sized, text

Value = bool | int | str | float | None

_MAX_FIELDS: Final = 16  # of an entry, and of its value: a key, a value, one choice; and some that are not known


def parameter(body: bytes, start: int, end: int) -> tuple[str, Value]:
    """An entry of a map of InferParameters; None: its value is none."""
    key, content = "", b""
    for field, wire, at, stop in fields(body, start, end, _MAX_FIELDS):
        if wire == LENGTH and field == 1:
            key = text(body, at, stop)
        elif wire == LENGTH and field == 2:
            content += body[at:stop]
    found: Value = None
    for field, wire, at, stop in fields(content, 0, len(content), _MAX_FIELDS):
        if wire == VARINT and field == 1:
            found = at != 0
        elif wire == VARINT and field == 2:
            found = signed(at)
        elif wire == VARINT and field == 5:
            found = at
        elif wire == LENGTH and field == 3:
            found = text(content, at, stop)
        elif wire == FIXED64 and field == 4:
            (found,) = struct.unpack_from("<d", content, at)
    return key, found


def parameter_entry(key: str, value: object) -> bytes:
    """An entry of a map of InferParameters."""
    if isinstance(value, bool):
        choice = b"\x08" + number(int(value))
    elif isinstance(value, int):
        choice = (b"\x10" if value < 1 << 63 else b"\x28") + number(value)  # int64, uint64
    elif isinstance(value, float):
        choice = b"\x21" + struct.pack("<d", value)
    else:
        choice = sized(3, str(value).encode())
    return sized(1, key.encode()) + sized(2, choice)
