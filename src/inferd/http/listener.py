"""The listening socket, and the server behind it: who is connected, and how it ends.

Knows TCP; nothing of HTTP's framing nor of what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, cast

from inferd import clock
from inferd.config import ServerConfig
from inferd.errors import ConfigError, InferdError
from inferd.events import ClientTurnedAway, Emit, ignore
from inferd.http.asgi import Receive, Scope, Send
from inferd.http.connection import NO_ROOM, Connection, Waits
from inferd.http.exchange import Exchange
from inferd.http.tls import end_writing, secured
from inferd.http.upgrade import Guest

__all__ = ["HttpServer", "bind"]

LOOK_EVERY_S: Final = 1.0
BACKLOG: Final = 2048
# A peer that vanished without a word (power, cable, NAT) is found after 60 + 4 * 15 s.
_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
UNSENT_BYTES: Final = 256 * 1024
"""What the kernel holds for a client that takes nothing, beside what fits into one more write. Without a bound it is what
``net.ipv4.tcp_wmem`` allows, 4 MiB for each client."""

TURNED_AWAY_S: Final = 1.0  # for a client without room to read why
MAX_TURNED_AWAY: Final = 256  # who get that time; others are cut off at once
TELL_EVERY_S: Final = 60.0

_log = logging.getLogger("inferd.http")


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's delay off only where it is.
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
                f"Port {config.port} may not be had by this user ({error.strerror}); choose a server.port from 1024 on.",
                param="server.port",
            ) from None
        raise ConfigError(
            f"Cannot listen on {where}: {error.strerror or error}; choose another server.host.", param="server.host"
        ) from None
    listener.setblocking(False)
    return listener


def reserve(config: ServerConfig) -> socket.socket | None:
    """A socket that keeps ``grpc_port`` for a listener which is opened later; it does not listen. None: none is wanted.

    Raises ConfigError when the port cannot be had.
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
            f"Port {config.grpc_port} on {config.host} cannot be had ({error.strerror or error}); choose another "
            "server.grpc_port.",
            param="server.grpc_port",
        ) from None
    return reserved


def set_options(listener: socket.socket) -> None:
    """Accepted sockets inherit these: a peer that vanished is found, and one that reads nothing holds little memory.

    The bound is on what the kernel has taken and not sent. Its buffer still grows with the distance of a client that reads.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    for name, seconds in _KEEP_ALIVE:
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


class HttpServer:
    """An application on a socket. ``serve`` runs until ``stop``; requests in flight get ``grace_s``.

    An application with a method ``refuse`` answers requests that cannot be read to their end. One with a method
    ``forward`` is offered every request whose body is complete, and may take
    it over without a task of its own; with a method ``express`` likewise whatever is read between two requests.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        config: ServerConfig,
        listener: socket.socket | None = None,
        waits: Waits | None = None,
        emit: Emit = ignore,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Binds at once, so that a port in use is known before anything is loaded."""
        self._listener = listener if listener is not None else bind(config)
        self._tls = tls
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._empty = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.app = app
        self.refuse = cast("Callable[[Exchange, InferdError], None]", getattr(app, "refuse", _refuse))
        self.forward = cast("Callable[[Exchange], bool] | None", getattr(app, "forward", None))
        self.express = cast("Callable[[Connection, bytes], bool] | None", getattr(app, "express", None))
        self._emit = emit
        self._num_turned_away = 0
        self._told_at = 0.0
        self.connections: set[Guest] = set()
        self.is_stopping = False
        self.configure(config)
        if waits is not None:
            self.waits = waits

    def configure(self, config: ServerConfig) -> None:
        """From now on other limits count."""
        self.waits = Waits(send_s=config.send_timeout_s)
        self.max_connections = num_files() // 2
        if self._listener.family != socket.AF_UNIX:  # the operator comes in when nobody else does
            self.max_connections = min(self.max_connections, config.max_connections)
        self._grace_s = config.grace_s

    @property
    def port(self) -> int:
        """The port in use; a free one if the configuration said 0."""
        port: int = self._listener.getsockname()[1]
        return port

    async def serve(self) -> None:
        """Accept requests until ``stop``; then wait for those in flight, within the grace period."""
        loop = asyncio.get_running_loop()
        make: Callable[..., Coroutine[Any, Any, asyncio.Server]] = loop.create_server
        if self._listener.family == socket.AF_UNIX:
            make = loop.create_unix_server
        try:
            server = await make(lambda: Connection(self), sock=self._listener, backlog=BACKLOG, **secured(self._tls))
            self._look()
            await self._stopping.wait()
            server.close()
            await self._leave()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._listener.close()

    async def _leave(self) -> None:
        """Let what is under way come to its end."""
        for connection in tuple(self.connections):
            connection.shut()
        forced = asyncio.ensure_future(self._forced.wait())
        ended = asyncio.ensure_future(self._ended())
        try:
            await asyncio.wait((forced, ended), timeout=max(1.0, self._grace_s), return_when=asyncio.FIRST_COMPLETED)
        finally:
            forced.cancel()
            ended.cancel()
            for connection in tuple(self.connections):
                connection.abort()
            for task in tuple(self._tasks):
                task.cancel()
            if self._tasks:
                await asyncio.wait(tuple(self._tasks), timeout=1.0)

    async def _ended(self) -> None:
        while self.connections:
            self._empty.clear()
            await self._empty.wait()
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[HttpServer]:
        """Serve in the background for the length of the block."""
        task = asyncio.create_task(self.serve())
        try:
            yield self
        finally:
            self.stop()
            await task

    def stop(self, *, now: bool = False) -> None:
        """Stop accepting; ``now`` cuts requests in flight as well."""
        self.is_stopping = True
        self._stopping.set()
        if now:
            self._forced.set()

    # -- the connections' host --------------------------------------------------------------

    def spawn(self, serving: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(serving)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def turn_away(self, transport: asyncio.Transport) -> None:
        self._emit(ClientTurnedAway())
        now = clock.now()
        if not self._told_at or now - self._told_at > TELL_EVERY_S:
            self._told_at = now
            _log.warning("clients are turned away: there are %d connections, and no more may be", len(self.connections))
        self._num_turned_away += 1
        transport.set_protocol(_TurnedAway(transport, self._turned_away_gone))
        if self._num_turned_away > MAX_TURNED_AWAY:
            transport.close()

    def _turned_away_gone(self) -> None:
        self._num_turned_away -= 1

    def connection_gone(self, connection: Guest) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def _look(self) -> None:
        """One timer for the patience with all clients."""
        now = clock.now()
        for connection in tuple(self.connections):
            connection.look(now)
        every = min(LOOK_EVERY_S, min(self.waits) / 4)
        self._timer = asyncio.get_running_loop().call_later(every, self._look)


def _refuse(exchange: Exchange, error: InferdError) -> None:
    """For an application that has no error bodies of its own."""
    exchange.answer(400, ((b"content-type", b"text/plain; charset=utf-8"),), error.message.encode())


class _TurnedAway(asyncio.Protocol):
    """A client for whom there is no room. What it asks is read and not looked at: an answer from a connection
    with unread bytes would be lost."""

    __slots__ = ("_gone", "_timer")

    def __init__(self, transport: asyncio.Transport, gone: Callable[[], None]) -> None:
        self._gone = gone
        self._timer = asyncio.get_running_loop().call_later(TURNED_AWAY_S, transport.abort)
        transport.write(NO_ROOM)
        end_writing(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._gone()


def num_files() -> int:
    """How many files this process may open. A relayed request needs two; so do workers, and the database."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if limit == resource.RLIM_INFINITY else limit
