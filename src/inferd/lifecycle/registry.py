"""The versions of models in the database: their records, their evidence, their aliases, and the history of all changes.

Every change is one transaction under the database's lock, so several gateways and commands may change the registry at
the same time, and a process that is killed leaves the state before or after a change. The transaction also appends a
line to the history. Each line has the SHA-256 of the line before it, of the stored version and of the report, so that
``verify_log`` finds changed, removed and added rows. The audit log of admin actions holds the number and the hash of
the newest line (``docs/registry.md``).

All functions run in the database's thread. They raise StateUnavailable.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal

import msgspec

from inferd.artefacts.manifest import TREE_PREFIX, is_digest
from inferd.errors import InvalidRequest, ModelNotFound
from inferd.lifecycle.contract_diff import Contract, difference
from inferd.lifecycle.stages import (
    STAGES,
    Action,
    Change,
    Event,
    Evidence,
    Kind,
    Policy,
    Record,
    moved,
    with_evidence,
)
from inferd.state.audit import NO_HASH
from inferd.state.database import Database, Transaction, Value, next_number
from inferd.worker.timestamp import timestamp

MAX_REPORT_BYTES: Final = 256 * 1024
MAX_TEXT: Final = 1000
"""Characters of a reason, a description or a summary."""

MAX_ENTRIES: Final = 1000
"""Lines of the history that are read at a time."""

Attachable = Literal["equivalence", "golden", "replay"]
"""Kinds of evidence that come from outside. Digests, signatures and contracts are compared by inferd itself."""

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)*", re.ASCII)
_ALIAS: Final = re.compile(r"[A-Za-z][\w.-]{0,63}", re.ASCII)
_MAX_NAME: Final = 128
_MAX_TAGS: Final = 64
_COMPARED: Final = frozenset(("validate", "canary", "promote"))

_encode = msgspec.json.encode


class NewVersion(msgspec.Struct, frozen=True, kw_only=True):
    """What is registered. ``digest`` is claimed until ``verify`` has read the files."""

    name: str
    source: str  # a file, a folder, or where it is downloaded from
    digest: str  # tree-sha256:..., of names and contents (artefacts/manifest.py)
    num_bytes: int = 0
    num_files: int = 0
    contract: Contract = Contract()
    description: str = ""
    tags: dict[str, str] = {}
    run_id: str = ""  # of the training, in MLflow's terms


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """A version as it is stored."""

    name: str
    version: int
    source: str
    digest: str
    num_bytes: int
    num_files: int
    contract: Contract
    description: str
    tags: dict[str, str]
    run_id: str
    created_at: float  # seconds since the epoch
    record: Record
    aliases: tuple[str, ...] = ()  # not stored with the rest


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the history."""

    number: int
    at: str  # RFC 3339, UTC
    actor: str
    action: str  # register, attach, alias, unalias, or an action of a stage
    name: str
    version: int
    digest: str
    before: str  # the stage; empty: there was none
    stage: str
    reason: str = ""
    override: str = ""
    detail: str = ""
    kind: str = ""  # of the evidence that came with it
    report: str = ""  # SHA-256 of its report
    record: str = ""  # SHA-256 of the version as it was stored
    prev: str = NO_HASH


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What reading the files of a version has shown."""

    kind: Literal["digest", "signature"]
    passed: bool
    summary: str
    report: Mapping[str, Any]


class LogVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What ``verify_log`` found. ``problem`` names the first thing that is wrong; empty: the history is whole."""

    last: int
    hash: str
    num_versions: int
    problem: str = ""


# -- changes ------------------------------------------------------------------------------------


def register(database: Database, new: NewVersion, *, actor: str, now: float) -> Version:
    """Store a new version of a model. Raises InvalidRequest, and for files that are registered already as well."""
    _check_new(new)
    with _changing(database) as transaction:
        known = _versions(transaction, new.name)
        same = next((one for one in known if one.digest == new.digest and one.record.stage != "rejected"), None)
        if same is not None:
            raise InvalidRequest(
                f"The same files are registered as {new.name}@{same.version} ({same.record.stage}); use that version.",
                param="digest",
                code="registry_exists",
            )
        version = Version(
            version=1 + max((one.version for one in known), default=0),
            created_at=now,
            record=Record(registrant=actor, since=now),
            **{field: getattr(new, field) for field in NewVersion.__struct_fields__},
        )
        _write(transaction, version, now, actor, "register", before="", detail=new.source)
    return version


def register_verified(
    database: Database, new: NewVersion, findings: Iterable[Finding], *, actor: str, now: float, policy: Policy
) -> Version:
    """Store a new version with what reading its files has shown. Raises InvalidRequest."""
    version = register(database, new, actor=actor, now=now)
    return verify(database, new.name, version.version, findings, actor=actor, now=now, policy=policy)


def attach_evidence(
    database: Database,
    name: str,
    version: int,
    kind: Attachable,
    report: Mapping[str, Any],
    *,
    passed: bool,
    actor: str,
    now: float,
    summary: str = "",
) -> Version:
    """Attach a report to a version. The newest report of a kind counts, and one that did not pass holds it back.

    ``report`` is anything that JSON can express, of at most ``MAX_REPORT_BYTES``. Raises ModelNotFound, InvalidRequest.
    """
    if kind not in ("equivalence", "golden", "replay"):
        raise InvalidRequest(
            f"Evidence of the kind {str(kind)[:32]!r} cannot be attached; it is equivalence, golden or replay.",
            param="kind",
            code="registry_kind",
        )
    with _changing(database) as transaction:
        found = one_in(transaction, name, version)
        return _attached(transaction, found, kind, report, passed, actor, now, summary)


def verify(
    database: Database,
    name: str,
    version: int,
    findings: Iterable[Finding],
    *,
    actor: str,
    now: float,
    policy: Policy = Policy(),
) -> Version:
    """Store what reading a version's files has shown. A version that was only registered is verified where all of it
    passed. Raises ModelNotFound, InvalidRequest."""
    findings = tuple(findings)
    with _changing(database) as transaction:
        found = one_in(transaction, name, version)
        for one in findings:
            found = _attached(transaction, found, one.kind, one.report, one.passed, actor, now, one.summary)
        if found.record.stage == "registered" and all(one.passed for one in findings):
            found = _moved(transaction, found, Event(action="verify", actor=actor, at=now), policy)
    return found


def move(
    database: Database,
    name: str,
    version: int,
    action: Action,
    *,
    actor: str,
    now: float,
    policy: Policy = Policy(),
    reason: str = "",
    override: str = "",
) -> Version:
    """Carry out an action. The version that was in production before is archived in the same transaction. Raises
    ModelNotFound, and InvalidRequest that names what is missing."""
    _check_text("reason", reason)
    _check_text("override", override)
    with _changing(database) as transaction:
        return move_in(
            *(transaction, name, version, action),
            actor=actor,
            now=now,
            policy=policy,
            reason=reason,
            override=override,
        )


def move_in(
    transaction: Transaction,
    name: str,
    version: int,
    action: Action,
    *,
    actor: str,
    now: float,
    policy: Policy = Policy(),
    reason: str = "",
    override: str = "",
    detail: str = "",
) -> Version:
    """``move`` inside of a transaction that holds the database's lock, and that is rolled back where this raises.
    ``detail`` is for the history, such as the numbers that the action follows from."""
    found = one_in(transaction, name, version)
    serving = _in_production(transaction, name)
    change = Change()
    if serving is not None and serving.version != version and action in _COMPARED:
        change = difference(serving.contract, found.contract, serving.version)
    event = Event(action=action, actor=actor, at=now, reason=reason, override=override, change=change)
    contract = None
    if action in _COMPARED:
        report: dict[str, Any] = msgspec.to_builtins(change)
        contract = _stored_report(transaction, "contract", report, True, actor, now, _summary(change))
    after = _moved(transaction, found, event, policy, contract, detail)
    if action == "promote" and serving is not None and serving.version != version:
        replaced = Event(action="archive", actor=actor, at=now, reason=f"version {version} replaces it")
        _moved(transaction, serving, replaced, policy)
    return after


def set_alias(
    database: Database, name: str, alias: str, version: int | None, *, actor: str, now: float
) -> Version | None:
    """Point an alias at a version; None: remove it. Raises ModelNotFound, InvalidRequest."""
    if not _ALIAS.fullmatch(alias) or alias in STAGES or alias.lower() == "latest":
        raise InvalidRequest(
            f"{alias[:64]!r} cannot be an alias: it begins with a letter, has at most 64 letters, digits, '.', '_' "
            "and '-', and is no stage's name and not 'latest'.",
            param="alias",
            code="registry_alias",
        )
    with _changing(database) as transaction:
        held = transaction.rows("SELECT version FROM registry_aliases WHERE name = ? AND alias = ?", (name, alias))
        if version is None:
            if not held:
                raise ModelNotFound(f"The model {name[:_MAX_NAME]} has no alias {alias}.", param="alias")
            found = one_in(transaction, name, msgspec.convert(held[0][0], int))
            transaction.execute("DELETE FROM registry_aliases WHERE name = ? AND alias = ?", (name, alias))
            _write(transaction, found, now, actor, "unalias", detail=alias)
            return None
        found = one_in(transaction, name, version)
        if found.record.stage == "rejected":
            raise InvalidRequest(
                f"{name}@{version} was rejected, so no alias may name it.", param="version", code="registry_stage"
            )
        transaction.execute(
            "INSERT INTO registry_aliases (name, alias, version) VALUES (?, ?, ?) "
            "ON CONFLICT (name, alias) DO UPDATE SET version = excluded.version",
            (name, alias, version),
        )
        _write(transaction, found, now, actor, "alias", detail=alias)
        return _with_aliases(transaction, [found])[0]


# -- reading ------------------------------------------------------------------------------------


def versions(database: Database, name: str | None = None) -> list[Version]:
    """All versions, or those of a model, by name and number."""
    with database.reading() as transaction:
        return _with_aliases(transaction, _versions(transaction, name))


def find(database: Database, name: str, ref: str = "production") -> Version:
    """The version that ``ref`` names: its number, an alias, 'latest', or the newest in a stage. Raises ModelNotFound
    that says what there is."""
    with database.reading() as transaction:
        known = _with_aliases(transaction, _versions(transaction, name))
    return chosen(known, name, ref)


def chosen(known: list[Version], name: str, ref: str) -> Version:
    """The one of a model's versions that ``ref`` names. Raises ModelNotFound."""
    if not known:
        raise ModelNotFound(
            f"The registry has no model {name[:_MAX_NAME]!r}; 'inferd registry list' shows the models.", param="name"
        )
    if ref == "latest":
        return known[-1]
    if ref.isascii() and ref.isdecimal():
        found = [one for one in known if str(one.version) == ref]
    elif ref in STAGES:
        found = [one for one in known if one.record.stage == ref]
    else:
        found = [one for one in known if ref in one.aliases]
    if not found:
        there = ", ".join(f"{one.version} ({one.record.stage})" for one in known[-5:])
        raise ModelNotFound(
            f"{name} has no version, alias or stage {ref[:64]!r}. Its newest versions are {there}.", param="version"
        )
    return found[-1]


def report_of(database: Database, name: str, version: int, kind: Kind) -> dict[str, Any]:
    """The newest report of a kind. Raises ModelNotFound."""
    with database.reading() as transaction:
        found = one_in(transaction, name, version).record.newest(kind)
        rows = (
            []
            if found is None
            else transaction.rows("SELECT report FROM registry_reports WHERE digest = ?", (found.report,))
        )
    if not rows:
        raise ModelNotFound(f"{name}@{version} has no {kind} report.", param="kind")
    return msgspec.json.decode(msgspec.convert(rows[0][0], bytes), type=dict[str, Any])


def history(database: Database, name: str | None = None, *, before: int | None = None, limit: int = 100) -> list[Entry]:
    """The newest lines, the newest first; of one model, and with lower numbers than ``before`` alone."""
    values: list[Value] = [before if before is not None else 1 << 62]
    if name is not None:
        values.append(name)
    with database.reading() as transaction:
        rows = transaction.rows(
            f"SELECT entry FROM registry_history WHERE number < ?{'' if name is None else ' AND name = ?'} "
            f"ORDER BY number DESC LIMIT {min(limit, MAX_ENTRIES)}",
            values,
        )
    return [_entry_decoder.decode(msgspec.convert(entry, bytes)) for (entry,) in rows]


def head(database: Database) -> tuple[int, str]:
    """The number and the hash of the newest line."""
    with database.reading() as transaction:
        return _head(transaction)


def verify_log(database: Database, known: Iterable[tuple[int, str]] = ()) -> LogVerdict:
    """Check the chain, and that versions, reports and aliases are as the history says. ``known``: numbers and hashes of
    lines that were recorded elsewhere."""
    with database.reading() as transaction:
        rows = [
            msgspec.convert(row, tuple[int, str, bytes])
            for row in transaction.rows("SELECT number, name, entry FROM registry_history ORDER BY number")
        ]
        stored = {
            (name, version): _hash(row)
            for name, version, row in (
                msgspec.convert(row, tuple[str, int, bytes])
                for row in transaction.rows("SELECT name, version, version_row FROM registry_versions")
            )
        }
        reports = {
            digest: _hash(report)
            for digest, report in (
                msgspec.convert(row, tuple[str, bytes])
                for row in transaction.rows("SELECT digest, report FROM registry_reports")
            )
        }
        aliases = {
            (name, alias): version
            for name, alias, version in (
                msgspec.convert(row, tuple[str, str, int])
                for row in transaction.rows("SELECT name, alias, version FROM registry_aliases")
            )
        }
    hashes = dict(known)
    newest: dict[tuple[str, int], Entry] = {}
    named: dict[tuple[str, str], int] = {}
    last, prev, problem = 0, NO_HASH, ""
    for number, name, line in rows:
        problem = _line_problem(number, name, line, last, prev, hashes)
        if problem:
            break
        entry = _entry_decoder.decode(line)
        last, prev = number, _hash(line)
        newest[entry.name, entry.version] = entry
        if entry.action == "alias":
            named[entry.name, entry.detail] = entry.version
        elif entry.action == "unalias":
            named.pop((entry.name, entry.detail), None)
        if entry.report and reports.get(entry.report) != entry.report:
            problem = f"the {entry.kind} report of line {number} was changed or removed"
            break
    if not problem:
        problem = _rows_problem(newest, stored, named, aliases)
    if not problem and last < max(hashes, default=0):
        problem = f"the history ends with line {last}, and line {max(hashes)} is recorded: its end was cut off"
    return LogVerdict(last=last, hash=prev, num_versions=len(stored), problem=problem)


def _line_problem(number: int, name: str, line: bytes, last: int, prev: str, hashes: Mapping[int, str]) -> str:
    try:
        entry = _entry_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"line {number} cannot be read"
    if number != last + 1 or entry.number != number:
        return f"line {last + 1} is missing"
    if entry.prev != prev:
        return f"line {number} does not continue the chain; the line before it was changed"
    if line != _encode(entry) or entry.name != name:
        return f"line {number} was written by another program"
    if hashes.get(number, _hash(line)) != _hash(line):
        return f"line {number} has another hash than the recorded one"
    return ""


def _rows_problem(
    newest: Mapping[tuple[str, int], Entry],
    stored: Mapping[tuple[str, int], str],
    named: Mapping[tuple[str, str], int],
    aliases: Mapping[tuple[str, str], int],
) -> str:
    for (name, version), entry in newest.items():
        row = stored.get((name, version))
        if row is None:
            return f"the row of {name}@{version} was removed"
        if row != entry.record:
            return f"the row of {name}@{version} is not as line {entry.number} of the history left it"
    for name, version in stored:
        if (name, version) not in newest:
            return f"the history does not know {name}@{version}"
    for name, alias in {*named, *aliases}:
        if named.get((name, alias)) != aliases.get((name, alias)):
            return f"the alias {name}@{alias} is not as the history left it"
    return ""


# -- inside a transaction -----------------------------------------------------------------------

_version_decoder: Final = msgspec.json.Decoder(Version)
_entry_decoder: Final = msgspec.json.Decoder(Entry)


@contextmanager
def _changing(database: Database) -> Iterator[Transaction]:
    """A transaction that holds the database's lock, and tells the gateways that the registry has changed."""
    with database.transaction() as transaction:
        transaction.lock()
        tell_gateways(transaction)
        yield transaction


def tell_gateways(transaction: Transaction) -> None:
    """Have the gateways read again what they know of versions: those that they load, and those of their rollouts."""
    next_number(transaction, "registry")
    next_number(transaction, "rollouts")


def _versions(transaction: Transaction, name: str | None) -> list[Version]:
    where, values = ("", ()) if name is None else (" WHERE name = ?", (name,))
    rows = transaction.rows(f"SELECT version_row FROM registry_versions{where} ORDER BY name, version", values)
    return [_version_decoder.decode(msgspec.convert(row, bytes)) for (row,) in rows]


def one_in(transaction: Transaction, name: str, version: int) -> Version:
    """A version by its number. Raises ModelNotFound."""
    rows = transaction.rows("SELECT version_row FROM registry_versions WHERE name = ? AND version = ?", (name, version))
    if not rows:
        return chosen(_versions(transaction, name), name, str(version))
    return _version_decoder.decode(msgspec.convert(rows[0][0], bytes))


def _in_production(transaction: Transaction, name: str) -> Version | None:
    return next((one for one in _versions(transaction, name) if one.record.stage == "production"), None)


def _with_aliases(transaction: Transaction, found: list[Version]) -> list[Version]:
    names: dict[tuple[str, int], list[str]] = {}
    for row in transaction.rows("SELECT name, version, alias FROM registry_aliases ORDER BY alias"):
        name, version, alias = msgspec.convert(row, tuple[str, int, str])
        names.setdefault((name, version), []).append(alias)
    return [msgspec.structs.replace(one, aliases=tuple(names.get((one.name, one.version), ()))) for one in found]


def _attached(
    transaction: Transaction,
    found: Version,
    kind: Kind,
    report: Mapping[str, Any],
    passed: bool,
    actor: str,
    now: float,
    summary: str,
) -> Version:
    _check_text("summary", summary)
    evidence = _stored_report(transaction, kind, report, passed, actor, now, summary)
    after = msgspec.structs.replace(found, record=with_evidence(found.record, evidence))
    detail = f"{'passed' if passed else 'did not pass'}{': ' if summary else ''}{summary}"
    _write(transaction, after, now, actor, "attach", before=found.record.stage, detail=detail, evidence=evidence)
    return after


def _moved(
    transaction: Transaction,
    found: Version,
    event: Event,
    policy: Policy,
    evidence: Evidence | None = None,
    detail: str = "",
) -> Version:
    record = moved(found.record, event, policy)
    if evidence is not None:
        record = with_evidence(record, evidence)
    after = msgspec.structs.replace(found, record=record)
    _write(
        *(transaction, after, event.at, event.actor, event.action),
        before=found.record.stage,
        reason=event.reason,
        override=event.override,
        detail="; ".join([word for word in (detail, "" if evidence is None else evidence.summary) if word]),
        evidence=evidence,
    )
    return after


def _stored_report(
    transaction: Transaction, kind: Kind, report: Mapping[str, Any], passed: bool, actor: str, now: float, summary: str
) -> Evidence:
    """Store a report under its digest. Raises InvalidRequest."""
    try:
        encoded = _encode(report)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(
            f"The report cannot be written as JSON ({error}).", param="report", code="registry_report"
        ) from None
    if len(encoded) > MAX_REPORT_BYTES:
        raise InvalidRequest(
            f"The report has {len(encoded)} bytes and may have {MAX_REPORT_BYTES}; attach its figures, and keep its "
            "details elsewhere.",
            param="report",
            code="registry_report",
        )
    digest = _hash(encoded)
    transaction.execute(
        "INSERT INTO registry_reports (digest, report) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING",
        (digest, encoded),
    )
    return Evidence(kind=kind, passed=passed, at=now, actor=actor, report=digest, summary=summary)


def _write(
    transaction: Transaction,
    version: Version,
    now: float,
    actor: str,
    action: str,
    *,
    before: str | None = None,
    reason: str = "",
    override: str = "",
    detail: str = "",
    evidence: Evidence | None = None,
) -> None:
    """Store a version, and the line of its change."""
    stored = msgspec.structs.replace(version, aliases=())
    row = _encode(stored)
    transaction.execute(
        "INSERT INTO registry_versions (name, version, version_row) VALUES (?, ?, ?) "
        "ON CONFLICT (name, version) DO UPDATE SET version_row = excluded.version_row",
        (stored.name, stored.version, row),
    )
    last, prev = _head(transaction)
    entry = Entry(
        number=last + 1,
        at=timestamp(now),
        actor=actor,
        action=action,
        name=stored.name,
        version=stored.version,
        digest=stored.digest,
        before=stored.record.stage if before is None else before,
        stage=stored.record.stage,
        reason=reason,
        override=override,
        detail=detail[:MAX_TEXT],
        kind="" if evidence is None else evidence.kind,
        report="" if evidence is None else evidence.report,
        record=_hash(row),
        prev=prev,
    )
    transaction.execute(
        "INSERT INTO registry_history (number, name, entry) VALUES (?, ?, ?)",
        (entry.number, entry.name, _encode(entry)),
    )


def _head(transaction: Transaction) -> tuple[int, str]:
    rows = transaction.rows("SELECT number, entry FROM registry_history ORDER BY number DESC LIMIT 1")
    if not rows:
        return 0, NO_HASH
    number, line = msgspec.convert(rows[0], tuple[int, bytes])
    return number, _hash(line)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _summary(change: Change) -> str:
    """A difference of contracts in one line."""
    if change.base is None:
        return "no version is in production yet"
    found = "; ".join(change.words) or (change.unknown or "the same")
    return f"against version {change.base}: {found}"[:MAX_TEXT]


# -- checks -------------------------------------------------------------------------------------


def check_name(name: str) -> None:
    """Raises InvalidRequest for a text that cannot name a model."""
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name[:_MAX_NAME]!r} cannot name a model: a name has at most {_MAX_NAME} letters, digits, '.', '_', '-' "
            "and '/', and begins with a letter or digit.",
            param="name",
            code="registry_name",
        )


def _check_new(new: NewVersion) -> None:
    check_name(new.name)
    if not is_digest(new.digest) or not new.digest.startswith(TREE_PREFIX):
        raise InvalidRequest(
            f"digest must be {TREE_PREFIX} and 64 hexadecimal digits, not {new.digest[:80]!r}; "
            "'inferd registry digest' prints it.",
            param="digest",
            code="registry_digest",
        )
    _check_text("source", new.source)
    if not new.source:
        raise InvalidRequest("source must name a file or folder.", param="source", code="registry_source")
    _check_text("description", new.description)
    _check_text("run_id", new.run_id)
    if len(new.tags) > _MAX_TAGS:
        raise InvalidRequest(f"tags may have {_MAX_TAGS} names.", param="tags", code="registry_tags")
    for name, value in new.tags.items():
        _check_text("tags", name)
        _check_text("tags", value)


def _check_text(field: str, text: str) -> None:
    problem = ""
    if len(text) > MAX_TEXT:
        problem = f"{field} has {len(text):,} characters, and may have {MAX_TEXT}; shorten it."
    elif not text.isprintable():
        problem = f"{field} is {text[:64]!r}; write one line, without line breaks and control characters."
    if problem:
        raise InvalidRequest(problem, param=field, code="registry_text")
