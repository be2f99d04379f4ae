"""The fields of Triton's model configuration (model_config.proto) that inferd uses, as structs.

Names are Triton's, and so is the order of an enum's words, which gives them their numbers. Fields that are not listed
are reported as ignored.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DataType = Literal[
    "TYPE_INVALID", "TYPE_BOOL", "TYPE_UINT8", "TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64", "TYPE_INT8", "TYPE_INT16",
    "TYPE_INT32", "TYPE_INT64", "TYPE_FP16", "TYPE_FP32", "TYPE_FP64", "TYPE_STRING", "TYPE_BF16",
]  # fmt: skip
Format = Literal["FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"]
TimeoutAction = Literal["REJECT", "DELAY"]
DeviceKind = Literal["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"]
ControlKind = Literal[
    "CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_READY", "CONTROL_SEQUENCE_END", "CONTROL_SEQUENCE_CORRID"
]


class Reshape(msgspec.Struct, frozen=True):
    shape: tuple[int, ...] = ()


class Input(msgspec.Struct, frozen=True):
    name: str = ""
    data_type: DataType = "TYPE_INVALID"
    format: Format = "FORMAT_NONE"
    dims: tuple[int, ...] = ()
    reshape: Reshape | None = None
    is_shape_tensor: bool = False
    allow_ragged_batch: bool = False
    optional: bool = False
    is_non_linear_format_io: bool = False


class Output(msgspec.Struct, frozen=True):
    name: str = ""
    data_type: DataType = "TYPE_INVALID"
    dims: tuple[int, ...] = ()
    reshape: Reshape | None = None
    label_filename: str = ""
    is_shape_tensor: bool = False
    is_non_linear_format_io: bool = False


class QueuePolicy(msgspec.Struct, frozen=True):
    timeout_action: TimeoutAction = "REJECT"
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


class DynamicBatching(msgspec.Struct, frozen=True):
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy | None = None
    priority_queue_policy: dict[int, QueuePolicy] = {}


class InstanceGroup(msgspec.Struct, frozen=True):
    name: str = ""
    kind: DeviceKind = "KIND_AUTO"
    count: int = 1
    gpus: tuple[int, ...] = ()
    profile: tuple[str, ...] = ()
    passive: bool = False


class Latest(msgspec.Struct, frozen=True):
    num_versions: int = 1


class All(msgspec.Struct, frozen=True):
    pass


class Specific(msgspec.Struct, frozen=True):
    versions: tuple[int, ...] = ()


class VersionPolicy(msgspec.Struct, frozen=True):
    latest: Latest | None = None
    all: All | None = None
    specific: Specific | None = None


class Control(msgspec.Struct, frozen=True):
    kind: ControlKind = "CONTROL_SEQUENCE_START"
    int32_false_true: tuple[int, ...] = ()
    fp32_false_true: tuple[float, ...] = ()
    bool_false_true: tuple[bool, ...] = ()
    data_type: DataType = "TYPE_INVALID"


class ControlInput(msgspec.Struct, frozen=True):
    name: str = ""
    control: tuple[Control, ...] = ()


class InitialState(msgspec.Struct, frozen=True):
    name: str = ""
    data_type: DataType = "TYPE_INVALID"
    dims: tuple[int, ...] = ()
    zero_data: bool = False
    data_file: str = ""


class State(msgspec.Struct, frozen=True):
    input_name: str = ""
    output_name: str = ""
    data_type: DataType = "TYPE_INVALID"
    dims: tuple[int, ...] = ()
    initial_state: tuple[InitialState, ...] = ()


class Direct(msgspec.Struct, frozen=True):
    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = 0.0


class Oldest(msgspec.Struct, frozen=True):
    max_candidate_sequences: int = 0
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False


class SequenceBatching(msgspec.Struct, frozen=True):
    max_sequence_idle_microseconds: int = 0
    control_input: tuple[ControlInput, ...] = ()
    state: tuple[State, ...] = ()
    direct: Direct | None = None
    oldest: Oldest | None = None


class EnsembleStep(msgspec.Struct, frozen=True):
    model_name: str = ""
    model_version: int = -1
    input_map: dict[str, str] = {}
    output_map: dict[str, str] = {}


class Ensemble(msgspec.Struct, frozen=True):
    step: tuple[EnsembleStep, ...] = ()


class Parameter(msgspec.Struct, frozen=True):
    string_value: str = ""


class TransactionPolicy(msgspec.Struct, frozen=True):
    decoupled: bool = False


class TritonModel(msgspec.Struct, frozen=True):
    """One config.pbtxt."""

    name: str = ""
    platform: str = ""
    backend: str = ""
    max_batch_size: int = 0
    version_policy: VersionPolicy | None = None
    input: tuple[Input, ...] = ()
    output: tuple[Output, ...] = ()
    dynamic_batching: DynamicBatching | None = None
    sequence_batching: SequenceBatching | None = None
    ensemble_scheduling: Ensemble | None = None
    instance_group: tuple[InstanceGroup, ...] = ()
    default_model_filename: str = ""
    parameters: dict[str, Parameter] = {}
    model_transaction_policy: TransactionPolicy | None = None
