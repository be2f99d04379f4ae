"""What a server does for its nodes beside their connections: times of another clock, secrets, files that come in parts."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any, cast

import pytest
from tests.worker.watching import ask, until

from inferd import clock
from inferd.config import ModelConfig, NodesConfig
from inferd.errors import ModelLoadError
from inferd.events import ignore
from inferd.nodes import fetching
from inferd.nodes import life as lives
from inferd.nodes import listener as listening
from inferd.nodes.cache import Cache
from inferd.nodes.dialling import NodeOptions
from inferd.nodes.life import NodeLife
from inferd.nodes.listener import NodesListener, open_nodes
from inferd.nodes.messages import ModelFile, Signal, framed
from inferd.nodes.tokens import REJOIN_S, TokenRefusedError, parse_token
from inferd.worker.messages import FromWorker, Load, Loading, Submit

FILE = ModelFile("weights", "/there/weights", 100, "0" * 64)


class FakeLink:
    """A node that has joined."""

    name = "one"
    clock_offset_s = 1000.0
    silent_s = 0.0
    num_sent = num_received = 0

    def __init__(self, renewed_at: float = 0.0) -> None:
        self.renewed_at = renewed_at
        self.secrets: list[str] = []
        self.written: list[bytes] = []
        self.ended: list[NodeLife] = []

    def renew(self, secret: str) -> None:
        self.renewed_at = clock.wall()
        self.secrets.append(secret)

    def count_bytes(self) -> None: ...
    def write(self, data: bytes) -> None:
        self.written.append(data)

    def life_ended(self, life: NodeLife) -> None:
        self.ended.append(life)


def test_a_request_and_what_a_worker_tells_have_the_time_of_the_clock_where_they_are_read() -> None:
    """The clock of the node is a thousand seconds ahead."""

    async def scenario() -> None:
        told: list[FromWorker] = []
        load = Load("m", ModelConfig(source="digits"))
        life = NodeLife(cast(Any, FakeLink()), 1, "m", load, told.extend, lambda: None)
        sent: list[Any] = []
        life.channel.send = sent.append  # type: ignore[assignment, method-assign]
        request = ask()
        life.send(Submit(request))
        assert sent[0].request.arrived_at == request.arrived_at + 1000.0
        before = clock.now()
        life._received([Loading("weights", 1, 2, before + 1000.0)])
        (loading,) = told
        assert isinstance(loading, Loading)
        assert before <= loading.at <= clock.now()
        assert (loading.phase, loading.done, loading.total) == ("weights", 1, 2)
        life.machine_lost("it is over")

    asyncio.run(scenario())


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_node_is_told_the_signals_of_a_worker_until_it_has_ended(
    is_reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that does not report the end of a killed worker is not waited for."""
    monkeypatch.setattr(lives, "KILL_S", 60.0 if is_reported else 0.0)

    async def scenario() -> None:
        link = FakeLink()
        life = NodeLife(cast(Any, link), 7, "m", Load("m", ModelConfig(source="digits")), lambda _: None, lambda: None)
        life.signal(signal.SIGUSR1)
        life.kill()
        assert link.written == [framed(Signal(7, signal.SIGUSR1)), framed(Signal(7, signal.SIGKILL))]
        if is_reported:
            life.exited(-signal.SIGKILL)
        async with asyncio.timeout(30):
            assert await life.gone == -signal.SIGKILL
        assert ("did not report its end" in life.reason) != is_reported
        life.signal(signal.SIGTERM)
        life.machine_lost("it is over")
        assert (len(link.written), link.ended, life.is_machine_lost) == (2, [life], False)

    asyncio.run(scenario())


@pytest.fixture
def listener(tmp_path: Path) -> NodesListener:
    return open_nodes(NodesConfig(listen="127.0.0.1:0"), tmp_path, cast(Any, None), cast(Any, None), ignore)


def test_nodes_that_have_joined_may_join_again_after_all_tokens_were_revoked(listener: NodesListener) -> None:
    link = FakeLink()
    listener._links["one"] = cast(Any, link)
    old = parse_token(listener.new_token().token).secret
    listener.new_token(revoke=True)
    with pytest.raises(TokenRefusedError, match="was revoked"):
        listener._tokens.check(old, "one", clock.wall())
    (secret,) = link.secrets
    listener._tokens.check(secret, "one", clock.wall())


def test_a_nodes_secret_is_renewed_when_half_of_its_time_has_passed(
    listener: NodesListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "SEEN_EVERY_S", 0.0)

    async def scenario() -> None:
        now = clock.wall()
        young, old = FakeLink(now - 0.45 * REJOIN_S), FakeLink(now - 0.55 * REJOIN_S)
        listener._links.update(young=cast(Any, young), old=cast(Any, old))
        looking = asyncio.create_task(listener._look_after())
        await until(lambda: bool(old.secrets), "the older secret is renewed")
        looking.cancel()
        assert (len(young.secrets), len(old.secrets)) == (0, 1)

    asyncio.run(scenario())


def test_an_expired_token_is_refused_as_expired_for_a_month(listener: NodesListener) -> None:
    day = 86_400.0
    secret = listener._tokens.issue(0.0, 10.0)
    listener._tokens.issue(29 * day, 10.0)
    with pytest.raises(TokenRefusedError, match="has expired; make another one"):
        listener._tokens.check(secret, "one", 29 * day)
    listener._tokens.issue(31 * day, 10.0)
    with pytest.raises(TokenRefusedError, match="not one of this server's"):
        listener._tokens.check(secret, "one", 31 * day)


@pytest.mark.parametrize("num_broken", [0, fetching.TRIES - 1, fetching.TRIES])
def test_a_file_whose_transfer_breaks_is_tried_five_times(
    num_broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    async def attempt(*_: object) -> None:
        nonlocal tries
        tries += 1
        if tries <= num_broken:
            raise ConnectionError("broken")

    monkeypatch.setattr(fetching, "_try", attempt)
    monkeypatch.setattr(fetching, "RETRY_S", 0.0)
    coming = fetching.fetch(cast(NodeOptions, None), "key", FILE, Cache(tmp_path), lambda count: None)
    if num_broken < 5:
        asyncio.run(coming)
        assert tries == num_broken + 1
    else:
        with pytest.raises(ModelLoadError, match=r"weights could not be brought from the server \(broken\)"):
            asyncio.run(coming)
        assert tries == 5
