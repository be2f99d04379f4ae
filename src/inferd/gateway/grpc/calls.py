"""gRPC's requests as calls like any other: who asks, what it costs, what the log says of it, what an error becomes.

A ``Call`` reads headers; a request's metadata are its headers. From here on nothing knows which way it came.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import grpc
from grpc import StatusCode
from grpc.aio import ServicerContext

from inferd import clock
from inferd.errors import DeadlineExceeded, InferdError, InternalError
from inferd.gateway.admission import MAX_TIMEOUT_S, authenticate
from inferd.gateway.errors import error_headers, kind_of
from inferd.gateway.grpc.statuses import details_of, status_of
from inferd.gateway.http import Call, Message
from inferd.gateway.room import Room
from inferd.gateway.server import hear_ends
from inferd.tenancy.principal import Scope

SERVICE: Final = "inference.GRPCInferenceService"

Context: TypeAlias = "ServicerContext[Any, Any]"
Endpoint = Callable[[Room, Call, bytes, float | None], Awaitable[bytes]]
"""Of a call of one answer: room, call, the request's bytes, seconds until its deadline; the answer's bytes."""

Trailers = tuple[tuple[str, str], ...]
Serving = Callable[[bytes, Context], Awaitable[bytes]]

_log = logging.getLogger("inferd.gateway")


class Front(Protocol):
    """The gateway, as a door of it sees it."""

    @property
    def room(self) -> Room: ...
    def close(self, call: Call) -> None:
        """The call is over: settle and tell."""


class Ended(NamedTuple):
    """An answer, or the status in its place."""

    answer: bytes
    status: StatusCode
    details: str
    trailers: Trailers

    async def tell(self, context: Context) -> bytes:
        if self.status is not StatusCode.OK:
            await context.abort(self.status, self.details, self.trailers)
        context.set_trailing_metadata(self.trailers)
        return self.answer


class Calls:
    """Serves calls of one answer; streams use ``begin`` and ``close`` themselves."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._num_open = 0
        self._waiting: asyncio.Future[None] | None = None  # for the last one's end

    @property
    def room(self) -> Room:
        """As it is now: a reload replaces it."""
        return self._front.room

    def begin(self, method: str, context: Context, num_bytes: int) -> Call:
        """A call that will be closed."""
        self._num_open += 1
        return self.made(method, context, num_bytes)

    def made(self, method: str, context: Context, num_bytes: int) -> Call:
        path = f"/{SERVICE}/{method}"
        scope = {"method": "POST", "path": path, "http_version": "2", "headers": headers_of(context)}
        call = Call(scope, _nothing_more, _not_this_way, clock.now())
        call.route = path
        call.request_bytes = num_bytes
        return call

    def unary(self, method: str, scope: Scope, endpoint: Endpoint) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.unary_unary_rpc_method_handler(self.serving(method, scope, endpoint))

    def serving(self, method: str, scope: Scope, endpoint: Endpoint) -> Serving:
        """What grpcio calls, with the bytes of a request as they came."""

        async def compute(call: Call, body: bytes, context: Context) -> bytes:
            room = self._front.room
            if scope != "public":
                authenticate(room.door, call, scope)
            return await endpoint(room, call, body, time_left(context))

        async def serve(body: bytes, context: Context) -> bytes:
            call = self.begin(method, context, len(body))
            ended = await self.ended(call, compute(call, body, context))
            # grpcio keeps the error that ends this frame, and so the frame, until the collector comes by:
            # the request and what was made of it need not stay as long.
            del body, call
            return await ended.tell(context)

        return serve

    async def ended(self, call: Call, answering: Awaitable[bytes]) -> Ended:
        """What becomes of a call whose answer is made by ``answering``; its books are closed."""
        answer, failure = b"", None
        try:
            try:
                answer = await answering
            except InferdError as error:
                failure = error
            except Exception:
                # The request boundary: a defect ends this request, and no other.
                failure = defect(call)
            note(call, failure, len(answer))
            if call.num_ended < len(call.streams):
                await hear_ends(call)
        except asyncio.CancelledError:
            call.gone = True
            await hear_ends(call)
            raise
        finally:
            self.close(call)
        trailers = trailers_of(call, failure)
        if failure is None:
            return Ended(answer, StatusCode.OK, "", trailers)
        status, details = status_of(failure), details_of(failure)
        del failure  # its traceback has this frame: together they would stay until the collector comes by
        return Ended(b"", status, details, trailers)

    def close(self, call: Call) -> None:
        """The call is over, whichever way it went."""
        self._front.close(call)
        self._num_open -= 1
        if self._waiting is not None and not self._num_open and not self._waiting.done():
            self._waiting.set_result(None)

    def refuse(self, call: Call, failure: InferdError) -> None:
        """A call that was never begun is over."""
        note(call, failure, 0)
        self._front.close(call)

    async def closed(self) -> None:
        """Wait until the books of every call are closed."""
        if self._num_open:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting


def headers_of(context: Context) -> list[tuple[bytes, bytes]]:
    """The request's metadata, whose names are lower-case already."""
    metadata = context.invocation_metadata() or ()
    return [
        (name.encode("ascii"), value if isinstance(value, bytes) else value.encode("latin-1"))
        for name, value in metadata
    ]


def time_left(context: Context) -> float | None:
    """Seconds until the client's deadline; None: it has none. Raises DeadlineExceeded."""
    left = context.time_remaining()
    if left is None:
        return None
    if left <= 0:
        raise DeadlineExceeded("The request's deadline had passed when it arrived; give it more time.")
    return min(left, MAX_TIMEOUT_S)


def note(call: Call, failure: InferdError | None, num_bytes: int) -> None:
    """For the log: how the call was answered. Its status is the one that HTTP has for the same."""
    if failure is None:
        call.status = 200
        call.response_bytes += num_bytes
    else:
        call.status = kind_of(failure).status
        call.error_code = failure.code


def trailers_of(call: Call, failure: InferdError | None) -> Trailers:
    """What goes with the status: the request's id, how much quota is left, when to come back."""
    trailers = [("x-request-id", call.request_id)]
    headers = call.permit.headers() if call.permit is not None else ()
    if failure is not None:
        headers += error_headers(failure)
    trailers += [(name.decode("ascii"), value.decode("latin-1")) for name, value in headers if name != b"connection"]
    return tuple(trailers)


def defect(call: Call) -> InternalError:
    """To be called where an exception is handled that nobody expected."""
    _log.exception("request %s failed", call.request_id)
    return InternalError("The server met an internal error; the log has the details.")


async def _nothing_more() -> Message:
    """Whoever leaves a gRPC call cancels the task that serves it."""
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never


async def _not_this_way(message: Message) -> None:
    raise AssertionError("a gRPC call is not answered in HTTP's messages")
