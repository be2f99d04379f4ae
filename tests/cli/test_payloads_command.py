"""``inferd payloads``: see, export and delete records; each use is in the audit log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferd.cli.main import main
from inferd.observe.payloads.store import PayloadStore
from inferd.state.audit import AuditLog

NOON = 1_700_000_000.0  # 2023-11-14, 22:13 UTC


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path))
    store = PayloadStore(tmp_path)
    for tenant, day in (("team-a", 0), ("team-a", 2), ("team-b", 0)):
        record = {
            "at": f"2023-11-{14 + day}T22:13:20.000Z",
            "request_id": f"req-{tenant}-{day}",
            "tenant": tenant,
            "model": "chat\x1b[2J",
            "route": "/v1/completions",
            "status": 200,
            "request": {"bytes": 12, "body": {"prompt": "a canary\x1b[31m\u202e\x7f"}},
            "answer": {"bytes": 7},
        }
        store.append(tenant, json.dumps(record).encode() + b"\n", NOON + day * 86_400, 1 << 20)
    return tmp_path


def test_the_list_has_no_texts_and_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["payloads", "list"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 4
    assert "canary" not in shown
    assert all(line.isprintable() for line in shown.split("\n"))
    assert main(["payloads", "list", "--tenant", "team-b"]) == 0
    assert "team-a" not in capsys.readouterr().out


def test_a_record_is_shown_and_exported_in_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["payloads", "show", "req-team-a-2"]) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown)["request"]["body"]["prompt"] == "a canary\x1b[31m\u202e\x7f"
    assert all(line.isprintable() and line.isascii() for line in shown.split("\n"))
    assert main(["payloads", "show", "req-none"]) == 1
    capsys.readouterr()
    assert main(["payloads", "export", "--tenant", "team-a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["request_id"] for line in lines] == ["req-team-a-0", "req-team-a-2"]
    assert all(line.isprintable() for line in lines)


def test_deletion_is_by_tenant_and_by_day_and_needs_words(folder: Path) -> None:
    assert main(["payloads", "delete"]) == 2
    assert main(["payloads", "delete", "--tenant", "team-a", "--before", "2023-11-15"]) == 0
    assert [one["request_id"] for one in PayloadStore(folder).records()] == ["req-team-a-2", "req-team-b-0"]
    assert main(["payloads", "delete", "--tenant", "team-b"]) == 0
    assert [one["request_id"] for one in PayloadStore(folder).records()] == ["req-team-a-2"]
    assert main(["payloads", "delete", "--all"]) == 0
    assert not any(path.is_file() for path in (folder / "payloads").rglob("*"))


def test_every_use_is_in_the_audit_log(folder: Path) -> None:
    main(["payloads", "show", "req-team-a-2"])
    main(["payloads", "export"])
    main(["payloads", "delete", "--tenant", "team-a"])
    done = [entry for entry in reversed(AuditLog(folder).entries()) if entry.outcome == "done"]
    assert [(entry.action, entry.target, entry.detail) for entry in done] == [
        ("show_payloads", "req-team-a-2", ""),
        ("export_payloads", "*", ""),
        ("delete_payloads", "team-a", "2 files"),
    ]


def test_nothing_is_shown_where_the_audit_log_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "audit").write_text("in the way of the folder")
    assert main(["payloads", "export"]) == 1
    found = capsys.readouterr()
    assert "canary" not in found.out
    assert "The audit log cannot be written" in found.err
    assert main(["payloads", "delete", "--all"]) == 1
    assert len(list(PayloadStore(folder).records())) == 3
