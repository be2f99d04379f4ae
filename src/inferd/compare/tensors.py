"""The numbers in the bytes of tensors, by KServe v2's datatypes, and the outputs of its two binary answers. Pure.

Sources: KServe v2's binary tensor data extension, and its ``inference.proto``. Reads with the standard library alone,
because the gateway's process computes no arrays.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec

from inferd.compare.answers import Label, Numbers, Part
from inferd.protowire import LENGTH, VARINT, fields, varint

_FORMATS: Final = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_REAL: Final = frozenset(("FP16", "BF16", "FP32", "FP64"))


class UnreadableAnswer(Exception):
    """The bytes are no answer of the form that was expected."""


def tensor_part(name: str, datatype: str, shape: tuple[int, ...], data: bytes) -> Part:
    """The part for a tensor's little-endian bytes. Raises UnreadableAnswer."""
    try:
        if datatype == "BYTES":
            return Label(name, "\n".join(_elements(data)))
        return Numbers(name, numbers_of(datatype, data), shape, datatype not in _REAL)
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise UnreadableAnswer(f"The output {name[:64]!r} is no {datatype[:16]}: {error}") from None


def numbers_of(datatype: str, data: bytes) -> list[float]:
    """The values of a tensor. Raises KeyError for an unknown datatype, and struct.error."""
    if datatype == "BF16":  # the upper half of a float32
        widened = bytearray(2 * len(data))
        widened[2::4], widened[3::4] = data[0::2], data[1::2]
        return numbers_of("FP32", bytes(widened))
    code = _FORMATS[datatype]
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def _elements(data: bytes) -> list[str]:
    """The texts of BYTES: each a length of 32 bits and so many bytes."""
    found, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        element = data[at + 4 : at + 4 + size]
        if len(element) < size:
            raise struct.error(f"an element of {size} bytes has {len(element)}")
        found.append(element.decode("utf-8", "backslashreplace"))
        at += 4 + size
    return found


def binary_outputs(body: bytes, header_bytes: int) -> list[Part]:
    """The outputs of a KServe v2 answer whose first ``header_bytes`` are JSON, and whose rest is data. Raises
    UnreadableAnswer."""
    found: list[Part] = []
    at = header_bytes
    try:
        outputs: list[dict[str, Any]] = msgspec.json.decode(body[:header_bytes])["outputs"]
        for output in outputs:
            size = output.get("parameters", {}).get("binary_data_size")
            name, datatype, shape = output["name"], output["datatype"], tuple(output["shape"])
            if size is None:
                found.append(listed_part(name, datatype, shape, output["data"]))
                continue
            data = body[at : at + size]
            if len(data) < size:
                raise UnreadableAnswer(f"The output {name[:64]!r} of {size} bytes has {len(data)}.")
            found.append(tensor_part(name, datatype, shape, data))
            at += size
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
        raise UnreadableAnswer(f"The answer is not in KServe v2's binary form: {error!r}") from None
    return found


def listed_part(name: str, datatype: str, shape: tuple[int, ...], data: list[Any]) -> Part:
    """The part for a tensor whose values are listed in JSON."""
    values = flattened(data)
    if datatype == "BYTES" or not all(isinstance(value, int | float) for value in values):
        return Label(name, "\n".join(map(str, values)))
    return Numbers(name, values, shape, datatype not in _REAL)


def flattened(data: Any) -> list[Any]:
    """The values of lists within lists, in their order."""
    if not isinstance(data, list):
        return [data]
    if not any(isinstance(entry, list) for entry in data):
        return data
    return [value for entry in data for value in flattened(entry)]


def grpc_outputs(body: bytes) -> list[Part]:
    """The outputs of a ``ModelInferResponse`` with raw contents. Raises UnreadableAnswer, InvalidRequest."""
    described: list[tuple[str, str, tuple[int, ...]]] = []
    raws: list[bytes] = []
    for number, wire, start, end in fields(body, 0, len(body)):
        if number == 5 and wire == LENGTH:
            described.append(_described(body, start, end))
        elif number == 6 and wire == LENGTH:
            raws.append(body[start:end])
    if len(described) != len(raws):
        raise UnreadableAnswer(f"The answer has {len(described)} outputs and the contents of {len(raws)}.")
    return [tensor_part(*output, raw) for output, raw in zip(described, raws, strict=True)]


def _described(body: bytes, start: int, end: int) -> tuple[str, str, tuple[int, ...]]:
    name = datatype = ""
    shape: list[int] = []
    for number, wire, first, last in fields(body, start, end):
        if number == 1 and wire == LENGTH:
            name = body[first:last].decode()
        elif number == 2 and wire == LENGTH:
            datatype = body[first:last].decode()
        elif number == 3 and wire == VARINT:
            shape.append(first)
        elif number == 3 and wire == LENGTH:
            while first < last:
                size, first = varint(body, first, last)
                shape.append(size)
    return name, datatype, tuple(shape)
