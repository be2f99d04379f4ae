"""The metadata of models, which KServe v2 over REST and over gRPC share.

Knows the router's states and the configuration. Knows neither HTTP nor protobuf nor tensors. Sources: the Open
Inference Protocol, and Triton's extensions model_configuration and model_repository.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from inferd import __version__
from inferd.config import ModelConfig
from inferd.errors import Unavailable
from inferd.gateway.context import Context
from inferd.gateway.kserve.served import Served, is_ready, served_models, versions_among
from inferd.gateway.upstream import ModelState, ModelStatus
from inferd.registry.fingerprint import fingerprint_of, is_batch_invariant
from inferd.tenancy.principal import Principal
from inferd.types import TensorSpec

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
    fingerprint: str  # of everything that decides the answers; empty: unknown
    batch_invariant: bool  # an answer never depends on the requests that are computed together with it


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
    config = context.config.models.get(status.name)
    versions = versions_among(served_models(context, principal), served.name)
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
            fingerprint=fingerprint_of(info, config),
            batch_invariant=config is not None and is_batch_invariant(info, config),
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
