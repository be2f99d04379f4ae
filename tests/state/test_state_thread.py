"""The thread that owns the database: callers wait for it only where they ask to, and it outlives outages."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from inferd import clock
from inferd.errors import StateUnavailable
from inferd.state.database import Database, next_number
from inferd.state.open import open_database
from inferd.state.thread import StateThread


def _next(database: Database) -> int:
    with database.transaction(durable=False) as transaction:
        return next_number(transaction, "keys")


def test_jobs_run_in_order_and_answer(tmp_path: Path) -> None:
    thread = StateThread(lambda: open_database(None, tmp_path))
    thread.start(open_database(None, tmp_path))

    async def ask() -> list[int]:
        return list(await asyncio.gather(*(thread.call(_next) for _ in range(20))))

    assert asyncio.run(ask()) == list(range(1, 21))
    thread.close()


def test_what_is_asked_before_the_end_is_done(tmp_path: Path) -> None:
    thread = StateThread(lambda: open_database(None, tmp_path))
    farewell: list[int] = []
    thread.run_at_close(lambda database: farewell.append(_next(database)))
    thread.start(open_database(None, tmp_path))
    futures = [thread.submit(_next) for _ in range(10)]
    thread.close()
    assert [future.result(0) for future in futures] == list(range(1, 11))
    assert farewell == [11]
    with pytest.raises(StateUnavailable):
        thread.submit(_next).result(0)


def test_a_call_on_a_blocked_database_ends_after_its_wait(tmp_path: Path) -> None:
    gate = threading.Event()
    thread = StateThread(lambda: open_database(None, tmp_path))
    thread.start(open_database(None, tmp_path))
    blocked = thread.submit(lambda database: gate.wait(30))

    async def ask() -> float:
        began = clock.now()
        with pytest.raises(StateUnavailable, match="in time"):
            await thread.call(_next, wait_s=0.1)
        return clock.now() - began

    assert asyncio.run(ask()) < 5.0
    gate.set()
    assert blocked.result(10)
    assert thread.submit(_next).result(10) == 1, "the job whose caller had given up must not have run"
    thread.close()


def test_a_lost_connection_is_made_again(tmp_path: Path) -> None:
    opened: list[Database] = []

    def connect() -> Database:
        opened.append(open_database(None, tmp_path))
        return opened[-1]

    thread = StateThread(connect)
    ran = threading.Semaphore(0)

    def task(database: Database) -> None:
        _next(database)
        ran.release()

    thread.run_every(0.01, task)
    thread.start(connect())
    assert ran.acquire(timeout=10)
    (tmp_path / "state.db").unlink()
    while len(opened) < 2:
        assert ran.acquire(timeout=10)
    thread.close()
    assert len(opened) == 2


def test_a_task_runs_at_the_start_and_then_when_its_time_has_come(tmp_path: Path) -> None:
    thread = StateThread(lambda: open_database(None, tmp_path))
    rarely: list[int] = []
    often = threading.Semaphore(0)
    thread.run_every(3600.0, lambda database: rarely.append(1))
    thread.run_every(0.01, lambda database: often.release())
    thread.start(open_database(None, tmp_path))
    for _ in range(20):
        assert often.acquire(timeout=10)
        thread.submit(_next).result(10)
    thread.close()
    assert len(rarely) == 1


def test_a_defect_in_one_task_stops_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    thread = StateThread(lambda: open_database(None, tmp_path))
    ran = threading.Semaphore(0)

    def broken(database: Database) -> None:
        raise ValueError("a defect")

    thread.run_every(0.01, broken)
    thread.run_every(0.01, lambda database: ran.release())
    thread.start(open_database(None, tmp_path))
    for _ in range(3):
        assert ran.acquire(timeout=10)
    thread.close()
    assert "a task of the state thread failed" in caplog.text
