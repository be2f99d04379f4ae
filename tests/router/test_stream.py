"""A stream's laws: a slow reader gets the same answer in fewer pieces, and one end."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.watching import next_output, outputs_of

from inferd.router.stream import Item, Stream
from inferd.types import Delta, End, Output, PromptReport, Relayed, TokenLogprob, Usage

DELTAS = st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.integers(0, 3)), max_size=3)


def output(parts: list[tuple[int, str, int]], first: bool, end: End | None = None) -> Output:
    deltas = tuple(
        Delta(index, text, tuple(range(count)), tuple(TokenLogprob(i, "", b"", -1.0, 1) for i in range(count)))
        for index, text, count in parts
    )
    return Output("r", deltas, PromptReport(3) if first else None, end)


def merged(outputs: list[Output]) -> dict[int, tuple[str, list[int], int]]:
    """Each choice's whole text, tokens and number of log-probabilities."""
    choices: dict[int, tuple[str, list[int], int]] = {}
    for one in outputs:
        for delta in one.deltas:
            text, ids, count = choices.get(delta.index, ("", [], 0))
            choices[delta.index] = (text + delta.text, ids + list(delta.token_ids), count + len(delta.logprobs or ()))
    return choices


@given(st.lists(st.tuples(DELTAS, st.booleans()), max_size=20))
def test_however_slowly_it_is_read_a_stream_says_the_same_and_ends_once(
    script: list[tuple[list[tuple[int, str, int]], bool]],
) -> None:
    async def scenario() -> None:
        stream = Stream("r", lambda: pytest.fail("the stream was closed unasked"))
        pushed: list[Output] = []
        read: list[Output] = []
        for number, (parts, reads_now) in enumerate(script):
            pushed.append(output(parts, number == 0))
            stream.push(pushed[-1], float(number))
            if reads_now:
                read.append(await next_output(stream))
        pushed.append(output([], not script, End("done")))
        stream.push(pushed[-1], 99.0)
        read += await outputs_of(stream)
        assert merged(read) == merged(pushed)
        assert [one.end for one in read if one.end] == [End("done")]
        assert read[-1].end is not None
        assert len([one for one in read if one.prompt]) == 1
        assert len(read) <= sum(reads for _, reads in script) + 1
        stream.close()  # after the end it asks for nothing

    asyncio.run(scenario())


@given(st.lists(DELTAS, max_size=10), st.lists(DELTAS, max_size=10), st.booleans())
def test_a_whole_answer_comes_at_its_end_and_of_one_try_alone(
    first: list[list[tuple[int, str, int]]], second: list[list[tuple[int, str, int]]], is_lost: bool
) -> None:
    async def scenario() -> None:
        stream = Stream("r", lambda: None, is_whole=True)
        tries: list[list[Output]] = []
        for parts in (first, second) if is_lost else (second,):
            tries.append([output(part, number == 0) for number, part in enumerate(parts)])
            if len(tries) == 2:
                stream.restart()
                assert not stream.progress.has_output
            for one in tries[-1]:
                stream.push(one, 1.0)
        has_prompt = any(tries)
        if has_prompt:
            early = await next_output(stream)
            assert (early.prompt, early.deltas, early.end) == (PromptReport(3), (), None)
        waiting = asyncio.ensure_future(next_output(stream))
        await asyncio.sleep(0)
        assert not waiting.done()
        tries[-1].append(output([(0, "!", 1)], not has_prompt, End("done")))
        stream.push(tries[-1][-1], 2.0)
        whole = await waiting
        assert (whole.end, whole.prompt is None) == (End("done"), has_prompt)
        assert merged([whole]) == merged(tries[-1])
        assert await outputs_of(stream) == []

    asyncio.run(scenario())


def test_what_waits_for_a_slow_reader_is_one_output() -> None:
    async def scenario() -> None:
        stream = Stream("r", lambda: None)
        for number in range(1000):
            stream.push(output([(0, "x", 1)], number == 0), float(number))
        (delta,) = (await next_output(stream)).deltas
        assert delta.text == "x" * 1000

    asyncio.run(scenario())


def test_closing_cancels_once_drops_what_waits_and_still_tells_the_end() -> None:
    async def scenario() -> None:
        closed = []
        stream = Stream("r", lambda: closed.append(True))
        stream.push(output([(0, "x", 1)], True), 0.0)
        stream.close()
        stream.close()
        stream.push(output([(0, "y", 1)], False), 1.0)
        stream.push(output([], False, End("cancelled", Usage(3, 2))), 2.0)
        assert [one.deltas for one in await outputs_of(stream)] == [()]
        assert closed == [True]

    asyncio.run(scenario())


def test_a_reader_that_is_cancelled_while_it_waits_loses_nothing() -> None:
    async def scenario() -> None:
        stream = Stream("r", lambda: None)
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait((reader,))
        stream.push(output([(0, "x", 1)], True), 0.0)
        assert (await next_output(stream)).deltas[0].text == "x"

    asyncio.run(scenario())


def test_gaps_are_told_per_token_and_choice() -> None:
    stream = Stream("r", lambda: None)
    for at, parts in ((1.0, [(0, "a", 1), (1, "a", 1)]), (2.0, [(0, "b", 2)]), (5.0, [(1, "b", 1)])):
        stream.push(output(parts, False), at)
    assert stream.progress.inter_token_s == [0.5, 0.5, 4.0]
    assert stream.progress.first_at == 1.0


def test_a_worker_s_report_of_the_prompt_comes_before_what_another_replica_relays() -> None:
    async def read() -> list[Item]:
        return [item async for item in stream]

    stream = Stream("r", lambda: None)
    first = Output("r", (), PromptReport(3))
    stream.push(first, 1.0)
    stream.relay(Relayed("r", data=b"a"), 2.0)
    stream.relay(Relayed("r", data=b"b", end=End("done")), 3.0)
    found = asyncio.run(read())
    assert found[0] == first
    assert [item.end is not None for item in found] == [False] * (len(found) - 1) + [True]
