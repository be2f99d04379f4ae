"""Asks the requests of batches: as requests of their own, without a connection, in the queue's last class.

A request takes the path of every other one: its key's limits, the queue, the replicas, usage, the access log. Where the
server has no capacity, or the quota does not allow it, it is asked again after the time that the refusal names.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final, Protocol
from urllib.parse import quote

import msgspec

from inferd.gateway.recorded_exchange import RecordedExchange
from inferd.gateway.upstream import Upstream
from inferd.http.exchange import Exchange
from inferd.http.head import RequestHead
from inferd.jobs.batch import Batch
from inferd.jobs.pace import Load
from inferd.jobs.results import Answer
from inferd.tenancy.principal import Door, Principal, holder_of

MAX_PAUSE_S: Final = 30.0
MAX_ATTEMPTS: Final = 3
"""How often a request is asked whose worker died, or whose remote server failed."""

_FIELDS: Final = ((b"content-type", b"application/json"), (b"x-inferd-priority", b"batch"))
_FAILED_ELSEWHERE: Final = (502, 504)
_POISON: Final = "poison_request"  # it has killed two workers


class Application(Protocol):
    def serve(self, exchange: Exchange, principal: Principal | None = None, /) -> None: ...


class _Details(msgspec.Struct, frozen=True):
    error_code: str | None = None


class _Reason(msgspec.Struct, frozen=True):
    message: str = ""
    code: str | None = None
    details: _Details = _Details()  # where Anthropic's dialect has the code


class _Refused(msgspec.Struct, frozen=True):
    error: _Reason | str = ""


_refused_decoder: Final = msgspec.json.Decoder(_Refused)


class Asking:
    """Implements ``jobs.run.Sender``. Set ``application`` before the first batch."""

    application: Application

    def __init__(self, router: Upstream, door: Door) -> None:
        self._router = router
        self._door = door

    def may_ask(self, batch: Batch) -> bool:
        return holder_of(self._door, batch.key_id, batch.tenant) is not None

    def load(self, model: str | None) -> Load:
        status = None if model is None else self._router.model(model)
        if status is None:
            return Load()
        together = 0 if status.info is None or status.info.kind != "generate" else status.info.max_num_seqs
        return Load(status.waiting, status.in_flight, together * status.replicas_ready)

    async def ask(self, batch: Batch, body: bytes, request_id: str, note: Callable[[str], None]) -> Answer:
        attempts = 0
        while True:
            principal = holder_of(self._door, batch.key_id, batch.tenant)
            if principal is None:  # the batch ends when it is seen
                await asyncio.sleep(MAX_PAUSE_S)
                continue
            exchange = await self._once(principal, batch.endpoint, body, request_id)
            answer = Answer(exchange.status, b"".join(exchange.parts))
            reason = _reason(answer)
            code = reason.code or reason.details.error_code
            if answer.status in _FAILED_ELSEWHERE or code == "worker_died":
                attempts += 1
            if not _may_pass(answer, code, attempts):
                note("")
                return answer
            note(f"Requests wait: {reason.message}" if reason.message else "Requests wait for capacity.")
            await asyncio.sleep(_pause_of(exchange))

    async def _once(self, principal: Principal, path: str, body: bytes, request_id: str) -> RecordedExchange:
        """Serve a request to its end; cancelling this ends it."""
        ended = asyncio.Event()
        fields = [*_FIELDS, (b"x-request-id", request_id.encode("ascii"))]
        exchange = RecordedExchange(ended.set, RequestHead("POST", quote(path).encode("ascii"), fields, "1.1"), body)
        asyncio.get_running_loop().call_soon(self.application.serve, exchange, principal)
        try:
            await ended.wait()
        except asyncio.CancelledError:
            exchange.disconnected()
            raise
        return exchange


def _may_pass(answer: Answer, code: str | None, attempts: int) -> bool:
    """Whether a refused request may be answered when it is asked again."""
    if code == _POISON:
        return False
    if answer.status in (0, 429, 503) or answer.status in _FAILED_ELSEWHERE:
        return attempts < MAX_ATTEMPTS
    return False


def _pause_of(exchange: RecordedExchange) -> float:
    after = next((value for name, value in exchange.headers if name == b"retry-after"), b"")
    return min(float(after), MAX_PAUSE_S) if after.isdigit() else 1.0


def _reason(answer: Answer) -> _Reason:
    if not answer.is_error:
        return _Reason()
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        error = _refused_decoder.decode(answer.body).error
        return _Reason(error) if isinstance(error, str) else error
    return _Reason()
