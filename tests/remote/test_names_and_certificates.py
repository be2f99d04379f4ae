"""The servers that a remote replica accepts: trusted certificates, names that move, peers that never answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.certificates import made_certificate
from tests.remote.fault_server import CHUNKED, DONE, FaultServer, Flood, Talk, completion, event, piece
from tests.remote.replicas import Bench, Owner, bench

from inferd import clock
from inferd.config import RemoteConfig
from inferd.events import Event
from inferd.remote.origin import client_context
from inferd.remote.pool import MAX_AGE_S, MAX_IDLE_S
from inferd.remote.secret import Secret
from inferd.router.replicas.remote_replica import RemoteReplica

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


async def well(talk: Talk) -> None:
    if b'"stream"' not in talk.body:
        await talk.answer(completion("hello"))
        return
    await talk.send(CHUNKED)
    await talk.event(piece("a"))
    await talk.chunk(DONE)
    await talk.end()


# -- certificates --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_certificate(tmp_path_factory.mktemp("tls"))


def secure(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    return context


def through_tls(
    certificate: Path,
    then: Callable[[Bench, FaultServer], Awaitable[None]],
    script: Callable[[Talk], Awaitable[None]] = well,
    *,
    host: str = "127.0.0.1",
    make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    **settings: Any,
) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(FaultServer(script).running(secure=secure(certificate)))
            made = await stack.enter_async_context(bench(f"https://{host}:{server.port}/v1", **settings))
            await then(made, server)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("make_loop", LOOPS)
def test_a_server_whose_authority_is_named_is_talked_to(certificate: Path, make_loop: Any) -> None:
    async def then(made: Bench, server: FaultServer) -> None:
        for _ in range(3):
            heard = made.ask()
            assert (await heard.ended()).outcome == "done"
            assert heard.data == completion("hello")
        heard = made.ask(stream=True, body=b'{"stream": true}')
        assert (await heard.ended()).outcome == "done"
        assert heard.data == event(piece("a")) + DONE
        assert server.num_connections == 1

    through_tls(certificate, then, make_loop=make_loop, ca_file=str(certificate))


@pytest.mark.parametrize("make_loop", LOOPS)
def test_a_slow_reader_holds_back_a_server_behind_tls_too(certificate: Path, make_loop: Any) -> None:
    flood = Flood()

    async def then(made: Bench, server: FaultServer) -> None:
        heard = made.ask(stream=True)
        await heard.reached(1)
        made.replica.pause(heard.ticket.request.id)
        await flood.is_held_back()
        assert flood.num_sent < 18_000_000, "the server was not held back"
        made.replica.resume(heard.ticket.request.id)
        assert (await heard.ended()).outcome == "done"
        assert heard.data == flood.whole

    through_tls(certificate, then, flood, make_loop=make_loop, ca_file=str(certificate))


@pytest.mark.parametrize("make_loop", LOOPS)
def test_cancelling_is_noticed_behind_tls_too(certificate: Path, make_loop: Any) -> None:
    async def silent(talk: Talk) -> None:
        await talk.gone()

    async def then(made: Bench, server: FaultServer) -> None:
        heard = made.ask()
        async with asyncio.timeout(5):
            while not server.talks:
                await asyncio.sleep(0.01)
        made.replica.cancel(heard.ticket.request.id)
        assert (await heard.ended()).outcome == "cancelled"
        await asyncio.wait_for(server.lost.wait(), 5)

    through_tls(certificate, then, silent, make_loop=make_loop, ca_file=str(certificate))


@pytest.mark.parametrize("make_loop", LOOPS)
@pytest.mark.parametrize(
    ("host", "is_named"), [("127.0.0.1", False), ("localhost", True)], ids=["unknown authority", "another name"]
)
def test_a_server_without_a_valid_certificate_gets_no_request(
    certificate: Path, host: str, is_named: bool, make_loop: Any
) -> None:
    async def then(made: Bench, server: FaultServer) -> None:
        refusal = await made.ask().refused()
        assert (refusal.error.code, refusal.counts) == ("upstream_certificate", True)
        assert server.talks == []

    ca_file = str(certificate) if is_named else None
    through_tls(certificate, then, host=host, make_loop=make_loop, probe=False, ca_file=ca_file)


def test_files_may_be_named_from_the_users_own_folder(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(certificate.parent))
    certificate.with_name("word").write_text("one-word\n")
    assert client_context(f"~/{certificate.name}").get_ca_certs()
    assert Secret({}, file="~/word").value == b"one-word"


# -- names ---------------------------------------------------------------------------------------


class Names:
    """In the resolver's place: where ``far.test`` is now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.address: str | None = "127.0.0.1"
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._find)

    def _find(self, host: Any, *rest: Any, **more: Any) -> Any:
        if host != "far.test":
            return self._real(host, *rest, **more)
        if self.address is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._real(self.address, *rest, **more)


async def where(made: Bench) -> str:
    heard = made.ask()
    assert (await heard.ended()).outcome == "done"
    return heard.data.decode()


def told(text: str) -> Callable[[Talk], Awaitable[None]]:
    async def script(talk: Talk) -> None:
        await talk.answer(completion(text))

    return script


@pytest.mark.parametrize("is_old_one_left", [False, True])
def test_a_name_that_moves_is_followed(monkeypatch: pytest.MonkeyPatch, is_old_one_left: bool) -> None:
    """At once where the old server closes its connections, else when they are old enough to be made anew."""
    names = Names(monkeypatch)

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            new = await stack.enter_async_context(FaultServer(told("new")).running("127.0.0.2"))
            old_place = contextlib.AsyncExitStack()
            await old_place.enter_async_context(FaultServer(told("old")).running("127.0.0.1", new.port))
            stack.push_async_exit(old_place)
            made = await stack.enter_async_context(bench(f"http://far.test:{new.port}/v1"))
            assert '"old"' in await where(made)
            names.address = "127.0.0.2"
            assert '"old"' in await where(made), "a connection that is well is kept"
            if is_old_one_left:
                ahead_s, now = 0.0, clock.now
                monkeypatch.setattr(clock, "now", lambda: now() + ahead_s)
                while ahead_s < MAX_AGE_S - MAX_IDLE_S:
                    ahead_s += MAX_IDLE_S / 2
                    assert '"old"' in await where(made), "a connection that is used is kept until it is old"
                ahead_s = MAX_AGE_S
            else:
                await old_place.aclose()
            assert '"new"' in await where(made)

    asyncio.run(main())


def test_a_name_that_is_gone_is_told_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    names.address = None

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(FaultServer(well).running())
            made = await stack.enter_async_context(bench(f"http://far.test:{server.port}/v1", probe=False))
            refusal = await made.ask().refused()
            assert (refusal.error.code, refusal.counts, refusal.retry) == ("upstream_connect_failed", True, True)
            assert "name cannot be resolved" in refusal.error.message
            names.address = "127.0.0.1"
            assert (await made.ask().ended()).outcome == "done"

    asyncio.run(main())


# -- peers that only seem to be there --------------------------------------------------------------


@pytest.mark.slow
def test_a_peer_that_takes_connections_and_never_says_anything_is_unreachable() -> None:
    """The kernel accepts the connection, and no program does."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as peer:
            owner, events = Owner(), list[Event]()
            url = f"http://127.0.0.1:{peer.getsockname()[1]}/v1"
            replica = RemoteReplica("here", 0, RemoteConfig(url=url), owner, events.append)
            replica.start()
            try:
                await asyncio.wait_for(owner.unreachable.wait(), 30)
                assert (replica.is_ready, replica.state) == (False, "unreachable")
                assert replica.reason == "The remote server did not answer a probe."
            finally:
                await replica.stop()
            assert replica.connections.num_connections == 0

    asyncio.run(main())
