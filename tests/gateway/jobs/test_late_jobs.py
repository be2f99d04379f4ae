"""The requests of a batch that would miss its window have a deadline, by which they count as load."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from tests.gateway.fakes import FakeDoor, FakeRouter

from inferd import clock
from inferd.gateway.jobs.asking import Asking
from inferd.gateway.upstream import Upstream
from inferd.http.exchange import Exchange
from inferd.jobs.batch import Batch
from inferd.tenancy.principal import OPERATOR, Door, Principal


class Application:
    """Answers at once, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[Exchange] = []

    def serve(self, exchange: Exchange, principal: Principal | None = None, /) -> None:
        self.asked.append(exchange)
        exchange.answer(200, ((b"content-type", b"application/json"),), b"{}")


@pytest.mark.parametrize(
    ("num_done", "left_s", "timeout"),
    [(5000, 3600.0, None), (4999, 3540.0, "3600"), (0, 86_400.0, "86400")],
    ids=["at its rate", "late", "at most a day"],
)
def test_a_request_of_a_late_batch_has_the_end_of_the_window_as_its_deadline(
    num_done: int, left_s: float, timeout: str | None
) -> None:
    asking = Asking(cast(Upstream, FakeRouter()), cast(Door, FakeDoor({})))
    asking.application = application = Application()
    now = clock.wall()
    batch = Batch(
        id="b",
        tenant=OPERATOR.tenant,
        key_id=OPERATOR.key_id,
        endpoint="/v1/completions",
        input_file_id="f",
        created_at=now - 3600.0,
        in_progress_at=now - 3540.0,
        expires_at=now + left_s,
        total=10_000,
        num_done=num_done,
    )
    asyncio.run(asking.ask(batch, b"{}", "r1", lambda note: None))
    (asked,) = application.asked
    fields = dict(asked.head.headers)
    assert fields[b"x-inferd-priority"] == b"batch"
    sent = fields.get(b"x-inferd-timeout")
    assert (sent is None) == (timeout is None)
    if sent is not None and timeout is not None:
        assert float(timeout) - 60.0 <= float(sent) <= float(timeout)
