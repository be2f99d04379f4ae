"""The bodies of MLflow's REST API, as its client reads them (mlflow/protos/model_registry.proto)."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.errors import InferdError
from inferd.gateway.errors import MAX_MESSAGE_CHARS, ErrorShape, kind_of, printable

API: Final = "/api/2.0/mlflow/"
"""What the paths of MLflow's client begin with."""

READ_ONLY: Final = (
    "MLflow's client reads models, versions and aliases here, and changes nothing: versions come into the registry "
    "with a digest and evidence, by 'inferd registry register', 'alias' and 'promote'."
)

_CODES: Final = {
    400: "BAD_REQUEST",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "RESOURCE_DOES_NOT_EXIST",
    405: "ENDPOINT_NOT_FOUND",  # a client that knows another method then tries it
    429: "REQUEST_LIMIT_EXCEEDED",
    503: "TEMPORARILY_UNAVAILABLE",
}


class MlflowError(msgspec.Struct, frozen=True):
    """The body of an error answer in MLflow's dialect."""

    error_code: str
    message: str


def _mlflow_error(error: InferdError, request_id: str) -> bytes:
    status = kind_of(error).status
    code = _CODES.get(status, "INTERNAL_ERROR" if status >= 500 else "BAD_REQUEST")
    if error.kind == "route_not_found":
        code = "ENDPOINT_NOT_FOUND"
    if error.code == "mlflow_parameter":
        code = "INVALID_PARAMETER_VALUE"
    message = error.message if status != 500 else "The server met an internal error; the log has the details."
    return msgspec.json.encode(MlflowError(code, printable(message, MAX_MESSAGE_CHARS)))


MLFLOW_ERRORS: Final = ErrorShape(MlflowError, _mlflow_error)


class Tag(msgspec.Struct, frozen=True):
    key: str
    value: str


class Alias(msgspec.Struct, frozen=True):
    alias: str
    version: str


class ModelVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the registry. Its stage, its digest and its evidence are tags."""

    name: str
    version: str
    creation_timestamp: int  # milliseconds since the epoch
    last_updated_timestamp: int
    user_id: str
    current_stage: str  # None, Staging, Production, Archived
    description: str
    source: str
    run_id: str
    status: str  # READY, PENDING_REGISTRATION, FAILED_REGISTRATION
    status_message: str = ""
    tags: list[Tag] = []
    run_link: str = ""
    aliases: list[str] = []


class RegisteredModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    creation_timestamp: int
    last_updated_timestamp: int
    user_id: str
    description: str = ""
    latest_versions: list[ModelVersion] = []
    tags: list[Tag] = []
    aliases: list[Alias] = []


class RegisteredModelAnswer(msgspec.Struct, frozen=True):
    registered_model: RegisteredModel


class RegisteredModels(msgspec.Struct, frozen=True, omit_defaults=True):
    registered_models: list[RegisteredModel] = []
    next_page_token: str = ""


class ModelVersionAnswer(msgspec.Struct, frozen=True):
    model_version: ModelVersion


class ModelVersions(msgspec.Struct, frozen=True, omit_defaults=True):
    model_versions: list[ModelVersion] = []
    next_page_token: str = ""


class DownloadUri(msgspec.Struct, frozen=True):
    artifact_uri: str


class NameQuery(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class VersionQuery(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: str  # its number


class AliasQuery(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    alias: str


class LatestQuery(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    stages: tuple[str, ...] = ()  # all of them, where none is named


class SearchQuery(msgspec.Struct, frozen=True, kw_only=True):
    filter: str = ""
    max_results: int = 100  # at most 1000
    order_by: tuple[str, ...] = ()
    page_token: str = ""
