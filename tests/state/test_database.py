"""What both databases promise: all or nothing, bounded waits, and no harm to what they do not understand."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.stopwatch import Stopwatch

from inferd.errors import ConfigError, StateUnavailable
from inferd.state.database import next_number, number
from inferd.state.open import open_database
from inferd.state.schema import MIGRATIONS, VERSION


def test_a_transaction_is_all_or_nothing(state_url: str, tmp_path: Path) -> None:
    database = open_database(state_url, tmp_path)
    with database.transaction() as transaction:
        next_number(transaction, "keys")

    def fail() -> None:
        with database.transaction() as transaction:
            next_number(transaction, "keys")
            raise KeyError("in the middle")

    with pytest.raises(KeyError):
        fail()
    with database.reading() as transaction:
        assert number(transaction, "keys") == 1
    database.close()


def test_opening_it_again_changes_nothing(state_url: str, tmp_path: Path) -> None:
    for expected in (1, 2):
        database = open_database(state_url, tmp_path)
        with database.transaction() as transaction:
            assert next_number(transaction, "keys") == expected
            assert transaction.rows("SELECT version FROM inferd_schema") == [(VERSION,)]
        database.close()


def test_values_are_never_part_of_the_statement(state_url: str, tmp_path: Path) -> None:
    evil = "'; DROP TABLE keys; -- %s ? \\"
    database = open_database(state_url, tmp_path)
    with database.transaction() as transaction:
        transaction.execute("INSERT INTO journals (name, position) VALUES (?, ?)", (evil, 1))
        assert transaction.rows("SELECT name FROM journals WHERE name = ?", (evil,)) == [(evil,)]
        assert number(transaction, "keys") == 0
    database.close()


def test_a_newer_schema_is_refused_and_left_alone(state_url: str, tmp_path: Path) -> None:
    database = open_database(state_url, tmp_path)
    with database.transaction() as transaction:
        transaction.execute("UPDATE inferd_schema SET version = ?", (VERSION + 1,))
        transaction.execute("CREATE TABLE of_the_future (x BIGINT)")
    database.close()
    before = b""
    if state_url.startswith("sqlite"):
        connection = sqlite3.connect(tmp_path / "state.db")
        connection.execute("PRAGMA journal_mode = DELETE")  # as that build may want it
        connection.close()
        before = (tmp_path / "state.db").read_bytes()
    with pytest.raises(ConfigError, match="newer inferd"):
        open_database(state_url, tmp_path)
    if before:
        assert (tmp_path / "state.db").read_bytes() == before


def test_an_interrupted_migration_leaves_the_old_schema(
    state_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_database(state_url, tmp_path).close()
    for module in ("inferd.state.database", "inferd.state.sqlite", "inferd.state.postgres"):
        if module in sys.modules:
            monkeypatch.setattr(f"{module}.VERSION", VERSION + 1)
    steps = (*MIGRATIONS, ("CREATE TABLE half_done (x BIGINT)", "THIS IS NOT SQL"))
    monkeypatch.setattr("inferd.state.database.MIGRATIONS", steps)
    with pytest.raises((ConfigError, StateUnavailable)):
        open_database(state_url, tmp_path)
    monkeypatch.undo()
    database = open_database(state_url, tmp_path)
    with pytest.raises(StateUnavailable), database.reading() as transaction:
        transaction.rows("SELECT x FROM half_done")
    database.close()


def test_a_killed_migration_leaves_nothing_half_done(tmp_path: Path) -> None:
    """Killed between any two statements of the first migration: the next start finds an empty database, or all of it."""
    program = """
import os, sys
from pathlib import Path
import inferd.state.sqlite as module
run, left = module._Transaction.execute, int(sys.argv[2])
def counted(self, sql, values=()):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
    return run(self, sql, values)
module._Transaction.execute = counted
module.SqliteDatabase(Path(sys.argv[1]))
"""
    for survived in (0, 3, 9, 14):
        path = tmp_path / f"{survived}.db"
        done = subprocess.run([sys.executable, "-c", program, str(path), str(survived)], check=False, timeout=60)
        assert done.returncode == -signal.SIGKILL
        database = open_database(f"sqlite://{path}", tmp_path)
        with database.transaction() as transaction:
            assert next_number(transaction, "keys") == 1
        database.close()


def _count(url: str, folder: Path, times: int) -> None:
    database = open_database(url, folder)
    for _ in range(times):
        with database.transaction(durable=False) as transaction:
            next_number(transaction, "keys")
    database.close()


def test_a_new_database_waits_for_the_lock_of_another_process(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE another (number)")
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, lambda: other.execute("COMMIT"))
    release.start()
    open_database(f"sqlite://{path}", tmp_path).close()
    release.join()
    other.close()


def test_processes_that_start_together_agree(state_url: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_count, args=(state_url, tmp_path, 25)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    database = open_database(state_url, tmp_path)
    with database.reading() as transaction:
        assert number(transaction, "keys") == 75
    database.close()


def test_a_locked_database_is_waited_for_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.state.sqlite.LOCK_WAIT_S", 0.2)
    database = open_database(None, tmp_path)
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    watch = Stopwatch()
    with pytest.raises(StateUnavailable, match="Another process"), database.transaction():
        pass
    assert watch.seconds < 2.0
    other.execute("ROLLBACK")
    other.close()
    with database.transaction() as transaction:
        assert next_number(transaction, "keys") == 1
    database.close()


def test_a_statement_that_fails_is_not_told_as_a_lock(tmp_path: Path) -> None:
    database = open_database(None, tmp_path)
    failure = pytest.raises(StateUnavailable, match=r"The database failed: no such table: absent\. Check ")
    with failure, database.reading() as transaction:
        transaction.rows("SELECT 1 FROM absent")
    database.close()


@pytest.mark.parametrize(
    "content", [b"this is no database, but long enough to be one" * 100, b"SQLite format 3\0" + b"\xff" * 4096]
)
def test_a_damaged_file_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is damaged or not a SQLite database .* restore a copy of it"):
        open_database(None, tmp_path)
    assert path.read_bytes() == content


def test_a_database_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    open_database(None, tmp_path).close()
    program = (
        "import os, sys; from pathlib import Path; from inferd.errors import ConfigError\n"
        "from inferd.state import sqlite; from inferd.state.open import open_database\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: open_database(None, Path(sys.argv[1]))\n"
        "except ConfigError as error: print(error.message)\n"
    )
    (tmp_path / "state.db").chmod(0o444)
    tmp_path.chmod(0o555)
    if os.getuid() == 0:  # root may write anywhere, so another user tries; pytest's folders must let it in
        for folder in tmp_path.parents[:3]:
            folder.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    tmp_path.chmod(0o755)
    assert "cannot be opened (Permission denied)" in done.stdout, done.stderr


def test_a_durable_commit_waits_for_the_disk_whatever_was_committed_before(tmp_path: Path) -> None:
    database = open_database(None, tmp_path)
    found = []
    for durable in (True, False, False, True, False, True):
        with database.transaction(durable=durable) as transaction:
            found += transaction.rows("PRAGMA synchronous")
    database.close()
    normal, full = (1,), (2,)  # SQLite's numbers; 0 is OFF, which a crash of the machine may leave as a damaged file
    assert found == [full, normal, normal, full, normal, full]


def test_a_file_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    database = open_database(None, tmp_path)
    database.check()
    (tmp_path / "state.db").rename(tmp_path / "moved.db")
    with pytest.raises(StateUnavailable):
        database.check()
    database.close()


def test_the_file_is_its_users_alone(tmp_path: Path) -> None:
    database = open_database(None, tmp_path / "new")
    database.close()
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
    assert (tmp_path / "new" / "state.db").stat().st_mode & 0o077 == 0


def test_what_is_written_beside_a_second_connection_of_the_process_reaches_other_processes(tmp_path: Path) -> None:
    """POSIX: a process that closes any descriptor of a file loses its locks on it. Another process would then take
    itself for the last one, and remove the log that this one writes to."""
    kept = open_database(None, tmp_path)
    open_database(None, tmp_path).close()
    other = (
        "import sys; from pathlib import Path; from inferd.state.open import open_database; "
        "from inferd.state.database import number\n"
        "database = open_database(None, Path(sys.argv[1]))\n"
        "with database.reading() as transaction: print(number(transaction, 'keys'))\n"
        "database.close()"
    )
    for expected in range(3):
        done = subprocess.run([sys.executable, "-c", other, str(tmp_path)], capture_output=True, text=True, check=True)
        assert int(done.stdout) == expected
        with kept.transaction() as transaction:
            next_number(transaction, "keys")
    kept.close()


@pytest.mark.parametrize("url", ["mysql://x/y", "sqlite://relative.db", "state.db", "sqlite://"])
def test_other_addresses_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="sqlite:///path nor postgresql"):
        open_database(url, tmp_path)


def test_an_absent_server_is_no_secret_and_no_long_wait(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StateUnavailable, match="cannot be reached") as refused:
        open_database("postgresql://someone:pass-word@127.0.0.1:1/x", tmp_path)
    assert "pass-word" not in refused.value.message
