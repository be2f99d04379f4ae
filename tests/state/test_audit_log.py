"""The audit log: every change of its files is found, and nothing is confirmed that is not on the disk."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.errors import StateUnavailable
from inferd.state.audit import AuditLog, AuditRecord, Head, Verdict


def record(action: str = "load", target: str = "", tenant: str = "", detail: str = "") -> AuditRecord:
    return AuditRecord(
        at="2026-11-23T18:00:00.000Z",
        actor="key:boss",
        action=action,
        outcome="done",
        target=target,
        tenant=tenant,
        detail=detail,
    )


def written(folder: Path, number: int, segment_bytes: int = 1000) -> AuditLog:
    audit = AuditLog(folder, segment_bytes)
    for index in range(number):
        audit.append(record(target=f"m{index}"))
    return audit


def files_of(audit: AuditLog) -> list[Path]:
    return sorted(audit.folder.glob("*.jsonl"))


def test_the_chain_goes_on_from_file_to_file(tmp_path: Path) -> None:
    audit = written(tmp_path, 20)
    assert len(files_of(audit)) > 3
    verdict = audit.verify()
    assert (verdict.first, verdict.last, verdict.problem) == (1, 20, "")
    assert verdict.hash == audit.head().hash
    assert [entry.seq for entry in audit.entries(limit=3)] == [20, 19, 18]
    assert [entry.target for entry in audit.entries(before=3)] == ["m1", "m0"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in audit.folder.iterdir())
    assert audit.folder.stat().st_mode & 0o777 == 0o700


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_change_of_a_file_is_found_and_named(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    audit = written(tmp_path_factory.mktemp("audit"), 8)
    path = data.draw(st.sampled_from(files_of(audit)))
    before = path.read_bytes()
    lines = before.splitlines(keepends=True)
    index = data.draw(st.integers(0, len(lines) - 1))
    kind = data.draw(st.sampled_from(("flip", "remove", "swap", "repeat", "cut", "insert")))
    if kind == "flip":
        at = data.draw(st.integers(0, len(before) - 1))
        after = before[:at] + bytes([before[at] ^ (1 << data.draw(st.integers(0, 7)))]) + before[at + 1 :]
    elif kind == "cut":
        after = before[: data.draw(st.integers(0, len(before) - 1))]
    elif kind == "insert":
        after = b"".join([*lines[:index], b"{}\n", *lines[index:]])
    else:
        changed = {
            "remove": [*lines[:index], *lines[index + 1 :]],
            "swap": [*lines[:index], *lines[index + 1 :], lines[index]],
            "repeat": [*lines[:index], lines[index], *lines[index:]],
        }
        after = b"".join(changed[kind])
    path.write_bytes(after)
    verdict = audit.verify()
    assert (verdict.problem == "") == (after == before)


def test_the_first_wrong_line_is_named(tmp_path: Path) -> None:
    audit = written(tmp_path, 5, 1_000_000)
    (path,) = files_of(audit)
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace('"m2"', '"m9"')
    path.write_text("\n".join(lines) + "\n")
    found = audit.verify()
    assert "line 4" in found.problem
    assert "entry 4 does not continue the chain; the entry before it was changed" in found.problem
    assert found.last == 3


def test_an_end_that_was_cut_off_is_found_by_the_head_or_by_a_head_that_was_kept(tmp_path: Path) -> None:
    audit = written(tmp_path, 5, 1_000_000)
    (path,) = files_of(audit)
    kept = (audit.head().seq, audit.head().hash)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    assert "ends with entry 3, and entry 5 is recorded" in audit.verify().problem
    (audit.folder / "head").unlink()  # an attacker who knows the files
    assert audit.verify().problem == ""
    assert "entry 5 is recorded" in audit.verify(kept).problem
    assert audit.verify((3, "0" * 64)).problem.endswith("has another hash than the recorded one")
    audit.append(record("later"))
    audit.append(record("later"))
    assert "entry 5 has another hash" in audit.verify(kept).problem  # also after it has grown again


def test_a_cut_stays_visible_when_the_log_grows_again(tmp_path: Path) -> None:
    audit = written(tmp_path, 5, 1_000_000)
    (path,) = files_of(audit)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    entry, _ = audit.append(record("later"))
    assert entry.seq == 6
    assert "entry 6 follows entry 3" in audit.verify().problem


def test_old_files_may_be_archived(tmp_path: Path) -> None:
    audit = written(tmp_path, 12)
    files_of(audit)[0].unlink()
    verdict = audit.verify()
    assert (verdict.problem, verdict.last) == ("", 12)
    assert verdict.first > 1


def test_a_line_that_a_crash_cut_short_was_never_confirmed_and_is_removed(tmp_path: Path) -> None:
    audit = written(tmp_path, 3, 1_000_000)
    (path,) = files_of(audit)
    with path.open("ab") as file:
        file.write(b'{"seq":4,"at":"20')
    assert audit.verify().problem == ""
    audit.append(record("next"))
    assert (audit.verify().problem, audit.verify().last) == ("", 4)
    assert [json.loads(line)["seq"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_line_whose_head_a_crash_lost_counts(tmp_path: Path) -> None:
    audit = written(tmp_path, 3, 1_000_000)
    before = (audit.folder / "head").read_bytes()
    audit.append(record("confirmed by its line alone"))
    (audit.folder / "head").write_bytes(before)
    entry, _ = audit.append(record("next"))
    assert entry.seq == 5
    assert audit.verify().problem == ""


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_refuses_and_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    audit = written(tmp_path, 3, 1_000_000)
    before = {path.name: path.read_bytes() for path in audit.folder.iterdir()}
    real, left = getattr(os, call), [0]

    def full(descriptor: int, *data: memoryview) -> object:
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return real(descriptor, *data)

    for left[0] in (0, 1):  # the line has no space, then the head
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(StateUnavailable, match="No space left on device") as refused:
                audit.append(record("refused"))
        assert refused.value.code == "audit_unavailable"
        assert {path.name: path.read_bytes() for path in audit.folder.iterdir()} == before
    audit.append(record("again"))
    assert (audit.verify().problem, audit.verify().last) == ("", 4)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_device_that_is_really_full_refuses(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path)
    audit.folder.mkdir()
    name = f"{1:012d}.jsonl"
    (audit.folder / name).symlink_to("/dev/full")
    (audit.folder / "head").write_bytes(msgspec.json.encode(Head(seq=1, file=name)))
    with pytest.raises(StateUnavailable, match="No space left on device"):
        audit.append(record())


@given(st.text(st.characters(codec=None), max_size=400))
def test_hostile_text_is_one_line_of_printable_ascii(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    audit = AuditLog(tmp_path_factory.mktemp("audit"))
    audit.append(record(target=text, tenant=text, detail=text))
    (path,) = files_of(audit)
    line = path.read_text("ascii")
    assert line.endswith("\n")
    assert line[:-1].isprintable()
    assert audit.verify() == Verdict(first=1, last=1, hash=audit.head().hash)
    assert len(audit.entries()) == 1


def _append(folder: Path, name: str) -> None:
    for _ in range(10):
        AuditLog(folder, 2000).append(record(target=name))


def test_several_processes_append_to_one_chain(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append, args=(tmp_path, f"p{index}")) for index in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    verdict = AuditLog(tmp_path).verify()
    assert (verdict.problem, verdict.last) == ("", 30)
