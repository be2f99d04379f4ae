"""Serves gRPC's requests as ``Call`` objects: authentication, tasks, the log's values, and statuses for errors.

A request's metadata are the headers of its ``Call``. So the code that admits and computes requests is the same for HTTP
and gRPC.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol
from urllib.parse import quote

from inferd import clock
from inferd.eager import run_eagerly
from inferd.errors import DeadlineExceeded, InferdError, InternalError, InvalidRequest, Overloaded
from inferd.events import Emit
from inferd.gateway.admin.audit import note_refused
from inferd.gateway.admission import MAX_TIMEOUT_S, authenticate
from inferd.gateway.call import Answer, Call, EventStream, Pending, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import BodyTimeout, BodyTooLarge, Unsupported, error_headers, failure_of, kind_of
from inferd.gateway.grpc.rpc import EXPIRED, Method, Rpc, UnaryMethod, UnaryRpc
from inferd.gateway.grpc.statuses import Status, details_of, status_of
from inferd.gateway.grpc.wire import Refusal, trailers_block
from inferd.http.cost import PROTOBUF_FIELD, REFUSAL, REFUSAL_CREDIT, TASK
from inferd.http.exchange import Headers
from inferd.http.head import RequestHead
from inferd.tenancy.principal import Scope
from inferd.types import End, Item, Prediction, Relayed

SERVICE: Final = "inference.GRPCInferenceService"

FEW_BYTES: Final = 4096  # the limit of a message with a name or with nothing
CONTENT_TYPE: Final = b"application/grpc"  # of stored answers: no other protocol can read them
MAX_CALLS: Final = 8192  # calls in tasks at the same time; a further one is refused with RESOURCE_EXHAUSTED
Endpoint = Callable[[Context, Call, bytes, float | None], Awaitable[Answer | bytes]]
"""Of a call of one answer: context, call, the request's bytes, seconds until its deadline; the answer's bytes, or with
trailing metadata a response."""

_REFUSALS: Final[dict[Status, type[InferdError]]] = {
    Status.UNIMPLEMENTED: Unsupported,
    Status.RESOURCE_EXHAUSTED: BodyTooLarge,
    Status.DEADLINE_EXCEEDED: BodyTimeout,
}
"""The errors by which refusals of the protocol are logged; InvalidRequest where there is none."""

_log = logging.getLogger("inferd.gateway")


class GrpcGateway(Protocol):
    """The part of ``Gateway`` that gRPC uses."""

    emit: Emit

    @property
    def context(self) -> Context: ...


class RpcCall(Call):
    """A call of one answer. Its owner is cancelled when the client leaves or the deadline passes."""

    is_closed = False
    _prediction: Prediction | None = None
    _has_several = False
    task: asyncio.Task[None] | None = None  # that serves the call, from its first wait on

    def __init__(self, calls: Calls, method: Method, rpc: Rpc, num_bytes: int) -> None:
        path = rpc.head.path
        super().__init__(RequestHead("POST", path, rpc.head.metadata, "2"), clock.now())
        self.principal = rpc.principal
        self.route, self.operation = path.decode("ascii"), method.operation
        self.request_bytes = num_bytes
        self.rpc = rpc
        self.sampler = calls.context.sampler
        self._calls = calls

    @property
    def peer(self) -> str:
        return self.rpc.connection.peer

    def run(self, result: Awaitable[Answer | bytes]) -> None:
        """Answer with ``result``. It runs in a task only if it waits."""
        self.rpc.owner = self
        self.task = run_eagerly(self._serve(result), self._spawn)

    def _spawn(self, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.rpc.connection.charge(TASK)
        return self._calls.keep(asyncio.get_running_loop().create_task(serving))

    async def _serve(self, result: Awaitable[Answer | bytes]) -> None:
        try:
            try:
                answer = await result
                if isinstance(answer, Pending):
                    return
                await self._send(Response(200, answer) if isinstance(answer, bytes) else answer)
            except InferdError as error:
                self.refuse(error)
            except Exception:
                # The request boundary: a defect ends this request, and no other.
                self.refuse(log_defect(self))
        except asyncio.CancelledError:
            self.note_abandoned()
            raise

    async def _send(self, answer: Response | EventStream) -> None:
        assert isinstance(answer, Response), "a call has one answer"
        for recorder in self.recorders:
            answer = await recorder.record(answer)
        self.finish_with(answer)

    def finish_with(self, answer: Response) -> None:
        """Send the one answer. Its headers are sent as trailing metadata."""
        self.common_headers = answer.headers
        if self.capture is not None:
            self.capture.take(answer.body)
        note_outcome(self, None, len(answer.body))
        self.close()
        self.rpc.finish(answer.body, trailers_block(trailers_of(self, None)))

    def refuse(self, error: InferdError) -> None:
        """Send an error status instead of an answer. Most of the call's cost is credited to the connection, so that
        refused calls do not end a connection with other calls."""
        note_outcome(self, error, 0)
        self.close()
        self.rpc.connection.cost_credit += REFUSAL_CREDIT
        self.rpc.fail(status_of(error), details_of(error), trailers_of(self, error))

    def cancel(self) -> None:
        """The client has disconnected, or its deadline has passed. The requests' ends have the usage."""
        if not self.is_closed:
            self.note_abandoned()
            if self.task is not None:
                self.task.cancel()

    def note_abandoned(self) -> None:
        note_abandoned(self, self.rpc)
        self.close()

    def close(self) -> None:
        """The call is over. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self._calls.close(self)

    # -- the answer as its request's sink ---------------------------------------------------

    def deliver(self, item: Item) -> None:
        try:
            if isinstance(item, Relayed):
                raise InternalError("A relayed answer came where a prediction was expected. This is a bug.")
            if item.prediction is not None:
                if self._prediction is None:
                    self._prediction = item.prediction
                else:
                    self._has_several = True
                    self.cancel_requests()
            if item.end is not None and not self.is_closed:
                self._conclude(item.end)
        except Exception:
            # A request boundary: a defect ends this request, and no other that its replica answers.
            if not self.is_closed:
                self.refuse(log_defect(self))

    def _conclude(self, end: End) -> None:
        prediction = self._prediction
        error = failure_of(end)
        if self._has_several:
            error = Unsupported(
                f"The model {self.model!r} answers several times, and ModelInfer has one answer; call ModelStreamInfer."
            )
        elif error is None and prediction is None:
            error = Unsupported(
                f"The model {self.model!r} had no answer; call ModelStreamInfer, where there may be none."
            )
        if error is not None:
            self.refuse(error)
            return
        assert prediction is not None
        answer = Response(200, prediction.body, CONTENT_TYPE)
        if self.recorders:
            self.rpc.owner = self
            self.task = self._spawn(self._serve(self._kept(answer)))
        else:
            self.finish_with(answer)

    async def _kept(self, answer: Response) -> Answer:
        return answer


class Calls:
    """Serves calls with one answer, and counts the open calls. Streaming methods use ``begin`` and ``close``
    themselves."""

    def __init__(self, gateway: GrpcGateway) -> None:
        self._gateway = gateway
        self._num_open = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: asyncio.Future[None] | None = None  # set by the end of the last open call

    @property
    def context(self) -> Context:
        """The current context. A reload replaces it."""
        return self._gateway.context

    def begin(self, method: Method, rpc: Rpc, num_bytes: int) -> RpcCall:
        """Make a call and count it as open. It must be closed with ``close``."""
        self._num_open += 1
        return RpcCall(self, method, rpc, num_bytes)

    def log_refusal(self, rpc: Rpc, refusal: Refusal) -> None:
        """Log a call, or a message of a stream, that no method has begun to serve."""
        rpc.connection.charge(REFUSAL)
        self._num_open += 1
        path = rpc.head.path
        target = quote(path).encode("ascii") if path.startswith(b"/") else b"*"  # any bytes may come
        call = Call(RequestHead("POST", target, rpc.head.metadata, "2"), clock.now())
        call.principal = rpc.principal
        call.sampler = self.context.sampler
        if rpc.method is not None:
            call.route, call.operation = path.decode("latin-1"), rpc.method.operation
        kind = _REFUSALS.get(refusal.status, InvalidRequest)
        note_outcome(call, kind(refusal.details), 0)
        self.close(call)

    def admit(self, rpc: Rpc, method: Method) -> bool:
        """Whether the key in a call's metadata allows the method; if not, the call has been refused.

        The check needs the headers alone and comes before any message is read, decompressed or stored.
        """
        if method.scope == "public":
            return True
        head, context = rpc.head, self._gateway.context
        try:
            if head.is_usual:
                rpc.principal = principal = context.door.authenticate(head.token)
                if principal.may(method.scope):
                    return True
            rpc.principal = authenticate(context, RpcCall(self, method, rpc, 0), method.scope)
        except InferdError as failure:
            rpc.connection.charge(REFUSAL)
            call = self.begin(method, rpc, 0)
            if method.scope == "admin":
                note_refused(context, call, "authenticate", failure)
            note_outcome(call, failure, 0)
            call.close()
            rpc.fail(status_of(failure), details_of(failure), trailers_of(call, failure))
            return False
        return True

    def start(
        self, method: Method, rpc: Rpc, num_bytes: int, answer: Callable[[Call], Awaitable[Answer | bytes]]
    ) -> None:
        """Serve a call with one answer, or refuse it if there are ``MAX_CALLS`` tasks."""
        if self.has_room(rpc):
            call = self.begin(method, rpc, num_bytes)
            call.run(answer(call))

    def start_compressed(self, method: UnaryMethod, rpc: UnaryRpc, body: bytes) -> None:
        """Decompress a message in a task, and pass it to the method."""
        if self.has_room(rpc):
            self.spawn(rpc, self._open(method, rpc, body))

    async def _open(self, method: UnaryMethod, rpc: UnaryRpc, body: bytes) -> None:
        found = await rpc.decompressed(body)
        if found is not None and not rpc.is_ended:
            rpc.owner = None  # the method sets the next owner
            asyncio.get_running_loop().call_soon(self._take_opened, method, rpc, found)

    def _take_opened(self, method: UnaryMethod, rpc: UnaryRpc, message: bytes) -> None:
        if not rpc.is_ended:
            method.take(rpc, message)

    def spawn(self, rpc: Rpc, serving: Coroutine[Any, Any, None]) -> None:
        """Serve in a task that is cancelled with the stream."""
        rpc.connection.charge(TASK)
        rpc.owner = self.keep(asyncio.get_running_loop().create_task(serving))

    def keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def has_room(self, rpc: Rpc) -> bool:
        """Whether one more task may be started; if not, the call has been refused."""
        if len(self._tasks) < MAX_CALLS:
            return True
        assert rpc.method is not None, "a call without a method is refused at once"
        problem = Overloaded(f"{MAX_CALLS} calls are under way; come back in a moment.")
        self.begin(rpc.method, rpc, 0).refuse(problem)
        return False

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a gRPC call broke", exc_info=error)

    def close(self, call: Call) -> None:
        """End a call: settle its quota and emit its event."""
        call.is_complete = True
        call.finish(self._gateway.emit)
        self._num_open -= 1
        if self._waiting is not None and not self._num_open and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait_closed(self) -> None:
        """Wait until every call is closed."""
        if self._num_open:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting


class UnaryEndpoint:
    """A method of one answer that asks no model for anything."""

    operation: Final = None

    def __init__(self, calls: Calls, name: str, scope: Scope, max_bytes: int, endpoint: Endpoint) -> None:
        self.calls = calls
        self.name: Final = name
        self.scope: Final = scope
        self.max_bytes: Final = max_bytes
        self._endpoint = endpoint

    def take(self, rpc: UnaryRpc, body: bytes) -> None:
        rpc.connection.charge(len(body) * PROTOBUF_FIELD)

        async def answer(call: Call) -> Answer | bytes:
            return await self._endpoint(self.calls.context, call, body, time_left(rpc))

        self.calls.start(self, rpc, len(body), answer)

    def given_up(self, rpc: UnaryRpc, num_bytes: int) -> None:
        self.calls.begin(self, rpc, num_bytes).note_abandoned()

    def take_compressed(self, rpc: UnaryRpc, body: bytes) -> None:
        self.calls.start_compressed(self, rpc, body)


def capture(context: Context, call: Call, body: bytes) -> None:
    """Have a call recorded, if its tenant's payloads are."""
    payloads = context.payloads
    if payloads is not None and payloads.is_on:
        call.capture = payloads.begin(call.principal.tenant, call.unique, None)
        if call.capture is not None:
            call.capture.request = body


def time_left(rpc: Rpc) -> float | None:
    """Seconds until the client's deadline; None: it set no deadline. Raises DeadlineExceeded."""
    remaining_s = rpc.time_left()
    if remaining_s is None:
        return None
    if remaining_s <= 0:
        raise DeadlineExceeded("The request's deadline had passed when it arrived; give it more time.")
    return min(remaining_s, MAX_TIMEOUT_S)


def note_outcome(call: Call, failure: InferdError | None, num_bytes: int) -> None:
    """Record how the call was answered, for the log. The recorded status is the HTTP status of the same error."""
    if failure is None:
        call.status = 200
        call.response_bytes += num_bytes
    else:
        call.status = kind_of(failure).status
        call.note_error(failure)


def note_abandoned(call: Call, rpc: Rpc) -> None:
    """Record a call that ended before its answer: the client disconnected, or the deadline passed."""
    if rpc.has_expired:
        note_outcome(call, DeadlineExceeded(EXPIRED), 0)
    else:
        call.client_left = True


def trailers_of(call: Call, failure: InferdError | None) -> Headers:
    """The trailing metadata: the request's id, the quota's state, the time to retry, and whether the answer is a
    repeated one."""
    headers = call.permit.headers() if call.permit is not None else ()
    if failure is not None:
        headers += error_headers(failure)
    told = [header for header in headers if header[0] != b"connection"]
    return ((b"x-request-id", call.request_id.encode("ascii")), *told, *call.common_headers)


def log_defect(call: Call) -> InternalError:
    """Log the unexpected exception that is being handled; returns the error for the client."""
    _log.exception("request %s failed", call.request_id)
    return InternalError("The server met an internal error; the log has the details.")
