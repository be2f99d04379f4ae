"""Whatever a remote server answers, and whatever that raises here: each request ends once, and its slot comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.remote.fault_server import CHUNKED, FaultServer, Talk, completion, event, piece
from tests.remote.replicas import bench
from tests.remote.test_relays import MESSAGES, Site, through, well
from tests.tiers import THOROUGH

from inferd.config import BreakerConfig, RetryConfig
from inferd.errors import DeadlineExceeded, UpstreamFailed
from inferd.events import HttpServed, RequestEnded
from inferd.gateway.http_call import HttpCall
from inferd.remote import openai as openai_module
from inferd.remote.events import EventReader
from inferd.remote.openai import Answer

UNARY = {"model": "m", "messages": MESSAGES}
STREAM = {**UNARY, "stream": True}

NO_UTF8 = {
    "a field that is read": b'{"choices":[{"text":"\xff"}]}',
    "a field that is not read": b'{"choices":[{"message":{"content":"caf\xe9"}}]}',
    "a field's name": b'{"\xc3":1,"choices":[]}',
    "half of a character": b'{"id":"\xe2\x82"}',
    "another encoding": '{"choices":[]}'.encode("utf-16"),
}


@pytest.mark.parametrize("case", NO_UTF8)
def test_json_that_is_no_utf8_is_a_bad_answer(case: str) -> None:
    async def script(talk: Talk) -> None:
        await talk.answer(NO_UTF8[case])

    async def main() -> None:
        async with FaultServer(script).running() as server, bench(server.url) as made:
            refusal = await made.ask().refused()
            assert (refusal.error.code, refusal.counts, refusal.retry) == ("upstream_bad_answer", True, True)
            assert (made.replica.num_in_flight, made.replica.outstanding) == (0, 0)

    asyncio.run(main())


def test_an_event_that_is_no_utf8_ends_its_stream_with_the_same_word() -> None:
    async def script(talk: Talk) -> None:
        await talk.send(CHUNKED)
        await talk.event(piece("one"))
        await talk.chunk(b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n')
        await talk.gone()

    async def main() -> None:
        async with FaultServer(script).running() as server, bench(server.url) as made:
            heard = made.ask(stream=True)
            end = await heard.ended()
            assert end.failure is not None
            assert end.failure.code == "upstream_bad_answer"
            assert heard.data == event(piece("one"))

    asyncio.run(main())


# -- anything at all -------------------------------------------------------------------------------

WORDS = [
    "choices",
    "usage",
    "error",
    "message",
    "index",
    "delta",
    "content",
    "text",
    "finish_reason",
    "tool_calls",
    "id",
]
COUNTS = ["prompt_tokens", "completion_tokens", "prompt_tokens_details", "cached_tokens"]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([2**63, -(2**64), 10**400, "\ud800", "stop", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS + COUNTS), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """JSON with wrong types at any field, in some encoding, with fields that come twice, and sometimes damaged."""
    choice = draw(st.dictionaries(st.sampled_from(WORDS), values, max_size=4))
    usage = draw(st.dictionaries(st.sampled_from(COUNTS), values, max_size=3))
    fields: list[tuple[str, object]] = draw(
        st.lists(
            st.sampled_from([("choices", [choice]), ("usage", usage), ("error", choice), ("id", "x")])
            | st.tuples(st.sampled_from(WORDS), values),
            max_size=5,
        )
    )
    text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in fields) + "}"
    data = text.encode(draw(st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-16", "utf-32"])), "surrogatepass")
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 2)) :]
    return data


def headed(kind: bytes, body: bytes, framing: str) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\n"
    if framing == "chunked":
        return (
            head
            + b"transfer-encoding: chunked\r\n\r\n"
            + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"")
            + b"0\r\n\r\n"
        )
    if framing == "length":
        return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    return head + b"\r\n" + body


framings = st.sampled_from(["chunked", "length", "until it closes"])
wholes = st.builds(headed, st.just(b"application/json"), documents(), framings)
streams = st.builds(
    lambda parts, framing: headed(b"text/event-stream", b"".join(parts), framing),
    st.lists(
        documents().map(lambda d: b"data: " + d + b"\n\n") | st.just(b"data: [DONE]\n\n") | st.binary(max_size=9),
        max_size=4,
    ),
    framings,
)
answers = st.tuples(st.booleans(), wholes | streams | st.binary(max_size=200), st.integers(0, 3000))


@THOROUGH
@settings(max_examples=60, deadline=None)
@given(st.lists(answers, min_size=1, max_size=4))
@example([(False, headed(b"application/json", NO_UTF8["a field that is read"], "length"), 3000)])
@example([(False, headed(b"application/json", b"[" * 100_000, "length"), 200_000)])
def test_each_request_ends_once_and_gives_its_slot_back_whatever_is_answered(
    given_answers: list[tuple[bool, bytes, int]],
) -> None:
    async def main() -> None:
        now: list[bytes] = []

        async def script(talk: Talk) -> None:
            await talk.send(now[0])
            talk.close()

        async with FaultServer(script).running() as server, bench(server.url) as made:
            for is_stream, data, cut in given_answers:
                now[:] = [data[:cut]]
                heard = made.ask(stream=is_stream)
                await asyncio.wait_for(heard.over.wait(), 10)
                if heard.refusal is None:
                    assert heard.end.outcome in ("done", "failed")
                assert (made.replica.num_in_flight, made.replica.outstanding) == (0, 0)
            now[:] = [headed(b"application/json", completion("hello"), "length")]
            assert (await made.ask().ended()).outcome == "done"

    asyncio.run(main())


@settings(max_examples=25, deadline=None)
@given(answers)
@example((False, headed(b"application/json", NO_UTF8["a field that is read"], "length"), 3000))
@example((True, headed(b"text/event-stream", b'data: {"id":"\xff"}\n\n', "chunked"), 3000))
def test_each_client_is_told_the_same_whether_its_head_is_known_or_not(
    given_answer: tuple[bool, bytes, int],
) -> None:
    is_stream, data, cut = given_answer
    found: list[tuple[int, str | None]] = []

    async def bad(talk: Talk) -> None:
        await talk.send(data[:cut])
        talk.close()

    async def then(site: Site) -> None:
        async with site.client() as client:
            for headers in ((), ("Expect: 100-continue",)):  # the second form is never kept
                site.upstream.script = well
                for _ in range(2):
                    assert (
                        await client.ask(STREAM if is_stream else UNARY, "/v1/chat/completions", *headers)
                    ).status == 200
                site.upstream.script = bad
                reply = await client.ask(STREAM if is_stream else UNARY, "/v1/chat/completions", *headers)
                served = (await site.of(HttpServed, 3 * (1 + len(headers))))[-1]
                assert served.status == reply.status
                found.append((reply.status, served.error_code))
        pool = site.router._pools["m"]
        assert pool.is_idle
        assert [member.outstanding for member in pool.fleet.members] == [0]
        assert len(await site.of(RequestEnded, 6)) == 6

    through(well, then, {"retry": RetryConfig(max_attempts=1), "breaker": BreakerConfig(failures=1000)})
    assert found[0] == found[1]


# -- whatever is raised -----------------------------------------------------------------------------


def _raise(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("a defect")


HEADS = ("answer_head", "answer_whole")  # a head is told alone, or with all of its body
DEPTHS: dict[str, tuple[bool, Callable[[pytest.MonkeyPatch], object]]] = {
    "reading an answer": (False, lambda patch: patch.setattr(openai_module, "read_answer", _raise)),
    "reading a head": (False, lambda patch: [patch.setattr(Answer, name, _raise) for name in HEADS]),
    "reading an event": (True, lambda patch: patch.setattr(EventReader, "feed", _raise)),
    "ending a stream": (True, lambda patch: patch.setattr(Answer, "_end_stream", _raise)),
}


@pytest.mark.interpreted("replaces a method of a compiled class")
@pytest.mark.parametrize("depth", DEPTHS)
def test_what_is_raised_while_an_answer_is_taken_ends_its_request(depth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_stream, spoil = DEPTHS[depth]

    async def main() -> None:
        async with FaultServer(well).running() as server, bench(server.url) as made:
            with monkeypatch.context() as patch:
                spoil(patch)
                heard = made.ask(
                    stream=is_stream, body=json.dumps({"stream": is_stream}, separators=(",", ":")).encode()
                )
                await asyncio.wait_for(heard.over.wait(), 10)
            if heard.refusal is not None:
                assert (heard.refusal.error.code, heard.refusal.counts) == ("upstream_bad_answer", True)
            else:
                assert heard.end.failure is not None
                assert heard.end.failure.code == "upstream_bad_answer"
            assert (made.replica.num_in_flight, made.replica.outstanding) == (0, 0)
            assert (await made.ask().ended()).outcome == "done"

    asyncio.run(main())


@pytest.mark.interpreted("replaces a method of a compiled class")
def test_what_is_raised_for_a_known_head_is_told_to_the_client_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def then(site: Site) -> None:
        async with site.client() as client:
            for _ in range(2):
                assert (await client.ask(UNARY)).status == 200
            with monkeypatch.context() as patch:
                patch.setattr(openai_module, "read_answer", _raise)
                reply = await client.ask(UNARY)
            assert (reply.status, reply.error["code"]) == (502, "upstream_bad_answer")
            assert (await client.ask(UNARY)).status == 200
        assert [end.outcome for end in await site.of(RequestEnded, 4)] == ["done", "done", "failed", "done"]
        assert site.router._pools["m"].is_idle

    through(well, then, {"retry": RetryConfig(max_attempts=1)})


@pytest.mark.interpreted("replaces a method of a compiled class")
@pytest.mark.parametrize("body", [UNARY, STREAM])
def test_what_is_raised_while_a_client_is_written_to_ends_its_request_alone(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def then(site: Site) -> None:
        async with site.client() as client:
            with monkeypatch.context() as patch:
                patch.setattr(HttpCall, "_deliver_piece", _raise)
                reply = await client.ask(body)
            assert (reply.status, reply.error["code"]) == (500, "internal_error")
            assert (await client.ask(body)).status == 200
        assert [served.status for served in await site.of(HttpServed, 2)] == [500, 200]
        await site.of(RequestEnded, 2)
        assert site.router._pools["m"].is_idle

    through(well, then)


@pytest.mark.interpreted("replaces a method of a compiled class")
def test_a_deadline_ends_a_request_whatever_happened_to_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with FaultServer(well).running() as server, bench(server.url) as made:
            monkeypatch.setattr(openai_module, "read_answer", _raise)
            monkeypatch.setattr(Answer, "answer_broken", lambda answer, error: setattr(answer, "_is_over", True))
            refusal = await made.ask(deadline_s=0.2).refused()
            assert isinstance(refusal.error, DeadlineExceeded)

    asyncio.run(main())


@pytest.mark.interpreted("replaces a method of a compiled class")
def test_the_patience_of_a_pool_survives_what_an_answer_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(talk: Talk) -> None:
        await talk.gone()

    async def main() -> None:
        async with FaultServer(script).running() as server, bench(server.url, first_byte_timeout_s=0.1) as made:
            with monkeypatch.context() as patch:
                patch.setattr(Answer, "answer_failed", _raise)
                assert isinstance((await made.ask().refused()).error, UpstreamFailed)
            refusal = await made.ask().refused()
            assert refusal.error.code == "upstream_first_byte_timeout"

    asyncio.run(main())


# -- the other direction --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [b'"\xff":1', b'"model":"m\xff"', b'"user":"caf\xe9"'])
def test_a_request_that_is_no_utf8_is_a_400_also_where_its_head_is_cached(bad: bytes) -> None:
    body = json.dumps(UNARY).encode()

    async def then(site: Site) -> None:
        async with site.client() as client:
            for _ in range(2):
                assert (await client.ask(body)).status == 200
            reply = await client.ask(body[:-1] + b"," + bad + b"}")
            assert (reply.status, reply.error["code"]) == (400, "invalid_utf8")
            assert (await client.ask(body)).status == 200
        assert len(site.upstream.talks) == 3
        assert site.router._pools["m"].is_idle

    through(well, then)
