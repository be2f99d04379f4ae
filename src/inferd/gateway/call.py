"""One call: its headers, its body read within limits, its answer, and what the access log says of it.

Knows headers and the handles of submitted requests. Knows neither models nor the content of bodies, nor whether the
request came over HTTP, gRPC or a WebSocket.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final, Literal, Protocol

from inferd import clock
from inferd.config.units import bytes_text
from inferd.eager import in_task
from inferd.errors import InferdError, InvalidRequest
from inferd.events import Assigned, Emit, HttpServed, Operation
from inferd.gateway.body.joined import joined
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
from inferd.http.exchange import Headers
from inferd.http.head import RequestHead
from inferd.http.upgrade import UpgradeOffer
from inferd.observe.payloads.capture import Capture
from inferd.observe.traces.context import Parent, Sampler, parent_of, state_of
from inferd.open_class import mypyc_attr
from inferd.router.stream import Handle, Submitting
from inferd.tenancy.principal import LOCAL, Permit, Principal
from inferd.types import End, Item, Priority, Timings, Usage

JSON_TYPE: Final = b"application/json"
HTML_TYPE: Final = b"text/html; charset=utf-8"
EVENTS_TYPE: Final = b"text/event-stream; charset=utf-8"
LINES_TYPE: Final = b"application/x-ndjson"
STREAM_TYPES: Final = (EVENTS_TYPE, LINES_TYPE)
"""The content types of streamed answers."""

DONE: Final = b"data: [DONE]\n\n"  # the last event of a complete answer in OpenAI's dialect
BODY_IDLE_TIMEOUT_S: Final = 60.0
SLOWEST_BODY: Final = 16 * 1024  # bytes per second; a body at this rate or faster may take longer than the timeout
JOINED_BYTES: Final = 1024 * 1024  # a larger body is put together on another thread

SDK_TIMEOUT_HEADERS: Final = (b"x-stainless-timeout", b"x-stainless-read-timeout")
"""Headers in which OpenAI's clients send the seconds for which they wait for the first byte of an answer."""

EVENTS_HEADERS: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))

_SEVERITY: Final = ("done", "cancelled", "refused", "failed")
"""Outcomes of streams, from the least severe to the worst. A call with several streams has the worst outcome."""

# Request ids must differ, and need not be secret. A system call for each would cost more than the rest of a call.
_random_bits: Final = random.Random(os.urandom(32)).getrandbits
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Response:
    """A complete answer."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(self, status: int, body: bytes = b"", content_type: bytes = JSON_TYPE, headers: Headers = ()) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers = headers


class EventStream:
    """An answer in frames, such as server-sent events; the first is known before the status is sent.

    ``ending``: the last bytes of the last frame of a complete answer. No other frame ends with them.
    """

    __slots__ = ("content_type", "ending", "frames", "headers")

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        headers: Headers = (),
        ending: bytes = DONE,
        content_type: bytes = EVENTS_TYPE,
    ) -> None:
        self.frames = frames
        self.headers = headers
        self.ending = ending
        self.content_type = content_type


class Pieces:
    """A whole answer of a known length that is read piece by piece while it is sent, such as the content of a file."""

    __slots__ = ("content_type", "headers", "length", "pieces")

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], length: int, content_type: bytes, headers: Headers = ()
    ) -> None:
        self.pieces = pieces
        self.length = length
        self.content_type = content_type
        self.headers = headers


class Switched:
    """No answer: the connection was switched to another protocol (WebSocket)."""

    __slots__ = ()


class Pending:
    """No answer yet: the call is the sink of its request, whose items answer the call."""

    __slots__ = ()


Encoding = Literal["gzip", "deflate"]  # of bodies (RFC 1952, RFC 1950)
PENDING: Final = Pending()
Answer = Response | EventStream | Pending


class AnswerRecorder(Protocol):
    """Stores the answer to a call, so that it can be repeated."""

    async def record(self, response: Response) -> Response:
        """Store a whole answer that may be repeated; returns the answer to send."""
        ...

    def record_events(self, events: EventStream) -> EventStream:
        """As ``record``, for a streamed answer, which is stored before its last frame is sent."""
        ...


Division = Callable[[Submitting, "Call"], Submitting]
"""Makes the router for the requests of a call out of the gateway's: one that copies them, or gives them to another
version where the first one fails."""


class HeadFacts:
    """Values derived from a request's headers alone, once for all requests with the same head."""

    __slots__ = ("given_request_id", "is_async", "is_json", "method", "names_key", "parent", "route", "terms")

    def __init__(self, head: RequestHead) -> None:
        header = head.header
        self.method = printable(head.method, 16)
        """The method for the log."""
        self.given_request_id = _given_request_id(header)
        self.names_key = header(b"idempotency-key") is not None
        self.parent = _parent_of(head) if header(b"traceparent") is not None else None
        """The caller's span, if its trace context is valid."""
        self.is_async = _wants_handle(header(b"prefer"))
        """Whether the request asks for a handle (``Prefer: respond-async``, RFC 7240)."""
        self.is_json = False
        """Whether the content type was checked and allows JSON."""
        self.terms: Any = None
        """The terms in the headers (``admission``)."""
        self.route: Any = None
        """The route, and what it implies under one configuration (``server``)."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Call:
    """One request, and the values of its line in the access log.

    Most calls leave most of this as it is: class attributes are the defaults, so that a call holds what differs.
    """

    is_complete = False  # the last part of the answer is on its way
    client_left = False  # the client disconnected before the end of the answer
    given_request_id: str | None = None
    model: str | None = None
    stream = False
    permit: Permit | None = None
    common_headers: Headers = ()  # that every answer to this call has
    offer: UpgradeOffer | None = None  # of the client, to go on in another protocol
    encoding: Encoding | None = None  # in which a whole answer is compressed
    closers: tuple[Callable[[], None], ...] = ()  # called when the call is over, whatever happened
    recorders: tuple[AnswerRecorder, ...] = ()  # of its answer, the innermost first
    ignored: Sequence[str] = ()  # fields of the request that had no effect
    route = "unmatched"
    operation: Operation | None = None  # of the route
    status = 0
    request_bytes = 0
    response_bytes = 0
    outcome: str | None = None
    finish_reasons: tuple[str, ...] = ()
    error_code: str | None = None
    error_text = ""  # the error's message, for the log
    errors: ErrorShape = OPENAI_ERRORS  # of the dialect that the route belongs to
    usage: Usage | None = None
    timings: Timings | None = None
    capture: Capture | None = None  # of its body and its answer, where payloads are recorded
    end: End | None = None  # of its requests, the one that came last
    received_at: float | None = None  # when its body was complete and decoded
    submitted_at: float | None = None  # when its request was handed to the router
    blocked_s = 0.0  # for which writing the answer waited for a slow reader
    priority: Priority = 0
    trace: str | None = None  # of ``trace_of``, once it is decided
    sampler: Sampler | None = None  # decides whether the call is traced; None: the server makes no spans
    assigned: Assigned | None = None  # the version that a rollout chose for it
    division: Division | None = None  # what a rollout does with its requests; None: nothing
    spare_model: str | None = None  # the stable version, where ``assigned`` is the new one
    rescued_from = ""  # the kind of the new version's error, where the stable one answered instead
    _num_open = 0  # requests whose ends are waited for when the call is over
    _emit: Emit | None = None  # while they are
    _num_prompts_known = 0
    _prompt_tokens = 0

    def __init__(self, head: RequestHead, started_at: float) -> None:
        """Raises BadTarget, unless ``HeadFacts`` of an equal head exist."""
        facts: HeadFacts | None = head.note
        if facts is None:
            facts = head.note = HeadFacts(head)
        self.head = head
        self.facts = facts
        self.started_at = started_at
        self.principal: Principal = LOCAL
        self.requests: list[Handle] = []  # that were submitted for it
        self.unique = self.request_id = f"{_random_bits(96):024x}"
        if facts.given_request_id is not None:
            self.given_request_id = self.request_id = facts.given_request_id

    @property
    def peer(self) -> str:
        """The address of the client, or of the proxy in front of it; empty: it is not known."""
        return ""

    @property
    def method(self) -> str:
        return self.head.method

    @property
    def path(self) -> str:
        return self.head.path

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """With lower-case names."""
        return self.head.headers

    def header(self, name: bytes) -> bytes | None:
        """The first header of a lower-case name."""
        return self.head.header(name)

    def note_error(self, error: InferdError) -> None:
        """Record the error with which the request was answered, for the log."""
        self.error_code, self.error_text = error.code, loggable(error, self.model)

    def cancel_requests(self) -> None:
        """Cancel the call's requests."""
        for request in self.requests:
            request.cancel()

    def finish(self, emit: Emit) -> None:
        """End the call: cancel its requests, then settle its quota and emit HttpServed when all of them have ended.

        That is at once, or with the last request's end. Only the ends have the usage.
        """
        for request in self.requests:
            request.cancel()
        if self.closers or self.recorders:
            closers, self.closers, self.recorders = self.closers, (), ()  # they refer back to the call
            for close in closers:
                close()
        for request in self.requests:
            if request.end is None:
                self._num_open += 1
                request.when_over(self._stream_ended)
        if self._num_open:
            self._emit = emit
        else:
            self._settle(emit)

    def _stream_ended(self) -> None:
        self._num_open -= 1
        emit = self._emit
        if not self._num_open and emit is not None:
            self._emit = None
            self._settle(emit)

    def _settle(self, emit: Emit) -> None:
        """Charge the call for the usage that its requests' ends report. Calls are charged nowhere else."""
        requests = self.requests
        if len(requests) == 1:
            end = requests[0].end
            assert end is not None, "it is settled when all have ended"
            self.usage, self.outcome, self.timings, self.end = end.usage, end.outcome, end.timings, end
        elif requests:
            ends = [request.end for request in requests if request.end is not None]
            self.usage = self.usage_so_far
            self.outcome = max([end.outcome for end in ends], key=_SEVERITY.index)
            self.end = last = max(ends, key=lambda end: end.timings.finished or 0.0)
            self.timings = last.timings
        requests.clear()
        if self.permit is not None:
            self.permit.settle(self.usage, self.final_outcome)
        event = served_event(self, clock.now())
        emit(event)
        if self.capture is not None:
            self.capture.finish(event)

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
        """The sum of the usage of the requests that have ended. None: no stream has ended, or the call is over."""
        found = [request.end.usage for request in self.requests if request.end is not None]
        if len(found) < 2:
            return found[0] if found else None
        return Usage(
            sum([usage.prompt_tokens for usage in found]),
            sum([usage.completion_tokens for usage in found]),
            sum([usage.cached_tokens for usage in found]),
        )

    def note_prompt_tokens(self, prompt_tokens: int) -> None:
        """Record the length of one request's prompt. When all are known, the quota gets back the excess reserve."""
        self._num_prompts_known += 1
        self._prompt_tokens += prompt_tokens
        if self.permit is not None and self._num_prompts_known == len(self.requests):
            self.permit.learned(self._prompt_tokens)

    def response_id(self, prefix: str) -> str:
        """An id for the answer's body: unique, and readable beside the request id in a log."""
        if self.given_request_id is None:
            return f"{prefix}-{self.unique}"
        return f"{prefix}-{self.given_request_id}-{self.unique[:12]}"

    # -- as the sink of its request ---------------------------------------------------------

    def deliver(self, item: Item) -> None:
        """Take an item of the call's request, where the call is its sink (``PENDING``)."""
        raise NotImplementedError(f"a call of {self.route} does not answer by itself")

    @property
    def peer_uid(self) -> int | None:
        """The user of the client's process, at the control socket; None: it is not known."""
        return None

    # -- its body ---------------------------------------------------------------------------

    def whole_body(self) -> bytes | None:
        """The body, if all of it has arrived; None: ``read`` it."""
        return None

    @property
    def announced_bytes(self) -> int:
        """The length of a body of which nothing was read yet; 0: it is not known. The header Content-Length may be that
        of an earlier request with the same head."""
        return 0

    async def read(self) -> tuple[bytes, bool]:
        """The next part of its body, and whether it is the last. Raises ClientLeft."""
        raise NotImplementedError(f"a call of {self.route} has no body to read")


def _parent_of(head: RequestHead) -> Parent | None:
    """The caller's span. None: the header is invalid, or there are several."""
    value = head.header(b"traceparent")
    return None if value is None or head.count(b"traceparent") > 1 else parent_of(value)


def trace_state(call: Call) -> str:
    """The header ``tracestate`` of a call with a valid trace context."""
    if call.facts.parent is None:
        return ""
    return state_of([value for name, value in call.headers if name == b"tracestate"])


def trace_of(call: Call) -> str:
    """The ``traceparent`` of the call's own span. Empty: the call is not traced.

    Without a sampler the server makes no spans, and the caller's context is passed on unchanged.
    """
    found = call.trace
    if found is None:
        parent, sampler = call.facts.parent, call.sampler
        if sampler is not None:
            found = sampler.trace(parent, call.unique)
        else:
            found = "" if parent is None else parent.text
        call.trace = found
    return found


def _wants_handle(preferences: bytes | None) -> bool:
    return preferences is not None and b"respond-async" in [part.strip().lower() for part in preferences.split(b",")]


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
    if call.facts.is_json:
        return
    encoding = call.header(b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        name = printable(encoding.decode("latin-1"))
        raise UnsupportedMediaType(f"Content-Encoding {name!r} is not supported; send the body uncompressed.")
    content_type = call.header(b"content-type")
    media = b"" if content_type is None else content_type.partition(b";")[0].strip().lower()
    if media in (JSON_TYPE, b"") or (media.startswith(b"application/") and media.endswith(b"+json")):
        call.facts.is_json = True
        return
    name = printable(media.decode("latin-1"))
    raise UnsupportedMediaType(f"Content-Type {name!r} is not supported; send application/json.")


async def read_body(call: Call, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body of a call.

    Raises BodyTooLarge as soon as the body is known to be larger than ``max_bytes``. Raises BodyTimeout when it takes
    longer than ``timeout_s`` and one second for every ``SLOWEST_BODY`` bytes that arrived. Raises InvalidRequest for a
    wrong Content-Length, and ClientLeft.
    """
    body = call.whole_body()
    if body is not None:
        call.request_bytes = len(body)
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if call.capture is not None:
            call.capture.request = body
        return body
    length = call.header(b"content-length")
    if length is not None:
        length = length.rstrip(b" \t")  # the parser keeps blanks behind a value, which are not part of it
        if not length.isdigit():
            raise InvalidRequest("Content-Length is not a number.", code="invalid_content_length")
        if len(length) > 18 or int(length) > max_bytes:
            raise _too_large(max_bytes)
    chunks: list[bytes] = []
    began = clock.now()
    await in_task()
    while True:
        remaining_s = began + timeout_s + call.request_bytes / SLOWEST_BODY - clock.now()
        try:
            async with asyncio.timeout(min(remaining_s, BODY_IDLE_TIMEOUT_S)):
                chunk, is_last = await call.read()
        except TimeoutError:
            raise _too_slow(call, remaining_s, timeout_s) from None
        if chunk:
            call.request_bytes += len(chunk)
            if call.request_bytes > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
        if is_last:
            if call.request_bytes > JOINED_BYTES:
                body = await asyncio.to_thread(joined, chunks, call.request_bytes)
            else:
                body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            if call.capture is not None:
                call.capture.request = body
            return body


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


def served_event(call: Call, now: float) -> HttpServed:
    """The event of a call that is over."""
    started_at, received_at, submitted_at = call.started_at, call.received_at, call.submitted_at
    end, parent = call.end, call.facts.parent
    routing = end.routing if end is not None else None
    return HttpServed(
        request_id=call.request_id,
        method=call.facts.method,
        route=call.route,
        operation=call.operation,
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
        end=end,
        started_at=started_at,
        received_s=None if received_at is None else received_at - started_at,
        submitted_s=None if submitted_at is None else submitted_at - started_at,
        blocked_s=call.blocked_s,
        trace=trace_of(call),
        trace_parent="" if parent is None or call.sampler is None else parent.span_id,
        trace_state="" if parent is None else trace_state(call),
        priority=call.priority,
        replica=None if routing is None else routing.replica,
        assigned=call.assigned,
        rescued_from=call.rescued_from,
    )
