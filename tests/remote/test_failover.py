"""Local and remote replicas of one model stand in for each other, before the first byte and never after."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.remote.fault_server import CHUNKED, DONE, FaultServer, Talk, event, piece
from tests.worker.tiny_backend import letters
from tests.worker.watching import ask, outputs_of, serving, text_of, until

from inferd.config import RemoteConfig, RetryConfig
from inferd.router.replicas.replica import LocalReplica
from inferd.router.router import Router
from inferd.router.stream import Stream, open_stream
from inferd.types import Output, Relay, Relayed

RELAY = Relay(path="/chat/completions", body=b'{"model":"tiny","messages":[],"stream":true}', stream=True)
SAID = event(piece("from afar")) + DONE


async def well(talk: Talk) -> None:
    await talk.send(CHUNKED)
    await talk.chunk(SAID)
    await talk.end()


async def failing(talk: Talk) -> None:
    await talk.answer(b"{}", 500)


async def items_of(stream: Stream) -> list[Output | Relayed]:
    return [item async for item in stream]


def relayed_of(items: list[Output | Relayed]) -> bytes:
    assert all(isinstance(item, Relayed) for item in items), items
    return b"".join(item.data for item in items if isinstance(item, Relayed))


def local_pid(router: Router) -> int:
    (pid,) = [replica.pid for replica in router.replicas("tiny") if isinstance(replica, LocalReplica)]
    assert pid is not None
    return pid


def test_a_fallback_is_asked_while_the_local_replica_is_away_and_not_while_it_is_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FaultServer(well).running() as server:
            remotes = (RemoteConfig(url=server.url, fallback=True),)
            async with serving(remotes=remotes) as (router, witness):
                await until(lambda: router.models()[0].replicas_ready == 2, "both replicas are ready")
                items = await items_of(open_stream(router, ask(name="here"), RELAY))
                assert text_of([item for item in items if isinstance(item, Output)]) == letters(4)
                assert server.talks == []
                gate = tmp_path / "gate"
                waiting = open_stream(router, ask(f"gate={gate}", name="waiting"), RELAY)
                await until(lambda: router.models()[0].in_flight == 1, "it is in the worker")
                os.kill(local_pid(router), signal.SIGKILL)
                assert relayed_of(await items_of(waiting)) == SAID
                (ended,) = witness.ended()[-1:]
                assert (ended.outcome, ended.request_id) == ("done", "waiting")

    asyncio.run(scenario())


def test_the_first_bytes_of_a_remote_answer_let_the_next_request_of_a_dead_worker_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        second = asyncio.Event()

        async def one_after_the_other(talk: Talk) -> None:
            await talk.send(CHUNKED)
            await talk.chunk(event(piece("from afar")))
            if len(server.talks) == 2:
                second.set()
            await second.wait()  # the first stream ends after the second request has come
            await talk.chunk(DONE)
            await talk.end()

        server = FaultServer(one_after_the_other)
        async with server.running():
            remotes = (RemoteConfig(url=server.url, fallback=True),)
            async with serving(remotes=remotes) as (router, _):
                await until(lambda: router.models()[0].replicas_ready == 2, "both replicas are ready")
                gate = f"gate={tmp_path / 'gate'}"
                waiting = [open_stream(router, ask(gate, name=f"r{number}"), RELAY) for number in range(2)]
                await until(lambda: router.models()[0].in_flight == 2, "both requests are in the worker")
                os.kill(local_pid(router), signal.SIGKILL)
                async with asyncio.timeout(30):
                    for stream in waiting:
                        assert relayed_of(await items_of(stream)) == SAID

    asyncio.run(scenario())


def test_a_remote_server_that_fails_leaves_its_requests_to_the_local_replica() -> None:
    async def scenario() -> None:
        async with FaultServer(failing).running() as server:
            remotes = (RemoteConfig(url=server.url, weight=1000.0),)
            async with serving(remotes=remotes, retry=RetryConfig(budget=1.0)) as (router, witness):
                await until(lambda: router.models()[0].replicas_ready == 2, "both replicas are ready")
                for number in range(6):
                    outputs = await items_of(open_stream(router, ask(name=f"r{number}"), RELAY))
                    assert text_of([item for item in outputs if isinstance(item, Output)]) == letters(4)
                assert server.talks, "the remote server was never asked"
                assert [ended.outcome for ended in witness.ended()] == ["done"] * 6

    asyncio.run(scenario())


def test_what_only_a_local_replica_understands_never_goes_to_a_remote_one() -> None:
    async def scenario() -> None:
        async with FaultServer(failing).running() as server:
            async with serving(remotes=(RemoteConfig(url=server.url, weight=1000.0),)) as (router, _):
                await until(lambda: router.models()[0].replicas_ready == 2, "both replicas are ready")
                streams = [open_stream(router, ask(name=f"r{number}")) for number in range(4)]
                for stream in streams:
                    assert text_of(await outputs_of(stream)) == letters(4)
            assert server.talks == []

    asyncio.run(scenario())


def test_a_stream_that_began_afar_does_not_go_on_here() -> None:
    async def broken(talk: Talk) -> None:
        await talk.send(CHUNKED)
        await talk.event(piece("from afar"))
        talk.close()

    async def scenario(server: FaultServer) -> None:
        remote = RemoteConfig(url=server.url, weight=1e6)
        async with serving(remotes=(remote,)) as (router, _):
            await until(lambda: router.models()[0].replicas_ready == 2, "both replicas are ready")
            while not server.talks:
                items = await items_of(open_stream(router, ask(name=f"r{os.urandom(4).hex()}"), RELAY))
            assert relayed_of(items) == event(piece("from afar"))
            end = items[-1].end
            assert end is not None
            assert end.failure is not None
            assert (end.outcome, end.failure.code) == ("failed", "upstream_closed")

    async def main() -> None:
        async with FaultServer(broken).running() as server:
            await scenario(server)

    asyncio.run(main())
