"""The gRPC listener: its socket, its limits, health and reflection, and how it ends.

Knows grpcio; nothing of what its calls mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from typing import Final, TypeAlias

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from inferd.config import ServerConfig
from inferd.errors import ConfigError
from inferd.gateway.connection import MAX_HEADER_BYTES
from inferd.gateway.grpc.calls import SERVICE, Calls
from inferd.gateway.grpc.health import SERVICE_NAME as HEALTH
from inferd.gateway.grpc.health import Health
from inferd.gateway.grpc.inference import model_infer
from inferd.gateway.grpc.management import management
from inferd.gateway.grpc.protocol import pool
from inferd.gateway.grpc.short_way import METHOD as INFER
from inferd.gateway.grpc.short_way import ShortWay
from inferd.gateway.grpc.streams import METHOD, Streams
from inferd.gateway.health import is_ready
from inferd.gateway.server import LAST_WORDS_S, Gateway

MAX_CALLS: Final = 8192  # at a time; a further one is refused with RESOURCE_EXHAUSTED
MAX_STREAMS: Final = 1024  # calls at a time of one connection, which HTTP/2 calls streams
LOOK_EVERY_S: Final = 1.0

_Method: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"


class GrpcServer:
    """Serves until ``stop``; calls in flight get ``grace_s``."""

    def __init__(self, gateway: Gateway, config: ServerConfig, reserved: socket.socket) -> None:
        """``reserved`` is bound to the port, and closed when the port is served."""
        self._config = config
        self._reserved = reserved
        self._router = gateway.room.router
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._calls = calls = Calls(gateway)
        self._streams = Streams(calls)
        self._methods: dict[str, _Method] = {
            INFER: grpc.unary_unary_rpc_method_handler(
                ShortWay(calls, calls.serving(INFER, "infer", model_infer)).serve
            ),
            METHOD: self._streams.method(),
            **management(calls),
        }
        self._health = Health(self._is_serving)
        self._server: aio.Server | None = None
        self.port: int = reserved.getsockname()[1]

    def _is_serving(self) -> bool:
        return not self._stopping.is_set() and is_ready(self._router)

    async def start(self) -> None:
        """Accept calls from now on. Raises ConfigError where the port cannot be served."""
        server = self._server = aio.server(options=_options(self._config), maximum_concurrent_rpcs=MAX_CALLS)
        server.add_generic_rpc_handlers((_Service(self._methods),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), server, pool=pool())
        host = self._config.host or "0.0.0.0"
        try:
            server.add_insecure_port(f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}")
        except RuntimeError:
            raise ConfigError(
                f"Port {self.port} on {host} is in use; stop the other program or choose another server.grpc_port.",
                param="server.grpc_port",
            ) from None
        await server.start()
        self._reserved.close()

    async def serve(self) -> None:
        """Until ``stop``; then wait for the calls in flight, within the grace period."""
        server = self._server
        assert server is not None, "it was not started"
        looking = asyncio.create_task(self._health.follow(LOOK_EVERY_S))
        try:
            await self._stopping.wait()
            await self._health.enter_graceful_shutdown()
            self._streams.stop()
            ending = asyncio.create_task(server.stop(max(1.0, self._config.grace_s)))
            forced = asyncio.create_task(self._forced.wait())
            await asyncio.wait((ending, forced), return_when=asyncio.FIRST_COMPLETED)
            forced.cancel()
        finally:
            looking.cancel()
            await server.stop(None)
            with contextlib.suppress(TimeoutError):  # those that were cut still tell what they cost
                async with asyncio.timeout(2 * LAST_WORDS_S):
                    await self._calls.closed()

    def stop(self, *, now: bool = False) -> None:
        """Stop accepting; ``now`` cuts calls in flight as well."""
        self._stopping.set()
        if now:
            self._forced.set()


class _Service(grpc.GenericRpcHandler):
    """Finds a call's method; what comes and goes stays bytes."""

    def __init__(self, methods: Mapping[str, _Method]) -> None:
        self._methods = {f"/{SERVICE}/{name}": method for name, method in methods.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> _Method | None:
        return self._methods.get(handler_call_details.method)


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # two servers on one port would share its calls unseen
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.max_metadata_size", MAX_HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_HEADER_BYTES),
        ("grpc.server_handshake_timeout_ms", 10_000),
        # A peer that vanished without a word is found after 60 + 20 s.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # A client may ask every 5 s whether we are there; one that asks more often is sent away.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 3),
    ]
