"""The two attempts of a hedge, in every order of what becomes of them: one answer, one end, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import msgspec
import pytest
from tests.router.test_pool_laws import CONFIG, INFO, FakeRemote, FakeSupervisor
from tests.router.virtual_loop import VirtualLoop

from inferd import clock
from inferd.config import RemoteConfig
from inferd.errors import UpstreamFailed
from inferd.router.pool import Pool
from inferd.router.replicas import replica as replica_module
from inferd.router.replicas.machines import Machines
from inferd.router.ticket import Ticket
from inferd.types import (
    Delta,
    End,
    Failure,
    GenerateRequest,
    Item,
    Output,
    PromptReport,
    Relay,
    Relayed,
    RelayHead,
    TextPrompt,
)
from inferd.worker.supervisor import Patience

EVENTS = tuple(product((0, 1), ("part", "done", "fail")))
Order = tuple[tuple[int, str], ...]


class Reader:
    """The sink of a request."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def deliver(self, item: Item) -> None:
        self.items.append(item)

    @property
    def text(self) -> str:
        return "".join(
            item.data.decode() if isinstance(item, Relayed) else "".join(delta.text for delta in item.deltas)
            for item in self.items
        )


class Race:
    """A pool with two replicas, and a request that runs at both. Attempt 0 is the first one."""

    def __init__(self, pool: Pool, is_remote: bool) -> None:
        self.pool = pool
        self.is_remote = is_remote
        self.reader, self.ticket = self.ask("r")
        made: list[Any] = list(FakeRemote.made if is_remote else FakeSupervisor.made)
        self.attempts = sorted(made, key=lambda one: "r" not in one.holds)
        self.begun_at: tuple[float | None, float | None] = (None, None)

    def ask(self, name: str) -> tuple[Reader, Ticket]:
        reader = Reader()
        request = GenerateRequest(id=name, model="m", prompt=TextPrompt(text=""))
        relay = Relay(path="/completions", body=b"{}") if self.is_remote else None
        return reader, self.pool.submit(request, reader, relay)

    def replica(self, who: int) -> Any:
        return self.attempts[who] if self.is_remote else self.attempts[who].owner

    def holding(self) -> set[int]:
        return {who for who in (0, 1) if "r" in self.attempts[who].holds}

    def cancelled(self) -> set[int]:
        return {who for who in (0, 1) if "r" in self.attempts[who].cancelled}

    def happens(self, who: int, what: str) -> None:
        """A part or an end of an attempt. One that was cancelled may say more, until it hears of that."""
        (self._relayed if self.is_remote else self._computed)(self.attempts[who], who, what)

    def _computed(self, worker: Any, who: int, what: str) -> None:
        failed = End("cancelled") if "r" in worker.cancelled else End("failed", failure=Failure("internal", ""))
        end = {"part": None, "done": End("done"), "fail": failed}[what]
        deltas = (Delta(0, str(who), (1,)),) if end is None else ()
        report = PromptReport(1) if end is None and not worker.holds["r"] else None
        worker.holds["r"] += 1
        if end is not None:
            del worker.holds["r"]
        worker.owner.worker_outputs([Output("r", deltas, report, end)], None)

    def _relayed(self, server: Any, who: int, what: str) -> None:
        ticket = server.holds["r"]
        if what == "fail" and "r" in server.cancelled:
            server.owner.replica_relayed(server, ticket, Relayed("r", end=End("cancelled")))
        elif what == "fail" and "r" not in server.begun:
            server.owner.replica_refused(server, ticket, UpstreamFailed("It failed."), counts=True, retry=True)
        else:
            head = None if "r" in server.begun else RelayHead(200, b"text/plain")
            server.begun.add("r")
            ends = {"part": None, "done": End("done"), "fail": End("failed", failure=Failure("upstream_failed", ""))}
            data = str(who).encode() if what == "part" else b""
            server.owner.replica_relayed(server, ticket, Relayed("r", head, data, ends[what]))


@contextlib.contextmanager
def racing(is_remote: bool) -> Iterator[tuple[asyncio.Runner, Race]]:
    FakeSupervisor.made, FakeRemote.made = [], []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(clock, "now", runner.get_loop().time))
        patches.enter_context(mock.patch.object(replica_module, "Supervisor", FakeSupervisor))

        async def begin() -> Race:
            remotes = (RemoteConfig(url="http://a/v1"), RemoteConfig(url="http://b/v1")) if is_remote else ()
            retry = msgspec.structs.replace(CONFIG.retry, hedge_after_s=1e-3, max_attempts=2)
            config = msgspec.structs.replace(CONFIG, retry=retry, remotes=remotes, resume_streams=False)
            pool = Pool(
                "m",
                config,
                lambda event: None,
                machines=Machines(()),
                patience=Patience(),
                demand=lambda pool: None,
                may_surge=lambda pool, member: True,
                on_idle=lambda pool: None,
                make_remote=FakeRemote,  # type: ignore[arg-type]
            )
            pool.start()
            for supervisor in () if is_remote else FakeSupervisor.made:
                supervisor.state, supervisor.was_ready = "ready", True
                supervisor.owner.worker_ready(INFO)
            for remote in FakeRemote.made:
                remote.reached()
            race = Race(pool, is_remote)
            await asyncio.sleep(0.01)
            return race

        race = runner.run(begin())
        assert race.holding() == {0, 1}, "the request runs at both"
        race.begun_at = (race.ticket.dispatched_at, race.ticket.hedged_at)
        yield runner, race
        runner.run(race.pool.stop())


def expected(order: Order) -> tuple[str, str | None, set[int], set[int]]:
    """What the client gets, how its request ends, the attempts that still run, and those that are to be cancelled."""
    running, cancelled = {0, 1}, set[int]()
    winner, text, end = None, "", None
    for who, what in order:
        if who not in running:
            continue
        if who in cancelled:
            running -= set() if what == "part" else {who}
            continue
        if what == "fail":
            running.discard(who)
            end = "failed" if winner == who or not running else None
            continue
        if winner is None:
            winner = who
            cancelled |= running - {who}
        if what == "part":
            text += str(who)
        else:
            running.discard(who)
            end = "done"
    return text, end, running, cancelled


@pytest.mark.parametrize("is_remote", [False, True], ids=["workers", "servers"])
@pytest.mark.parametrize("first", EVENTS, ids=lambda event: f"{event[0]}-{event[1]}")
def test_whatever_becomes_of_two_attempts_there_is_one_answer_and_nothing_is_left(
    first: tuple[int, str], is_remote: bool
) -> None:
    for rest in product(EVENTS, repeat=3):
        order: Order = (first, *rest)
        with racing(is_remote) as (runner, race):

            async def play(order: Order = order, race: Race = race) -> None:
                for who, what in order:
                    if who in race.holding():
                        race.happens(who, what)
                        await asyncio.sleep(0)

            runner.run(play())
            text, end, running, cancelled = expected(order)
            assert race.reader.text == text, order
            ends = [item.end.outcome for item in race.reader.items if item.end is not None]
            assert ["failed" if one == "refused" else one for one in ends] == ([] if end is None else [end]), order
            assert race.holding() == running, order
            assert {who for who in (0, 1) if race.replica(who).ticket("r") is not None} == running, order
            assert race.cancelled() == cancelled, order
            if text:
                assert race.ticket.dispatched_at == race.begun_at[int(text[0])], order
            if end is None:
                used = (race.ticket.runner, race.ticket.hedge_replica)
                assert {who for who in (0, 1) if race.replica(who) in used} == running - cancelled, order
            assert race.pool._retries.abandoned == ({"r"} if running & cancelled else set()), order


@pytest.mark.parametrize("first", [0, 1])
def test_the_end_of_an_abandoned_attempt_makes_room_for_a_request_that_waits(first: int) -> None:
    with racing(is_remote=True) as (runner, race):

        async def play() -> None:
            for name in ("a", "b", "c"):
                race.ask(name)
            await asyncio.sleep(0)
            waiting = [name for name in ("a", "b", "c") if not any(name in one.holds for one in race.attempts)]
            assert len(waiting) == 1, "two servers take two requests each"
            race.happens(first, "part")
            assert not any(waiting[0] in one.holds for one in race.attempts)
            race.happens(1 - first, "fail")
            await asyncio.sleep(0)
            assert waiting[0] in race.attempts[1 - first].holds

        runner.run(play())
