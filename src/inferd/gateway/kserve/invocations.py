"""Predictions in rows: KServe v1's ``:predict``, and ``/invocations`` of MLflow and SageMaker.

The worker reads the bodies. Requests with tensors are in ``inferd.gateway.kserve.rest``.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inferd.gateway.body.compression import wanted_encoding
from inferd.gateway.call import Answer, Call
from inferd.gateway.context import Context
from inferd.gateway.errors import UnsupportedMediaType, invalid, printable
from inferd.gateway.kserve.rest import read_tensor_body, task_of
from inferd.gateway.kserve.served import Served, draw_served_version, find_served, served_models
from inferd.gateway.predictions import predict
from inferd.gateway.terms import PredictFields

_TARGET: Final = b"x-amzn-sagemaker-target-model"
CSV_TYPE: Final = b"text/csv"
_JSON: Final = "invocations"
# -- types for the OpenAPI document --------------------------------------------------------------


class InstancesRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """POST /v1/models/{model}:predict, with ``instances`` (rows) or ``inputs`` (columns)"""

    instances: list[Any] | None = None
    inputs: Any = None
    signature_name: str | None = None
    parameters: dict[str, str | int | float | bool | None] | None = None


class Predictions(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row for each instance; for ``inputs`` the outputs."""

    predictions: Any = None
    outputs: Any = None


class SplitFrame(msgspec.Struct, frozen=True, omit_defaults=True):
    data: list[list[Any]]
    columns: list[str | int] | None = None
    index: list[Any] | None = None


class InvocationRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """POST /invocations, with one of the first four"""

    dataframe_split: SplitFrame | None = None
    dataframe_records: list[dict[str, Any]] | None = None
    instances: list[Any] | None = None
    inputs: Any = None
    params: dict[str, str | int | float | bool | None] | None = None


# -- the endpoints -------------------------------------------------------------------------------


async def predict_v1(context: Context, call: Call, rest: str) -> Answer:
    """POST /v1/models/{model}:predict. Raises what ``predictions.predict`` raises."""
    body = await read_tensor_body(context, call)
    return await _predicted(
        context, call, find_served(context, call.principal, rest), PredictFields(dialect="v1", body=body)
    )


async def invoke(context: Context, call: Call, rest: str) -> Answer:
    """POST /invocations. Raises UnsupportedMediaType, and what ``predictions.predict`` raises."""
    dialect = _dialect(call)
    body = await read_tensor_body(context, call, is_table=dialect != _JSON)
    return await _predicted(context, call, _target(context, call), PredictFields(dialect=dialect, body=body))


def _dialect(call: Call) -> str:
    """The dialect of a body, by its Content-Type. Raises UnsupportedMediaType."""
    media, _, rest = (call.header(b"content-type") or b"").lower().partition(b";")
    if media.strip() != CSV_TYPE:
        if media.strip().startswith(b"text/"):
            raise UnsupportedMediaType(
                f"Content-Type {printable(media.decode('latin-1'))!r} is not supported; send application/json, or a "
                "table as text/csv."
            )
        return _JSON
    said = dict([word.strip().partition(b"=")[::2] for word in rest.split(b";")])
    charset = said.get(b"charset", b"utf-8").strip(b'"')
    if charset not in (b"utf-8", b"utf8", b"us-ascii"):
        raise UnsupportedMediaType(
            f"Tables are read as UTF-8, and this one says charset {printable(charset.decode('latin-1'))!r}; encode it "
            "as UTF-8."
        )
    return "invocations.csv.rows" if said.get(b"header", b"").strip(b'"') == b"absent" else "invocations.csv"


def _target(context: Context, call: Call) -> Served:
    """The model that SageMaker's header names, or the only model. Raises ModelNotFound, InvalidRequest."""
    header = call.header(_TARGET)
    if header is not None:
        return find_served(context, call.principal, header.decode("latin-1"))
    newest = [served for served in served_models(context, call.principal) if served.status.name == served.name]
    if len(newest) != 1:
        names = ", ".join([printable(served.name) for served in newest[:20]]) or "no model"
        raise invalid(
            "x-amzn-sagemaker-target-model",
            f"Name the model in the header X-Amzn-SageMaker-Target-Model; this server has: {names}.",
            "missing_required_parameter",
        )
    return newest[0]


async def _predicted(context: Context, call: Call, served: Served, fields: PredictFields) -> Answer:
    served = draw_served_version(context, call, served)
    call.encoding = wanted_encoding(call)
    return await predict(context, call, served.status, fields, task_of(served))
