"""The connections to one remote server: kept while they are good, made when there is none.

There are never more than ``max_connections``, because nobody may have more exchanges under way. The
name is looked up anew for every connection, and none is used for longer than ``MAX_AGE_S``, so a
change in the DNS is followed. One timer looks after everybody's patience.
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
from inferd.remote.origin import Origin, Patience

_log = logging.getLogger("inferd.remote")

RECEIVE_BYTES: Final = 256 * 1024
"""What the kernel holds of an answer whose client reads slowly. Without a bound it grows to what ``net.ipv4.tcp_rmem`` allows, 6 MiB and
more for each answer that was fast before. The kernel doubles the number for its own books."""

MAX_AGE_S: Final = 300.0
MAX_IDLE_S: Final = 30.0
_LOOKS_PER_PATIENCE: Final = 8
_LOOK_EVERY_S: Final = (0.02, 0.5)


class Exchange:
    """One request on its way, from ``Pool.send`` to its answer's end. What the asker holds on to.

    Stands between connection and receiver so that it has let go of the one before the other hears of
    the end.
    """

    __slots__ = ("_is_paused", "_receiver", "_request", "answer_data", "answer_head", "connection", "task")

    def __init__(self, request: bytes, receiver: Receiver) -> None:
        self._request = request
        self._receiver = receiver
        self._is_paused = False
        self.connection: Connection | None = None
        self.task: asyncio.Task[None] | None = None  # while a connection is made for it
        self.answer_head = receiver.answer_head
        self.answer_data = receiver.answer_data

    def pause(self) -> None:
        """Read no more of the answer; what the kernels hold is all that waits."""
        self._is_paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        self._is_paused = False
        if self.connection is not None:
            self.connection.resume()

    def cancel(self) -> None:
        """Drop the connection: the other side sees that nobody waits. The receiver hears nothing more."""
        if self.task is not None:
            self.task.cancel()
            self.task = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()

    def adopt(self, connection: Connection) -> None:
        """Go on with an exchange that was begun without this one."""
        self.connection = connection
        connection.hand_to(self)

    def run_on(self, connection: Connection) -> None:
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
    """Carries requests to one origin. Used from one event loop."""

    def __init__(
        self, origin: Origin, patience: Patience, max_connections: int, context: ssl.SSLContext | None = None
    ) -> None:
        """``context``: the trust in the other side's certificate, for an origin that is secure."""
        assert origin.is_secure == (context is not None), "a secure origin needs a context"
        self._origin = origin
        self._patience = patience
        self._max_connections = max_connections
        self._context = context
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        shortest = min(patience.first_byte_s, patience.idle_s)
        self._look_every_s = min(max(shortest / _LOOKS_PER_PATIENCE, _LOOK_EVERY_S[0]), _LOOK_EVERY_S[1])

    @property
    def num_connections(self) -> int:
        return len(self._all)

    def send(self, request: bytes, receiver: Receiver, *, fresh: bool = False) -> Exchange:
        """Send a whole request on an idle connection, or on one made for it (always, if ``fresh``).

        Never raises for what the other side does: the receiver hears it.
        """
        exchange = Exchange(request, receiver)
        connection = None if fresh else self._take(clock.now())
        if connection is not None:
            exchange.run_on(connection)
        else:
            self._make_room()
            exchange.task = asyncio.get_running_loop().create_task(self._connect(exchange))
            self._connecting.add(exchange.task)
            exchange.task.add_done_callback(self._connecting.discard)
        return exchange

    def lend(self, now: float) -> Connection | None:
        """An idle connection for an exchange that its user carries on himself; None: there is none. It comes back when
        its answer has ended."""
        return None if self._is_closed else self._take(now)

    def give_back(self, connection: Connection) -> None:
        """It was lent and not used."""
        self._freed(connection)

    def _take(self, now: float) -> Connection | None:
        """The connection that was used last, so that those too many grow old."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed and self._is_good(connection, now):
                return connection
            connection.abort()
        return None

    def _is_good(self, connection: Connection, now: float) -> bool:
        keep_s = MAX_IDLE_S if connection.keep_s is None else min(MAX_IDLE_S, connection.keep_s - 1.0)
        return now - connection.idle_since < keep_s and now - connection.made_at < MAX_AGE_S

    def _make_room(self) -> None:
        if len(self._all) + len(self._connecting) >= self._max_connections and self._idle:
            self._idle[0].abort()

    async def _connect(self, exchange: Exchange) -> None:
        try:
            connection = await self._open()
            exchange.task = None
            exchange.run_on(connection)
        except UpstreamFailed as error:
            exchange.answer_failed(error, is_stale=False)
        except Exception:
            _log.exception("a request could not be sent to %s", self._origin)
            exchange.answer_broken(
                UpstreamFailed("The remote server cannot be asked; try again later.", code="upstream_connect_failed")
            )

    async def _open(self) -> Connection:
        """Raises UpstreamFailed that says which step failed."""
        origin, loop = self._origin, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._patience.connect_s):
                transport, connection = await loop.create_connection(
                    lambda: Connection(self._freed, self._lost),
                    origin.host,
                    origin.port,
                    ssl=self._context,
                    server_hostname=origin.host if self._context is not None else None,
                )
        except TimeoutError:
            raise UpstreamFailed(
                f"The remote server took no connection within {self._patience.connect_s:g} s; try again later.",
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
        self._look()
        return connection

    # -- the connections' owner -------------------------------------------------------------

    def _freed(self, connection: Connection) -> None:
        if self._is_closed:  # whether it is still good is asked when it is wanted
            connection.abort()
        else:
            self._idle.append(connection)

    def _lost(self, connection: Connection) -> None:
        self._all.discard(connection)
        if not connection.is_busy and connection in self._idle:
            self._idle.remove(connection)

    # -- patience ---------------------------------------------------------------------------

    def _look(self) -> None:
        if self._timer is None and self._all and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(self._look_every_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        try:
            self.expire(clock.now())
        finally:
            self._look()

    def expire(self, now: float) -> None:
        """End exchanges that have waited for too long, and close connections that nobody needs."""
        for connection in tuple(self._all):
            if connection.is_busy:
                error = self._impatience(connection, now)
                if error is not None:
                    connection.fail(error)
            elif not self._is_good(connection, now):
                connection.abort()

    def _impatience(self, connection: Connection, now: float) -> UpstreamFailed | None:
        if connection.is_paused:
            return None  # it is our reader that takes its time
        if not connection.has_begun:
            if now - connection.sent_at <= self._patience.first_byte_s:
                return None
            return UpstreamFailed(
                f"The remote server did not begin to answer within {self._patience.first_byte_s:g} s; try again later.",
                code="upstream_first_byte_timeout",
            )
        if now - connection.last_at <= self._patience.idle_s:
            return None
        return UpstreamFailed(
            f"The remote server fell silent for {self._patience.idle_s:g} s in the middle of its answer; try again.",
            code="upstream_idle_timeout",
        )

    async def close(self) -> None:
        """Close every connection. Idempotent; receivers of unfinished exchanges hear nothing."""
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
