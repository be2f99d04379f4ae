"""The gRPC listener: its socket and connections, the methods by path, and the shutdown.

Knows HTTP/2's connections and gRPC's calls. Does not know what a method computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from inferd import clock
from inferd.config import ServerConfig
from inferd.errors import ConfigError
from inferd.events import ClientTurnedAway
from inferd.gateway.admin.health import is_ready
from inferd.gateway.grpc import health, reflection, scaler
from inferd.gateway.grpc.calls import SERVICE, Calls
from inferd.gateway.grpc.inference import Infer
from inferd.gateway.grpc.management import management
from inferd.gateway.grpc.rpc import Method, Rpc, StreamMethod, StreamRpc, UnaryMethod, UnaryRpc
from inferd.gateway.grpc.statuses import Status
from inferd.gateway.grpc.streams import METHOD as STREAM_INFER
from inferd.gateway.grpc.streams import Streams
from inferd.gateway.grpc.wire import Head, Refusal, path_of, refusal_of, shown
from inferd.gateway.server import Gateway
from inferd.http.cost import TurnQueue
from inferd.http.http2.connection import Connection
from inferd.http.http2.hpack import Header
from inferd.http.http2.request import read_request
from inferd.http.http2.stream import Stream, StreamConnection
from inferd.http.limits import MAX_HEADER_BYTES, MAX_HEADERS
from inferd.http.listener import BACKLOG, TIMEOUT_CHECK_S, max_open_files, set_options
from inferd.http.tls import listener_options
from inferd.http.upgrade import ClientConnection

LAST_CALLS_S: Final = 2.0  # for cancelled calls to settle their quotas
_TOO_LARGE: Final = Refusal(
    Status.RESOURCE_EXHAUSTED,
    f"The headers are larger than {MAX_HEADER_BYTES // 1024} KiB, or more than {MAX_HEADERS}; send less metadata.",
)


class _Target(NamedTuple):
    """The headers of a call, and its method. Without a method the head has the refusal."""

    head: Head
    unary: UnaryMethod | None = None
    streaming: StreamMethod | None = None


class GrpcServer:
    """Serves calls until ``stop``; calls in flight then have ``server.grace_s`` to end."""

    def __init__(
        self, gateway: Gateway, config: ServerConfig, reserved: socket.socket, tls: ssl.SSLContext | None = None
    ) -> None:
        """``reserved`` is a socket that is bound to the port."""
        self._tls = tls
        self._gateway = gateway
        self._reserved = reserved
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._empty = asyncio.Event()
        self._calls = calls = Calls(gateway)
        self._streams = Streams(calls)
        self._health = health.Health(self._is_serving)
        self._unary: dict[bytes, UnaryMethod] = {
            path_of(SERVICE, Infer.name): Infer(calls),
            **{path_of(SERVICE, name): method for name, method in management(calls).items()},
            path_of(health.SERVICE_NAME, "Check"): health.Check(self._health),
            **{path_of(scaler.SERVICE_NAME, name): method for name, method in scaler.scaler_methods(calls).items()},
        }
        self._activity = scaler.ActivityStreams(calls)
        self._streaming: dict[bytes, StreamMethod] = {
            path_of(SERVICE, STREAM_INFER): self._streams,
            path_of(health.SERVICE_NAME, "Watch"): health.Watch(self._health, calls),
            path_of(scaler.SERVICE_NAME, self._activity.name): self._activity,
            **dict.fromkeys(
                (path_of(name, reflection.METHOD) for name in reflection.NAMES), reflection.Reflection(calls)
            ),
        }
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.connections: set[ClientConnection] = set()
        self.turn_queue = TurnQueue(self.call_soon)
        self.port: int = reserved.getsockname()[1]

    @property
    def methods(self) -> dict[bytes, Method]:
        """All methods by their paths."""
        return {**self._unary, **self._streaming}

    def _is_serving(self) -> bool:
        return not self._stopping.is_set() and is_ready(self._gateway.context.router)

    async def start(self) -> None:
        """Begin to accept calls. Raises ConfigError when the port cannot be used."""
        set_options(self._reserved)
        try:
            self._reserved.setblocking(False)
            self._server = await self._loop.create_server(
                lambda: Connection(self), sock=self._reserved, backlog=BACKLOG, **listener_options(self._tls)
            )
        except OSError as error:
            raise ConfigError(
                f"Port {self.port} cannot be served ({error.strerror or error}); choose another server.grpc_port.",
                param="server.grpc_port",
            ) from None
        self._look()

    async def serve(self) -> None:
        """Serve until ``stop``, then wait for the calls in flight within the grace period."""
        server = self._server
        assert server is not None, "it was not started"
        try:
            await self._stopping.wait()
            server.close()
            for connection in tuple(self.connections):
                connection.shut_down()
            self._health.notify_changes()
            self._streams.stop()
            self._activity.stop()
            await self._leave()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            server.close()
            self._reserved.close()
            for connection in tuple(self.connections):
                connection.abort()
            with contextlib.suppress(TimeoutError):  # cancelled calls still report their usage
                async with asyncio.timeout(LAST_CALLS_S):
                    await self._ended()
                    await self._calls.wait_closed()

    async def _leave(self) -> None:
        grace_s = max(1.0, self._gateway.context.config.server.grace_s)
        waiting = [asyncio.ensure_future(self._forced.wait()), asyncio.ensure_future(self._ended())]
        try:
            await asyncio.wait(waiting, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()

    async def _ended(self) -> None:
        while self.connections:
            self._empty.clear()
            await self._empty.wait()

    def stop(self, *, now: bool = False) -> None:
        """Stop accepting calls. ``now``: cancel the calls in flight as well."""
        self._stopping.set()
        if now:
            self._forced.set()

    # -- the connections' host --------------------------------------------------------------

    @property
    def send_s(self) -> float:
        return self._gateway.context.config.server.send_timeout_s

    def call_soon(self, call: Callable[[], None], /) -> object:
        return self._loop.call_soon(call)

    def accepts_connection(self) -> bool:
        if len(self.connections) < min(self._gateway.context.config.server.max_connections, max_open_files() // 2):
            return True
        self._gateway.context.emit(ClientTurnedAway())
        return False

    def connection_closed(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def read_head(self, headers: Sequence[Header] | None) -> object | None:
        if headers is None:
            return _Target(Head(None, _TOO_LARGE))
        request = read_request(headers)
        if request is None:
            return None
        head = Head(request, refusal_of(request))
        unary, streaming = self._unary.get(request.path), self._streaming.get(request.path)
        if head.refusal is None and unary is None and streaming is None:
            head.refusal = Refusal(Status.UNIMPLEMENTED, f"There is no method {shown(request.path)} here.")
        return _Target(head, unary, streaming)

    def open_stream(self, connection: StreamConnection, number: int, head: object) -> Stream:
        assert isinstance(head, _Target), "it was made by read_head"
        head, unary, streaming = head
        if head.refusal is not None:
            refused = StreamRpc(connection, number, head, self)
            refused.refuse(head.refusal)
            return refused
        if unary is not None:
            call = UnaryRpc(connection, number, head, self, unary)
            self._calls.admit(call, unary)
            return call
        assert streaming is not None, "a head without a method is refused"
        rpc = StreamRpc(connection, number, head, self, streaming)
        if self._calls.admit(rpc, streaming):
            streaming.begin(rpc)
        return rpc

    # -- what holds for calls ---------------------------------------------------------------

    @property
    def max_bytes(self) -> int:
        return self._gateway.context.max_body_bytes

    @property
    def message_s(self) -> float:
        return self._gateway.context.body_timeout_s

    def log_refusal(self, rpc: Rpc, refusal: Refusal) -> None:
        self._calls.log_refusal(rpc, refusal)

    def _look(self) -> None:
        """Check all connections for timeouts, the server's health and the models' activity for changes, and schedule
        the next check."""
        self._health.notify_changes()
        self._activity.look()
        now = clock.now()
        for connection in tuple(self.connections):
            connection.check_timeouts(now)
        every = min(TIMEOUT_CHECK_S, self.message_s / 4, self.send_s / 4)
        self._timer = self._loop.call_later(every, self._look)
