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
from typing import Final

from inferd import clock
from inferd.errors import UpstreamFailed
from inferd.remote.connection import Connection, Head, Receiver
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
_CHECK_EVERY_S: Final = (0.02, 0.5)  # the least and the most seconds between two checks


class Exchange:
    """One request in progress, from ``Pool.send`` to the end of its answer.

    It passes the answer from the connection to the receiver. It drops its reference to the connection before it tells
    the receiver of the end, because the connection may serve another exchange from then on.
    """

    __slots__ = ("_is_paused", "_receiver", "_request", "answer_data", "answer_head", "connection", "task")

    def __init__(self, request: bytes, receiver: Receiver) -> None:
        self._request = request
        self._receiver = receiver
        self._is_paused = False
        self.connection: Connection | None = None
        self.task: asyncio.Task[None] | None = None  # while a connection is opened for it
        self.answer_head = receiver.answer_head
        self.answer_data = receiver.answer_data

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

    def cancel(self) -> None:
        """Close the connection, which tells the server to stop. The receiver is not called any more."""
        if self.task is not None:
            self.task.cancel()
            self.task = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()

    def adopt(self, connection: Connection) -> None:
        """Continue an exchange that is in progress on ``connection`` with another receiver."""
        self.connection = connection
        connection.set_receiver(self)

    def start_on(self, connection: Connection) -> None:
        """Send the request on ``connection``."""
        self.connection = connection
        connection.send(self._request, self)
        if self._is_paused:
            connection.pause()

    def answer_whole(self, head: Head, body: bytes) -> None:
        self.connection = None
        self._receiver.answer_whole(head, body)

    def answer_ended(self) -> None:
        self.connection = None
        self._receiver.answer_ended()

    def answer_failed(self, error: UpstreamFailed, *, is_stale: bool) -> None:
        self.connection = self.task = None
        self._receiver.answer_failed(error, is_stale=is_stale)

    def answer_broken(self, error: UpstreamFailed) -> None:
        self.connection = self.task = None
        self._receiver.answer_broken(error)


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
        self._check_every_s = min(max(shortest / _CHECKS_PER_TIMEOUT, _CHECK_EVERY_S[0]), _CHECK_EVERY_S[1])

    @property
    def num_connections(self) -> int:
        """Open connections, idle or not."""
        return len(self._all)

    def send(self, request: bytes, receiver: Receiver, *, fresh: bool = False) -> Exchange:
        """Send a complete request on an idle connection, or on a new one. ``fresh``: always on a new one.

        Does not raise for failures of the server: the receiver gets them as ``answer_failed``.
        """
        exchange = Exchange(request, receiver)
        connection = None if fresh else self._take(clock.now())
        if connection is not None:
            exchange.start_on(connection)
        else:
            self._close_idle_if_full()
            exchange.task = asyncio.get_running_loop().create_task(self._connect(exchange))
            self._connecting.add(exchange.task)
            exchange.task.add_done_callback(self._connecting.discard)
        return exchange

    def take_idle(self, now: float) -> Connection | None:
        """Remove an idle connection from the pool, for a caller that sends on it directly; None: there is none.

        ``now``: the time of ``inferd.clock``, in seconds. The connection returns to the pool when its answer has ended.
        """
        return None if self._is_closed else self._take(now)

    def put_back(self, connection: Connection) -> None:
        """Return a connection of ``take_idle`` on which nothing was sent."""
        self._connection_freed(connection)

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

    async def _connect(self, exchange: Exchange) -> None:
        try:
            connection = await self._open()
            exchange.task = None
            exchange.start_on(connection)
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
