"""The keys that a server holds in memory, and the comparison of a credential with them.

Knows rows of keys and how secrets are compared. Does not know how keys are created, or HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from inferd import clock
from inferd.config import TenantConfig
from inferd.errors import Unauthenticated
from inferd.state.database import Database, number
from inferd.tenancy.keys import COLUMNS, ID_CHARS, PREFIX, SECRET_CHARS, KeyRow, hash_of, row_of
from inferd.tenancy.principal import Principal

_NO_KEY: Final = hashlib.sha256(b"no key has this hash").digest()


class HeldKey(msgspec.Struct, frozen=True):
    """A key in memory."""

    row: KeyRow
    principal: Principal


def families_of(row: KeyRow, row_of: Callable[[str], KeyRow | None]) -> list[str]:
    """A key's family and the families of the keys with which it was created, the nearest first.

    A family has the id of its first key.
    """
    families = [row.family]
    while row.maker and row.maker not in families:
        families.append(row.maker)
        maker = row_of(row.maker)
        if maker is None:
            break
        row = maker
    return families


class KeyRing:
    """All keys by id. The database's thread replaces entries and never changes them; the event loop reads them."""

    def __init__(self, tenants: Mapping[str, TenantConfig]) -> None:
        self._tenants = dict(tenants)
        self._holders: dict[str, HeldKey] = {}
        self._version = -1
        self._lock = threading.Lock()  # held by a refresh and by a change of the configuration

    def __len__(self) -> int:
        """Keys that were ever created. Revoking the last key does not make a server accept requests without keys."""
        return len(self._holders)

    def num_usable(self, now: float) -> int:
        """Keys that are valid at ``now``, seconds since the epoch."""
        return sum(holder.row.state(now) == "active" for holder in list(self._holders.values()))

    def refresh(self, database: Database, before: Callable[[Sequence[KeyRow]], None]) -> bool:
        """Read the keys that changed since the last call; whether any did. Runs in the database's thread a few times a
        second, and reads one number where no key changed. ``before`` is called with all keys before requests with a
        new key are accepted."""
        with database.reading() as transaction:
            version = number(transaction, "keys")
            if version == self._version:
                return False
            if version < self._version:  # another, older copy of the database was put in its place
                self._version = -1
            rows = transaction.rows(f"SELECT {COLUMNS} FROM keys WHERE version > ?", (self._version,))
        changed = {row.id: row for row in map(row_of, rows)}
        is_all = self._version < 0
        known = {} if is_all else {name: holder.row for name, holder in self._holders.items()}
        before(list({**known, **changed}.values()))
        with self._lock:
            holders = {name: HeldKey(row, row.principal(self._tenants)) for name, row in changed.items()}
            self._holders = holders if is_all else {**self._holders, **holders}
        self._version = version
        return True

    def reread(self) -> None:
        """Read all keys at the next ``refresh``: after an outage the database may be another one."""
        self._version = -1

    def configure(self, tenants: Mapping[str, TenantConfig]) -> None:
        """Adopt other limits, weights and regions of tenants."""
        with self._lock:
            self._tenants = dict(tenants)
            self._holders = {
                name: HeldKey(holder.row, holder.row.principal(tenants)) for name, holder in self._holders.items()
            }

    def owners(self, principal: Principal) -> tuple[str, ...]:
        """The owners of the quotas of a principal's requests: its key, the keys with which that key was created, and
        the tenant. A key shares its limits with the keys created with it. Empty for a principal without a key."""
        holder = self._holders.get(principal.key_id)
        if holder is None:
            return ()
        row = holder.row
        return (*[f"key:{family}" for family in families_of(row, self._row)], f"tenant:{row.tenant}")

    def holder(self, key_id: str) -> Principal | None:
        """The principal of a key that is valid now. None: the key is unknown, expired or revoked."""
        held = self._holders.get(key_id)
        if held is None or held.row.state(clock.wall()) != "active":
            return None
        return held.principal

    def _row(self, key_id: str) -> KeyRow | None:
        holder = self._holders.get(key_id)
        return None if holder is None else holder.row

    def find(self, token: str) -> HeldKey:
        """The key of a credential. Takes the same time for every wrong credential. Raises Unauthenticated."""
        key_id, _, secret = token.removeprefix(PREFIX).partition("-")
        is_shaped = (
            len(token) == len(PREFIX) + ID_CHARS + 1 + SECRET_CHARS and token.isascii() and token.startswith(PREFIX)
        )
        holder = self._holders.get(key_id) if is_shaped else None
        kept = holder.row.hash if holder is not None else _NO_KEY
        is_same = hmac.compare_digest(hash_of(secret if is_shaped else "x" * SECRET_CHARS), kept)
        if holder is None or not is_same or holder.row.state(clock.wall()) != "active":
            raise Unauthenticated(
                "The API key is not valid; send a valid one as 'Authorization: Bearer sk-inf-...'.",
            )
        return holder
