"""What is charged is what was computed, and ledger, log and metrics agree, whatever ends a request.

Real workers around the tiny backend, which notes every token in a file; a real ledger; a real observer. Requests come
over every door and end in every way, at random and at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from tests.gateway.grpc.messages import message_type
from tests.gateway.grpc.running import SERVICE, text_request
from tests.remote.fault_server import CHUNKED, DONE, FaultServer, Talk, completion, piece
from tests.tiers import THOROUGH, sample
from tests.worker.watching import IMPATIENT, TINY_WORKER, until

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
    StateConfig,
)
from inferd.events import Event, HttpServed
from inferd.gateway.context import Context
from inferd.gateway.grpc.server import GrpcServer
from inferd.gateway.server import create_app
from inferd.http.listener import HttpServer, reserve
from inferd.observe import Observer
from inferd.router.router import Router
from inferd.tenancy.control import Control
from inferd.tenancy.keys import KeySpec
from inferd.tenancy.principal import OPERATOR

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/v2/models/tiny/generate"
Sums = tuple[int, int]  # tokens of prompts and of answers


class Site:
    """A whole server in this process, but for the workers."""

    def __init__(
        self,
        http: HttpServer,
        grpc_server: GrpcServer,
        router: Router,
        control: Control,
        observer: Observer,
        room: Context,
    ) -> None:
        self.http = http
        self.grpc = grpc_server
        self.room = room
        self.router = router
        self.control = control
        self.observer = observer
        self.lines = io.StringIO()
        self.served: list[HttpServed] = []
        self.keys: list[str] = []

    @contextlib.asynccontextmanager
    async def asked(
        self, path: str, body: object, *headers: str, method: str = "POST", key: int = 0
    ) -> AsyncIterator[asyncio.StreamReader]:
        """A request on a connection of its own, which is cut at the end of the block."""
        data = b"" if body is None else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http.port)
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", f"x-api-key: {self.keys[key]}"]
        lines += [*headers, "content-type: application/json", f"content-length: {len(data)}"]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        try:
            yield reader
        finally:
            writer.transport.abort()

    async def ask(self, path: str, body: object, *headers: str, method: str = "POST", key: int = 0) -> bytes:
        async with self.asked(path, body, *headers, method=method, key=key) as reader:
            return await asyncio.wait_for(reader.read(), 30)

    def logged(self) -> Sums:
        usages = [event.usage for event in self.served if event.usage is not None]
        return sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)

    def written(self) -> Sums:
        """What the log's lines say."""
        lines = [json.loads(line) for line in self.lines.getvalue().splitlines()]
        usages = [line["usage"] for line in lines if line["event"] == "http" and line.get("usage")]
        return sum(u["prompt_tokens"] for u in usages), sum(u["completion_tokens"] for u in usages)

    async def ledger(self) -> Sums:
        [row] = await self.control.usage(by=())
        return row.prompt_tokens, row.completion_tokens

    def metrics(self) -> Sums:
        page = self.observer.render_metrics().decode()
        found = {"inferd_prompt_tokens": 0.0, "inferd_generation_tokens": 0.0}
        for family in text_string_to_metric_families(page):
            if family.name in found:
                found[family.name] += sum(s.value for s in family.samples if s.name == f"{family.name}_total")
        return int(found["inferd_prompt_tokens"]), int(found["inferd_generation_tokens"])


async def remote_answer(talk: Talk) -> None:
    if b"break" in talk.body:
        await talk.send(CHUNKED)
        await talk.event(piece("one"))
        talk.reset()
    elif b'"stream":true' in talk.body or b'"stream": true' in talk.body:
        await talk.send(CHUNKED)
        await talk.event(piece("one"))
        if b"wait" in talk.body:
            await asyncio.Event().wait()
        await talk.chunk(DONE)
        await talk.end()
    else:
        await talk.answer(completion("hello"))


@contextlib.asynccontextmanager
async def site(folder: Path, *, hedge_after_s: float | None = None, resumes: bool = False) -> AsyncIterator[Site]:
    async with contextlib.AsyncExitStack() as stack:
        remote = await stack.enter_async_context(FaultServer(remote_answer).running())
        there = ModelConfig(source=f"openai:{remote.url}", remote=RemoteSettings(model="m"))
        tiny = ModelConfig(
            source=f"tiny books={folder / 'books'}",
            replicas=2,
            queue=QueueConfig(max_requests=24),
            cache=ModelCacheConfig(enabled=True),
            retry=RetryConfig(max_attempts=2, hedge_after_s=hedge_after_s),
            resume_streams=resumes,
        )
        config = Config(
            models={"tiny": tiny, "there": there},
            server=ServerConfig(port=0, grpc_port=0, grace_s=1),
            cache=CacheConfig(max_entry_bytes=4096),
            state=StateConfig(data_dir=str(folder / "state")),
        )
        lines = io.StringIO()
        observer = Observer(models=["tiny", "there"], stream=lines)
        stack.callback(observer.close)
        served: list[HttpServed] = []

        def emit(event: Event) -> None:
            if isinstance(event, HttpServed):
                served.append(event)
            observer.emit(event)

        control = Control(config, emit)
        await control.start()
        stack.push_async_callback(control.close)
        router = Router(config, emit, command=TINY_WORKER, patience=IMPATIENT)
        await router.start()
        stack.push_async_callback(router.stop)
        await until(lambda: all(m.replicas_ready == m.replicas for m in router.models()), "the replicas are ready")
        app = create_app(
            router,
            config,
            emit,
            door=control.door,
            cache=MemoryCache(config.cache),
            idempotency=control.idempotency,
        )
        reserved = reserve(config.server)
        assert reserved is not None
        grpc_server = GrpcServer(app, config.server, reserved)
        await grpc_server.start()
        serving = asyncio.create_task(grpc_server.serve())
        http = HttpServer(app, config.server)
        async with http.running():
            made = Site(http, grpc_server, router, control, observer, app.context)
            made.lines, made.served = lines, served
            for tenant in ("a", "b"):
                made.keys.append((await control.create_key(KeySpec(tenant=tenant, tpm=10**9), OPERATOR)).key)
            yield made
        grpc_server.stop()
        grpc_server.stop(now=True)
        await serving


# -- ways to ask and ways to end -------------------------------------------------------------------

Chance = random.Random
Way = Callable[[Site, Chance], Awaitable[object]]
_numbers = itertools.count()


def prompt(chance: Chance, *words: str) -> str:
    """As many words as tokens, no two prompts alike."""
    return " ".join([*words, *(f"w{next(_numbers)}" for _ in range(chance.randint(1, 9)))])


def chat(chance: Chance, *words: str, **more: object) -> dict[str, Any]:
    text = prompt(chance, *words)
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": chance.randint(1, 9),
        **more,
    }


def key(chance: Chance) -> int:
    return chance.randrange(2)


async def answered(site: Site, chance: Chance) -> None:
    await site.ask(CHAT, chat(chance, stream=chance.random() < 0.5, n=chance.randint(1, 3)), key=key(chance))


async def several_prompts(site: Site, chance: Chance) -> None:
    last = chance.choice(["", "invalid", "raise@1", "refused"])
    prompts = [prompt(chance, "pace=0.002") for _ in range(chance.randint(1, 3))] + [prompt(chance, *last.split())]
    await site.ask(TEXT, {"model": "tiny", "prompt": prompts, "stream": chance.random() < 0.5}, key=key(chance))


async def failed(site: Site, chance: Chance) -> None:
    word = chance.choice(["invalid", "defect", "refused", "raise", "raise@2"])
    await site.ask(CHAT, chat(chance, word, stream=chance.random() < 0.5), key=key(chance))


async def left(site: Site, chance: Chance) -> None:
    """The client leaves: before anything, in the queue, in the middle."""
    body = chat(chance, "pace=0.003", stream=chance.random() < 0.5, max_tokens=400)
    async with site.asked(CHAT, body, key=key(chance)) as reader:
        if body["stream"] and chance.random() < 0.7:
            with contextlib.suppress(asyncio.IncompleteReadError):
                for _ in range(chance.randint(1, 4)):
                    await asyncio.wait_for(reader.readuntil(b"data: "), 30)
        for _ in range(chance.randint(0, 30)):
            await asyncio.sleep(0)


async def too_late(site: Site, chance: Chance) -> None:
    body = chat(chance, "pace=0.003", stream=chance.random() < 0.5, max_tokens=400)
    await site.ask(CHAT, body, f"x-inferd-timeout: {chance.uniform(0.02, 0.1):.3f}", key=key(chance))


async def in_the_background(site: Site, chance: Chance) -> None:
    """A handle, and sometimes a DELETE while it runs."""
    whose = key(chance)
    is_cancelled = chance.random() < 0.7
    more = {"max_tokens": 400} if is_cancelled else {}
    answer = await site.ask(CHAT, chat(chance, "pace=0.003", **more), "prefer: respond-async", key=whose)
    handle = json.loads(answer.partition(b"\r\n\r\n")[2])
    if "id" not in handle:
        return
    if is_cancelled:
        for _ in range(chance.randint(0, 40)):
            await asyncio.sleep(0.001)
        await site.ask(f"/v1/async/{handle['id']}", None, method="DELETE", key=whose)
    else:
        await site.ask(f"/v1/async/{handle['id']}", None, "prefer: wait=20", method="GET", key=whose)


async def again(site: Site, chance: Chance) -> None:
    body = chat(chance, temperature=0)
    headers = () if chance.random() < 0.5 else (f"idempotency-key: k{next(_numbers)}",)
    for _ in range(2):
        await site.ask(CHAT, body, *headers)


async def generated(site: Site, chance: Chance) -> None:
    is_cut = chance.random() < 0.5
    body = {"text_input": prompt(chance, "pace=0.002"), "max_tokens": 200 if is_cut else chance.randint(1, 9)}
    path = GENERATE + chance.choice(["", "_stream"])
    async with site.asked(path, body, key=key(chance)) as reader:
        if is_cut:
            await asyncio.sleep(0.02 * chance.random())
        else:
            await asyncio.wait_for(reader.read(), 30)


async def over_grpc(site: Site, chance: Chance) -> None:
    """A text over gRPC: whole, cancelled, or cut by its deadline."""
    how = chance.choice(["done", "cancelled", "late", "failed"])
    long = how in ("cancelled", "late")
    words = ["pace=0.003"] if long else ["raise@1"] if how == "failed" else []
    message = text_request(prompt(chance, *words), max_tokens=400 if long else 4)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{site.grpc.port}") as channel:
        method: Any = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=message_type("ModelInferResponse").FromString,
        )
        call = method(message, timeout=0.1 if how == "late" else 30, metadata=(("x-api-key", site.keys[key(chance)]),))
        if how == "cancelled":
            await asyncio.sleep(0.05 * chance.random() + 0.02)
            call.cancel()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await call


async def elsewhere(site: Site, chance: Chance) -> None:
    """Relayed: whole, broken, or left in the middle."""
    word = chance.choice(["", "wait", "break"])
    stream = word != "" or chance.random() < 0.5
    body = chat(chance, *word.split(), model="there", stream=stream)
    async with site.asked(CHAT, body, key=key(chance)) as reader:
        if word == "wait":
            with contextlib.suppress(asyncio.IncompleteReadError):
                await asyncio.wait_for(reader.readuntil(b"data: "), 30)
        else:
            await asyncio.wait_for(reader.read(), 30)


async def died(site: Site, chance: Chance) -> None:
    await site.ask(CHAT, chat(chance, "die@2", stream=chance.random() < 0.5), key=key(chance))


WAYS: tuple[Way, ...] = (
    answered,
    several_prompts,
    failed,
    left,
    too_late,
    in_the_background,
    again,
    generated,
    over_grpc,
    elsewhere,
)
NUM_REQUESTS = 120


async def all_told(site: Site) -> None:
    """No client is connected, no request is computed, and no event is outstanding."""
    await until(lambda: not site.http.connections and not site.grpc.connections, "all connections are gone")
    background = site.room.background
    await until(lambda: not background._num_running, "all requests without a client have ended")
    await until(lambda: not any(m.in_flight or m.waiting for m in site.router.models()), "all requests have ended")
    for _ in range(20):
        await asyncio.sleep(0)


async def chaos(site: Site, seed: int, ways: tuple[Way, ...]) -> None:
    """Many requests, as many in each way, some twenty of them at a time. What each does is the seed's, not the clock's."""
    places = asyncio.Semaphore(20)
    chosen = [ways[number % len(ways)] for number in range(NUM_REQUESTS)]
    random.Random(seed).shuffle(chosen)

    async def one(number: int, way: Way) -> None:
        async with places:
            await way(site, random.Random(f"{seed} {number}"))

    await asyncio.gather(*(one(number, way) for number, way in enumerate(chosen)))
    await all_told(site)


def computed(folder: Path) -> Sums:
    """What the workers noted."""
    noted = [tuple(map(int, line.split())) for line in (folder / "books").read_text().splitlines()]
    return sum(prompt for prompt, _ in noted), sum(made for _, made in noted)


def of_tiny(site: Site) -> Sums:
    usages = [e.usage for e in site.served if e.usage is not None and e.model == "tiny"]
    return sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)


def run(work: Awaitable[None]) -> None:
    async def main() -> None:
        await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("seed", sample(range(4), 0))
def test_ledger_log_and_metrics_tell_what_was_computed_however_requests_end(tmp_path: Path, seed: int) -> None:
    async def work() -> None:
        async with site(tmp_path) as running:
            await chaos(running, seed, WAYS)
            logged = running.logged()
            assert logged == running.metrics()
            assert logged == await running.ledger()
            assert of_tiny(running) == computed(tmp_path)
            assert {event.status for event in running.served} >= {200, 499}
            running.observer.close()  # writes the lines that wait
            assert running.written() == logged

    run(work())


@THOROUGH
@pytest.mark.parametrize("seed", sample(range(2), 0))
def test_they_agree_when_workers_die_as_well(tmp_path: Path, seed: int) -> None:
    """Work that was lost with a worker is charged to no tenant, and neither is a second replica's work for the same
    answer. An answer that another worker goes on with counts once."""

    async def work() -> None:
        async with site(tmp_path, hedge_after_s=0.02, resumes=True) as running:
            await chaos(running, seed, (*WAYS, died))
            logged = running.logged()
            assert logged == running.metrics()
            assert logged == await running.ledger()
            told, made = of_tiny(running), computed(tmp_path)
            assert (told[0] <= made[0], told[1] <= made[1]) == (True, True)

    run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_drain_calls_off_is_charged_what_it_got(tmp_path: Path, stream: bool) -> None:
    """A request without a stream has shown nothing yet when the grace is over: only its worker knows."""

    async def work() -> None:
        async with site(tmp_path) as running:
            body = {"model": "tiny", "prompt": ["pace=0.005 a", "pace=0.005 b c"], "max_tokens": 900, "stream": stream}
            async with running.asked(TEXT, body) as reader:
                await until(lambda: computed_lines(tmp_path) >= 8, "some of it is computed")
                assert not await running.router.drain(0.0)
                await running.router.cancel_and_wait()
                answer = await asyncio.wait_for(reader.read(), 30)
            await all_told(running)
            assert (b" 503 " in answer.split(b"\r\n")[0]) != stream
            assert b"shutting_down" in answer
            assert running.logged() == running.metrics() == await running.ledger() == computed(tmp_path)
            assert running.served[-1].outcome == "failed"

    run(work())


def computed_lines(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (folder / "books").read_text().count("\n")
    return 0


def test_a_request_without_a_client_that_is_deleted_is_charged_and_logged_as_left(tmp_path: Path) -> None:
    async def work() -> None:
        async with site(tmp_path) as running:
            body = {"model": "tiny", "prompt": "pace=0.005 a", "max_tokens": 900}
            answer = await running.ask(TEXT, body, "prefer: respond-async")
            where = _where(answer)
            await until(lambda: computed_lines(tmp_path) >= 5, "some of it is computed")
            await running.ask(where, None, method="DELETE")
            await all_told(running)
            [one] = [event for event in running.served if event.usage is not None]
            assert (one.status, one.outcome) == (499, "cancelled")
            assert running.logged() == running.metrics() == await running.ledger() == computed(tmp_path)
            assert running.logged()[1] >= 5

    run(work())


def _where(answer: bytes) -> str:
    handle = json.loads(answer.partition(b"\r\n\r\n")[2])
    return f"/v1/async/{handle['id']}"


@pytest.mark.parametrize("stream", [False, True])
def test_of_a_list_with_a_bad_prompt_nothing_is_computed(tmp_path: Path, stream: bool) -> None:
    async def work() -> None:
        async with site(tmp_path) as running:
            body = {"model": "tiny", "prompt": ["one two", "three", "invalid"], "stream": stream}
            answer = await running.ask(TEXT, body)
            assert b" 400 " in answer.split(b"\r\n")[0]
            await all_told(running)
            assert computed_lines(tmp_path) == 0
            assert running.logged() == running.metrics() == (0, 0)
            assert (await running.control.usage(by=()))[0].prompt_tokens == 0
            body["prompt"] = ["one two", "three"]
            assert b" 200 " in (await running.ask(TEXT, body)).split(b"\r\n")[0]
            await all_told(running)
            assert running.logged() == running.metrics() == await running.ledger() == computed(tmp_path)

    run(work())
