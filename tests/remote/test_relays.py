"""From client to remote server and back, through a whole gateway: real sockets at both ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from tests.remote.fault_server import (
    CHUNKED,
    DONE,
    FaultServer,
    Flood,
    Script,
    Talk,
    completion,
    event,
    piece,
    told_usage,
)

from inferd.config import Config, ModelConfig, RemoteSettings, RetryConfig, ServerConfig
from inferd.events import Event, HttpServed, RequestEnded
from inferd.gateway.server import create_app
from inferd.http.listener import HttpServer
from inferd.router.replicas.remote_replica import RemoteReplica
from inferd.router.router import Router
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.types import Usage

MESSAGES = [{"role": "user", "content": "hi"}]


class Reply:
    def __init__(self, head: bytes, body: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split(" ")[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        self.body = body

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


class Client:
    """One connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, body: bytes | dict[str, Any], path: str = "/v1/chat/completions", *headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "host: localhost", *headers]
        if not any(header.startswith("content-type") for header in headers):
            lines.append("content-type: application/json")
        lines.append(f"content-length: {len(data)}")
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)

    async def reply(self) -> Reply:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10))[:-4]
        reply = Reply(head, b"")
        if reply.headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                reply.body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        else:
            reply.body = await self.reader.readexactly(int(reply.headers["content-length"]))
        return reply

    async def ask(self, body: bytes | dict[str, Any], path: str = "/v1/chat/completions", *headers: str) -> Reply:
        self.send(body, path, *headers)
        return await self.reply()


class Site:
    """A gateway in front of one remote server."""

    def __init__(self, upstream: FaultServer, server: HttpServer, router: Router, events: list[Event]) -> None:
        self.upstream = upstream
        self.server = server
        self.router = router
        self.events = events

    @contextlib.asynccontextmanager
    async def client(self, limit: int = 2**16) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=limit)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()

    async def of(self, kind: type[Any], number: int = 1) -> list[Any]:
        """The first events of a kind, waited for."""
        async with asyncio.timeout(10):
            while len(found := [event for event in self.events if type(event) is kind]) < number:
                await asyncio.sleep(0.01)
        return found


def through(
    script: Script,
    then: Callable[[Site], Awaitable[None]],
    model: dict[str, Any] | None = None,
    **server: Any,
) -> None:
    """Run ``then`` with a gateway whose model ``m`` is behind a server that answers as ``script`` says."""

    async def main() -> None:
        async with FaultServer(script).running() as upstream:
            events: list[Event] = []
            remote = ModelConfig(source=f"openai:{upstream.url}", remote=RemoteSettings(model="there"), **(model or {}))
            config = Config(server=ServerConfig(port=0, grace_s=1, **server), models={"m": remote})
            router = Router(config, events.append)
            await router.start()
            await asyncio.wait_for(router.settled(), 10)
            app = create_app(router, config, events.append, idempotency=IdempotencyStore(60))
            gateway = HttpServer(app, config.server)
            async with gateway.running():
                await then(Site(upstream, gateway, router, events))
            await router.stop()

    asyncio.run(main())


async def well(talk: Talk) -> None:
    if b'"stream":true' in talk.body:
        await talk.send(CHUNKED)
        for text in ("one", "two"):
            await talk.event(piece(text))
        await talk.event(told_usage(3, 2))
        await talk.chunk(DONE)
        await talk.end()
    else:
        await talk.answer(completion("hello"))


def test_an_answer_comes_back_as_the_remote_server_wrote_it() -> None:
    async def then(site: Site) -> None:
        async with site.client() as client:
            for number in range(1, 4):
                body = {"model": "m", "messages": MESSAGES, "unknown": [1, {"x": "é"}], "temperature": 0.5}
                reply = await client.ask(body, "/v1/chat/completions", "x-request-id: mine", "authorization: Bearer x")
                assert (reply.status, reply.body) == (200, completion("hello"))
                assert reply.headers["x-request-id"] == "mine"
                assert (await site.of(HttpServed, number))[-1].usage == Usage(3, 2)
            sent = site.upstream.talks[0]
            assert json.loads(sent.body) == {**body, "model": "there"}
            assert sent.headers["x-request-id"] == "mine"
            assert "authorization" not in sent.headers
        served = (await site.of(HttpServed))[0]
        assert (served.status, served.model, served.outcome, served.request_id) == (200, "m", "done", "mine")
        ended = (await site.of(RequestEnded))[0]
        assert (ended.outcome, ended.usage, ended.replica) == ("done", Usage(3, 2), 0)

    through(well, then)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["straight", "recorded"])
def test_what_another_inferd_tells_of_a_request_comes_with_its_answer(stream: bool, way: str) -> None:
    """A key that this server does not know may have an effect there, so it is the remote server that names keys."""
    told = "x-inferd-ignored-params: messages.weight"

    async def script(talk: Talk) -> None:
        if stream:
            await talk.send(CHUNKED.replace(b"\r\n\r\n", f"\r\n{told}\r\nset-cookie: a=b\r\n\r\n".encode()))
            await talk.event(piece("one", "stop"))
            await talk.chunk(DONE)
            await talk.end()
        else:
            await talk.answer(completion("hello"), 200, "application/json", told, "set-cookie: a=b")

    async def then(site: Site) -> None:
        async with site.client() as client:
            body = {"model": "m", "messages": [{**MESSAGES[0], "weight": 1}], "stream": stream}
            for key in ("a", "b"):  # the head of the second answer is known
                extra = [f"idempotency-key: {key}"] if way == "recorded" else []
                reply = await client.ask(body, "/v1/chat/completions", *extra)
                assert reply.status == 200
                assert reply.headers["x-inferd-ignored-params"] == "messages.weight"
                assert "set-cookie" not in reply.headers

    through(script, then)


def test_a_stream_comes_back_event_by_event_with_usage_only_on_request() -> None:
    async def then(site: Site) -> None:
        async with site.client() as client:
            reply = await client.ask({"model": "m", "messages": MESSAGES, "stream": True})
            assert reply.body == event(piece("one")) + event(piece("two")) + DONE
            assert reply.headers["content-type"].startswith("text/event-stream")
            reply = await client.ask(
                {"model": "m", "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
            )
            assert reply.body == event(piece("one")) + event(piece("two")) + event(told_usage(3, 2)) + DONE
        assert [served.usage for served in await site.of(HttpServed, 2)] == [Usage(3, 2)] * 2

    through(well, then)


def test_a_large_body_and_an_idempotency_key_and_a_slow_writer_take_the_other_way_to_the_same_answer() -> None:
    async def then(site: Site) -> None:
        async with site.client() as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "x" * 300_000}]}
            assert (await client.ask(body)).body == completion("hello")
            assert (await client.ask({**body, "stream": True})).body.endswith(DONE)
            small = {"model": "m", "messages": MESSAGES}
            assert (await client.ask(small, "/v1/chat/completions", "idempotency-key: k")).body == completion("hello")
            data = json.dumps(small).encode()
            client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
            client.writer.write(b"content-length: %d\r\n\r\n" % len(data) + data[:10])
            await client.writer.drain()
            await asyncio.sleep(0.05)
            client.writer.write(data[10:])
            assert (await client.reply()).body == completion("hello")

    through(well, then)


def test_a_body_in_chunks_is_taken_as_any_other() -> None:
    async def then(site: Site) -> None:
        async with site.client() as client:
            data = json.dumps({"model": "m", "messages": MESSAGES}).encode()
            client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
            client.writer.write(b"transfer-encoding: chunked\r\n\r\n")
            for byte in (data[:7], data[7:]):
                client.writer.write(b"%x\r\n%b\r\n" % (len(byte), byte))
            client.writer.write(b"0\r\n\r\n")
            assert (await client.reply()).body == completion("hello")

    through(well, then)


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/embeddings", {"input": "hi"})]
)
def test_a_body_without_a_model_is_for_the_only_one(path: str, fields: dict[str, Any]) -> None:
    async def then(site: Site) -> None:
        async with site.client() as client:
            reply = await client.ask(fields, path)
            assert (reply.status, reply.body) == (200, completion("hello"))
        assert json.loads(site.upstream.talks[0].body) == {**fields, "model": "there"}

    through(well, then)


def test_an_invalid_request_is_refused_before_a_server_is_asked() -> None:
    cases: list[tuple[bytes, str]] = [
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":[]}', "messages"),
        (b'{"model":"m","messages":[{"content":"x"}]}', "messages[0].role"),
        (b'{"model":"m","messages":[{"role":"user"}],"max_tokens":-1}', "max_tokens"),
        (b'{"model":"m","messages":[{"role":"user"}],"n":0}', "n"),
        (b'{"model":"m","messages":[{"role":"user"}],"timeout":-1}', "timeout"),
        (b'{"model":"m","messages":[{"role":"user"}],"stream":"yes"}', "stream"),
        (b'{"model":"m","messages":[{"role":"user"}],"n":1,"n":2}', ""),
        (b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}', ""),
        (b'{"model":"m","messages":' + b"[" * 5000, ""),
    ]

    async def then(site: Site) -> None:
        async with site.client() as client:
            for body, param in cases[:7] + cases[8:]:
                reply = await client.ask(body)
                assert reply.status == 400, (body, reply.body)
                if param:
                    assert reply.error["param"] == param
            assert (await client.ask({"model": "x", "messages": MESSAGES})).status == 404
            assert (await client.ask({"model": "m", "prompt": "x"}, "/v1/completions")).status == 200
            reply = await client.ask(b"{}", "/v1/chat/completions", "content-type: text/plain")
            assert reply.status == 415
        assert len(site.upstream.talks) == 1

    through(well, then)


def test_an_error_of_the_remote_server_is_the_clients_answer() -> None:
    async def script(talk: Talk) -> None:
        await talk.answer(b'{"error":{"message":"too long","param":"messages"}}', 400)

    async def then(site: Site) -> None:
        async with site.client() as client:
            for stream in (False, True):
                reply = await client.ask({"model": "m", "messages": MESSAGES, "stream": stream})
                assert (reply.status, reply.error["message"]) == (400, "too long")
        assert len(site.upstream.talks) == 2

    through(script, then)


def test_a_refusal_of_the_remote_server_keeps_its_retry_after() -> None:
    async def script(talk: Talk) -> None:
        await talk.answer(b'{"error":{"message":"not now"}}', 409, "application/json", "retry-after: 17")

    async def then(site: Site) -> None:
        for stream in (False, True):
            for headers in ((), (f"idempotency-key: {stream}",)):
                async with site.client() as client:
                    body = {"model": "m", "messages": MESSAGES, "stream": stream}
                    reply = await client.ask(body, "/v1/chat/completions", *headers)
                    assert (reply.status, reply.headers.get("retry-after")) == (409, "17")

    through(script, then)


def test_a_refusal_of_the_remote_server_is_asked_for_again_and_not_replayed() -> None:
    """Only what succeeded is kept for an Idempotency-Key: the same request may be right a moment later."""
    statuses = [400, 404, 409, 422]

    async def script(talk: Talk) -> None:
        refused = len(talk.server.talks) <= len(statuses)
        if refused:
            await talk.answer(b'{"error":{"message":"no"}}', statuses[len(talk.server.talks) - 1])
        else:
            await well(talk)

    async def then(site: Site) -> None:
        async with site.client() as client:
            replies = [
                await client.ask({"model": "m", "messages": MESSAGES}, "/v1/chat/completions", "idempotency-key: k")
                for _ in range(len(statuses) + 2)
            ]
        assert [reply.status for reply in replies] == [*statuses, 200, 200]
        assert ["idempotent-replayed" in reply.headers for reply in replies] == [*[False] * len(statuses), False, True]
        assert replies[-1].body == completion("hello")
        assert len(site.upstream.talks) == len(statuses) + 1

    through(script, then)


def test_a_remote_server_that_fails_is_a_502_and_its_details_stay_inside() -> None:
    async def script(talk: Talk) -> None:
        await talk.answer(b"<html>secret</html>", 500, "text/html")

    async def then(site: Site) -> None:
        async with site.client() as client:
            reply = await client.ask({"model": "m", "messages": MESSAGES, "stream": True})
            assert (reply.status, reply.error["code"]) == (502, "upstream_error")
            assert b"secret" not in reply.body
            assert (await client.ask({"model": "m", "messages": MESSAGES})).status == 502
        served = await site.of(HttpServed, 2)
        assert [one.error_code for one in served] == ["upstream_error"] * 2

    through(script, then, {"retry": RetryConfig(max_attempts=1)})


def test_a_stream_that_breaks_ends_with_an_error_event_and_is_not_begun_again() -> None:
    async def script(talk: Talk) -> None:
        await talk.send(CHUNKED)
        await talk.event(piece("one"))
        talk.close()

    async def then(site: Site) -> None:
        async with site.client() as client:
            reply = await client.ask({"model": "m", "messages": MESSAGES, "stream": True})
            assert reply.status == 200
            first, error, rest = reply.body.split(b"\n\n")
            assert (first + b"\n\n", rest) == (event(piece("one")), b"")
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "upstream_closed"
        assert len(site.upstream.talks) == 1
        served = (await site.of(HttpServed))[0]
        assert (served.outcome, served.error_code) == ("failed", "upstream_closed")

    through(script, then)


def test_a_stream_that_ends_before_it_said_anything_is_an_error() -> None:
    async def script(talk: Talk) -> None:
        await talk.send(CHUNKED)
        await talk.end()

    async def then(site: Site) -> None:
        async with site.client() as client:
            reply = await client.ask({"model": "m", "messages": MESSAGES, "stream": True})
            assert (reply.status, reply.error["code"]) == (502, "upstream_incomplete")

    through(script, then, {"retry": RetryConfig(max_attempts=1)})


def test_a_client_that_leaves_ends_the_work_of_the_remote_server() -> None:
    async def script(talk: Talk) -> None:
        if b'"stream":true' in talk.body:
            await talk.send(CHUNKED)
            await talk.event(piece("one"))
        await talk.gone()

    async def then(site: Site) -> None:
        for number, stream in enumerate((True, False), 1):
            site.upstream.lost.clear()
            async with site.client() as client:
                client.send({"model": "m", "messages": MESSAGES, "stream": stream})
                if stream:
                    await client.reader.readuntil(b"one")
                else:
                    while len(site.upstream.talks) < number:
                        await asyncio.sleep(0.01)
            await asyncio.wait_for(site.upstream.lost.wait(), 5)
            served = (await site.of(HttpServed, number))[-1]
            assert (served.status, served.outcome) == (499, "cancelled")
            assert served.usage is not None
            assert served.usage.prompt_tokens > 0, "the server had the prompt"

    through(script, then)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_whose_client_left_while_it_waited_is_never_begun(is_stream: bool) -> None:
    go = asyncio.Event()

    async def waits(talk: Talk) -> None:
        await go.wait()
        await well(talk)

    async def then(site: Site) -> None:
        pool = site.router._pools["m"]
        (member,) = pool.fleet.members
        assert isinstance(member.replica, RemoteReplica)
        member.replica.capacity = 1
        body = {"model": "m", "messages": MESSAGES, "stream": is_stream}
        async with site.client() as first, site.client() as last:
            first.send(body)
            async with site.client() as leaves:
                while not site.upstream.talks:
                    await asyncio.sleep(0.01)
                leaves.send(body)
                while not len(pool._queue):
                    await asyncio.sleep(0.01)
            while len(pool._queue):
                await asyncio.sleep(0.01)
            last.send(body)
            while not len(pool._queue):
                await asyncio.sleep(0.01)
            go.set()
            assert (await first.reply()).status == (await last.reply()).status == 200
        assert len(site.upstream.talks) == 2
        assert (await site.of(RequestEnded))[0].outcome == "cancelled"

    through(waits, then)


def test_a_slow_reader_holds_back_the_remote_server_and_loses_nothing() -> None:
    flood = Flood()

    async def then(site: Site) -> None:
        async with site.client() as client:
            client.send({"model": "m", "messages": MESSAGES, "stream": True})
            await flood.is_held_back()
            assert flood.num_sent < 18_000_000, "the remote server was not held back"
            async with site.client() as other:  # others are served meanwhile
                assert (await other.ask({"model": "x", "messages": MESSAGES})).status == 404
            reply = await client.reply()
            assert reply.body == flood.whole

    through(flood, then)


def test_a_reader_that_takes_nothing_is_cut_off_and_so_is_its_work() -> None:
    block = event(piece("x" * 10_000))

    async def script(talk: Talk) -> None:
        await talk.send(CHUNKED)
        while True:
            await talk.chunk(block)

    async def then(site: Site) -> None:
        async with site.client() as client:
            client.send({"model": "m", "messages": MESSAGES, "stream": True})
            await asyncio.wait_for(site.upstream.lost.wait(), 10)
            served = (await site.of(HttpServed))[0]
            assert (served.status, served.outcome) == (499, "cancelled")

    through(script, then, send_timeout_s=0.4)


def test_several_requests_on_one_connection_are_answered_in_order() -> None:
    async def script(talk: Talk) -> None:
        number = json.loads(talk.body)["n"]
        await asyncio.sleep(0.05 if number == 1 else 0)
        await talk.answer(completion(str(number)))

    async def then(site: Site) -> None:
        async with site.client() as client:
            for number in (1, 2, 3):
                client.send({"model": "m", "messages": MESSAGES, "n": number})
            replies = [await client.reply() for _ in range(3)]
            assert [reply.body for reply in replies] == [completion(str(number)) for number in (1, 2, 3)]

    through(script, then)
