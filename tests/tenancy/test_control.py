"""A server's door and its database together: what a request may wait for, and how soon a change counts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.stopwatch import Stopwatch

from inferd import clock
from inferd.config import Config, ServerConfig, StateConfig, TenantConfig
from inferd.errors import ConfigError, QuotaExceeded, StateUnavailable, Unauthenticated
from inferd.events import Event, RequestRefused, StateChanged
from inferd.state.database import Database
from inferd.state.open import open_database
from inferd.tenancy.control import Control
from inferd.tenancy.door import check_exposure, is_loopback
from inferd.tenancy.keys import KeySpec, NewKey, create_key, revoke_key
from inferd.tenancy.principal import LOCAL, OPERATOR, Principal
from inferd.tenancy.usage import Entry, UsageJournal, read_usage
from inferd.types import Usage


def config_of(folder: Path, url: str | None = None, **server: Any) -> Config:
    return Config(server=ServerConfig(**server), state=StateConfig(data_dir=str(folder), url=url))


@asynccontextmanager
async def running(config: Config, events: list[Event] | None = None) -> AsyncIterator[Control]:
    control = Control(config, (lambda event: None) if events is None else events.append)
    await control.start()
    try:
        yield control
    finally:
        await control.close()


async def until(holds: Any, seconds: float) -> float:
    """Seconds until something holds."""
    watch = Stopwatch()
    while not holds():
        assert not watch.is_past(seconds), f"not within {seconds} s"
        await asyncio.sleep(0.01)
    return watch.seconds


def is_refused(control: Control, key: str) -> bool:
    try:
        control.door.authenticate(key)
    except Unauthenticated:
        return True
    return False


def test_loopback_is_open_until_the_first_key_and_never_again(state_url: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(config_of(tmp_path, state_url)) as control:
            assert control.door.authenticate(None) == LOCAL
            assert control.door.authenticate("EMPTY") == LOCAL
            assert not LOCAL.may("admin")
            made = await control.create_key(KeySpec(tenant="t"), OPERATOR)
            for token in (None, "EMPTY"):
                with pytest.raises(Unauthenticated):
                    control.door.authenticate(token)
            assert control.door.authenticate(made.key).tenant == "t"
            await control.revoke_key(made.info.id)
            for token in (None, "EMPTY", made.key):
                with pytest.raises(Unauthenticated):
                    control.door.authenticate(token)

    asyncio.run(run())


def test_the_auth_setting_says_whether_keys_are_needed(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(config_of(tmp_path, auth="required")) as control:
            with pytest.raises(Unauthenticated):
                control.door.authenticate(None)
            made = await control.create_key(KeySpec(tenant="t", rpm=1), OPERATOR)
        async with running(config_of(tmp_path, auth="off")) as control:
            assert control.door.authenticate(None) == LOCAL
            assert control.door.authenticate("nonsense") == LOCAL
            assert control.door.authenticate(made.key).tenant == "t"

    asyncio.run(run())


def test_an_exposed_address_without_keys_is_refused(tmp_path: Path) -> None:
    async def start(**server: Any) -> None:
        async with running(config_of(tmp_path, **server)):
            pass

    with pytest.raises(ConfigError, match="inferd keys create"):
        asyncio.run(start(host="0.0.0.0"))
    for auth in ("off", "required"):
        asyncio.run(start(host="0.0.0.0", auth=auth))
    database = open_database(None, tmp_path)
    made = create_key(database, KeySpec(tenant="t"), by=OPERATOR, now=clock.wall())
    asyncio.run(start(host="0.0.0.0"))
    revoke_key(database, made.info.id, now=clock.wall())
    database.close()
    with pytest.raises(ConfigError):
        asyncio.run(start(host="::"))
    assert [
        is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9", "10.0.0.1", "example.com")
    ] == [
        *[True] * 4,
        *[False] * 2,
    ]
    check_exposure(ServerConfig(), 0)


def test_changes_by_others_count_within_a_second(state_url: str, tmp_path: Path) -> None:
    """The command line writes to the database; two servers follow, in both directions."""

    async def run() -> None:
        config = config_of(tmp_path, state_url)
        async with running(config) as one, running(config) as two:
            database = await asyncio.to_thread(open_database, state_url, tmp_path)
            made = await asyncio.to_thread(
                lambda: create_key(database, KeySpec(tenant="t", rpm=600), by=OPERATOR, now=clock.wall())
            )
            for control in (one, two):
                assert await until(lambda control=control: not is_refused(control, made.key), 1.0) < 1.0
            await asyncio.to_thread(lambda: revoke_key(database, made.info.id, now=clock.wall()))
            for control in (one, two):
                assert await until(lambda control=control: is_refused(control, made.key), 1.0) < 1.0
            database.close()

    asyncio.run(run())


def test_the_request_path_never_waits_for_the_database(tmp_path: Path) -> None:
    """With the database's thread stuck, known keys come in, quotas hold and usage is noted, at full speed."""

    async def run() -> None:
        async with running(config_of(tmp_path)) as control:
            made = await control.create_key(KeySpec(tenant="t", tpm=5000), OPERATOR)
            gate, stuck = threading.Event(), threading.Event()

            def job(database: Database) -> bool:
                stuck.set()
                return gate.wait(60)

            blocked = control.state.submit(job)
            assert await asyncio.to_thread(stuck.wait, 10)
            watch = Stopwatch()
            for _ in range(300):
                principal = control.door.authenticate(made.key)
                permit = control.door.admit(principal, "r", "m", prompt_tokens=100, max_tokens=100)
                permit.learned(10)
                permit.headers()
                permit.settle(Usage(5, 5), "done")
            assert is_refused(control, "sk-inf-" + "a" * 12 + "-" + "b" * 43)
            control.door.admit(principal, "r", "m", prompt_tokens=1000, max_tokens=900)
            with pytest.raises(QuotaExceeded):
                control.door.admit(principal, "r", "m", prompt_tokens=1000, max_tokens=900)
            assert watch.seconds < 1.0
            gate.set()
            assert await asyncio.wrap_future(blocked)
            (row,) = await control.usage(by=("tenant",))
            assert (row.requests, row.prompt_tokens, row.completion_tokens) == (300, 1500, 1500)

    asyncio.run(run())


def test_keys_of_one_tenant_share_its_limits_and_refusals_are_told(tmp_path: Path) -> None:
    events: list[Event] = []

    async def run() -> None:
        config = Config(state=StateConfig(data_dir=str(tmp_path)), tenants={"t": TenantConfig(rpm=3)})
        async with running(config, events) as control:
            keys = [(await control.create_key(KeySpec(tenant="t", rpm=100), OPERATOR)).key for _ in range(4)]
            passed = 0
            for key in keys:
                principal = control.door.authenticate(key)
                try:
                    control.door.admit(principal, "r", "m", prompt_tokens=1, max_tokens=1)
                    passed += 1
                except QuotaExceeded as refused:
                    headers = dict(refused.headers)
                    assert headers[b"x-ratelimit-limit-requests"] == b"3"
                    assert headers[b"x-ratelimit-remaining-requests"] == b"0"
                    assert 18_000 < int(headers[b"retry-after-ms"]) <= 20_000
            assert passed == 3
            control.apply(Config(state=config.state, tenants={"t": TenantConfig(weight=2.0)}))
            principal = control.door.authenticate(keys[0])
            assert principal.weight == 2.0
            for _ in range(10):
                control.door.admit(principal, "r", "m", prompt_tokens=1, max_tokens=1)

    asyncio.run(run())
    assert events == [RequestRefused(model="m", reason="quota_requests", tenant="t")]


def test_the_keys_that_a_key_makes_share_its_limits(state_url: str, tmp_path: Path) -> None:
    """However many, through however many hands, after a rotation, and when the one that made them is revoked."""

    async def run() -> None:
        async with running(config_of(tmp_path, state_url)) as control:

            def principal(made: NewKey) -> Principal:
                return control.door.authenticate(made.key)

            def num_admitted(*keys: NewKey) -> int:
                admitted = 0
                for made in keys * 5:
                    with contextlib.suppress(QuotaExceeded):
                        control.door.admit(principal(made), "r", "m", prompt_tokens=1, max_tokens=1)
                        admitted += 1
                return admitted

            admin = KeySpec(tenant="t", scopes=("admin",), max_in_flight=3)
            boss = await control.create_key(admin, OPERATOR)
            assert num_admitted(await control.create_key(KeySpec(tenant="t", max_in_flight=3), OPERATOR)) == 3
            children = [await control.create_key(admin, principal(boss)) for _ in range(3)]
            grandchild = await control.create_key(KeySpec(tenant="t", max_in_flight=2), principal(children[0]))
            assert num_admitted(grandchild) == 2, "its own limit holds as well"
            assert num_admitted(boss, *children, grandchild) == 1
            rotated = await control.rotate_key(children[1].info.id, 60.0, OPERATOR)
            await control.revoke_key(boss.info.id)
            assert num_admitted(*children, rotated, grandchild) == 0

    asyncio.run(run())


def test_a_new_limit_refuses_no_request_before_it_is_leased(tmp_path: Path) -> None:
    async def run() -> None:
        config = config_of(tmp_path)
        async with running(config) as control:
            made = await control.create_key(KeySpec(tenant="t"), OPERATOR)

            def ask() -> bool:
                """Raises QuotaExceeded where the limit refuses too early."""
                principal = control.door.authenticate(made.key)
                permit = control.door.admit(principal, "r", "m", prompt_tokens=1, max_tokens=1)
                return bool(permit.headers())

            assert not ask()
            control.apply(Config(state=config.state, tenants={"t": TenantConfig(rpm=1_000_000)}))
            await until(ask, 5.0)

    asyncio.run(run())


def test_a_rotated_key_takes_from_the_same_quota(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(config_of(tmp_path)) as control:
            old = await control.create_key(KeySpec(tenant="t", rpm=2), OPERATOR)
            new = await control.rotate_key(old.info.id, 60.0, OPERATOR)
            for key in (old.key, new.key):
                control.door.admit(control.door.authenticate(key), "r", "m", prompt_tokens=1, max_tokens=1)
            await control.revoke_key(old.info.id)
            with pytest.raises(QuotaExceeded):
                control.door.admit(control.door.authenticate(new.key), "r", "m", prompt_tokens=1, max_tokens=1)

    asyncio.run(run())


def test_a_new_key_is_refused_rather_than_let_in_without_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with running(config_of(tmp_path)) as control:

            def fail(database: Database) -> None:
                raise StateUnavailable("the leases are locked")

            def job(database: Database) -> str:
                """In the database's thread, before it can try the leases again."""
                key = create_key(database, KeySpec(tenant="t", rpm=100), by=OPERATOR, now=clock.wall()).key
                with monkeypatch.context() as patched:
                    patched.setattr(control._leases, "exchange", fail)
                    control._refresh(database)
                with pytest.raises(QuotaExceeded):
                    control.door.admit(control.door.authenticate(key), "r", "m", prompt_tokens=1, max_tokens=1)
                return key

            key = await control.state.call(job)

            def passes() -> bool:
                try:
                    control.door.admit(control.door.authenticate(key), "r", "m", prompt_tokens=1, max_tokens=1)
                except QuotaExceeded:
                    return False
                return True

            await until(passes, 5.0)

    asyncio.run(run())


def test_a_database_put_in_its_place_is_believed_while_serving(tmp_path: Path) -> None:
    """Even where the two have seen equally many changes."""

    async def run() -> None:
        async with running(config_of(tmp_path / "here")) as control:
            made = await control.create_key(KeySpec(tenant="t"), OPERATOR)
            source = sqlite3.connect(tmp_path / "here" / "state.db")
            target = sqlite3.connect(tmp_path / "copy.db")
            source.backup(target)
            source.close()
            target.close()
            later = await control.create_key(KeySpec(tenant="t"), OPERATOR)
            copy = open_database(f"sqlite://{tmp_path}/copy.db", tmp_path)
            revoke_key(copy, made.info.id, now=clock.wall())
            copy.close()
            for leftover in ("state.db-wal", "state.db-shm"):
                (tmp_path / "here" / leftover).unlink(missing_ok=True)
            (tmp_path / "copy.db").replace(tmp_path / "here" / "state.db")
            await until(lambda: is_refused(control, made.key) and is_refused(control, later.key), 5.0)

    asyncio.run(run())


def test_a_locked_database_fails_closed_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.state.sqlite.LOCK_WAIT_S", 0.05)
    events: list[Event] = []

    async def run() -> None:
        async with running(config_of(tmp_path), events) as control:
            made = await control.create_key(KeySpec(tenant="t", rpm=1000), OPERATOR)
            other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
            other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(StateUnavailable):
                await control.create_key(KeySpec(tenant="t"), OPERATOR)
            principal = control.door.authenticate(made.key)
            control.door.admit(principal, "r", "m", prompt_tokens=1, max_tokens=1).settle(Usage(1, 1), "done")
            assert is_refused(control, "sk-inf-" + "a" * 12 + "-" + "b" * 43)
            other.execute("ROLLBACK")
            other.close()
            await until(lambda: StateChanged(available=True) in events, 5.0)
            assert [row.requests for row in await control.usage(by=())] == [1]

    asyncio.run(run())
    assert events[:2] == [StateChanged(available=False), StateChanged(available=True)]


def test_a_lost_server_of_the_database_is_an_outage_not_an_end(postgres_url: str, tmp_path: Path) -> None:
    """Every connection is cut: known keys go on, and a revocation made meanwhile counts when it is back."""
    import psycopg

    async def run() -> None:
        async with running(config_of(tmp_path, postgres_url)) as control:
            made = await control.create_key(KeySpec(tenant="t", tpm=1000), OPERATOR)
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'inferd'"
                )
            principal = control.door.authenticate(made.key)
            control.door.admit(principal, "r", "m", prompt_tokens=1, max_tokens=1).settle(Usage(1, 1), "done")
            database = await asyncio.to_thread(open_database, postgres_url, tmp_path)
            await asyncio.to_thread(lambda: revoke_key(database, made.info.id, now=clock.wall()))
            database.close()
            await until(lambda: is_refused(control, made.key), 3.0)
            assert [row.requests for row in await control.usage(by=())] == [1]

    asyncio.run(run())


SERVER = """
import asyncio, sys
from inferd.config import Config, StateConfig
from inferd.errors import QuotaExceeded
from inferd.tenancy.control import Control
from inferd.types import Usage

async def main():
    control = Control(Config(state=StateConfig(url=sys.argv[1], data_dir=sys.argv[2])))
    await control.start()
    print("ready", flush=True)
    for line in iter(sys.stdin.readline, ""):
        key, count = line.split()
        principal = control.door.authenticate(key)
        passed = 0
        for _ in range(int(count)):
            try:
                permit = control.door.admit(principal, "r", "m", prompt_tokens=5, max_tokens=5)
            except QuotaExceeded:
                break
            passed += 1
            permit.settle(Usage(5, 5), "done")
        print(passed, flush=True)

asyncio.run(main())
"""


class Process:
    """A server in a process of its own, without HTTP."""

    def __init__(self, url: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, url, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        assert self._out.readline() == "ready\n"

    def ask(self, key: str, count: int) -> int:
        self._in.write(f"{key} {count}\n")
        self._in.flush()
        return int(self._out.readline())

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        self._in.close()
        self._out.close()


def test_killed_servers_lose_no_usage_and_refill_no_limit(state_url: str, tmp_path: Path) -> None:
    database = open_database(state_url, tmp_path)
    made: NewKey = create_key(database, KeySpec(tenant="t", tpm=1000), by=OPERATOR, now=clock.wall())
    began = clock.now()
    granted = 0
    for _ in range(3):
        server = Process(state_url, tmp_path)
        granted += server.ask(made.key, 60)
        server.kill()
    assert 60 <= granted <= 100 * (1 + (clock.now() - began) / 60) + 1
    database.close()

    async def usage() -> int:
        async with running(config_of(tmp_path, state_url)) as control:
            (row,) = await control.usage(by=())
            assert row.prompt_tokens == row.completion_tokens == 5 * row.requests
            return row.requests

    for _ in range(2):
        assert asyncio.run(usage()) == granted


def test_several_processes_share_one_limit(state_url: str, tmp_path: Path) -> None:
    database = open_database(state_url, tmp_path)
    made = create_key(database, KeySpec(tenant="t", tpm=1000), by=OPERATOR, now=clock.wall())
    database.close()
    began = clock.now()
    servers = [Process(state_url, tmp_path) for _ in range(2)]
    granted = sum(server.ask(made.key, 200) for server in servers)
    assert granted <= 100 * (1 + (clock.now() - began) / 60) + 1
    assert granted >= 50, "the first one holds at least its part"
    for server in servers:
        server.kill()


def test_usage_older_than_the_configuration_says_is_deleted_while_serving(
    state_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.tenancy.control.HOURLY_S", 0.05)
    now = clock.wall()
    database = open_database(state_url, tmp_path)
    journal = UsageJournal(tmp_path, state_url)
    for days in (0, 2, 30, 31, 400):
        journal.record(Entry(now - days * 86_400.0, f"{days} days ago", "key", "m", 1, 1))
    journal.close(database)

    def kept() -> set[str]:
        return {row.tenant for row in read_usage(database, by=("tenant",))}

    async def serve(days: int | None, wanted: set[str]) -> None:
        config = Config(state=StateConfig(data_dir=str(tmp_path), url=state_url, usage_retention_days=days))
        async with running(config) as control:
            await until(lambda: kept() == wanted, 5.0)
            assert {row.tenant for row in await control.usage()} == wanted

    everything = {f"{days} days ago" for days in (0, 2, 30, 31, 400)}
    asyncio.run(serve(None, everything))
    asyncio.run(serve(30, everything - {"31 days ago", "400 days ago"}))
    asyncio.run(serve(1, {"0 days ago"}))
    database.close()


def test_nothing_is_left_running_after_a_failed_start(tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with socket.socket() as silent:  # accepts no connection
        silent.bind(("127.0.0.1", 0))
        url = f"postgresql://x@127.0.0.1:{silent.getsockname()[1]}/x"

        async def start() -> None:
            async with running(config_of(tmp_path, url)):
                pass

        with pytest.raises(StateUnavailable):
            asyncio.run(start())
    assert {thread.name for thread in threading.enumerate()} <= before
    assert not list(tmp_path.rglob("*.journal"))


def test_no_key_is_ever_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)

    async def run() -> str:
        async with running(config_of(tmp_path)) as control:
            made = await control.create_key(KeySpec(tenant="t"), OPERATOR)
            rotated = await control.rotate_key(made.info.id, 10.0, OPERATOR)
            is_refused(control, made.key + "x")
            control.door.authenticate(rotated.key)
            return made.key

    secret = asyncio.run(run()).rsplit("-", 1)[1]
    assert not re.search(r"sk-inf-\w{12}-\w", caplog.text)
    assert secret not in caplog.text
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()
