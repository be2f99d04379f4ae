"""The direct path of KServe v2's infer requests for local models (``inferd.router.direct_prediction``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferd import clock
from inferd.errors import InferdError, QuotaExceeded
from inferd.gateway.call import Call
from inferd.gateway.compression import MIN_BYTES, Encoding, compress, wanted_encoding
from inferd.gateway.errors import KSERVE_ERRORS
from inferd.gateway.kserve.models import Served
from inferd.gateway.kserve.rest import header_length
from inferd.gateway.kserve.wire import DIALECT, read_infer
from inferd.gateway.predictions import BYTES_PER_TOKEN
from inferd.gateway.repeated.heads import CLOSE_LINE, CachedHead, DirectExchange, HeadCache
from inferd.http.exchange import Exchange, date_line
from inferd.router.direct_prediction import DirectPrediction
from inferd.types import End, Prediction, PredictRequest, class_index

if TYPE_CHECKING:
    from inferd.http.connection import Connection
    from inferd.router.stream import Stream
    from inferd.tenancy.principal import Principal


class CachedInferHead(CachedHead):
    """The cached head of requests for ``/v2/models/{model}/infer``."""

    __slots__ = ("encoding", "header_bytes", "model", "version")

    def __init__(self, exchange: Exchange, call: Call, served: Served) -> None:
        """The head of ``exchange``, which asks for ``served``. Raises InvalidRequest."""
        super().__init__(exchange, call.route)
        self.model = served.status.name
        self.version = served.requested_version
        self.header_bytes = header_length(call)
        self.encoding: Encoding | None = wanted_encoding(call)

    def serve(self, head_cache: HeadCache, client: Connection, body: bytes) -> bool:
        principal = head_cache.principal_of(self)
        if principal is None or (principal.models and not principal.may_use(self.model)):
            return False
        try:
            fields = read_infer(body, self.header_bytes, self.version)
        except InferdError:
            return False  # the general path reports the error
        if fields.sequence or fields.priority is not None or fields.timeout is not None:
            return False
        priority = max(principal.default_priority, principal.priority)
        class_number = class_index(priority)
        now = clock.now()
        slot = head_cache.context.router.find_prediction_slot(self.model, class_number, now)
        if slot is None:
            return False
        exchange = InferExchange(head_cache, client, self, body, principal, now)
        try:
            exchange.permit = head_cache.context.door.admit(
                principal, exchange.unique, self.model, prompt_tokens=0, max_tokens=0
            )
        except QuotaExceeded as error:
            exchange.refuse(error, self.model)
            return True
        client.serve(exchange)
        request = PredictRequest(
            id="predict-" + exchange.unique,
            model=self.model,
            priority=priority,
            deadline_s=self.sdk_timeout_s,
            tenant=principal.tenant,
            weight=principal.weight,
            num_tokens=max(1, len(body) // BYTES_PER_TOKEN),
            num_bytes=len(body),
            arrived_at=now,
            dialect=DIALECT,
            body=body,
            header_bytes=self.header_bytes,
            version=self.version,
            may_wait=fields.may_wait,
        )
        exchange.send(slot, request, class_number, now)
        return True


class InferExchange(DirectPrediction, DirectExchange):
    """An infer request with a cached head, and its client."""

    __slots__ = (
        "answer",
        "body",
        "cached_head",
        "client",
        "head_cache",
        "is_disconnected",
        "is_started",
        "keep_alive",
        "permit",
        "principal",
        "response_bytes",
        "started_at",
        "unique",
    )

    errors = KSERVE_ERRORS
    cached_head: CachedInferHead

    def __init__(
        self,
        head_cache: HeadCache,
        client: Connection,
        cached_head: CachedInferHead,
        body: bytes,
        principal: Principal,
        now: float,
    ) -> None:
        self.begin(head_cache, client, cached_head, body, principal, now)

    # -- the connection's side --------------------------------------------------------------

    def disconnected(self) -> None:
        """The client has disconnected: the general path cancels the request."""
        self.is_disconnected = True
        self.convert()

    def writable_changed(self, is_writable: bool) -> None:
        """No effect: the answer is written in one piece, however slowly the client reads."""

    # -- the answer -------------------------------------------------------------------------

    def deliver(self, prediction: Prediction, end: End) -> None:
        body, lines, cached_head = prediction.body, b"", self.cached_head
        if prediction.headers:
            lines = "".join([f"{name}: {value}\r\n" for name, value in prediction.headers]).encode("latin-1")
        if cached_head.encoding is not None and len(body) >= MIN_BYTES:
            body = compress(body, cached_head.encoding)
            lines += b"content-encoding: %b\r\nvary: accept-encoding\r\n" % cached_head.encoding.encode("ascii")
        self.response_bytes = len(body)
        self.answer = b"HTTP/1.1 200 OK\r\nx-request-id: %b\r\n%b%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b%b" % (
            self.unique.encode("ascii"),
            lines,
            self.quota_lines(),
            prediction.content_type.encode("latin-1"),
            len(body),
            b"" if self.keep_alive else CLOSE_LINE,
            date_line(),
            body,
        )
        self.settle(cached_head.model, end)

    def flush(self) -> None:
        client = self.client
        client.write(self.answer)
        self.is_started = True
        client.exchange_over(self)

    # -- the general path -------------------------------------------------------------------

    def converted(self, stream: Stream) -> None:
        self.attach_stream(stream, self.cached_head.model)
