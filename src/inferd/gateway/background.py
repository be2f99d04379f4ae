"""Background requests: the client gets a handle at once and fetches the answer later (RFC 7240, respond-async).

An inference request with ``Prefer: respond-async`` is answered with 202 and an id. The gateway then serves the same
request without a client connection. Answers stay in this process's memory for ``KEEP_S``, limited in number and bytes;
a restart drops them. When the memory is full, the tenant with the largest part of it loses its oldest answer. Only the
tenant of a request can use its handle.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import Counter
from typing import Final, Literal, Protocol
from urllib.parse import quote

import msgspec

from inferd import clock
from inferd.eager import in_task
from inferd.errors import InvalidRequest, Overloaded
from inferd.gateway.call import SDK_TIMEOUT_HEADERS, Call, Response
from inferd.gateway.errors import RouteNotFound
from inferd.gateway.recorded_exchange import RecordedExchange
from inferd.http.exchange import Exchange
from inferd.http.head import RequestHead

MAX_RUNNING: Final = 4096
MAX_RUNNING_PER_TENANT: Final = 1024
MAX_KEPT: Final = 16_384
MAX_KEPT_BYTES: Final = 64 * 1024 * 1024
KEEP_S: Final = 3600.0
MAX_WAIT_S: Final = 60.0

_GRANTED: Final = frozenset((b"prefer", *SDK_TIMEOUT_HEADERS))

_WAIT = re.compile(rb"wait=(\d{1,6})")

Status = Literal["running", "done", "failed", "cancelled"]


class Application(Protocol):
    def serve(self, exchange: Exchange, /) -> None: ...


class AsyncRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What GET /v1/async/{id} says. ``http_status`` and ``answer`` are what a waiting client would have got."""

    id: str
    status: Status
    created_at: int
    object: str = "async_request"
    finished_at: int | None = None
    http_status: int | None = None
    answer: msgspec.Raw | None = None

    def __post_init__(self) -> None:
        assert (self.status in ("done", "failed")) == (self.http_status is not None)


class _StreamField(msgspec.Struct, frozen=True):
    """The one field of a body that is read here. The decoder skips all others."""

    stream: msgspec.Raw = msgspec.Raw()


_stream_decoder: Final = msgspec.json.Decoder(_StreamField)


class _Job:
    __slots__ = (
        "answer",
        "cancel_requested",
        "created_at",
        "exchange",
        "finished",
        "finished_at",
        "http_status",
        "id",
        "is_cancelled",
        "tenant",
    )

    def __init__(self, tenant: str) -> None:
        self.id = f"async-{os.urandom(16).hex()}"
        self.tenant = tenant
        self.created_at = clock.wall()
        self.finished_at: float | None = None
        self.finished = asyncio.Event()
        self.is_cancelled = False
        self.http_status = 0
        self.answer = b""
        self.exchange: RecordedExchange | None = None  # while it runs

    @property
    def status(self) -> Status:
        if not self.finished.is_set():
            return "running"
        if self.is_cancelled:
            return "cancelled"
        return "done" if self.http_status < 400 else "failed"

    def report(self) -> AsyncRequest:
        status = self.status
        has_answer = status in ("done", "failed")
        return AsyncRequest(
            id=self.id,
            status=status,
            created_at=int(self.created_at),
            finished_at=int(self.finished_at) if self.finished_at is not None else None,
            http_status=self.http_status if has_answer else None,
            answer=msgspec.Raw(self.answer) if has_answer else None,
        )


class _TenantAnswers:
    """The finished requests of one tenant whose answers are kept."""

    __slots__ = ("jobs", "num_bytes")

    def __init__(self) -> None:
        self.jobs: dict[str, _Job] = {}  # by id, in the order in which they ended
        self.num_bytes = 0


class Background:
    """Runs background requests, and keeps their answers."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._kept: dict[str, _Job] = {}  # finished requests by id, in the order in which they ended
        self._kept_bytes = 0
        self._by_tenant: dict[str, _TenantAnswers] = {}
        self._num_running: Counter[str] = Counter()  # by tenant

    def start(self, application: Application, call: Call, body: bytes) -> Response:
        """Start the request of ``call`` in a task; returns the answer with its handle. Raises Overloaded."""
        self._forget_old(clock.wall())
        tenant = call.principal.tenant
        num_running = self._num_running.total()
        if num_running >= MAX_RUNNING or self._num_running[tenant] >= MAX_RUNNING_PER_TENANT:
            raise Overloaded(
                f"{num_running} requests without a waiting client are already running; collect some, or try again "
                "later.",
                code="too_many_async_requests",
                retry_after_s=10.0,
            )
        job = _Job(tenant)
        self._jobs[job.id] = job
        self._num_running[tenant] += 1
        job.exchange = exchange = RecordedExchange(lambda: self._ended(job), _head_again(call), body)
        asyncio.get_running_loop().call_soon(application.serve, exchange)
        headers = ((b"location", f"/v1/async/{job.id}".encode()), (b"preference-applied", b"respond-async"))
        return Response(202, msgspec.json.encode(job.report()), headers=headers)

    async def poll(self, call: Call, job_id: str) -> Response:
        """Report a background request. With ``Prefer: wait=30`` the report waits up to 30 seconds (60 at most) for the
        request's end. Raises RouteNotFound."""
        job = self._find(call, job_id)
        await in_task()
        wait = _WAIT.search(call.header(b"prefer") or b"")
        if wait is not None and not job.finished.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(job.finished.wait(), min(float(wait[1]), MAX_WAIT_S))
        return Response(200, msgspec.json.encode(job.report()))

    def cancel(self, call: Call, job_id: str) -> Response:
        """Cancel a running request, or drop a finished one. Raises RouteNotFound."""
        job = self._find(call, job_id)
        if job.finished.is_set():
            self._forget(job)
        else:
            job.is_cancelled = True
            if job.exchange is not None:
                job.exchange.disconnected()
        return Response(204)

    def _find(self, call: Call, job_id: str) -> _Job:
        job = self._jobs.get(job_id)
        if job is None or job.tenant != call.principal.tenant:
            raise RouteNotFound(
                f"There is no request with this id; answers are kept for {KEEP_S / 60:.0f} minutes, and not across a "
                "restart.",
                param="id",
                code="async_request_not_found",
            )
        return job

    def _ended(self, job: _Job) -> None:
        exchange, job.exchange = job.exchange, None  # the exchange would keep the request alive
        assert exchange is not None, "it ends once"
        job.http_status = exchange.status
        job.answer = _as_json(b"".join(exchange.parts))
        job.is_cancelled = job.is_cancelled or not job.http_status
        job.finished_at = clock.wall()
        job.finished.set()
        self._num_running[job.tenant] -= 1
        if not self._num_running[job.tenant]:
            del self._num_running[job.tenant]
        self._keep(job)

    def _keep(self, job: _Job) -> None:
        share = self._by_tenant.setdefault(job.tenant, _TenantAnswers())
        self._kept[job.id] = share.jobs[job.id] = job
        share.num_bytes += len(job.answer)
        self._kept_bytes += len(job.answer)
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._forget_first(max(self._by_tenant.values(), key=lambda share: share.num_bytes))
        while len(self._kept) > MAX_KEPT:
            self._forget_first(max(self._by_tenant.values(), key=lambda share: len(share.jobs)))

    def _forget_first(self, share: _TenantAnswers) -> None:
        self._forget(next(iter(share.jobs.values())))

    def _forget_old(self, now: float) -> None:
        while self._kept:
            job = next(iter(self._kept.values()))
            if job.finished_at is None or now - job.finished_at <= KEEP_S:
                return
            self._forget(job)

    def _forget(self, job: _Job) -> None:
        del self._jobs[job.id], self._kept[job.id]
        self._kept_bytes -= len(job.answer)
        share = self._by_tenant[job.tenant]
        del share.jobs[job.id]
        share.num_bytes -= len(job.answer)
        if not share.jobs:
            del self._by_tenant[job.tenant]


def _as_json(answer: bytes) -> bytes:
    """The answer as JSON. An answer that is not JSON, such as a remote server's error page, becomes a JSON string."""
    try:
        msgspec.json.decode(answer)
    except (ValueError, RecursionError):
        return msgspec.json.encode(answer.decode("utf-8", "replace"))
    return answer


def refuse_stream(body: bytes) -> None:
    """Check that a background request does not ask for a stream. Raises InvalidRequest."""
    with contextlib.suppress(ValueError, RecursionError):
        if bytes(_stream_decoder.decode(body).stream) == b"true":
            raise InvalidRequest(
                "stream cannot be true with the header 'Prefer: respond-async'; leave one of them out.", param="stream"
            )


def _head_again(call: Call) -> RequestHead:
    """The same request, without the headers that concern its first answer: ``Prefer`` and the SDK's timeouts."""
    headers = [(name, value) for name, value in call.headers if name not in _GRANTED]
    return RequestHead(call.method, quote(call.path).encode("ascii"), headers, "1.1")
