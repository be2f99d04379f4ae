"""KServe v1 (``:predict``), which is TensorFlow Serving's REST API: instances in rows, or inputs in columns.

Source: KServe's data plane v1, TensorFlow Serving's RESTful API. Knows no tensor layout (``values``).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inferd.errors import InvalidRequest
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.reading import read
from inferd.predict.codecs.values import (
    array_of,
    fitted,
    is_bytes,
    named_inputs,
    nested,
    only_input,
    rows_of,
    wanted_outputs,
)
from inferd.predict.contract import Array, Contract
from inferd.predict.runtime import Result
from inferd.types import ModelInfo, Prediction, PredictRequest

DEFAULT_SIGNATURE: Final = "serving_default"


class WireRequest(msgspec.Struct, forbid_unknown_fields=True):
    instances: list[Any] | msgspec.UnsetType = msgspec.UNSET
    inputs: Any = msgspec.UNSET
    signature_name: str | msgspec.UnsetType | None = msgspec.UNSET
    parameters: dict[str, str | int | float | bool | None] | msgspec.UnsetType | None = msgspec.UNSET


_decoder: Final = msgspec.json.Decoder(WireRequest)
_encode: Final = msgspec.json.Encoder().encode


class V1Codec:
    """Dialect ``v1``. ``form` of its decoded requests is whether the answer is in columns."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        wire = read(request.body, _decoder, contract)
        if wire.signature_name and wire.signature_name != DEFAULT_SIGNATURE:
            raise InvalidRequest(
                f"signature_name must be {DEFAULT_SIGNATURE!r}, the only one there is, not "
                f"{wire.signature_name[:64]!r}.",
                param="signature_name",
            )
        in_columns = wire.inputs is not msgspec.UNSET
        if in_columns == (wire.instances is not msgspec.UNSET):
            raise InvalidRequest("The body needs either instances or inputs; send one of them.", param="instances")
        if in_columns:
            inputs = columns(wire.inputs, contract)
        else:
            assert isinstance(wire.instances, list)
            inputs = instances(wire.instances, contract)
        parameters = wire.parameters if isinstance(wire.parameters, dict) else {}
        return DecodedRequest(
            inputs=inputs,
            wanted=wanted_outputs(contract),
            parameters=parameters,
            is_json_answer=True,
            form=in_columns,
        )

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        outputs = nested(result, decoded.wanted, info)
        if not decoded.form:
            return Prediction(_encode({"predictions": rows_of(outputs, info)}))
        return Prediction(_encode({"outputs": next(iter(outputs.values())) if len(outputs) == 1 else outputs}))


def instances(rows: list[Any], contract: Contract) -> dict[str, Array]:
    """The inputs of rows: each a value, or an object with a value for each input. Raises InvalidRequest."""
    if not rows:
        raise InvalidRequest("instances is empty; send at least one.", param="instances")
    if not isinstance(rows[0], dict) or is_bytes(rows[0]):
        spec = only_input(contract, "instances")
        return {spec.name: fitted(spec, array_of(spec, rows), contract)}
    names = rows[0].keys()
    for place, row in enumerate(rows):
        if not isinstance(row, dict) or row.keys() != names:
            raise InvalidRequest(
                f"instances[{place}] has other fields than instances[0]; every instance needs the same inputs.",
                param=f"instances[{place}]",
            )
    return named_inputs(contract, {name: [row[name] for row in rows] for name in names}, "instances")


def columns(value: object, contract: Contract) -> dict[str, Array]:
    """The inputs of columns: an object with an array for each input, or the only input's. Raises InvalidRequest."""
    if isinstance(value, dict) and not is_bytes(value):
        return named_inputs(contract, value, "inputs")
    spec = only_input(contract, "inputs")
    return {spec.name: fitted(spec, array_of(spec, value), contract)}
