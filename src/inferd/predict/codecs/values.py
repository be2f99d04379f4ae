"""Values without a declared shape: nested JSON to arrays by the model's inputs, and arrays to nested JSON.

The common part of the dialects without datatypes and shapes (KServe v1, MLflow). Knows contracts, no request.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from inferd.errors import InvalidRequest
from inferd.predict.bounds import MAX_RANK, check_answered, check_rows
from inferd.predict.codecs.reading import shown
from inferd.predict.codecs.tensors import to_json
from inferd.predict.contract import Array, Contract, datatype_of, object_array, widened
from inferd.predict.runtime import Result
from inferd.types import ModelInfo, TensorSpec

_B64: Final = "b64"
_FLOATS: Final = frozenset(("FP16", "BF16", "FP32", "FP64"))
_LABELS: Final = ("label", "output_label")  # scikit-learn's word for the class it decides for, beside probabilities


def array_of(spec: TensorSpec, value: object) -> Array:
    """The array of a number, a text, bytes as ``{"b64": ...}``, or lists of them nested alike.

    Of the datatype that the values have; the contract's check casts it. null is NaN where the input has floats.
    Raises InvalidRequest.
    """
    shape: list[int] = []
    level: list[Any] = [value]
    while set(map(type, level)) == {list}:
        sizes = set(map(len, level))
        if len(sizes) > 1:
            raise _wrong(spec, f"has lists of different lengths ({min(sizes)} and {max(sizes)})")
        shape.append(sizes.pop())
        if len(shape) > MAX_RANK:
            raise _wrong(spec, f"is nested more than {MAX_RANK} deep")
        level = list(chain.from_iterable(level))
    return _leaves(spec, level).reshape(shape)


def _leaves(spec: TensorSpec, leaves: list[Any]) -> Array:
    kinds = set(map(type, leaves))
    if spec.datatype == "BYTES":
        if not kinds <= {str, dict}:
            raise _wrong(spec, f"takes texts, and got {_named(kinds - {str, dict})}")
        return object_array([leaf.encode() if type(leaf) is str else _unpacked(spec, leaf) for leaf in leaves])
    if not leaves:
        return np.zeros(0, np.float64)
    if kinds == {bool}:
        return np.array(leaves, np.bool_)
    if type(None) in kinds and spec.datatype in _FLOATS:
        leaves = [float("nan") if leaf is None else leaf for leaf in leaves]
        kinds = (kinds - {type(None)}) | {float}
    if not kinds <= {int, float, bool} or (bool in kinds and spec.datatype == "BOOL"):
        raise _wrong(spec, f"takes {spec.datatype}, and got {_named(kinds)}")
    try:
        return np.array(leaves, np.float64 if float in kinds or spec.datatype in _FLOATS else _integers(leaves))
    except OverflowError:
        raise _wrong(spec, "has a whole number of more than 64 bits") from None


def _integers(leaves: Sequence[int]) -> type[np.generic]:
    return np.uint64 if max(leaves) > np.iinfo(np.int64).max else np.int64


def _unpacked(spec: TensorSpec, leaf: dict[str, object]) -> bytes:
    text = leaf.get(_B64)
    if len(leaf) != 1 or not isinstance(text, str):
        raise _wrong(spec, 'takes texts, or bytes as {"b64": "..."}, and got another object')
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong(spec, f"has a b64 that is not base64 ({error})") from None


def is_bytes(value: object) -> bool:
    """Whether it is one value rather than an object of several."""
    return isinstance(value, dict) and value.keys() == {_B64}


def fitted(spec: TensorSpec, array: Array, contract: Contract) -> Array:
    """The array with as many dimensions as the input has, if that needs only a dimension of one.

    Raises InvalidRequest for more rows than one request may have.
    """
    if contract.max_batch_size and array.ndim:
        check_rows(spec.name, len(array), contract)
    if spec.name in contract.any_rank:
        return array
    wanted = len(spec.shape)
    if array.ndim == wanted + 1 and array.shape[0] == 1 and contract.max_batch_size == 0:
        return array.reshape(array.shape[1:])
    if array.ndim == wanted - 1 and spec.shape[-1] in (1, -1) and (contract.max_batch_size > 0 or wanted == 1):
        return np.expand_dims(array, -1)
    return array


def only_input(contract: Contract, param: str) -> TensorSpec:
    """The input that values without a name belong to. Raises InvalidRequest."""
    required = [spec for spec in contract.inputs if not spec.is_optional]
    if len(required) == 1:
        return required[0]
    if len(contract.inputs) == 1:
        return contract.inputs[0]
    names = ", ".join(spec.name for spec in contract.inputs)
    raise InvalidRequest(
        f"This model has {len(contract.inputs)} inputs ({names}); send an object with their names in {param}.",
        param=param,
    )


def named_inputs(contract: Contract, values: Mapping[str, object], param: str) -> dict[str, Array]:
    """An array for each named input. Raises InvalidRequest."""
    specs = {spec.name: spec for spec in contract.inputs}
    inputs: dict[str, Array] = {}
    for name, value in values.items():
        spec = specs.get(name)
        if spec is None:
            raise InvalidRequest(
                f"There is no input {shown(name)}; this model has: {', '.join(specs)}.", param=f"{param}.{name[:64]}"
            )
        inputs[name] = fitted(spec, array_of(spec, value), contract)
    return inputs


def wanted_outputs(contract: Contract) -> tuple[str, ...]:
    """All outputs. Of a classifier with classes and probabilities only the classes, as in these dialects' own
    servers."""
    first = contract.outputs[0].name if contract.outputs else ""
    return (first,) if len(contract.outputs) > 1 and first in _LABELS else ()


def nested(result: Result, wanted: Sequence[str], info: ModelInfo) -> dict[str, object]:
    """The outputs that are wanted, or all, as nested lists. Half precision becomes float32. Raises InvalidRequest for
    bytes that are no text."""
    specs = {spec.name: spec for spec in info.outputs}
    found: dict[str, object] = {}
    for name in wanted or result.outputs:
        array, spec = result.outputs[name], specs.get(name)
        datatype = spec.datatype if spec is not None else datatype_of(array.dtype)
        check_answered(array.size)
        if datatype == "BYTES":
            found[name] = object_array(to_json(name, datatype, array)).reshape(array.shape).tolist()
        elif datatype == "BF16":
            found[name] = widened(array).tolist()
        else:
            found[name] = array.tolist()
    return found


def rows_of(outputs: Mapping[str, object], info: ModelInfo) -> list[object]:
    """One entry per row: the value of the only output, or an object of all of them. One entry, where the model's
    outputs have no rows."""
    has_rows = info.max_batch_size > 0 or all(spec.shape[:1] == (-1,) for spec in info.outputs)
    columns = [value for value in outputs.values() if isinstance(value, list)]
    if not has_rows or len(columns) < len(outputs) or len(set(map(len, columns))) != 1:
        return [next(iter(outputs.values())) if len(outputs) == 1 else dict(outputs)]
    if len(columns) == 1:
        return columns[0]
    return [dict(zip(outputs, row, strict=True)) for row in zip(*columns, strict=True)]


def _named(kinds: set[type]) -> str:
    words = {str: "texts", bool: "truth values", dict: "objects", list: "lists", int: "numbers", float: "numbers"}
    return " and ".join(sorted({words.get(kind, "null") for kind in kinds}))


def _wrong(spec: TensorSpec, what: str) -> InvalidRequest:
    return InvalidRequest(f"The input {spec.name!r} {what}.", param=f"inputs.{spec.name}")
