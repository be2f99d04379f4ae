"""``/invocations`` of MLflow and SageMaker: instances, inputs, or a data frame split or in records.

Source: MLflow's scoring server. The columns of a frame are the model's inputs by name, or the columns of its one input
in the frame's order. Knows no tensor layout (``values``).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inferd.errors import InvalidRequest
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.reading import read, shown
from inferd.predict.codecs.v1 import columns, instances
from inferd.predict.codecs.values import array_of, fitted, named_inputs, nested, only_input, rows_of, wanted_outputs
from inferd.predict.contract import Array, Contract
from inferd.predict.runtime import Result
from inferd.types import ModelInfo, Prediction, PredictRequest


class Frame(msgspec.Struct, forbid_unknown_fields=True):
    """A data frame as pandas' ``to_dict(orient="split")``."""

    data: list[list[Any]]
    columns: list[str | int] | msgspec.UnsetType | None = msgspec.UNSET
    index: list[Any] | msgspec.UnsetType | None = msgspec.UNSET


class WireRequest(msgspec.Struct, forbid_unknown_fields=True):
    dataframe_split: Frame | msgspec.UnsetType = msgspec.UNSET
    dataframe_records: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    instances: list[Any] | msgspec.UnsetType = msgspec.UNSET
    inputs: Any = msgspec.UNSET
    params: dict[str, str | int | float | bool | None] | msgspec.UnsetType | None = msgspec.UNSET


_FORMS: Final = ("dataframe_split", "dataframe_records", "instances", "inputs")
_decoder: Final = msgspec.json.Decoder(WireRequest)
_encode: Final = msgspec.json.Encoder().encode


class InvocationsCodec:
    """Dialect ``invocations``. ``form` of its decoded requests is whether the answer is in columns."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        wire = read(request.body, _decoder, contract)
        given = [name for name in _FORMS if getattr(wire, name) is not msgspec.UNSET]
        if len(given) != 1:
            raise InvalidRequest(
                f"The body needs one of {', '.join(_FORMS)}; got {', '.join(given) or 'none'}.",
                param=given[1] if given else _FORMS[0],
            )
        inputs: dict[str, Array]
        if isinstance(wire.dataframe_split, Frame):
            inputs = _split(wire.dataframe_split, contract)
        elif isinstance(wire.dataframe_records, list):
            inputs = _records(wire.dataframe_records, contract)
        elif isinstance(wire.instances, list):
            inputs = instances(wire.instances, contract)
        else:
            inputs = columns(wire.inputs, contract)
        params = wire.params if isinstance(wire.params, dict) else {}
        return DecodedRequest(
            inputs=inputs,
            wanted=wanted_outputs(contract),
            parameters=params,
            is_json_answer=True,
            form=given == ["inputs"],
        )

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        if not decoded.form:
            return answer_in_rows(result, decoded.wanted, info)
        outputs = nested(result, decoded.wanted, info)
        return Prediction(_encode({"predictions": next(iter(outputs.values())) if len(outputs) == 1 else outputs}))


def answer_in_rows(result: Result, wanted: tuple[str, ...], info: ModelInfo) -> Prediction:
    return Prediction(_encode({"predictions": rows_of(nested(result, wanted, info), info)}))


def _split(frame: Frame, contract: Contract) -> dict[str, Array]:
    names = [str(name) for name in frame.columns] if isinstance(frame.columns, list) else None
    if not frame.data:
        raise InvalidRequest("dataframe_split.data is empty; send at least one row.", param="dataframe_split.data")
    width = len(names) if names is not None else len(frame.data[0])
    for place, row in enumerate(frame.data):
        if len(row) != width:
            raise InvalidRequest(
                f"dataframe_split.data[{place}] has {len(row)} values; {width} are expected, one for each column.",
                param=f"dataframe_split.data[{place}]",
            )
    if names is not None and len(set(names)) != len(names):
        raise InvalidRequest(
            "dataframe_split.columns has a name twice; columns are told apart by their names.",
            param="dataframe_split.columns",
        )
    return table(names, frame.data, contract, "dataframe_split")


def _records(records: list[dict[str, Any]], contract: Contract) -> dict[str, Array]:
    if not records:
        raise InvalidRequest("dataframe_records is empty; send at least one.", param="dataframe_records")
    names = list(records[0])
    for place, record in enumerate(records):
        if record.keys() != records[0].keys():
            raise InvalidRequest(
                f"dataframe_records[{place}] has other columns than dataframe_records[0]; every record needs the same.",
                param=f"dataframe_records[{place}]",
            )
    return table(names, [[record[name] for name in names] for record in records], contract, "dataframe_records")


def table(names: list[str] | None, rows: list[list[Any]], contract: Contract, param: str) -> dict[str, Array]:
    """A frame's inputs: column by column where the model knows them by name, else all in one. Raises InvalidRequest."""
    known = {spec.name for spec in contract.inputs}
    if names is not None and known & set(names):
        by_name = {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
        return named_inputs(contract, by_name, param)
    spec = only_input(contract, param)
    if names is not None and spec.labels:
        rows = _ordered(names, rows, spec.labels, param)
    elif names is not None and len(spec.shape) == 1:
        rows = [row[0] if len(row) == 1 else row for row in rows]  # a column of texts
    return {spec.name: fitted(spec, array_of(spec, rows), contract)}


def _ordered(names: list[str], rows: list[list[Any]], labels: tuple[str, ...], param: str) -> list[list[Any]]:
    """The columns in the order that the model was trained with."""
    if sorted(names) != sorted(labels):
        missing = sorted(set(labels) - set(names))
        extra = sorted(set(names) - set(labels))
        raise InvalidRequest(
            f"{param} does not have the model's columns: "
            + "; ".join(
                f"{word} {', '.join(shown(name) for name in some[:8])}"
                for word, some in (("missing are", missing), ("unknown are", extra))
                if some
            )
            + ".",
            param=param,
        )
    places = [names.index(label) for label in labels]
    return [[row[place] for place in places] for row in rows]
