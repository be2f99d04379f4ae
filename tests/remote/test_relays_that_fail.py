"""Relayed requests whose server, client or gateway fails: the answer, the log, the metrics and the server's view.

Each case runs twice: on a connection whose heads are cached, and on one whose heads are parsed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest
from tests.remote.fault_server import CHUNKED, DONE, Script, Talk, completion, event, piece, told_usage
from tests.remote.test_relays import MESSAGES, Client, Reply, Site, through, well

from inferd.events import HttpServed, RequestEnded
from inferd.http import head as heads
from inferd.remote import connection as wire

UNARY = {"model": "m", "messages": MESSAGES, "max_tokens": 7}
STREAM = {**UNARY, "stream": True}


@pytest.fixture(params=[True, False], ids=["cached heads", "parsed heads"])
def knows_heads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the heads of requests and of answers are kept."""
    if not request.param:
        _forget(monkeypatch)
    return bool(request.param)


def _forget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(heads.HeadCache, "add", lambda known, raw, head: None)
    patch.setattr(wire, "_MAX_KNOWN_HEADS_BYTES", 0)
    wire._known_heads.clear()


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
            for name in ("timings", "end", "started_at", "received_s", "submitted_s", "blocked_s"):
                if name in fields:
                    fields[name] = _timeless(fields[name])
            found.append({"kind": type(told).__name__, **fields})
    return found


def _timeless(value: object) -> object:
    """A value with a word in place of every time."""
    if isinstance(value, float):
        return "a time"
    if isinstance(value, list | tuple):
        return [_timeless(part) for part in value]
    return value


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
    """Three good requests, one that meets the fault, one more; what clients, server, log and metrics show of them."""
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


STATUSES = {
    "fails": 502,
    "refuses": 400,
    "is_busy": 503,
    "is_html": 502,
    "is_no_json": 502,
    "reports_an_error": 502,
    "no_utf8": 502,
    "no_utf8_unread": 502,
    "resets": 502,
    "closes": 502,
    "is_cut_short": 502,
    "talks_nonsense": 502,
    "stream_fails": 502,
    "stream_refuses": 400,
    "stream_is_html": 502,
    "stream_resets": 502,
    "stream_fails_first": 502,
}
"""Of the fourth answer, where it is not 200."""


@pytest.mark.parametrize("case", CASES)
def test_client_log_metrics_and_server_see_the_same_whether_heads_are_cached(case: str) -> None:
    body, script = CASES[case]
    known = run(body, script)
    with pytest.MonkeyPatch.context() as patch:
        _forget(patch)
        assert run(body, script) == known
    statuses = [status for status, _, _ in known[:-2]]
    assert statuses[:3] == [200] * 3
    assert statuses[3] == STATUSES.get(case, 200)
    assert statuses[4:] in ([200], [])


async def warm(client: Client, body: dict[str, Any], times: int = 2) -> None:
    for _ in range(times):
        assert (await client.ask(body)).status == 200


@pytest.mark.usefixtures("knows_heads")
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

    through(waits, then)


@pytest.mark.usefixtures("knows_heads")
def test_the_timeout_that_openais_client_tells_is_a_deadline() -> None:
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

    through(waits, then)


@pytest.mark.usefixtures("knows_heads")
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


@pytest.mark.usefixtures("knows_heads")
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


@pytest.mark.usefixtures("knows_heads")
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


@pytest.mark.usefixtures("knows_heads")
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


def test_a_body_of_another_length_has_a_known_head() -> None:
    async def then(site: Site) -> None:
        async with site.client() as client:
            for number in range(6):
                text = "x" * (number * 300)
                reply = await client.ask({**UNARY, "messages": [{"role": "user", "content": text}]})
                assert reply.status == 200
                assert json.loads(site.upstream.talks[-1].body)["messages"][0]["content"] == text

    through(well, then)


@pytest.mark.parametrize("header", ["x-strength: 5", "accept: ength: 7", "X-Content-Length: 3"])
def test_a_header_that_looks_like_the_length_is_none(header: str) -> None:
    async def then(site: Site) -> None:
        async with site.client() as client:
            for text in ("a", "bb", "ccc" * 100):
                body = {**UNARY, "messages": [{"role": "user", "content": text}]}
                assert (await client.ask(body, "/v1/chat/completions", header)).status == 200
                assert json.loads(site.upstream.talks[-1].body)["messages"][0]["content"] == text

    through(well, then)
