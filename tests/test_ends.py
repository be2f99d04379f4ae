"""The ends that backends and loops share: what a client reads of lateness, refusals and defects."""

from __future__ import annotations

import pytest

from inferd import clock, ends
from inferd.errors import InferdError, InternalError, InvalidRequest, ModelLoadError, Overloaded
from inferd.types import PredictRequest, Usage


def request(deadline_s: float | None) -> PredictRequest:
    return PredictRequest(id="r", model="m", dialect="v2", body=b"", arrived_at=10.0, deadline_s=deadline_s)


@pytest.mark.parametrize(
    ("deadline_s", "now", "is_late"), [(None, 1e9, False), (2.0, 11.9, False), (2.0, 12.0, True), (2.0, 13.0, True)]
)
def test_a_request_is_late_from_its_deadline_on(deadline_s: float | None, now: float, is_late: bool) -> None:
    assert ends.is_late(request(deadline_s), now) is is_late


def test_the_message_of_a_late_request_says_how_far_it_came_and_what_to_do() -> None:
    before = ends.too_late(request(0.5), has_begun=False)
    assert before.message.startswith("The request's deadline of 0.5 s passed before it could begin. Allow more time")
    after = ends.too_late(request(2.0), has_begun=True)
    assert "deadline of 2 s passed before the answer was complete" in after.message
    assert before.kind == after.kind == "deadline_exceeded"


@pytest.mark.parametrize(
    ("error", "outcome", "kind"),
    [
        (InvalidRequest("no"), "refused", "invalid_request"),
        (Overloaded("full"), "refused", "overloaded"),
        (ModelLoadError("broken"), "failed", "model_load"),
        (InternalError("defect"), "failed", "internal"),
        (ValueError("a secret of the prompt"), "failed", "internal"),
    ],
)
def test_an_error_decides_how_its_request_ends(error: Exception, outcome: str, kind: str) -> None:
    end = ends.failed("r", 0.0, error, Usage(3)).end
    assert end is not None
    assert end.failure is not None
    assert (end.outcome, end.failure.kind, end.usage) == (outcome, kind, Usage(3))
    assert "secret" not in end.failure.message


def test_a_failure_tells_how_long_after_its_arrival_the_request_ended() -> None:
    before = clock.now()
    end = ends.failed("r", before - 2.0, InternalError("defect")).end
    assert end is not None
    finished = end.timings.finished
    assert finished is not None
    assert 2.0 <= finished <= 2.0 + clock.now() - before


def test_a_defect_is_logged_by_its_request_and_an_error_for_the_client_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known: InferdError = InvalidRequest("no")
    assert ends.public_error("known", known) is known
    assert not caplog.records
    ends.public_error("defect", ValueError("why"))
    assert "request defect failed: ValueError" in caplog.text
