"""``inferd node`` from outside: what it refuses before it asks a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.cli.main import main
from inferd.cli.node import named_server
from inferd.nodes.cache import Cache, cache_folder
from inferd.nodes.certificate import fingerprint_of
from inferd.nodes.tokens import parse_token

TOKEN = f"inferd1.{'A' * 43}.{'B' * 43}"


@pytest.mark.parametrize(
    ("words", "token", "code", "complaint"),
    [
        (
            ["--join", "gateway:x"],
            TOKEN.encode(),
            1,
            "--join: 'gateway:x' is no HOST:PORT such as 0.0.0.0:8001, with a port",
        ),
        (["--join", f"gateway:{'9' * 5000}"], TOKEN.encode(), 1, "is no HOST:PORT"),
        (["--join", f"{'a' * 64}:1"], TOKEN.encode(), 1, "is no HOST:PORT"),
        (["--join", "gateway:0"], TOKEN.encode(), 2, "--join gateway:0 names no port of a server; write gateway:8001."),
        (["--join", "fd00::1:x"], TOKEN.encode(), 1, "'fd00::1:x' is no name of a host and no address; an address of"),
        (["--join", ":8001"], TOKEN.encode(), 2, "--join :8001 names no host of a server"),
        (["--join", "gateway:1", "--drain", "nan"], TOKEN.encode(), 2, "'nan' is not a number."),
        (["--join", "gateway:1", "--memory", f"{10**9}TiB"], TOKEN.encode(), 2, "is not a size of at most 1048576TiB."),
        (["--join", "gateway:1"], b"\xff\xfe\0", 1, "This is no token of a server"),
        (["--join", "gateway:1", "--label", "zone"], TOKEN.encode(), 1, "'zone' is no label such as zone=a."),
    ],
    ids=["no port", "digits", "label", "port 0", "no address", "no host", "nan", "memory", "binary token", "no label"],
)
def test_a_mistake_is_told_before_a_server_is_asked(
    words: list[str], token: bytes, code: int, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_bytes(token)
    assert main(["node", *words, "--token-file", str(tmp_path / "token"), "--cache", str(tmp_path)]) == code
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_the_second_node_of_a_name_on_a_machine_is_told_to_take_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "token").write_text(TOKEN)
    first = Cache(cache_folder("one"))
    assert first.lock()
    assert main(["node", "--join", "gateway:1", "--name", "one", "--token-file", str(tmp_path / "token")]) == 1
    assert "A node one runs on this machine already; choose another --name." in capsys.readouterr().err


def test_a_token_without_a_server_is_for_the_certificate_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pem = tmp_path / "nodes.pem"

    def made(*words: str) -> tuple[int, str, str]:
        code = main(["node", "token", "--certificate", *words])
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    (first, one, _), (second, two, _) = made(str(pem)), made(str(pem))
    assert (first, second) == (0, 0)
    assert pem.stat().st_mode & 0o777 == 0o600
    assert parse_token(one).fingerprint == parse_token(two).fingerprint == fingerprint_of(pem)
    assert parse_token(one).secret != parse_token(two).secret
    code, out, err = made(str(pem), "--revoke", "--port", "8000")
    assert (code, out) == (2, "")
    assert "--certificate asks no server; leave --revoke, --port out." in err
    pem.write_text("no certificate")
    assert "is no certificate in PEM form; name another file, or one that is not there." in made(str(pem))[2]
    assert "cannot be used (No such file or directory); name a file" in made(str(tmp_path / "gone" / "a.pem"))[2]


@pytest.mark.parametrize(
    ("join", "server"),
    [
        ("gateway", ("gateway", 8001)),
        ("gateway:9000", ("gateway", 9000)),
        ("::1", ("::1", 8001)),
        ("[fd00::1]", ("fd00::1", 8001)),
        ("[fd00::1]:9000", ("fd00::1", 9000)),
    ],
)
def test_a_server_is_named_by_a_host_alone_or_with_a_port(join: str, server: tuple[str, int]) -> None:
    assert named_server(join) == server
