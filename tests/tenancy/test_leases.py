"""Several servers on one database never grant more than there is, and the one that needs it gets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferd.errors import QuotaExceeded, StateUnavailable
from inferd.state.database import Database, Instant, Transaction, Value
from inferd.state.open import open_database
from inferd.state.presence import Members
from inferd.tenancy.leases import Claimant, Leases, split
from inferd.tenancy.limiter import Limiter, Reservation
from inferd.tenancy.principal import Limits

LIMITS = Limits(rpm=60, tpm=600, max_in_flight=4)


class World:
    """One database, one clock, and the servers that are alive."""

    def __init__(self, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.database: Database = open_database(url, folder)
        self.alive: set[str] = set()
        self.ever: set[str] = set()
        module = "sqlite" if url.startswith("sqlite") else "postgres"
        monkeypatch.setattr(f"inferd.state.{module}._Transaction.now", lambda transaction: Instant(self.now, "one"))

    def clear(self) -> None:
        self.alive.clear()
        self.ever.clear()
        with self.database.transaction(durable=False) as transaction:
            for table in ("buckets", "leases", "gateways"):
                transaction.execute(f"DELETE FROM {table}")


class Seat:
    """A presence that dies when the world says so."""

    def __init__(self, world: World, name: str) -> None:
        self.id = name
        self._world = world
        world.alive.add(name)
        world.ever.add(name)

    def members(self, transaction: Transaction) -> Members:
        living = frozenset(self._world.alive | {self.id})
        return Members(living, frozenset(self._world.ever - living))

    def remove_dead(self, dead: frozenset[str]) -> None:
        self._world.ever -= dead


class Breaking:
    """A database whose connection breaks at the end of a transaction."""

    def __init__(self, database: Database, is_committed: bool) -> None:
        self._database = database
        self._is_committed = is_committed
        self.reading = database.reading

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[Transaction]:
        with self._database.transaction(durable=durable) as begun:
            yield begun
            if not self._is_committed:
                raise StateUnavailable("the connection broke before the commit")
        raise StateUnavailable("the connection broke after the commit")


class Interrupted:
    """A database whose next transaction calls ``act`` before its first change, once all was read."""

    def __init__(self, database: Database, act: Callable[[], None]) -> None:
        self._database = database
        self._act: Callable[[], None] | None = act
        self.reading = database.reading

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[Transaction]:
        with self._database.transaction(durable=durable) as begun, pytest.MonkeyPatch.context() as patch:
            execute = begun.execute

            def interrupted(sql: str, values: Sequence[Value] = ()) -> int:
                act, self._act = self._act, None
                if act is not None:
                    act()
                return execute(sql, values)

            patch.setattr(begun, "execute", interrupted)
            yield begun


class Server:
    def __init__(self, world: World, name: str, limits: Limits = LIMITS, owner: str = "key:k") -> None:
        self.world = world
        self.name = name
        self.owner = owner
        self.limiter = Limiter()
        self.limiter.configure({owner: limits}, world.now)
        self.leases = Leases(self.limiter, Seat(world, name), lambda: world.now)
        self.running: list[tuple[Reservation, int]] = []

    def tick(self, database: Database | None = None) -> None:
        self.leases.exchange(database or self.world.database)

    def break_off(self, *, is_committed: bool) -> None:
        """An exchange whose writing fails: before it, or when it is done and nothing more is heard."""
        self.leases.exchange(cast(Database, Breaking(self.world.database, is_committed)))

    def between(self, act: Callable[[Database], None], other: Callable[[], None]) -> None:
        """``act`` on the database, with ``other`` in another thread once ``act`` has read and is about to write."""
        with ThreadPoolExecutor(1) as pool:
            begun: list[Future[None]] = []

            def begin() -> None:
                begun.append(pool.submit(other))
                wait(begun, timeout=0.5)  # it waits for the lock, and would else be done by then

            act(cast(Database, Interrupted(self.world.database, begin)))
            begun[0].result()

    def ask(self, tokens: int = 1) -> bool:
        try:
            taken = self.limiter.reserve(self.limiter.quotas_of((self.owner,)), tokens, self.world.now)
        except QuotaExceeded:
            return False
        self.running.append((taken, tokens))
        return True

    def settle(self) -> None:
        for taken, tokens in self.running:
            self.limiter.settle(taken, tokens, refund=False, now=self.world.now)
        self.running.clear()

    def share(self, kind: str = "tokens") -> float:
        return self.limiter.buckets()[f"{self.owner}/{kind}"].share

    def level(self, kind: str) -> float:
        bucket = self.limiter.buckets()[f"{self.owner}/{kind}"]
        bucket.refill(self.world.now)
        return max(bucket.level, 0.0)


@pytest.fixture
def world(state_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(state_url, tmp_path, monkeypatch)
    yield made
    made.database.close()


def test_a_server_alone_holds_everything_and_then_asks_for_nothing(world: World) -> None:
    server = Server(world, "a")
    server.tick()
    assert server.share() == 1.0
    assert sum(server.ask(6) for _ in range(100)) == 4, "four at once"
    server.settle()
    before = _numbers(world)
    for _ in range(20):
        world.now += 0.25
        server.ask()
        server.settle()
        server.tick()
    assert _numbers(world) == before, "a server alone must not write to the database for its traffic"


def _numbers(world: World) -> object:
    with world.database.reading() as transaction:
        return transaction.rows("SELECT value FROM counters ORDER BY name"), transaction.rows("SELECT * FROM buckets")


def test_a_restart_does_not_refill(world: World) -> None:
    first = Server(world, "a")
    first.tick()
    assert first.ask(500)
    first.settle()
    first.leases.release(world.database)
    world.alive.discard("a")
    second = Server(world, "b")
    second.tick()
    assert not second.ask(150)
    assert second.ask(100)


def test_what_a_killed_server_held_begins_empty(world: World) -> None:
    first = Server(world, "a")
    first.tick()
    assert first.ask(50)
    world.now += 30.0  # what it refilled meanwhile may have been spent as well
    world.alive.discard("a")
    second = Server(world, "b")
    second.tick()
    assert second.share() == 1.0
    assert not second.ask(1)
    world.now += 30.0
    assert second.ask(300)
    assert not second.ask(10)


def test_a_server_that_was_taken_for_dead_begins_anew(world: World) -> None:
    first = Server(world, "a")
    first.tick()
    world.alive.discard("a")
    second = Server(world, "b")
    second.tick()
    assert (first.share(), second.share()) == (1.0, 1.0), "until it hears of it: what the page on limits admits"
    world.alive.add("a")
    for _ in range(3):
        first.tick()
        assert first.share() + second.share() <= 1 + 1e-9
        second.tick()
    assert first.share() > 0


def test_a_share_travels_with_what_is_in_it(world: World) -> None:
    """Half was used before two others came: the three of them have the other half, no more and no less."""
    first = Server(world, "a")
    first.tick()
    assert first.ask(300)
    first.settle()
    servers = [first, Server(world, "b"), Server(world, "c")]
    for _ in range(3):
        for server in servers:
            server.tick()
        assert sum(server.level("tokens") for server in servers) <= 300 + 1e-6
    assert sum(server.level("tokens") for server in servers) == pytest.approx(300)
    for server in servers:
        assert server.level("tokens") == pytest.approx(300 * server.share(), abs=1.0)


@pytest.fixture
def second_database(world: World, state_url: str, tmp_path: Path) -> Iterator[Database]:
    """Another connection, as another server has."""
    made = open_database(state_url, tmp_path)
    yield made
    made.close()


def test_of_servers_that_lease_at_the_same_moment_one_waits_for_the_other(
    world: World, second_database: Database
) -> None:
    first = Server(world, "a")
    joined: list[Server] = []

    def join() -> None:
        joined.append(Server(world, "b"))
        joined[0].tick(second_database)

    first.between(first.tick, join)
    assert (first.share(), joined[0].share()) == (1.0, 0.0), "the first knew of no other"


def test_a_server_that_returns_its_shares_while_another_leases_returns_no_level_twice(
    world: World, second_database: Database
) -> None:
    first = Server(world, "a")
    first.tick()
    assert first.ask(300)
    first.settle()
    second = Server(world, "b")
    second.tick()
    assert not second.ask(300), "it has no share yet"
    for server in (second, first):
        server.tick()
    assert first.share() == pytest.approx(0.5)
    assert second.share() == 0.0, "half is free"
    first.between(first.leases.release, lambda: second.tick(second_database))
    world.alive.discard("a")
    granted = 0
    for _ in range(3):
        while second.ask(50):
            second.settle()
            granted += 50
        second.tick()
    assert granted == 300, "of 600, half was used before"


def test_a_newcomer_gets_its_part_within_two_exchanges(world: World) -> None:
    first, second = Server(world, "a"), Server(world, "b")
    first.tick()
    second.tick()
    for server in (first, second):
        server.tick()
    assert second.share() > 0
    assert first.share() + second.share() <= 1 + 1e-9


def test_a_busy_server_gets_the_shares_of_idle_ones(world: World) -> None:
    """Idle servers give up what a busy one asks for, even where their parts were too small for it."""
    servers = [Server(world, name) for name in "abc"]
    for _ in range(3):
        for server in servers:
            server.tick()
    assert not servers[0].ask(500), "it holds a third of 600"
    for _ in range(3):
        for server in servers:
            server.tick()
        world.now += 0.25
    assert servers[0].ask(500)


def test_the_share_of_a_limit_that_a_server_no_longer_has_is_free_for_the_others(world: World) -> None:
    first, second = Server(world, "a"), Server(world, "b")
    for _ in range(4):
        for server in (first, second):
            server.ask()
            server.settle()
            server.tick()
        world.now += 1.0
    assert first.share() > 0
    first.limiter.configure({"key:k": Limits(max_in_flight=4)}, world.now)
    for turn in range(20):
        world.now += 1.0
        for _ in range(turn):
            second.ask()
            second.settle()
        first.tick()
        second.tick()
    assert second.share() > 0.9
    with world.database.reading() as transaction:
        rows = transaction.rows("SELECT gateway FROM leases WHERE bucket = ?", ("key:k/tokens",))
    assert [row[0] for row in rows] == ["b"]


def test_a_first_request_needs_no_time_to_be_heard_of(world: World) -> None:
    idle, asking = Server(world, "a"), Server(world, "b")
    for server in (idle, asking):
        server.tick()
    assert asking.ask(1)
    for server in (asking, idle, asking):
        server.tick()
    assert asking.share("in_flight") > 0.9


def test_a_limit_of_one_works_on_several_servers(world: World) -> None:
    limits = Limits(max_in_flight=1)
    servers = [Server(world, name, limits) for name in "abc"]
    for server in reversed(servers):
        for _ in range(4):
            for each in servers:
                each.tick()
            world.now += 1.0
            if server.ask():
                break
        assert [len(each.running) for each in servers].count(1) == 1
        assert not any(each.ask() for each in servers)
        server.settle()


def test_a_failed_transaction_costs_level_but_no_share_for_ever(world: World) -> None:
    first, second = Server(world, "a"), Server(world, "b")
    first.tick()
    second.tick()
    with pytest.raises(StateUnavailable):
        first.break_off(is_committed=False)
    for _ in range(3):
        first.tick()
        second.tick()
    world.now += 120.0
    assert first.share() + second.share() == pytest.approx(1.0)
    assert sum(server.ask(tokens) for server in (first, second) for tokens in [150] * 2) >= 3


def test_what_runs_stays_counted_when_the_share_that_was_released_beside_it_comes_back(world: World) -> None:
    first = Server(world, "a")
    first.tick()
    assert first.ask()
    assert first.ask()
    second = Server(world, "b")
    second.tick()
    assert not second.ask(), "it has no share yet, and needs one"
    second.tick()
    with pytest.raises(StateUnavailable):
        first.break_off(is_committed=False)
    assert first.share("in_flight") < 1
    for _ in range(3):
        for server in (first, second):
            server.tick()
            found = sum(len(each.running) + each.level("in_flight") for each in (first, second))
            assert found <= 4 + 1e-6
    assert found == pytest.approx(4)


def rows(world: World, table: str) -> int:
    with world.database.reading() as transaction:
        ((count,),) = transaction.rows(f"SELECT COUNT(*) FROM {table}")
        return msgspec.convert(count, int)


def test_the_last_server_without_a_limit_leaves_no_row_of_it(world: World) -> None:
    servers = [Server(world, name) for name in "ab"]
    for server in servers:
        server.tick()
    assert (rows(world, "buckets"), rows(world, "leases")) == (3, 6)
    for server, left in zip(servers, ((3, 4), (1, 2)), strict=True):
        server.limiter.configure({"key:k": Limits(rpm=60)}, world.now)
        server.tick()
        assert (rows(world, "buckets"), rows(world, "leases")) == left


def test_of_a_dead_server_no_row_is_left(world: World) -> None:
    first, second = Server(world, "a"), Server(world, "b")
    for server in (first, second):
        server.tick()
    with world.database.transaction() as transaction:
        for name in "ab":
            transaction.execute("INSERT INTO gateways (id, host, seen_at) VALUES (?, ?, ?)", (name, "here", world.now))
    world.alive.discard("a")
    second.tick()
    assert (rows(world, "gateways"), rows(world, "leases")) == (1, 3)


def counted(world: World, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for every transaction that locks the database, from now on."""
    begun: list[bool] = []
    transaction = world.database.transaction

    def begin(*, durable: bool = True) -> AbstractContextManager[Transaction]:
        begun.append(durable)
        return transaction(durable=durable)

    monkeypatch.setattr(world.database, "transaction", begin)
    return begun


def test_servers_whose_needs_stay_as_they_are_only_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [Server(world, name) for name in "abc"]

    def serve(seconds: int) -> None:
        for _ in range(seconds):
            world.now += 1.0
            for server in servers[:2]:
                server.ask(3)
                server.settle()
            for server in servers:
                server.tick()

    serve(20)
    begun = counted(world, monkeypatch)
    serve(20)
    assert not begun


def test_one_servers_news_are_another_ones_reason_to_look_again_and_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [Server(world, name) for name in "ab"]
    for _ in range(10):
        world.now += 1.0
        for server in servers:
            server.tick()
    begun = counted(world, monkeypatch)
    servers[1].ask(3)
    for server in reversed(servers):
        server.tick()
    assert len(begun) > 1, "the other one makes room"
    for _ in range(4):
        for server in servers:
            server.tick()
    begun.clear()
    for server in servers:
        server.tick()
    assert not begun


def test_a_death_is_heard_of_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [Server(world, name) for name in "abc"]
    for _ in range(3):
        for server in servers:
            server.tick()
    world.alive.discard("c")
    for _ in range(3):
        for server in servers[:2]:
            server.tick()
    assert servers[0].share() + servers[1].share() == pytest.approx(1.0)
    begun = counted(world, monkeypatch)
    for server in servers[:2]:
        server.tick()
    assert not begun


def test_shares_that_were_taken_before_the_answer_was_lost_are_held(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(world, "a")
    with pytest.raises(StateUnavailable):
        server.break_off(is_committed=True)
    for _ in range(3):
        server.tick()
    assert server.share() == 1.0
    begun = counted(world, monkeypatch)
    server.tick()
    assert not begun, "it knows what it holds"
    world.now += 60.0
    assert [server.ask() for _ in range(5)] == [True, True, True, True, False]


def test_a_bucket_of_a_dead_server_begins_empty_though_its_heirs_do_not_know_it(world: World) -> None:
    first = Server(world, "a", owner="key:x")
    first.tick()
    other = Server(world, "b")
    world.now += 120.0  # what its share refilled meanwhile may have been spent
    world.alive.discard("a")
    other.tick()
    third = Server(world, "c", owner="key:x")
    for _ in range(3):
        third.tick()
        other.tick()
    assert third.share() > 0
    assert third.level("tokens") == 0.0


def test_a_debt_is_returned_with_the_shares_and_paid_by_the_next_server(world: World) -> None:
    first = Server(world, "a")
    first.tick()
    taken = first.limiter.reserve(first.limiter.quotas_of(("key:k",)), 600, world.now)
    first.limiter.settle(taken, 900, refund=False, now=world.now)
    first.leases.release(world.database)
    world.alive.discard("a")
    world.now += 40.0  # 400 more, of which 300 pay the debt
    second = Server(world, "b")
    second.tick()
    assert second.level("tokens") == pytest.approx(100.0)


def test_what_no_server_holds_refills_as_well(world: World) -> None:
    first = Server(world, "a")
    first.tick()
    assert first.ask(500)
    first.settle()
    first.leases.release(world.database)
    world.alive.discard("a")
    world.now += 30.0
    second = Server(world, "b")
    second.tick()
    assert second.level("tokens") == pytest.approx(400.0)


def test_servers_that_are_idle_again_share_evenly_again(world: World) -> None:
    first, second = Server(world, "a"), Server(world, "b")
    for _ in range(20):
        world.now += 1.0
        first.ask()
        first.settle()
        first.tick()
        second.tick()
    assert first.share() > 0.9
    for _ in range(60):
        world.now += 1.0
        first.tick()
        second.tick()
    assert [first.share(), second.share()] == pytest.approx([0.5, 0.5])


def test_a_server_has_every_share_once_it_holds_some_of_each_bucket(world: World) -> None:
    limits = Limits(rpm=60, max_in_flight=1)
    first = Server(world, "a", limits)
    assert not first.leases.has_every_share
    first.tick()
    assert first.leases.has_every_share
    second = Server(world, "b", limits)
    for _ in range(4):
        for server in (second, first):
            server.tick()
    assert first.share("requests") > 0
    assert second.share("requests") > 0
    assert sorted(server.leases.has_every_share for server in (first, second)) == [False, True], "one request at once"


def test_a_share_that_is_just_as_large_as_a_request_is_of_use() -> None:
    claimants = {name: Claimant(need=50.0) for name in "ab"}
    assert split(100.0, claimants) == {"a": 0.5, "b": 0.5}
    assert split(99.0, claimants) == {"a": 0.0, "b": 1.0}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "tick", "tick", "break", "wait", "settle", "kill", "join", "leave"]),
        st.integers(0, 3),
        st.integers(1, 700),
    ),
    max_size=60,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40)
@given(steps=STEPS)
def test_together_they_never_grant_more_than_there_is(world: World, steps: list[tuple[str, int, int]]) -> None:
    world.clear()
    began = world.now
    servers: list[Server] = []
    granted_tokens = granted_requests = 0
    for number, (what, index, amount) in enumerate(steps):
        server = servers[index % len(servers)] if servers else None
        if what == "join" or server is None:
            if len(servers) < 4:
                servers.append(Server(world, f"s{number}"))
                servers[-1].tick()
        elif what == "ask":
            if server.ask(amount):
                granted_tokens += min(amount, 600)
                granted_requests += 1
        elif what == "tick":
            server.tick()
        elif what == "break":
            with suppress(StateUnavailable):
                server.break_off(is_committed=amount % 2 == 0)
        elif what == "wait":
            world.now += amount / 100
        elif what == "settle":
            server.settle()
        else:
            servers.remove(server)
            if what == "leave":
                server.settle()
                server.leases.release(world.database)
            world.alive.discard(server.name)
        elapsed = world.now - began
        assert granted_tokens <= 600 * (1 + elapsed / 60) + 1e-6
        assert granted_requests <= 60 * (1 + elapsed / 60) + 1e-6
        assert sum(len(each.running) for each in servers) <= 4
        assert sum(each.share() for each in servers) <= 1 + 1e-6
        # Not only what was granted: also what could be, at this moment, everywhere.
        assert granted_tokens + sum(each.level("tokens") for each in servers) <= 600 * (1 + elapsed / 60) + 1e-6
        assert granted_requests + sum(each.level("requests") for each in servers) <= 60 * (1 + elapsed / 60) + 1e-6
        assert sum(len(each.running) + each.level("in_flight") for each in servers) <= 4 + 1e-6


@given(
    st.integers(1, 1000),
    st.dictionaries(
        st.text("abc", min_size=1, max_size=2),
        st.builds(Claimant, share=st.floats(0, 1), demand=st.floats(0, 1e6), need=st.floats(0, 1000)),
        min_size=1,
        max_size=5,
    ),
)
def test_a_bucket_is_split_whole_and_usefully(whole: int, claimants: dict[str, Claimant]) -> None:
    shares = split(float(whole), claimants)
    assert shares.keys() == claimants.keys()
    assert sum(shares.values()) == pytest.approx(1.0)
    useful = [name for name, share in shares.items() if share > 0]
    assert all(shares[name] * whole >= 1 - 1e-6 for name in useful)
