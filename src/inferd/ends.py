"""How a request ends without its whole answer: refused, failed, cancelled or too late.

Backends and the worker's loops make these ends here, so that their texts and their rules exist once. A defect is
written to the log here, and its client reads only that the log has the details.
"""

from __future__ import annotations

import logging

from inferd import clock
from inferd.errors import CodeFailed, DeadlineExceeded, InferdError, InternalError, InvalidRequest, Overloaded
from inferd.types import End, Output, Request, Timings, Usage

NO_USAGE = Usage()

_log = logging.getLogger("inferd.worker")


def public_error(request_id: str, error: Exception) -> InferdError:
    """The error that the client is shown. An exception that is a defect is logged and replaced."""
    if isinstance(error, InferdError):
        return error
    raised = error.__cause__ if isinstance(error, CodeFailed) and error.__cause__ is not None else error
    _log.error("request %s failed: %s", request_id, type(raised).__name__, exc_info=error)
    return model_failed()


def model_failed() -> InternalError:
    """What a client reads of a defect while its request was computed."""
    return InternalError("The model failed while working on this request; the server's log has the details.")


def failed(
    request_id: str, arrived_at: float, error: Exception, usage: Usage = NO_USAGE, timings: Timings | None = None
) -> Output:
    """The last output of a request that ``error`` ended. ``usage``: what was computed for it."""
    known = public_error(request_id, error)
    if timings is None:
        timings = Timings(finished=clock.now() - arrived_at)
    is_refused = isinstance(known, InvalidRequest | Overloaded)
    return Output.ended(request_id, End("refused" if is_refused else "failed", usage, timings, known.to_failure()))


def cancelled(request_id: str, arrived_at: float, now: float, usage: Usage = NO_USAGE) -> Output:
    """The last output of a request that its client or the server's end cancelled."""
    return Output.ended(request_id, End("cancelled", usage, Timings(finished=now - arrived_at)))


def refused(output: Output, error: InvalidRequest) -> Output:
    """An end in place of ``output``, the last of its request: it keeps the usage and the times."""
    assert output.end is not None, "only the last output of a request says how it ended"
    end = output.end
    return Output.ended(
        output.request_id, End("refused", end.usage, end.timings, error.to_failure(), end.num_preemptions, end.engine)
    )


def is_late(request: Request, now: float) -> bool:
    """Whether the request's deadline has passed."""
    return request.deadline_s is not None and now >= request.arrived_at + request.deadline_s


def too_late(request: Request, *, has_begun: bool) -> DeadlineExceeded:
    """The error of a request whose deadline has passed, before or after its computation began."""
    if has_begun:
        passed, remedy = "before the answer was complete", "ask for a shorter answer"
    else:
        passed, remedy = "before it could begin", "try when the server is less busy"
    return DeadlineExceeded(
        f"The request's deadline of {request.deadline_s:g} s passed {passed}. Allow more time, or {remedy}."
    )


def duplicate(request_id: str) -> InvalidRequest:
    """The error of a request whose id belongs to another one that has not ended."""
    return InvalidRequest(f"A request with id {request_id!r} is already running. Use another id.", param="request_id")
