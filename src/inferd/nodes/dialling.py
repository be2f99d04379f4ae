"""A node's way to its server: how it was started, and connections that check the server's certificate first."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from inferd.nodes.certificate import client_context
from inferd.nodes.tokens import Token
from inferd.worker.process import WORKER_COMMAND

CONNECT_S: Final = 5.0

DEFAULT_PORT: Final = 8001
"""Of a server that is named without one."""

LEADER_VARIABLE: Final = "LWS_LEADER_ADDRESS"
"""The host of a group's first pod, in every pod of a LeaderWorkerSet (https://lws.sigs.k8s.io)."""


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a node is started."""

    host: str
    port: int
    token: Token
    name: str
    num_cores: int
    memory_bytes: int
    num_gpus: int
    labels: Mapping[str, str]
    drain_s: float
    command: Sequence[str] = WORKER_COMMAND  # starts a worker
    threads: int | None = None  # of a worker whose model's settings name no number; None: by the cores of the machine
    rejoin_s: float | None = None  # seconds without the server after which the node ends; None: it never does


class RefusedError(Exception):
    """The server does not take this machine as a node."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


async def connect(options: NodeOptions, make: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
    """A connection to the server whose certificate the token names. Raises OSError, RefusedError."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S):
            transport, _ = await loop.create_connection(
                make, options.host, options.port, ssl=client_context(), ssl_handshake_timeout=CONNECT_S
            )
    except ssl.SSLError as error:
        raise ConnectionError(f"no TLS there ({error.reason or error}); check the port") from None
    shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if hashlib.sha256(shown or b"").digest() != options.token.fingerprint:
        transport.abort()
        raise RefusedError(
            "certificate",
            "its certificate is not the one that the token was made for; it is another server, or its data folder "
            "was replaced: take a token of inferd node token there",
        )
    return transport
