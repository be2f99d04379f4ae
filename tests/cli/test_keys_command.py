"""``inferd keys`` as a person uses it, with no server running."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from inferd.cli.main import cli, main
from inferd.state.open import open_database
from inferd.tenancy.usage import Entry, UsageJournal

KEY = re.compile(r"^sk-inf-([A-Za-z0-9]{12})-[A-Za-z0-9]{43}\n$")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path))
    return tmp_path


def keys(*words: str) -> Result:
    return CliRunner().invoke(cli, ["keys", *words])


def created(*words: str) -> tuple[str, str]:
    """A new key's id and text."""
    done = keys("create", *words)
    assert done.exit_code == 0, done.output
    match = KEY.match(done.stdout)
    assert match is not None, "stdout is the key alone, for $(...)"
    return match[1], done.stdout.strip()


def test_the_issues_example_works() -> None:
    done = keys(
        *shlex.split("create --tenant team-a --models chat --rpm 600 --tpm 200k --priority interactive --expires 30d")
    )
    assert KEY.match(done.stdout)
    assert "600 req/min, 200,000 tok/min; interactive; expires 20" in done.stderr
    assert "A server that runs takes it within a second." in done.stderr
    (info,) = json.loads(keys("list", "--json").stdout)
    assert (info["tenant"], info["models"], info["rpm"], info["tpm"]) == ("team-a", ["chat"], 600, 200_000)
    assert info["expires_at"] - info["created_at"] == 30 * 86_400
    assert info["scopes"] == ["infer", "models"]


def test_a_key_is_shown_once() -> None:
    key_id, key = created("--tenant", "t")
    secret = key.rsplit("-", 1)[1]
    for words in (["list"], ["list", "--json"], ["usage"], ["revoke", key_id], ["revoke", key_id, "--json"]):
        done = keys(*words)
        assert done.exit_code == 0
        assert secret not in done.stdout + done.stderr


def test_rotate_prints_another_key_and_revoke_takes_what_a_listing_shows() -> None:
    key_id, key = created("--tenant", "t", "--max-in-flight", "2")
    rotated = json.loads(keys("rotate", key_id, "--overlap", "1h", "--json").stdout)
    assert rotated["key"] != key
    assert (rotated["info"]["family"], rotated["info"]["max_in_flight"]) == (key_id, 2)
    done = keys("revoke", f"sk-inf-{rotated['info']['id']}-")
    assert "is revoked" in done.stderr
    assert [info["state"] for info in json.loads(keys("list", "--json").stdout)] == ["active", "revoked"]


def test_usage_is_summed_as_asked_and_counts_what_a_killed_server_left(folder: Path) -> None:
    key_id, _ = created("--tenant", "t")
    database = open_database(None, folder)
    journal = UsageJournal(folder, None)
    for model in ("a", "b", "b"):
        journal.record(Entry(1e9, "t", key_id, model, 10, 5))
    journal.close(database)
    database.close()
    assert json.loads(keys("usage", "--by", "key", "--json").stdout)[0]["key_id"] == key_id
    rows = json.loads(keys("usage", "--by", "model", "--json").stdout)
    assert [(row["model"], row["requests"], row["completion_tokens"]) for row in rows] == [("a", 1, 5), ("b", 2, 10)]
    assert "45" in keys("list").stdout
    assert json.loads(keys("usage", "--since", "2026-01-01", "--json").stdout) == []
    assert "2001-09-09" in keys("usage", "--key", key_id).stdout


def test_in_a_narrow_terminal_ids_and_numbers_stay_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_id, _ = created("--tenant", "a-tenant-with-a-long-name", "--models", "a-model-with-a-long-name")
    journal, database = UsageJournal(folder, None), open_database(None, folder)
    journal.record(Entry(1e9, "a-tenant-with-a-long-name", key_id, "m", 1_234_567, 5))
    journal.close(database)
    database.close()
    monkeypatch.setattr(
        "inferd.cli.terminal.console", lambda: Console(width=70, force_terminal=True, color_system=None)
    )
    for words, wholes in ((["list"], [key_id]), (["usage", "--by", "key"], [key_id, "1,234,567"])):
        said = keys(*words).stdout
        assert max(map(len, said.splitlines())) <= 70
        for whole in wholes:
            assert whole in said
    assert "tenant a-tenant-with-a-long-name  " in keys("list").stdout


def test_the_config_file_names_the_database(tmp_path: Path) -> None:
    file = tmp_path / "inferd.yaml"
    file.write_text(f"state: {{url: 'sqlite://{tmp_path}/elsewhere.db'}}\ntenants: {{known: {{rpm: 5}}}}\n")
    done = keys("create", "--tenant", "unknown", "--config", str(file))
    assert "no tenant 'unknown'" in done.stderr
    assert (tmp_path / "elsewhere.db").is_file()
    assert not (tmp_path / "state.db").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["create"], "--tenant"),
        (["create", "--tenant", " "], "tenant must be"),
        (["create", "--tenant", "t", "--rpm", "many"], "'many' is not"),
        (["create", "--tenant", "t", "--rpm", "0"], "rpm must be at least 1"),
        (["create", "--tenant", "t", "--scopes", "root"], "'root' is not one of"),
        (["create", "--tenant", "t", "--expires", "soon"], "30d, 12h"),
        (["revoke", "nobody"], "There is no key with the id 'nobody'"),
        (["rotate", "nobody"], "There is no key with the id 'nobody'"),
        (["revoke", "a\x1b[1mb"], r"There is no key with the id 'a\x1b[1mb'"),
        (["revoke", "sk-inf-a1B2c3D4e5F6-SECRETSECRET"], "There is no key with the id 'a1B2c3D4e5F6'"),
        (["revoke", "sk-proj-SECRETSECRET"], "There is no key with the id 'sk-...'"),
        (["revoke", "vnDhSECRETSECRETSECRET"], "There is no key with the id 'vnDh...'"),
        (["revoke", "sk-inf-vnDhSECRETSECRETSECRET"], "There is no key with the id 'vnDh...'"),
        (["usage", "--by", "weather"], "'weather' is not one of"),
        (["usage", "--since", "yesterday"], "'yesterday' is not a day such as 2026-11-01."),
    ],
)
def test_mistakes_are_explained_in_a_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", *words]) in (1, 2)
    shown = capsys.readouterr()
    assert said in shown.err
    assert "SECRET" not in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_a_database_out_of_reach_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setenv("INFERD_STATE__URL", "postgresql://someone:pass-word@127.0.0.1:1/x")
    assert main(["keys", "list"]) == 1
    said = capsys.readouterr().err
    assert "cannot be reached" in said
    assert "pass-word" not in said
