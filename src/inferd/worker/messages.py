"""All messages between gateway and worker: a closed union, in one file.

A frame is a 4-byte little-endian length followed by a msgpack array of messages. All outputs of an engine step travel
in one frame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from inferd.config import ModelConfig
from inferd.types import (
    AdapterState,
    Chat,
    Failure,
    GenerateRequest,
    Handed,
    Link,
    ModelInfo,
    Output,
    PredictRequest,
    StepStats,
    TextPrompt,
)

# -- gateway to worker -------------------------------------------------------------------------


class Load(msgspec.Struct, frozen=True, tag=True):
    name: str
    model: ModelConfig
    replica: int = 0
    link: Link | None = None  # None: it takes part in no hand-over
    far: str = ""  # the folder with the sockets of its ranks on other machines; empty: there are none


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Import what such a model needs, and wait for ``Load``."""

    model: ModelConfig


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: GenerateRequest | PredictRequest


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Stop making answers to a request that has several, because their reader is slow; or go on."""

    request_id: str
    is_paused: bool = True


class Tokenize(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    prompt: Chat | TextPrompt
    want_strings: bool = False
    tenant: str = ""  # the tenant that pays; cached tokens of the text are found by this tenant alone


class Detokenize(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    token_ids: list[int]


class Check(msgspec.Struct, frozen=True, tag=True):
    """Whether each of several requests that belong together can be prepared, before any of them is computed."""

    call_id: int
    requests: list[GenerateRequest]


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """The answer to a ``Check`` is no longer wanted. Idempotent."""

    call_id: int


class SetAdapters(msgspec.Struct, frozen=True, tag=True):
    """Load and unload adapters until they are these (name -> source)."""

    call_id: int
    adapters: dict[str, str]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave now: every open request is cancelled, with one terminal output, then the process exits."""


ToWorker = Load | Prepare | Submit | Cancel | Pause | Tokenize | Detokenize | Check | Withdraw | SetAdapters | Stop

# -- worker to gateway -------------------------------------------------------------------------


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress while loading; ``done`` of ``total`` in the phase's own unit (bytes, files)."""

    phase: str
    done: int = 0
    total: int = 0
    at: float = 0.0  # time.monotonic() of the worker, which is the gateway's


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: ModelInfo


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    failure: Failure
    trace: str = ""  # for the operator's log, where code failed: the exception and its lines


class Outputs(msgspec.Struct, frozen=True, tag=True):
    outputs: list[Output]
    stats: StepStats | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent every second by the worker's I/O thread about its loop thread.

    ``steps`` counts completed loop turns; ``busy`` says that work is pending. A busy worker whose
    ``steps`` stands still hangs; a worker that sends nothing is stopped or has ended.
    """

    steps: int
    busy: bool
    rss_bytes: int = 0


class Tokenized(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    token_ids: list[int] | None = None
    strings: list[str] | None = None
    failure: Failure | None = None


class Detokenized(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    text: str | None = None
    failure: Failure | None = None


class Checked(msgspec.Struct, frozen=True, tag=True):
    """``failure``: what is wrong with the first request that cannot be prepared."""

    call_id: int
    failure: Failure | None = None


class AdaptersSet(msgspec.Struct, frozen=True, tag=True):
    """``states``: of every adapter that was asked for, by name."""

    call_id: int
    states: dict[str, AdapterState] = {}
    failure: Failure | None = None


class HandedOver(msgspec.Struct, frozen=True, tag=True):
    """A prompt was handed over to another worker, or was not."""

    handed: Handed


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """Why the worker is about to end its process itself, without a full stop."""

    reason: str


FromWorker = (
    Loading
    | Ready
    | LoadFailed
    | Outputs
    | Heartbeat
    | Tokenized
    | Detokenized
    | Checked
    | AdaptersSet
    | HandedOver
    | Leaving
)

# -- frames ------------------------------------------------------------------------------------

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 256 * 1024 * 1024

_BIG_INTEGER = 1  # the type of the extension that holds one
_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1


def _extension(code: int, data: memoryview) -> Any:
    if code != _BIG_INTEGER:
        raise ValueError(f"an extension of the type {code} has no meaning")
    return int.from_bytes(data, "big", signed=True)


_encoder = msgspec.msgpack.Encoder()
to_worker_decoder = msgspec.msgpack.Decoder(list[ToWorker], ext_hook=_extension)
from_worker_decoder = msgspec.msgpack.Decoder(list[FromWorker])


def encode_frame(messages: Sequence[ToWorker] | Sequence[FromWorker]) -> bytearray:
    frame = bytearray(HEADER.size)  # the messages are written behind it: a large body is not copied once more
    try:
        _encoder.encode_into(messages, frame, HEADER.size)
    except OverflowError:  # JSON of a client, such as a schema, has an integer beyond msgpack's 64 bits
        plain = msgspec.to_builtins(messages, builtin_types=(bytes,))
        _encoder.encode_into(_with_extensions(plain), frame, HEADER.size)
    HEADER.pack_into(frame, 0, len(frame) - HEADER.size)
    return frame


def _with_extensions(value: Any) -> Any:
    """The value with extensions in the place of big integers."""
    if isinstance(value, dict):
        return {key: _with_extensions(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_extensions(one) for one in value]
    if isinstance(value, int) and not _INT64_MIN <= value <= _UINT64_MAX:
        size = value.bit_length() // 8 + 1
        return msgspec.msgpack.Ext(_BIG_INTEGER, value.to_bytes(size, "big", signed=True))
    return value
