"""The load generator against a small server on a real socket, and the report made of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest

from inferd.benchmark.dataset import Query, from_file, random_tokens
from inferd.benchmark.load import Connection, Target, closed_loop, find_model, models_of, open_loop
from inferd.benchmark.report import Report, render
from inferd.benchmark.stats import Record, summarise
from inferd.errors import ConfigError, Unauthenticated, Unavailable

Reply = Callable[[int, dict[str, object], asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def three_tokens(number: int, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
    """A stream whose events are cut at awkward places."""
    events = b"".join(b'data: {"choices":[{"index":0,"text":"%d"}]}\n\n' % i for i in range(3))
    events += b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for start in range(0, len(events), 11):
        writer.write(chunk(events[start : start + 11]))
        await writer.drain()
    writer.write(b"0\r\n\r\n")


async def every_second_full(number: int, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
    if number % 2:
        text = b'{"error":{"message":"full"}}'
        writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
    else:
        await three_tokens(number, body, writer)


async def hang_up(number: int, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b'data: {"choices":[{"text":"a"}]}\n\n')
    )
    await writer.drain()
    writer.close()


async def an_error_event(number: int, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunk(b'data: {"error":{"message":"died"}}\n\n')
        + b"0\r\n\r\n"
    )


class Server:
    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.models = b'[{"id":"tiny"}]'
        self.bodies: list[dict[str, object]] = []
        self.num_connections = self.now = self.most_together = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.append(writer)
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(
                    next(line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length"))
                )
                body = await reader.readexactly(length)
                if head.startswith("GET /v1/models"):
                    text = b'{"object":"list","data":%s}' % self.models
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
                    continue
                self.bodies.append(json.loads(body))
                number = len(self.bodies)
                self.now += 1
                self.most_together = max(self.most_together, self.now)
                await asyncio.sleep(0)
                await self.reply(number, json.loads(body), writer)
                self.now -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def running(reply: Reply) -> AsyncIterator[tuple[str, Server]]:
    server = Server(reply)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1", server
    finally:
        listener.close()
        for writer in server.writers:
            writer.close()
        await listener.wait_closed()


def test_a_closed_loop_keeps_its_clients_busy_on_their_own_connections() -> None:
    async def check() -> None:
        async with running(three_tokens) as (url, server):
            assert await find_model(url) == "tiny"
            told: list[Record] = []
            queries = random_tokens(12, input_len=5, output_len=3, vocab_size=100)
            records = await closed_loop(Target(url=url, model="tiny"), queries, 3, told.append)
        assert len(records) == len(told) == 12
        assert server.num_connections == 4  # one of them asked for the models
        assert server.most_together == 3
        assert all(
            record.error is None and (record.prompt_tokens, record.output_tokens) == (7, 3) for record in records
        )
        assert all(
            len(record.gaps_s) == 2 and record.sent_at <= (record.first_at or -1) <= record.ended_at
            for record in records
        )
        body = server.bodies[0]
        assert (body["model"], body["stream"], body["max_tokens"], body["ignore_eos"]) == ("tiny", True, 3, True)
        assert isinstance(body["prompt"], list)
        assert len(body["prompt"]) == 5

    asyncio.run(check())


@pytest.mark.parametrize(
    ("reply", "num_errors", "said"),
    [(every_second_full, 3, "503: full"), (hang_up, 6, "the connection broke"), (an_error_event, 6, "died")],
)
def test_failures_are_counted_with_their_reason_and_the_test_goes_on(reply: Reply, num_errors: int, said: str) -> None:
    async def check() -> None:
        async with running(reply) as (url, _):
            records = await closed_loop(Target(url=url, model="tiny"), [Query(prompt="a")] * 6, 2, lambda record: None)
        summary = summarise(records, kind="closed", load=2)
        assert (summary.num_requests, summary.num_errors) == (6, num_errors)
        assert all(sentence.startswith(said) for sentence in summary.errors)

    asyncio.run(check())


TEXT = b'{"choices":[{"text":"a"}]}'
USAGE = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}'


@pytest.mark.parametrize("field", [b"data: ", b"data:"])
@pytest.mark.parametrize(
    ("events", "tokens", "num_gaps", "error"),
    [
        ((TEXT, TEXT, TEXT, USAGE, b"[DONE]"), (7, 3), 2, None),
        ((TEXT, TEXT, b"[DONE]"), (0, 2), 1, None),  # a server that tells no usage: its pieces are counted
        ((TEXT,), (0, 1), 0, None),
        ((USAGE, b"[DONE]"), (7, 3), 0, None),
        ((USAGE, TEXT), (7, 3), 0, None),  # what comes after the usage leaves it as it was
        ((b'{"choices":[{"text":""}]}', TEXT), (0, 1), 0, None),
        ((b"[DONE]",), (0, 0), 0, "the answer was empty"),
        ((TEXT, b"{"), (0, 1), 0, "the answer was not understood"),
        ((TEXT, b'{"error":{"message":"died"}}', TEXT), (0, 2), 1, "died"),
    ],
)
def test_an_answer_is_measured_by_its_events(
    events: tuple[bytes, ...], tokens: tuple[int, int], num_gaps: int, error: str | None, field: bytes
) -> None:
    text = b": a comment\n" + b"".join(b"%s%s\n\n" % (field, event) for event in events)

    async def answer(number: int, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))

    async def check() -> None:
        async with running(answer) as (url, _):
            (record,) = await closed_loop(Target(url=url, model="tiny"), [Query(prompt="a")], 1, lambda record: None)
        assert (record.prompt_tokens, record.output_tokens) == tokens
        assert len(record.gaps_s) == num_gaps
        assert (record.first_at is not None) == any(b'"text":"a"' in event for event in events)
        assert (record.error or "").startswith(error or "")
        assert (record.error is None) == (error is None)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("header", "closes", "num_connections"),
    [
        (b"Content-Length: %d\r\n", False, 1),
        (b"Content-Length: %d\r\n", True, 3),  # an idle connection that the server closed is made anew
        (b"Content-Length: %d\r\nConnection: close\r\n", True, 3),
        (b"", True, 3),  # the end of the connection is the end of the answer
    ],
)
def test_a_connection_is_used_again_as_long_as_the_server_keeps_it(
    header: bytes, closes: bool, num_connections: int
) -> None:
    text = b"data: %s\n\ndata: %s" % (TEXT, USAGE)

    async def answer(number: int, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + (header % len(text) if header else b"") + b"\r\n" + text)
        await writer.drain()
        if closes:
            writer.close()

    async def check() -> None:
        async with running(answer) as (url, server):
            queries = [Query(prompt="a")] * 3
            records = await closed_loop(Target(url=url, model="tiny"), queries, 1, lambda record: None)
        assert [(record.error, record.output_tokens) for record in records] == [(None, 3)] * 3
        assert server.num_connections == num_connections

    asyncio.run(check())


def test_what_a_target_wants_is_sent_with_every_request() -> None:
    async def check() -> None:
        async with running(three_tokens) as (url, server):
            target = Target(url=url.removeprefix("http://"), model="tiny", ignore_eos=False, temperature=0.5)
            await closed_loop(target, [Query(messages=[{"role": "user", "content": "a"}])], 5, lambda record: None)
        (body,) = server.bodies
        assert "ignore_eos" not in body
        assert "prompt" not in body
        assert (body["temperature"], body["stream_options"]) == (0.5, {"include_usage": True})

    asyncio.run(check())


def test_an_open_loop_uses_connections_that_are_idle() -> None:
    async def check() -> None:
        async with running(three_tokens) as (url, server):
            queries = [Query(prompt="a")] * 8
            await open_loop(Target(url=url, model="tiny"), queries, 10.0, lambda record: None)
        assert server.num_connections < 8

    asyncio.run(check())


def test_an_open_loop_sends_them_all_at_about_its_rate() -> None:
    async def check() -> None:
        async with running(three_tokens) as (url, _):
            records = await open_loop(
                Target(url=url, model="tiny"),
                [Query(messages=[{"role": "user", "content": "a"}])] * 40,
                400.0,
                lambda record: None,
            )
        assert len(records) == 40
        assert max(record.sent_at for record in records) > 0.02

    asyncio.run(check())


@pytest.mark.parametrize(
    ("models", "chosen"),
    [
        (b'[{"id":"vectors","tasks":["embed"]},{"id":"chat","tasks":["generate"]}]', "chat"),
        (b'[{"id":"loading","tasks":null},{"id":"chat","tasks":["generate"]}]', "loading"),
        (b'[{"id":"vectors","tasks":["embed"]}]', "vectors"),  # whose refusal says what it can do
    ],
)
def test_the_model_that_is_meant_without_a_name_writes_text(models: bytes, chosen: str) -> None:
    async def check() -> None:
        async with running(three_tokens) as (url, server):
            server.models = models
            assert await find_model(url) == chosen

    asyncio.run(check())


def test_no_server_is_said_with_the_remedy() -> None:
    with pytest.raises(Unavailable, match="inferd serve"):
        asyncio.run(find_model("http://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (b"200 OK", b'{"data":[]}', Unavailable, "lists no model"),
        (b"200 OK", b"no JSON", Unavailable, "lists no model"),
        (b"401 Unauthorized", b'{"error":"no key"}', Unauthenticated, "--api-key"),
        (b"403 Forbidden", b"no", Unauthenticated, "--api-key"),
        (b"500 Internal Server Error", b'{"message":"lost"}', Unavailable, "500: lost"),
    ],
)
def test_a_server_that_lists_no_models_is_told(status: bytes, body: bytes, kind: type[Exception], said: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        writer.close()

    async def check() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            await find_model(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    with pytest.raises(kind, match=said):
        asyncio.run(check())


def test_models_that_write_text_are_listed_first() -> None:
    async def check() -> None:
        async with running(three_tokens) as (url, server):
            server.models = b'[{"id":"b","tasks":["embed"]},{"id":"c","tasks":["generate"]},{"id":"a"}]'
            assert await models_of(Connection(url, 10.0), url) == ["c", "a", "b"]

    asyncio.run(check())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no prompts"),
        ("\n \n", "has no prompts"),
        ('{"prompt": "a"}\n{}\n', "line 2: give either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "line 1: give either prompt or messages"),
        (None, "cannot be read"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        from_file(path, 1, output_len=9)


@pytest.mark.parametrize(("vocab_size", "lowest"), [(100, 25), (1024, 256), (2000, 256)])
def test_random_prompts_leave_out_the_lowest_ids(vocab_size: int, lowest: int) -> None:
    queries = random_tokens(300, input_len=100, output_len=1, vocab_size=vocab_size)
    ids = {token for query in queries for token in query.prompt or () if isinstance(token, int)}
    assert ids == set(range(lowest, vocab_size))


def test_prompts_come_from_a_file_and_its_mistakes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}], "max_tokens": 5}\n')
    queries = from_file(path, 3, output_len=9)
    assert [(query.path, query.max_tokens) for query in queries] == [
        ("/v1/completions", 9),
        ("/v1/chat/completions", 5),
        ("/v1/completions", 9),
    ]
    path.write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    with pytest.raises(ConfigError, match="line 2"):
        from_file(path, 1, output_len=9)


def test_random_prompts_are_all_different_and_repeatable() -> None:
    one, other = (random_tokens(50, input_len=8, output_len=1, vocab_size=1000) for _ in range(2))
    assert one == other
    assert len({tuple(query.prompt or ()) for query in one}) == 50


def test_the_report_stands_alone_and_is_well_formed() -> None:
    record = Record(sent_at=0.0, first_at=0.1, ended_at=1.0, gaps_s=(0.3, 0.6), prompt_tokens=5, output_tokens=3)
    failed = Record(sent_at=0.0, ended_at=1.0, error="<script>")
    runs = [summarise([record] * n + [failed], kind="closed", load=n) for n in (1, 8, 32)]
    page = render(Report(url="http://x", model="a<b", dataset="d", started_at="now", runs=runs))

    class Checker(HTMLParser):
        depth: list[str] = []
        fetched: list[str] = []
        num_charts = 0

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.num_charts += tag == "svg"
            self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]
            if tag not in ("meta", "br", "line", "circle", "polyline"):
                self.depth.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag not in ("meta", "line", "polyline", "circle"):
                assert self.depth.pop() == tag

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            """Closed by itself."""

    checker = Checker()
    checker.feed(page)
    assert (checker.depth, checker.fetched, checker.num_charts) == ([], [], 4)
    assert "<script>" not in page
    assert "a&lt;b" in page
