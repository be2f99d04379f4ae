"""The cache in a real Redis server: shared, and free when the server is not there."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.stopwatch import Stopwatch

from inferd.cache.key import cache_key
from inferd.cache.memory import MemoryCache
from inferd.cache.open import open_cache
from inferd.cache.port import CachedAnswer
from inferd.config import CacheConfig
from inferd.errors import ConfigError
from inferd.events import CacheLooked, Event

pytest.importorskip("redis", reason="the package redis is not installed")
from inferd.cache.redis import FAILURES_TO_OPEN, PATIENCE_S, RedisCache

BINARY = shutil.which("redis-server") or shutil.which("valkey-server")
ANSWER = CachedAnswer(b"application/json", b'{"choices": []}\x00\xff', 3, 4)


def key(tenant: str, number: int) -> bytes:
    return cache_key(tenant, "m", "f", "/p", b'{"n": %d}' % number)


class Server:
    """A Redis server of our own, on a Unix socket."""

    def __init__(self, folder: Path) -> None:
        assert BINARY is not None
        self.path = folder / "redis.sock"
        command = [BINARY, "--port", "0", "--unixsocket", str(self.path), "--save", "", "--dir", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.url = f"unix://{self.path}"
        deadline = time.monotonic() + 10
        while not self._listens():
            assert time.monotonic() < deadline, "redis-server did not start"
            assert self.process.poll() is None, "redis-server ended"
            time.sleep(0.01)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.path)) == 0

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a server that works may take longer than a request would wait for it."""
    monkeypatch.setattr("inferd.cache.redis.PATIENCE_S", 30.0)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """For tests that stop or kill it."""
    if BINARY is None:
        pytest.skip("neither redis-server nor valkey-server is installed")
    server = Server(tmp_path)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    given_url = os.environ.get("INFERD_TEST_REDIS_URL")
    if given_url:
        yield given_url
        return
    if BINARY is None:
        pytest.skip("neither redis-server nor valkey-server is installed, and INFERD_TEST_REDIS_URL is not set")
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server.url
    server.stop()


@asynccontextmanager
async def opened(url: str, events: list[Event] | None = None) -> AsyncIterator[RedisCache]:
    cache = open_cache(CacheConfig(url=url, max_entry_bytes=1000), (events if events is not None else []).append)
    assert isinstance(cache, RedisCache)
    try:
        yield cache
    finally:
        await cache.close()


async def forget(cache: RedisCache, tenant: str) -> None:
    """What another run of these tests has left at a server that they share."""
    for number in range(4):
        await cache._client.delete(f"inferd:cache:2:{key(tenant, number).hex()}")


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_a_hit_is_what_was_put_byte_for_byte_for_every_gateway(url: str) -> None:
    async def test() -> None:
        async with opened(url) as one, opened(url) as other:
            await forget(one, "bytes")
            assert await one.get(key("bytes", 1)) is None
            await one.put(key("bytes", 1), ANSWER, 60)
            assert await one.get(key("bytes", 1)) == ANSWER
            assert await other.get(key("bytes", 1)) == ANSWER
            assert await other.get(key("another", 1)) is None

    run(test())


def test_an_answer_expires(url: str) -> None:
    async def test() -> None:
        async with opened(url) as cache:
            await cache.put(key("short", 1), ANSWER, 60)
            await cache.put(key("short", 2), ANSWER, 0.001)
            for number, least, most in ((1, 55_000, 60_000), (2, -2, 1)):
                left = await cache._client.pttl(f"inferd:cache:2:{key('short', number).hex()}")
                assert least <= left <= most

    run(test())


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "get"]), st.sampled_from("ab"), st.integers(0, 3), st.integers(0, 1100)),
        max_size=25,
    )
)
def test_it_says_what_the_cache_in_memory_says(url: str, did: list[tuple[str, str, int, int]]) -> None:
    async def test() -> None:
        twin = MemoryCache(CacheConfig(max_entry_bytes=1000))
        async with opened(url) as cache:
            for tenant in "ab":
                await forget(cache, tenant)
            for mark, (what, tenant, number, size) in enumerate(did):
                if what == "put":
                    answer = CachedAnswer(b"text/plain", bytes([mark]) * size)
                    await cache.put(key(tenant, number), answer, 60)
                    if size + 10 <= 1000:  # a larger one displaces nothing here; in memory it does
                        await twin.put(key(tenant, number), answer, 60)
                else:
                    assert await cache.get(key(tenant, number)) == await twin.get(key(tenant, number))

    run(test())


def test_a_server_that_hangs_costs_a_bounded_wait_and_then_nothing(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        events: list[Event] = []
        async with opened(own_server.url, events) as cache:
            await cache.put(key("a", 1), ANSWER, 60)
            os.kill(own_server.process.pid, signal.SIGSTOP)
            monkeypatch.setattr("inferd.cache.redis.PATIENCE_S", PATIENCE_S)
            for _ in range(FAILURES_TO_OPEN):
                watch = Stopwatch()
                assert await cache.get(key("a", 1)) is None
                assert watch.seconds < PATIENCE_S + 0.2
            assert cache.is_open
            watch = Stopwatch()
            for _ in range(1000):
                assert await cache.get(key("a", 1)) is None
                await cache.put(key("a", 1), ANSWER, 60)
            assert watch.seconds < 0.2, "a server that is left alone costs nothing"
            assert events == [CacheLooked(model="", result="error")] * FAILURES_TO_OPEN
            os.kill(own_server.process.pid, signal.SIGCONT)
            monkeypatch.setattr("inferd.cache.redis.PATIENCE_S", 30.0)
            async with asyncio.timeout(10):
                while cache.is_open:
                    await asyncio.sleep(0.01)
            assert await cache.get(key("a", 1)) == ANSWER

    run(test())


def test_a_server_that_is_gone_is_a_miss_and_is_found_again(own_server: Server, tmp_path: Path) -> None:
    async def test() -> None:
        events: list[Event] = []
        async with opened(own_server.url, events) as cache:
            await cache.put(key("a", 1), ANSWER, 60)
            own_server.stop()
            own_server.path.unlink(missing_ok=True)
            for _ in range(FAILURES_TO_OPEN + 2):
                assert await cache.get(key("a", 1)) is None
            assert cache.is_open
            own_server.process = Server(tmp_path).process
            async with asyncio.timeout(15):
                while cache.is_open:
                    await asyncio.sleep(0.01)
            assert await cache.get(key("a", 1)) is None  # it has lost everything
            await cache.put(key("a", 1), ANSWER, 60)
            assert await cache.get(key("a", 1)) == ANSWER
        assert all(event == CacheLooked(model="", result="error") for event in events)

    run(test())


def test_bytes_that_are_no_answer_are_a_miss(url: str) -> None:
    async def test() -> None:
        events: list[Event] = []
        async with opened(url, events) as cache:
            await cache.put(key("odd", 1), ANSWER, 60)
            await cache._client.set(f"inferd:cache:2:{key('odd', 1).hex()}", b"\x80\x04cos\nsystem\n")
            assert await cache.get(key("odd", 1)) is None
        assert events == [CacheLooked(model="", result="error")]

    run(test())


def test_closing_while_the_server_is_gone_ends(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened(f"unix://{tmp_path}/nobody.sock") as cache:
            for _ in range(FAILURES_TO_OPEN):
                assert await cache.get(key("a", 1)) is None
            assert cache.is_open

    run(test())


def test_without_a_url_answers_are_kept_in_memory() -> None:
    assert isinstance(open_cache(CacheConfig()), MemoryCache)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "valkey", "valkeys"])
def test_every_scheme_that_the_configuration_allows_is_one(scheme: str) -> None:
    async def test() -> None:
        async with opened(f"{scheme}://localhost:1/0"):
            pass

    run(test())


def test_a_url_of_something_else_is_refused_without_being_repeated() -> None:
    with pytest.raises(ConfigError) as refused:
        open_cache(CacheConfig(url="http://user:secret@host"))
    assert "secret" not in refused.value.message
