"""KServe v2 over REST: the fields that the gateway reads of an infer request, and the types for the OpenAPI document.

The worker reads the tensors; here the decoder skips them.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inferd.gateway.kserve.models import Condition

Value = str | int | float | bool | None


class Live(msgspec.Struct, frozen=True):
    live: bool = True


class Ready(msgspec.Struct, frozen=True):
    ready: bool


class ModelReady(msgspec.Struct, frozen=True):
    """``condition`` says what the next request will meet: warm, degraded, loading, cold or unavailable."""

    name: str
    version: str
    ready: bool
    condition: Condition
    detail: str


class IndexRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v2/repository/index"""

    ready: bool = False


class RepositoryRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v2/repository/models/{model}/load and unload"""

    parameters: dict[str, Value] | None = None


class Done(msgspec.Struct, frozen=True):
    """An empty object."""


class Head(msgspec.Struct, frozen=True):
    """The one field of a body that is read here."""

    parameters: dict[str, Value] | None = None


class RawHead(msgspec.Struct, frozen=True):
    """As ``Head``, before the parameters are decoded."""

    parameters: msgspec.Raw = msgspec.Raw(b"null")


head_decoder: Final = msgspec.json.Decoder(Head)
raw_head_decoder: Final = msgspec.json.Decoder(RawHead)


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
