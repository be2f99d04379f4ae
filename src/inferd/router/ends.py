"""What is said of a request when it is over: its times, the event for logs and metrics, and the words for lateness. Pure."""

from __future__ import annotations

from inferd.errors import DeadlineExceeded
from inferd.events import RequestEnded
from inferd.router.ticket import Ticket
from inferd.types import End, GenerateRequest, Output, Relayed, Request, Timings, Usage


def timed(end: End, ticket: Ticket, last: Output | Relayed | None, now: float) -> End:
    """The end with what only the pool knows: when the request was dispatched, and what its replica did not tell. ``last``
    is the replica's final item."""
    arrived, told, first_at = ticket.request.arrived_at, end.timings, ticket.stream.progress.first_at
    if first_at is None and isinstance(last, Relayed) and last.data:
        first_at = now
    first_token = told.first_token
    if first_token is None and first_at is not None:
        first_token = first_at - arrived
    outcome, failure = end.outcome, end.failure
    if ticket.verdict is not None and outcome == "cancelled":
        outcome, failure = "failed", ticket.verdict.to_failure()
    return End(
        outcome,
        _larger(end.usage, ticket.stream.progress.usage),
        Timings(
            None if ticket.first_dispatched_at is None else ticket.first_dispatched_at - arrived,
            told.tokenized,
            told.scheduled,
            first_token,
            told.finished if told.finished is not None else now - arrived,
            told.steps_s,
        ),
        failure,
        end.num_preemptions,
    )


def _larger(told: Usage, seen: Usage) -> Usage:
    """What was computed: as the end tells it, and at least what was seen of it. The end knows nothing of it where a second
    worker refused to go on, or where the worker died."""
    if told.prompt_tokens >= seen.prompt_tokens and told.completion_tokens >= seen.completion_tokens:
        return told
    return Usage(
        max(told.prompt_tokens, seen.prompt_tokens),
        max(told.completion_tokens, seen.completion_tokens),
        max(told.cached_tokens, seen.cached_tokens),
    )


def told(ticket: Ticket, end: End) -> RequestEnded:
    request, progress = ticket.request, ticket.stream.progress
    sampling = request.sampling if isinstance(request, GenerateRequest) else None
    return RequestEnded(
        model=request.model,
        replica=ticket.replica,
        request_id=request.id,
        tenant=request.tenant,
        outcome=end.outcome,
        finish_reasons=tuple([reason for _, reason in sorted(progress.finish_reasons.items())]),
        error_kind=end.failure.kind if end.failure is not None else None,
        usage=end.usage,
        timings=end.timings,
        inter_token_s=tuple(progress.inter_token_s),
        n=sampling.n if sampling is not None else 1,
        max_tokens=sampling.max_tokens if sampling is not None else None,
        priority=request.priority,
        num_preemptions=end.num_preemptions,
    )


def too_late(request: Request, now: float) -> DeadlineExceeded:
    """The error of a request whose deadline, or whose client's time for the first byte, passed while it waited."""
    deadline_s, first_byte_s = request.deadline_s, request.first_byte_s
    if deadline_s is not None and request.arrived_at + deadline_s <= now:
        what = f"The request's deadline of {deadline_s:g} s"
    else:
        assert first_byte_s is not None, "one of the two has passed"
        what = f"The {first_byte_s:g} s within which the client wants the stream to begin"
    return DeadlineExceeded(f"{what} passed while it waited. Allow more time, or try when the server is less busy.")


def was_too_late(end: End) -> bool:
    """Its own deadline ended it, which says nothing of the replica."""
    return end.failure is not None and end.failure.kind == DeadlineExceeded.kind
