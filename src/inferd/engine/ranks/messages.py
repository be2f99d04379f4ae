"""What rank 0 and the other ranks of a replica send each other, over a socket that a rank inherits.

Before the first message rank 0 sends the text of ``build()``, which a rank with other messages can read too.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from inferd import __version__
from inferd.config import ModelConfig
from inferd.native import compiled
from inferd.native.paged_attention import AttentionKind


def build() -> str:
    """What this process computes with. Ranks of one replica have the same."""
    return f"inferd {__version__}, kernels {compiled.level()} {compiled.FILE}".rstrip()


class Wire(Protocol):
    """A connection of messages: a ``multiprocessing.connection.Connection``, or a line to another machine."""

    def send_bytes(self, message: bytes, /) -> None: ...
    def recv_bytes(self) -> bytes: ...
    def close(self) -> None: ...


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message: what a rank loads."""

    config: ModelConfig
    folder: str  # a rank on another machine has its own
    rank: int
    store: str  # the file where the ranks find each other
    memory: int | None  # descriptor of the file through which they add their parts; None: over gloo or NCCL
    num_threads: int
    device: str  # that the rank computes on


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to ``Begin``: what it has."""

    digest: bytes  # of the checkpoint's files
    weights_bytes: int
    num_parameters: int  # of the tensors that it has a part of


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Every rank has its share: the ranks meet. On devices they then compute the largest step together."""

    attention: AttentionKind


class Met(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to ``Meet``."""

    free_bytes: int | None  # for the KV caches of all ranks, by the memory of this one; None: it is rank 0's memory


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to ``Serve``: it has its KV cache."""

    keeps_rows: bool  # ``Runner.keeps_rows``
    layout: str  # ``KVCache.layout`` of its part of a block
    block_bytes: int  # of it


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to ``Begin``: why it could not load its share."""

    message: str
    param: str | None


class Serve(msgspec.Struct, frozen=True, tag=True):
    """The size of the KV cache. Plans follow."""

    num_blocks: int


class AdapterPart(msgspec.Struct, frozen=True):
    """A rank's part of what an adapter adds to one product of its layers (``native.low_rank.LowRank``)."""

    layer: int  # of the rank's
    product: int
    first: int
    rank: int
    scale: float
    a: bytes  # [rank, inputs] in the model's number format
    b: bytes  # [outputs, rank]


class TakeAdapter(msgspec.Struct, frozen=True, tag=True):
    """An adapter that steps may use from here on, until one forgets it."""

    number: int
    name: str
    identity: bytes
    parts: list[AdapterPart]


class StepPlan(msgspec.Struct, frozen=True, tag=True):
    """One step: what to do first, and the arrays of a ``FlatBatch`` of T rows and S sequences."""

    forgotten: list[int]  # adapters that no step uses any more
    copies: list[tuple[int, int]]  # of blocks
    num_sequences: int
    by_row: bytes  # int64 [3, T]: tokens, positions, slots
    by_sequence: bytes  # int32 [2 S + 1]: query_start, seq_len
    table: bytes  # int32 [S, blocks]
    wanted: bytes | None  # int64 [W]: ``FlatBatch.output_rows``
    adapters: list[int]
    adapter_of: bytes  # int32 [T]: each row's place in ``adapters``, or -1; empty where there are none
    cuts: list[int]  # ``FlatBatch.cuts``


class LogitsPlan(msgspec.Struct, frozen=True, tag=True):
    """Logits of some hidden states, for the ranks that have a part of the output layer."""

    hidden: bytes  # [R, hidden] in the model's number format


class GiveBlocks(msgspec.Struct, frozen=True, tag=True):
    """Send what the rank's part of some blocks holds at this place among the steps."""

    blocks: list[int]


class TakeBlocks(msgspec.Struct, frozen=True, tag=True):
    """Write the rank's part of some blocks, before the next step."""

    blocks: list[int]
    contents: list[bytes]  # of each block, as ``KVCache.write_blocks`` takes them


class GivenBlocks(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to ``GiveBlocks``, in the order of these."""

    contents: list[bytes]  # of each block


ToRank = Begin | Meet | Serve | TakeAdapter | StepPlan | LogitsPlan | GiveBlocks | TakeBlocks
FromRank = Loaded | Met | Ready | Failed | GivenBlocks

_encode = msgspec.msgpack.Encoder().encode
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def send(connection: Wire, message: ToRank | FromRank) -> None:
    """Raises OSError where the other end is closed."""
    connection.send_bytes(_encode(message))


def encoded(message: ToRank) -> bytes:
    """For sending one message to several ranks."""
    return _encode(message)


def from_lead(connection: Wire) -> ToRank:
    """Raises EOFError where rank 0 has ended."""
    message: ToRank = _to_rank.decode(connection.recv_bytes())
    return message


def from_rank(connection: Wire) -> FromRank:
    """Raises EOFError where the rank has ended."""
    message: FromRank = _from_rank.decode(connection.recv_bytes())
    return message
