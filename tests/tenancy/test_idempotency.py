"""One execution per Idempotency-Key: in a row, at once, on several servers and after a crash."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd import clock
from inferd.errors import IdempotencyConflict
from inferd.state.database import Database
from inferd.state.open import open_database
from inferd.state.presence import LockedPresence
from inferd.state.thread import StateThread
from inferd.tenancy import idempotency
from inferd.tenancy.idempotency import Claim, IdempotencyStore, StoredAnswer

ANSWER = StoredAnswer(
    200, b"application/json", b'{"n": 1}', ((b"inference-header-content-length", b"8"), (b"x-note", b"a: b"))
)


class Place:
    """A server's store, with its thread and presence, as ``Control`` makes them."""

    def __init__(self, url: str, folder: Path, ttl_s: float = 60.0, wait_s: float = 10.0) -> None:
        database = open_database(url, folder)
        self.presence = LockedPresence(folder / "run")
        self.presence.enter(database)
        self.thread = StateThread(lambda: open_database(url, folder))
        self.store = IdempotencyStore(ttl_s, self.thread, self.presence, wait_s=wait_s)
        self.thread.start(database)

    def die(self) -> None:
        """The locks of a killed process go; its files and rows stay."""
        self.thread.close()
        assert self.presence._file is not None
        os.close(self.presence._file)

    def close(self) -> None:
        self.thread.close()
        self.presence.unlock()


@pytest.fixture
def place(state_url: str, tmp_path: Path) -> Iterator[Place]:
    made = Place(state_url, tmp_path)
    yield made
    made.close()


async def executed(store: IdempotencyStore, counter: list[int], body: bytes = b"body", key: str = "k") -> StoredAnswer:
    """What the gateway does."""
    found = await store.begin("tenant", key, body)
    if isinstance(found, StoredAnswer):
        return found
    counter.append(1)
    await asyncio.sleep(0)
    await found.finish(ANSWER)
    return ANSWER


def test_a_repeated_request_gets_the_first_ones_answer(place: Place) -> None:
    async def run() -> None:
        runs: list[int] = []
        for _ in range(3):
            assert await executed(place.store, runs) == ANSWER
        assert len(runs) == 1
        await executed(place.store, runs, key="other")
        assert isinstance(await place.store.begin("another tenant", "k", b"body"), Claim)
        assert len(runs) == 2

    asyncio.run(run())


def test_twenty_at_once_are_one_execution(place: Place) -> None:
    async def run() -> None:
        runs: list[int] = []
        answers = await asyncio.gather(*(executed(place.store, runs) for _ in range(20)))
        assert answers == [ANSWER] * 20
        assert len(runs) == 1

    asyncio.run(run())


def test_another_body_is_refused_whether_or_not_the_first_is_done(place: Place) -> None:
    async def run() -> None:
        claim = await place.store.begin("tenant", "k", b"one")
        assert isinstance(claim, Claim)
        for _ in range(2):
            with pytest.raises(IdempotencyConflict) as refused:
                await place.store.begin("tenant", "k", b"two")
            assert refused.value.code == "idempotency_key_reused"
            await claim.finish(ANSWER)

    asyncio.run(run())


def test_when_the_first_request_fails_one_waiting_request_runs(place: Place) -> None:
    async def run() -> None:
        claim = await place.store.begin("tenant", "k", b"body")
        assert isinstance(claim, Claim)
        runs: list[int] = []
        waiting = [asyncio.create_task(executed(place.store, runs)) for _ in range(5)]
        await asyncio.sleep(0)
        claim.abandon()
        claim.abandon()
        assert await asyncio.gather(*waiting) == [ANSWER] * 5
        assert len(runs) == 1

    asyncio.run(run())


def test_a_waiting_request_is_refused_after_the_longest_wait(state_url: str, tmp_path: Path) -> None:
    place = Place(state_url, tmp_path, wait_s=0.05)

    async def run() -> None:
        claim = await place.store.begin("tenant", "k", b"body")
        assert isinstance(claim, Claim)
        with pytest.raises(IdempotencyConflict) as refused:
            await place.store.begin("tenant", "k", b"body")
        assert refused.value.code == "idempotency_in_progress"

    asyncio.run(run())
    place.close()


def test_a_finished_answer_survives_a_crash_and_an_unfinished_one_runs_again(state_url: str, tmp_path: Path) -> None:
    first = Place(state_url, tmp_path)

    async def before() -> None:
        await executed(first.store, [])
        assert isinstance(await first.store.begin("tenant", "unfinished", b"body"), Claim)

    asyncio.run(before())
    first.die()
    second = Place(state_url, tmp_path)

    async def after() -> None:
        runs: list[int] = []
        assert await executed(second.store, runs) == ANSWER
        assert runs == []
        assert await executed(second.store, runs, key="unfinished") == ANSWER
        assert len(runs) == 1

    asyncio.run(after())
    second.close()


def test_two_servers_do_not_both_run_it(state_url: str, tmp_path: Path) -> None:
    places = [Place(state_url, tmp_path) for _ in range(2)]

    async def run() -> None:
        claim = await places[0].store.begin("tenant", "k", b"body")
        assert isinstance(claim, Claim)
        with pytest.raises(IdempotencyConflict) as refused:
            await places[1].store.begin("tenant", "k", b"body")
        assert refused.value.code == "idempotency_in_progress"
        await claim.finish(ANSWER)
        assert await places[1].store.begin("tenant", "k", b"body") == ANSWER

    asyncio.run(run())
    for place in places:
        place.close()


def test_answers_are_forgotten_after_their_time(
    state_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(state_url, tmp_path, ttl_s=60.0)

    async def run() -> None:
        runs: list[int] = []
        await executed(place.store, runs)
        wall, now = clock.wall(), clock.now()
        monkeypatch.setattr("inferd.clock.wall", lambda: wall + 61)
        monkeypatch.setattr("inferd.clock.now", lambda: now + 61)
        await place.thread.call(place.store.purge)
        assert await place.thread.call(_count) == 0
        await executed(place.store, runs)
        assert len(runs) == 2

    asyncio.run(run())
    place.close()


def test_the_answer_of_another_server_is_forgotten_after_its_time(
    state_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Place(state_url, tmp_path, ttl_s=60.0), Place(state_url, tmp_path, ttl_s=60.0)

    async def run() -> None:
        runs: list[int] = []
        await executed(one.store, runs)
        wall, now = clock.wall(), clock.now()
        for later_s, num_runs in ((0, 1), (58, 1), (61, 2)):
            monkeypatch.setattr("inferd.clock.wall", lambda later_s=later_s: wall + later_s)
            monkeypatch.setattr("inferd.clock.now", lambda later_s=later_s: now + later_s)
            await executed(two.store, runs)
            assert len(runs) == num_runs

    asyncio.run(run())
    one.close()
    two.close()


def test_a_forgotten_answer_is_in_no_file_any_more(tmp_path: Path) -> None:
    place = Place(f"sqlite://{tmp_path}/state.db", tmp_path, ttl_s=0.01)

    async def run() -> None:
        claim = await place.store.begin("tenant", "k", b"body")
        assert isinstance(claim, Claim)
        await claim.finish(StoredAnswer(200, b"text/plain", b"a canary's song, " * 1000))
        assert any(b"canary" in file.read_bytes() for file in tmp_path.glob("state.db*")), "it was kept"
        while await place.thread.call(_count):
            await place.thread.call(place.store.purge)

    asyncio.run(run())
    place.close()
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"canary" not in file.read_bytes()


def _count(database: Database) -> object:
    with database.reading() as transaction:
        return transaction.rows("SELECT count(*) FROM answers")[0][0]


def test_what_is_kept_is_bounded_in_bytes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_TENANT_BYTES", 5000)
    monkeypatch.setattr(idempotency, "MAX_ANSWER_BYTES", 2000)
    small = IdempotencyStore(60.0, place.thread, place.presence, max_bytes=3000)

    async def run() -> None:
        for number in range(12):
            claim = await small.begin("tenant", f"k{number}", b"body")
            assert isinstance(claim, Claim)
            await claim.finish(StoredAnswer(200, b"t", bytes(1000)))
        assert small._num_bytes <= 3000
        assert await place.thread.call(_count) == 5
        large = await small.begin("tenant", "large", b"body")
        assert isinstance(large, Claim)
        await large.finish(StoredAnswer(200, b"t", bytes(2001)))
        assert isinstance(await small.begin("tenant", "large", b"body"), Claim), "too large to keep: it runs again"

    asyncio.run(run())


def test_without_the_database_memory_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = Place(f"sqlite://{tmp_path}/state.db", tmp_path)

    place.thread.close()  # nothing is taken any more: as after an outage

    async def run() -> None:
        runs: list[int] = []
        answers = await asyncio.gather(*(executed(place.store, runs) for _ in range(5)))
        assert answers == [ANSWER] * 5
        assert len(runs) == 1

    asyncio.run(run())
    assert "in this process alone" in caplog.text
    place.presence.unlock()


def test_a_store_without_a_database_works() -> None:
    async def run() -> None:
        store, runs = IdempotencyStore(60.0), list[int]()
        await asyncio.gather(*(executed(store, runs) for _ in range(20)))
        assert len(runs) == 1

    asyncio.run(run())


def test_many_small_answers_take_no_more_memory_than_few_large_ones() -> None:
    async def run() -> None:
        store = IdempotencyStore(60.0, max_bytes=10_000)
        for number in range(100):
            await executed(store, [], key=f"k{number}")
        assert 5 < len(store._answers) < 20
        assert isinstance(await store.begin("tenant", "k99", b"body"), StoredAnswer)

    asyncio.run(run())
