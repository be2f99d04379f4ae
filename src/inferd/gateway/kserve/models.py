"""The parts of KServe v2 that REST and gRPC share: the parameters of requests, and the metadata of models.

Knows the router's states and the configuration. Knows neither HTTP nor protobuf nor tensors. Sources: the Open
Inference Protocol, and Triton's extensions parameters, sequence, schedule_policy, model_configuration,
model_repository.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from inferd import __version__
from inferd.config import ModelConfig
from inferd.config.versions import base_of, entry_named, versions_of
from inferd.errors import ModelNotFound, Unavailable
from inferd.gateway.admission import MAX_TIMEOUT_S, may_use, visible_models
from inferd.gateway.call import Call
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, printable, shown
from inferd.gateway.predictions import PredictFields
from inferd.gateway.upstream import ModelState, ModelStatus
from inferd.gateway.versions import draw_version
from inferd.tenancy.principal import Principal
from inferd.types import RANKS, TensorSpec

MAX_SEQUENCE_CHARS: Final = 128
EXTENSIONS: Final = (
    "classification",
    "sequence",
    "sequence(string_id)",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)

# A request's priority: 0 is the default, 1 the highest, and every level from 4 on the lowest class.
_CLASSES: Final = (RANKS["critical"], RANKS["interactive"], RANKS["normal"], RANKS["batch"])

Value = str | int | float | bool | None


# -- a request's parameters ----------------------------------------------------------------------


def predict_fields_of(
    dialect: str,
    body: bytes,
    parameters: Mapping[str, Value],
    *,
    header_bytes: int = -1,
    version: str = "",
) -> PredictFields:
    """The fields of a request for a prediction, from its body and parameters. Parameters that the gateway does not know
    are left to the model.

    Raises InvalidRequest.
    """
    if not parameters:
        return PredictFields(dialect=dialect, body=body, header_bytes=header_bytes, version=version)
    sequence = _sequence(parameters.get("sequence_id"))
    starts, ends = _flag(parameters, "sequence_start"), _flag(parameters, "sequence_end")
    if (starts or ends) and not sequence:
        raise invalid(
            "parameters.sequence_id",
            "parameters.sequence_start and sequence_end belong to a sequence; send its sequence_id (not 0 or empty).",
        )
    return PredictFields(
        dialect=dialect,
        body=body,
        header_bytes=header_bytes,
        version=version,
        sequence=sequence,
        sequence_start=starts,
        sequence_end=ends,
        may_wait=_flag(parameters, "batching", unset=True),
        priority=_priority(parameters.get("priority")),
        timeout=_timeout(parameters.get("timeout")),
    )


def _sequence(value: Value) -> str:
    """The name of a request's sequence; empty: it has none. The number 7 and the text "7" are the same sequence."""
    if value is None or (value == 0 and not isinstance(value, bool)):
        return ""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 64:
        return str(value)
    if isinstance(value, str) and len(value) <= MAX_SEQUENCE_CHARS:
        return value
    raise invalid(
        "parameters.sequence_id",
        f"parameters.sequence_id must be a whole number of 64 bits or a text of at most {MAX_SEQUENCE_CHARS} "
        f"characters, not {shown(value)}.",
    )


def _flag(parameters: Mapping[str, Value], name: str, *, unset: bool = False) -> bool:
    value = parameters.get(name)
    if value is None:
        return unset
    if not isinstance(value, bool):
        raise invalid(f"parameters.{name}", f"parameters.{name} must be true or false, not {shown(value)}.")
    return value


def _priority(value: Value) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise invalid(
            "parameters.priority",
            f"parameters.priority must be a whole number from 0 (the default), where 1 is the highest, not "
            f"{shown(value)}.",
        )
    return None if value == 0 else _CLASSES[min(value, len(_CLASSES)) - 1]


def _timeout(value: Value) -> float | None:
    """A timeout in seconds, from microseconds. None: no timeout."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TIMEOUT_S * 1e6:
        raise invalid(
            "parameters.timeout",
            f"parameters.timeout must be microseconds from 0 (none) to {MAX_TIMEOUT_S * 1e6:.0f}, not {shown(value)}.",
        )
    return value / 1e6 if value else None


# -- models and their versions -------------------------------------------------------------------


class Served(NamedTuple):
    """One version of a model: the router's status of its entry, and its name and version in KServe v2."""

    status: ModelStatus
    name: str
    version: str
    requested_version: str = ""  # the version that the client named


def find_served(context: Context, principal: Principal, name: str, version: str = "") -> Served:
    """The version that ``version`` (a number or an alias) names, or the newest version that the principal may use.
    Raises ModelNotFound."""
    if not version:
        entry = entry_named(context.config.models, name) if "@" in name else None
        status = context.router.model(name if entry is None else entry)
        if status is not None and may_use(context, principal, status.name):
            served = _served(context, status)
            return served if entry is None else served._replace(requested_version=served.version)
    known = [_served(context, status) for status in visible_models(context, principal)]
    if not version:
        newest = _versions_among(known, name)[-1:]
        if newest:
            return newest[0]
    config = context.config.models.get(name)
    requested = version
    if config is not None and version:
        version = str(config.versions.aliases.get(version, version))
    there = _versions_among(known, name)
    for served in there:
        if served.version == version:
            return served._replace(requested_version=version)
    if there:
        raise ModelNotFound(
            f"Request for unknown model: {shown(name)} version {printable(requested)!r} is not found; its versions are "
            f"{', '.join(served.version for served in there)}.",
            param="model",
        )
    names = ", ".join(map(printable, list(dict.fromkeys(served.name for served in known))[:20])) or "no model"
    raise ModelNotFound(
        f"Request for unknown model: {shown(name)} is not found; this server has: {names}.", param="model"
    )


def draw_served_version(context: Context, call: Call, served: Served, sequence: str = "") -> Served:
    """The version that computes a request. If the request names no version and the model's versions have weights, one
    is drawn. ``sequence``: the request's sequence; all its requests get the same version."""
    if served.requested_version or served.status.name != served.name:
        return served
    status = draw_version(context, call, served.status, sequence=sequence)
    if status is served.status:
        return served
    call.model = status.name
    return _served(context, status)


def served_models(context: Context, principal: Principal) -> Sequence[Served]:
    """Every version of every model that the principal may use."""
    return [_served(context, status) for status in visible_models(context, principal)]


def _served(context: Context, status: ModelStatus) -> Served:
    models, entry = context.config.models, status.name
    config = models.get(entry)
    version = config.version if config is not None else "1"
    base = base_of(entry) if "@" in entry else entry
    is_version = base != entry and versions_of(models, base).get(version) == entry
    return Served(status, base if is_version else entry, version)


def versions_served(context: Context, principal: Principal, name: str) -> list[Served]:
    """A model's versions that the principal may use, the oldest first. Raises ModelNotFound."""
    return _versions_among(served_models(context, principal), name) or [find_served(context, principal, name)]


def _versions_among(known: Sequence[Served], name: str) -> list[Served]:
    return sorted([served for served in known if served.name == name], key=lambda served: int(served.version))


def is_ready(served: Served) -> bool:
    """Whether a replica of the version is ready."""
    return served.status.replicas_ready >= 1


# -- metadata ------------------------------------------------------------------------------------


class ServerMetadata(msgspec.Struct, frozen=True):
    """GET /v2"""

    name: str
    version: str
    extensions: tuple[str, ...]


class TensorParameters(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a tensor beyond the protocol's words."""

    optional: bool = False  # requests may leave it out
    labels: tuple[str, ...] = ()  # names of the last dimension's places: classes


class TensorMetadata(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    shape: tuple[int, ...]  # with the batch dimension; -1: of any size
    parameters: TensorParameters | msgspec.UnsetType = msgspec.UNSET


Condition = Literal["warm", "loading", "cold", "degraded", "unavailable"]
_CONDITIONS: Final[dict[ModelState, Condition]] = {
    "ready": "warm",
    "loading": "loading",
    "degraded": "degraded",
    "unloaded": "cold",
}


class ModelCondition(msgspec.Struct, frozen=True, kw_only=True):
    """What decides how long an answer takes, beside the model itself.

    warm: every replica is ready; degraded: some are; loading; cold: the next request loads it; unavailable.
    """

    condition: Condition
    state: str
    replicas_ready: int
    replicas: int
    waiting: int  # requests in the queue
    tasks: str
    dtype: str
    max_batch_size: int


class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v2/models/{model}"""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    parameters: ModelCondition


# A model that writes text has no tensors; these are the fields of generate.
_TEXT_IN: Final = (TensorSpec("text_input", "BYTES", (1,)),)
_TEXT_OUT: Final = (TensorSpec("text_output", "BYTES", (1,)),)


def server_metadata(context: Context) -> ServerMetadata:
    """The metadata of the server."""
    return ServerMetadata(context.config.server.v2_name, __version__, EXTENSIONS)


def condition_of(status: ModelStatus) -> Condition:
    """The condition that the next request of a model meets."""
    return _CONDITIONS.get(status.state, "unavailable")


def model_metadata(context: Context, principal: Principal, served: Served) -> ModelMetadata:
    """The metadata of a version. Raises Unavailable for a model that was never ready: its tensors are not known."""
    status, info = served.status, served.status.info
    if info is None:
        raise _unknown_yet(served)
    inputs, outputs = tensors_of(served)
    versions = _versions_among(served_models(context, principal), served.name)
    return ModelMetadata(
        name=served.name,
        versions=tuple(version.version for version in versions),
        platform=info.platform,
        inputs=tuple(_tensor_metadata(spec) for spec in inputs),
        outputs=tuple(_tensor_metadata(spec) for spec in outputs),
        parameters=ModelCondition(
            condition=condition_of(status),
            state=status.state,
            replicas_ready=status.replicas_ready,
            replicas=status.replicas,
            waiting=status.waiting,
            tasks=",".join((*info.tasks, *(("chat",) if info.has_chat_template else ()))),
            dtype=info.dtype,
            max_batch_size=info.max_batch_size,
        ),
    )


def tensors_of(served: Served) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs of a version whose ``info`` is known."""
    info = served.status.info
    assert info is not None
    return (info.inputs, info.outputs) if info.kind == "predict" else (_TEXT_IN, _TEXT_OUT)


def _tensor_metadata(spec: TensorSpec) -> TensorMetadata:
    has_more = spec.is_optional or bool(spec.labels)
    more = TensorParameters(optional=spec.is_optional, labels=spec.labels) if has_more else msgspec.UNSET
    return TensorMetadata(spec.name, spec.datatype, spec.shape, more)


def _unknown_yet(served: Served) -> Unavailable:
    status = served.status
    detail = f" ({status.detail})" if status.detail else ""
    return Unavailable(
        f"The model {served.name!r} version {served.version} is {status.state}{detail}, and what it takes is not known "
        "before it has been ready; ask again then.",
        param="model",
    )


# -- Triton's model configuration ----------------------------------------------------------------


class ConfigTensor(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    data_type: str  # TYPE_FP32, TYPE_STRING
    dims: tuple[int, ...]  # without the batch dimension, where there is one
    optional: bool = False


class LatestPolicy(msgspec.Struct, frozen=True):
    num_versions: int


class VersionPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    latest: LatestPolicy | None = None
    specific: dict[str, tuple[int, ...]] | None = None
    all: dict[str, int] | None = None


class InstanceGroup(msgspec.Struct, frozen=True):
    name: str
    kind: Literal["KIND_AUTO", "KIND_CPU", "KIND_GPU"]
    count: int


class DynamicBatching(msgspec.Struct, frozen=True):
    preferred_batch_size: tuple[int, ...]
    max_queue_delay_microseconds: int


class SequenceBatching(msgspec.Struct, frozen=True):
    max_sequence_idle_microseconds: int


class TransactionPolicy(msgspec.Struct, frozen=True):
    decoupled: bool


class ModelConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v2/models/{model}/config: the fields of Triton's ModelConfig that there is something to say about."""

    name: str
    platform: str
    backend: str
    version_policy: VersionPolicy
    max_batch_size: int
    input: tuple[ConfigTensor, ...]
    output: tuple[ConfigTensor, ...]
    instance_group: tuple[InstanceGroup, ...]
    model_transaction_policy: TransactionPolicy
    dynamic_batching: DynamicBatching | msgspec.UnsetType = msgspec.UNSET
    sequence_batching: SequenceBatching | msgspec.UnsetType = msgspec.UNSET


def model_configuration(context: Context, served: Served) -> ModelConfiguration:
    """The configuration of a version. Raises Unavailable for a model that was never ready: its tensors are not
    known."""
    info = served.status.info
    if info is None:
        raise _unknown_yet(served)
    config = context.config.models.get(served.status.name) or ModelConfig(source=info.source)
    inputs, outputs = tensors_of(served)
    batched = info.max_batch_size > 0
    batching = config.batching
    return ModelConfiguration(
        name=served.name,
        platform=info.platform,
        backend=info.platform.partition("_")[0],
        version_policy=_version_policy(config),
        max_batch_size=info.max_batch_size,
        input=tuple(_config_tensor(spec, batched) for spec in inputs),
        output=tuple(_config_tensor(spec, batched) for spec in outputs),
        instance_group=(InstanceGroup(served.name, _device_kind(config.device), served.status.replicas),),
        model_transaction_policy=TransactionPolicy(decoupled=info.kind == "generate" or info.is_decoupled),
        dynamic_batching=DynamicBatching(batching.preferred_sizes, round(batching.max_delay_ms * 1000))
        if batched and batching.mode != "off"
        else msgspec.UNSET,
        sequence_batching=SequenceBatching(round(config.sequence.idle_s * 1e6)) if info.is_stateful else msgspec.UNSET,
    )


def _config_tensor(spec: TensorSpec, batched: bool) -> ConfigTensor:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return ConfigTensor(
        name=spec.name,
        data_type=f"TYPE_{datatype}",
        dims=spec.shape[1:] if batched else spec.shape,
        optional=spec.is_optional,
    )


def _version_policy(config: ModelConfig) -> VersionPolicy:
    match config.versions.policy:
        case "all":
            return VersionPolicy(all={})
        case "specific":
            return VersionPolicy(specific={"versions": config.versions.only})
    return VersionPolicy(latest=LatestPolicy(config.versions.count))


def _device_kind(device: str) -> Literal["KIND_AUTO", "KIND_CPU", "KIND_GPU"]:
    return "KIND_AUTO" if device == "auto" else "KIND_CPU" if device == "cpu" else "KIND_GPU"


# -- the repository ------------------------------------------------------------------------------


class RepositoryModel(msgspec.Struct, frozen=True):
    """One entry of POST /v2/repository/index."""

    name: str
    version: str
    state: Literal["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]
    reason: str


def repository_index(context: Context, principal: Principal, *, ready: bool = False) -> list[RepositoryModel]:
    """Every version that the principal may use; with ``ready`` only those that are ready."""
    return [
        RepositoryModel(served.name, served.version, _repository_state(served.status), served.status.detail)
        for served in served_models(context, principal)
        if not ready or is_ready(served)
    ]


def _repository_state(status: ModelStatus) -> Literal["READY", "UNAVAILABLE", "LOADING"]:
    if status.replicas_ready >= 1:
        return "READY"
    return "LOADING" if status.state == "loading" else "UNAVAILABLE"
