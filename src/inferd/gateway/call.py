"""One call: its headers, its body read within limits, its answer, and what the access log says of it.

Knows ASGI messages and headers. Knows neither models nor the content of bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, TypeVar

from inferd import clock
from inferd.config.units import bytes_text
from inferd.errors import InferdError, InvalidRequest
from inferd.events import HttpServed
from inferd.gateway.errors import (
    CLIENT_LEFT,
    OPENAI_ERRORS,
    BodyTimeout,
    BodyTooLarge,
    ErrorShape,
    UnsupportedMediaType,
    loggable,
    printable,
)
from inferd.gateway.upstream import Stream
from inferd.http.asgi import Headers, Receive, Scope, Send
from inferd.http.upgrade import UpgradeOffer
from inferd.tenancy.principal import LOCAL, Permit, Principal
from inferd.types import Timings, Usage

T = TypeVar("T")

JSON_TYPE: Final = b"application/json"
HTML_TYPE: Final = b"text/html; charset=utf-8"
EVENTS_TYPE: Final = b"text/event-stream; charset=utf-8"
DONE: Final = b"data: [DONE]\n\n"  # the last event of a complete answer in OpenAI's dialect
BODY_IDLE_TIMEOUT_S: Final = 60.0
SLOWEST_BODY: Final = 16 * 1024  # bytes per second; a body at this rate or faster may take longer than the timeout
SEND_PIECE_BYTES: Final = 64 * 1024  # of a large answer that are handed to the connection at a time

SDK_TIMEOUT_HEADERS: Final = (b"x-stainless-timeout", b"x-stainless-read-timeout")
"""Headers in which OpenAI's clients send the seconds for which they wait for the first byte of an answer."""

EVENTS_HEADERS: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))

_SEVERITY: Final = ("done", "cancelled", "refused", "failed")
"""Outcomes of streams, from the least severe to the worst. A call with several streams has the worst outcome."""

# Ids must differ, not be secret: a system call for each would cost more than the rest of a call.
_random: Final = random.Random(os.urandom(32))
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def fresh_id() -> str:
    """A random id of 24 hexadecimal digits for a request."""
    return f"{_random.getrandbits(96):024x}"


class Response:
    """A complete answer."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(self, status: int, body: bytes = b"", content_type: bytes = JSON_TYPE, headers: Headers = ()) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers = headers


class EventStream:
    """An answer of server-sent events; the first event is known before the status is sent.

    ``ending``: the last bytes of the last frame of a complete answer. No other frame ends with them.
    """

    __slots__ = ("ending", "frames", "headers")

    def __init__(self, frames: AsyncGenerator[bytes, None], headers: Headers = (), ending: bytes = DONE) -> None:
        self.frames = frames
        self.headers = headers
        self.ending = ending


class Switched:
    """No answer: the connection was switched to another protocol (WebSocket)."""

    __slots__ = ()


Answer = Response | EventStream


class ClientLeft(Exception):
    """The client closed the connection before its request was complete."""


class Call:
    """One request while the gateway serves it, and the values of its access log line."""

    __slots__ = (
        "_num_open",
        "_num_prompts_known",
        "_over",
        "_prompt_tokens",
        "client_left",
        "closers",
        "common_headers",
        "error_code",
        "error_text",
        "errors",
        "finish_reasons",
        "given_request_id",
        "header",
        "headers",
        "http_version",
        "ignored",
        "is_complete",
        "method",
        "model",
        "offer",
        "outcome",
        "path",
        "permit",
        "principal",
        "receive",
        "request_bytes",
        "request_id",
        "response_bytes",
        "route",
        "send",
        "started_at",
        "status",
        "stream",
        "streams",
        "timings",
        "unique",
        "usage",
        "watcher",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, started_at: float) -> None:
        self.method: str = scope["method"]
        self.http_version: str = scope.get("http_version", "1.1")
        self.path: str = scope["path"]
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.offer: UpgradeOffer | None = scope.get("inferd.offer")  # the client's offer to switch to a WebSocket
        self.receive = receive
        self.send = send
        self.started_at = started_at
        # The first header of a (lower-case) name. It is called a dozen times per call, hence the dictionary's method.
        self.header: Callable[[bytes], bytes | None] = dict(reversed(self.headers)).get
        self._num_open = 0  # streams that still run after the call was finished
        self._over: Callable[[Call], None] | None = None
        self._num_prompts_known = 0
        self._prompt_tokens = 0
        self.principal: Principal = LOCAL
        self.permit: Permit | None = None
        self.closers: list[Callable[[], None]] = []  # called when the call is over, whatever happened
        self.common_headers: Headers = ()  # headers of every answer to this call
        self.unique = fresh_id()
        self.given_request_id = _given_request_id(self.header)
        self.request_id = self.given_request_id or self.unique
        self.route = "unmatched"
        self.status = 0
        self.request_bytes = 0
        self.response_bytes = 0
        self.model: str | None = None
        self.stream = False
        self.streams: list[Stream] = []
        self.ignored: list[str] = []
        self.client_left = False
        self.is_complete = False  # the last part of the answer is on its way
        self.outcome: str | None = None
        self.finish_reasons: tuple[str, ...] = ()
        self.error_code: str | None = None
        self.error_text = ""  # the error's message without the request's own text, for the log
        self.errors: ErrorShape = OPENAI_ERRORS  # the error format of the route's dialect
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.watcher: asyncio.Task[None] | None = None

    def note_error(self, error: InferdError) -> None:
        """Record the error with which the request was answered, for the log."""
        self.error_code, self.error_text = error.code, loggable(error, self.model)

    def count(self, name: bytes) -> int:
        """The number of headers with this (lower-case) name."""
        return sum(key == name for key, _ in self.headers)

    def close_streams(self) -> None:
        for stream in self.streams:
            stream.close()

    async def with_cancellation(self, answer: Awaitable[T]) -> T:
        """Await ``answer``, and cancel the call as soon as the client disconnects. The body must have been read.

        A disconnect cancels the call's requests, whether they wait or run, and the task that serves the call.
        """
        self.watcher = asyncio.create_task(self._watch(_this_task()))
        return await answer

    async def _watch(self, serving: asyncio.Task[Any]) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        if self.is_complete or self.client_left:
            return
        self.client_left = True
        self.close_streams()
        serving.cancel()

    def finish(self, over: Callable[[Call], None]) -> None:
        """End the call: cancel its streams, then settle its quota and call ``over`` when all of them have ended.

        That is at once, or with the last stream's end. Only the ends have the usage.
        """
        if self.watcher is not None:
            self.watcher.cancel()
            self.watcher = None  # its CancelledError has a traceback that refers to this call
        self.close_streams()
        for close in self.closers:
            close()
        self.closers.clear()  # they refer to the call
        running = [stream for stream in self.streams if stream.end is None]
        if not running:
            self._settle(over)
            return
        self._num_open, self._over = len(running), over
        for stream in running:
            stream.when_over(self._stream_ended)

    def _stream_ended(self) -> None:
        self._num_open -= 1
        over = self._over
        if not self._num_open and over is not None:
            self._over = None
            self._settle(over)

    def _settle(self, over: Callable[[Call], None]) -> None:
        """Charge the call for the usage that its streams' ends report. Calls are charged nowhere else."""
        ends = [stream.end for stream in self.streams if stream.end is not None]
        if ends:
            self.usage = self.usage_so_far
            self.outcome = max([end.outcome for end in ends], key=_SEVERITY.index)
            self.timings = max([end.timings for end in ends], key=lambda timings: timings.finished or 0.0)
        self.streams.clear()
        if self.permit is not None:
            self.permit.settle(self.usage, self.final_outcome)
        over(self)

    @property
    def final_outcome(self) -> str:
        """The outcome of the call's streams. Without streams: cancelled, refused (it has an error) or done."""
        if self.outcome is not None:
            return self.outcome
        if self.client_left:
            return "cancelled"
        return "refused" if self.error_code is not None else "done"

    @property
    def usage_so_far(self) -> Usage | None:
        """The sum of the usage of the streams that have ended. None: no stream has ended, or the call is over."""
        found = [stream.end.usage for stream in self.streams if stream.end is not None]
        if len(found) < 2:
            return found[0] if found else None
        return Usage(
            sum([usage.prompt_tokens for usage in found]),
            sum([usage.completion_tokens for usage in found]),
            sum([usage.cached_tokens for usage in found]),
        )

    def note_prompt_tokens(self, prompt_tokens: int) -> None:
        """Record the length of one stream's prompt. When all are known, the quota gets back the excess reserve."""
        self._num_prompts_known += 1
        self._prompt_tokens += prompt_tokens
        if self.permit is not None and self._num_prompts_known == len(self.streams):
            self.permit.learned(self._prompt_tokens)

    async def send_body(self, body: bytes, *, more: bool) -> None:
        """Send a part of the answer's body; waits while the connection's buffer is full. The connection closes after
        ``server.send_timeout_s`` without progress."""
        self.response_bytes += len(body)
        if not more:
            self.is_complete = True
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    def response_id(self, prefix: str) -> str:
        """An id for the answer's body: unique, and readable beside the request id in a log."""
        if self.given_request_id is None:
            return f"{prefix}-{self.unique}"
        return f"{prefix}-{self.given_request_id}-{self.unique[:12]}"


def _this_task() -> asyncio.Task[Any]:
    """The current task. It is a function of its own, because a frame of the task that holds the task makes a reference
    cycle through the traceback of a CancelledError."""
    task = asyncio.current_task()
    assert task is not None, "a call is served in a task"
    return task


def _given_request_id(header: Callable[[bytes], bytes | None]) -> str | None:
    for name in (b"x-request-id", b"x-client-request-id"):
        value = header(name)
        if value is not None and _REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return None


def is_request_id(text: str) -> bool:
    """Whether a text may be a request id: 1 to 128 of the characters A-Z a-z 0-9 . _ : -."""
    return text.isascii() and _REQUEST_ID.fullmatch(text.encode("ascii")) is not None


def require_json(call: Call) -> None:
    """Check that the body is sent as JSON. Raises UnsupportedMediaType.

    A missing content type is taken as JSON. A browser may send text/plain and forms across origins without a preflight
    request; refusing these types also keeps foreign web pages out.
    """
    encoding = call.header(b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        name = printable(encoding.decode("latin-1"))
        raise UnsupportedMediaType(f"Content-Encoding {name!r} is not supported; send the body uncompressed.")
    content_type = call.header(b"content-type")
    if content_type is None:
        return
    media = content_type.partition(b";")[0].strip().lower()
    if media == JSON_TYPE or media == b"" or (media.startswith(b"application/") and media.endswith(b"+json")):
        return
    name = printable(media.decode("latin-1"))
    raise UnsupportedMediaType(f"Content-Type {name!r} is not supported; send application/json.")


async def read_body(call: Call, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body of a call.

    Raises BodyTooLarge as soon as the body is known to be larger than ``max_bytes``. Raises BodyTimeout when it takes
    longer than ``timeout_s`` and one second for every ``SLOWEST_BODY`` bytes that arrived. Raises InvalidRequest for a
    wrong Content-Length, and ClientLeft.
    """
    length = call.header(b"content-length")
    if length is not None:
        length = length.rstrip(b" \t")  # the parser keeps blanks behind a value, which are not part of it
        if not length.isdigit():
            raise InvalidRequest("Content-Length is not a number.", code="invalid_content_length")
        if len(length) > 18 or int(length) > max_bytes:
            raise _too_large(max_bytes)
    chunks: list[bytes] = []
    began = clock.now()
    while True:
        remaining_s = began + timeout_s + call.request_bytes / SLOWEST_BODY - clock.now()
        try:
            async with asyncio.timeout(min(remaining_s, BODY_IDLE_TIMEOUT_S)):
                message = await call.receive()
        except TimeoutError:
            raise _too_slow(call, remaining_s, timeout_s) from None
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk: bytes = message.get("body", b"")
        if chunk:
            call.request_bytes += len(chunk)
            if call.request_bytes > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_slow(call: Call, remaining_s: float, timeout_s: float) -> BodyTimeout:
    if remaining_s > BODY_IDLE_TIMEOUT_S:
        return BodyTimeout(f"No part of the body arrived for {BODY_IDLE_TIMEOUT_S:.0f} s; send it again.")
    return BodyTimeout(
        f"The body did not arrive within {timeout_s:g} s and a second for every {SLOWEST_BODY >> 10} KiB of it "
        f"({bytes_text(call.request_bytes)} of it did); send it faster, or raise server.body_timeout_s."
    )


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The request body is larger than {bytes_text(max_bytes)}; send less, or raise server.max_body_bytes."
    )


async def send_response(call: Call, response: Response) -> None:
    """Send a whole answer; a large body in parts, so that it does not fill the connection's buffer."""
    call.status = response.status
    headers = [(b"x-request-id", call.request_id.encode("ascii")), *call.common_headers, *response.headers]
    if call.permit is not None:
        headers += call.permit.headers()
    if response.status != 204:
        headers.append((b"content-type", response.content_type))
        headers.append((b"content-length", str(len(response.body)).encode("ascii")))
    await call.send({"type": "http.response.start", "status": response.status, "headers": headers})
    body = b"" if call.method == "HEAD" else response.body
    if len(body) <= SEND_PIECE_BYTES:
        call.response_bytes += len(body)
        call.is_complete = True
        await call.send({"type": "http.response.body", "body": body})
        return
    for start in range(0, len(body), SEND_PIECE_BYTES):
        await call.send_body(body[start : start + SEND_PIECE_BYTES], more=True)
    await call.send_body(b"", more=False)


async def send_events(call: Call, events: EventStream) -> None:
    """Send frames as they come. ``call.send_body`` waits when the client reads more slowly than frames come."""
    call.status = 200
    headers = [
        (b"x-request-id", call.request_id.encode("ascii")),
        *call.common_headers,
        *events.headers,
        (b"content-type", EVENTS_TYPE),
        *EVENTS_HEADERS,
    ]
    if call.permit is not None:
        headers += call.permit.headers()
    await call.send({"type": "http.response.start", "status": 200, "headers": headers})
    async with contextlib.aclosing(events.frames) as frames:
        async for frame in frames:
            await call.send_body(frame, more=True)
    await call.send_body(b"", more=False)


def served_event(call: Call, now: float) -> HttpServed:
    """The event of a call that is over."""
    return HttpServed(
        request_id=call.request_id,
        method=printable(call.method, 16),
        route=call.route,
        status=CLIENT_LEFT if call.client_left else call.status or 500,
        duration_s=now - call.started_at,
        request_bytes=call.request_bytes,
        response_bytes=call.response_bytes,
        model=call.model,
        tenant=call.principal.tenant,
        key_id=call.principal.key_id,
        stream=call.stream,
        outcome=call.outcome,
        finish_reasons=call.finish_reasons,
        error_code=call.error_code,
        error_text=call.error_text,
        path=printable(call.path, 200) if call.route == "unmatched" else "",
        usage=call.usage,
        timings=call.timings,
    )
