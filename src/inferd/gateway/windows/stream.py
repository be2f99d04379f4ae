"""One client's stream of windows: its messages, one answer per window in order, and its end.

Each window is a request of its own: it has the client's key, counts in its quota and emits an event. Windows of one
stream are computed one after the other, so a model's state advances in order. Windows of several clients share batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import Final

import msgspec

from inferd import clock
from inferd.errors import DeadlineExceeded, InferdError, InternalError, InvalidRequest
from inferd.gateway.admission import authenticate
from inferd.gateway.body.decode import OFF_LOOP_BYTES, decode_body
from inferd.gateway.call import Call
from inferd.gateway.context import Context
from inferd.gateway.errors import MAX_MESSAGE_CHARS, ErrorDetail, kind_of, printable
from inferd.gateway.kserve.parameters import DIALECT
from inferd.gateway.kserve.served import Served
from inferd.gateway.predictions import compute_prediction, predict_request
from inferd.gateway.terms import PredictFields
from inferd.gateway.windows.cutting import Window, WindowCutter
from inferd.gateway.windows.options import Plan, WindowOptions, plan_of
from inferd.gateway.windows.wire import ClientMessage, Ended, Opened, StreamError, WindowAnswer
from inferd.http.websocket import PeerDisconnected, ServerShuttingDown, WebSocket
from inferd.router.stream import open_stream
from inferd.types import ModelInfo

END_SEQUENCE_S: Final = 5.0  # the timeout of the request that ends a sequence

# Close codes (RFC 6455, section 7.4.1, and IANA's registry) by kind of error.
_CLOSE: Final[dict[str, int]] = {
    "invalid_request": 1007,
    "body_too_large": 1009,
    "unauthenticated": 1008,
    "forbidden": 1008,
    "model_not_found": 1008,
    "quota_exceeded": 1013,
    "overloaded": 1013,
    "unavailable": 1013,
    "worker_died": 1012,
    "deadline_exceeded": 1013,
    "cancelled": 1012,
}
# Error codes whose close code differs from their kind's. A lost state is a fault of the worker, not of the client.
_CLOSE_BY_CODE: Final[dict[str | None, int]] = {"stream_idle": 1008, "sequence_not_found": 1012}
_DEFECT: Final = 1011
_GOING_AWAY: Final = 1001
_DONE: Final = 1000

# Errors after which the next window may succeed. A stream without a state goes on after them; the window is lost.
_TRANSIENT: Final = frozenset(("quota_exceeded", "overloaded", "unavailable", "worker_died", "deadline_exceeded"))

_log = logging.getLogger("inferd.gateway")


class _Outputs(msgspec.Struct, frozen=True):
    outputs: msgspec.Raw


_message_decoder: Final = msgspec.json.Decoder(ClientMessage)
_outputs_decoder: Final = msgspec.json.Decoder(_Outputs)
_encode: Final = msgspec.json.Encoder().encode


class WindowStream:
    """Serves one WebSocket: cuts its samples into windows, and sends their answers."""

    def __init__(
        self,
        context: Context,
        call: Call,
        served: Served,
        info: ModelInfo,
        options: WindowOptions,
        plan: Plan | None,
        socket: WebSocket,
    ) -> None:
        """``call`` is the handshake. Without a ``plan`` the first message must complete the ``options``."""
        self._context = context
        self._head, self._route, self._operation = call.head, call.route, call.operation
        self._offer = call.offer
        self._id = call.request_id
        self._principal = call.principal
        self._served = served
        self._info = info
        self._options = options
        self._plan: Plan | None = None
        self._windows: WindowCutter | None = None
        self._socket = socket
        self._sequence = f"stream-{call.unique}" if info.is_stateful else ""
        self._has_state = False  # the worker keeps a state for this stream
        self._call: Call | None = None  # the window that is being computed
        self._num_answered = 0
        config = context.config.models.get(served.status.name)
        self._idle_s = config.sequence.idle_s if config is not None else 60.0
        socket.on_disconnect = self._on_client_left
        socket.on_protocol_error = lambda code, reason: _encode(
            StreamError(
                error=ErrorDetail(reason or "The protocol was broken.", "invalid_request_error", None, "websocket")
            )
        )
        if plan is not None:
            self._begin(plan)

    def _begin(self, plan: Plan) -> None:
        self._plan = plan
        self._windows = WindowCutter(plan.window, plan.hop, plan.context, plan.sample_bytes)

    def _on_client_left(self) -> None:
        """Cancel the window that is being computed, because the client disconnected."""
        if self._call is not None:
            self._call.client_left = True
            self._call.cancel_requests()

    # -- messages ---------------------------------------------------------------------------

    async def serve(self) -> None:
        """Serve the stream until the client or the server ends it, or an error does."""
        socket = self._socket
        try:
            try:
                await self._receive_messages()
                socket.close(_DONE, "")
            except PeerDisconnected:
                pass
            except ServerShuttingDown:
                socket.close(_GOING_AWAY, "The server is shutting down; connect again.")
            except InferdError as error:
                await self._fail(error)
            except Exception:
                # The request boundary: a defect ends this stream, and no other.
                _log.exception("a stream of windows failed")
                await self._fail(InternalError("The server met an internal error; the log has the details."))
        finally:
            socket.on_disconnect = socket.on_protocol_error = None  # they refer to this object
        await self._end_sequence()

    async def _receive_messages(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    message = await self._socket.receive()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"Nothing was sent for {self._idle_s:g} s (models.{self._served.status.name}.sequence.idle_s), and "
                    "the stream is over; connect again.",
                    code="stream_idle",
                ) from None
            if isinstance(message, bytes):
                await self._take(message)
            elif await self._handle_text(message):
                return

    async def _handle_text(self, text: str) -> bool:
        """Handle a text message; returns whether it was the last one. Raises InvalidRequest."""
        try:
            client_message = await decode_body(text.encode("utf-8"), _message_decoder)
        except InvalidRequest as error:
            message = error.message.replace("The request body", "The message")
            raise InvalidRequest(message, param=error.param, code=error.code) from None
        if (client_message.open is not None) + (client_message.samples is not None) + client_message.end != 1:
            raise InvalidRequest(
                'A text message is one of {"open": {...}}, {"samples": [...]} and {"end": true}; samples as bytes go '
                "into a binary message.",
                code="invalid_message",
            )
        if client_message.open is not None:
            await self._open(client_message.open)
        elif client_message.samples is not None:
            plan = self._planned()
            await self._take(plan.packed(client_message.samples))
        else:
            await self._end()
        return client_message.end

    async def _open(self, options: WindowOptions) -> None:
        if self._windows is not None and not self._windows.is_empty:
            raise InvalidRequest("'open' comes before the first sample; connect again for other options.", param="open")
        given = {name: value for name, value in _given(self._options).items() if name != "inputs"}
        inputs = {**self._options.inputs, **options.inputs}
        both = msgspec.convert({**given, **_given(options), "inputs": inputs}, WindowOptions)
        plan = plan_of(self._served.name, self._info, both, self._context.max_body_bytes)
        self._begin(plan)
        opened = Opened(
            model=self._served.name,
            version=self._served.version,
            input=plan.input,
            datatype=plan.datatype,
            window=plan.window,
            hop=plan.hop,
            context=plan.context,
            sample_rate=plan.sample_rate,
            is_stateful=self._info.is_stateful,
        )
        await self._socket.send(_encode(opened))

    def _planned(self) -> Plan:
        if self._plan is None:  # raises an InvalidRequest that names the missing option
            self._begin(plan_of(self._served.name, self._info, self._options, self._context.max_body_bytes))
        assert self._plan is not None
        return self._plan

    async def _take(self, data: bytes) -> None:
        plan = self._planned()
        plan.check(data)
        windows = self._windows
        assert windows is not None
        windows.push(data)
        while (window := windows.next_window()) is not None:
            await self._answer(plan, window, is_last=False)
            if self._socket.is_stopping:
                raise ServerShuttingDown

    async def _end(self) -> None:
        if self._plan is not None and self._windows is not None and (window := self._windows.last_window()) is not None:
            await self._answer(self._plan, window, is_last=True)
        await self._socket.send(_encode(Ended(windows=self._num_answered)))

    # -- a window ---------------------------------------------------------------------------

    async def _answer(self, plan: Plan, window: Window, *, is_last: bool) -> None:
        """Compute one window and send its answer. Raises InferdError for a failure that ends the stream."""
        data = window.data
        body = plan.body(data) if len(data) <= OFF_LOOP_BYTES else await asyncio.to_thread(plan.body, data)
        fields = PredictFields(
            dialect=DIALECT,
            body=body,
            header_bytes=len(plan.head),
            version=self._served.requested_version,
            sequence=self._sequence,
            sequence_start=bool(self._sequence) and not self._has_state,
            sequence_end=bool(self._sequence) and is_last,
        )
        self._has_state = bool(self._sequence)
        try:
            found = await self._compute(fields, window.number, len(body))
        except InferdError as error:
            if self._sequence or error.kind not in _TRANSIENT:
                raise
            await self._socket.send(_error(error, window.number))
            return
        self._has_state = self._has_state and not is_last
        self._num_answered += 1
        rate = plan.sample_rate
        answer = WindowAnswer(
            window=window.number,
            begin=window.begin,
            end=window.end,
            begin_s=round(window.begin / rate, 6) if rate else msgspec.UNSET,
            end_s=round(window.end / rate, 6) if rate else msgspec.UNSET,
            outputs=_outputs_decoder.decode(found).outputs,
        )
        await self._socket.send(_encode(answer))

    async def _compute(self, fields: PredictFields, number: int, num_bytes: int) -> bytes:
        """A window's outputs in KServe v2's JSON. Raises InferdError, and PeerDisconnected when the client
        disconnected."""
        call = self._make_call(num_bytes)
        call.request_id = f"{self._id}-{number}"
        self._call = call
        try:
            authenticate(self._context, call, "infer")
            payloads = self._context.payloads
            if payloads is not None and payloads.is_on:
                call.capture = payloads.begin(call.principal.tenant, call.unique, None)
            if call.capture is not None:
                call.capture.request = fields.body
            answer = await compute_prediction(self._context, call, self._served.status, fields)
            call.status = 200
            call.response_bytes = len(answer.body)
            if call.capture is not None:
                call.capture.take(answer.body)
            return answer.body
        except InferdError as error:
            if call.client_left:
                raise PeerDisconnected from None
            call.status = kind_of(error).status
            call.note_error(error)
            raise
        except asyncio.CancelledError:
            call.client_left = True
            raise
        finally:
            self._call = None
            call.finish(self._context.emit)

    def _make_call(self, num_bytes: int) -> Call:
        """The call of a window, with the handshake's headers and therefore its priority and deadline."""
        call = Call(self._head, clock.now())
        call.offer = self._offer
        call.route, call.operation = self._route, self._operation
        call.principal = self._principal
        call.sampler = self._context.sampler
        call.request_bytes = num_bytes
        call.stream = True
        return call

    # -- the end ----------------------------------------------------------------------------

    async def _fail(self, error: InferdError) -> None:
        with contextlib.suppress(PeerDisconnected):
            await self._socket.send(_error(error))
        code = _CLOSE.get(error.kind, _DEFECT)
        if error.code in _CLOSE_BY_CODE:
            code = _CLOSE_BY_CODE[error.code]
        if self._socket.is_stopping:
            code = _GOING_AWAY
        self._socket.close(code, printable(error.message, MAX_MESSAGE_CHARS))

    async def _end_sequence(self) -> None:
        """Let the worker drop this stream's state, with a last window of zeros whose answer is discarded.

        The window costs no quota. If it fails, the worker drops the state after ``sequence.idle_s``.
        """
        plan = self._plan
        if not self._has_state or plan is None or self._socket.is_stopping:
            return
        self._has_state = False
        size = (plan.context + plan.window) * plan.sample_bytes
        call = self._make_call(0)
        fields = PredictFields(
            dialect=DIALECT,
            body=plan.body(bytes(size)),
            header_bytes=len(plan.head),
            version=self._served.requested_version,
            sequence=self._sequence,
            sequence_end=True,
            timeout=END_SEQUENCE_S,
        )
        with contextlib.suppress(InferdError):
            stream = open_stream(self._context.router, predict_request(call, self._served.status, fields))
            try:
                async for _ in stream:
                    pass
            finally:
                stream.close()


def _given(options: WindowOptions) -> dict[str, object]:
    """The options that differ from their defaults, by name."""
    plain = WindowOptions()
    return {
        name: getattr(options, name)
        for name in WindowOptions.__struct_fields__
        if getattr(options, name) != getattr(plain, name)
    }


def _error(error: InferdError, window: int | msgspec.UnsetType = msgspec.UNSET) -> bytes:
    detail = ErrorDetail(printable(error.message, MAX_MESSAGE_CHARS), kind_of(error).type, error.param, error.code)
    after_s = error.retry_after_s
    retry = after_s if after_s is not None and math.isfinite(after_s) else msgspec.UNSET
    return _encode(StreamError(error=detail, window=window, retry_after_s=retry))
