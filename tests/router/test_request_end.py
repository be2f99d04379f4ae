"""What the end of a request says, where the worker that computed it says less or nothing."""

from __future__ import annotations

import pytest
from tests.router.tickets import ticket

from inferd.router.request_end import complete_end, deadline_error
from inferd.router.ticket import Ticket
from inferd.types import Delta, End, Output, PromptReport, Request, Usage


def answered(num_prompt: int, num_cached: int, num_tokens: int) -> Ticket:
    """A request of which so much was seen."""
    one = ticket(1)
    report = PromptReport(num_prompt, num_cached)
    one.deliver_output(Output("1", (Delta(0, "text", tuple(range(num_tokens))),), report, None), 2.0)
    return one


@pytest.mark.parametrize(
    ("reported", "usage"),
    [
        (Usage(), Usage(10, 3, 8)),  # the worker died
        (Usage(10, 1, 0), Usage(10, 3, 8)),  # another one did not go on with the answer
        (Usage(9, 0, 4, 2), Usage(10, 3, 8, 2)),  # less, with a part that outputs do not show
        (Usage(10, 5, 8, 2), Usage(10, 5, 8, 2)),  # tokens that were computed and not sent
    ],
    ids=["nothing", "less", "reasoning", "more"],
)
def test_a_request_used_what_its_end_reports_and_at_least_what_was_seen(reported: Usage, usage: Usage) -> None:
    assert complete_end(End("failed", reported), answered(10, 8, 3), None, 5.0).usage == usage


@pytest.mark.parametrize(
    ("deadline_s", "first_byte_s", "limit"),
    [(30.0, 5.0, "The 5 s within which"), (4.0, 5.0, "deadline of 4 s"), (None, 5.0, "The 5 s"), (5.0, None, "of 5 s")],
)
def test_the_error_names_the_limit_that_has_passed(
    deadline_s: float | None, first_byte_s: float | None, limit: str
) -> None:
    request = Request(id="1", model="m", arrived_at=1000.0, deadline_s=deadline_s, first_byte_s=first_byte_s)
    assert limit in deadline_error(request, 1006.0).message
