"""A pool of connections to one remote server: reused while they are idle, opened when none is.

The callers send at most ``max_connections`` requests at the same time, so the pool needs no queue. The host name is
resolved for every new connection, and no connection is reused after ``MAX_AGE_S``, so the pool follows changes of the
DNS. One timer checks the time limits of all connections.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from abc import ABC, abstractmethod
from typing import Final

from inferd import clock
from inferd.errors import UpstreamFailed
from inferd.open_class import mypyc_attr
from inferd.remote.connection import Connection, Head, Headers
from inferd.remote.origin import Origin, Timeouts

_log = logging.getLogger("inferd.remote")

RECEIVE_BYTES: Final = 256 * 1024
"""Bytes of an answer that the kernel buffers while its client reads slowly. Without this limit its buffer grows to what
``net.ipv4.tcp_rmem`` allows: 6 MiB and more. The kernel doubles the number for its bookkeeping."""

MAX_AGE_S: Final = 300.0
"""Seconds after which a connection is not reused."""

MAX_IDLE_S: Final = 30.0
"""Seconds without a request after which a connection is closed."""

_CHECKS_PER_TIMEOUT: Final = 8
_SHORTEST_CHECK_S: Final = 0.02  # between two checks
_LONGEST_CHECK_S: Final = 0.5


@mypyc_attr(allow_interpreted_subclasses=True)
class Exchange(ABC):
    """One request in progress, from ``Pool.send`` to the end of its answer: the answer's receiver.

    A subclass processes the answer. It calls ``ended`` before anything else when the answer is complete or has failed,
    because the connection may serve another exchange from then on.
    """

    connection: Connection | None = None
    task: asyncio.Task[None] | None = None  # while a connection is made for it
    _is_paused = False

    @abstractmethod
    def answer_whole(self, head: Head, body: bytes) -> None: ...
    @abstractmethod
    def answer_head(self, status: int, headers: Headers) -> None: ...
    @abstractmethod
    def answer_data(self, data: bytes) -> None: ...
    @abstractmethod
    def answer_ended(self) -> None: ...
    @abstractmethod
    def answer_failed(self, error: UpstreamFailed, *, is_stale: bool) -> None: ...
    @abstractmethod
    def answer_broken(self, error: UpstreamFailed) -> None: ...

    def pause(self) -> None:
        """Stop reading the answer. Only the kernels' buffers fill up further."""
        self._is_paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """Continue reading the answer."""
        self._is_paused = False
        if self.connection is not None:
            self.connection.resume()

    def cut(self) -> None:
        """Drop the connection: the other side sees that no answer is wanted. The receiver hears nothing more."""
        if self.task is not None:
            self.task.cancel()
            self.task = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()

    def start_on(self, connection: Connection, request: bytes, now: float) -> None:
        self.connection = connection
        connection.send(request, self, now)
        if self._is_paused:
            connection.pause()

    def ended(self) -> None:
        """Refer to the connection no more."""
        self.connection = self.task = None


class Pool:
    """Sends requests to one origin. To be used from one event loop."""

    def __init__(
        self, origin: Origin, timeouts: Timeouts, max_connections: int, context: ssl.SSLContext | None = None
    ) -> None:
        """``context``: as of ``client_context``, for an origin that uses TLS."""
        assert origin.is_secure == (context is not None), "an origin with TLS needs a context"
        self._origin = origin
        self._timeouts = timeouts
        self._max_connections = max_connections
        self._context = context
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        shortest = min(timeouts.first_byte_s, timeouts.idle_s)
        self._check_every_s = min(max(shortest / _CHECKS_PER_TIMEOUT, _SHORTEST_CHECK_S), _LONGEST_CHECK_S)

    @property
    def num_connections(self) -> int:
        """Open connections, idle or not."""
        return len(self._all)

    def send(self, request: bytes, exchange: Exchange, *, fresh: bool = False) -> None:
        """Send a complete request on an idle connection, or on a new one. ``fresh``: always on a new one.

        Does not raise for failures of the server: the exchange gets them as ``answer_failed``.
        """
        now = clock.now()
        connection = None if fresh else self._take(now)
        if connection is not None:
            exchange.start_on(connection, request, now)
        else:
            self._close_idle_if_full()
            exchange.task = asyncio.get_running_loop().create_task(self._connect(exchange, request))
            self._connecting.add(exchange.task)
            exchange.task.add_done_callback(self._connecting.discard)

    def _take(self, now: float) -> Connection | None:
        """The usable connection that was used last. So superfluous connections become idle for long, and are closed."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed and self._is_usable(connection, now):
                return connection
            connection.abort()
        return None

    def _is_usable(self, connection: Connection, now: float) -> bool:
        keep_alive_s = MAX_IDLE_S if connection.keep_alive_s is None else min(MAX_IDLE_S, connection.keep_alive_s - 1.0)
        return now - connection.idle_since < keep_alive_s and now - connection.made_at < MAX_AGE_S

    def _close_idle_if_full(self) -> None:
        if len(self._all) + len(self._connecting) >= self._max_connections and self._idle:
            self._idle[0].abort()

    async def _connect(self, exchange: Exchange, request: bytes) -> None:
        try:
            connection = await self._open()
            exchange.task = None
            exchange.start_on(connection, request, clock.now())
        except UpstreamFailed as error:
            exchange.answer_failed(error, is_stale=False)
        except Exception:
            _log.exception("a request could not be sent to %s", self._origin)
            exchange.answer_broken(
                UpstreamFailed("The remote server cannot be asked; try again later.", code="upstream_connect_failed")
            )

    async def _open(self) -> Connection:
        """Open a connection. Raises UpstreamFailed; its code names the step that failed."""
        origin, loop = self._origin, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                transport, connection = await loop.create_connection(
                    lambda: Connection(self._connection_freed, self._connection_lost),
                    origin.host,
                    origin.port,
                    ssl=self._context,
                    server_hostname=origin.host if self._context is not None else None,
                )
        except TimeoutError:
            raise UpstreamFailed(
                f"The remote server took no connection within {self._timeouts.connect_s:g} s; try again later.",
                code="upstream_connect_timeout",
            ) from None
        except ssl.SSLCertVerificationError as error:
            raise UpstreamFailed(
                f"The remote server's certificate is not trusted: {error.verify_message}.",
                code="upstream_certificate",
            ) from None
        except (OSError, ssl.SSLError) as error:
            what = "name cannot be resolved" if isinstance(error, socket.gaierror) else "port takes no connection"
            raise UpstreamFailed(
                f"The remote server's {what}; try again later.", code="upstream_connect_failed"
            ) from None
        if self._is_closed:
            connection.abort()
            raise UpstreamFailed("The remote server is no longer used.", code="upstream_connect_failed")
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        self._all.add(connection)
        self._schedule_check()
        return connection

    # -- called by connections --------------------------------------------------------------

    def _connection_freed(self, connection: Connection) -> None:
        if self._is_closed:  # otherwise ``_take`` checks the connection before it is reused
            connection.abort()
        else:
            self._idle.append(connection)

    def _connection_lost(self, connection: Connection) -> None:
        self._all.discard(connection)
        if not connection.is_busy and connection in self._idle:
            self._idle.remove(connection)

    # -- time limits ------------------------------------------------------------------------

    def _schedule_check(self) -> None:
        if self._timer is None and self._all and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(self._check_every_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        try:
            self.check_timeouts(clock.now())
        finally:
            self._schedule_check()

    def check_timeouts(self, now: float) -> None:
        """End exchanges that exceeded a time limit, and close connections that were idle for too long."""
        for connection in tuple(self._all):
            if connection.is_busy:
                error = self._timeout_error(connection, now)
                if error is not None:
                    connection.fail(error)
            elif not self._is_usable(connection, now):
                connection.abort()

    def _timeout_error(self, connection: Connection, now: float) -> UpstreamFailed | None:
        if connection.is_paused:
            return None  # the receiver stopped reading, not the server
        if not connection.has_begun:
            if now - connection.sent_at <= self._timeouts.first_byte_s:
                return None
            return UpstreamFailed(
                f"The remote server did not begin to answer within {self._timeouts.first_byte_s:g} s; try again later.",
                code="upstream_first_byte_timeout",
            )
        if now - connection.last_at <= self._timeouts.idle_s:
            return None
        return UpstreamFailed(
            f"The remote server fell silent for {self._timeouts.idle_s:g} s in the middle of its answer; try again.",
            code="upstream_idle_timeout",
        )

    async def close(self) -> None:
        """Close all connections. Idempotent. The receivers of unfinished exchanges are not called any more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        connecting = list(self._connecting)
        for task in connecting:
            task.cancel()
        for connection in tuple(self._all):
            connection.abort()
        if connecting:
            await asyncio.wait(connecting)
