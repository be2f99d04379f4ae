"""Whatever a remote server does, its request ends once, with an error that says what it was."""

from __future__ import annotations

import asyncio
import fcntl
import json
import struct
import termios
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.remote.fault_server import CHUNKED, DONE, FaultServer, Flood, Talk, completion, event, piece, told_usage
from tests.remote.replicas import Bench, Heard, Owner, bench

from inferd.config import RemoteConfig
from inferd.errors import ConfigError, DeadlineExceeded, Overloaded, UpstreamFailed
from inferd.events import ReplicaChanged
from inferd.remote.connection import MAX_HEAD_BYTES
from inferd.remote.pool import RECEIVE_BYTES
from inferd.router.replicas.remote_replica import RemoteReplica
from inferd.types import Usage

Script = Callable[[Talk], Awaitable[None]]


def asked(script: Script, then: Callable[[Bench, FaultServer], Awaitable[None]], **settings: Any) -> None:
    """Run ``then`` with a replica of a server that answers as ``script`` says."""

    async def main() -> None:
        async with FaultServer(script).running() as server, bench(server.url, **settings) as made:
            await then(made, server)

    asyncio.run(main())


async def well(talk: Talk) -> None:
    await talk.answer(completion("hello"))


async def streamed(talk: Talk) -> None:
    await talk.send(CHUNKED)
    for text in ("a", "b"):
        await talk.event(piece(text))
    await talk.event(piece("", "stop"))
    await talk.event(told_usage(3, 2))
    await talk.chunk(DONE)
    await talk.end()


async def silent(talk: Talk) -> None:
    await talk.gone()


async def silent_after_one(talk: Talk) -> None:
    await talk.send(CHUNKED)
    await talk.event(piece("a"))
    await talk.gone()


def raw(data: bytes) -> Script:
    async def script(talk: Talk) -> None:
        await talk.send(data)
        talk.close()

    return script


def says(status: int, *extra: str, body: bytes = b'{"error":{"message":"no"}}') -> Script:
    async def script(talk: Talk) -> None:
        await talk.answer(body, status, "application/json", *extra)

    return script


# -- what goes well ------------------------------------------------------------------------------


def test_an_answer_passes_as_it_is_and_says_what_it_cost() -> None:
    async def then(made: Bench, server: FaultServer) -> None:
        for _ in range(3):
            heard = made.ask()
            end = await heard.ended()
            assert (end.outcome, end.usage) == ("done", Usage(3, 2))
            assert heard.data == completion("hello")
            head = heard.items[0].head
            assert head is not None
            assert (head.status, head.content_type) == (200, b"application/json")
        assert server.num_connections == 1  # the probe's as well
        assert (made.replica.num_in_flight, made.replica.outstanding) == (0, 0)

    asked(well, then)


@pytest.mark.parametrize("wants_usage", [False, True])
def test_a_stream_passes_as_it_is_but_for_the_usage_that_was_not_asked_for(wants_usage: bool) -> None:
    async def then(made: Bench, server: FaultServer) -> None:
        body = b'{"model":"here","stream":true,"timeout":5,"priority":-1}'
        heard = made.ask(stream=True, wants_usage=wants_usage, body=body)
        end = await heard.ended()
        assert (end.outcome, end.usage) == ("done", Usage(3, 2))
        usage = event(told_usage(3, 2)) if wants_usage else b""
        assert heard.data == event(piece("a")) + event(piece("b")) + event(piece("", "stop")) + usage + DONE
        sent = json.loads(server.talks[0].body)
        options = {} if wants_usage else {"stream_options": {"include_usage": True}}
        assert sent == {"model": "there", "stream": True, **options}

    asked(streamed, then, model="there")


def test_a_stream_that_ends_with_its_connection_is_an_answer() -> None:
    data = event(piece("a")) + DONE

    async def then(made: Bench, server: FaultServer) -> None:
        heard = made.ask(stream=True)
        assert (await heard.ended()).outcome == "done"
        assert heard.data == data

    asked(raw(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + data), then)


def test_the_clients_credentials_stay_here_and_ours_are_sent(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("first-key\n")

    async def then(made: Bench, server: FaultServer) -> None:
        await made.ask(headers=((b"x-request-id", b"r-1"),)).ended()
        headers = server.talks[0].headers
        assert (headers["authorization"], headers["x-request-id"]) == ("Bearer first-key", "r-1")
        assert not {"cookie", "x-api-key", "connection", "te", "upgrade"} & set(headers)
        key.write_text("second-key")
        made.replica.template._secret._checked_at = 0.0  # a second has passed
        await made.ask().ended()
        assert server.talks[1].headers["authorization"] == "Bearer second-key"

    asked(well, then, api_key_file=str(key))


def test_a_key_that_is_none_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    monkeypatch.setenv("BAD_KEY", "two\nlines")
    bad: list[dict[str, str]] = [
        {"api_key_env": "NO_SUCH_KEY"},
        {"api_key_env": "BAD_KEY"},
        {"api_key_file": str(tmp_path / "missing")},
    ]

    async def main(settings: dict[str, str]) -> None:
        with pytest.raises(ConfigError) as error:
            async with bench("http://127.0.0.1:9/v1", **settings):
                pass
        assert "two\nlines" not in error.value.message

    for settings in bad:
        asyncio.run(main(settings))


# -- timeouts, each its own ----------------------------------------------------------------------


async def refusal_of(made: Bench, **ask: Any) -> tuple[str | None, bool, bool]:
    refusal = await made.ask(**ask).refused()
    assert isinstance(refusal.error, UpstreamFailed)
    return refusal.error.code, refusal.counts, refusal.retry


def test_a_server_that_does_not_begin_is_given_up() -> None:
    async def then(made: Bench, server: FaultServer) -> None:
        assert await refusal_of(made) == ("upstream_first_byte_timeout", True, True)
        await asyncio.wait_for(server.lost.wait(), 5)  # it learns of it

    asked(silent, then, first_byte_timeout_s=0.1)


def test_headers_alone_are_no_beginning() -> None:
    async def only_headers(talk: Talk) -> None:
        await talk.send(CHUNKED)
        await talk.gone()

    async def then(made: Bench, server: FaultServer) -> None:
        assert await refusal_of(made, stream=True) == ("upstream_first_byte_timeout", True, True)

    asked(only_headers, then, first_byte_timeout_s=0.1)


def test_a_server_that_falls_silent_ends_the_stream_with_an_error() -> None:
    async def then(made: Bench, server: FaultServer) -> None:
        heard = made.ask(stream=True)
        end = await heard.ended()
        assert end.failure is not None
        assert (end.outcome, end.failure.code) == ("failed", "upstream_idle_timeout")
        assert heard.data == event(piece("a"))
        assert end.usage.completion_tokens == 1  # counted here, as the remote server sent no usage

    asked(silent_after_one, then, idle_timeout_s=0.1)


def test_a_deadline_ends_a_waiting_request_and_counts_against_no_server() -> None:
    async def then(made: Bench, server: FaultServer) -> None:
        refusal = await made.ask(deadline_s=0.5).refused()
        assert (type(refusal.error), refusal.counts, refusal.retry) == (DeadlineExceeded, False, False)
        await asyncio.wait_for(server.lost.wait(), 5)

    asked(silent, then)


def test_a_deadline_ends_a_stream_with_an_error() -> None:
    async def then(made: Bench, server: FaultServer) -> None:
        heard = made.ask(stream=True, deadline_s=1.0)
        end = await heard.ended()
        assert end.failure is not None
        assert (end.outcome, end.failure.kind) == ("failed", DeadlineExceeded.kind)
        assert heard.data == event(piece("a"))
        await asyncio.wait_for(server.lost.wait(), 5)

    asked(silent_after_one, then)


def test_an_answer_before_the_deadline_is_not_touched_by_it() -> None:
    async def then(made: Bench, server: FaultServer) -> None:
        asking = made.ask(deadline_s=30)
        assert (await asking.ended()).outcome == "done"
        scheduled = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        timers = [handle for handle in scheduled if not handle.cancelled()]
        assert not [timer for timer in timers if "_expire" in repr(timer)]

    asked(well, then)


def test_a_connection_that_is_not_made_in_time_is_given_up() -> None:
    """TLS towards a server that accepts and says nothing."""

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(mute, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with bench(f"https://127.0.0.1:{port}/v1", probe=False, connect_timeout_s=0.1) as made:
            assert await refusal_of(made) == ("upstream_connect_timeout", True, True)
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize("host", ["127.0.0.1:1", "no-such-host.invalid:80"])
def test_a_server_that_is_not_there_is_said_to_be(host: str) -> None:
    async def main() -> None:
        async with bench(f"http://{host}/v1", probe=False) as made:
            assert await refusal_of(made) == ("upstream_connect_failed", True, True)

    asyncio.run(main())


# -- garbage -------------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
FAILED = event({"error": {"message": "out of memory"}})
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
GARBAGE: dict[str, tuple[bytes, bool, str]] = {
    "no http": (b"\x00\x01 garbage\r\n\r\n", False, "upstream_bad_answer"),
    "html": (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>",
        False,
        "upstream_bad_answer",
    ),
    "no json": (OK + b"content-length: 5\r\n\r\n{oops", False, "upstream_bad_answer"),
    "a list": (OK + b"content-length: 2\r\n\r\n[]", False, "upstream_bad_answer"),
    "too short": (OK + b"content-length: 50\r\n\r\n{}", False, "upstream_closed"),
    "cut chunk": (OK + b"transfer-encoding: chunked\r\n\r\n5\r\n{", False, "upstream_closed"),
    "bad chunk": (OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}", False, "upstream_bad_answer"),
    "two lengths": (OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x", False, "upstream_bad_answer"),
    "endless head": (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 200_000, False, "upstream_bad_answer"),
    "endless trailer": (
        OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: " + b"a" * 200_000,
        False,
        "upstream_bad_answer",
    ),
    "endless extension": (
        OK + b"transfer-encoding: chunked\r\n\r\n2;" + b"a" * 200_000,
        False,
        "upstream_bad_answer",
    ),
    "gzip": (OK + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}", False, "upstream_bad_answer"),
    "moved": (
        b"HTTP/1.1 302 Found\r\nlocation: http://evil/\r\ncontent-length: 0\r\n\r\n",
        False,
        "upstream_bad_answer",
    ),
    "error as 200": (OK + b'content-length: 28\r\n\r\n{"error":{"message":"oops"}}', False, "upstream_error"),
    "json for a stream": (OK + b"content-length: 2\r\n\r\n{}", True, "upstream_bad_answer"),
    "no event": (SSE + b"content-length: 8\r\n\r\n<html>\n\n", True, "upstream_bad_answer"),
    "error first": (SSE + b'\r\ndata: {"error": {"message": "oops"}}\n\n', True, "upstream_error"),
    "nothing": (b"", False, "upstream_closed"),
}


@pytest.mark.parametrize("case", sorted(GARBAGE))
def test_garbage_is_an_error_before_anything_went_on_and_its_connection_is_dropped(case: str) -> None:
    data, stream, code = GARBAGE[case]

    async def then(made: Bench, server: FaultServer) -> None:
        assert await refusal_of(made, stream=stream) == (code, True, True)
        server.script = well
        assert (await made.ask().ended()).outcome == "done"
        assert server.num_connections >= 2

    asked(raw(data), then)


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        (b"", "upstream_closed"), (b"0\r\n\r\n", "upstream_incomplete"), (b"zz\r\n", "upstream_bad_answer"),
        (b"8\r\n<html>\n\n\r\n", "upstream_bad_answer"),
        (b"%x\r\n%b\r\n" % (len(FAILED), FAILED), "upstream_error"),
    ],
)  # fmt: skip
def test_a_stream_that_breaks_after_it_began_ends_with_an_error_and_is_never_sent_again(rest: bytes, code: str) -> None:
    first = event(piece("a"))

    async def then(made: Bench, server: FaultServer) -> None:
        heard = made.ask(stream=True)
        end = await heard.ended()
        assert end.failure is not None
        assert (end.outcome, end.failure.kind, end.failure.code) == ("failed", "upstream_failed", code)
        assert heard.data == first
        assert len(server.talks) == 1

    asked(raw(CHUNKED + b"%x\r\n%b\r\n" % (len(first), first) + rest), then)


def test_a_reset_after_some_tokens_is_an_error_in_the_stream() -> None:
    async def script(talk: Talk) -> None:
        await talk.send(CHUNKED)
        for _ in range(5):
            await talk.event(piece("a"))
        await asyncio.sleep(0)
        talk.reset()

    async def then(made: Bench, server: FaultServer) -> None:
        heard = made.ask(stream=True)
        await asyncio.wait_for(heard.over.wait(), 5)
        assert len(server.talks) == 1
        if heard.refusal is None:  # else the reset has overtaken what was sent before it
            assert heard.end.failure is not None

    asked(script, then)


def test_bytes_behind_a_large_answer_are_not_the_next_one_either() -> None:
    body = completion("x" * 3 * MAX_HEAD_BYTES)
    whole = OK + b"content-length: %d\r\n\r\n" % len(body) + body
    body += b" " * (-len(whole) % MAX_HEAD_BYTES)  # it ends where a piece does
    whole = OK + b"content-length: %d\r\n\r\n" % len(body) + body
    behind = OK + b"content-length: 2\r\n\r\n{}"

    async def then(made: Bench, server: FaultServer) -> None:
        heard = made.ask()
        assert (await heard.ended()).outcome == "done"
        assert heard.data == body
        server.script = well
        heard = made.ask()
        assert (await heard.ended()).outcome == "done"
        assert heard.data == completion("hello")

    asked(raw(whole + behind), then)


def test_bytes_behind_an_answer_are_not_the_next_one() -> None:
    async def script(talk: Talk) -> None:
        await talk.answer(completion("one"))
        await talk.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        await talk.gone()

    async def then(made: Bench, server: FaultServer) -> None:
        assert (await made.ask().ended()).outcome == "done"
        server.script = well
        await asyncio.wait_for(server.lost.wait(), 5)
        heard = made.ask()
        await heard.ended()
        assert heard.data == completion("hello")

    asked(script, then)


# -- statuses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422])
def test_what_the_client_did_wrong_passes_unchanged_and_blames_no_server(status: int) -> None:
    async def then(made: Bench, server: FaultServer) -> None:
        for stream in (False, True):
            heard = made.ask(stream=stream)
            end = await heard.ended()
            head = heard.items[0].head
            assert head is not None
            assert (head.status, heard.data, end.outcome) == (status, b'{"error":{"message":"no"}}', "refused")

    asked(says(status), then)


@pytest.mark.parametrize(
    ("status", "code"), [(500, "upstream_error"), (502, "upstream_error"), (401, "upstream_unauthorized")]
)
def test_a_server_that_fails_is_to_blame_and_another_may_be_asked(status: int, code: str) -> None:
    async def then(made: Bench, server: FaultServer) -> None:
        assert await refusal_of(made) == (code, True, True)
        assert await refusal_of(made, stream=True) == (code, True, True)
        assert server.num_connections == 1

    asked(says(status), then)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_left_alone_for_as_long_as_it_asks(status: int) -> None:
    async def then(made: Bench, server: FaultServer) -> None:
        refusal = await made.ask().refused()
        assert isinstance(refusal.error, Overloaded)
        assert (refusal.error.retry_after_s, refusal.counts, refusal.retry) == (0.2, False, True)
        assert not made.replica.can_take
        await asyncio.wait_for(made.owner.room.wait(), 5)
        assert made.replica.can_take

    asked(says(status, "retry-after: 0.2"), then)


# -- connections ---------------------------------------------------------------------------------


def test_a_kept_connection_that_was_closed_meanwhile_fails_no_request() -> None:
    """The server closes instead of answering a second request: nothing was heard of it, so it is sent again."""

    async def script(talk: Talk) -> None:
        if len(talk.server.talks) == 2:
            talk.close()
        else:
            await talk.answer(completion("hello"))

    async def then(made: Bench, server: FaultServer) -> None:
        for _ in range(2):
            assert (await made.ask().ended()).outcome == "done"
        assert (len(server.talks), server.num_connections) == (3, 2)

    asked(script, then)


def test_what_may_not_be_computed_twice_is_not_sent_twice() -> None:
    async def script(talk: Talk) -> None:
        if len(talk.server.talks) == 2:
            talk.close()
        else:
            await talk.answer(completion("hello"))

    async def then(made: Bench, server: FaultServer) -> None:
        await made.ask().ended()
        assert await refusal_of(made, idempotent=False) == ("upstream_closed", False, False)
        assert len(server.talks) == 2

    asked(script, then)


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_cuts_the_connection_and_ends_the_request_once(stream: bool) -> None:
    async def then(made: Bench, server: FaultServer) -> None:
        heard = made.ask(stream=stream)
        if stream:
            await heard.reached(1)
        else:
            await asyncio.sleep(0.05)
        made.replica.cancel(heard.ticket.request.id)
        assert not heard.over.is_set()  # not within the call
        assert (await heard.ended()).outcome == "cancelled"
        await asyncio.wait_for(server.lost.wait(), 5)
        made.replica.cancel(heard.ticket.request.id)  # nothing happens

    asked(silent_after_one if stream else silent, then)


def test_a_paused_answer_fills_no_buffer_here_and_loses_nothing() -> None:
    flood = Flood()

    async def then(made: Bench, server: FaultServer) -> None:
        heard = made.ask(stream=True)
        await heard.reached(1)
        made.replica.pause(heard.ticket.request.id)
        await flood.is_held_back()
        held = len(heard.data)
        assert held < 4_000_000
        assert flood.num_sent < 16_000_000, "the server was not held back"
        made.replica.resume(heard.ticket.request.id)
        assert (await heard.ended()).outcome == "done"
        assert heard.data == flood.whole

    asked(flood, then, idle_timeout_s=0.2)


def test_the_kernel_holds_little_of_an_answer_that_is_not_read() -> None:
    flood = Flood()

    async def then(made: Bench, server: FaultServer) -> None:
        heard = made.ask(stream=True)
        await heard.reached(4_000_000)
        made.replica.pause(heard.ticket.request.id)
        await flood.is_held_back()
        (connection,) = made.replica.connections._all
        assert connection._transport is not None
        raw = connection._transport.get_extra_info("socket")
        (held,) = struct.unpack("i", fcntl.ioctl(raw.fileno(), termios.FIONREAD, b"\0" * 4))
        assert 0 < held <= 4 * RECEIVE_BYTES
        made.replica.resume(heard.ticket.request.id)
        assert (await heard.ended()).outcome == "done"
        assert heard.data == flood.whole

    asked(flood, then)


def test_there_are_never_more_connections_than_requests_it_may_have() -> None:
    async def then(made: Bench, server: FaultServer) -> None:
        heard = [made.ask() for _ in range(4)]
        assert not made.replica.can_take
        for one in heard:
            assert (await one.ended()).outcome == "done"
        assert server.num_connections <= 5

    asked(well, then, max_in_flight=4)


# -- probing -------------------------------------------------------------------------------------


def test_a_server_that_does_not_answer_probes_gets_nothing_until_it_does() -> None:
    async def main() -> None:
        ill = True

        async def probe(talk: Talk) -> None:
            await talk.answer(b"{}", 503 if ill else 404)

        async with FaultServer(well, probe).running() as server:
            seen: list[Heard] = []

            async def heal(made: Bench) -> None:
                nonlocal ill
                await asyncio.wait_for(made.owner.unreachable.wait(), 5)
                assert (made.replica.is_ready, made.replica.state) == (False, "unreachable")
                ill = False

            owner = Owner()
            events: list[Any] = []
            replica = RemoteReplica("here", 0, RemoteConfig(url=server.url), owner, events.append)
            made = Bench(replica, owner, events)
            replica.start()
            try:
                await heal(made)
                await asyncio.wait_for(owner.ready.wait(), 5)
                seen.append(made.ask())
                assert (await seen[0].ended()).outcome == "done"
            finally:
                await replica.stop()
            states = [event.state for event in events if isinstance(event, ReplicaChanged)]
            assert states == ["starting", "died", "ready", "stopped"]

    asyncio.run(main())
