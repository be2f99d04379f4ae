"""Keys: what is kept of them, what they allow, and that nothing makes a stronger one."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd import clock
from inferd.config import Config, ServerConfig, TenantConfig
from inferd.errors import Forbidden, InvalidRequest, KeyNotFound, Unauthenticated
from inferd.state.database import Database
from inferd.state.open import open_database
from inferd.tenancy.door import KeyDoor, limits_of
from inferd.tenancy.keys import (
    COLUMNS,
    ID_CHARS,
    KeyRow,
    KeySpec,
    check_not_stronger,
    check_spec,
    create_key,
    list_keys,
    revoke_key,
    rotate_key,
    row_of,
    shown_id,
)
from inferd.tenancy.limiter import Limiter
from inferd.tenancy.principal import LOCAL, OPERATOR, Limits, Principal
from inferd.tenancy.ring import KeyRing, families_of
from inferd.tenancy.usage import UsageJournal


@pytest.fixture
def database(state_url: str, tmp_path: Path) -> Iterator[Database]:
    made = open_database(state_url, tmp_path)
    yield made
    made.close()


def ring_of(database: Database, **tenants: TenantConfig) -> KeyRing:
    ring = KeyRing(tenants)
    ring.refresh(database, lambda rows: None)
    return ring


def create(database: Database, *, by: Principal = OPERATOR, now: float | None = None, **fields: Any) -> str:
    spec = KeySpec(**{"tenant": "team", **fields})
    return create_key(database, spec, by=by, now=clock.wall() if now is None else now).key


def test_a_key_opens_the_door_to_what_it_was_made_for(database: Database) -> None:
    key = create(database, models=("chat", "team-*"), rpm=5, tpm=7, max_in_flight=2, priority="interactive")
    tenant = TenantConfig(weight=3.0, region="eu")
    principal = ring_of(database, team=tenant).find(key).principal
    assert principal.tenant == "team"
    assert principal.scopes == {"infer", "models"}
    assert principal.limits == Limits(rpm=5, tpm=7, max_in_flight=2)
    assert (principal.weight, principal.region, principal.priority, principal.default_priority) == (3.0, "eu", -1, -1)
    assert [principal.may_use(model) for model in ("chat", "team-x", "other")] == [True, True, False]
    assert not principal.may("admin")


def test_the_database_holds_only_a_hash(database: Database, tmp_path: Path) -> None:
    key = create(database)
    secret = key.rsplit("-", 1)[1]
    assert len(secret) == 43
    with database.reading() as transaction:
        rows = transaction.rows("SELECT * FROM keys")
    assert hashlib.sha256(secret.encode()).digest() in rows[0]
    assert secret not in str(rows)
    for file in tmp_path.glob("state.db*"):
        assert secret.encode() not in file.read_bytes()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda key: key[:-1] + ("a" if key[-1] != "a" else "b"),
        lambda key: key[:-1],
        lambda key: key + "x",
        lambda key: key.upper(),
        lambda key: "sk-inf-" + "a" * 12 + key[19:],
        lambda key: key[:19] + "-" + "é" * 43,
        lambda key: "' OR 1=1 --",
        lambda key: "",
        lambda key: "x" * 100_000,
        lambda key: " " + key,
        lambda key: key[:19] + "\0" + key[20:],
    ],
)
def test_nothing_but_the_key_is_the_key(database: Database, spoil: Any) -> None:
    key = create(database)
    ring = ring_of(database)
    assert ring.find(key).row.tenant == "team"
    messages = set()
    with pytest.raises(Unauthenticated) as refused:
        ring.find(spoil(key))
    messages.add(refused.value.message)
    revoke_key(database, key[7:19], now=clock.wall())
    ring.refresh(database, lambda rows: None)
    with pytest.raises(Unauthenticated) as refused:
        ring.find(key)
    messages.add(refused.value.message)
    assert len(messages) == 1, "every refused key gets the same message"


def test_every_comparison_of_secrets_takes_constant_time(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the token, one hash is made and compared with hmac's compare_digest."""
    key = create(database)
    ring = ring_of(database)
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr("inferd.tenancy.ring.hmac.compare_digest", compare)
    ring.find(key)
    for wrong in ("", "nonsense", key[:-1], "sk-inf-" + "z" * 12 + key[19:], "x" * 1000):
        with pytest.raises(Unauthenticated):
            ring.find(wrong)
    assert compared == [(32, 32)] * 6


def test_a_revoked_key_is_over_and_its_hash_is_gone(database: Database) -> None:
    key = create(database)
    ring = ring_of(database)
    revoked = revoke_key(database, key[7:19], now=5.0)
    again = revoke_key(database, key[7:19], now=9.0)
    assert revoked.state == again.state == "revoked"
    assert again.revoked_at == 5.0
    assert ring.refresh(database, lambda rows: None)
    with pytest.raises(Unauthenticated):
        ring.find(key)
    assert len(ring) == 1, "a server whose last key is revoked does not become open"
    assert ring.num_usable(clock.wall()) == 0
    with database.reading() as transaction:
        assert transaction.rows("SELECT hash FROM keys") == [(b"",)]
    with pytest.raises(KeyNotFound):
        revoke_key(database, "unknown", now=0.0)


def test_keys_expire_by_the_wall_clock(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    key = create(database, now=1_000_000.0, expires_in_s=60.0)
    ring = ring_of(database)
    for wall, is_good in ((1_000_059.0, True), (1_000_060.0, False), (1_000_000.0 - 3600, True), (1_003_660.0, False)):
        monkeypatch.setattr("inferd.clock.wall", lambda wall=wall: wall)
        if is_good:
            ring.find(key)
        else:
            with pytest.raises(Unauthenticated):
                ring.find(key)


def test_rotation_lengthens_no_keys_life(database: Database) -> None:
    """Neither that of the old key, by a longer overlap, nor that of the new one."""
    old = create(database, now=100.0, expires_in_s=50.0)
    rotate_key(database, old[7:19], by=OPERATOR, overlap_s=1000.0, now=120.0)
    assert [key.expires_at for key in list_keys(database, now=120.0)] == [150.0, 150.0]
    endless = create(database, now=200.0, tenant="other")
    rotate_key(database, endless[7:19], by=OPERATOR, overlap_s=10.0, now=220.0)
    found = list_keys(database, now=220.0, tenant="other")
    assert [key.expires_at for key in found] == [230.0, None]


def test_the_newest_key_of_a_family_says_its_limits(database: Database) -> None:
    """As where the limits of a key were changed by hand, after it was rotated."""
    old = create(database, now=300.0, rpm=5)
    rotate_key(database, old[7:19], by=OPERATOR, overlap_s=1000.0, now=310.0)
    with database.transaction() as transaction:
        transaction.execute("UPDATE keys SET rpm = 7 WHERE created_at = 310")
    with database.reading() as transaction:
        rows = [row_of(row) for row in transaction.rows(f"SELECT {COLUMNS} FROM keys ORDER BY created_at")]
    for listed in (rows, rows[::-1]):
        assert limits_of(listed, Config(models={})) == {f"key:{old[7:19]}": Limits(rpm=7)}


@pytest.mark.parametrize(("outcome", "used"), [("done", 1), ("failed", 1), ("cancelled", 1), ("refused", 0)])
def test_a_request_counts_unless_there_was_no_capacity_for_it(
    database: Database, tmp_path: Path, outcome: str, used: int
) -> None:
    key = create(database, rpm=10)
    ring, limiter = ring_of(database), Limiter(is_whole=True)
    limiter.configure({f"key:{key[7:19]}": Limits(rpm=10)}, clock.now())
    door = KeyDoor(ring, limiter, UsageJournal(tmp_path, None), Config(models={}))
    door.now = lambda: 1e6
    permit = door.admit(door.authenticate(key), "r", "m", prompt_tokens=1, max_tokens=1)
    for _ in range(2):
        permit.settle(None, outcome)
    assert [round(use.used) for use in limiter.use(1e6)] == [used]


@pytest.mark.parametrize(
    ("host", "auth", "has_keys", "needs_keys"),
    [
        ("127.0.0.1", "auto", False, False),
        ("127.0.0.1", "auto", True, True),
        ("0.0.0.0", "auto", False, True),  # the last key was revoked
        ("0.0.0.0", "off", True, False),
        ("127.0.0.1", "required", False, True),
    ],
)
def test_where_others_reach_the_server_a_key_is_needed_also_when_there_is_none(
    database: Database, tmp_path: Path, host: str, auth: Any, has_keys: bool, needs_keys: bool
) -> None:
    if has_keys:
        create(database)
    config = Config(models={}, server=ServerConfig(host=host, auth=auth))
    door = KeyDoor(ring_of(database), Limiter(), UsageJournal(tmp_path, None), config)
    assert door.needs_keys == needs_keys
    if needs_keys:
        with pytest.raises(Unauthenticated):
            door.authenticate(None)
    else:
        assert door.authenticate(None) == LOCAL


def test_rotation_overlaps_and_shares_one_quota(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    old = create(database, rpm=5, models=("a",), now=100.0)
    new = rotate_key(database, old[7:19], by=OPERATOR, overlap_s=60.0, now=200.0)
    ring = ring_of(database)
    monkeypatch.setattr("inferd.clock.wall", lambda: 259.0)
    holders = [ring.find(old), ring.find(new.key)]
    assert len({ring.owners(holder.principal) for holder in holders}) == 1
    assert holders[0].principal.limits == holders[1].principal.limits
    assert holders[1].principal.models == ("a",)
    monkeypatch.setattr("inferd.clock.wall", lambda: 260.0)
    with pytest.raises(Unauthenticated):
        ring.find(old)
    ring.find(new.key)
    with pytest.raises(InvalidRequest, match="expired"):
        rotate_key(database, old[7:19], by=OPERATOR, overlap_s=0.0, now=261.0)


def test_a_ring_follows_what_others_change(database: Database, state_url: str, tmp_path: Path) -> None:
    ring = ring_of(database)
    assert not ring.refresh(database, lambda rows: None)
    other = open_database(state_url, tmp_path)
    first, second = create(other), create(other)
    other.close()
    seen: list[int] = []
    assert ring.refresh(database, lambda rows: seen.append(len(rows)))
    assert seen == [2]
    for key in (first, second):
        ring.find(key)
    assert [info.state for info in list_keys(database, now=clock.wall(), tenant="team")] == ["active"] * 2
    assert list_keys(database, now=clock.wall(), tenant="others") == []


def test_an_older_copy_of_the_database_is_believed(tmp_path: Path) -> None:
    """After a restore, keys made since are gone."""
    database = open_database(None, tmp_path)
    kept = create(database)
    backup = tmp_path / "backup.db"
    source, target = sqlite3.connect(tmp_path / "state.db"), sqlite3.connect(backup)
    source.backup(target)
    source.close()
    target.close()
    later = create(database)
    ring = ring_of(database)
    ring.find(later)
    database.close()
    for leftover in ("state.db-wal", "state.db-shm"):
        (tmp_path / leftover).unlink(missing_ok=True)
    backup.replace(tmp_path / "state.db")
    database = open_database(None, tmp_path)
    ring.refresh(database, lambda rows: None)
    ring.find(kept)
    with pytest.raises(Unauthenticated):
        ring.find(later)
    database.close()


ADMIN = Principal(
    key_id="x",
    tenant="team",
    scopes=frozenset(("admin",)),
    models=("chat", "team-*"),
    priority=0,
    limits=Limits(rpm=10),
    expires_at=1000.0,
)
GOOD: dict[str, Any] = {"tenant": "team", "models": ("chat",), "rpm": 10}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tenant": "other"}, "tenant"),
        ({"models": ()}, "models"),
        ({"models": ("*",)}, "models"),
        ({"models": ("chat", "secret")}, "models"),
        ({"models": ("team-?", "tea*")}, "models"),
        ({"models": ("cha[t]",)}, "models"),
        ({"rpm": None}, "rpm"),
        ({"rpm": 11}, "rpm"),
        ({"priority": "interactive"}, "priority"),
        ({"priority": "critical"}, "priority"),
    ],
)
def test_no_key_makes_a_stronger_one(change: dict[str, Any], field: str) -> None:
    check_not_stronger(KeySpec(**GOOD), ADMIN, 1000.0)
    check_not_stronger(KeySpec(**{**GOOD, "models": ("team-a", "team-b*")}), ADMIN, 1000.0)
    with pytest.raises(Forbidden) as refused:
        check_not_stronger(KeySpec(**{**GOOD, **change}), ADMIN, 1000.0)
    assert refused.value.param == field


@pytest.mark.parametrize("expires_at", [None, 1001.0])
def test_no_key_makes_one_that_outlives_it(expires_at: float | None) -> None:
    with pytest.raises(Forbidden, match="outlive"):
        check_not_stronger(KeySpec(**GOOD), ADMIN, expires_at)


def test_only_an_admin_makes_keys(database: Database) -> None:
    for by in (LOCAL, Principal(key_id="y", tenant="team", scopes=frozenset(("infer", "models", "metrics")))):
        with pytest.raises(Forbidden):
            create(database, by=by)
    assert list_keys(database, now=0.0) == []


def test_rotating_a_stronger_key_is_forbidden_too(database: Database) -> None:
    key = create(database, priority="critical")
    with pytest.raises(Forbidden):
        rotate_key(database, key[7:19], by=ADMIN, overlap_s=0.0, now=clock.wall())
    assert [info.state for info in list_keys(database, now=clock.wall())] == ["active"]


@given(st.text(max_size=140), st.sampled_from(["tenant", "name", "models"]))
def test_any_text_is_taken_or_refused_with_its_field(text: str, field: str) -> None:
    given_field: dict[str, Any] = {field: (text,) if field == "models" else text}
    try:
        check_spec(KeySpec(**{"tenant": "t", **given_field}))
    except InvalidRequest as refused:
        assert refused.param == field  # noqa: PT017
    else:
        assert text.isprintable()


@pytest.mark.parametrize(
    "fields",
    [
        {"rpm": 0},
        {"tpm": -1},
        {"max_in_flight": 2**60},
        {"expires_in_s": 0.0},
        {"expires_in_s": float("nan")},
        {"scopes": ()},
        {"scopes": ("public",)},
        {"scopes": ("infer", "root")},
    ],
)
def test_numbers_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        check_spec(KeySpec(**{"tenant": "t", **fields}))


def test_a_text_that_may_be_a_secret_is_not_repeated() -> None:
    assert shown_id("abc") == "'abc'"
    assert shown_id("x" * ID_CHARS) == repr("x" * ID_CHARS)
    assert shown_id("x" * (ID_CHARS + 1)) == "'xxxx...'"
    assert shown_id("sk-secret") == "'sk-...'"


def test_the_families_of_a_key_are_listed_once_even_where_makers_form_a_cycle() -> None:
    row = KeyRow("first", "first", b"", "t", "", "", "", None, None, None, 0, 0.0, None, None, 1, "")
    first, second, alone = (
        msgspec.structs.replace(row, id=name, family=name, maker=maker)
        for name, maker in (("first", "second"), ("second", "first"), ("alone", ""))
    )
    held = {one.id: one for one in (first, second, alone)}.get
    assert families_of(first, held) == ["first", "second"]
    assert families_of(alone, held) == ["alone"]
    assert families_of(msgspec.structs.replace(alone, maker="gone"), held) == ["alone", "gone"]
