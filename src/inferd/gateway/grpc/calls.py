"""Serves gRPC's requests as ``Call`` objects: authentication, tasks, the log's values, and statuses for errors.

A request's metadata are the headers of its ``Call``. So the code that admits and computes requests is the same for HTTP
and gRPC.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, NamedTuple, Protocol

from inferd import clock
from inferd.errors import DeadlineExceeded, InferdError, InternalError, InvalidRequest, Overloaded
from inferd.gateway.admission import MAX_TIMEOUT_S, authenticate
from inferd.gateway.call import Call
from inferd.gateway.context import Context
from inferd.gateway.errors import BodyTimeout, BodyTooLarge, Unsupported, error_headers, kind_of
from inferd.gateway.grpc.rpc import EXPIRED, Method, Rpc, UnaryMethod, UnaryRpc
from inferd.gateway.grpc.statuses import Status, details_of, status_of
from inferd.gateway.grpc.wire import Refusal, trailers_block
from inferd.http.asgi import Headers, Message
from inferd.http.cost import PROTOBUF_FIELD, REFUSAL, REFUSAL_CREDIT, TASK
from inferd.tenancy.principal import Scope

SERVICE: Final = "inference.GRPCInferenceService"

FEW_BYTES: Final = 4096  # the limit of a message with a name or with nothing
MAX_CALLS: Final = 8192  # calls in tasks at the same time; a further one is refused with RESOURCE_EXHAUSTED
Endpoint = Callable[[Context, Call, bytes, float | None], Awaitable[bytes]]
"""Computes the one answer of a call. Takes the context, the call, the request's bytes and the seconds until its
deadline (None: no deadline); returns the answer's bytes."""

_REFUSALS: Final[dict[Status, type[InferdError]]] = {
    Status.UNIMPLEMENTED: Unsupported,
    Status.RESOURCE_EXHAUSTED: BodyTooLarge,
    Status.DEADLINE_EXCEEDED: BodyTimeout,
}
"""The errors by which refusals of the protocol are logged; InvalidRequest where there is none."""

_log = logging.getLogger("inferd.gateway")


class GrpcGateway(Protocol):
    """The part of ``Gateway`` that gRPC uses."""

    @property
    def context(self) -> Context: ...
    def close(self, call: Call) -> None:
        """End the call: settle its quota and emit its event."""


class Outcome(NamedTuple):
    """The result of a call: an answer, or an error status."""

    answer: bytes
    status: Status
    details: str
    trailers: Headers

    def send(self, rpc: Rpc) -> None:
        if self.status is Status.OK:
            rpc.finish(self.answer, trailers_block(self.trailers))
        else:
            rpc.fail(self.status, self.details, self.trailers)


class Calls:
    """Serves calls with one answer, and counts the open calls. Streaming methods use ``begin`` and ``close``
    themselves."""

    def __init__(self, gateway: GrpcGateway) -> None:
        self._gateway = gateway
        self._num_open = 0
        self._tasks: dict[asyncio.Task[None], tuple[Call | None, Rpc]] = {}
        self._waiting: asyncio.Future[None] | None = None  # set by the end of the last open call

    @property
    def context(self) -> Context:
        """The current context. A reload replaces it."""
        return self._gateway.context

    def begin(self, method: str, rpc: Rpc, num_bytes: int) -> Call:
        """Make a call and count it as open. It must be closed with ``close``."""
        self._num_open += 1
        return self.make_call(method, rpc, num_bytes)

    def make_call(self, method: str, rpc: Rpc, num_bytes: int) -> Call:
        path = f"/{SERVICE}/{method}"
        call = _call_of(rpc, path)
        call.route = path
        call.request_bytes = num_bytes
        return call

    def log_refusal(self, rpc: Rpc, refusal: Refusal) -> None:
        """Log a call, or a message of a stream, that no method has begun to serve."""
        rpc.connection.charge(REFUSAL)
        self._num_open += 1
        path = rpc.head.path.decode("latin-1")
        call = _call_of(rpc, path)
        if rpc.method is not None:
            call.route = path
        kind = _REFUSALS.get(refusal.status, InvalidRequest)
        note_outcome(call, kind(refusal.details), 0)
        self.close(call)

    def admit(self, rpc: Rpc, method: Method) -> bool:
        """Whether the key in a call's metadata allows the method; if not, the call has been refused.

        The check needs the headers alone and comes before any message is read, decompressed or stored.
        """
        if method.scope == "public":
            return True
        head, door = rpc.head, self._gateway.context.door
        try:
            if head.is_usual:
                rpc.principal = principal = door.authenticate(head.token)
                if principal.may(method.scope):
                    return True
            rpc.principal = authenticate(door, self.make_call(method.name, rpc, 0), method.scope)
        except InferdError as failure:
            self.refuse(self.begin(method.name, rpc, 0), rpc, failure)
            return False
        return True

    def start(self, method: str, rpc: Rpc, num_bytes: int, answer: Callable[[Call], Awaitable[bytes]]) -> None:
        """Serve a call with one answer in a task, or refuse it if there are ``MAX_CALLS`` tasks."""
        if self.has_room(rpc):
            call = self.begin(method, rpc, num_bytes)
            self.spawn(rpc, self._serve(call, rpc, answer), call)

    def start_compressed(self, method: UnaryMethod, rpc: UnaryRpc, body: bytes) -> None:
        """Decompress a message in a task, and pass it to the method."""
        if self.has_room(rpc):
            self.spawn(rpc, self._open(method, rpc, body))

    async def _open(self, method: UnaryMethod, rpc: UnaryRpc, body: bytes) -> None:
        found = await rpc.decompressed(body)
        if found is not None and not rpc.is_ended:
            rpc.owner = None  # the method sets the next owner
            method.take(rpc, found)

    async def _serve(self, call: Call, rpc: Rpc, answer: Callable[[Call], Awaitable[bytes]]) -> None:
        (await self.run(call, rpc, answer(call))).send(rpc)

    def spawn(self, rpc: Rpc, serving: Coroutine[Any, Any, None], call: Call | None = None) -> None:
        """Run ``serving`` in a task that is cancelled with the stream. ``call``: the call that the task serves, which
        is closed even if the task is cancelled before it runs."""
        rpc.connection.charge(TASK)
        task = rpc.owner = asyncio.get_running_loop().create_task(serving)
        self._tasks[task] = call, rpc
        task.add_done_callback(self._done)

    def has_room(self, rpc: Rpc) -> bool:
        """Whether one more task may be started; if not, the call has been refused."""
        if len(self._tasks) < MAX_CALLS:
            return True
        assert rpc.method is not None, "a call without a method is refused at once"
        problem = Overloaded(f"{MAX_CALLS} calls are under way; come back in a moment.")
        self.refuse(self.begin(rpc.method.name, rpc, 0), rpc, problem)
        return False

    def _done(self, task: asyncio.Task[None]) -> None:
        call, rpc = self._tasks.pop(task)
        if task.cancelled():
            if call is not None and not call.is_complete:  # cancelled before the task ran
                note_abandoned(call, rpc)
                self.close(call)
        elif (error := task.exception()) is not None:
            _log.error("a gRPC call broke", exc_info=error)

    async def close_abandoned(self, call: Call, rpc: Rpc) -> None:
        """Close a call whose client has disconnected. The end of its stream has the usage."""
        note_abandoned(call, rpc)
        self.close(call)

    async def run(self, call: Call, rpc: Rpc, result: Awaitable[bytes]) -> Outcome:
        """Await the answer of a call, and close the call. An exception becomes an error status."""
        answer, failure = b"", None
        try:
            try:
                answer = await result
            except InferdError as error:
                failure = error
            except Exception:
                # The request boundary: a defect ends this request, and no other.
                failure = log_defect(call)
            note_outcome(call, failure, len(answer))
        except asyncio.CancelledError:
            note_abandoned(call, rpc)
            raise
        finally:
            self.close(call)
        trailers = trailers_of(call, failure)
        if failure is None:
            return Outcome(answer, Status.OK, "", trailers)
        self.credit_refusal(rpc)
        status, details = status_of(failure), details_of(failure)
        del failure  # its traceback refers to this frame, and the cycle would wait for the garbage collector
        return Outcome(b"", status, details, trailers)

    def close(self, call: Call) -> None:
        """End a call: settle its quota and emit its event."""
        call.is_complete = True
        self._gateway.close(call)
        self._num_open -= 1
        if self._waiting is not None and not self._num_open and not self._waiting.done():
            self._waiting.set_result(None)

    def credit_refusal(self, rpc: Rpc) -> None:
        """Give the connection back the cost of a refusal, for an authenticated call. Errors such as a used quota, a
        full queue or an unknown model must not end a connection with other calls."""
        rpc.connection.cost_credit += REFUSAL_CREDIT

    def refuse(self, call: Call, rpc: Rpc, failure: InferdError) -> None:
        """End a call with an error before it was served."""
        rpc.connection.charge(REFUSAL)
        note_outcome(call, failure, 0)
        self.close(call)
        rpc.fail(status_of(failure), details_of(failure), trailers_of(call, failure))

    async def wait_closed(self) -> None:
        """Wait until every call is closed."""
        if self._num_open:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting


class UnaryEndpoint:
    """A method with one answer, which serves each call in a task."""

    def __init__(self, calls: Calls, name: str, scope: Scope, max_bytes: int, endpoint: Endpoint) -> None:
        self.calls = calls
        self.name = name
        self.scope: Final = scope
        self.max_bytes: Final = max_bytes
        self._endpoint = endpoint

    def take(self, rpc: UnaryRpc, body: bytes) -> None:
        rpc.connection.charge(len(body) * PROTOBUF_FIELD)

        async def answer(call: Call) -> bytes:
            return await self._endpoint(self.calls.context, call, body, time_left(rpc))

        self.calls.start(self.name, rpc, len(body), answer)

    def take_compressed(self, rpc: UnaryRpc, body: bytes) -> None:
        self.calls.start_compressed(self, rpc, body)


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


def _call_of(rpc: Rpc, path: str) -> Call:
    scope = {"method": "POST", "path": path, "http_version": "2", "headers": rpc.head.metadata}
    call = Call(scope, _never_receive, _refuse_send, clock.now())
    call.principal = rpc.principal
    return call


def log_defect(call: Call) -> InternalError:
    """Log the unexpected exception that is being handled; returns the error for the client."""
    _log.exception("request %s failed", call.request_id)
    return InternalError("The server met an internal error; the log has the details.")


async def _never_receive() -> Message:
    """A call's ``receive`` that never returns: a disconnect cancels the task that serves the call."""
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never


async def _refuse_send(message: Message) -> None:
    raise AssertionError("a gRPC call is not answered in HTTP's messages")
