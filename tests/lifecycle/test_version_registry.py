"""The registry in both databases: changes are whole, several writers are ordered, and the history shows tampering."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.errors import InvalidRequest, ModelNotFound
from inferd.lifecycle import registry
from inferd.lifecycle.contract_diff import Contract
from inferd.lifecycle.registry import (
    MAX_REPORT_BYTES,
    Finding,
    NewVersion,
    Version,
    attach_evidence,
    find,
    move,
    register,
)
from inferd.lifecycle.stages import Action, Policy
from inferd.state.database import Database
from inferd.state.open import open_database
from inferd.types import TensorSpec

X = TensorSpec("x", "FP32", (-1, 4))


def new(number: int = 1, name: str = "churn", outputs: int = 3, **more: Any) -> NewVersion:
    contract = Contract(inputs=(X,), outputs=(TensorSpec("y", "FP32", (-1, outputs)),))
    digest = f"tree-sha256:{number:064x}"
    return NewVersion(name=name, source=f"/models/{number}.onnx", digest=digest, contract=contract, **more)


@pytest.fixture
def database(state_url: str, tmp_path: Path) -> Iterator[Database]:
    opened = open_database(state_url, tmp_path)
    yield opened
    opened.close()


def registered(database: Database, number: int = 1, **more: Any) -> Version:
    return register(database, new(number, **more), actor="user:1", now=float(number))


def verified(database: Database, version: Version) -> Version:
    found = Finding(kind="digest", passed=True, summary="as registered", report={"digest": version.digest})
    return registry.verify(database, version.name, version.version, [found], actor="user:1", now=2.0)


def moved(database: Database, version: Version, *actions: Action, **more: Any) -> Version:
    for action in actions:
        version = move(database, version.name, version.version, action, actor="user:2", now=3.0, **more)
    return version


def promoted(database: Database, number: int = 1, **more: Any) -> Version:
    version = verified(database, registered(database, number, **more))
    return moved(database, version, "validate", "approve", "promote")


def test_a_version_goes_its_way_and_replaces_the_one_before(database: Database) -> None:
    first = promoted(database, 1)
    assert (first.version, first.record.stage, first.record.approver) == (1, "production", "user:2")
    second = promoted(database, 2)
    assert find(database, "churn").version == second.version == 2
    assert find(database, "churn", "1").record.stage == "archived"
    # Back to the first one: it was approved before.
    assert moved(database, first, "promote").record.stage == "production"
    assert [one.record.stage for one in registry.versions(database, "churn")] == ["production", "archived"]
    found = registry.verify_log(database)
    assert (found.problem, found.num_versions) == ("", 2)
    lines = registry.history(database, "churn")
    assert [(one.action, one.version, one.before, one.stage) for one in lines][:4] == [
        ("archive", 2, "production", "archived"),
        ("promote", 1, "archived", "production"),
        ("archive", 1, "production", "archived"),
        ("promote", 2, "approved", "production"),
    ]
    assert (lines[0].reason, lines[0].actor) == ("version 1 replaces it", "user:2")
    assert lines[-1].digest == first.digest


def test_a_changed_output_is_refused_without_a_reason_and_changes_nothing(database: Database) -> None:
    promoted(database, 1)
    second = verified(database, registered(database, 2, outputs=4))
    before = registry.head(database)
    with pytest.raises(InvalidRequest, match=r"\[-1, 4\] instead of \[-1, 3\]") as refused:
        moved(database, second, "validate")
    assert refused.value.code == "registry_contract"
    assert registry.head(database) == before
    assert find(database, "churn", "2") == second
    after = moved(database, second, "validate", override="all clients were changed")
    assert moved(database, after, "approve", "promote").record.stage == "production"
    line = next(one for one in registry.history(database) if one.action == "validate")
    assert (line.override, line.kind) == ("all clients were changed", "contract")
    report = registry.report_of(database, "churn", 2, "contract")
    assert (report["base"], report["breaks"]) == (1, ["the output 'y' has the shape [-1, 4] instead of [-1, 3]"])


def test_the_contract_is_compared_with_the_version_that_is_in_production_then(database: Database) -> None:
    first = promoted(database, 1)
    second = moved(database, verified(database, registered(database, 2)), "validate", "approve")
    third = moved(database, verified(database, registered(database, 3, outputs=4)), "validate", override="new")
    moved(database, third, "approve", "promote")
    with pytest.raises(InvalidRequest, match="differs from that of version 3"):
        moved(database, second, "promote")
    with pytest.raises(InvalidRequest, match="differs from that of version 3"):
        moved(database, first, "promote")


def test_evidence_is_kept_with_its_report(database: Database) -> None:
    version = verified(database, registered(database))
    report = {"max_abs": 1e-7, "label_flips": 0, "rows": 20}
    found = attach_evidence(
        database, "churn", 1, "equivalence", report, passed=True, actor="key:ci", now=4.0, summary="20 rows"
    )
    newest = found.record.newest("equivalence")
    assert newest is not None
    assert (newest.passed, newest.actor, newest.summary) == (True, "key:ci", "20 rows")
    assert registry.report_of(database, "churn", 1, "equivalence") == report
    with pytest.raises(ModelNotFound, match="no golden report"):
        registry.report_of(database, "churn", 1, "golden")
    assert registry.history(database)[0].report == newest.report
    assert find(database, "churn", "1") == found
    assert find(database, "churn", "1") != version


def test_files_that_are_not_as_registered_are_not_verified(database: Database) -> None:
    registered(database)
    other = Finding(kind="digest", passed=False, summary="other files", report={"found": "tree-sha256:" + "f" * 64})
    found = registry.verify(database, "churn", 1, [other], actor="user:1", now=2.0)
    assert found.record.stage == "registered"
    with pytest.raises(InvalidRequest, match="newest digest report of the version did not pass"):
        moved(database, found, "verify")
    assert verified(database, found).record.stage == "verified"


def test_the_same_files_are_registered_once_until_they_are_rejected(database: Database) -> None:
    registered(database)
    with pytest.raises(InvalidRequest, match="registered as churn@1"):
        registered(database)
    assert registered(database, name="other").version == 1
    moved(database, find(database, "churn", "1"), "reject", reason="wrong labels")
    assert registered(database).version == 2


def test_an_alias_moves_and_is_no_stage(database: Database) -> None:
    registered(database, 1)
    registered(database, 2)
    for version in (1, 2):
        found = registry.set_alias(database, "churn", "champion", version, actor="user:1", now=5.0)
        assert found is not None
        assert found.aliases == ("champion",)
        assert find(database, "churn", "champion").version == version
    assert registry.verify_log(database).problem == ""
    registry.set_alias(database, "churn", "champion", None, actor="user:1", now=6.0)
    with pytest.raises(ModelNotFound, match=r"'champion'. Its newest versions are 1 \(registered\), 2 \(registered\)"):
        find(database, "churn", "champion")
    assert registry.verify_log(database).problem == ""
    for alias in ("production", "7", "", "a b", "Latest", "x" * 65):
        with pytest.raises(InvalidRequest, match="cannot be an alias"):
            registry.set_alias(database, "churn", alias, 1, actor="user:1", now=5.0)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"name": "a b"}, "cannot name a model"),
        ({"name": "churn@2"}, "cannot name a model"),
        ({"name": "../x"}, "cannot name a model"),
        ({"name": "x" * 129}, "cannot name a model"),
        ({"digest": "sha256:" + "0" * 64}, "digest must be tree-sha256:"),
        ({"digest": "tree-sha256:xyz"}, "digest must be tree-sha256:"),
        ({"source": ""}, "source must name"),
        ({"source": "a\nb"}, "write one line, without line breaks"),
        ({"tags": {f"t{number}": "" for number in range(65)}}, "tags may have 64"),
        ({"description": "x" * 1001}, "description has 1,001 characters, and may have 1000; shorten it"),
    ],
)
def test_what_cannot_be_registered_is_refused_by_name(tmp_path: Path, change: dict[str, Any], part: str) -> None:
    database = open_database(None, tmp_path)
    with pytest.raises(InvalidRequest, match=part):
        register(database, msgspec.structs.replace(new(), **change), actor="user:1", now=1.0)
    assert registry.head(database)[0] == 0
    database.close()


def test_evidence_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    database = open_database(None, tmp_path)
    registered(database)
    for kind in ("digest", "signature", "contract", "anything"):
        with pytest.raises(InvalidRequest, match="cannot be attached"):
            attach_evidence(database, "churn", 1, kind, {}, passed=True, actor="user:1", now=1.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=f"may have {MAX_REPORT_BYTES}"):
        attach_evidence(
            database, "churn", 1, "golden", {"x": "y" * MAX_REPORT_BYTES}, passed=True, actor="user:1", now=1.0
        )
    with pytest.raises(InvalidRequest, match="cannot be written as JSON"):
        attach_evidence(database, "churn", 1, "golden", {"x": object()}, passed=True, actor="user:1", now=1.0)
    with pytest.raises(ModelNotFound, match="no version, alias or stage '2'"):
        attach_evidence(database, "churn", 2, "golden", {}, passed=True, actor="user:1", now=1.0)
    assert registry.head(database)[0] == 1
    database.close()


def test_several_gateways_agree_on_one_version_in_production(state_url: str, tmp_path: Path) -> None:
    shared = open_database(state_url, tmp_path)
    for number in range(1, 5):
        moved(shared, verified(shared, registered(shared, number)), "validate", "approve")
    problems: list[BaseException] = []

    def promote(version: int) -> None:
        database = open_database(state_url, tmp_path)
        try:
            move(database, "churn", version, "promote", actor="user:2", now=4.0)
        except BaseException as error:
            problems.append(error)
        finally:
            database.close()

    threads = [threading.Thread(target=promote, args=(version,)) for version in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    stages = sorted(one.record.stage for one in registry.versions(shared))
    assert stages == ["archived", "archived", "archived", "production"]
    assert registry.verify_log(shared).problem == ""
    shared.close()


def _killed(url: str, folder: Path, at: int) -> None:
    """Promote a version, and kill this process before its statement number ``at``."""
    database = open_database(url, folder)
    count = 0
    write = registry._write

    def dying(*args: Any, **more: Any) -> None:
        nonlocal count
        for is_after in (False, True):
            if is_after:
                write(*args, **more)
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    registry._write = dying
    move(database, "churn", 2, "promote", actor="user:2", now=4.0)
    os._exit(count)


def test_a_kill_at_any_point_of_a_promotion_leaves_the_old_or_the_new_state(state_url: str, tmp_path: Path) -> None:
    database = open_database(state_url, tmp_path)
    promoted(database, 1)
    moved(database, verified(database, registered(database, 2)), "validate", "approve")
    before = registry.versions(database)
    for at in range(5):
        database.close()
        process = multiprocessing.get_context("fork").Process(target=_killed, args=(state_url, tmp_path, at))
        process.start()
        process.join(60)
        database = open_database(state_url, tmp_path)
        if at < 4:  # two rows, with a look before and after each
            assert process.exitcode == -signal.SIGKILL
            assert registry.versions(database) == before
        else:
            assert process.exitcode == 4
            assert [one.record.stage for one in registry.versions(database)] == ["archived", "production"]
        assert registry.verify_log(database).problem == ""
    database.close()


@pytest.mark.parametrize(
    ("statement", "values", "part"),
    [
        ("DELETE FROM registry_history WHERE number = ?", (3,), "line 3 is missing"),
        ("DELETE FROM registry_history WHERE number = ?", (1,), "line 1 is missing"),
        ("UPDATE registry_history SET entry = ? WHERE number = 2", (b"{}",), "line 2 cannot be read"),
        ("DELETE FROM registry_versions WHERE version = ?", (1,), "row of churn@1 was removed"),
        ("UPDATE registry_versions SET version = ? WHERE version = 2", (9,), "churn@2"),
        ("UPDATE registry_aliases SET version = ?", (2,), "the alias churn@champion is not as"),
        ("DELETE FROM registry_aliases WHERE version = ?", (1,), "the alias churn@champion is not as"),
        ("UPDATE registry_reports SET report = ?", (b'{"passed":true}',), "report of line"),
    ],
)
def test_a_change_past_the_registry_is_found(
    database: Database, statement: str, values: tuple[Any, ...], part: str
) -> None:
    promoted(database, 1)
    registered(database, 2)
    registry.set_alias(database, "churn", "champion", 1, actor="user:1", now=5.0)
    assert registry.verify_log(database).problem == ""
    with database.transaction() as transaction:
        assert transaction.execute(statement, values) > 0
    assert part in registry.verify_log(database).problem


def test_a_row_that_was_edited_and_a_line_that_was_rewritten_are_found(database: Database) -> None:
    version = registered(database, 1)
    registered(database, 2)
    number, digest = registry.head(database)
    assert registry.verify_log(database, [(number, digest)]).problem == ""
    record = msgspec.structs.replace(version.record, stage="production")
    forged = msgspec.json.encode(msgspec.structs.replace(version, record=record))
    with database.transaction() as transaction:
        transaction.execute("UPDATE registry_versions SET version_row = ? WHERE version = 1", (forged,))
    assert "the row of churn@1 is not as line 1" in registry.verify_log(database).problem
    # The last line is rewritten with its row: only a hash that was recorded elsewhere tells.
    other = registry.history(database)[0]
    with database.transaction() as transaction:
        transaction.execute("DELETE FROM registry_history WHERE number = ?", (number,))
        transaction.execute("DELETE FROM registry_versions WHERE version = 2")
        transaction.execute(
            "UPDATE registry_versions SET version_row = ? WHERE version = 1", (msgspec.json.encode(version),)
        )
    assert registry.verify_log(database).problem == ""
    assert "its end was cut off" in registry.verify_log(database, [(number, digest)]).problem
    register(database, new(3), actor="user:9", now=9.0)
    assert registry.head(database)[0] == other.number
    assert "another hash than the recorded one" in registry.verify_log(database, [(number, digest)]).problem


def test_four_eyes_hold_for_rows_as_well(database: Database) -> None:
    policy = Policy(four_eyes=True)
    version = moved(database, verified(database, registered(database)), "validate")
    with pytest.raises(InvalidRequest, match="another user or key"):
        move(database, "churn", 1, "approve", actor="control-socket:1", now=3.0, policy=policy)
    assert moved(database, version, "approve", policy=policy).record.approver == "user:2"
