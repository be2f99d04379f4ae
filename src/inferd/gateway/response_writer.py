"""Writes the items of a stream to the client's connection as they come, without a task.

Knows the client's exchange and the call. Knows neither how the request was read nor which replica answers it.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

from inferd.errors import InferdError, InternalError
from inferd.gateway.call import EVENTS_HEADERS, Call, Response
from inferd.gateway.generation import error_frame, failure_of
from inferd.gateway.predictions import no_answer_error, response_of, several_answers_error
from inferd.gateway.upstream import Item, Stream
from inferd.http.asgi import Headers
from inferd.http.exchange import Exchange
from inferd.types import Prediction, Relayed, RelayHead

NOSNIFF: Final = (b"x-content-type-options", b"nosniff")  # for relayed bodies, whose content type is not verified here


_log = logging.getLogger("inferd.gateway")


class CallHandler(Protocol):
    """Turns the errors of calls into answers, and closes calls. ``Gateway`` implements it."""

    def error_response(self, call: Call, error: InferdError) -> Response:
        """The answer to a call that failed with ``error``, which is recorded in the call."""
        ...

    def close(self, call: Call) -> None:
        """End the call: settle its quota and emit its event."""


class ResponseWriter:
    """Is called with each item of a stream, and writes it to the client's connection.

    An answer that has begun and fails ends with an error event; one that has not begun becomes an error answer.
    """

    __slots__ = ("_call", "_exchange", "_handler", "_has_begun", "_has_several", "_is_closed", "_prediction", "stream")

    def __init__(self, call: Call, exchange: Exchange, handler: CallHandler) -> None:
        self._call = call
        self._exchange = exchange
        self._handler = handler
        self._has_begun = False
        self._has_several = False
        self._is_closed = False
        self._prediction: Prediction | None = None
        self.stream: Stream | None = None

    def __call__(self, item: Item) -> None:
        try:
            end, exchange, call = item.end, self._exchange, self._call
            if isinstance(item, Relayed):
                data = item.data
                if item.head is not None:
                    self._begin(item.head, data, is_whole=end is not None)
                elif data:
                    call.response_bytes += len(data)
                    exchange.write(data)
                if end is None:
                    if not exchange.is_writable and self.stream is not None:
                        self.stream.pause()
                    return
            elif item.prediction is not None:
                if self._prediction is None:
                    self._prediction = item.prediction
                elif not self._has_several:
                    self._has_several = True
                    if self.stream is not None:
                        self.stream.close()
            if end is None:
                return
            error = failure_of(end)
            if self._has_several:
                error = several_answers_error(call.model or "")
            elif error is None and not self._has_begun:
                if self._prediction is not None:
                    self._answer(response_of(self._prediction))
                else:
                    error = no_answer_error(call.model or "")
            if error is not None and not call.client_left:
                if not self._has_begun:
                    self._answer(self._handler.error_response(call, error))
                elif call.status == 200:
                    frame = error_frame(call, error)
                    call.response_bytes += len(frame)
                    exchange.write(frame)
            if not exchange.is_over:
                exchange.finish()
            self._close()
        except Exception:
            # A request boundary: a defect ends this request, and no other that its replica answers.
            _log.exception("request %s failed", self._call.request_id)
            self._fail()

    def _fail(self) -> None:
        """End the call after a defect: with an internal error, or by cutting off an answer that has begun."""
        if self._is_closed:
            return
        stream, exchange = self.stream, self._exchange
        if exchange.has_begun:
            if not exchange.is_over:
                exchange.cut()
        else:
            error = InternalError("The server met an internal error; the log has the details.")
            self._answer(self._handler.error_response(self._call, error))
        self._close()
        if stream is not None:
            stream.close()

    def _begin(self, head: RelayHead, data: bytes, *, is_whole: bool) -> None:
        call, exchange = self._call, self._exchange
        self._has_begun = True
        call.status = head.status
        call.response_bytes += len(data)
        headers: Headers = (
            (b"x-request-id", call.request_id.encode("ascii")),
            *call.common_headers,
            *head.headers,
            (b"content-type", head.content_type),
        )
        if call.permit is not None:
            headers += call.permit.headers()
        if is_whole:
            call.is_complete = True
            exchange.answer(head.status, (*headers, NOSNIFF), data)
        else:
            exchange.begin(head.status, headers + EVENTS_HEADERS, None)
            if data:
                exchange.write(data)

    def mark_begun(self) -> None:
        """Note that the answer's head, and perhaps some of its body, is written already."""
        self._has_begun = True

    def refuse(self, error: InferdError) -> None:
        """Answer with ``error`` a request that was not submitted."""
        self._exchange.take_body()
        self._answer(self._handler.error_response(self._call, error))
        self._close()

    def _answer(self, response: Response) -> None:
        call = self._call
        call.status = response.status
        call.response_bytes += len(response.body)
        call.is_complete = True
        headers: Headers = (
            (b"x-request-id", call.request_id.encode("ascii")),
            *call.common_headers,
            *response.headers,
            (b"content-type", response.content_type),
        )
        if call.permit is not None:
            headers += call.permit.headers()
        self._exchange.answer(response.status, headers, response.body)

    def client_left(self) -> None:
        """Cancel the request because the client closed the connection. The stream's end has the usage."""
        self._call.client_left = True
        if self.stream is not None:
            self.stream.close()

    def set_writable(self, is_writable: bool) -> None:
        if self.stream is not None:
            if is_writable:
                self.stream.resume()
            else:
                self.stream.pause()

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        call, exchange = self._call, self._exchange
        self._handler.close(call)
        # Break the reference cycles: otherwise only the garbage collector frees the call and its request.
        exchange.on_disconnect = exchange.on_writable = self.stream = None
