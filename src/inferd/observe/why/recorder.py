"""What observation does when a call is over: it makes the record and stores it, in some two microseconds.

``record_of`` copies the numbers of a call into one packed string. Nothing is computed from them before the record is
read. The machine's counters are read when they are due, which is once a second.
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from sys import intern
from typing import Final

from msgspec.structs import astuple

from inferd import clock
from inferd.events import HttpServed
from inferd.observe.why.pressure import NoPressure, Pressure
from inferd.observe.why.record import ENGINE, ENGINE_FORM, FORM, HEDGED, REMOTE, STREAM, TEXT, RequestRecord
from inferd.observe.why.store import NUM_RECENT, RecordStore
from inferd.observe.why.usual import UsualTimes
from inferd.types import HandOver, Routing, Timings, Usage

_NO_TIMES: Final = Timings()
_NO_ROUTING: Final = Routing()
_NO_USAGE: Final = Usage()
_NO_ENGINE: Final = bytes(ENGINE_FORM.size)
_NEVER: Final[object] = nan
_MAX_COUNT: Final = 2**32 - 1
_MAX_SMALL: Final = 2**16 - 1
_MAX_ID_CHARS: Final = 128

_fields: Final = astuple
_pack: Final = FORM.pack
_pack_engine: Final = ENGINE_FORM.pack


class Recorder:
    """Keeps a record of every call of a model. ``size``: how many of the last calls are kept; 0 keeps nothing."""

    def __init__(
        self,
        size: int = NUM_RECENT,
        pressure: Pressure | None = None,
        now: Callable[[], float] = clock.now,
        wall: Callable[[], float] = clock.wall,
    ) -> None:
        self.store = RecordStore(size)
        self.usual = UsualTimes()
        self.pressure: Pressure = pressure if pressure is not None else NoPressure()
        self._now = now
        self._wall = wall

    def configure(self, size: int) -> None:
        """Keep another number of records from now on."""
        self.store.resize(size)
        if not size:
            self.usual.clear()

    def sample(self) -> None:
        """A request comes or goes: the machine's counters may be due."""
        if self.store.size:
            now = self._now()
            if now >= self.pressure.due:
                self.pressure.sample(now)

    def served(self, event: HttpServed) -> RequestRecord | None:
        """Keep the record of a call that is over. None: it was for no model, or records are off."""
        if not self.store.size:
            return None
        status, operation = event.status, event.operation
        if event.model is None and (status < 400 or operation is None):
            return None
        wall, is_text = self._wall(), operation is not None and operation.generates
        record = record_of(event, wall)
        self.store.add(record, wall, event.duration_s, status)
        usage = event.usage
        if usage is not None and event.outcome == "done" and event.end is not None:
            size = usage.prompt_tokens if is_text else event.request_bytes
            self.usual.add(record, is_text, size, usage.completion_tokens)
        self.sample()
        return record


def record_of(event: HttpServed, wall: float) -> RequestRecord:
    """The record of a call that is over. ``wall``: the present time, in seconds since the epoch.

    The fields of a structure that are all needed are read with one call: compiled code spends most of its time here on
    reading fields one by one.
    """
    (
        request_id, _, route, operation, status, total, request_bytes, response_bytes, model, tenant, key_id, stream,
        outcome, _, error_code, _, _, usage, times, end, started_at, received_s, submitted_s, blocked_s, trace, _, _,
        priority, replica, _, _,
    ) = _fields(event)  # fmt: skip
    flags = (STREAM if stream else 0) | (TEXT if operation is not None and operation.generates else 0)
    routing, engine, num_preemptions = _NO_ROUTING, _NO_ENGINE, 0
    if end is not None:
        num_preemptions = min(end.num_preemptions, _MAX_SMALL)
        if end.engine is not None:
            flags |= ENGINE
            engine = _pack_engine(*_fields(end.engine))
        routing = end.routing or _NO_ROUTING
    met = _fields(routing)
    ahead, ahead_of_class, ahead_tenant, ahead_of_tenant, load_s, restart_s = met[:6]
    lost_s, num_attempts, worker_deaths, was_hedged, was_remote, _, hand_over = met[6:]
    flags |= (REMOTE if was_remote else 0) | (HEDGED if was_hedged else 0)
    num_prompt, num_completion, num_cached = _fields(usage or _NO_USAGE)[:3]
    dispatched, tokenized, scheduled, first_token, finished, _, begun, behind_s = _fields(times or _NO_TIMES)
    packed = _pack(
        wall - total,
        started_at,
        total,
        _time(received_s),
        _time(submitted_s),
        _time(dispatched),
        _time(begun),
        _time(tokenized),
        _time(scheduled),
        _time(first_token),
        _time(finished),
        blocked_s,
        behind_s,
        load_s,
        restart_s,
        lost_s,
        0.0 if hand_over is None else hand_over.seconds,
        engine,
        _count(num_prompt),
        _count(num_completion),
        _count(num_cached),
        _count(request_bytes),
        _count(response_bytes),
        _count(ahead),
        _count(ahead_of_class),
        _count(ahead_of_tenant),
        min(num_attempts, _MAX_SMALL),
        num_preemptions,
        min(worker_deaths, _MAX_SMALL),
        status,
        -1 if replica is None else replica,
        max(-128, min(priority, 127)),
        flags,
    )
    return RequestRecord(
        request_id[:_MAX_ID_CHARS],
        intern(model or ""),
        tenant,
        key_id,
        route,
        outcome or ("refused" if error_code is not None else ""),
        error_code or "",
        trace,
        ahead_tenant,
        packed,
        "" if hand_over is None or hand_over.replica is None else _reason_of(hand_over),
    )


def _reason_of(hand_over: HandOver) -> str:
    """Why a prompt was handed over, and what went wrong."""
    return f"{hand_over.why}; {hand_over.failure}" if hand_over.failure else hand_over.why


def _time(seconds: object) -> object:
    """Seconds, or nan: the call did not get so far."""
    return _NEVER if seconds is None else seconds


def _count(number: int) -> int:
    """A count as 32 bits. A remote server may report any integer."""
    return 0 if number < 0 else number if number < _MAX_COUNT else _MAX_COUNT
