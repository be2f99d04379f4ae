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
    (
        # Of devices: the seconds of steps, and the joules where a device tells its energy.
        "ALTER TABLE usage ADD COLUMN device_s FLOAT8 NOT NULL DEFAULT 0",
        "ALTER TABLE usage ADD COLUMN energy_j FLOAT8",
    ),
    (
        # Of the Responses API. The key begins with the tenant, so another tenant's id is as an unknown one.
        # gateway: the server that computes it in the background, empty at its end. num_bytes: of the whole row;
        # item_bytes: of input_items and output. body: without its output. The large columns are the last.
        "CREATE TABLE responses (tenant TEXT NOT NULL, id TEXT NOT NULL, created_at FLOAT8 NOT NULL, "
        "status TEXT NOT NULL, previous TEXT NOT NULL, conversation TEXT NOT NULL, background BIGINT NOT NULL, "
        "gateway TEXT NOT NULL, attempts BIGINT NOT NULL, key_id TEXT NOT NULL, num_bytes BIGINT NOT NULL, "
        "item_bytes BIGINT NOT NULL, input_items BYTEA NOT NULL, output BYTEA NOT NULL, body BYTEA NOT NULL, "
        "events BYTEA NOT NULL, request BYTEA NOT NULL, PRIMARY KEY (tenant, id))",
        "CREATE INDEX responses_age ON responses (tenant, created_at)",
        "CREATE INDEX responses_running ON responses (gateway) WHERE gateway <> ''",
        "CREATE TABLE conversations (tenant TEXT NOT NULL, id TEXT NOT NULL, created_at FLOAT8 NOT NULL, "
        "used_at FLOAT8 NOT NULL, next_position BIGINT NOT NULL, num_bytes BIGINT NOT NULL, metadata BYTEA NOT NULL, "
        "PRIMARY KEY (tenant, id))",
        "CREATE INDEX conversations_age ON conversations (tenant, used_at)",
        "CREATE TABLE conversation_items (tenant TEXT NOT NULL, conversation TEXT NOT NULL, position BIGINT NOT NULL, "
        "id TEXT NOT NULL, num_bytes BIGINT NOT NULL, item BYTEA NOT NULL, "
        "PRIMARY KEY (tenant, conversation, position))",
        "CREATE UNIQUE INDEX conversation_items_id ON conversation_items (tenant, conversation, id)",
        # The sums over a tenant's responses and conversations.
        "CREATE TABLE stored_totals (tenant TEXT PRIMARY KEY, num_bytes BIGINT NOT NULL, "
        "num_responses BIGINT NOT NULL, num_conversations BIGINT NOT NULL)",
    ),
    (
        # Of rollouts: their progress, and every change of it. name: model:stable:new.
        "INSERT INTO counters (name, value) VALUES ('rollouts', 0)",
        "CREATE TABLE rollouts (name TEXT PRIMARY KEY, progress BYTEA NOT NULL)",
        "CREATE TABLE rollout_changes (name TEXT NOT NULL, number BIGINT NOT NULL, at FLOAT8 NOT NULL, "
        "actor TEXT NOT NULL, progress BYTEA NOT NULL, readings BYTEA NOT NULL, PRIMARY KEY (name, number))",
        # Of each gateway: units with a bad event of a guard, and all units (guard ''), by the new version's share.
        "CREATE TABLE rollout_counts (name TEXT NOT NULL, run BIGINT NOT NULL, guard TEXT NOT NULL, "
        "share FLOAT8 NOT NULL, gateway TEXT NOT NULL, of_stable BIGINT NOT NULL, of_new BIGINT NOT NULL, "
        "PRIMARY KEY (name, run, guard, share, gateway))",
        # Digests of the units that were bad, and the batch of the gateway that has counted each: none counts one twice.
        "CREATE TABLE rollout_units (name TEXT NOT NULL, run BIGINT NOT NULL, guard TEXT NOT NULL, "
        "unit BYTEA NOT NULL, gateway TEXT NOT NULL, batch BIGINT NOT NULL, PRIMARY KEY (name, run, guard, unit))",
        "CREATE TABLE rollout_gateways (name TEXT NOT NULL, gateway TEXT NOT NULL, run BIGINT NOT NULL, "
        "is_ready BIGINT NOT NULL, deaths BIGINT NOT NULL, PRIMARY KEY (name, gateway))",
    ),
    (
        # Versions of models, their reports by digest, and the history of all changes as a chain of hashes.
        "INSERT INTO counters (name, value) VALUES ('registry', 0)",
        "CREATE TABLE registry_versions (name TEXT NOT NULL, version BIGINT NOT NULL, version_row BYTEA NOT NULL, "
        "PRIMARY KEY (name, version))",
        "CREATE TABLE registry_aliases (name TEXT NOT NULL, alias TEXT NOT NULL, version BIGINT NOT NULL, "
        "PRIMARY KEY (name, alias))",
        "CREATE TABLE registry_reports (digest TEXT PRIMARY KEY, report BYTEA NOT NULL)",
        "CREATE TABLE registry_history (number BIGINT PRIMARY KEY, name TEXT NOT NULL, entry BYTEA NOT NULL)",
        "CREATE INDEX registry_history_name ON registry_history (name, number)",
    ),
    (
        # Of drift: the counts that a model's requests and answers are compared with.
        "CREATE TABLE drift_references (model TEXT PRIMARY KEY, reference BYTEA NOT NULL)",
    ),
    (
        # Files of clients, whose contents are in a folder, and batch jobs. gateway: the server that works on a batch,
        # empty: none; fence: the number of its lease. ended_at: NULL while it goes on. num_bytes: of its results.
        "CREATE TABLE files (tenant TEXT NOT NULL, id TEXT NOT NULL, created_at FLOAT8 NOT NULL, "
        "expires_at FLOAT8 NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL, num_bytes BIGINT NOT NULL, "
        "folder TEXT NOT NULL, PRIMARY KEY (tenant, id))",
        "CREATE INDEX files_expiry ON files (expires_at)",
        "CREATE INDEX files_id ON files (id)",
        "CREATE TABLE batches (tenant TEXT NOT NULL, id TEXT NOT NULL, created_at FLOAT8 NOT NULL, ended_at FLOAT8, "
        "input_file TEXT NOT NULL, folder TEXT NOT NULL, gateway TEXT NOT NULL, fence BIGINT NOT NULL, "
        "num_bytes BIGINT NOT NULL, record BYTEA NOT NULL, PRIMARY KEY (tenant, id))",
        # The database's own identity, which a folder of contents keeps too.
        "CREATE TABLE jobs_owner (one BIGINT PRIMARY KEY, id TEXT NOT NULL)",
        "CREATE INDEX batches_open ON batches (created_at) WHERE ended_at IS NULL",
    ),
    (
        # Changes of rollouts that no audit log has yet, and the server that is to write their lines.
        "CREATE TABLE rollout_unrecorded (name TEXT NOT NULL, number BIGINT NOT NULL, gateway TEXT NOT NULL, "
        "PRIMARY KEY (name, number))",
    ),
    (
        # Digests of the settings that a gateway serves with; NULL: it has not written them.
        "ALTER TABLE gateways ADD COLUMN settings BYTEA",
    ),
    (
        # Adapters that operators loaded while servers ran.
        "INSERT INTO counters (name, value) VALUES ('adapters', 0)",
        "CREATE TABLE adapters (name TEXT PRIMARY KEY, model TEXT NOT NULL, source TEXT NOT NULL)",
    ),
    (
        # The last hints of a gateway for the others, and how many it has written.
        "ALTER TABLE gateways ADD COLUMN num_hints BIGINT NOT NULL DEFAULT 0",
        "ALTER TABLE gateways ADD COLUMN hints BYTEA",
    ),
)

VERSION: Final = len(MIGRATIONS)
