"""What was promised to outlive a power cut is committed so: keys, usage, answers for an Idempotency-Key."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferd import clock
from inferd.state.database import Database
from inferd.state.presence import LockedPresence
from inferd.state.sqlite import SqliteDatabase, _Transaction
from inferd.state.thread import StateThread
from inferd.tenancy.idempotency import IdempotencyStore, StoredAnswer
from inferd.tenancy.keys import KeySpec, create_key, revoke_key, rotate_key
from inferd.tenancy.principal import OPERATOR
from inferd.tenancy.usage import Entry, UsageJournal

FULL = (2,)  # SQLite's number for: every commit waits until the disk has it


class Watched(SqliteDatabase):
    """A database that notes, for each commit that changed a row, what SQLite does for its durability."""

    def __init__(self, path: Path) -> None:
        self.commits: list[tuple[object, ...]] = []
        super().__init__(path)

    @contextlib.contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[_Transaction]:
        with super().transaction(durable=durable) as transaction:
            before = transaction.rows("SELECT total_changes()")
            yield transaction
            if transaction.rows("SELECT total_changes()") != before:
                self.commits += transaction.rows("PRAGMA synchronous")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path / "state.db")
    with made.transaction(durable=False):
        pass  # what a commit that need not be durable leaves behind is there
    made.commits.clear()
    yield made
    made.close()


def _create(database: Database) -> None:
    create_key(database, KeySpec(tenant="t"), by=OPERATOR, now=clock.wall())


def _revoke(database: Database) -> None:
    made = create_key(database, KeySpec(tenant="t"), by=OPERATOR, now=clock.wall())
    revoke_key(database, made.info.id, now=clock.wall())


def _rotate(database: Database) -> None:
    made = create_key(database, KeySpec(tenant="t"), by=OPERATOR, now=clock.wall())
    rotate_key(database, made.info.id, by=OPERATOR, overlap_s=1.0, now=clock.wall())


@pytest.mark.parametrize(("change", "num_commits"), [(_create, 1), (_revoke, 2), (_rotate, 2)])
def test_a_key_that_was_shown_or_revoked_is_durable(
    database: Watched, change: Callable[[Database], None], num_commits: int
) -> None:
    change(database)
    assert database.commits == [FULL] * num_commits


def test_usage_is_durable_before_its_journal_goes(database: Watched, tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, None)
    journal.record(Entry(clock.wall(), "t", "key", "m", 3, 4))
    (written,) = (tmp_path / "usage").iterdir()
    left = written.read_bytes()
    journal.enter(database)
    assert database.commits == [FULL]
    database.commits.clear()
    written.with_name(f"{written.name.partition('-')[0]}-left.journal").write_bytes(left)  # by a process that is gone
    assert UsageJournal(tmp_path, None).recover(database) == 1
    assert database.commits == [FULL] * 2


def test_an_answer_kept_for_its_idempotency_key_is_durable(database: Watched, tmp_path: Path) -> None:
    async def scenario() -> None:
        thread = StateThread(lambda: database)
        presence = LockedPresence(tmp_path)
        presence.enter(database)
        thread.start(database)
        store = IdempotencyStore(60, thread, presence)
        claim = await store.begin("t", "key", b"digest")
        assert not isinstance(claim, StoredAnswer)
        database.commits.clear()
        await claim.finish(StoredAnswer(200, b"text/plain", b"answer", ()))
        assert database.commits == [FULL]
        await asyncio.to_thread(thread.close)
        presence.unlock()

    asyncio.run(scenario())
