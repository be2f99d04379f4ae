"""Answers that another worker can go on with: which they are, and what has to be remembered of them meanwhile."""

from __future__ import annotations

from inferd.router.ticket import Ticket
from inferd.types import Continuation, GenerateRequest, Output, Request


def is_continuable(request: Request) -> bool:
    """An answer of one choice, token by token: another worker can go on with it."""
    return isinstance(request, GenerateRequest) and request.width == 1 and not request.sampling.use_beam_search


def noted(ticket: Ticket, output: Output) -> Output:
    """Remember what a worker that goes on must know; of its report the reader has heard already."""
    assert ticket.token_ids is not None
    for delta in output.deltas:
        ticket.token_ids.extend(delta.token_ids)
    if output.prompt is None:
        return output
    request = ticket.request
    if isinstance(request, GenerateRequest) and request.resumes is not None:
        return Output(output.request_id, output.deltas, None, output.end)
    ticket.seed = 0 if isinstance(request, GenerateRequest) and request.sampling.is_greedy else output.prompt.seed
    return output


def continuation(ticket: Ticket) -> Continuation | None:
    """What the next worker goes on from; None: there is nothing to go on from."""
    if not ticket.token_ids or ticket.seed is None:
        return None
    return Continuation(token_ids=tuple(ticket.token_ids), seed=ticket.seed)
