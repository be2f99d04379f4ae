"""Which servers use a database: one on this machine by the lock of its file, one elsewhere by its heartbeats."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.state.database import Database
from inferd.state.open import open_database
from inferd.state.presence import TERM_S, LockedPresence, Members


class Everywhere:
    """A database that servers of several machines use, as it says itself."""

    def __init__(self, database: Database) -> None:
        self.where = database.where
        self.transaction, self.reading = database.transaction, database.reading
        self.check, self.close, self.erase = database.check, database.close, database.erase

    def is_local(self) -> bool:
        return False


@pytest.fixture
def database(state_url: str, tmp_path: Path) -> Iterator[Database]:
    made = open_database(state_url, tmp_path)
    yield made
    made.close()


def members(presence: LockedPresence, database: Database) -> Members:
    with database.reading() as transaction:
        return presence.members(transaction)


def wait(database: Database, server: str, seconds: float) -> None:
    """As if so much time had passed since the last heartbeat."""
    with database.transaction() as transaction:
        transaction.execute("UPDATE gateways SET seen_at = seen_at - ? WHERE id = ?", (seconds, server))


def test_a_server_elsewhere_lives_until_its_heartbeats_are_missing_and_again_when_they_come(
    database: Database, tmp_path: Path
) -> None:
    shared = Everywhere(database)
    here, there = LockedPresence(tmp_path / "here"), LockedPresence(tmp_path / "there")
    both = frozenset((here.id, there.id))
    for presence in (here, there):
        presence.enter(shared)
    try:
        assert members(here, shared) == members(there, shared) == Members(both, frozenset())
        wait(shared, there.id, TERM_S / 2)
        assert members(here, shared) == Members(both, frozenset())
        wait(shared, there.id, TERM_S / 2)
        assert members(here, shared) == Members(frozenset((here.id,)), frozenset((there.id,)))
        there.beat(shared)
        assert members(here, shared) == Members(both, frozenset())
    finally:
        here.unlock()
        there.unlock()


ENTER = """
import sys
from pathlib import Path
from inferd.state.open import open_database
from inferd.state.presence import LockedPresence
presence = LockedPresence(Path(sys.argv[2]))
presence.enter(open_database(sys.argv[1], Path(sys.argv[2])))
print(presence.id, flush=True)
sys.stdin.read()
"""


def test_a_server_on_this_machine_lives_without_heartbeats_and_dies_with_its_process(
    database: Database, state_url: str, tmp_path: Path
) -> None:
    shared = Everywhere(database)
    here = LockedPresence(tmp_path)
    here.enter(shared)
    command = [sys.executable, "-c", ENTER, state_url, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            there = process.stdout.readline().strip()
            wait(shared, there, 10 * TERM_S)
            assert members(here, shared) == Members(frozenset((here.id, there)), frozenset())
            wait(shared, there, -10 * TERM_S)
            process.kill()
            process.wait()
            assert members(here, shared) == Members(frozenset((here.id,)), frozenset((there,)))
        finally:
            process.kill()
            here.unlock()


def test_a_server_of_a_database_on_this_machine_whose_file_is_gone_is_dead_at_once(tmp_path: Path) -> None:
    database = open_database(f"sqlite://{tmp_path}/state.db", tmp_path)
    first, second = LockedPresence(tmp_path / "run"), LockedPresence(tmp_path / "run")
    for presence in (first, second):
        presence.enter(database)
    try:
        second.unlock()  # it left, and could not remove its row
        assert members(first, database) == Members(frozenset((first.id,)), frozenset((second.id,)))
    finally:
        first.unlock()
        database.close()
