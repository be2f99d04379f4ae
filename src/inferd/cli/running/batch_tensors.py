"""Tables for models that predict: columns to the inputs of KServe v2's infer, and its outputs to columns.

A column is the input of its name, by the contract that ``GET /v2/models/MODEL`` tells. Where the model has one input of
rows with several numbers, and no column has its name, all columns together are a row of it, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec

from inferd.cli.running.control import Server
from inferd.gateway.kserve.models import ModelMetadata, TensorMetadata

_BEGIN: Final = "/v2/models/"
_END: Final = "/infer"
_FEW: Final = 8  # names that an error lists
_encode: Final = msgspec.json.Encoder().encode

Bodies = Callable[[Mapping[str, Any]], dict[str, Any]]
"""The body of a request, from the cells of its row without ``custom_id``. Raises ValueError."""


def infers(endpoint: str) -> bool:
    return endpoint.startswith(_BEGIN) and endpoint.endswith(_END)


def infer_endpoint(model: str) -> str:
    return f"{_BEGIN}{model}{_END}"


def contract_of(server: Server, endpoint: str) -> ModelMetadata:
    """The inputs and outputs of the model that an endpoint names. Raises InferdError."""
    return server.get(quote(endpoint.removesuffix(_END)), ModelMetadata)


# -- inputs -----------------------------------------------------------------------------------


def tensor_bodies(contract: ModelMetadata) -> Bodies:
    """How rows become requests of a model."""
    inputs = {spec.name: spec for spec in contract.inputs}
    only = contract.inputs[0] if len(contract.inputs) == 1 else None

    def body(row: Mapping[str, Any]) -> dict[str, Any]:
        if only is not None and only.name not in row and len(only.shape) == 2 and only.datatype != "BYTES":
            width = only.shape[1]
            if width not in (-1, len(row)):
                raise ValueError(
                    f"has {len(row)} values, and the input {only.name!r} takes {width}; leave no cell empty, or name "
                    f"one column {only.name!r}, with JSON lists."
                )
            return {"inputs": [_input(only, [_value(only, name, cell) for name, cell in row.items()])]}
        unknown = [name for name in row if name not in inputs]
        if unknown or not row:
            known = ", ".join(f"{spec.name} ({spec.datatype} {list(spec.shape)})" for spec in contract.inputs[:_FEW])
            said = f"has the column {unknown[0]!r}, which is no input" if unknown else "has no inputs"
            raise ValueError(f"{said} of {contract.name}; name the columns as its inputs: {known}.")
        return {"inputs": [_input(inputs[name], _value(inputs[name], name, cell)) for name, cell in row.items()]}

    return body


def _value(spec: TensorMetadata, name: str, cell: Any) -> Any:
    """The value of a cell: JSON, or a text where the input has texts. Raises ValueError."""
    if not isinstance(cell, str) or (spec.datatype == "BYTES" and not cell.lstrip().startswith("[")):
        return cell
    try:
        return msgspec.json.decode(cell.encode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        if spec.datatype == "BYTES":
            return cell
        shown = cell if len(cell) <= 40 else cell[:40] + "..."
        raise ValueError(
            f"has {shown!r} in the column {name!r}, which is no {spec.datatype}; write a number, true, false or a JSON "
            "list of them."
        ) from None


def _input(spec: TensorMetadata, value: Any) -> dict[str, Any]:
    """One input with a row of its own, where the model takes rows."""
    if spec.shape and spec.shape[0] in (-1, 1):
        if len(spec.shape) == 2 and not isinstance(value, list):
            value = [value]
        value = [value]
    shape: list[int] = []
    inner = value
    while isinstance(inner, list):
        shape.append(len(inner))
        inner = inner[0] if inner else None
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape, "data": value}


# -- outputs ----------------------------------------------------------------------------------


def is_scalar(spec: TensorMetadata) -> bool:
    """Whether a row has one value of this output."""
    return len(spec.shape) <= 1 or all(size == 1 for size in spec.shape[1:])


def output_cells(body: Mapping[str, Any], outputs: Sequence[TensorMetadata]) -> list[Any]:
    """The cells of an answer: the value of an output that has one, else JSON; None: the answer has it not."""
    given = body.get("outputs")
    found = {one["name"]: one for one in given if "name" in one} if isinstance(given, list) else {}
    return [_cell(spec, found[spec.name]) if spec.name in found else None for spec in outputs]


def _cell(spec: TensorMetadata, output: Mapping[str, Any]) -> Any:
    flat = _flat(output.get("data"))
    if is_scalar(spec) and len(flat) == 1:
        return flat[0]
    shape = list(output.get("shape") or [len(flat)])
    return _encode(_nested(flat, shape[1:] if len(shape) > 1 and shape[0] == 1 else shape)).decode()


def _flat(data: Any) -> list[Any]:
    return [value for each in data for value in _flat(each)] if isinstance(data, list) else [data]


def _nested(flat: list[Any], shape: Sequence[int]) -> Any:
    if len(shape) < 2:
        return flat
    size = math.prod(shape[1:])
    return [_nested(flat[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]
