"""The call of an HTTP request: reads the body, sends the answer, and ends when the client disconnects.

A call is the sink of its request where the answer needs no other reader (``PENDING``). The request's items are then
written to the client's connection without a task.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from inferd import clock
from inferd.errors import InferdError, InternalError
from inferd.events import Emit
from inferd.gateway.body.compression import MIN_BYTES, compressed
from inferd.gateway.call import EVENTS_HEADERS, Call, EventStream, Pieces, Response, Switched
from inferd.gateway.errors import failure_of
from inferd.gateway.generation.requests import error_frame
from inferd.gateway.predictions import no_answer_error, response_of, several_answers_error
from inferd.http.exchange import Exchange, Headers
from inferd.types import Item, Prediction, Relayed, RelayHead

SEND_PIECE_BYTES: Final = 64 * 1024  # bytes of a large answer that are written at a time
NOSNIFF: Final = (b"x-content-type-options", b"nosniff")  # the content and its type come from another server

_log = logging.getLogger("inferd.gateway")


class HttpGateway(Protocol):
    """The part of ``Gateway`` that its calls need."""

    emit: Emit

    def error_response(self, call: Call, error: InferdError) -> Response:
        """The answer with an error, which is recorded in the call."""
        ...


class HttpCall(Call):
    """A request on an HTTP connection, and its answer."""

    _blocked_at: float | None = None  # since when the client has not read enough
    _has_begun = False  # the head of a relayed answer was written
    _has_several = False
    _is_closed = False
    _prediction: Prediction | None = None
    task: asyncio.Task[None] | None = None  # that serves the call, from its first wait on

    def __init__(self, gateway: HttpGateway, exchange: Exchange, started_at: float) -> None:
        """Raises BadTarget."""
        super().__init__(exchange.head, started_at)
        self.exchange = exchange
        self._gateway = gateway
        if exchange.may_upgrade:
            self.offer = exchange.offer

    # -- the request ------------------------------------------------------------------------

    @property
    def peer(self) -> str:
        return self.exchange.peer

    def whole_body(self) -> bytes | None:
        exchange = self.exchange
        return exchange.take_body() if exchange.is_body_complete and not exchange.is_disconnected else None

    @property
    def announced_bytes(self) -> int:
        exchange = self.exchange
        return exchange.num_buffered if exchange.is_body_complete else exchange.announced_length

    async def read(self) -> tuple[bytes, bool]:
        return await self.exchange.read()

    @property
    def peer_uid(self) -> int | None:
        return self.exchange.peer_uid

    # -- the connection's listener ----------------------------------------------------------

    def disconnected(self) -> None:
        """Cancel the call's requests, and the task that serves it."""
        if self.is_complete or self.client_left:
            return
        self.client_left = True
        self.cancel_requests()
        if self.task is not None:
            self.task.cancel()

    def writable_changed(self, is_writable: bool) -> None:
        """Pause or resume a request whose items are written without a task. A task waits for room itself."""
        self._note_blocked(not is_writable)
        if self._has_begun:
            for request in self.requests:
                if is_writable:
                    request.resume()
                else:
                    request.pause()

    def _note_blocked(self, is_blocked: bool) -> None:
        """Measure for how long the client does not read."""
        if is_blocked:
            if self._blocked_at is None:
                self._blocked_at = clock.now()
        elif self._blocked_at is not None:
            self.blocked_s += clock.now() - self._blocked_at
            self._blocked_at = None

    # -- the answer by a task ---------------------------------------------------------------

    async def send(self, answer: Response | EventStream | Pieces | Switched) -> None:
        """Send a whole or streamed answer, after the recorders have stored it."""
        if isinstance(answer, Switched):
            self.status = 101
            return
        if isinstance(answer, Pieces):
            await self._send_pieces(answer)
            return
        if isinstance(answer, EventStream):
            await self._send_events(answer)
            return
        for recorder in self.recorders:
            answer = await recorder.record(answer)
        if self.capture is not None:
            self.capture.take(answer.body)
        if self.encoding is not None:
            answer = await compressed(answer, self.encoding)
        if len(answer.body) <= SEND_PIECE_BYTES or self.method == "HEAD":
            self.write(answer)
            return
        exchange = self.exchange
        self.status = answer.status
        exchange.begin(answer.status, self._headers(answer), len(answer.body))
        for start in range(0, len(answer.body), SEND_PIECE_BYTES):
            piece = answer.body[start : start + SEND_PIECE_BYTES]
            self.response_bytes += len(piece)
            exchange.write(piece)
            await exchange.drained()
        self.is_complete = True
        exchange.finish()

    async def _send_pieces(self, answer: Pieces) -> None:
        """Send a content while it is read. The connection is cut where less of it can be read."""
        exchange = self.exchange
        left = 0 if self.method == "HEAD" else answer.length
        failure: BaseException | None = None
        try:
            first = await anext(answer.pieces, b"") if left else b""  # its error is an answer with a status
            self._begin_pieces(answer)
            if first:
                left -= self._write_piece(first)
                async for piece in answer.pieces:
                    await exchange.drained()
                    left -= self._write_piece(piece)
        except BaseException as error:
            failure = error
        try:
            await answer.pieces.aclose()
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback refers to this frame
            if left and exchange.has_begun:
                exchange.cut()
        if not left:
            self.is_complete = True
            exchange.finish()

    def _begin_pieces(self, answer: Pieces) -> None:
        self.status = 200
        headers = (*self._id_headers(), *self.common_headers, *answer.headers)
        self.exchange.begin(200, (*headers, (b"content-type", answer.content_type)), answer.length)

    def _write_piece(self, piece: bytes) -> int:
        self.response_bytes += len(piece)
        self.exchange.write(piece)
        return len(piece)

    def write(self, answer: Response) -> None:
        """Write a whole answer."""
        if self.capture is not None:
            self.capture.take(answer.body)
        self.status = answer.status
        self.response_bytes += 0 if self.method == "HEAD" else len(answer.body)
        self.is_complete = True
        exchange = self.exchange
        if answer.status == 204:
            exchange.begin(204, self._headers(answer), None)
            exchange.finish()
        else:
            exchange.answer(answer.status, self._headers(answer), answer.body)

    def _headers(self, answer: Response) -> Headers:
        headers = (*self._id_headers(), *self.common_headers, *answer.headers)
        if self.permit is not None:
            headers += self.permit.headers()
        return headers if answer.status == 204 else (*headers, (b"content-type", answer.content_type))

    def _id_headers(self) -> Headers:
        request_id = self.request_id.encode("ascii")
        name = self.errors.id_header
        return ((b"x-request-id", request_id), (name, request_id)) if name else ((b"x-request-id", request_id),)

    async def _send_events(self, events: EventStream) -> None:
        """Send frames as they come, and wait while the write buffer is full."""
        for recorder in self.recorders:
            events = recorder.record_events(events)
        exchange = self.exchange
        self._begin_events(200, events.headers, events.content_type)
        failure: BaseException | None = None
        try:
            async for frame in events.frames:
                self.response_bytes += len(frame)
                if self.capture is not None:
                    self.capture.add(frame)
                exchange.write(frame)
                await exchange.drained()
        except BaseException as error:
            failure = error
        try:
            await events.frames.aclose()
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback refers to this frame
        self.is_complete = True
        exchange.finish()

    def _begin_events(self, status: int, headers: Headers, content_type: bytes) -> None:
        self.status = status
        headers = (
            *self._id_headers(),
            *self.common_headers,
            *headers,
            (b"content-type", content_type),
            *EVENTS_HEADERS,
        )
        if self.permit is not None:
            headers += self.permit.headers()
        self.exchange.begin(status, headers, None)

    def break_off(self, error: InferdError) -> None:
        """Send an error instead of the rest of a streamed answer."""
        frame = error_frame(self, error)
        self.response_bytes += len(frame)
        if self.capture is not None:
            self.capture.add(frame)
        self.exchange.write(frame)
        self.exchange.finish()

    # -- the answer as its request's sink ---------------------------------------------------

    def deliver(self, item: Item) -> None:
        try:
            if isinstance(item, Relayed):
                self._deliver_piece(item)
            else:
                if item.prediction is not None:
                    self._deliver_prediction(item.prediction)
                if item.end is not None:
                    error = failure_of(item.end)
                    if self._has_several:
                        error = several_answers_error(self.model or "")
                    elif error is None and self._prediction is None:
                        error = no_answer_error(self.model or "")
                    if error is not None:
                        self._fail(error)
                    else:
                        assert self._prediction is not None
                        self._conclude(response_of(self._prediction))
        except Exception:
            # A request boundary: a defect ends this request, and no other that its replica answers.
            _log.exception("request %s failed", self.request_id)
            self._abort_on_defect()

    def _deliver_prediction(self, prediction: Prediction) -> None:
        if self._prediction is None:
            self._prediction = prediction
        elif not self._has_several:
            self._has_several = True
            self.cancel_requests()

    def _deliver_piece(self, piece: Relayed) -> None:
        head, data, end = piece.head, piece.data, piece.end
        error = failure_of(end) if end is not None and head is None else None
        if error is not None:
            self._fail(error)
        elif head is not None and end is not None:
            self._conclude(Response(head.status, data, head.content_type, (*head.headers, NOSNIFF)))
        else:
            if head is not None:
                self._begin_relayed(head)
            if data:
                self.response_bytes += len(data)
                if self.capture is not None:
                    self.capture.add(data)
                self.exchange.write(data)
            if end is not None:
                self.exchange.finish()
                self.close()
            elif not self.exchange.is_writable:
                self.writable_changed(False)

    def _begin_relayed(self, head: RelayHead) -> None:
        self._has_begun = True
        self._begin_events(head.status, head.headers, head.content_type)

    def _fail(self, error: InferdError) -> None:
        if self._has_begun:
            if self.status == 200 and not self.client_left:
                self.break_off(error)
            elif not self.exchange.is_over:
                self.exchange.finish()
        elif not self.client_left:
            self.write(self._gateway.error_response(self, error))
        self.close()

    def _conclude(self, answer: Response) -> None:
        if self.client_left:
            self.close()
        elif self.recorders or len(answer.body) >= (SEND_PIECE_BYTES if self.encoding is None else MIN_BYTES):
            self.task = self.exchange.spawn(self._send_whole(answer))
        else:
            self.write(answer)
            self.close()

    async def _send_whole(self, answer: Response) -> None:
        try:
            await self.send(answer)
        except asyncio.CancelledError:
            if not self.client_left:
                raise
        except Exception:
            _log.exception("request %s failed", self.request_id)
            self._abort_on_defect()
        finally:
            self.close()

    def _abort_on_defect(self) -> None:
        """Answer with an internal error, or cut off an answer that has begun."""
        if self._is_closed:
            return
        exchange = self.exchange
        if exchange.has_begun:
            if not exchange.is_over:
                exchange.cut()
        else:
            error = InternalError("The server met an internal error; the log has the details.")
            self.write(self._gateway.error_response(self, error))
        self.close()

    def refuse(self, error: InferdError) -> None:
        """Answer with an error, without reading the body."""
        self.exchange.take_body()
        self.write(self._gateway.error_response(self, error))
        self.close()

    def close(self) -> None:
        """End the call. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._note_blocked(False)
            self.finish(self._gateway.emit)
            self.exchange.listener = None  # a reference cycle would delay freeing
