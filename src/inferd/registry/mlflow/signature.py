"""The signature in an MLmodel: the contract of a model that gives none itself, and a check of one that does.

A signature is a list of columns or a list of tensors, as JSON text (mlflow/types/schema.py). Numbers of another width
are no contradiction, because MLflow's own servers convert them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from inferd.errors import ModelLoadError
from inferd.registry.signature import Signature
from inferd.types import TensorSpec

_MAX_TENSORS: Final = 4096
_DTYPES: Final[Mapping[str, str]] = {
    "float32": "FP32", "float64": "FP64", "float16": "FP16", "int8": "INT8", "int16": "INT16", "int32": "INT32",
    "int64": "INT64", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "bool": "BOOL",
    "object": "BYTES", "str": "BYTES", "bytes": "BYTES",
}  # fmt: skip
_NUMBERS: Final = frozenset({"double", "float", "integer", "long", "boolean"})


class _TensorType(msgspec.Struct):
    dtype: str
    shape: list[int]


class _Element(msgspec.Struct):
    """A column or a tensor."""

    type: Any = None  # a word; for arrays and objects a nested form
    name: Any = None
    tensor: _TensorType | None = msgspec.field(name="tensor-spec", default=None)
    required: bool = True
    optional: bool = False


class Declared(msgspec.Struct, frozen=True):
    """One side of a signature: tensors, or columns of a table."""

    tensors: tuple[TensorSpec, ...] = ()  # an unnamed one has an empty name
    num_numbers: int = 0  # columns of numbers
    num_others: int = 0  # columns of texts, times, arrays

    @property
    def is_table(self) -> bool:
        return not self.tensors and self.num_numbers + self.num_others > 0


def declared_inputs(signature: Mapping[str, Any], shown: str) -> Declared:
    """The inputs of a signature; nothing where it has none. Raises ModelLoadError for a broken one."""
    text = signature.get("inputs")
    if text is None:
        return Declared()
    try:
        elements = msgspec.json.decode(text if isinstance(text, str) else b"", type=list[_Element])
        if len(elements) > _MAX_TENSORS:
            raise msgspec.ValidationError(f"{len(elements)} inputs")
        tensors = tuple(_spec(one) for one in elements if one.tensor is not None)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelLoadError(
            f"The signature in the MLmodel of {shown} cannot be read ({str(error)[:100]}); log the model again.",
            param="source",
        ) from None
    columns = [one for one in elements if one.tensor is None]
    numbers = sum(1 for one in columns if isinstance(one.type, str) and one.type in _NUMBERS)
    return Declared(tensors, numbers, len(columns) - numbers)


def check_against(declared: Declared, model: Signature, shown: str) -> None:
    """Raises ModelLoadError where the signature and the file of the model contradict each other: the file is not the
    one that was logged, or the signature is wrong."""
    problem = ""
    if declared.is_table:
        problem = _table_problem(declared, model.inputs)
    elif declared.tensors:
        problem = _tensor_problem(declared.tensors, model.inputs)
    if problem:
        raise ModelLoadError(
            f"The signature in the MLmodel of {shown} does not fit its model: {problem}. Log the model again with its "
            "own signature.",
            param="source",
            code="mlflow_signature",
        )


def script_inputs(declared: Declared) -> dict[str, str]:
    """``options.inputs`` for a script, which has no shapes of its own; empty where the signature has no names."""
    if not all(spec.name for spec in declared.tensors):
        return {}
    return {spec.name: f"{spec.datatype} {list(spec.shape)}" for spec in declared.tensors}


def _spec(one: _Element) -> TensorSpec:
    assert one.tensor is not None
    datatype = _DTYPES.get(one.tensor.dtype)
    if datatype is None or len(one.tensor.shape) > 32 or any(size < -1 for size in one.tensor.shape):
        raise msgspec.ValidationError(f"the tensor {one.tensor.dtype[:32]} {one.tensor.shape[:32]}")
    name = one.name if isinstance(one.name, str) else ""
    return TensorSpec(name[:256], datatype, tuple(one.tensor.shape), one.optional or not one.required)


def _table_problem(declared: Declared, inputs: Sequence[TensorSpec]) -> str:
    """Tables are compared where the model takes one block of numbers; columns by name are the model's own matter."""
    if declared.num_others or len(inputs) != 1 or len(inputs[0].shape) != 2 or inputs[0].shape[1] == -1:
        return ""
    if declared.num_numbers != inputs[0].shape[1]:
        return f"it has {declared.num_numbers} columns, and the model takes {inputs[0].shape[1]}"
    return ""


def _tensor_problem(tensors: Sequence[TensorSpec], inputs: Sequence[TensorSpec]) -> str:
    by_name = {spec.name: spec for spec in inputs}
    is_named = all(spec.name in by_name for spec in tensors)
    required = [spec for spec in inputs if not spec.is_optional]
    if len(tensors) > len(inputs) or (not is_named and len(tensors) != len(required)):
        names = ", ".join(by_name)
        return f"it has {len(tensors)} inputs, and the model takes {names or 'none'}"
    pairs = [(one, by_name[one.name]) for one in tensors] if is_named else list(zip(tensors, required, strict=True))
    for one, spec in pairs:
        called = one.name or spec.name
        if one.name and not is_named and any(other.name for other in inputs):
            return f"it names the input {one.name!r}, and the model has {', '.join(by_name)}"
        if _family(one.datatype) != _family(spec.datatype):
            return f"{called} is {one.datatype}, and the model's {spec.name} is {spec.datatype}"
        fits = len(one.shape) == len(spec.shape) and all(
            -1 in (said, has) or said == has for said, has in zip(one.shape, spec.shape, strict=True)
        )
        if not fits:
            return f"{called} has the shape {list(one.shape)}, and the model's {spec.name} {list(spec.shape)}"
    return ""


def _family(datatype: str) -> str:
    return datatype if datatype in ("BOOL", "BYTES") else datatype.rstrip("0123456789").removeprefix("B").lstrip("U")
