"""Usual requests take a direct path, whose answers and records are those of the general path.

Each case runs twice: with the direct path, and with it closed. Clients, the remote server, the log and the metrics must
see the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.remote.fault_server import CHUNKED, DONE, Script, Talk, completion, event, piece, told_usage
from tests.remote.test_relays import MESSAGES, Client, Reply, Site, through, well

from inferd.errors import UpstreamFailed
from inferd.events import HttpServed, RequestEnded
from inferd.gateway.repeated.heads import HeadCache
from inferd.remote import connection as wire
from inferd.remote.connection import Connection, Head, Headers
from inferd.remote.head_pattern import is_exact, pattern_of
from inferd.router.direct_relay import DirectRelay

UNARY = {"model": "m", "messages": MESSAGES, "max_tokens": 7}
STREAM = {**UNARY, "stream": True}


class Counted:
    """How many requests began, and how many ended, on the direct path."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sent_directly = self.converted = 0
        send, convert = DirectRelay.send, DirectRelay.convert

        def count_sent(*args: Any) -> None:
            self.sent_directly += 1
            send(*args)

        def count_conversion(relay: DirectRelay) -> Any:
            self.converted += 1
            return convert(relay)

        patch.setattr(DirectRelay, "send", count_sent)
        patch.setattr(DirectRelay, "convert", count_conversion)


def seen(reply: Reply) -> tuple[int, dict[str, str], bytes]:
    headers = {name: value for name, value in reply.headers.items() if name not in ("date", "x-request-id")}
    return reply.status, headers, reply.body


def told(site: Site) -> list[dict[str, Any]]:
    """What the log and the metrics hear, without names and times."""
    found = []
    for told in site.events:
        if isinstance(told, HttpServed | RequestEnded):
            fields = msgspec.to_builtins(told)
            fields.pop("duration_s", None)
            fields.pop("request_id")
            fields["timings"] = [at is not None for at in fields["timings"]] if fields["timings"] else None
            found.append({"kind": type(told).__name__, **fields})
    return found


def asked(site: Site) -> list[tuple[str, dict[str, str], bytes]]:
    """What the remote server saw."""
    found = []
    for talk in site.upstream.talks:
        headers = {name: value for name, value in talk.headers.items() if name not in ("x-request-id", "host")}
        found.append((talk.path, headers, talk.body))
    return found


async def fails(talk: Talk) -> None:
    await talk.answer(b'{"error":{"message":"no"}}', 500)


async def refuses(talk: Talk) -> None:
    await talk.answer(b'{"error":{"message":"bad"}}', 400)


async def is_busy(talk: Talk) -> None:
    await talk.answer(b'{"error":{"message":"busy"}}', 429, "application/json", "retry-after: 1")


async def is_html(talk: Talk) -> None:
    await talk.answer(b"<html>", 200, "text/html")


async def is_no_json(talk: Talk) -> None:
    await talk.answer(b"{oops")


async def reports_an_error(talk: Talk) -> None:
    await talk.answer(b'{"error":{"message":"inside"}}')


async def counts_nothing(talk: Talk) -> None:
    await talk.answer(b'{"choices":[]}')


async def comes_in_pieces(talk: Talk) -> None:
    body = completion("hello " * 20)
    await talk.send(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx: y\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    for at in range(0, len(body), 100):
        await asyncio.sleep(0.01)
        await talk.send(body[at : at + 100])


async def resets(talk: Talk) -> None:
    talk.reset()


async def closes(talk: Talk) -> None:
    talk.close()


async def is_cut_short(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{")
    talk.close()


async def talks_nonsense(talk: Talk) -> None:
    await talk.send(b"NONSENSE\r\n\r\n")


async def breaks_off(talk: Talk) -> None:
    await talk.send(CHUNKED)
    await talk.event(piece("one"))
    talk.reset()


async def forgets_to_end(talk: Talk) -> None:
    await talk.send(CHUNKED)
    await talk.event(piece("one"))
    await talk.end()


async def fails_within(talk: Talk) -> None:
    await talk.send(CHUNKED)
    await talk.chunk(event(piece("one")) + event({"error": {"message": "inside"}}))


async def fails_first(talk: Talk) -> None:
    await talk.send(CHUNKED)
    await talk.event({"error": {"message": "at once"}})


async def comes_in_crumbs(talk: Talk) -> None:
    data = event(piece("one")) + event(piece("two")) + event(told_usage(3, 2)) + DONE
    answer = CHUNKED + b"%X;x=y\r\n%b\r\n0\r\ntrailer: t\r\n\r\n" % (len(data), data)
    for at in range(0, len(answer), 7):
        await talk.send(answer[at : at + 7])
        await asyncio.sleep(0)


async def comes_at_once(talk: Talk) -> None:
    data = event(piece("one")) + event(told_usage(3, 2)) + DONE
    await talk.send(CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(d), d) for d in (data[:9], data[9:])) + b"0\r\n\r\n")


def no_utf8(talk: Talk) -> Awaitable[None]:
    return talk.answer(b'{"choices":[{"text":"\xff"}]}')


def no_utf8_unread(talk: Talk) -> Awaitable[None]:
    return talk.answer(b'{"choices":[{"message":{"content":"\xff"}}]}')


async def no_utf8_in_an_event(talk: Talk) -> None:
    await talk.send(CHUNKED)
    await talk.chunk(event(piece("one")) + b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n')


CASES: dict[str, tuple[dict[str, Any], Script]] = {
    **{
        script.__name__: (UNARY, script)
        for script in (
            *(well, fails, refuses, is_busy, is_html, is_no_json, reports_an_error, counts_nothing),
            *(comes_in_pieces, no_utf8, no_utf8_unread),
            *(resets, closes, is_cut_short, talks_nonsense),
        )
    },
    **{
        f"stream_{script.__name__}": (STREAM, script)
        for script in (
            *(well, fails, refuses, is_html, resets, breaks_off, forgets_to_end, fails_within, fails_first),
            *(comes_in_crumbs, comes_at_once, no_utf8_in_an_event),
        )
    },
    "stream_with_usage": ({**STREAM, "stream_options": {"include_usage": True}}, well),
    "stream_without_options": ({**STREAM, "stream_options": None}, well),
    "stream_with_spaces": ({**STREAM, "stream_options": {}}, well),
}


def run(body: dict[str, Any], script: Script) -> tuple[Any, ...]:
    """Three usual requests, one that meets the fault, one more; what clients, server, log and metrics show of them."""
    found: list[Any] = []
    data = json.dumps(body).encode()

    async def then(site: Site) -> None:
        async with site.client() as client:
            for number in range(5):
                is_met = number == 3
                site.upstream.script = script if is_met else well
                found.append(seen(await client.ask(data)))
                if found[-1][1].get("connection") == "close":
                    break
                if script is is_busy and is_met:
                    break  # it is left alone for a second
            await site.of(HttpServed, len(found))
            pool = site.router._pools["m"]
            assert pool.is_idle
            assert [member.outstanding for member in pool.fleet.members] == [0]
            found.append(told(site))
            found.append(asked(site))

    through(well, then)
    return tuple(found)


@pytest.mark.parametrize("case", CASES)
def test_every_client_sees_the_same_with_and_without_the_direct_path(case: str) -> None:
    body, script = CASES[case]
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        with_it = run(body, script)
        assert counted.sent_directly >= 2, "the direct path was never taken: this shows nothing"
        assert counted.converted == (
            0 if script in (well, counts_nothing, comes_in_pieces, comes_in_crumbs, comes_at_once) else 1
        )
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        patch.setattr(HeadCache, "serve", lambda cache, client, data: False)
        without = run(body, script)
        assert counted.sent_directly == 0
    assert with_it == without


async def warm(client: Client, body: dict[str, Any], times: int = 2) -> None:
    for _ in range(times):
        assert (await client.ask(body)).status == 200


def test_a_client_that_leaves_ends_its_request_there_and_here() -> None:
    async def waits(talk: Talk) -> None:
        if len(talk.server.talks) == 3:
            await talk.gone()
        else:
            await well(talk)

    async def then(site: Site) -> None:
        async with site.client() as client:
            await warm(client, UNARY)
            client.send(UNARY)
            await client.writer.drain()
            while len(site.upstream.talks) < 3:
                await asyncio.sleep(0.01)
        served = (await site.of(HttpServed, 3))[2]
        assert (served.status, served.outcome) == (499, "cancelled")
        ended = (await site.of(RequestEnded, 3))[2]
        assert ended.outcome == "cancelled"
        await asyncio.wait_for(site.upstream.lost.wait(), 10)
        assert site.router._pools["m"].is_idle

    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        through(waits, then)
        assert (counted.sent_directly, counted.converted) == (2, 1) or (counted.sent_directly, counted.converted) == (
            1,
            1,
        )


@pytest.mark.parametrize("has_direct_path", [True, False])
def test_the_timeout_that_openais_client_tells_is_a_deadline(has_direct_path: bool) -> None:
    async def waits(talk: Talk) -> None:
        if len(talk.server.talks) == 4:
            await talk.gone()
        else:
            await well(talk)

    async def then(site: Site) -> None:
        async with site.client() as client:
            for timeout_s in ("600.0", "600.0", "0.2", "0.2"):
                late = await client.ask(UNARY, "/v1/chat/completions", f"x-stainless-read-timeout: {timeout_s}")
            assert (late.status, late.error["code"]) == (408, "deadline_exceeded")
            assert (await client.ask(UNARY)).status == 200
        await asyncio.wait_for(site.upstream.lost.wait(), 10)
        assert site.router._pools["m"].is_idle

    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        if not has_direct_path:
            patch.setattr(HeadCache, "serve", lambda cache, client, data: False)
        through(waits, then)
        assert (counted.sent_directly, counted.converted) == ((2, 1) if has_direct_path else (0, 0))


def test_a_stream_may_last_for_longer_than_openais_client_waits_for_its_beginning() -> None:
    async def is_slow(talk: Talk) -> None:
        if len(talk.server.talks) < 3:
            await well(talk)
            return
        await talk.send(CHUNKED)
        await talk.event(piece("one"))
        await asyncio.sleep(0.4)
        await talk.event(piece("two"))
        await talk.chunk(DONE)
        await talk.end()

    async def then(site: Site) -> None:
        async with site.client() as client:
            for _ in range(3):
                reply = await client.ask(STREAM, "/v1/chat/completions", "x-stainless-read-timeout: 0.3")
            assert b'"two"' in reply.body

    through(is_slow, then)


def test_a_client_that_leaves_in_the_middle_of_a_stream_pays_for_what_it_had() -> None:
    async def stops(talk: Talk) -> None:
        if len(talk.server.talks) < 3:
            await well(talk)
            return
        await talk.send(CHUNKED)
        await talk.event(piece("one"))
        await talk.gone()

    async def then(site: Site) -> None:
        async with site.client() as client:
            await warm(client, STREAM)
            client.send(STREAM)
            assert b"one" in await client.reader.readuntil(b'"one"')
        served = (await site.of(HttpServed, 3))[2]
        assert (served.status, served.outcome, served.usage.completion_tokens) == (499, "cancelled", 1)

    through(stops, then)


def test_a_server_that_is_told_to_stop_finishes_what_is_on_its_way() -> None:
    go = asyncio.Event()

    async def waits(talk: Talk) -> None:
        if len(talk.server.talks) == 3:
            await go.wait()
        await well(talk)

    async def then(site: Site) -> None:
        async with site.client() as client:
            await warm(client, UNARY)
            client.send(UNARY)
            while len(site.upstream.talks) < 3:
                await asyncio.sleep(0.01)
            drained = asyncio.ensure_future(site.router.drain(10))
            await asyncio.sleep(0)
            site.server.stop()
            assert not drained.done()
            go.set()
            reply = await client.reply()
            assert (reply.status, reply.headers["connection"]) == (200, "close")
            assert await drained

    through(waits, then)


def test_what_is_on_its_way_when_the_model_is_aborted_is_told_so() -> None:
    async def waits(talk: Talk) -> None:
        if len(talk.server.talks) == 3:
            await talk.gone()
        await well(talk)

    async def then(site: Site) -> None:
        async with site.client() as client:
            await warm(client, UNARY)
            client.send(UNARY)
            while len(site.upstream.talks) < 3:
                await asyncio.sleep(0.01)
            site.router.abort()
            assert (await client.reply()).status == 503

    through(waits, then)


def test_only_what_is_usual_is_remembered() -> None:
    async def then(site: Site) -> None:
        async with site.client() as client:
            for header in ("x-request-id: a", "traceparent: b", "x-inferd-timeout: 5", "x-inferd-priority: batch"):
                for _ in range(3):
                    await client.ask(UNARY, "/v1/chat/completions", header)
            for extra in ({"n": 1}, {"timeout": 5}, {"priority": 0}, {"model": "x"}):
                for _ in range(3):
                    await client.ask({**UNARY, **extra})
            for _ in range(3):
                await client.ask({**UNARY, "max_tokens": -1})
            data = json.dumps(UNARY).encode()
            for twice in (data.replace(b'"m"', b'"m","model":"m"'), data.replace(b"hi", b"\xff\xff")):
                for _ in range(3):
                    assert (await client.ask(twice)).status == 400

    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        through(well, then)
        assert counted.sent_directly == 0


def test_a_body_of_another_length_is_as_known_heads() -> None:
    async def then(site: Site) -> None:
        async with site.client() as client:
            for number in range(6):
                text = "x" * (number * 300)
                reply = await client.ask({**UNARY, "messages": [{"role": "user", "content": text}]})
                assert reply.status == 200
                assert json.loads(site.upstream.talks[-1].body)["messages"][0]["content"] == text

    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        through(well, then)
        assert counted.sent_directly == 5


@pytest.mark.parametrize("header", ["x-strength: 5", "accept: ength: 7", "X-Content-Length: 3"])
def test_a_header_that_looks_like_the_length_is_none(header: str) -> None:
    async def then(site: Site) -> None:
        async with site.client() as client:
            for text in ("a", "bb", "ccc" * 100):
                body = {**UNARY, "messages": [{"role": "user", "content": text}]}
                assert (await client.ask(body, "/v1/chat/completions", header)).status == 200
                assert json.loads(site.upstream.talks[-1].body)["messages"][0]["content"] == text

    through(well, then)


LINES = [
    "host: a",
    "content-length: 12",
    "x-length: 9",
    "Content-Length: 007",
    "Inference-Header-Content-Length: 5",
    "a: b",
]


@given(st.lists(st.sampled_from(LINES)))
@example(["Inference-Header-Content-Length: 5", "Content-Length: 12"])
def test_a_pattern_keeps_everything_but_the_length(lines: list[str]) -> None:
    head = "\r\n".join(["POST / HTTP/1.1", *lines]).encode()
    pattern, digits = pattern_of(head + b"\r\n\r\nbody", len(head))
    assert pattern_of(head, len(head)) == (pattern, digits)
    if is_exact(head):
        lengths = [line for line in lines if line.lower().partition(":")[0].endswith("length")]
        found = next(line for line in lengths[:2] if line.lower().startswith("content-length: "))
        assert digits == found.partition(" ")[2].encode()
        at = pattern.lower().index(b"\r\ncontent-length: ") + 18
        assert pattern[:at] + digits + pattern[at:] == head


# -- the wire ------------------------------------------------------------------------------------


class Transport:
    def __init__(self) -> None:
        self.is_closed = False

    def write(self, data: bytes) -> None: ...
    def abort(self) -> None:
        self.is_closed = True


class Ear:
    """Writes down an answer in a form that does not depend on how it was cut."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def answer_whole(self, head: Head, body: bytes) -> None:
        self.answer_head(head.status, head.headers)
        if body:
            self.answer_data(body)
        self.answer_ended()

    def answer_head(self, status: int, headers: Headers) -> None:
        self.heard.append((status, [header for header in headers if header[0] != b"content-length"]))

    def answer_data(self, data: bytes) -> None:
        if isinstance(self.heard[-1], bytes):
            self.heard[-1] += data
        else:
            self.heard.append(data)

    def answer_ended(self) -> None:
        self.heard.append("ended")

    def answer_failed(self, error: UpstreamFailed, *, is_stale: bool) -> None:
        self.heard.append((error.code, is_stale))

    def answer_broken(self, error: UpstreamFailed) -> None:
        raise AssertionError("nothing is raised here")


def listen(answers: list[bytes], cuts: list[int], *, remembers: bool) -> list[Any]:
    """What is heard of answers on one connection, which come in pieces of these sizes."""
    with pytest.MonkeyPatch.context() as patch:
        if not remembers:
            patch.setattr(wire, "_MAX_KNOWN_HEADS_BYTES", 0)
        wire._known_heads.clear()
        wire._chunk_sizes.clear()
        heard: list[Any] = []
        freed: list[Connection] = []
        connection = Connection(freed.append, lambda lost: None)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        turn = 0
        for answer in answers:
            if connection.is_closed:
                break
            ear = Ear()
            connection.send(b"", ear)
            at = 0
            while at < len(answer) and not connection.is_closed:
                size = cuts[turn % len(cuts)]
                turn += 1
                connection.data_received(answer[at : at + size])
                at += size
            heard.append((ear.heard, connection.is_closed, connection.is_busy))
            if connection.is_busy:
                break
        return heard


def answer_of(status: int, body: bytes, form: str, sizes: list[int]) -> bytes:
    head = b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\n" % status
    if form == "length":
        return head + b"content-length: %d\r\n\r\n" % len(body) + body
    if form == "too long":
        return head + b"content-length: %d\r\n\r\n" % len(body) + body + b"x"
    if form == "two lengths":
        return head + b"content-length: %d\r\ncontent-length: 1\r\n\r\n" % len(body) + body
    if form == "continue":
        return b"HTTP/1.1 100 Continue\r\n\r\n" + head + b"content-length: %d\r\n\r\n" % len(body) + body
    if form == "closing":
        return head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    pieces, at, turn = [], 0, 0
    while at < len(body):
        piece_ = body[at : at + sizes[turn % len(sizes)]]
        line = {"chunks": b"%x", "capitals": b"%X", "zeros": b"00%x", "extensions": b"%x;a=b"}[form] % len(piece_)
        pieces.append(line + b"\r\n" + piece_ + b"\r\n")
        at += len(piece_)
        turn += 1
    end = b"0\r\ntrailer: x\r\n\r\n" if form == "extensions" else b"0\r\n\r\n"
    return head + b"transfer-encoding: chunked\r\n\r\n" + b"".join(pieces) + end


answers = st.builds(
    answer_of,
    st.sampled_from([200, 200, 200, 404, 500]),
    st.binary(min_size=0, max_size=40),
    st.sampled_from(
        [
            *("length", "length", "chunks", "chunks", "capitals", "zeros", "extensions"),
            *("continue", "closing", "too long", "two lengths"),
        ]
    ),
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(answers, min_size=1, max_size=4), st.lists(st.sampled_from([1, 3, 10, 60, 10_000]), min_size=1))
def test_a_familiar_answer_is_heard_as_the_parser_would_have_read_it(some: list[bytes], cuts: list[int]) -> None:
    twice = [answer for answer in some for _ in range(2)]
    assert listen(twice, cuts, remembers=True) == listen(twice, cuts, remembers=False)


@pytest.mark.parametrize("form", ["length", "chunks"])
def test_a_familiar_head_may_be_cut_at_any_byte(form: str) -> None:
    body = (
        b"x" * 65
    )  # by three shorter than the head up to the first byte of its last three: the two were once taken for one
    answer = answer_of(200, body, form, [40])
    for cut in range(1, len(answer)):
        cuts = [len(answer), cut, len(answer)]
        assert listen([answer] * 2, cuts, remembers=True) == listen([answer] * 2, cuts, remembers=False), cut


def test_a_head_that_has_not_ended_is_like_none() -> None:
    head = b"POST /a HTTP/1.1\r\ncontent-length: 40\r\nhost: a"
    unended = head + b"\r"
    assert pattern_of(unended, unended.find(b"\r\n\r\n")) == (b"", b"")
    assert not is_exact(b"")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.integers(0, 400),
    st.binary(min_size=1, max_size=3),
    st.lists(st.sampled_from([7, 40, 10_000]), min_size=1, max_size=3),
)
def test_a_damaged_answer_is_no_better_for_a_familiar_head(
    sizes: list[int], at: int, damage: bytes, cuts: list[int]
) -> None:
    good = answer_of(200, b"0123456789" * 5, "chunks", sizes)
    at = min(at, len(good) - 1)
    bad = good[:at] + damage + good[at + len(damage) :]
    assert listen([good, bad], cuts, remembers=True) == listen([good, bad], cuts, remembers=False)


@pytest.mark.parametrize("form", ["length", "chunks"])
@pytest.mark.parametrize("remembers", [True, False])
def test_a_connection_is_not_used_again_where_a_full_read_may_have_left_bytes(form: str, remembers: bool) -> None:
    small = answer_of(200, b"{}", form, [64])
    large = answer_of(200, b"x" * wire.FULL_READ_BYTES, form, [50_000])
    whole = [len(small), len(large)]
    (_, (heard, is_closed, is_busy)) = listen([small, large], whole, remembers=remembers)
    assert heard[-1] == "ended"
    assert (is_closed, is_busy) == (True, False)
    in_parts = [len(small), len(large) - 10, 10]
    (_, (heard, is_closed, is_busy)) = listen([small, large], in_parts, remembers=remembers)
    assert heard[-1] == "ended"
    assert (is_closed, is_busy) == (False, False)
