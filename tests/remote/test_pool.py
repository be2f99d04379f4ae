"""Connections to one remote server: when one is used again, when another is made, and what a pause holds back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from tests.worker.watching import until

from inferd.errors import UpstreamFailed
from inferd.remote.connection import Head, Headers
from inferd.remote.origin import Origin, Timeouts
from inferd.remote.pool import Exchange, Pool

TIMEOUTS = Timeouts(connect_s=10.0, first_byte_s=20.0, idle_s=20.0)
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LARGE = 20_000_000


class Heard(Exchange):
    """An exchange that keeps what it hears."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.status = 0
        self.is_over = False
        self.error: UpstreamFailed | None = None

    def answer_whole(self, head: Head, body: bytes) -> None:
        self.answer_head(head.status, head.headers)
        self.answer_data(body)
        self.answer_ended()

    def answer_head(self, status: int, headers: Headers) -> None:
        self.status = status

    def answer_data(self, data: bytes) -> None:
        assert not self.is_over
        self.num_bytes += len(data)

    def answer_ended(self) -> None:
        assert not self.is_over
        self.ended()
        self.is_over = True

    def answer_failed(self, error: UpstreamFailed, *, is_stale: bool) -> None:
        self.answer_broken(error)

    def answer_broken(self, error: UpstreamFailed) -> None:
        self.error = error
        self.answer_ended()


class Server:
    """A server of scripted answers. ``ended``: how many of its connections the other side has closed."""

    def __init__(self, answer: bytes, after: Callable[[], Awaitable[object]] | None) -> None:
        self.answer = answer
        self.after = after
        self.num_made = self.num_ended = self.num_asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_made += 1
        try:
            while (await reader.readuntil(b"\r\n\r\n")).endswith(b"\r\n\r\n"):
                self.num_asked += 1
                if self.after is not None:
                    await self.after()
                writer.write(self.answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_ended += 1
            writer.close()


@asynccontextmanager
async def connecting(
    answer: bytes = OK, *, most: int = 10, after: Callable[[], Awaitable[object]] | None = None
) -> AsyncIterator[tuple[Pool, Server]]:
    server = Server(answer, after)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        pool = Pool(Origin("127.0.0.1", port, False, ""), TIMEOUTS, most)
        yield pool, server
        await pool.close()
        await until(lambda: server.num_ended == server.num_made, "every connection is closed")
        assert pool.num_connections == 0


async def asked(pool: Pool, *, fresh: bool = False) -> Heard:
    heard = Heard()
    pool.send(REQUEST, heard, fresh=fresh)
    await until(lambda: heard.is_over, "the answer has ended")
    return heard


def large(body: int = LARGE) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % body + bytes(body)


def test_requests_one_after_the_other_share_a_connection_and_at_once_they_do_not() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        async with connecting(after=gate.wait) as (pool, server):
            gate.set()
            for _ in range(3):
                heard = await asked(pool)
                assert (heard.status, heard.num_bytes, heard.error) == (200, 2, None)
            assert (server.num_made, server.num_asked) == (1, 3)
            gate.clear()
            both = [Heard(), Heard()]
            for heard in both:
                pool.send(REQUEST, heard)
            await until(lambda: server.num_made == 2, "the second one has a connection of its own")
            gate.set()
            await until(lambda: all(heard.is_over for heard in both), "both are answered")
            assert pool.num_connections == 2
            await asked(pool, fresh=True)
            assert server.num_made == 3

    asyncio.run(scenario())


def test_beyond_the_most_connections_the_one_that_is_idle_for_longest_is_closed() -> None:
    async def scenario() -> None:
        async with connecting(most=2) as (pool, server):
            for number in (1, 2):
                await asked(pool, fresh=True)
                assert (pool.num_connections, server.num_ended) == (number, 0)
            for number in (3, 4):
                await asked(pool, fresh=True)
                assert server.num_made == number
                num_closed = number - 2
                await until(lambda closed=num_closed: server.num_ended == closed, "one is closed")  # type: ignore[misc]
                assert pool.num_connections == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(("seconds", "num_made"), [(1, 2), (60, 1)])
def test_a_connection_that_its_server_is_about_to_close_is_not_used_again(seconds: int, num_made: int) -> None:
    async def scenario() -> None:
        answer = OK.replace(b"\r\n\r\n", b"\r\nKeep-Alive: timeout=%d\r\n\r\n" % seconds)
        async with connecting(answer) as (pool, server):
            for _ in range(2):
                assert (await asked(pool)).error is None
            assert server.num_made == num_made

    asyncio.run(scenario())


def test_an_answer_that_is_to_be_the_last_ends_its_connection() -> None:
    async def scenario() -> None:
        async with connecting(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")) as (pool, server):
            for number in (1, 2):
                assert (await asked(pool)).error is None
                assert server.num_made == number
                await until(lambda: pool.num_connections == 0, "the connection is closed")

    asyncio.run(scenario())


@pytest.mark.parametrize("is_connected", [False, True])
def test_nothing_of_an_answer_is_heard_while_it_is_paused(is_connected: bool) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        async with connecting(large(), after=gate.wait) as (pool, server):
            heard = Heard()
            pool.send(REQUEST, heard)
            if is_connected:
                await until(lambda: server.num_asked == 1, "the request has come")
            heard.pause()
            gate.set()
            await until(lambda: server.num_asked == 1, "the request has come")
            await asyncio.sleep(0.2)
            assert (heard.status, heard.num_bytes) == (0, 0)
            heard.resume()
            await until(lambda: heard.num_bytes > 0, "the answer goes on")
            heard.pause()
            held = heard.num_bytes
            await asyncio.sleep(0.2)
            assert heard.num_bytes == held < LARGE
            heard.resume()
            await until(lambda: heard.is_over, "the answer has ended")
            assert (heard.num_bytes, heard.error) == (LARGE, None)
            assert (await asked(pool)).num_bytes == LARGE
            assert server.num_made in (1, 2), "a last read that was full ends the connection"

    asyncio.run(scenario())


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_cancelled_request_is_heard_of_no_more_and_its_connection_ends(is_connected: bool) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        async with connecting(after=gate.wait) as (pool, server):
            heard = Heard()
            pool.send(REQUEST, heard)
            if is_connected:
                await until(lambda: server.num_asked == 1, "the request has come")
            heard.cut()
            heard.cut()
            await until(lambda: pool.num_connections == 0, "the connection is closed")
            gate.set()
            await asyncio.sleep(0.05)
            assert (heard.status, heard.is_over) == (0, False)

    asyncio.run(scenario())


def test_a_pool_that_is_closed_ends_what_is_under_way() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        async with connecting(after=gate.wait) as (pool, server):
            heard = Heard()
            pool.send(REQUEST, heard)
            await until(lambda: server.num_asked == 1, "the request has come")
            await pool.close()
            assert pool.num_connections == 0
            gate.set()

    asyncio.run(scenario())
