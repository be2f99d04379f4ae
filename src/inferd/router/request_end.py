"""The end of a request: its times, the event for logs and metrics, and the error for a passed deadline.

Pure functions: time is an argument.
"""

from __future__ import annotations

from inferd.errors import DeadlineExceeded
from inferd.events import RequestEnded
from inferd.router.ticket import Ticket
from inferd.types import End, GenerateRequest, Output, Relayed, Request, Routing, Timings, Usage


def complete_end(end: End, ticket: Ticket, last: Output | Relayed | None, now: float) -> End:
    """The end with the times that only the pool knows, in seconds after the request's arrival.

    Times that the replica reported are kept. ``last`` is the replica's final item. ``now`` is the monotonic clock.
    """
    arrived, reported, begun_at = ticket.request.arrived_at, end.timings, ticket.first_dispatched_at
    first_token = reported.first_token
    if first_token is None:
        first_at = ticket.first_at
        if first_at is None and isinstance(last, Relayed) and last.data:
            first_at = now
        first_token = None if first_at is None else first_at - arrived
    outcome, failure = end.outcome, end.failure
    if ticket.cancel_error is not None and outcome == "cancelled":
        outcome, failure = "failed", ticket.cancel_error.to_failure()
    return End(
        outcome,
        end.usage if ticket.progress is None else _larger(end.usage, ticket.progress.usage),
        Timings(
            None if begun_at is None else begun_at - arrived,
            reported.tokenized,
            reported.scheduled,
            first_token,
            reported.finished if reported.finished is not None else now - arrived,
            reported.steps_s,
            reported.begun,
            reported.behind_s,
        ),
        failure,
        end.num_preemptions,
        end.engine,
        routing_of(ticket, now),
        end.facts,
    )


def routing_of(ticket: Ticket, now: float) -> Routing:
    """What the request met in the router. ``now``: its end."""
    place = ticket.place
    first_at, last_at = ticket.first_dispatched_at, now if ticket.runner is None else ticket.dispatched_at
    return Routing(
        0 if place is None else place.ahead,
        0 if place is None else place.ahead_of_class,
        "" if place is None else place.tenant,
        0 if place is None else place.ahead_of_tenant,
        ticket.load_s,
        ticket.restart_s,
        0.0 if first_at is None or last_at is None else last_at - first_at,
        ticket.attempts,
        ticket.worker_deaths,
        ticket.hedged_at is not None,
        ticket.is_remote,
        ticket.replica,
        ticket.hand_over,
    )


def _larger(reported: Usage, seen: Usage) -> Usage:
    """The usage of a request: what its end reports, and at least what its outputs showed.

    The end reports less where the worker died, or where a second worker refused to continue the answer.
    """
    if reported.prompt_tokens >= seen.prompt_tokens and reported.completion_tokens >= seen.completion_tokens:
        return reported
    return Usage(
        max(reported.prompt_tokens, seen.prompt_tokens),
        max(reported.completion_tokens, seen.completion_tokens),
        max(reported.cached_tokens, seen.cached_tokens),
        max(reported.reasoning_tokens, seen.reasoning_tokens),
    )


def ended_event(ticket: Ticket, end: End) -> RequestEnded:
    """The event that logs and metrics get for a completed end."""
    request, progress = ticket.request, ticket.progress
    sampling = request.sampling if isinstance(request, GenerateRequest) else None
    return RequestEnded(
        model=request.model,
        replica=ticket.replica,
        request_id=request.id,
        tenant=request.tenant,
        outcome=end.outcome,
        finish_reasons=()
        if progress is None
        else tuple([reason for _, reason in sorted(progress.finish_reasons.items())]),
        error_kind=end.failure.kind if end.failure is not None else None,
        usage=end.usage,
        timings=end.timings,
        inter_token_s=() if progress is None else tuple(progress.inter_token_s),
        n=sampling.n if sampling is not None else 1,
        max_tokens=sampling.max_tokens if sampling is not None else None,
        priority=request.priority,
        num_preemptions=end.num_preemptions,
        facts=end.facts,
    )


def deadline_error(request: Request, now: float) -> DeadlineExceeded:
    """The error for a request whose deadline, or whose limit for the first byte, passed while it was queued."""
    deadline_s, first_byte_s = request.deadline_s, request.first_byte_s
    if deadline_s is not None and request.arrived_at + deadline_s <= now:
        what = f"The request's deadline of {deadline_s:g} s"
    else:
        assert first_byte_s is not None, "one of the two has passed"
        what = f"The {first_byte_s:g} s within which the client wants the stream to begin"
    return DeadlineExceeded(f"{what} passed while it waited. Allow more time, or try when the server is less busy.")


def is_deadline_end(end: End) -> bool:
    """Whether the request's own deadline ended it. Such an end is no evidence about the replica."""
    return end.failure is not None and end.failure.kind == DeadlineExceeded.kind
