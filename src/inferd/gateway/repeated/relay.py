"""The direct path of chat and text completions for models behind remote servers (``inferd.router.direct_relay``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from inferd import clock
from inferd.errors import QuotaExceeded
from inferd.gateway.admission import UNSET_MAX_TOKENS, cost_of, timeouts_of
from inferd.gateway.call import EVENTS_HEADERS, EVENTS_TYPE
from inferd.gateway.decode import OFF_LOOP_BYTES, may_repeat_keys
from inferd.gateway.openai.sampling import INT32_MAX
from inferd.gateway.relay_fields import CHAT, NO_MODEL_INFO, ChatFields, TextFields, chat_decoder, is_utf8, text_decoder
from inferd.gateway.repeated.heads import CLOSE_LINE, CachedHead, DirectExchange, HeadCache
from inferd.http.exchange import Exchange, date_line
from inferd.router.direct_relay import DirectRelay
from inferd.tenancy.principal import Principal
from inferd.types import End, Relay, Request

if TYPE_CHECKING:
    from inferd.http.connection import Connection
    from inferd.remote.connection import Head
    from inferd.remote.openai import RequestTemplate
    from inferd.router.stream import Stream

_ASK_USAGE: Final = b',"stream_options":{"include_usage":true}}'
_EVENTS_LINES: Final = b"".join([b"%b: %b\r\n" % header for header in EVENTS_HEADERS])


class CachedRelayHead(CachedHead):
    """The cached head of requests for chat or text completions."""

    __slots__ = ("decode", "path")

    def __init__(self, exchange: Exchange, path: str) -> None:
        super().__init__(exchange, "/v1" + path)
        self.path = path
        decoder = chat_decoder if path == CHAT else text_decoder
        self.decode: Callable[[bytes], ChatFields | TextFields] = decoder.decode

    def serve(self, head_cache: HeadCache, client: Connection, body: bytes) -> bool:
        principal = head_cache.principal_of(self)
        if principal is None or len(body) > OFF_LOOP_BYTES:
            return False
        try:
            fields = self.decode(body)
        except (ValueError, RecursionError):
            return False
        name, max_tokens = fields.model, fields.max_answer_tokens
        if name not in head_cache.relayed_models or not fields.is_plain:
            return False
        if not (body.isascii() or is_utf8(body)) or may_repeat_keys(body):
            return False
        if max_tokens is not None and not 0 <= max_tokens <= INT32_MAX:
            return False
        assert name is not None
        if principal.models and not principal.may_use(name):
            return False
        now = clock.now()
        slot = head_cache.context.router.find_relay_slot(name, now, principal.tenant, body)
        if slot is None:
            return False
        exchange = RelayExchange(head_cache, client, self, body, fields, principal, now)
        try:
            out = exchange.remote_body(slot.template, has_options=fields.stream_options is not msgspec.UNSET)
        except (ValueError, RecursionError):
            slot.release()
            return False  # the general path reports the error
        try:
            exchange.permit = head_cache.context.door.admit(
                principal,
                exchange.unique,
                name,
                prompt_tokens=len(body),
                max_tokens=UNSET_MAX_TOKENS if max_tokens is None else max_tokens,
            )
        except QuotaExceeded as error:
            slot.release()
            exchange.refuse(error, name)
            return True
        client.serve(exchange)
        asked = slot.template.post_body(self.path, exchange.unique.encode("ascii"), out)
        exchange.send(slot, asked, len(body), now, exchange.deadline_s)
        return True


class RelayExchange(DirectRelay, DirectExchange):
    """A relayed request with a cached head, and its client."""

    __slots__ = (
        "_max_tokens",
        "_waits",
        "body",
        "cached_head",
        "client",
        "drops_usage",
        "head_cache",
        "id",
        "is_disconnected",
        "is_started",
        "is_stream",
        "keep_alive",
        "max_tokens",
        "model",
        "permit",
        "principal",
        "priority",
        "response_bytes",
        "started_at",
        "tenant",
        "unique",
    )

    cached_head: CachedRelayHead

    def __init__(
        self,
        head_cache: HeadCache,
        client: Connection,
        cached_head: CachedRelayHead,
        body: bytes,
        fields: ChatFields | TextFields,
        principal: Principal,
        now: float,
    ) -> None:
        assert fields.model is not None, "a request on the direct path names its model"
        self.begin(head_cache, client, cached_head, body, principal, now)
        self.id = "relay-" + self.unique
        self.model = fields.model
        self.tenant = principal.tenant
        self.priority = max(principal.default_priority, principal.priority)
        self.max_tokens = None  # RequestEnded has no limit of tokens for relayed requests
        self._max_tokens = fields.max_answer_tokens
        self.is_stream = fields.stream is True
        self.drops_usage = self.is_stream and not fields.wants_usage
        self._waits = timeouts_of(None, cached_head.sdk_timeout_s, stream=self.is_stream)

    @property
    def deadline_s(self) -> float | None:
        """The deadline in seconds after the arrival."""
        return self._waits[0]

    def remote_body(self, template: RequestTemplate, *, has_options: bool) -> bytes:
        """The body for the remote server. ``has_options``: whether the client's body has the field stream_options.

        Raises ValueError, RecursionError.
        """
        if template.model == self.model:
            if not self.drops_usage:
                return self.body
            if not has_options and self.body.endswith(b"}"):
                return self.body[:-1] + _ASK_USAGE
        return template.body(self.to_request()[1])

    # -- the connection's side --------------------------------------------------------------

    def disconnected(self) -> None:
        """The client has disconnected: the general path cancels the request."""
        self.is_disconnected = True
        self.convert()

    def writable_changed(self, is_writable: bool) -> None:
        if is_writable:
            self.resume()
        else:
            self.pause()

    # -- the answer -------------------------------------------------------------------------

    def deliver_whole(self, head: Head, body: bytes, end: End) -> None:
        self.response_bytes = len(body)
        content_type = next(value for name, value in head.headers if name == b"content-type")
        self.client.write(
            b"HTTP/1.1 200 OK\r\nx-request-id: %b\r\ncontent-type: %b\r\n%bx-content-type-options: nosniff\r\n"
            b"content-length: %d\r\n%b%b%b"
            % (
                self.unique.encode("ascii"),
                content_type,
                self.quota_lines(),
                len(body),
                b"" if self.keep_alive else CLOSE_LINE,
                date_line(),
                body,
            )
        )
        self.finish(self.model, end)

    def deliver(self, data: bytes) -> None:
        client = self.client
        self.response_bytes += len(data)
        if self.is_started:
            client.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self.is_started = True
            client.write(
                b"HTTP/1.1 200 OK\r\nx-request-id: %b\r\ncontent-type: %b\r\n%b%btransfer-encoding: chunked\r\n"
                b"%b%b%x\r\n%b\r\n"
                % (
                    self.unique.encode("ascii"),
                    EVENTS_TYPE,
                    self.quota_lines(),
                    _EVENTS_LINES,
                    b"" if self.keep_alive else CLOSE_LINE,
                    date_line(),
                    len(data),
                    data,
                )
            )
        if not client.is_writable:
            self.pause()

    def deliver_last(self, end: End) -> None:
        self.client.write(b"0\r\n\r\n")
        self.finish(self.model, end, is_stream=True)

    def cut_off(self) -> None:
        self.client.cut(self)

    # -- the general path -------------------------------------------------------------------

    def to_request(self) -> tuple[Request, Relay]:
        cost = cost_of(
            NO_MODEL_INFO,
            prompt_bytes=len(self.body),
            prompt_tokens=0,
            num_prompts=1,
            width=1,
            max_tokens=self._max_tokens,
        )
        relay = Relay(
            path=self.cached_head.path,
            body=self.body,
            stream=self.is_stream,
            wants_usage=self.is_stream and not self.drops_usage,
            headers=((b"x-request-id", self.unique.encode("ascii")),),
        )
        request = Request(
            id=self.id,
            model=self.model,
            priority=self.priority,
            deadline_s=self._waits[0],
            first_byte_s=self._waits[1],
            tenant=self.tenant,
            weight=self.principal.weight,
            num_tokens=cost.expected,
            num_bytes=len(self.body),
            arrived_at=self.started_at,
        )
        return request, relay

    def converted(self, stream: Stream) -> None:
        self.attach_stream(stream, self.model, is_stream=self.is_stream)
