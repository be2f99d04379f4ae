"""Background responses: computed without a client, and followed by any number of clients.

A background response is stored as queued together with its request. The gateway then serves the same request again,
without a connection and as a stream, and keeps its events while it runs. The events of a response that has ended are in
the store. A response of a server that has ended is computed once more by the next one, and one whose worker died by the
next worker. Its ids and its seed follow from its own id, it goes on from the same items, and its events divide its text
at fixed places. So the second computation gives the same events, and a client that follows it goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Final, Protocol
from urllib.parse import quote

import msgspec

from inferd import clock
from inferd.errors import InferdError, StateUnavailable, StoredNotFound, WorkerDied
from inferd.gateway.call import DONE, Call
from inferd.gateway.recorded_exchange import RecordedExchange
from inferd.http.exchange import Exchange
from inferd.http.head import RequestHead
from inferd.stored.documents import with_fields
from inferd.stored.port import MAX_ATTEMPTS, RUNNING, ResponseStore, StoredResponse, Unfinished
from inferd.stored.record import frames_after
from inferd.tenancy.principal import Door, Principal, holder_of

SWEEP_S: Final = 1.0
"""Time between two looks for responses that were cancelled elsewhere, or whose server has ended."""

POLL_S: Final = 0.5
HEARTBEAT_S: Final = 10.0
PATIENCE_S: Final = 600.0
"""Time for which a response waits for capacity or its quota."""

MAX_PAUSE_S: Final = 30.0

_KEPT_HEADERS: Final = (b"content-type", b"x-request-id", b"x-session-id")
_KEPT_PREFIX: Final = b"x-inferd-"
_ENDS: Final = tuple([b"event: response.%b\n" % name for name in (b"completed", b"incomplete", b"failed")])
_HEARTBEAT: Final = b": waiting for the next event\n\n"

_log = logging.getLogger("inferd.gateway")


class Application(Protocol):
    def serve(self, exchange: Exchange, principal: Principal | None = None, /) -> None: ...


class _Request(msgspec.Struct, frozen=True, array_like=True):
    """A request as it is stored: no header that could be a secret."""

    path: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    num_past: int  # items that it goes on from: those that its conversation gets later are not among them


class _Failure(msgspec.Struct, frozen=True):
    message: str = ""


class _Failed(msgspec.Struct, frozen=True):
    """The part of an error answer that is stored."""

    error: _Failure = _Failure()


_request_decoder: Final = msgspec.msgpack.Decoder(_Request)
_failed_decoder: Final = msgspec.json.Decoder(_Failed)


class Run:
    """A background response that this process computes."""

    __slots__ = (
        "_changed",
        "_number",
        "attempts",
        "created_at",
        "exchange",
        "frames",
        "id",
        "is_interrupted",
        "is_over",
        "is_stored",
        "misses",
        "num_past",
        "principal",
        "stopped",
    )

    def __init__(self, name: str, created_at: float, principal: Principal, num_past: int, attempts: int = 1) -> None:
        self.id = name
        self.created_at = created_at
        self.principal = principal
        self.num_past = num_past  # items that it goes on from
        self.attempts = attempts  # how often its computation was begun
        self.is_interrupted = False  # the computation ended, and is to begin again
        self.frames: list[bytes] = []  # the events so far; the index is the sequence number
        self.exchange: RecordedExchange | None = None
        self.is_stored = False  # the row of its beginning is written
        self.is_over = False
        self.misses = 0  # sweeps that did not find it in the store
        self.stopped = asyncio.Event()
        self._changed = asyncio.Event()
        self._number = 0  # of the next event of the present computation

    @property
    def seed(self) -> int:
        """The seed of a response whose request has none."""
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:8]) >> 1

    def begin(self) -> None:
        """The computation begins, perhaps once more."""
        self.is_interrupted = False
        self._number = 0

    def take(self, data: bytes) -> None:
        """Take events as they are written, those that an earlier computation gave excepted; heartbeats and the end of
        the stream are no events."""
        for frame in data.split(b"\n\n"):
            if frame.startswith(b"event: "):
                if self._number == len(self.frames):
                    self.frames.append(frame + b"\n\n")
                self._number += 1
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self) -> None:
        self.is_over = True
        self.wake()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next event or the end; False: nothing came in time."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return False
        return True


class Runs:
    """The background responses that this process computes. Call ``keep`` in a task of its own."""

    def __init__(self, store: ResponseStore, door: Door, is_leaving: Callable[[], bool]) -> None:
        self._store = store
        self._door = door
        self._is_leaving = is_leaving
        self._application: Application | None = None
        self._runs: dict[str, Run] = {}
        self._served: dict[int, Run] = {}  # by the identity of the heads of their requests
        self._tasks: set[asyncio.Task[None]] = set()

    def run_of(self, call: Call) -> Run | None:
        """The background response that a call computes; None: a client waits for the call."""
        return self._served.get(id(call.head))

    async def begin(
        self, call: Call, raw: bytes, queued: StoredResponse, frames: Sequence[bytes], num_past: int
    ) -> Run:
        """Store a queued response and compute it; durable when it returns. ``frames``: its first events;
        ``num_past``: the items that it goes on from. Raises InferdError."""
        run = Run(queued.id, queued.created_at, call.principal, num_past)
        run.frames += frames
        self._runs[run.id] = run  # before its row is there, which ``keep`` would take over
        request = _Request(quote(call.path).encode("ascii"), _kept_headers(call), raw, num_past)
        try:
            await self._store.begin(queued, key_id=run.principal.key_id, request=msgspec.msgpack.encode(request))
        except BaseException:
            del self._runs[run.id]
            raise
        run.is_stored = True
        self._start(run, request)
        return run

    def interrupt(self, run: Run, error: InferdError) -> bool:
        """Whether a response whose computation failed begins again instead: at the next server where this one ends, and
        at the next worker where its worker died."""
        if not self._is_leaving():
            if error.kind != WorkerDied.kind or run.attempts >= MAX_ATTEMPTS or run.stopped.is_set():
                return False
            run.attempts += 1
        run.is_interrupted = True
        return True

    async def cancel(self, tenant: str, response_id: str) -> StoredResponse:
        """The response, which is cancelled now unless it had ended. Raises StoredNotFound, InvalidRequest."""
        found = await self._store.cancel(tenant, response_id)
        self.stop(response_id)
        return found

    def stop(self, response_id: str) -> None:
        """End the computation of a response that is cancelled or deleted."""
        run = self._runs.get(response_id)
        if run is not None:
            run.stopped.set()
            if run.exchange is not None:
                run.exchange.disconnected()

    async def events(self, found: StoredResponse, after: int) -> AsyncGenerator[bytes, None]:
        """The events of a response behind a sequence number: those that are there, then those that come. Heartbeats
        are among them."""
        run = self._runs.get(found.id)
        if run is not None:
            async with contextlib.aclosing(follow(run, after)) as frames:
                async for frame in frames:
                    yield frame
            return
        waited_s = 0.0
        while found.status in RUNNING:  # another server computes it
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S
            if waited_s % HEARTBEAT_S == 0.0:
                yield _HEARTBEAT
            try:
                found = await self._store.get(found.tenant, found.id)
            except StoredNotFound:
                break
        for frame in recorded(found, after):
            yield frame
        yield DONE

    # -- computing --------------------------------------------------------------------------

    async def keep(self, application: Application) -> None:
        """Compute what other servers left, and end what was cancelled elsewhere."""
        self._application = application
        while True:
            with contextlib.suppress(StateUnavailable):  # it is logged where the database is used
                await self._sweep()
            await asyncio.sleep(SWEEP_S)

    async def _sweep(self) -> None:
        if self._is_leaving():
            return
        running = [run for run in self._runs.values() if run.is_stored]
        if running:
            here = await self._store.computed_here()
            for run in running:
                run.misses = 0 if run.id in here else run.misses + 1
                if run.misses > 1:  # once: its last event is on its way
                    self.stop(run.id)
        for unfinished in await self._store.take_over(frozenset(self._runs)):
            await self._take_over(unfinished)

    async def _take_over(self, unfinished: Unfinished) -> None:
        principal = holder_of(self._door, unfinished.key_id, unfinished.tenant)
        if principal is None:
            message = "The server was restarted, and the API key of this response is not valid any more."
            await self._store.fail(unfinished.tenant, unfinished.id, "server_error", message)
            return
        _log.warning("the background response %s is computed again: its server ended", unfinished.id)
        request = _request_decoder.decode(unfinished.request)
        run = Run(unfinished.id, unfinished.created_at, principal, request.num_past, unfinished.attempts)
        run.is_stored = True
        self._runs[run.id] = run
        self._start(run, request)

    def _start(self, run: Run, request: _Request) -> None:
        task = asyncio.get_running_loop().create_task(self._compute(run, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compute(self, run: Run, request: _Request) -> None:
        try:
            exchange = await self._serve(run, request)
            if not self._is_leaving():  # else the next server computes it again
                tenant = run.principal.tenant
                await self._store.fail(tenant, run.id, *_failure_of(exchange))
                if not (run.frames and run.frames[-1].startswith(_ENDS)):
                    found = await self._store.get(tenant, run.id)
                    if found.status == "failed":
                        run.frames.append(closing_event(found, len(run.frames)))
        except StoredNotFound:
            _log.info("the background response %s was deleted while it was computed", run.id)
        except StateUnavailable as error:
            _log.error("the end of the background response %s was not stored: %s", run.id, error.message)
        finally:
            del self._runs[run.id]
            run.exchange = None
            run.end()

    async def _serve(self, run: Run, request: _Request) -> RecordedExchange:
        """Serve the request; again where the server had no capacity, or the quota did not allow it."""
        deadline = clock.now() + PATIENCE_S
        while True:
            ended = asyncio.Event()
            head = RequestHead("POST", request.path, request.headers, "1.1")
            exchange = run.exchange = RecordedExchange(ended.set, head, request.body, run.take)
            assert self._application is not None, "a request came"
            run.begin()
            self._served[id(head)] = run
            try:
                asyncio.get_running_loop().call_soon(self._application.serve, exchange, run.principal)
                await ended.wait()
            finally:
                del self._served[id(head)]
            pause_s = 0.0 if run.is_interrupted else _pause_of(exchange)
            if pause_s is None or clock.now() + pause_s > deadline or self._is_leaving():
                return exchange
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await run.stopped.wait()
                return exchange


async def follow(run: Run, after: int) -> AsyncGenerator[bytes, None]:
    """The events of a run behind a sequence number, as they come; heartbeats are among them."""
    number = after + 1
    while True:
        is_over = run.is_over
        while number < len(run.frames):
            yield run.frames[number]
            number += 1
        if is_over:
            yield DONE
            return
        if not run.is_over and number >= len(run.frames) and not await run.changed(HEARTBEAT_S):
            yield _HEARTBEAT


def recorded(found: StoredResponse, after: int) -> Iterator[bytes]:
    """The events of a response that has ended, behind a sequence number."""
    if found.events:
        yield from frames_after(found.events, after)
    elif found.status == "failed":
        queued = with_fields(found.body, status=b'"queued"', error=b"null")
        for number, name in enumerate((b"created", b"queued")):
            if number > after:
                yield _event(name, number, queued)
        yield closing_event(found, max(after + 1, 2))


def closing_event(found: StoredResponse, number: int) -> bytes:
    """The event of a response that failed before its first event but those of its queue."""
    return _event(b"failed", number, found.body)


def _event(name: bytes, number: int, response: bytes) -> bytes:
    return b'event: response.%b\ndata: {"type":"response.%b","sequence_number":%d,"response":%b}\n\n' % (
        *(name, name),
        *(number, response),
    )


def _kept_headers(call: Call) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in call.headers if name in _KEPT_HEADERS or name.startswith(_KEPT_PREFIX)]


def _pause_of(exchange: RecordedExchange) -> float | None:
    """Seconds until a refused request is served again; None: it is not."""
    if exchange.status not in (429, 503):
        return None
    after = next((value for name, value in exchange.headers if name == b"retry-after"), b"")
    return min(float(after), MAX_PAUSE_S) if after.isdigit() else None


def _failure_of(exchange: RecordedExchange) -> tuple[str, str]:
    """The code and message of a request that was not computed to its end, in the words of the Responses API."""
    if exchange.status < 400:
        return "server_error", "The server ended this response before it was complete; send the request again."
    with contextlib.suppress(msgspec.MsgspecError):
        error = _failed_decoder.decode(b"".join(exchange.parts)).error
        code = "rate_limit_exceeded" if exchange.status == 429 else "server_error"
        return "invalid_prompt" if exchange.status in (400, 404) else code, error.message
    return "server_error", "The server could not compute this response; send the request again."
