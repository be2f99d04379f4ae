"""Streamed answers that another worker can continue after their worker died, and the tokens recorded for that."""

from __future__ import annotations

from inferd.router.ticket import Ticket
from inferd.types import Continuation, GenerateRequest, Output, Request


def is_continuable(request: Request) -> bool:
    """Whether another worker can continue the answer: one choice, generated token by token."""
    return isinstance(request, GenerateRequest) and request.width == 1 and not request.sampling.use_beam_search


def record_output(ticket: Ticket, output: Output) -> Output:
    """Record the output's tokens and seed for a worker that may have to continue the answer.

    Returns the output for the client. It lacks the prompt report where an earlier worker has already sent one.
    """
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
    """The tokens and the seed from which the next worker continues; None: nothing was recorded."""
    if not ticket.token_ids or ticket.seed is None:
        return None
    return Continuation(token_ids=tuple(ticket.token_ids), seed=ticket.seed)
