"""KServe v2 over REST: the fields that the gateway reads of an infer request, and the types for the OpenAPI document.

The worker reads the tensors; here the decoder skips them.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inferd.gateway.decode import MAX_DECODE_COST, OFF_LOOP_BYTES, check_decode_cost, decode
from inferd.gateway.kserve.models import Value, predict_fields_of
from inferd.gateway.kserve.outline import contains, outline
from inferd.gateway.predictions import PredictFields

DIALECT: Final = "v2"
_LEVELS: Final = 2  # the body and its ``parameters``


class _Head(msgspec.Struct, frozen=True):
    """The one field of a body that is read here."""

    parameters: dict[str, Value] | None = None


_head_decoder: Final = msgspec.json.Decoder(_Head)


def read_infer(
    body: bytes, header_bytes: int = -1, version: str = "", *, most: tuple[int, int] | None = None
) -> PredictFields:
    """The fields of an infer request.

    ``header_bytes``: the length of the body's JSON part; -1: the whole body. ``most``: the largest number of values,
    and of lists and objects, that the model accepts as JSON; None: not known. Raises InvalidRequest for wrong
    parameters; the worker checks the rest of the body.
    """
    head = body if header_bytes < 0 else body[:header_bytes]
    # A header length above the body's length is left to the worker, which has a better message for it.
    if header_bytes > len(body) or not (contains(head, b'"parameters"') or contains(head, b"\\u")):
        return PredictFields(dialect=DIALECT, body=body, header_bytes=header_bytes, version=version)
    if len(head) > OFF_LOOP_BYTES:
        head = outline(head, _LEVELS, most)
        if len(head) > MAX_DECODE_COST:
            check_decode_cost(head)
    try:
        parameters = _head_decoder.decode(head).parameters
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parameters = decode(head, _head_decoder).parameters  # raises an InvalidRequest that names the field
    return predict_fields_of(DIALECT, body, parameters or {}, header_bytes=header_bytes, version=version)


# -- types for the OpenAPI document --------------------------------------------------------------


class InferInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """An input: ``data`` nested as ``shape`` says, or flat in row-major order."""

    name: str
    shape: tuple[int, ...]
    datatype: str
    parameters: dict[str, Value] | None = None
    data: list[Any] | None = None


class InferRequestedOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    parameters: dict[str, Value] | None = None


class InferRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """POST /v2/models/{model}/infer"""

    inputs: tuple[InferInput, ...]
    id: str | None = None
    parameters: dict[str, Value] | None = None
    outputs: tuple[InferRequestedOutput, ...] | None = None
    model_name: str | None = None
    model_version: str | None = None


class InferOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, Value] | None = None
    data: list[Any] | None = None


class InferResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    model_name: str
    model_version: str
    outputs: tuple[InferOutput, ...]
    id: str | None = None
    parameters: dict[str, Any] | None = None
