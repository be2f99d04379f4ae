"""A stream's laws: a slow reader gets the same answer in fewer pieces, and one end."""

from __future__ import annotations

import asyncio
import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
from tests.worker.watching import next_output, outputs_of

from inferd.router.stream import Stream
from inferd.router.ticket import Ticket
from inferd.types import (
    CallDelta,
    Delta,
    End,
    GenerateRequest,
    Item,
    Output,
    Prediction,
    PromptReport,
    Relayed,
    TextPrompt,
    TokenLogprob,
    Usage,
)


class Asked:
    """A request of one stream. ``cancelled`` counts how often its replica was told to stop."""

    def __init__(self, *, whole: bool = False) -> None:
        request = GenerateRequest(id="r", model="m", prompt=TextPrompt(text=""), stream=not whole)
        self.cancelled = 0
        self.stream = Stream()
        self.ticket = self.stream.request = Ticket(request, self.stream, self, 0, math.inf)

    def push(self, one: Output, now: float) -> None:
        self.ticket.deliver_output(one, now)

    def cancel(self, ticket: Ticket) -> None:
        self.cancelled += 1

    def pause(self, ticket: Ticket, is_paused: bool) -> None: ...


DELTAS = st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.integers(0, 3)), max_size=3)


PARTS = itertools.count()  # of calls; each call has two parts, and the first of them has the name


def output(parts: list[tuple[int, str, int]], first: bool, end: End | None = None) -> Output:
    deltas = tuple(
        Delta(
            index,
            text,
            tuple(range(count)),
            tuple(TokenLogprob(i, "", b"", -1.0, 1) for i in range(count)),
            reasoning=text.upper(),
            calls=tuple(CallDelta(n // 2, None if n % 2 else "f", text) for n in itertools.islice(PARTS, count)),
        )
        for index, text, count in parts
    )
    return Output("r", deltas, PromptReport(3) if first else None, end)


Whole = tuple[str, list[int], int, str, dict[int, str]]


def merged(outputs: list[Output]) -> dict[int, Whole]:
    """Each choice's whole text, tokens, number of log-probabilities, reasoning, and names and arguments of calls."""
    choices: dict[int, Whole] = {}
    for one in outputs:
        for delta in one.deltas:
            text, ids, count, reasoning, calls = choices.get(delta.index, ("", [], 0, "", {}))
            for part in delta.calls:
                calls[part.index] = calls.get(part.index, "") + (part.name or "") + part.arguments
            choices[delta.index] = (
                text + delta.text,
                ids + list(delta.token_ids),
                count + len(delta.logprobs or ()),
                reasoning + delta.reasoning,
                calls,
            )
    return choices


@given(st.lists(st.tuples(DELTAS, st.booleans()), max_size=20))
def test_however_slowly_it_is_read_a_stream_says_the_same_and_ends_once(
    script: list[tuple[list[tuple[int, str, int]], bool]],
) -> None:
    async def scenario() -> None:
        asked = Asked()
        stream = asked.stream
        pushed: list[Output] = []
        read: list[Output] = []
        for number, (parts, reads_now) in enumerate(script):
            pushed.append(output(parts, number == 0))
            asked.push(pushed[-1], float(number))
            if reads_now:
                read.append(await next_output(stream))
        pushed.append(output([], not script, End("done")))
        asked.push(pushed[-1], 99.0)
        read += await outputs_of(stream)
        assert merged(read) == merged(pushed)
        assert [one.end for one in read if one.end] == [End("done")]
        assert read[-1].end is not None
        assert len([one for one in read if one.prompt]) == 1
        assert len(read) <= sum(reads for _, reads in script) + 1
        stream.close()  # after the end it asks for nothing
        assert not asked.cancelled

    asyncio.run(scenario())


@given(st.lists(DELTAS, max_size=10), st.lists(DELTAS, max_size=10), st.booleans())
def test_a_whole_answer_comes_at_its_end_and_of_one_try_alone(
    first: list[list[tuple[int, str, int]]], second: list[list[tuple[int, str, int]]], is_lost: bool
) -> None:
    async def scenario() -> None:
        asked = Asked(whole=True)
        stream = asked.stream
        tries: list[list[Output]] = []
        for parts in (first, second) if is_lost else (second,):
            tries.append([output(part, number == 0) for number, part in enumerate(parts)])
            if len(tries) == 2:
                asked.ticket.restart()
                assert not asked.ticket.has_output
            for one in tries[-1]:
                asked.push(one, 1.0)
        has_prompt = any(tries)
        if has_prompt:
            early = await next_output(stream)
            assert (early.prompt, early.deltas, early.end) == (PromptReport(3), (), None)
        waiting = asyncio.ensure_future(next_output(stream))
        await asyncio.sleep(0)
        assert not waiting.done()
        tries[-1].append(output([(0, "!", 1)], not has_prompt, End("done")))
        asked.push(tries[-1][-1], 2.0)
        whole = await waiting
        assert (whole.end, whole.prompt is None) == (End("done"), has_prompt)
        assert merged([whole]) == merged(tries[-1])
        assert await outputs_of(stream) == []

    asyncio.run(scenario())


@given(st.lists(st.sampled_from(["output", "relayed", "prediction", "read"]), max_size=20))
def test_items_of_every_kind_are_read_in_the_order_of_their_arrival(script: list[str]) -> None:
    async def scenario() -> None:
        stream = Asked().stream
        written: list[str] = []
        read: list[Item] = []
        for number, kind in enumerate(script):
            if kind == "read":
                if "".join(map(said, read)) != "".join(written):
                    read.append(await anext(stream))
                continue
            written.append(f"{number},")
            data = written[-1].encode()
            if kind == "relayed":
                stream.deliver(Relayed("r", None, data))
            elif kind == "prediction":
                stream.deliver(Output("r", prediction=Prediction(data)))
            else:
                stream.deliver(Output("r", (Delta(0, written[-1]),)))
        stream.deliver(Output("r", (), None, End("done")))
        read += [item async for item in stream]
        assert "".join(map(said, read)) == "".join(written)
        assert [item.end for item in read if item.end is not None] == [End("done")]
        assert read[-1].end is not None

    asyncio.run(scenario())


def said(item: Item) -> str:
    if isinstance(item, Relayed):
        return item.data.decode()
    if item.prediction is not None:
        return bytes(item.prediction.body).decode()
    return "".join(delta.text for delta in item.deltas)


def test_what_waits_for_a_slow_reader_is_one_output() -> None:
    async def scenario() -> None:
        asked = Asked()
        stream = asked.stream
        for number in range(1000):
            asked.push(output([(0, "x", 1)], number == 0), float(number))
        (delta,) = (await next_output(stream)).deltas
        assert delta.text == "x" * 1000

    asyncio.run(scenario())


def test_closing_cancels_once_drops_what_waits_and_still_tells_the_end() -> None:
    async def scenario() -> None:
        asked = Asked()
        stream = asked.stream
        asked.push(output([(0, "x", 1)], True), 0.0)
        stream.close()
        stream.close()
        asked.push(output([(0, "y", 1)], False), 1.0)
        asked.push(output([], False, End("cancelled", Usage(3, 2))), 2.0)
        assert [one.deltas for one in await outputs_of(stream)] == [()]
        assert asked.cancelled == 1

    asyncio.run(scenario())


def test_a_reader_that_is_cancelled_while_it_waits_loses_nothing() -> None:
    async def scenario() -> None:
        asked = Asked()
        stream = asked.stream
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait((reader,))
        asked.push(output([(0, "x", 1)], True), 0.0)
        assert (await next_output(stream)).deltas[0].text == "x"

    asyncio.run(scenario())


def test_gaps_are_told_per_token_and_choice() -> None:
    asked = Asked()
    for at, parts in ((1.0, [(0, "a", 1), (1, "a", 1)]), (2.0, [(0, "b", 2)]), (5.0, [(1, "b", 1)])):
        asked.push(output(parts, False), at)
    assert asked.ticket.progress is not None
    assert asked.ticket.progress.inter_token_s == [0.5, 0.5, 4.0]
    assert asked.ticket.first_at == 1.0


def test_a_worker_s_report_of_the_prompt_comes_before_what_another_replica_relays() -> None:
    asked = Asked()
    stream = asked.stream
    first = Output("r", (), PromptReport(3))
    pieces = [Relayed("r", data=b"a"), Relayed("r", data=b"b", end=End("done"))]
    items: list[Item] = [first, *pieces]
    for item in items:
        stream.deliver(item)
    found = asyncio.run(_all(stream))
    assert found[0] == first
    assert [item.end is not None for item in found] == [False] * (len(found) - 1) + [True]


async def _all(stream: Stream) -> list[Item]:
    return [item async for item in stream]
