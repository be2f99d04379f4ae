"""The tables, as numbered migrations. A released migration is never changed; each change is a new migration.

All statements run on SQLite and PostgreSQL. SQLite reads PostgreSQL's names of types as affinities (FLOAT8 is real,
BIGINT is integer, and bytes stay bytes).
"""

from __future__ import annotations

from typing import Final

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        # Counters that only grow: each change of a watched table takes the next number.
        "CREATE TABLE counters (name TEXT PRIMARY KEY, value BIGINT NOT NULL)",
        "INSERT INTO counters (name, value) VALUES ('keys', 0), ('leases', 0)",
        # family: id of the first key before all rotations; quotas belong to families.
        "CREATE TABLE keys (id TEXT PRIMARY KEY, family TEXT NOT NULL, hash BYTEA NOT NULL, "
        "tenant TEXT NOT NULL, name TEXT NOT NULL, scopes TEXT NOT NULL, models TEXT NOT NULL, "
        "rpm BIGINT, tpm BIGINT, max_in_flight BIGINT, priority BIGINT NOT NULL, "
        "created_at FLOAT8 NOT NULL, expires_at FLOAT8, revoked_at FLOAT8, version BIGINT NOT NULL)",
        "CREATE INDEX keys_version ON keys (version)",
        # The servers that share this database, and their shares of limits.
        "CREATE TABLE gateways (id TEXT PRIMARY KEY, host TEXT NOT NULL, seen_at FLOAT8 NOT NULL)",
        "CREATE TABLE buckets (name TEXT PRIMARY KEY, level FLOAT8 NOT NULL, at FLOAT8 NOT NULL, epoch TEXT NOT NULL)",
        "CREATE TABLE leases (bucket TEXT NOT NULL, gateway TEXT NOT NULL, share FLOAT8 NOT NULL, "
        "demand FLOAT8 NOT NULL, need FLOAT8 NOT NULL, version BIGINT NOT NULL, PRIMARY KEY (bucket, gateway))",
        "CREATE INDEX leases_version ON leases (version)",
        # The usage ledger, and the position up to which each journal was entered.
        "CREATE TABLE usage (day TEXT NOT NULL, tenant TEXT NOT NULL, key_id TEXT NOT NULL, model TEXT NOT NULL, "
        "requests BIGINT NOT NULL, prompt_tokens BIGINT NOT NULL, completion_tokens BIGINT NOT NULL, "
        "PRIMARY KEY (day, tenant, key_id, model))",
        "CREATE TABLE journals (name TEXT PRIMARY KEY, position BIGINT NOT NULL)",
        # Answers stored for their Idempotency-Key. gateway: the server that computes it, empty with the answer.
        "CREATE TABLE answers (name BYTEA PRIMARY KEY, tenant TEXT NOT NULL, digest BYTEA NOT NULL, "
        "gateway TEXT NOT NULL, status BIGINT NOT NULL, content_type BYTEA NOT NULL, body BYTEA NOT NULL, "
        "expires_at FLOAT8 NOT NULL)",
        "CREATE INDEX answers_expiry ON answers (expires_at)",
    ),
    (
        # maker: the family of the key that created this key; the limits hold for both together.
        # Empty: the operator created it.
        "ALTER TABLE keys ADD COLUMN maker TEXT NOT NULL DEFAULT ''",
    ),
)

VERSION: Final = len(MIGRATIONS)
