"""The limits of one request: its rows, and its values that cost memory each, by the model's contract.

The numbers of a binary tensor need no memory of their own, because the tensor is a view of the body. A number in JSON
or CSV is an object until it is in an array, and a text stays an object. So these values are counted, and refused before
they are read. Knows contracts and bytes; knows no dialect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferd.errors import InvalidRequest
from inferd.predict.contract import Contract
from inferd.types import TensorSpec

MAX_ROWS: Final = 65_536
"""Rows of one request where the settings name no number."""

MAX_TEXTS: Final = 2048
"""Rows that one request to a model of texts may have."""

MAX_ELEMENTS: Final = 1 << 22
"""Numbers of one request in JSON or CSV; a batch of the model's largest size is never refused for it."""

MAX_RANK: Final = 32
"""Dimensions of a tensor."""

MAX_ANSWERED: Final = 1 << 23
"""Values of one answer in JSON."""

MAX_EXTREMES: Final = 1 << 14
"""Numbers of one request in JSON whose exponent has three digits or more: near the ends of float64's range, one takes a
decoder up to 13 us, 400 times as long as another number."""

TEXT_WEIGHT: Final = 4
"""Numbers that cost about as much to read as one text, or as one list among nested ones."""

_SLACK: Final = 65_536  # values that are no tensor's: parameters, shapes, names; shorter bodies are not counted
_CHUNK_BYTES: Final = 1 << 20
_QUOTE, _COMMA, _LIST, _OBJECT = b'",[{'
_EXTREME: Final = re.compile(rb"[eE][+-]?[0-9]{3}")
_AS_ZEROS: Final = bytes.maketrans(b"123456789+E", b"0" * 9 + b"-e")  # what is looked for is found quickly in it


def bounded(contract: Contract, max_rows: int | None, batch_rows: int) -> Contract:
    """The contract with what one request may hold. ``batch_rows``: of the largest batch that is computed."""
    rows = max_rows or (MAX_TEXTS if contract.max_tokens else MAX_ROWS)
    batch = sum(batch_rows * _row(spec, contract) * _weight(spec) for spec in contract.inputs)
    return msgspec.structs.replace(contract, max_rows=rows, max_elements=max(MAX_ELEMENTS, batch))


def most_elements(spec: TensorSpec, contract: Contract) -> int:
    """Values that one request may have for the input, where each costs something."""
    is_open = spec.name in contract.any_rank or any(size < 0 for size in _sizes(spec, contract))
    if is_open and spec.datatype != "BYTES":
        return contract.max_elements
    rows = contract.max_rows if contract.max_batch_size or is_open else 1
    return min(rows * _row(spec, contract), contract.max_elements // _weight(spec))


def check_rows(name: str, rows: int, contract: Contract) -> None:
    """Raises InvalidRequest for more rows than one request may have."""
    if rows > contract.max_rows:
        raise InvalidRequest(
            f"The input {name[:64]!r} has {_digits(rows)} rows; this model takes at most {contract.max_rows} in one "
            "request (its setting max_rows). Send several requests.",
            param=f"inputs.{name[:64]}",
        )


def check_shape(name: str, datatype: str, shape: Sequence[int], contract: Contract, *, is_listed: bool) -> None:
    """Raises InvalidRequest for a shape of more rows or values than one request may have, before they are read.

    ``datatype`` is the client's. ``is_listed``: numbers are written one by one (JSON), as texts always are.
    """
    rows = shape[0] if contract.max_batch_size and shape else 0
    count = prod(shape) if len(shape) <= MAX_RANK else 0
    if rows <= contract.max_rows and count <= min(contract.max_rows, _SLACK):
        return
    if any(not 0 <= size < 1 << 63 for size in shape):
        return  # refused as no shape at all
    check_rows(name, rows, contract)
    is_text = datatype == "BYTES"
    if not is_text and not is_listed:
        return
    most = contract.max_elements // (TEXT_WEIGHT if is_text else 1)
    for spec in contract.inputs:
        if spec.name == name:
            most = min(most, most_elements(spec, contract))
    if count > most:
        raise InvalidRequest(
            f"The input {name[:64]!r} has {_digits(count)} values of {datatype}; this model takes at most {most} of "
            "them one by one in one request, by its shape and its setting max_rows. Send several requests"
            f"{'' if is_text else ', or binary data'}.",
            param=f"inputs.{name[:64]}",
        )


def check_values(body: bytes, contract: Contract) -> None:
    """Raises InvalidRequest for a JSON document with more values than any request to the model can need.

    Each value follows a comma or the bracket that opens its list or object, so counting these bytes is enough.
    """
    if len(body) <= _SLACK:
        return
    most_values, most_lists = most_in_json(contract)
    if body.count(b",") > most_values or body.count(b"[") + body.count(b"{") > most_lists:
        values, lists = _values_and_lists(body, most_values, most_lists)
        if values > most_values:
            raise _too_large(f"more than {most_values} values", contract)
        if lists > most_lists:
            raise _too_large(f"more than {most_lists} lists and objects", contract)
    if _num_extremes_at_most(body) > MAX_EXTREMES and _num_extremes(body) > MAX_EXTREMES:
        raise InvalidRequest(
            f"The body has more than {MAX_EXTREMES} numbers with an exponent of three digits, as in 1e-310; they take "
            "long to read. Round them, send several requests, or send numbers as binary data.",
            param="inputs",
        )


def most_in_table(contract: Contract, *, has_header: bool) -> tuple[int, int]:
    """The number of lines, and of cells, in the largest valid table of the model."""
    return contract.max_rows + has_header, most_in_json(contract)[0]


def too_large(num_rows: int, num_cells: int, contract: Contract) -> InvalidRequest:
    """The error of a table with more rows or cells, so far, than one request may have."""
    has_rows = f"more than {contract.max_rows} rows"
    return _too_large(has_rows if num_rows > contract.max_rows else f"{num_cells} values and more", contract)


def check_answer(rows: int, wanted: Sequence[str], contract: Contract) -> None:
    """Raises InvalidRequest when the answer for the rows, in JSON, would have more values than one answer may have."""
    each = sum(_row(spec, contract) for spec in contract.outputs if not wanted or spec.name in wanted)
    check_answered(rows * each)


def check_answered(count: int) -> None:
    """Raises InvalidRequest when an answer has more values than one answer may have."""
    if count > MAX_ANSWERED:
        raise InvalidRequest(
            f"The answer would hold {count} values; at most {MAX_ANSWERED} are sent in JSON. Ask for fewer rows or "
            "outputs, or for binary data.",
            param="outputs",
        )


def most_in_json(contract: Contract) -> tuple[int, int]:
    """The number of values, and of lists and objects, in the largest valid JSON request of the model."""
    values = lists = _SLACK + contract.max_rows  # a row may be an object, and have an index
    most_lists = contract.max_elements // TEXT_WEIGHT
    for spec in contract.inputs:
        values += most_elements(spec, contract)
        if spec.name in contract.any_rank:
            lists += most_lists
            continue
        sizes = _sizes(spec, contract)
        level = contract.max_rows if contract.max_batch_size else 1
        for size in sizes[:-1] if contract.max_batch_size else sizes:
            lists += 2 * min(level, most_lists)  # twice: each may be wrapped in a dimension of one
            level = most_lists if size < 0 else level * max(size, 1)
        lists += 2 * min(level, most_lists)
        if spec.datatype == "BYTES":
            lists += most_elements(spec, contract)  # bytes are objects: {"b64": ...}
    if contract.max_tokens:
        values += contract.max_elements  # token ids in the place of texts
    return values, lists


def _sizes(spec: TensorSpec, contract: Contract) -> tuple[int, ...]:
    """The dimensions of one row."""
    return spec.shape[1:] if contract.max_batch_size else spec.shape


def _row(spec: TensorSpec, contract: Contract) -> int:
    """Values of one row as far as the contract fixes them."""
    return prod(max(size, 1) for size in _sizes(spec, contract))


def _weight(spec: TensorSpec) -> int:
    return TEXT_WEIGHT if spec.datatype == "BYTES" else 1


def _values_and_lists(body: bytes, most_values: int, most_lists: int) -> tuple[int, int]:
    """Commas, and opening brackets, that are no part of a string; no further than to one of the limits."""
    values = lists = 0
    for outside in _outside_strings(body):
        values += int(np.count_nonzero(outside == _COMMA))
        lists += int(np.count_nonzero((outside == _LIST) | (outside == _OBJECT)))
        if values > most_values or lists > most_lists:
            break
    return values, lists


def _num_extremes_at_most(body: bytes) -> int:
    """The numbers with a long exponent, or more: what looks like them inside of strings counts as well."""
    num_letters = body.count(b"e") + body.count(b"E")  # most documents have few, and are searched no further
    if num_letters <= MAX_EXTREMES:
        return num_letters
    zeros = body.translate(_AS_ZEROS)
    return zeros.count(b"e000") + zeros.count(b"e-000")


def _num_extremes(body: bytes) -> int:
    """The numbers with a long exponent, no further than to their limit; one that two chunks share may be left out."""
    count = 0
    for outside in _outside_strings(body):
        count += len(_EXTREME.findall(outside.tobytes()))
        if count > MAX_EXTREMES:
            break
    return count


def _outside_strings(body: bytes) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a document that are no part of a string, in chunks."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    is_inside = False
    for begin in range(0, len(plain), _CHUNK_BYTES):
        chunk = np.frombuffer(plain, np.uint8, min(_CHUNK_BYTES, len(plain) - begin), begin)
        inside = np.cumsum(chunk == _QUOTE, dtype=np.uint8) & 1 != is_inside  # modulo 256 keeps even and odd
        yield chunk[~inside]
        is_inside = bool(inside[-1])


def _too_large(has: str, contract: Contract) -> InvalidRequest:
    inputs = ", ".join(f"{spec.name!r} {spec.datatype} {list(spec.shape)}" for spec in contract.inputs[:8])
    return InvalidRequest(
        f"The body has {has}, which is more than this model can take in one request: {inputs}, of at most "
        f"{contract.max_rows} rows (its setting max_rows) and {contract.max_elements} values. Send several requests, "
        "or numbers as binary data.",
        param="inputs",
    )


def _digits(count: int) -> str:
    return str(count) if count < 1 << 64 else f"more than 2**{count.bit_length() - 1}"
