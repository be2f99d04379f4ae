"""API keys in the database: create, list, revoke and rotate.

Knows the rows of keys and the form of a key's text. Does not know HTTP, or the copies of keys in memory (``ring.py``).

A key is ``sk-inf-<id>-<secret>``. The id finds the row; the secret is 256 random bits, of which only the
SHA-256 is stored. A slow hash protects passwords, which can be guessed. A secret of 256 random bits cannot be guessed
however fast the hash is, and each request would pay for a slow one.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import secrets
import string
import unicodedata
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from inferd.config import TenantConfig
from inferd.errors import Forbidden, InvalidRequest, KeyNotFound
from inferd.state.database import Database, Row, Transaction, next_number
from inferd.tenancy.principal import GRANTABLE, KeyScope, Limits, Principal
from inferd.types import RANKS, PriorityClass, class_of

PREFIX: Final = "sk-inf-"
ID_CHARS: Final = 12
SECRET_CHARS: Final = 43  # of 62 letters and digits: 256 bits
MAX_NAME_CHARS: Final = 128
MAX_NUMBER: Final = 2**53
KeyState = Literal["active", "expired", "revoked"]
_LETTERS: Final = string.ascii_letters + string.digits
COLUMNS: Final = (
    "id, family, hash, tenant, name, scopes, models, rpm, tpm, max_in_flight, priority, "
    "created_at, expires_at, revoked_at, version, maker"
)


class KeySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The properties of a key that is to be created."""

    tenant: str
    name: str = ""
    scopes: tuple[KeyScope, ...] = ("infer", "models")
    models: tuple[str, ...] = ()  # names or patterns such as team-*; none: every model
    rpm: int | None = None
    tpm: int | None = None
    max_in_flight: int | None = None
    priority: PriorityClass = "normal"
    expires_in_s: float | None = None


class KeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a key except its secret."""

    id: str
    prefix: str  # how its text begins
    tenant: str
    name: str
    state: KeyState
    scopes: tuple[str, ...]
    models: tuple[str, ...]
    rpm: int | None
    tpm: int | None
    max_in_flight: int | None
    priority: PriorityClass
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    family: str  # id of the first key before all rotations; limits belong to the family


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A new key with its text, which is shown once and not stored."""

    key: str
    info: KeyInfo


class KeyRow(msgspec.Struct, frozen=True, array_like=True):
    """One row of the table, in the order of its columns."""

    id: str
    family: str
    hash: bytes
    tenant: str
    name: str
    scopes: str
    models: str
    rpm: int | None
    tpm: int | None
    max_in_flight: int | None
    priority: int
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    version: int
    maker: str

    def state(self, now: float) -> KeyState:
        """``now``: seconds since the epoch."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and now >= self.expires_at else "active"

    def info(self, now: float) -> KeyInfo:
        return KeyInfo(
            id=self.id,
            prefix=f"{PREFIX}{self.id}-",
            tenant=self.tenant,
            name=self.name,
            state=self.state(now),
            scopes=msgspec.json.decode(self.scopes, type=tuple[str, ...]),
            models=msgspec.json.decode(self.models, type=tuple[str, ...]),
            rpm=self.rpm,
            tpm=self.tpm,
            max_in_flight=self.max_in_flight,
            priority=class_of(self.priority),
            created_at=self.created_at,
            expires_at=self.expires_at,
            revoked_at=self.revoked_at,
            family=self.family,
        )

    def principal(self, tenants: Mapping[str, TenantConfig]) -> Principal:
        tenant = tenants.get(self.tenant, TenantConfig())
        scopes = msgspec.json.decode(self.scopes, type=frozenset[str])
        return Principal(
            key_id=self.id,
            tenant=self.tenant,
            scopes=frozenset(scope for scope in GRANTABLE if scope in scopes),
            models=msgspec.json.decode(self.models, type=tuple[str, ...]),
            priority=self.priority,
            default_priority=self.priority,
            weight=tenant.weight,
            region=tenant.region or "",
            limits=Limits(rpm=self.rpm, tpm=self.tpm, max_in_flight=self.max_in_flight),
            expires_at=self.expires_at,
        )


# -- operations on keys, in the database's thread or in a command ------------------------------------


def create_key(database: Database, spec: KeySpec, *, by: Principal, now: float) -> NewKey:
    """Create a key. ``now``: seconds since the epoch. Raises InvalidRequest, Forbidden, StateUnavailable.

    When this returns, the key survives a crash of the machine.
    """
    check_spec(spec)
    expires_at = None if spec.expires_in_s is None else now + spec.expires_in_s
    check_not_stronger(spec, by, expires_at)
    with database.transaction() as transaction:
        maker = _family_of(transaction, by)
        return _insert(transaction, spec, family=None, maker=maker, expires_at=expires_at, now=now)


def list_keys(database: Database, *, now: float, tenant: str | None = None) -> list[KeyInfo]:
    """All keys, or those of a tenant, the oldest first, with revoked keys."""
    where, values = ("", ()) if tenant is None else (" WHERE tenant = ?", (tenant,))
    with database.reading() as transaction:
        rows = transaction.rows(f"SELECT {COLUMNS} FROM keys{where} ORDER BY created_at, id", values)
    return [row_of(row).info(now) for row in rows]


def revoke_key(database: Database, key_id: str, *, now: float) -> KeyInfo:
    """Revoke a key at ``now`` and delete its hash. Idempotent. Raises KeyNotFound."""
    with database.transaction() as transaction:
        found = _find(transaction, key_id)
        if found.revoked_at is None:
            transaction.execute(
                "UPDATE keys SET revoked_at = ?, hash = ?, version = ? WHERE id = ?",
                (now, b"", next_number(transaction, "keys"), key_id),
            )
        return _find(transaction, key_id).info(now)


def rotate_key(database: Database, key_id: str, *, by: Principal, overlap_s: float, now: float) -> NewKey:
    """Create a key with the properties of an old key, which expires after ``overlap_s``.

    Both keys share the limits of their family during the overlap. Raises KeyNotFound, InvalidRequest (the key is
    revoked or expired), Forbidden.
    """
    if not 0 <= overlap_s <= MAX_NUMBER:
        raise InvalidRequest(f"An overlap of {overlap_s:g} s is not possible; give 0 or more.", param="overlap")
    with database.transaction() as transaction:
        old = _find(transaction, key_id)
        info = old.info(now)
        if info.state != "active":
            raise InvalidRequest(f"The key {key_id} is {info.state}; create a new one instead.", param="id")
        spec = KeySpec(
            tenant=old.tenant,
            name=old.name,
            scopes=tuple(scope for scope in GRANTABLE if scope in info.scopes),
            models=info.models,
            rpm=old.rpm,
            tpm=old.tpm,
            max_in_flight=old.max_in_flight,
            priority=info.priority,
        )
        check_not_stronger(spec, by, old.expires_at)
        ends_at = now + overlap_s if old.expires_at is None else min(old.expires_at, now + overlap_s)
        transaction.execute(
            "UPDATE keys SET expires_at = ?, version = ? WHERE id = ?",
            (ends_at, next_number(transaction, "keys"), key_id),
        )
        return _insert(transaction, spec, family=old.family, maker=old.maker, expires_at=old.expires_at, now=now)


def check_spec(spec: KeySpec) -> None:
    """Raises InvalidRequest that names the field, the value and what is allowed."""
    for field, text, is_needed in (("tenant", spec.tenant, True), ("name", spec.name, False)):
        if len(text) > MAX_NAME_CHARS or text != text.strip() or not _is_plain(text) or (is_needed and not text):
            raise InvalidRequest(
                f"{field} must be a text of {1 if is_needed else 0} to {MAX_NAME_CHARS} printable characters "
                "without blanks around it.",
                param=field,
            )
    unknown = [scope for scope in spec.scopes if scope not in GRANTABLE]
    if unknown:
        raise InvalidRequest(
            f"scopes has {unknown[0]!r}, which no key can be given; name some of {', '.join(GRANTABLE)}.",
            param="scopes",
        )
    if not spec.scopes or len(set(spec.scopes)) != len(spec.scopes):
        raise InvalidRequest(f"scopes must be some of {', '.join(GRANTABLE)}, each once.", param="scopes")
    for model in spec.models:
        if not model or len(model) > MAX_NAME_CHARS or not _is_plain(model):
            raise InvalidRequest(
                f"models must be names or patterns such as team-*, each of 1 to {MAX_NAME_CHARS} printable characters.",
                param="models",
            )
    for field, number_ in (("rpm", spec.rpm), ("tpm", spec.tpm), ("max_in_flight", spec.max_in_flight)):
        if number_ is not None and not 1 <= number_ <= MAX_NUMBER:
            raise InvalidRequest(f"{field} must be at least 1, or left out for no limit.", param=field)
    if spec.expires_in_s is not None and not 0 < spec.expires_in_s <= MAX_NUMBER:
        raise InvalidRequest("expires must be more than 0 seconds, or left out.", param="expires")


def check_not_stronger(spec: KeySpec, by: Principal, expires_at: float | None) -> None:
    """A key must not create a key with more permissions or a later expiry than its own. Raises Forbidden."""
    if not by.may("admin"):
        raise Forbidden("Making keys needs the scope admin.", param="scopes")
    if by.tenant and spec.tenant != by.tenant:
        raise Forbidden("This key makes keys of its own tenant alone; leave others to the operator.", param="tenant")
    if by.models and not (
        spec.models and all(any(_covers(mine, model) for mine in by.models) for model in spec.models)
    ):
        raise Forbidden(
            f"This key may use {', '.join(by.models)}; a key made with it must name models among these.", param="models"
        )
    if RANKS[spec.priority] < by.priority:
        raise Forbidden(
            f"This key may ask for {class_of(by.priority)} at best; a key made with it cannot be {spec.priority}.",
            param="priority",
        )
    for field in ("rpm", "tpm", "max_in_flight"):
        mine, asked = getattr(by.limits, field), getattr(spec, field)
        if mine is not None and (asked is None or asked > mine):
            raise Forbidden(f"This key's own {field} is {mine}; a key made with it cannot have more.", param=field)
    if by.expires_at is not None and (expires_at is None or expires_at > by.expires_at):
        raise Forbidden("A key made with this one cannot outlive it; give an earlier expiry.", param="expires")


def _covers(mine: str, asked: str) -> bool:
    """Whether ``mine`` matches every name that ``asked`` matches. A pattern is covered by the same pattern, by a plain
    prefix of it with a star at the end, and by a star. Other patterns count as not covered."""
    if mine in (asked, "*"):
        return True
    if any(letter in asked for letter in "*?["):
        stem = mine[:-1]
        return mine.endswith("*") and not any(letter in stem for letter in "*?[") and asked.startswith(stem)
    return fnmatch.fnmatchcase(asked, mine)


def _is_plain(text: str) -> bool:
    return text.isprintable() and not any(unicodedata.category(letter) == "Cs" for letter in text)


def _insert(
    transaction: Transaction, spec: KeySpec, *, family: str | None, maker: str, expires_at: float | None, now: float
) -> NewKey:
    key_id, secret = _random(ID_CHARS), _random(SECRET_CHARS)
    row = KeyRow(
        id=key_id,
        family=family or key_id,
        hash=hash_of(secret),
        tenant=spec.tenant,
        name=spec.name,
        scopes=json.dumps(spec.scopes),
        models=json.dumps(spec.models),
        rpm=spec.rpm,
        tpm=spec.tpm,
        max_in_flight=spec.max_in_flight,
        priority=RANKS[spec.priority],
        created_at=now,
        expires_at=expires_at,
        revoked_at=None,
        version=next_number(transaction, "keys"),
        maker=maker,
    )
    marks = ", ".join("?" * len(row.__struct_fields__))
    transaction.execute(f"INSERT INTO keys ({COLUMNS}) VALUES ({marks})", msgspec.structs.astuple(row))
    return NewKey(key=f"{PREFIX}{key_id}-{secret}", info=row.info(now))


def _family_of(transaction: Transaction, principal: Principal) -> str:
    """Empty for a principal without a key of the database: the operator."""
    rows = transaction.rows("SELECT family FROM keys WHERE id = ?", (principal.key_id,))
    return msgspec.convert(rows[0][0], str) if rows else ""


def _find(transaction: Transaction, key_id: str) -> KeyRow:
    rows = transaction.rows(f"SELECT {COLUMNS} FROM keys WHERE id = ?", (key_id,))
    if not rows:
        raise KeyNotFound(
            f"There is no key with the id {shown_id(key_id)}; list them with: inferd keys list.", param="id"
        )
    return row_of(rows[0])


def shown_id(text: str) -> str:
    """What was given as a key's id, for a sentence. A text that is longer than an id, or begins like a key, may hold a
    secret, so only its beginning is shown."""
    if text.startswith("sk-"):
        return "'sk-...'"
    return repr(text if len(text) <= ID_CHARS else f"{text[:4]}...")


def row_of(row: Row) -> KeyRow:
    return msgspec.convert(row, KeyRow)


def hash_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("ascii")).digest()


def _random(num_chars: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(num_chars))
