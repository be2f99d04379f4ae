"""The listening socket: uvicorn with limits on what it does not limit itself.

Knows TCP and HTTP framing, nothing of what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inferd.config import ServerConfig
from inferd.errors import ConfigError
from inferd.gateway.http import Receive, Scope, Send

MAX_HEADER_BYTES: Final = 64 * 1024
HEADER_TIMEOUT_S: Final = 30.0
MAX_DISCARDED_BYTES: Final = 64 * 1024 * 1024
KEEP_ALIVE_S: Final = 75

_CLOSE = b"content-type: application/json\r\nconnection: close\r\ncontent-length: "


def _refusal(status: bytes, message: bytes, code: bytes) -> bytes:
    body = b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":"%b"}}' % (message, code)
    return b"HTTP/1.1 " + status + b"\r\n" + _CLOSE + str(len(body)).encode() + b"\r\n\r\n" + body


_BAD_REQUEST = _refusal(b"400 Bad Request", b"This is not a valid HTTP/1.1 request.", b"invalid_http")
_HEADERS_TOO_LARGE = _refusal(
    b"431 Request Header Fields Too Large",
    b"The request line and headers are larger than 64 KiB; send less.",
    b"headers_too_large",
)
_HEADERS_TOO_SLOW = _refusal(
    b"408 Request Timeout", b"The request's headers did not arrive in time.", b"request_timeout"
)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds: header bytes, time for headers, bytes of a body nobody reads.

    An answer sent before the body was read (413) leaves the rest of the body to be thrown away; up to
    a limit this goes on, so that a client that writes first and reads later gets to see the answer.
    """

    _header_bytes = 0
    _in_headers = False
    _discarded = 0
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_headers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(_BAD_REQUEST)
            return
        if self._in_headers and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(_HEADERS_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._discarded = 0
        self._begin_headers()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._end_headers()
        if self.transport.is_closing():
            return
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEADER_BYTES:
            self._refuse(_HEADERS_TOO_LARGE)
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle is None or self.transport.is_closing():
            return
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade() and self.cycle is not None and not self.transport.is_closing():
            super().on_message_complete()

    def _decline_upgrade(self, rest: bytes) -> None:
        """Serve a request that offers another protocol as if it had not.

        Java's client offers HTTP/2 with every first request. The parser stops after such headers and
        would take the body for the next request, so it gets the same headers again, without the offer.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(_BAD_REQUEST)
            return
        kept = [
            (name, value) for name, value in self.headers if name not in (b"upgrade", b"http2-settings", b"connection")
        ]
        options = [
            option.strip() for name, value in self.headers if name == b"connection" for option in value.split(b",")
        ]
        options = [option for option in options if option.lower() not in (b"upgrade", b"http2-settings")]
        if options:
            kept.append((b"connection", b", ".join(options)))
        head = b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode("ascii"))
        head += b"".join(b"%b: %b\r\n" % header for header in kept) + b"\r\n"
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(head + rest)

    def send_400_response(self, msg: str) -> None:
        self._refuse(_BAD_REQUEST)

    def _refuse(self, answer: bytes) -> None:
        self._end_headers()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(answer)  # else an answer is under way, and this would get into it
        self.transport.close()

    def _begin_headers(self) -> None:
        if not self._in_headers:
            self._in_headers = True
            self._header_bytes = 0
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._refuse, _HEADERS_TOO_SLOW)

    def _end_headers(self) -> None:
        self._in_headers = False
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class _QuietServer(uvicorn.Server):
    """uvicorn leaves signals to whoever built us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's delay off only where it is.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        where = f"{config.host}:{config.port}"
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {config.port} on {config.host} is in use; stop the other program or choose another server.port.",
                param="server.port",
            ) from None
        raise ConfigError(
            f"Cannot listen on {where}: {error.strerror or error}; choose another server.host.", param="server.host"
        ) from None
    listener.setblocking(False)
    return listener


class HttpServer:
    """An application on a socket. ``serve`` runs until ``stop``; requests in flight get ``grace_s``."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        config: ServerConfig,
        listener: socket.socket | None = None,
    ) -> None:
        """Binds at once, so that a port in use is known before anything is loaded."""
        self._listener = listener if listener is not None else bind(config)
        settings: dict[str, Any] = {
            "http": BoundedProtocol,
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "timeout_keep_alive": KEEP_ALIVE_S,
            "timeout_graceful_shutdown": max(1, round(config.grace_s)),
            "proxy_headers": False,
            "interface": "asgi3",
        }
        self._server = _QuietServer(uvicorn.Config(app, **settings))

    @property
    def port(self) -> int:
        """The port in use; a free one if the configuration said 0."""
        port: int = self._listener.getsockname()[1]
        return port

    async def serve(self) -> None:
        """Accept requests until ``stop``; then wait for those in flight, within the grace period."""
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            self._listener.close()

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
        self._server.should_exit = True
        if now:
            self._server.force_exit = True
