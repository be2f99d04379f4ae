"""Events of calls for the tests of records: any that hypothesis draws, and plain ones."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from inferd.events import HttpServed, Operation
from inferd.gateway.routes import ROUTES
from inferd.types import End, EngineTimes, Routing, Timings, Usage

OPERATIONS: dict[str, Operation | None] = {route.pattern: route.operation for route in ROUTES}
_SECONDS = st.floats(0, 100)


def call(
    *,
    id: str = "r",
    total: float = 1.0,
    at: float = 100.0,
    tenant: str = "team-a",
    model: str | None = "chat",
    route: str = "/v1/chat/completions",
    received: float | None = 0.01,
    submitted: float | None = 0.02,
    timings: Timings | None = Timings(0.03, 0.04, 0.05, 0.1, 0.99),
    engine: EngineTimes | None = None,
    routing: Routing | None = Routing(attempts=1, replica=0),
    usage: Usage = Usage(100, 50),
    preemptions: int = 0,
    outcome: str = "done",
    status: int = 200,
    blocked: float = 0.0,
    priority: int = 0,
    request_bytes: int = 500,
    trace: str = "",
) -> HttpServed:
    """A call that was answered, 0.95 s of it in the engine. ``at``: its start on the monotonic clock."""
    end = End(outcome, usage, timings or Timings(), None, preemptions, engine, routing)  # type: ignore[arg-type]
    return HttpServed(
        request_id=id,
        method="POST",
        route=route,
        operation=OPERATIONS.get(route),
        status=status,
        duration_s=total,
        request_bytes=request_bytes,
        response_bytes=900,
        model=model,
        tenant=tenant,
        key_id="k1",
        outcome=outcome,
        usage=usage,
        timings=timings,
        end=end if timings is not None else None,
        started_at=at,
        received_s=received,
        submitted_s=submitted,
        blocked_s=blocked,
        trace=trace,
        priority=priority,
        replica=None if routing is None else routing.replica,
    )


def engine_times(seconds: list[float], num_steps: int) -> EngineTimes:
    """The times of the engine's parts, in the order of their fields."""
    return msgspec.convert([*seconds, num_steps], EngineTimes)


@st.composite
def calls(draw: st.DrawFn) -> HttpServed:
    """Calls that ended at any stage, with any times in their order, and engines that account for all of theirs."""
    cuts = sorted(draw(st.lists(_SECONDS, min_size=8, max_size=8)))
    reached = draw(st.integers(0, 7))
    known: list[float | None] = [at if place < reached else None for place, at in enumerate(cuts[:7])]
    received, submitted, dispatched, tokenized, scheduled, first_token, finished = known
    engine = None
    if tokenized is not None and finished is not None and draw(st.booleans()):
        shares = draw(st.lists(st.floats(0, 1), min_size=12, max_size=12))
        whole = sum(shares) or 1.0
        spent = [share / whole * (finished - tokenized) for share in shares]
        saved = draw(_SECONDS)
        spent[9], spent[3] = spent[9] - saved, spent[3] + saved  # speculation is negative, and decode longer
        engine = engine_times(spent, draw(st.integers(0, 1000)))
    waited = 0.0 if dispatched is None or submitted is None else dispatched - submitted
    routing = Routing(
        load_s=draw(st.floats(0, 1)) * waited,
        restart_s=0.0,
        lost_s=draw(_SECONDS) if tokenized is None else 0.0,
        attempts=draw(st.integers(0, 3)),
        was_remote=engine is None and draw(st.booleans()),
        replica=draw(st.none() | st.integers(0, 9)),
    )
    return call(
        total=cuts[7],
        received=received,
        submitted=submitted,
        timings=Timings(dispatched, tokenized, scheduled, first_token, finished),
        engine=engine,
        routing=routing,
        usage=Usage(*draw(st.tuples(*[st.integers(-1, 2**70)] * 3))),
        route=draw(st.sampled_from(("/v1/chat/completions", "/v2/models/{model}/infer"))),
        status=draw(st.sampled_from((200, 499, 503))),
    )
