"""What a request took is given back when it is over, and not when the collector comes by.

An error that a frame of its own traceback holds, a task that its owner holds, a parser that calls back: such
circles keep a request, prompt and all, for thousands of others. Here the collector is off, and finds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvloop
from tests.heap import refreeze_heap
from tests.remote.fault_server import CHUNKED, DONE, FaultServer, Talk, completion, piece
from tests.tiers import THOROUGH
from tests.worker.watching import routing, until

from inferd.cache.memory import MemoryCache
from inferd.config import (
    CacheConfig,
    Config,
    ModelCacheConfig,
    ModelConfig,
    QueueConfig,
    RemoteSettings,
    RetryConfig,
    ServerConfig,
)
from inferd.gateway.call import Call
from inferd.gateway.server import create_app
from inferd.http.connection import Connection
from inferd.http.exchange import Exchange
from inferd.http.listener import HttpServer
from inferd.router.router import Router
from inferd.router.status import ModelStatus
from inferd.tenancy.idempotency import IdempotencyStore

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
REMOTE = re.compile("FaultServer|StreamReader")  # coroutines of the remote server
PER_REQUEST = (Call, Exchange, Connection)
LONG = "pace=0.01"  # a prompt whose answer takes its time
NEVER = "gate=/nowhere/at/all"  # a prompt whose answer does not begin


class Site:
    """A gateway and a router in this process: the model ``tiny`` with a real worker, ``never``, which never becomes
    ready and lets one request wait, and ``there``, which a remote server answers for."""

    def __init__(self, server: HttpServer, router: Router) -> None:
        self.server = server
        self.router = router
        self._always = self._tasks()

    def _tasks(self) -> set[asyncio.Task[Any]]:
        """But those of the remote server, which keeps its connections."""
        return {task for task in asyncio.all_tasks() if not REMOTE.search(repr(task.get_coro()))}

    @contextlib.asynccontextmanager
    async def asked(
        self, path: str, body: object, *headers: str, method: str = "POST"
    ) -> AsyncIterator[asyncio.StreamReader]:
        """A request on a connection of its own, which is cut at the end of the block."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", *headers]
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        try:
            yield reader
        finally:
            writer.transport.abort()

    async def ask(self, path: str, body: object, *headers: str, method: str = "POST") -> tuple[int, bytes]:
        async with self.asked(path, body, *headers, method=method) as reader:
            head, _, answer = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), answer

    async def told(self, status: int, path: str, body: object, *headers: str) -> None:
        found, answer = await self.ask(path, body, *headers)
        assert found == status, answer

    async def is_over(self) -> None:
        """No client is connected, and every task that this caused has ended."""
        await until(lambda: not self.server.connections, "all connections are gone")
        await until(lambda: not self._tasks() - self._always, "all tasks have ended")
        await until(lambda: not any(m.in_flight for m in self.router.models()), "the workers have let go as well")
        for _ in range(10):
            await asyncio.sleep(0)


async def remote_answer(talk: Talk) -> None:
    """As the prompt says."""
    if b"refuse" in talk.body:
        await talk.answer(b'{"error":{"message":"no","type":"x","code":"y"}}', 400)
    elif b"break" in talk.body:
        if b'"stream":true' in talk.body:
            await talk.send(CHUNKED)
            await talk.event(piece("one"))
        talk.reset()
    elif b'"stream":true' in talk.body:
        await talk.send(CHUNKED)
        await talk.event(piece("one"))
        if b"wait" in talk.body:
            await asyncio.Event().wait()
        await talk.chunk(DONE)
        await talk.end()
    else:
        await talk.answer(completion("hello"))


@contextlib.asynccontextmanager
async def site() -> AsyncIterator[Site]:
    never = ModelConfig(source=NEVER, queue=QueueConfig(max_requests=1))
    tiny = ModelConfig(source="tiny", cache=ModelCacheConfig(enabled=True))
    async with contextlib.AsyncExitStack() as stack:
        remote = await stack.enter_async_context(FaultServer(remote_answer).running())
        there = ModelConfig(
            source=f"openai:{remote.url}", remote=RemoteSettings(model="m"), retry=RetryConfig(max_attempts=1)
        )
        config = Config(
            models={"tiny": tiny, "never": never, "there": there},
            server=ServerConfig(port=0, grace_s=1),
            cache=CacheConfig(max_entry_bytes=4096),
        )
        router, witness = await stack.enter_async_context(routing(config, until_ready=False))
        await until(lambda: status(router, "tiny").replicas_ready == 1, "the replica is ready")
        await until(lambda: status(router, "there").replicas_ready == 1, "the remote server is known to be there")
        app = create_app(router, config, witness, cache=MemoryCache(config.cache), idempotency=IdempotencyStore(60))
        server = HttpServer(app, config.server)
        async with server.running():
            yield Site(server, router)


def status(router: Router, name: str) -> ModelStatus:
    return next(status for status in router.models() if status.name == name)


def chat(text: str = "hello", **more: object) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def texts(*prompts: str, **more: object) -> dict[str, Any]:
    return {"model": "tiny", "prompt": list(prompts), "max_tokens": 4, **more}


async def answered(site: Site) -> None:
    await site.told(200, CHAT, chat())


async def streamed(site: Site) -> None:
    await site.told(200, CHAT, chat(stream=True))


async def several_prompts(site: Site) -> None:
    await site.told(200, TEXT, texts("a", "b"))
    await site.told(200, TEXT, texts("a", "b", stream=True))


async def refused_by_the_worker(site: Site) -> None:
    await site.told(400, CHAT, chat("invalid"))
    await site.told(400, CHAT, chat("invalid", stream=True))


async def one_of_several_refused(site: Site) -> None:
    await site.told(400, TEXT, texts(NEVER, "invalid"))
    await site.told(400, TEXT, texts(NEVER, "invalid", stream=True))
    await site.told(200, TEXT, texts("pace=0.02", "raise@2", stream=True))
    await site.told(500, TEXT, texts("hello", "raise@2"))


async def failed_in_the_middle(site: Site) -> None:
    for streams in (False, True):
        status, answer = await site.ask(CHAT, chat("pace=0.02 raise@2", stream=streams))
        assert (status, b'"error"' in answer) == ((200, True) if streams else (500, True))


async def not_understood(site: Site) -> None:
    await site.told(400, CHAT, b'{"model": "tiny", "messages": [')
    await site.told(404, CHAT, chat(model="nobody"))
    await site.told(404, "/nowhere", b"")
    await site.told(400, CHAT, chat(temperature=-1))


async def left_in_the_middle(site: Site) -> None:
    async with site.asked(CHAT, chat(LONG, stream=True, max_tokens=400)) as reader:
        await reader.readuntil(b"data: ")
    async with site.asked(CHAT, chat(LONG, max_tokens=400)):
        await until(lambda: status(site.router, "tiny").in_flight == 1, "it is worked on")


async def left_in_the_queue_and_refused_by_it(site: Site) -> None:
    async with site.asked(CHAT, chat(model="never")):
        await until(lambda: status(site.router, "never").waiting == 1, "it waits")
        await site.told(503, CHAT, chat(model="never"))
        await site.told(503, CHAT, chat(model="never", stream=True))


async def asked_again(site: Site) -> None:
    for _ in range(2):
        await site.told(200, TEXT, texts("again", temperature=0))
        await site.told(200, TEXT, texts("once"), "idempotency-key: one")
    await site.told(400, TEXT, texts("invalid", temperature=0))
    await site.told(400, TEXT, texts("invalid"), "idempotency-key: two")


async def cancelled_with_nobody_waiting(site: Site) -> None:
    _, handle = await site.ask(CHAT, chat(LONG, max_tokens=400), "prefer: respond-async")
    where = f"/v1/async/{json.loads(handle)['id']}"
    await until(lambda: status(site.router, "tiny").in_flight == 1, "it is worked on")
    assert (await site.ask(where, b"", method="DELETE"))[0] == 204
    _, found = await site.ask(where, b"", "prefer: wait=10", method="GET")
    assert json.loads(found)["status"] == "cancelled"


async def relayed(site: Site) -> None:
    for streams in (False, True):
        await site.told(200, CHAT, chat(model="there", stream=streams))
        await site.told(400, CHAT, chat("refuse", model="there", stream=streams))
        await site.told(200, TEXT, texts("one", "two", model="there", stream=streams))
        await site.told(200, CHAT, chat(model="there", stream=streams), f"idempotency-key: {streams}")


async def relayed_and_left(site: Site) -> None:
    async with site.asked(CHAT, chat("wait", model="there", stream=True)) as reader:
        await reader.readuntil(b"data: ")


async def relayed_and_broken(site: Site) -> None:
    status, answer = await site.ask(CHAT, chat("break", model="there", stream=True))
    assert (status, b'"error"' in answer) == (200, True)
    status, _ = await site.ask(CHAT, chat("break", model="there"))
    assert status in (502, 503)


KINDS = (
    answered,
    streamed,
    several_prompts,
    refused_by_the_worker,
    one_of_several_refused,
    failed_in_the_middle,
    not_understood,
    left_in_the_middle,
    left_in_the_queue_and_refused_by_it,
    asked_again,
    cancelled_with_nobody_waiting,
    relayed,
    relayed_and_left,
    relayed_and_broken,
)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Within the block garbage is found and kept, in ``gc.garbage``, when it is searched for, and not before."""
    flags = gc.get_debug()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
        gc.enable()


def ours(found: list[Any]) -> Counter[str]:
    return Counter(
        f"{type(thing).__module__}.{type(thing).__qualname__}"
        for thing in found
        if type(thing).__module__.startswith("inferd.")
    )


@THOROUGH
def test_a_request_that_is_over_has_left_nothing_behind() -> None:
    left: dict[str, Counter[str]] = {}

    async def main() -> None:
        async with site() as running:
            for kind in KINDS:
                await kind(running)  # what is made once is made now
                await running.is_over()
                with uncollected():
                    await kind(running)
                    await running.is_over()
                    gc.collect()
                    found = ours(gc.garbage)
                found += ours([thing for thing in gc.get_objects() if issubclass(type(thing), PER_REQUEST)])
                if found:
                    left[kind.__name__] = found

    gc.freeze()  # what was there before is none of it, and need not be searched each time
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    finally:
        refreeze_heap()
    assert not left
