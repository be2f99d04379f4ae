"""The books: each request counts once, whenever the process dies and however often it is started."""

from __future__ import annotations

import calendar
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferd.errors import StateUnavailable
from inferd.state.database import Database
from inferd.state.open import open_database
from inferd.tenancy import usage as usage_module
from inferd.tenancy.usage import Entry, UsageJournal, day_of, forget_before, read_usage

DAY = 86_400.0
NOON = float(calendar.timegm((2026, 11, 21, 12, 0, 0)))


@pytest.fixture
def database(state_url: str, tmp_path: Path) -> Iterator[Database]:
    made = open_database(state_url, tmp_path)
    yield made
    made.close()


def entry(tenant: str = "t", model: str = "m", prompt: int = 3, completion: int = 4, at: float = NOON) -> Entry:
    return Entry(at, tenant, "key", model, prompt, completion)


def total(database: Database) -> tuple[int, int, int]:
    (row,) = read_usage(database, by=())
    return row.requests, row.prompt_tokens, row.completion_tokens


def test_sums_by_whatever_is_asked(database: Database, tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, None)
    journal.record(entry("a", "x"))
    journal.record(entry("a", "x", at=NOON + DAY))
    journal.record(entry("b", "y", prompt=2**40))
    journal.enter(database)
    assert [(row.day, row.tenant, row.model, row.requests) for row in read_usage(database)] == [
        ("2026-11-21", "a", "x", 1),
        ("2026-11-21", "b", "y", 1),
        ("2026-11-22", "a", "x", 1),
    ]
    assert [(row.tenant, row.requests) for row in read_usage(database, by=("tenant",))] == [("a", 2), ("b", 1)]
    assert [row.tenant for row in read_usage(database, by=("tenant",), since="2026-11-22")] == ["a"]
    assert [row.prompt_tokens for row in read_usage(database, by=(), tenant="b")] == [2**40]
    journal.close(database)
    assert list((tmp_path / "usage").iterdir()) == []


def test_the_use_of_devices_is_summed_beside_requests_and_counts_as_none(database: Database, tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, None)
    journal.record(entry("a"))
    journal.record(entry("b"))
    journal.record(Entry(NOON, "a", "", "m", 0, 0, 0, 1.5, None))
    journal.enter(database)
    journal.record(Entry(NOON, "a", "", "m", 0, 0, 0, 0.5, 200.0))
    journal.enter(database)
    journal.record(Entry(NOON, "a", "", "m", 0, 0, 0, 1.0, None))
    journal.record(Entry(NOON, "a", "", "m", 0, 0, 0, 1.0, 50.0))
    journal.enter(database)
    found = read_usage(database, by=("tenant",))
    assert [(row.tenant, row.requests, row.device_s, row.energy_j) for row in found] == [
        ("a", 1, 4.0, 250.0),
        ("b", 1, 0.0, None),
    ]
    journal.close(database)


def test_a_journal_of_an_older_version_is_entered(database: Database, tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, None)
    journal.record((NOON, "t", "key", "m", 3, 4))  # type: ignore[arg-type]
    journal.enter(database)
    assert total(database) == (1, 3, 4)
    journal.close(database)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.lists(st.sampled_from(["record", "record", "enter", "fail", "crash"]), max_size=40))
def test_each_record_counts_once(database: Database, tmp_path: Path, steps: list[str]) -> None:
    """Whatever fails between: a process that dies keeps its files, the next one enters them."""
    before = total(database)[0]
    journal = UsageJournal(tmp_path, None)
    recorded = 0
    for step in steps:
        if step == "record":
            journal.record(entry())
            recorded += 1
        elif step == "enter":
            journal.enter(database)
        elif step == "fail":
            try:
                journal.enter(_Failing(database))
            except StateUnavailable:
                continue
        else:
            die(journal)
            journal = UsageJournal(tmp_path, None)
            journal.recover(database)
    journal.close(database)
    assert total(database)[0] - before == recorded
    assert journal.recover(database) == 0


def die(journal: UsageJournal) -> None:
    """What the kernel does to a killed process's files: the locks go, what was written stays."""
    for segment in (*journal._segments, *journal._spares):
        segment.memory.close()
        os.close(segment._file)


class _Failing:
    """A database whose transactions fail at their end."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.where = database.where
        self.reading, self.check = database.reading, database.check
        self.is_local, self.close, self.erase = database.is_local, database.close, database.erase

    def transaction(self, *, durable: bool = True) -> _Rollback:
        return _Rollback(self._database)


class _Rollback:
    def __init__(self, database: Database) -> None:
        self._inner = database.transaction()

    def __enter__(self):  # type: ignore[no-untyped-def]
        return self._inner.__enter__()

    def __exit__(self, *exc: object) -> None:
        error = StateUnavailable("the commit failed")
        self._inner.__exit__(StateUnavailable, error, None)
        raise error


def test_a_killed_process_loses_nothing_that_it_recorded(database: Database, tmp_path: Path, state_url: str) -> None:
    program = """
import os, sys
from pathlib import Path
from inferd.state.open import open_database
from inferd.tenancy.usage import Entry, UsageJournal
database = open_database(sys.argv[1], Path(sys.argv[2]))
journal = UsageJournal(Path(sys.argv[2]), sys.argv[1])
for number in range(1000):
    journal.record(Entry(1e9, "t", "k", "m", 1, number))
    if number == 400:
        journal.enter(database)
    print(number, flush=True)
    if number == 700:
        os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, state_url, str(tmp_path)], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    acknowledged = len(done.stdout.split())
    for _ in range(2):
        UsageJournal(tmp_path, state_url).recover(database)
        assert total(database) == (acknowledged, acknowledged, sum(range(acknowledged)))
    assert list((tmp_path / "usage").iterdir()) == []


def test_a_living_process_keeps_its_journal(database: Database, tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, None)
    journal.record(entry())
    assert UsageJournal(tmp_path, None).recover(database) == 0
    journal.close(database)
    assert total(database)[0] == 1


def test_a_journal_of_another_database_is_left_for_it(database: Database, tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, "postgresql://elsewhere/x")
    journal.record(entry())
    die(journal)
    assert UsageJournal(tmp_path, None).recover(database) == 0
    assert UsageJournal(tmp_path, "postgresql://elsewhere/x").recover(database) == 1


def test_a_journal_that_another_process_enters_at_the_same_moment_is_left_to_it(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        journal = UsageJournal(tmp_path, None)
        journal.record(entry())
        die(journal)
    files = sorted(tmp_path.rglob("*.journal"))
    lock = fcntl.flock

    def locked(file: IO[bytes], how: int) -> None:
        lock(file, how)
        if len(files) == 3:  # this one was opened, and the other process was quicker
            files.pop(0).unlink()

    monkeypatch.setattr("fcntl.flock", locked)
    assert UsageJournal(tmp_path, None).recover(database) == 2
    assert total(database)[0] == 2


def test_a_torn_record_ends_the_journal(database: Database, tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, None)
    for _ in range(3):
        journal.record(entry())
    segment = journal._segments[0]
    segment.memory[segment.written - 2] ^= 0xFF
    die(journal)
    assert UsageJournal(tmp_path, None).recover(database) == 2


def test_full_segments_follow_each_other(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.tenancy.usage.SEGMENT_BYTES", 4096)
    journal = UsageJournal(tmp_path, None)
    for number in range(500):
        journal.record(entry(model=f"model-{number % 7}"))
        if number % 150 == 149:
            journal.enter(database)
    assert len(journal._segments) > 1
    journal.enter(database)
    assert len(journal._segments) == 1
    journal.close(database)
    assert total(database) == (500, 1500, 2000)


def test_what_was_entered_leaves_no_file_and_no_position(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.tenancy.usage.SEGMENT_BYTES", 4096)
    journal = UsageJournal(tmp_path, None)

    def left() -> tuple[int, int]:
        with database.transaction() as transaction:
            ((positions,),) = transaction.rows("SELECT count(*) FROM journals")
        assert isinstance(positions, int)
        return len(list((tmp_path / "usage").iterdir())), positions

    for _ in range(500):
        journal.record(entry())
    files, _ = left()
    assert files > 3
    journal.enter(database)
    files, positions = left()
    assert files == 2, "one that is written to, and one that is ready for the next"
    assert positions <= 1
    journal.close(database)
    assert left() == (0, 0)
    assert total(database)[0] == 500


def test_a_disk_without_room_keeps_usage_in_memory(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "usage").write_text("a file where the folder should be")
    journal = UsageJournal(tmp_path, None)
    for _ in range(10):
        journal.record(entry())
    journal.enter(database)
    assert total(database)[0] == 10
    assert journal.num_lost == 0
    assert "held in memory" in caplog.text


def test_usage_that_has_room_nowhere_is_counted_and_told_once(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_module, "MAX_KEPT_IN_MEMORY", 4)
    (tmp_path / "usage").write_text("a file where the folder should be")
    journal = UsageJournal(tmp_path, None)
    for _ in range(10):
        journal.record(entry())
    for _ in range(2):
        journal.enter(database)
    assert (total(database)[0], journal.num_lost) == (4, 6)
    assert [record.message for record in caplog.records if "is lost" in record.message] == [
        "the usage of 6 requests is lost: no space on the disk or in memory"
    ]
    journal.record(entry())
    journal.enter(database)
    assert total(database)[0] == 5, "there is room again"


def test_old_usage_is_forgotten(database: Database, tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, None)
    for day in range(5):
        journal.record(entry(at=NOON - day * DAY))
    journal.close(database)
    assert forget_before(database, 2, NOON) == 2
    assert [row.day for row in read_usage(database, by=("day",))] == [day_of(NOON - d * DAY) for d in (2, 1, 0)]


def test_a_spare_segment_is_ready_before_it_is_needed(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop takes it, and makes a file itself only where none is there."""
    made: list[Path] = []
    make = UsageJournal._make

    def counted(journal: UsageJournal) -> object:
        made.append(tmp_path)
        return make(journal)

    monkeypatch.setattr(UsageJournal, "_make", counted)
    journal = UsageJournal(tmp_path, None)
    journal.prepare()
    journal.prepare()
    assert (len(made), len(journal._spares)) == (1, 1)
    journal.record(entry())
    assert (len(made), len(journal._spares), len(journal._segments)) == (1, 0, 1)
    journal.record(entry())
    assert len(made) == 1, "the segment has room"
    journal.enter(database)
    assert (len(made), len(journal._spares), len(journal._segments)) == (2, 1, 1)
    journal.close(database)
    assert list((tmp_path / "usage").iterdir()) == []
