"""Tensors as texts and as bytes: JSON lists and KServe v2's binary layout, to numpy arrays and back.

Knows shapes and datatypes, no request. No memory is allocated for a shape before the values are counted. Sources: the
Open Inference Protocol's "Tensor Data" and its binary tensor extension (little-endian, row-major; a BYTES element is
its length as uint32 and its bytes).
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from inferd.errors import InvalidRequest
from inferd.predict.bounds import MAX_RANK, check_answered
from inferd.predict.codecs.reading import shown, wrong_input
from inferd.predict.contract import NUMPY, Array, object_array

MAX_PACKED: Final = 65_536


class _Kind(NamedTuple):
    """The JSON values of a datatype."""

    value: Any  # a type
    noun: str
    flat: msgspec.json.Decoder[list[Any]]


_ANY: Final = msgspec.json.Decoder()
_FLOAT: Final = _Kind(float, "numbers", msgspec.json.Decoder(list[float]))
_FLOAT_OR_NULL: Final = _Kind(float | None, "numbers or null", msgspec.json.Decoder(list[float | None]))
_INT: Final = _Kind(int, "whole numbers", msgspec.json.Decoder(list[int]))
_KINDS: Final[dict[str, _Kind]] = {
    "FP32": _FLOAT,
    "FP64": _FLOAT,
    **{name: _INT for name in NUMPY if "INT" in name},
    "BOOL": _Kind(bool, "true or false", msgspec.json.Decoder(list[bool])),
    "BYTES": _Kind(str, "texts", msgspec.json.Decoder(list[str])),
}
_OPENING: Final = re.compile(rb"[\s\[]*")
_UINT32: Final = struct.Struct("<I")


def num_elements(name: str, shape: Sequence[int]) -> int:
    """The product of a shape's dimensions. Raises InvalidRequest for an invalid shape."""
    if len(shape) > MAX_RANK:
        raise wrong_input(name, f"has {len(shape)} dimensions; at most {MAX_RANK} are expected")
    for size in shape:
        if not 0 <= size < 1 << 63:
            text = str(size) if size.bit_length() <= 64 else f"an integer of {size.bit_length()} bits"
            raise wrong_input(name, f"has a dimension of {text} in its shape; sizes from 0 are expected")
    return math.prod(shape)


def check_datatype(name: str, datatype: str) -> None:
    """Raises InvalidRequest for a word that is no datatype."""
    if datatype not in NUMPY:
        raise wrong_input(name, f"has the datatype {shown(datatype)}; expected one of {', '.join(NUMPY)}")


# -- JSON ----------------------------------------------------------------------------------------


def from_json(name: str, datatype: str, shape: list[int], data: bytes, *, is_base64: bool = False) -> Array:
    """The array of a JSON value: a flat list in row-major order, or lists nested as in ``shape``.

    null is NaN among floats. Raises InvalidRequest for another number of values, ragged lists, and values that the
    datatype cannot represent.
    """
    count = num_elements(name, shape)
    kind = _KINDS.get(datatype)
    if kind is None:
        check_datatype(name, datatype)
        raise wrong_input(name, f"is {datatype}, which has no form in JSON; send it as binary data (binary_data_size)")
    opening = _OPENING.match(data)
    depth = opening.group().count(b"[") if opening is not None else 0
    if depth == 0:
        raise wrong_input(name, f"has {_said(data)} as its data; a list of {_values(count)} is expected")
    try:
        values = _values_of(name, datatype, kind, shape, depth, data)
    except InvalidRequest:
        # Most lists of numbers have no null in them, and are read twice as fast as those that may.
        if kind is not _FLOAT or b"null" not in data:
            raise
        values = _values_of(name, datatype, _FLOAT_OR_NULL, shape, depth, data)
        values = [math.nan if value is None else value for value in values]
    if len(values) != count:
        raise wrong_input(
            name, f"is {datatype} of shape {_short(shape)}, which takes {_values(count)}; {len(values)} came"
        )
    return _array(name, datatype, values, is_base64=is_base64).reshape(shape)


def _values_of(name: str, datatype: str, kind: _Kind, shape: list[int], depth: int, data: bytes) -> list[Any]:
    if depth == 1:
        return _decoded(name, datatype, kind, kind.flat, data)
    return _flattened(name, datatype, kind, shape, depth, data)


def _decoded(name: str, datatype: str, kind: _Kind, decoder: msgspec.json.Decoder[list[Any]], data: bytes) -> list[Any]:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        said = str(error).replace("`$", "`data")[:200]
        raise wrong_input(name, f"is {datatype}, whose data are {kind.noun}: {said}") from None
    except (ValueError, RecursionError) as error:
        raise wrong_input(name, f"has data that is not valid JSON ({str(error)[:100]})") from None


def _flattened(name: str, datatype: str, kind: _Kind, shape: list[int], depth: int, data: bytes) -> list[Any]:
    """The values of nested lists, in row-major order. Raises InvalidRequest when they are not nested as in ``shape``;
    dimensions of one may be left out or added."""
    if depth > MAX_RANK:
        raise wrong_input(name, f"has data nested {depth} deep; at most {MAX_RANK} are expected")
    level = _decoded(name, datatype, kind, _nested(kind.value, depth), data)
    found = [len(level)]
    for _ in range(depth - 1):
        sizes = set(map(len, level))
        if len(sizes) > 1:
            raise wrong_input(name, f"has data nested in lists of different lengths ({min(sizes)} and {max(sizes)})")
        found.append(sizes.pop() if sizes else 0)
        level = list(chain.from_iterable(level))
    if level and [size for size in found if size != 1] != [size for size in shape if size != 1]:
        raise wrong_input(name, f"has the shape {_short(shape)}, and its data are nested as {_short(found)}")
    return level


_nested_decoders: Final[dict[tuple[Any, int], msgspec.json.Decoder[list[Any]]]] = {}


def _nested(value: Any, depth: int) -> msgspec.json.Decoder[list[Any]]:
    decoder = _nested_decoders.get((value, depth))
    if decoder is None:
        wanted: Any = value
        for _ in range(depth):
            wanted = list[wanted]
        decoder = _nested_decoders[value, depth] = msgspec.json.Decoder(wanted)
    return decoder


def _array(name: str, datatype: str, values: list[Any], *, is_base64: bool) -> Array:
    try:
        if datatype == "FP32":
            return _floats(values)
        if datatype == "BYTES":
            return object_array(
                [base64.b64decode(value, validate=True) if is_base64 else value.encode("utf-8") for value in values]
            )
        return np.array(values, NUMPY[datatype])
    except (OverflowError, struct.error):
        raise wrong_input(name, f"has a value that is out of the range of {datatype}") from None
    except UnicodeEncodeError:
        raise wrong_input(name, "has a text with half a surrogate pair, which has no bytes") from None
    except binascii.Error as error:
        raise wrong_input(name, f"has the content_type base64 and a text that is not base64 ({error})") from None


def _floats(values: list[float]) -> Array:
    """Finite numbers as float32. Raises OverflowError for one that it cannot hold."""
    if len(values) <= MAX_PACKED:  # the fastest way, which copies the list
        return np.frombuffer(struct.pack(f"<{len(values)}f", *values), np.float32)
    with np.errstate(over="ignore"):
        array = np.array(values, np.float64).astype(np.float32)
    if np.isinf(array).any():
        raise OverflowError
    return array


def to_json(name: str, datatype: str, array: Array) -> list[object]:
    """The flat list of an array's values. NaN becomes null when it is written, as it is read; infinities do as well.

    Raises InvalidRequest where JSON has no form for them, and for more of them than one answer may have.
    """
    check_answered(array.size)
    flat: list[object]
    if datatype == "BYTES":
        try:
            flat = [value.decode("utf-8") if isinstance(value, bytes) else str(value) for value in array.ravel()]
        except UnicodeDecodeError:
            raise InvalidRequest(
                f"The output {name!r} holds bytes that are not text, which JSON cannot carry; ask for it with the "
                "parameter binary_data: true.",
                param="outputs",
            ) from None
        return flat
    if datatype in ("FP16", "BF16"):
        raise InvalidRequest(
            f"The output {name!r} is {datatype}, which has no form in JSON; ask for it with the parameter "
            "binary_data: true.",
            param="outputs",
        )
    flat = array.ravel().tolist()
    return flat


# -- binary --------------------------------------------------------------------------------------


def from_bytes(name: str, datatype: str, shape: list[int], body: bytes, start: int, size: int) -> Array:
    """The array of ``size`` bytes at ``start``. Numbers are a read-only view of ``body``.

    Raises InvalidRequest when the size is not that of datatype and shape.
    """
    count = num_elements(name, shape)
    dtype = NUMPY.get(datatype)
    if dtype is None:
        check_datatype(name, datatype)
        raise AssertionError(datatype)
    if datatype == "BYTES":
        return object_array(_elements(name, shape, count, body, start, size)).reshape(shape)
    if count * dtype.itemsize != size:
        raise wrong_input(
            name,
            f"is {datatype} of shape {_short(shape)}, which takes {_digits(count * dtype.itemsize)} bytes; {size} came",
        )
    if size == 0:
        return np.zeros(shape, dtype)
    if datatype == "BOOL" and np.frombuffer(body, np.uint8, count, start).max() > 1:
        raise wrong_input(name, "is BOOL and has a byte that is neither 0 nor 1")
    array = np.frombuffer(body, dtype, count, start)
    if not array.flags.aligned:
        array = array.copy()
    return array.reshape(shape)


def _elements(name: str, shape: list[int], count: int, body: bytes, start: int, size: int) -> list[bytes]:
    if count * 4 > size:
        raise wrong_input(
            name,
            f"is BYTES of shape {_short(shape)}: {_digits(count)} elements and their lengths take at least "
            f"{_digits(count * 4)} bytes; {size} came",
        )
    found: list[bytes] = []
    at, end = start, start + size
    for index in range(count):
        if at + 4 > end:
            raise wrong_input(name, f"is BYTES of {count} elements and ends within the length of element {index}")
        (length,) = _UINT32.unpack_from(body, at)
        at += 4
        if at + length > end:
            raise wrong_input(
                name, f"is BYTES, and its element {index} has a length of {length} bytes; {end - at} are left of it"
            )
        found.append(body[at : at + length])
        at += length
    if at != end:
        raise wrong_input(name, f"is BYTES of {count} elements, behind which {end - at} bytes are left over")
    return found


def to_bytes(datatype: str, array: Array) -> bytes:
    """An array in the binary layout."""
    if datatype != "BYTES":
        return array.tobytes()
    parts: list[bytes] = []
    for value in array.ravel():
        element = value if isinstance(value, bytes) else str(value).encode("utf-8")
        parts += (_UINT32.pack(len(element)), element)
    return b"".join(parts)


# -- messages ------------------------------------------------------------------------------------


def _values(count: int) -> str:
    return "1 value" if count == 1 else f"{_digits(count)} values"


def _digits(count: int) -> str:
    return str(count) if count < 1 << 64 else f"more than 2**{count.bit_length() - 1}"


def _short(shape: list[int]) -> str:
    return str(list(shape)) if len(shape) <= 8 else f"{str(list(shape[:8]))[:-1]}, ...]"


def _said(data: bytes) -> str:
    """A JSON value that is no list, for messages."""
    try:
        value = _ANY.decode(data)
    except (ValueError, RecursionError):
        return "something"
    words = {dict: "an object", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return words.get(type(value), "null")
