"""Copies of requests: what is copied and when, what comes of each copy, and that none reaches a client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from inferd.compare.answers import Tolerance
from inferd.errors import InferdError, Overloaded, Unavailable
from inferd.events import Assigned, CopyEnded, Event
from inferd.rollout import copies as copying
from inferd.rollout.copies import MAX_COMPARED_BYTES, MAX_IN_FLIGHT, MAX_WAITING, Copies, Shadow
from inferd.router.stream import Handle
from inferd.types import (
    CallDelta,
    Delta,
    End,
    Failure,
    GenerateRequest,
    Item,
    Output,
    Prediction,
    PredictRequest,
    PromptReport,
    Relay,
    Relayed,
    Request,
    SamplingParams,
    Sink,
    TextPrompt,
)

ASSIGNED = Assigned(rollout="m:1:2", run=1, share=0.0, is_new=False, unit=b"u")
SHADOW = Shadow(assigned=ASSIGNED, model="m", entry="m@2", tolerance=Tolerance(relative=0.1, absolute=0.0))
PREDICT = PredictRequest(id="r", model="m", dialect="v2", body=b"{}", tenant="acme", priority=-1, session="s")
GENERATE = GenerateRequest(id="r", model="m", prompt=TextPrompt(text="hi"), tenant="acme", deadline_s=3.0)
DONE = End("done")


class Submitted:
    """A request in a router, and its handle."""

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.end: End | None = None
        self.is_cancelled = False

    def say(self, *items: Item) -> None:
        for item in items:
            self.end = item.end
            self.sink.deliver(item)

    def predict(self, body: bytes) -> None:
        self.say(Output("r", prediction=Prediction(body), end=DONE))

    def write(self, *texts: str, seed: int | None = 5, end: End = DONE) -> None:
        self.say(Output("r", prompt=PromptReport(1, seed=seed)))
        for text in texts:
            self.say(Output("r", (Delta(0, text),)))
        self.say(Output("r", (Delta(0, finish_reason="stop"),), end=end))

    def fail(self, kind: str, code: str | None = None, outcome: Any = "failed") -> None:
        self.say(Output("r", end=End(outcome, failure=Failure(kind, "it fails", code=code))))

    def cancel(self) -> None:
        self.is_cancelled = True

    def pause(self) -> None:
        raise AssertionError("copies are not read by clients")

    def resume(self) -> None:
        raise AssertionError("copies are not read by clients")

    def when_over(self, listener: Callable[[], None]) -> None:
        raise AssertionError("no call waits for a copy")


class FakeRouter:
    """Keeps what is submitted. ``refusal``: of copies."""

    def __init__(self) -> None:
        self.submitted: list[Submitted] = []
        self.refusal: InferdError | None = None

    def submit(self, request: Request, sink: Sink, relay: Relay | None = None) -> Handle:
        if request.is_copy and self.refusal is not None:
            raise self.refusal
        self.submitted.append(Submitted(request, sink))
        return self.submitted[-1]


class Reader:
    """A client's sink."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def deliver(self, item: Item) -> None:
        self.items.append(item)


class OneCall:
    """The sink of a call's only request: the call is over when its client has the whole answer."""

    def __init__(self, reader: Reader, ended: Callable[[], None]) -> None:
        self._reader = reader
        self._ended = ended

    def deliver(self, item: Item) -> None:
        self._reader.deliver(item)
        if item.end is not None:
            self._ended()


class World:
    def __init__(self) -> None:
        self.router = FakeRouter()
        self.events: list[Event] = []
        self.copies = Copies(self.events.append)
        self.reader = Reader()

    def ask(self, request: Request = PREDICT, shadow: Shadow = SHADOW) -> Submitted:
        router = self.copies.copying(self.router, shadow)
        router.submit(request, OneCall(self.reader, router.call_ended))
        return self.router.submitted[-1]

    async def copy_of(self, request: Request = PREDICT, body: bytes = b"{}") -> Submitted:
        """The copy of a prediction that the stable version answered."""
        count = len(self.router.submitted)
        self.ask(request).predict(body)
        await asyncio.sleep(0)
        assert len(self.router.submitted) == count + 2
        return self.router.submitted[-1]

    @property
    def results(self) -> list[str]:
        return [event.result for event in self.events if isinstance(event, CopyEnded)]

    async def told(self, count: int = 1) -> list[str]:
        async with asyncio.timeout(30):
            while len(self.results) < count:
                await asyncio.sleep(0.001)
        return self.results


def run(test: Callable[[World], Awaitable[None]]) -> None:
    async def inside() -> None:
        world = World()
        await test(world)
        assert not world.copies._in_flight, "each copy is released"
        world.copies.close()

    asyncio.run(inside())


def test_a_copy_begins_when_the_client_has_its_answer_and_goes_in_the_last_class_without_a_tenant() -> None:
    async def test(world: World) -> None:
        asked = world.ask()
        assert asked.request is PREDICT, "the original is as ever"
        asked.say(Output("r"))
        asked.predict(b"{}")
        assert [item.end for item in world.reader.items] == [None, DONE]
        assert len(world.router.submitted) == 1, "nothing in the same turn"
        await asyncio.sleep(0)
        _, copy = world.router.submitted
        assert copy.request == msgspec.structs.replace(
            PREDICT,
            id="copy-r",
            model="m@2",
            priority=1,
            tenant="(copies)",
            session="",
            idempotent=False,
            is_copy=True,
        )
        copy.predict(b"{}")
        assert len(world.reader.items) == 2, "nothing of a copy is the client's"
        assert await world.told() == ["equal"]

    run(test)


@pytest.mark.parametrize(
    ("one", "other", "result", "part"),
    [
        (b'{"predictions":[1.0]}', b'{"predictions":[1.05]}', "equal", ""),
        (b'{"predictions":[1.0]}', b'{"predictions":[1.2]}', "differs", "predictions"),
        (b'{"id":"a","data":[{"label":"x"}]}', b'{"id":"b","data":[{"label":"x"}]}', "equal", ""),
        (b'{"data":[{"label":"x"}]}', b'{"data":[{"label":"y"}]}', "differs", "data[0].label"),
        (b"not JSON", b"not JSON", "form", ""),
    ],
)
def test_answers_are_compared_by_what_they_say(one: bytes, other: bytes, result: str, part: str) -> None:
    async def test(world: World) -> None:
        (await world.copy_of(body=one)).predict(other)
        assert await world.told() == [result]
        (event,) = world.events
        assert isinstance(event, CopyEnded)
        assert (event.model, event.assigned, event.request_id, event.part) == ("m", ASSIGNED, "r", part)

    run(test)


def test_texts_are_collected_from_streams_and_drawn_with_the_same_seed() -> None:
    async def test(world: World) -> None:
        world.ask(GENERATE).write("He", "llo")
        await asyncio.sleep(0)
        copied = world.router.submitted[-1]
        assert isinstance(copied.request, GenerateRequest)
        assert (copied.request.stream, copied.request.sampling.seed, copied.request.deadline_s) == (False, 5, None)
        copied.write("Hello")
        assert await world.told() == ["equal"]
        world.ask(GENERATE).write("Hello")
        await asyncio.sleep(0)
        world.router.submitted[-1].write("Help")
        assert await world.told(2) == ["equal", "differs"]
        event = world.events[-1]
        assert isinstance(event, CopyEnded)
        assert (event.part, event.position) == ("choices[0].text", 3)

    run(test)


def test_calls_and_scores_are_compared_too() -> None:
    async def test(world: World) -> None:
        def say(asked: Submitted, name: str, scores: tuple[float, ...]) -> None:
            asked.say(Output("r", prompt=PromptReport(1, seed=1, scores=(scores,))))
            asked.say(Output("r", (Delta(0, calls=(CallDelta(0, name, '{"a"'),)),)))
            asked.say(Output("r", (Delta(0, calls=(CallDelta(0, None, ":1}"),)),), end=DONE))

        for name, scores in (("find", (-1.1, -2.0)), ("lose", (-1.0, -2.0)), ("find", (-3.0, -2.0))):
            say(world.ask(GENERATE), "find", (-1.0, -2.0))
            await asyncio.sleep(0)
            say(world.router.submitted[-1], name, scores)
        assert sorted(await world.told(3)) == ["differs", "differs", "equal"]
        parts = {event.part for event in world.events if isinstance(event, CopyEnded) and event.result == "differs"}
        assert parts == {"choices[0].calls[0].name", "scores[0].best"}

    run(test)


@pytest.mark.parametrize(
    ("sampling", "is_copied"),
    [
        (SamplingParams(temperature=1.0), False),
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(temperature=1.0, seed=3), True),
        (SamplingParams(use_beam_search=True), True),
    ],
)
def test_an_answer_that_nothing_repeats_is_not_copied(sampling: SamplingParams, is_copied: bool) -> None:
    async def test(world: World) -> None:
        world.ask(msgspec.structs.replace(GENERATE, sampling=sampling)).write("Hello", seed=None)
        await asyncio.sleep(0)
        assert len(world.router.submitted) == 1 + is_copied
        if is_copied:
            world.router.submitted[-1].write("Hello")
        assert await world.told() == ["equal" if is_copied else "random"]

    run(test)


@pytest.mark.parametrize(
    ("request_", "result"),
    [
        (msgspec.structs.replace(PREDICT, sequence="s", idempotent=False), "sequence"),
        (msgspec.structs.replace(PREDICT, num_bytes=copying.MAX_COPIED_BYTES + 1), "large"),
    ],
)
def test_some_requests_are_left_out_by_name(request_: PredictRequest, result: str) -> None:
    async def test(world: World) -> None:
        asked = world.ask(request_)
        assert world.results == [result]
        asked.predict(b"{}")
        await asyncio.sleep(0)
        assert len(world.reader.items) == len(world.router.submitted) == 1

    run(test)


def test_answers_that_are_too_large_or_in_several_parts_are_not_compared() -> None:
    async def test(world: World) -> None:
        world.ask().predict(b"x" * (MAX_COMPARED_BYTES + 1))
        asked = world.ask()
        asked.say(Output("r", prediction=Prediction(b"1")))
        asked.predict(b"2")
        world.ask().say(Relayed("r", data=b"x"), Relayed("r", end=DONE))
        assert await world.told(3) == ["large", "form", "form"]
        assert len(world.router.submitted) == 3
        (await world.copy_of()).predict(b"x" * (MAX_COMPARED_BYTES + 1))
        assert world.results[3:] == ["differs"], "the other answer is not large"

    run(test)


def test_answers_that_did_not_succeed_are_not_copied() -> None:
    async def test(world: World) -> None:
        world.ask().fail("internal")
        world.ask().say(Output("r", end=End("cancelled")))
        await asyncio.sleep(0)
        assert len(world.router.submitted) == 2
        assert not world.events

    run(test)


@pytest.mark.parametrize(
    ("kind", "code", "outcome", "result"),
    [
        ("internal", None, "failed", "failed"),
        ("worker_died", None, "failed", "failed"),
        ("invalid_request", None, "refused", "failed"),
        ("overloaded", "copy_dropped", "failed", "memory"),
        ("overloaded", "queue_full", "refused", "busy"),
        ("unavailable", None, "failed", "unavailable"),
        ("deadline_exceeded", None, "failed", "late"),
    ],
)
def test_a_copy_that_fails_is_a_difference_unless_the_new_version_could_not_take_it(
    kind: str, code: str | None, outcome: str, result: str
) -> None:
    async def test(world: World) -> None:
        (await world.copy_of()).fail(kind, code, outcome)
        assert world.results == [result]
        assert len(world.reader.items) == 1

    run(test)


@pytest.mark.parametrize(("error", "result"), [(Overloaded("full"), "busy"), (Unavailable("gone"), "unavailable")])
def test_a_copy_that_the_new_version_refuses_is_dropped(error: InferdError, result: str) -> None:
    async def test(world: World) -> None:
        world.router.refusal = error
        world.ask().predict(b"{}")
        await asyncio.sleep(0)
        assert world.results == [result]

    run(test)


def test_a_bounded_number_of_copies_runs_at_a_time_and_a_hanging_one_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copying, "LEAST_S", 0.0)

    async def test(world: World) -> None:
        hanging = [
            await world.copy_of(msgspec.structs.replace(PREDICT, id=str(number))) for number in range(MAX_IN_FLIGHT)
        ]
        world.ask().predict(b"{}")
        assert await world.told() == ["busy"], "it has waited in vain for one of them to end"
        async with asyncio.timeout(30):
            while not all(copy.is_cancelled for copy in hanging):
                await asyncio.sleep(0.001)
        for copy in hanging:
            copy.say(Output("r", end=End("cancelled")))
        assert world.results == ["busy", *["late"] * MAX_IN_FLIGHT]
        assert len(world.reader.items) == MAX_IN_FLIGHT + 1
        (await world.copy_of()).predict(b"{}")
        assert (await world.told(MAX_IN_FLIGHT + 2))[-1] == "equal"

    run(test)


def test_a_copy_begins_behind_the_answers_to_all_open_calls() -> None:
    async def test(world: World) -> None:
        copied = world.ask()
        other = world.copies.copying(world.router, SHADOW)
        copied.predict(b"{}")
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(world.router.submitted) == 1, "another call is open"
        other.call_ended()
        assert len(world.router.submitted) == 1, "nothing in the same turn"
        await asyncio.sleep(0)
        world.router.submitted[1].predict(b"{}")
        assert await world.told() == ["equal"]

    run(test)


def test_where_calls_are_always_open_copies_begin_all_the_same_and_a_bounded_number_waits() -> None:
    async def test(world: World) -> None:
        world.copies.copying(world.router, SHADOW)  # a call that is open for ever
        for _ in range(MAX_WAITING + 1):
            world.ask().predict(b"{}")
        assert world.results == ["busy"], "of the last one"
        num_answered = MAX_WAITING + 1
        async with asyncio.timeout(30):
            while len(world.router.submitted) < num_answered + MAX_IN_FLIGHT:
                await asyncio.sleep(0.001)
            while len(world.results) < MAX_WAITING + 1:  # those that had no room then, or whose time came later
                copies = world.router.submitted[num_answered:]
                num_answered += len(copies)
                for copy in copies:
                    copy.predict(b"{}")
                await asyncio.sleep(0.001)
        assert world.results.count("equal") >= MAX_IN_FLIGHT

    run(test)


def test_pairs_are_compared_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "TOGETHER_S", 60.0)
    monkeypatch.setattr(copying, "MAX_TOGETHER", 3)

    async def test(world: World) -> None:
        for number in range(3):
            assert not world.results, number
            (await world.copy_of()).predict(b"{}")
        assert await world.told(3) == ["equal"] * 3

    run(test)


def test_a_server_that_leaves_waits_for_no_copy_and_begins_none() -> None:
    async def test(world: World) -> None:
        copy = await world.copy_of()
        world.copies.cancel()
        assert copy.is_cancelled
        copy.say(Output("r", end=End("cancelled")))
        world.ask().predict(b"{}")
        await asyncio.sleep(0)
        assert len(world.router.submitted) == 3
        assert world.results == ["late"]

    run(test)


def test_a_sink_that_fails_gets_the_error_and_no_copy_is_made() -> None:
    class Broken:
        def deliver(self, item: Item) -> None:
            raise RuntimeError("the client's writer is broken")

    async def test(world: World) -> None:
        world.copies.copying(world.router, SHADOW).submit(PREDICT, Broken())
        with pytest.raises(RuntimeError):
            world.router.submitted[0].predict(b"{}")
        await asyncio.sleep(0)
        assert len(world.router.submitted) == 1

    run(test)
