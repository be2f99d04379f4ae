"""The short way through the gateway, for requests that begin like one before.

A client that keeps its connection writes the same head again and again, and what follows from a head alone (the
path, whose key it names, that nothing about it is special) is found once, by the ordinary way, and remembered under its
bytes. Of a request with a familiar head only the body is looked at; where everything is as usual it goes straight
to the remote server and its answer straight back (``inferd.router.express``). Whatever is not as usual is left to
the ordinary way, before anything has happened, or is turned into what the ordinary way would have made of it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from inferd import clock
from inferd.errors import InferdError, QuotaExceeded
from inferd.events import HttpServed
from inferd.gateway.admission import UNSET_MAX_TOKENS, cost_of, token_of
from inferd.gateway.answering import Answering, Books
from inferd.gateway.decode import may_repeat_keys
from inferd.gateway.exchange import Exchange, date_line
from inferd.gateway.http import EVENTS_HEADERS, EVENTS_TYPE, Call
from inferd.gateway.relay import (
    CHAT,
    ELSEWHERE,
    ChatFields,
    TextFields,
    chat_decoder,
    is_text,
    remote_models,
    text_decoder,
)
from inferd.gateway.room import Room
from inferd.gateway.sampling import INT32_MAX
from inferd.remote.familiar import is_exact, pattern_of
from inferd.router.express import Transit
from inferd.tenancy.principal import Permit, Principal
from inferd.types import End, Relay, Request

if TYPE_CHECKING:
    from inferd.gateway.connection import Connection
    from inferd.remote.connection import Head
    from inferd.router.stream import Stream

MAX_FAMILIAR: Final = 1024
"""Heads that are remembered."""

_USUAL: Final = frozenset(
    (
        *(b"host", b"user-agent", b"accept", b"accept-encoding", b"accept-language", b"connection"),
        *(b"content-type", b"content-length", b"authorization", b"x-api-key"),
    )
)
_USUAL_PREFIX: Final = b"x-stainless-"  # OpenAI's clients describe themselves

_random: Final = random.Random(os.urandom(32))


class Familiar:
    """What a head stands for that the ordinary way has read and found usual."""

    __slots__ = ("decode", "headers", "path", "route", "target", "token")

    def __init__(self, exchange: Exchange, path: str, token: str | None) -> None:
        self.target = exchange.target
        self.headers = exchange.headers  # their Content-Length is that of the first such request
        self.path = path
        self.route = "/v1" + path
        self.token = token
        decoder = chat_decoder if path == CHAT else text_decoder
        self.decode: Callable[[bytes], ChatFields | TextFields] = decoder.decode


class Lane:
    """Takes what it can. Made anew with each configuration."""

    __slots__ = ("_familiar", "_names", "_principal", "books", "room")

    def __init__(self, room: Room, principal: Principal | None, books: Books) -> None:
        self.room = room
        self.books = books
        self._principal = principal
        self._familiar: dict[bytes, Familiar] = {}
        self._names = frozenset(
            name for name in remote_models(room.config) if not room.config.models[name].cache.enabled
        )

    def learn(self, exchange: Exchange, call: Call, path: str) -> None:
        """The ordinary way has admitted this request, and its head came in one piece."""
        headers = exchange.headers
        for name, _ in headers:
            if name not in _USUAL and not name.startswith(_USUAL_PREFIX):
                return
        names = [name for name, _ in headers]
        if call.common_headers or not exchange.keep_alive or len(set(names)) != len(names):
            return
        if not is_exact(exchange.raw_head):
            return
        if len(self._familiar) >= MAX_FAMILIAR:
            self._familiar.clear()
        token = None if self._principal is not None else token_of(call)
        pattern, _ = pattern_of(exchange.raw_head, len(exchange.raw_head))
        self._familiar[pattern] = Familiar(exchange, path, token)

    def take(self, client: Connection, data: bytes) -> bool:
        """Serve what was read from a client with nothing under way; False: it is the ordinary way's."""
        end = data.find(b"\r\n\r\n")
        pattern, digits = pattern_of(data, end)
        known = self._familiar.get(pattern)
        if known is None or not digits.isdigit() or int(digits) != len(data) - end - 4 or client.is_stopping:
            return False
        body = data[end + 4 :]
        try:
            fields = known.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return False
        name, max_tokens = fields.model, fields.longest
        if name not in self._names or not fields.is_plain:
            return False
        if not (body.isascii() or is_text(body)) or may_repeat_keys(body):
            return False
        if max_tokens is not None and not 0 <= max_tokens <= INT32_MAX:
            return False
        assert name is not None
        room = self.room
        try:
            principal = self._principal if self._principal is not None else room.door.authenticate(known.token)
        except InferdError:
            return False
        if principal.region or "infer" not in principal.scopes or (principal.models and not principal.may_use(name)):
            return False
        now = clock.now()
        way = room.router.find_way(name, now)
        if way is None:
            return False
        transit = RelayTransit(self, client, known, body, fields, principal, now)
        try:
            transit.permit = room.door.admit(
                principal,
                transit.unique,
                name,
                prompt_tokens=len(body),
                max_tokens=UNSET_MAX_TOKENS if max_tokens is None else max_tokens,
            )
        except QuotaExceeded as error:
            way.give_back()
            transit.refuse(error)
            return True
        client.serve(transit)
        letterhead = way.letterhead
        if letterhead.model != name:
            body = letterhead.body(transit.ordinary()[1])
        elif transit.drops_usage:
            if fields.stream_options is msgspec.UNSET and body.endswith(b"}"):
                body = body[:-1] + _ASK_USAGE
            else:
                body = letterhead.body(transit.ordinary()[1])
        transit.depart(way, letterhead.ask(known.path, transit.unique.encode("ascii"), body), len(data) - end - 4, now)
        return True


class RelayTransit(Transit):
    """A relayed request with a familiar head, and its client."""

    __slots__ = (
        "_asked",
        "_body",
        "_client",
        "_has_left",
        "_known",
        "_lane",
        "_principal",
        "_response_bytes",
        "drops_usage",
        "id",
        "is_started",
        "is_stream",
        "keep_alive",
        "max_tokens",
        "model",
        "permit",
        "priority",
        "started_at",
        "tenant",
        "unique",
    )

    is_body_complete = True

    def __init__(
        self,
        lane: Lane,
        client: Connection,
        known: Familiar,
        body: bytes,
        fields: ChatFields | TextFields,
        principal: Principal,
        now: float,
    ) -> None:
        assert fields.model is not None, "a familiar request names its model"
        self._lane = lane
        self._client = client
        self._known = known
        self._body = body
        self._principal = principal
        self._has_left = False
        self._response_bytes = 0
        self.permit: Permit | None = None
        self.unique = f"{_random.getrandbits(96):024x}"
        self.id = "relay-" + self.unique
        self.model = fields.model
        self.tenant = principal.tenant
        self.priority = max(principal.default_priority, principal.priority)
        self.max_tokens = None  # what the event tells of relays
        self._asked = fields.longest
        self.is_stream = fields.stream is True
        self.drops_usage = self.is_stream and not fields.wants_usage
        self.started_at = now
        self.keep_alive = True
        self.is_started = False

    # -- the connection's side --------------------------------------------------------------

    def leave(self) -> None:
        """The client is gone: the ordinary way sees to what that means."""
        self._has_left = True
        self.convert()

    def room(self, is_writable: bool) -> None:
        if is_writable:
            self.resume()
        else:
            self.pause()

    # -- the answer -------------------------------------------------------------------------

    def deliver_whole(self, head: Head, body: bytes, end: End) -> None:
        self._response_bytes = len(body)
        content_type = next(value for name, value in head.headers if name == b"content-type")
        self._client.write(
            b"%bcontent-type: %b\r\n%bx-content-type-options: nosniff\r\ncontent-length: %d\r\n%b%b%b"
            % (
                self._beginning(),
                content_type,
                self._limits(),
                len(body),
                b"" if self.keep_alive else _CLOSE,
                date_line(),
                body,
            )
        )
        self._over(end)

    def deliver(self, data: bytes) -> None:
        client = self._client
        self._response_bytes += len(data)
        if self.is_started:
            client.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self.is_started = True
            client.write(
                b"%bcontent-type: %b\r\n%b%btransfer-encoding: chunked\r\n%b%b%x\r\n%b\r\n"
                % (
                    self._beginning(),
                    EVENTS_TYPE,
                    self._limits(),
                    _EVENTS_LINES,
                    b"" if self.keep_alive else _CLOSE,
                    date_line(),
                    len(data),
                    data,
                )
            )
        if not client.is_writable:
            self.pause()

    def deliver_last(self, end: End) -> None:
        self._client.write(b"0\r\n\r\n")
        self._over(end)

    def _beginning(self) -> bytes:
        return b"HTTP/1.1 200 OK\r\nx-request-id: %b\r\n" % self.unique.encode("ascii")

    def _limits(self) -> bytes:
        assert self.permit is not None, "it was admitted"
        headers = self.permit.headers()
        return b"".join([b"%b: %b\r\n" % header for header in headers]) if headers else b""

    def _over(self, end: End) -> None:
        permit, known = self.permit, self._known
        self.is_started = True
        self._client.exchange_over(self)
        assert permit is not None, "it was admitted"
        permit.settle(end.usage, "done")
        self._lane.room.emit(
            HttpServed(
                request_id=self.unique,
                method="POST",
                route=known.route,
                status=200,
                duration_s=clock.now() - self.started_at,
                request_bytes=len(self._body),
                response_bytes=self._response_bytes,
                model=self.model,
                tenant=self.tenant,
                key_id=self._principal.key_id,
                stream=self.is_stream,
                outcome="done",
                usage=end.usage,
                timings=end.timings,
            )
        )

    # -- the ordinary way -------------------------------------------------------------------

    def ordinary(self) -> tuple[Request, Relay]:
        known, principal = self._known, self._principal
        cost = cost_of(
            ELSEWHERE,
            prompt_bytes=len(self._body),
            prompt_tokens=0,
            num_prompts=1,
            width=1,
            max_tokens=self._asked,
        )
        relay = Relay(
            path=known.path,
            body=self._body,
            stream=self.is_stream,
            wants_usage=self.is_stream and not self.drops_usage,
            headers=((b"x-request-id", self.unique.encode("ascii")),),
        )
        request = Request(
            id=self.id,
            model=self.model,
            priority=self.priority,
            tenant=self.tenant,
            weight=principal.weight,
            num_tokens=cost.expected,
            num_bytes=len(self._body),
            arrived_at=self.started_at,
        )
        return request, relay

    def taken_over(self, stream: Stream) -> None:
        exchange, call = self._as_call()
        answering = Answering(call, exchange, self._lane.books)
        answering.stream = stream
        call.streams.append(stream)
        if self.is_started:
            call.status = 200
            call.response_bytes = self._response_bytes
            exchange.go_on()
            answering.go_on()
        exchange.on_leave = answering.leave
        exchange.on_room = answering.room
        stream.attach(answering)
        if self._has_left:
            exchange.leave()
        elif not self._client.is_writable:
            stream.pause()

    def refuse(self, error: InferdError) -> None:
        """It is not even sent."""
        exchange, call = self._as_call()
        Answering(call, exchange, self._lane.books).refuse(error)

    def _as_call(self) -> tuple[Exchange, Call]:
        known, client = self._known, self._client
        exchange = Exchange(client, "POST", known.target, known.headers, "1.1", keep_alive=self.keep_alive)
        exchange.end_body()
        exchange.take_body()
        if not self._has_left:
            client.serve(exchange)
        call = Call(exchange.scope(), exchange.receive, exchange.send, self.started_at)
        call.unique = call.request_id = self.unique
        call.principal = self._principal
        call.permit = self.permit
        call.route = known.route
        call.request_bytes = len(self._body)
        call.model = self.model
        call.stream = self.is_stream
        return exchange, call


_CLOSE: Final = b"connection: close\r\n"
_ASK_USAGE: Final = b',"stream_options":{"include_usage":true}}'
_EVENTS_LINES: Final = b"".join([b"%b: %b\r\n" % header for header in EVENTS_HEADERS])
