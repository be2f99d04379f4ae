"""All messages between a server and its nodes: closed unions, in one file.

A node opens every connection, over TLS. Its first message says what the connection is for: ``Join`` for the node's own
messages, ``Attach`` for the channel of one worker, ``Fetch`` for the bytes of one file. After ``Attached`` a channel
carries the frames of ``worker/messages.py``, unchanged. All frames have the same form: a length, and a list of messages.
"""

from __future__ import annotations

import msgspec

from inferd.types import Failure
from inferd.worker.messages import HEADER

PROTOCOL = 3
"""Raised when a message changes, so that a node of another version is refused by name and not by its bytes."""

MAX_FIRST_BYTES = 64 * 1024
"""Of a frame before the token was checked."""


class ModelFile(msgspec.Struct, frozen=True):
    """One file of a model by its content. ``label``: its name below the model's source, ``path``: where the server has
    it."""

    label: str
    path: str
    size: int
    sha256: str


# -- the first message of a connection -----------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A machine asks to be a node."""

    protocol: int
    version: str  # of inferd
    secret: str  # of the token
    name: str
    num_cores: int
    memory_bytes: int
    num_gpus: int = 0
    labels: dict[str, str] = {}


class Attach(msgspec.Struct, frozen=True, tag=True):
    """The channel of the worker, or of the rank, that was launched with this key."""

    key: str


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """The bytes of a file of the worker that was launched with this key, from ``offset`` on."""

    key: str
    sha256: str
    offset: int = 0


First = Join | Attach | Fetch

# -- node to server ------------------------------------------------------------------------------


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Sent five times a second, in both directions. ``at``: the sender's monotonic clock."""

    at: float


class Preparing(msgspec.Struct, frozen=True, tag=True):
    """Progress before a worker starts: files are compared or copied."""

    life: int
    phase: str
    done: int
    total: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A worker's process ended with this status, and all that it sent was written to its channel."""

    life: int
    status: int


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """The worker could not be started on this machine."""

    life: int
    failure: Failure


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The node is to stop: it takes no more workers, and waits for ``Released``."""


FromNode = Beat | Preparing | Exited | NotStarted | Leaving

# -- server to node ------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The machine is a node now. ``secret``: with which it may join again under its name."""

    secret: str


class Renewed(msgspec.Struct, frozen=True, tag=True):
    """Another secret in the place of the last one, which expires."""

    secret: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The server does not take the connection."""

    code: str  # version, token, name, full, message
    message: str


class Launch(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Start a worker, or a rank of a replica that is spread over machines.

    ``load`` is the frame of a worker's first message, ``files`` what its model consists of. ``rank``: the rank's number;
    0: a worker.
    """

    life: int
    key: str
    name: str
    load: bytes
    files: list[ModelFile]
    rank: int = 0


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a worker's process; one that does not run yet is not started."""

    life: int
    number: int


class Released(msgspec.Struct, frozen=True, tag=True):
    """No worker of the node is needed any more; it may end."""


class Attached(msgspec.Struct, frozen=True, tag=True):
    """The channel is open: what follows are the frames of a worker."""


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """Bytes of a file and their BLAKE2b digest of 16 bytes."""

    offset: int
    data: bytes
    digest: bytes


class Whole(msgspec.Struct, frozen=True, tag=True):
    """The file ends here."""


ToNode = Welcome | Renewed | Refused | Beat | Launch | Signal | Released
ToChannel = Attached | Refused
ToFetcher = Chunk | Whole | Refused

first_decoder = msgspec.msgpack.Decoder(list[First])
from_node_decoder = msgspec.msgpack.Decoder(list[FromNode])
to_node_decoder = msgspec.msgpack.Decoder(list[ToNode])
to_channel_decoder = msgspec.msgpack.Decoder(list[ToChannel])
to_fetcher_decoder = msgspec.msgpack.Decoder(list[ToFetcher])

_encoder = msgspec.msgpack.Encoder()


def framed(*messages: First | FromNode | ToNode | ToChannel | ToFetcher) -> bytes:
    """The messages as one frame."""
    body = _encoder.encode(messages)
    return HEADER.pack(len(body)) + body
