"""The listening socket and the HTTP server on it: accepting connections, time limits and graceful shutdown.

Knows TCP. Does not know HTTP's framing (``connection.py``) or what the application serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final

from inferd import clock
from inferd.config import ServerConfig
from inferd.errors import ConfigError
from inferd.events import ClientTurnedAway, Emit, ignore
from inferd.http.connection import TOO_MANY_CONNECTIONS, Application, Connection, Timeouts
from inferd.http.head import HeadCache
from inferd.http.tls import end_writing, listener_options
from inferd.http.upgrade import ClientConnection

__all__ = ["HttpServer", "bind"]

TIMEOUT_CHECK_S: Final = 1.0
"""Seconds between two checks of all connections' timeouts, at most."""

BACKLOG: Final = 2048
"""Connections that the kernel completes and queues before the server accepts them."""

# A peer that disappears without closing (power loss, cable, NAT) is detected after 60 + 4 * 15 s.
_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
UNSENT_BYTES: Final = 256 * 1024
"""Bytes that the kernel buffers for a client that reads nothing, besides one more write. Without this limit it buffers
what ``net.ipv4.tcp_wmem`` allows: 4 MiB for each client."""

REJECTED_S: Final = 1.0  # seconds in which a rejected client can read the reason
MAX_REJECTED: Final = 256  # rejected connections that get this time; others are closed at once
REJECTION_LOG_EVERY_S: Final = 60.0  # at most one log line about rejected connections in this time

_log = logging.getLogger("inferd.http")


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket at ``server.host`` and ``server.port``. Raises ConfigError when the address is not usable."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets whose protocol is given explicitly.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        set_options(listener)
        listener.bind((config.host, config.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        where = f"{config.host}:{config.port}"
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {config.port} on {config.host} is in use; stop the other program or choose another server.port.",
                param="server.port",
            ) from None
        if error.errno == errno.EACCES:
            raise ConfigError(
                f"This user may not open port {config.port} ({error.strerror}); choose a server.port from 1024 on.",
                param="server.port",
            ) from None
        raise ConfigError(
            f"Cannot listen on {where}: {error.strerror or error}; choose another server.host.", param="server.host"
        ) from None
    listener.setblocking(False)
    return listener


def reserve(config: ServerConfig) -> socket.socket | None:
    """A socket that is bound to ``server.grpc_port`` but does not listen yet; None where no such port is configured.

    It reserves the port for the gRPC server, which starts later. Raises ConfigError when the port is not usable.
    """
    if config.grpc_port is None:
        return None
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((config.host, config.grpc_port))
    except OSError as error:
        reserved.close()
        raise ConfigError(
            f"Port {config.grpc_port} on {config.host} cannot be opened ({error.strerror or error}); choose another "
            "server.grpc_port.",
            param="server.grpc_port",
        ) from None
    return reserved


def set_options(listener: socket.socket) -> None:
    """Set options that every accepted socket inherits: TCP keep-alive, no Nagle delay, and few unsent bytes.

    Keep-alive detects a peer that disappeared. The limit counts bytes that the kernel has not sent yet. Bytes that are
    sent and not acknowledged are not limited, so a distant client that reads still gets its full throughput.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    for name, seconds in _KEEP_ALIVE:
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


class HttpServer:
    """Serves an application on a listening socket. ``serve`` runs until ``stop``."""

    def __init__(
        self,
        app: Application,
        config: ServerConfig,
        listener: socket.socket | None = None,
        timeouts: Timeouts | None = None,
        emit: Emit = ignore,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Bind the socket at once, so that a port in use is reported before a model is loaded. Raises ConfigError.

        An application may have the methods ``refuse``, ``forward`` and ``serve_direct`` of ``connection.Server``.
        """
        self._listener = listener if listener is not None else bind(config)
        self._tls = tls
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._empty = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.app = app
        self.heads = HeadCache()
        self._emit = emit
        self._num_rejected = 0
        self._rejection_logged_at = 0.0  # 0: not logged yet
        self.connections: set[ClientConnection] = set()
        self.is_stopping = False
        self.configure(config)
        if timeouts is not None:
            self.timeouts = timeouts

    def configure(self, config: ServerConfig) -> None:
        """Use the limits of ``config`` from now on."""
        self.timeouts = Timeouts(send_s=config.send_timeout_s)
        self.max_connections = max_open_files() // 2
        if self._listener.family != socket.AF_UNIX:  # the operator can still connect when no client can
            self.max_connections = min(self.max_connections, config.max_connections)
        self._grace_s = config.grace_s

    @property
    def port(self) -> int:
        """The port of the socket. Where the configuration says 0, the kernel has chosen it."""
        port: int = self._listener.getsockname()[1]
        return port

    async def serve(self) -> None:
        """Accept connections until ``stop``. Then wait for requests in progress, for ``grace_s`` seconds at most."""
        loop = asyncio.get_running_loop()
        make: Callable[..., Coroutine[Any, Any, asyncio.Server]] = loop.create_server
        options = listener_options(self._tls)
        if self._listener.family == socket.AF_UNIX:
            make = loop.create_unix_server
            # From 3.13 on the loop would look for the socket's file, to remove it at the end. The file is that of the
            # socket's owner, and where its path is too long the socket has an alias that is valid no more.
            if sys.version_info >= (3, 13):
                options["cleanup_socket"] = False
        try:
            server = await make(lambda: Connection(self), sock=self._listener, backlog=BACKLOG, **options)
            self._check_timeouts()
            await self._stopping.wait()
            server.close()
            await self._wait_for_connections()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._listener.close()

    async def _wait_for_connections(self) -> None:
        """Wait until all connections are closed, the grace period has passed, or ``stop(now=True)``."""
        for connection in tuple(self.connections):
            connection.shut_down()
        forced = asyncio.ensure_future(self._forced.wait())
        all_closed = asyncio.ensure_future(self._all_closed())
        try:
            await asyncio.wait(
                (forced, all_closed), timeout=max(1.0, self._grace_s), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            forced.cancel()
            all_closed.cancel()
            for connection in tuple(self.connections):
                connection.abort()
            for task in tuple(self._tasks):
                task.cancel()
            if self._tasks:
                await asyncio.wait(tuple(self._tasks), timeout=1.0)

    async def _all_closed(self) -> None:
        while self.connections:
            self._empty.clear()
            await self._empty.wait()
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[HttpServer]:
        """Run ``serve`` as a task for the duration of the ``async with`` block, then stop it."""
        task = asyncio.create_task(self.serve())
        try:
            yield self
        finally:
            self.stop()
            await task

    def stop(self, *, now: bool = False) -> None:
        """Stop accepting connections. With ``now``, abort the requests in progress as well."""
        self.is_stopping = True
        self._stopping.set()
        if now:
            self._forced.set()

    # -- called by connections --------------------------------------------------------------

    def spawn(self, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``serving`` as a task; ``serve`` waits for its end."""
        task = asyncio.get_running_loop().create_task(serving)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def reject_connection(self, transport: asyncio.Transport) -> None:
        """Answer with status 503 and close: after ``REJECTED_S``, or at once beyond ``MAX_REJECTED`` connections."""
        self._emit(ClientTurnedAway())
        now = clock.now()
        if not self._rejection_logged_at or now - self._rejection_logged_at > REJECTION_LOG_EVERY_S:
            self._rejection_logged_at = now
            _log.warning("clients are turned away: there are %d connections, and no more may be", len(self.connections))
        self._num_rejected += 1
        transport.set_protocol(_RejectedConnection(transport, self._rejected_closed))
        if self._num_rejected > MAX_REJECTED:
            transport.close()

    def _rejected_closed(self) -> None:
        self._num_rejected -= 1

    def connection_closed(self, connection: ClientConnection) -> None:
        """Forget a connection that is closed."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def _check_timeouts(self) -> None:
        """Check the timeouts of all connections, and schedule the next check: one timer serves all of them."""
        now = clock.now()
        for connection in tuple(self.connections):
            connection.check_timeouts(now)
        every = min(TIMEOUT_CHECK_S, min(self.timeouts) / 4)
        self._timer = asyncio.get_running_loop().call_later(every, self._check_timeouts)


class _RejectedConnection(asyncio.Protocol):
    """A connection beyond ``max_connections``: it is answered with status 503 and closed.

    What the client sends is read and discarded. Closing a socket with unread bytes resets the connection (RFC 9112,
    section 9.6), and the client might lose the answer.
    """

    __slots__ = ("_on_closed", "_timer")

    def __init__(self, transport: asyncio.Transport, on_closed: Callable[[], None]) -> None:
        self._on_closed = on_closed
        self._timer = asyncio.get_running_loop().call_later(REJECTED_S, transport.abort)
        transport.write(TOO_MANY_CONNECTIONS)
        end_writing(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._on_closed()


def max_open_files() -> int:
    """Open files that the operating system allows this process.

    A relayed request needs two: its client's connection and the remote server's. Workers and the database need some.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if limit == resource.RLIM_INFINITY else limit
