"""OpenAI's dialect towards a remote server: writing requests, and interpreting answers.

A request is sent as its client wrote it, with three changes: the model's name, a request for the usage, and the removal
of fields that only inferd understands. The client's credentials are never sent; the server's own key comes from
``Secret``. Does not know replicas or queues.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Final

import msgspec

from inferd import __version__, clock
from inferd.config.units import bytes_text
from inferd.errors import DeadlineExceeded, InferdError, InvalidRequest, Overloaded, UpstreamFailed
from inferd.remote.connection import Head, Headers
from inferd.remote.events import BadAnswer, EventReader, ReportedError, read_answer
from inferd.remote.origin import Origin
from inferd.remote.pool import Exchange
from inferd.remote.secret import Secret
from inferd.types import TOLD, End, Relay, Relayed, RelayHead, Timings, Usage

MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
"""Bytes of one collected answer."""

BYTES_PER_TOKEN: Final = 4
"""An estimate, for texts whose tokens the remote server did not count."""

BUSY_S: Final = 1.0
"""Seconds to leave a busy server alone that sends no Retry-After header."""

MAX_BUSY_S: Final = 300.0
"""The most seconds of a Retry-After header that are respected."""

LOCAL_FIELDS: Final = ("timeout", "priority")
"""Fields of a request that inferd has acted upon. They are not sent."""

JSON_TYPE: Final = b"application/json"
EVENTS_TYPE: Final = b"text/event-stream; charset=utf-8"

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode
_TRUE = msgspec.Raw(b"true")
_ASK_USAGE: Final = b',"stream_options":{"include_usage":true}}'


class RequestTemplate:
    """Writes requests to one server. Their heads are cached until the API key changes."""

    __slots__ = ("_heads", "_model", "_origin", "_secret", "_text")

    def __init__(self, origin: Origin, secret: Secret, model: str) -> None:
        """``model``: the model's name on the remote server."""
        self._origin = origin
        self._secret = secret
        self._model = model
        self._text = _encode(model)
        self._heads: dict[str, bytes] = {}

    def post(self, relay: Relay) -> bytes:
        """The bytes of a complete request for ``relay``. Raises ValueError, RecursionError for an invalid body."""
        body = self.body(relay)
        head = self._head("POST", relay.path)
        for header in relay.headers:
            head += b"%b: %b\r\n" % header
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)

    def get(self, path: str) -> bytes:
        """The bytes of a complete GET request."""
        return self._head("GET", path) + b"\r\n"

    def body(self, relay: Relay) -> bytes:
        """The client's JSON with the changes for the remote server. The values of other fields keep their bytes.

        Raises ValueError and RecursionError.
        """
        if relay.unchanged_for == self._model:
            if not relay.stream or relay.wants_usage:
                return relay.body
            if relay.lacks_stream_options and relay.body.endswith(b"}"):
                return relay.body[:-1] + _ASK_USAGE
        fields = _fields.decode(relay.body)
        fields["model"] = msgspec.Raw(self._text)
        for name in LOCAL_FIELDS:
            fields.pop(name, None)
        if relay.stream and not relay.wants_usage:
            given = fields.get("stream_options")
            options = _fields.decode(given) if given is not None and bytes(given).strip() != b"null" else {}
            options["include_usage"] = _TRUE
            fields["stream_options"] = msgspec.Raw(_encode(options))
        return _encode(fields)

    def _head(self, method: str, path: str) -> bytes:
        if self._secret.is_watched and self._secret.refresh(clock.now()):
            self._heads.clear()
        head = self._heads.get(path)
        if head is None:
            lines = [
                b"%b %b HTTP/1.1" % (method.encode(), (self._origin.base_path + path).encode("ascii")),
                b"host: " + self._origin.authority,
                b"user-agent: inferd/" + __version__.encode(),
                b"accept: application/json, text/event-stream",
                b"accept-encoding: identity",
            ]
            if method == "POST":
                lines.append(b"content-type: application/json")
            if self._secret.value is not None:
                lines.append(b"authorization: Bearer " + self._secret.value)
            head = self._heads[path] = b"\r\n".join(lines) + b"\r\n"
        return head


class Answer(Exchange):
    """Receives the answer to one relay and tells what of it is forwarded.

    A collected answer is held until it is complete and known to be JSON. A stream is forwarded event by event. The last
    call is exactly one of ``relayed`` with an end, ``refused`` and ``stale``.
    """

    _content_type = JSON_TYPE
    _has_begun = False  # something was forwarded
    _is_over = False
    _num_bytes = 0
    _retry_after: bytes | None = None
    _told: tuple[tuple[bytes, bytes], ...] = ()
    _status = 0

    def __init__(self, request_id: str, relay: Relay) -> None:
        self._id = request_id
        self._events = EventReader(drop_usage=not relay.wants_usage) if relay.stream else None
        self._pieces: list[bytes] = []
        self._request_bytes = len(relay.body)

    # -- what becomes of it -----------------------------------------------------------------

    @abstractmethod
    def relayed(self, item: Relayed) -> None:
        """Forward a part of the answer. The last part has ``end``."""

    @abstractmethod
    def refused(self, error: InferdError, *, counts: bool, retry: bool) -> None:
        """The request failed before a part of its answer was forwarded.

        ``counts``: it was a failure of the server. ``retry``: another server may succeed.
        """

    @abstractmethod
    def stale(self) -> None:
        """The server closed the idle connection before it answered: the request may be sent again."""

    @abstractmethod
    def broke(self, error: UpstreamFailed) -> None:
        """An exception was raised while the answer was processed: end the request, if it has not ended."""

    @property
    def usage(self) -> Usage:
        """The usage so far: what the server reported, or an estimate from the bytes that were received."""
        if self._events is not None and self._events.usage is not None:
            return self._events.usage
        if not self._num_bytes and not self._has_begun:
            return Usage()
        answered = self._events.num_tokens if self._events is not None else self._num_bytes // BYTES_PER_TOKEN
        return Usage(self._request_bytes // BYTES_PER_TOKEN, answered)

    @property
    def charged_usage(self) -> Usage:
        """The usage that a cancelled request is charged for: at least its prompt, which the server has received.

        What the server computed after the last received byte is unknown and not included.
        """
        usage = self.usage
        return usage if usage.prompt_tokens else Usage(self._request_bytes // BYTES_PER_TOKEN, usage.completion_tokens)

    def cancel(self) -> None:
        """The answer is not wanted any more: the connection is cut, and nothing more is told."""
        self._is_over = True
        self.cut()

    def expire(self, error: DeadlineExceeded) -> None:
        """The answer would come too late: the connection is cut, and the server is not to blame."""
        self.cancel()
        if self._has_begun:
            self.relayed(Relayed(self._id, end=End("failed", self.usage, Timings(), error.to_failure())))
        else:
            self.refused(error, counts=False, retry=False)

    # -- called by the connection (``connection.Receiver``) ---------------------------------

    def answer_whole(self, head: Head, body: bytes) -> None:
        self.connection = None
        if head.status == 200 and head.media == JSON_TYPE and self._events is None:
            self._content_type = head.content_type
            self._status = 200
            self._told = _told_by(head.headers)
            self._end_collected(body)
            return
        self.answer_head(head.status, head.headers)
        if body:
            self.answer_data(body)
        self.answer_ended()

    def answer_head(self, status: int, headers: Headers) -> None:
        self._status = status
        self._told = _told_by(headers)
        content_type = b""
        for name, value in headers:
            if name == b"content-type":
                content_type = value
            elif name == b"retry-after":
                self._retry_after = value
            elif name == b"content-encoding" and value.lower() != b"identity":
                self._refuse(_bad_answer("its answer is compressed, which was not asked for"))
                return
        if status >= 400 or status < 300:
            self._content_type = content_type or JSON_TYPE
            if status in (401, 407) or status == 429 or status >= 500:
                return  # the body is not needed; it is read so that the connection can be reused
            media = content_type.partition(b";")[0].strip().lower()
            wanted = EVENTS_TYPE if self._events is not None and status < 300 else JSON_TYPE
            if status >= 400:
                self._events = None
            elif media != wanted.partition(b";")[0]:
                shown = media.decode("latin-1")[:60] or "nothing"
                self._refuse(_bad_answer(f"its answer is {shown!r} instead of {wanted.partition(b';')[0].decode()!r}"))
        else:
            self._refuse(_bad_answer(f"it answers with the status {status}; redirects are not followed"))

    def answer_data(self, data: bytes) -> None:
        if self._is_over:
            return
        if self._events is None or self._status >= 300:
            self._num_bytes += len(data)
            if self._num_bytes > MAX_ANSWER_BYTES:
                self._refuse(_bad_answer(f"its answer is larger than {bytes_text(MAX_ANSWER_BYTES)}"))
            else:
                self._pieces.append(data)
            return
        self.forward(self._events.feed(data))

    def forward(self, whole: bytes) -> None:
        """Forward complete events, and end the answer if the reader found that the stream is broken."""
        assert self._events is not None, "this is no stream"
        if whole:
            if self._has_begun:
                self.relayed(Relayed(self._id, None, whole))
            else:
                self._has_begun = True
                self.relayed(Relayed(self._id, RelayHead(self._status, EVENTS_TYPE, self._told), whole))
        broken = self._events.broken
        if broken is not None and not self._is_over:
            self._break(_reported(str(broken)) if isinstance(broken, ReportedError) else _bad_answer(str(broken)))

    def answer_ended(self) -> None:
        self.ended()
        if self._is_over:
            return
        status = self._status
        if status < 400:
            if self._events is not None:
                self._end_stream(self._events)
            else:
                self._end_collected(b"".join(self._pieces))
            return
        self._is_over = True
        if status == 429 or (status == 503 and self._retry_after is not None):
            self.refused(self._busy(), counts=False, retry=True)
        elif status >= 500 or status in (401, 407):
            self.refused(_status_error(status), counts=True, retry=True)
        else:
            self._forward_refusal()

    def answer_broken(self, error: UpstreamFailed) -> None:
        self.ended()
        try:
            if not self._is_over:
                self._break(error)
        finally:
            self.broke(error)

    def answer_failed(self, error: UpstreamFailed, *, is_stale: bool) -> None:
        self.ended()
        if self._is_over:
            return
        if is_stale:
            self._is_over = True
            self.stale()
        elif self._events is not None and self._events.is_done and self._has_begun:
            self._is_over = True  # the answer is complete; only its framing was not ended
            self.relayed(Relayed(self._id, end=End("done", self.usage)))
        else:
            self._break(error)

    # -- ending the answer ------------------------------------------------------------------

    def _end_stream(self, events: EventReader) -> None:
        if not events.is_done:
            error = UpstreamFailed(
                "The remote server's stream ended without [DONE], so its answer may be incomplete; try again.",
                code="upstream_incomplete",
            )
            self._break(error)
            return
        self._is_over = True
        self.relayed(Relayed(self._id, end=End("done", self.usage)))

    def _end_collected(self, body: bytes) -> None:
        if len(body) > MAX_ANSWER_BYTES:
            self._refuse(_bad_answer(f"its answer is larger than {MAX_ANSWER_BYTES} bytes"))
            return
        try:
            usage = read_answer(body)
        except BadAnswer as error:
            self._refuse(_bad_answer(str(error)))
        except ReportedError as reported:
            self._refuse(_reported(str(reported)))
        else:
            self._is_over = True
            if usage is None:
                usage = Usage(self._request_bytes // BYTES_PER_TOKEN, len(body) // BYTES_PER_TOKEN)
            head = RelayHead(self._status, self._content_type, self._told)
            self.relayed(Relayed(self._id, head, body, End("done", usage)))

    def _forward_refusal(self) -> None:
        """Forward an error of the client's request (status 4xx) as the remote server wrote it."""
        headers = ((b"retry-after", self._retry_after),) if self._retry_after is not None else ()
        failure = InvalidRequest(
            f"The remote server refused the request with status {self._status}.", code="upstream_refused"
        ).to_failure()
        head = RelayHead(self._status, self._content_type, headers)
        self.relayed(Relayed(self._id, head, b"".join(self._pieces), End("refused", failure=failure)))

    def _break(self, error: UpstreamFailed) -> None:
        """End an answer that failed: with an error at its end, if a part of it was forwarded."""
        if not self._has_begun:
            self._refuse(error)
            return
        self.cancel()
        self.relayed(Relayed(self._id, end=End("failed", self.usage, Timings(), error.to_failure())))

    def _refuse(self, error: UpstreamFailed) -> None:
        if not self._is_over:
            self.cancel()
            self.refused(error, counts=True, retry=True)

    def _busy(self) -> Overloaded:
        return Overloaded(
            "The remote server is busy; try again later.",
            code="upstream_overloaded",
            retry_after_s=_retry_after_s(self._retry_after),
        )


def _told_by(headers: Headers) -> tuple[tuple[bytes, bytes], ...]:
    return tuple([header for header in headers if header[0] in TOLD])


def _retry_after_s(value: bytes | None) -> float:
    """The seconds of a Retry-After header (RFC 9110, section 10.2.3); ``BUSY_S`` for a date."""
    try:
        seconds = float(value) if value is not None else BUSY_S
    except ValueError:
        return BUSY_S
    return min(max(seconds, 0.0), MAX_BUSY_S) if math.isfinite(seconds) else BUSY_S


def _bad_answer(what: str) -> UpstreamFailed:
    return UpstreamFailed(f"The remote server cannot be understood: {what}.", code="upstream_bad_answer")


def _reported(text: str) -> UpstreamFailed:
    return UpstreamFailed(f"The remote server reported an error: {text}", code="upstream_error")


def _status_error(status: int) -> UpstreamFailed:
    if status in (401, 407):
        return UpstreamFailed(
            "The remote server does not accept this server's API key; its operator can correct it.",
            code="upstream_unauthorized",
        )
    return UpstreamFailed(f"The remote server failed with status {status}; try again later.", code="upstream_error")
