"""A request that the new version of a rollout cannot answer goes to the stable one: once, before its first byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from inferd.errors import InferdError, InternalError, InvalidRequest, Overloaded, QuotaExceeded
from inferd.gateway.call import Call
from inferd.gateway.rescue import rescuing, router_for
from inferd.router.stream import Handle
from inferd.types import End, Failure, Item, Output, Prediction, PredictRequest, Relay, Request, Sink

REQUEST = PredictRequest(id="r", model="m@2", dialect="v2", body=b"{}")


class Submitted:
    """A request at a model, as the router has it."""

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.end: End | None = None
        self.log: list[str] = []
        self._listener: Callable[[], None] | None = None

    def say(self, item: Output) -> None:
        self.end = item.end
        self.sink.deliver(item)
        if item.end is not None and self._listener is not None:
            self._listener()

    def fail(self, kind: str = "internal") -> None:
        self.say(Output("r", end=End("failed", failure=Failure(kind, f"{self.request.model} failed"))))

    def answer(self) -> None:
        self.say(Output("r", prediction=Prediction(self.request.model.encode()), end=End("done")))

    def cancel(self) -> None:
        self.log.append("cancel")

    def pause(self) -> None:
        self.log.append("pause")

    def resume(self) -> None:
        self.log.append("resume")

    def when_over(self, listener: Callable[[], None]) -> None:
        self._listener = listener


class FakeRouter:
    def __init__(self, **refusals: InferdError) -> None:
        self.refusals = refusals
        self.submitted: list[Submitted] = []

    def submit(self, request: Request, sink: Sink, relay: Relay | None = None) -> Handle:
        error = self.refusals.get(request.model.replace("@", "_"))
        if error is not None:
            raise error
        self.submitted.append(Submitted(request, sink))
        return self.submitted[-1]


class Reader:
    """A sink."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def deliver(self, item: Item) -> None:
        self.items.append(item)


def call(spare: str | None = "m") -> Call:
    return cast(Call, SimpleNamespace(spare_model=spare, rescued_from="", model="m@2"))


def run(test: Callable[[], Any]) -> None:
    async def inside() -> None:
        await test()

    asyncio.run(inside())


def test_a_call_without_a_spare_version_has_the_router_itself() -> None:
    router = FakeRouter()
    assert rescuing(router, call(None)) is router


def test_a_call_that_no_rollout_divides_has_the_router_itself_and_others_what_the_rollout_makes_of_it() -> None:
    router, ours = FakeRouter(), call()
    ours.division = None
    assert router_for(router, ours) is router
    ours.division = rescuing
    assert router_for(router, ours) is not router


@pytest.mark.parametrize("kind", ["internal", "worker_died", "overloaded", "invalid_request"])
def test_a_failure_before_the_first_byte_is_computed_again_by_the_stable_version(kind: str) -> None:
    async def test() -> None:
        router, reader, ours, over = FakeRouter(), Reader(), call(), []
        handle = rescuing(router, ours).submit(REQUEST, reader)
        handle.when_over(lambda: over.append(handle.end))
        router.submitted[0].fail(kind)
        assert (reader.items, handle.end, over) == ([], None, [])
        await asyncio.sleep(0)
        first, second = router.submitted
        assert second.request == msgspec.structs.replace(REQUEST, model="m")
        assert (ours.rescued_from, ours.model) == (kind, "m")
        handle.pause()
        handle.resume()
        assert (first.log, second.log) == ([], ["pause", "resume"])
        second.answer()
        (item,) = reader.items
        assert isinstance(item, Output)
        assert item.prediction == Prediction(b"m")
        assert handle.end == item.end
        assert over == [item.end]

    run(test)


def test_what_both_versions_fail_at_is_the_client_s_to_know() -> None:
    async def test() -> None:
        router, reader = FakeRouter(), Reader()
        rescuing(router, call()).submit(REQUEST, reader)
        router.submitted[0].fail()
        await asyncio.sleep(0)
        router.submitted[1].fail()
        await asyncio.sleep(0)
        assert len(router.submitted) == 2
        (item,) = reader.items
        assert item.end is not None
        assert item.end.failure == Failure("internal", "m failed")

    run(test)


@pytest.mark.parametrize("kind", ["cancelled", "deadline_exceeded", "quota_exceeded"])
def test_what_no_version_can_help_is_not_computed_again(kind: str) -> None:
    async def test() -> None:
        router, reader = FakeRouter(), Reader()
        handle = rescuing(router, call()).submit(REQUEST, reader)
        router.submitted[0].fail(kind)
        await asyncio.sleep(0)
        assert len(router.submitted) == len(reader.items) == 1
        assert handle.end is not None

    run(test)


def test_after_its_first_byte_an_answer_is_not_computed_again() -> None:
    async def test() -> None:
        router, reader = FakeRouter(), Reader()
        rescuing(router, call()).submit(REQUEST, reader)
        router.submitted[0].say(Output("r", prediction=Prediction(b"first")))
        router.submitted[0].fail()
        await asyncio.sleep(0)
        assert len(router.submitted) == 1
        assert len(reader.items) == 2

    run(test)


def test_a_client_that_leaves_between_the_attempts_begins_no_other() -> None:
    async def test() -> None:
        router, reader, over = FakeRouter(), Reader(), []
        handle = rescuing(router, call()).submit(REQUEST, reader)
        handle.when_over(lambda: over.append(1))
        router.submitted[0].fail()
        handle.cancel()
        await asyncio.sleep(0)
        assert (len(router.submitted), len(reader.items), over) == (1, 1, [1])
        assert handle.end is not None

    run(test)


def test_a_version_without_capacity_is_passed_over_and_both_without_refuse() -> None:
    async def test() -> None:
        router, ours = FakeRouter(m_2=Overloaded("full")), call()
        rescuing(router, ours).submit(REQUEST, Reader())
        assert [one.request.model for one in router.submitted] == ["m"]
        assert ours.rescued_from == "overloaded"
        with pytest.raises(InternalError):
            rescuing(FakeRouter(m_2=Overloaded("full"), m=InternalError("broken")), call()).submit(REQUEST, Reader())
        with pytest.raises(QuotaExceeded):
            rescuing(FakeRouter(m_2=QuotaExceeded("used up")), call()).submit(REQUEST, Reader())
        router = FakeRouter(m=InvalidRequest("not so"))
        reader = Reader()
        rescuing(router, call()).submit(REQUEST, reader)
        router.submitted[0].fail()
        await asyncio.sleep(0)
        assert reader.items[0].end is not None
        assert reader.items[0].end.failure == Failure("internal", "m@2 failed"), "the first error"

    run(test)


def test_a_request_that_must_not_be_computed_twice_is_not() -> None:
    async def test() -> None:
        router, reader = FakeRouter(), Reader()
        rescuing(router, call()).submit(msgspec.structs.replace(REQUEST, idempotent=False), reader)
        router.submitted[0].fail()
        await asyncio.sleep(0)
        assert len(router.submitted) == len(reader.items) == 1

    run(test)
