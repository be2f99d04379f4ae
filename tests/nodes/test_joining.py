"""Machines that may join and that may not: tokens, versions, names; and what a stranger may cost."""

from __future__ import annotations

import asyncio
import hashlib
import os
import ssl
from pathlib import Path

import pytest
from tests.nodes.joined import Cluster, cluster, tiny
from tests.worker.watching import until

from inferd import __version__
from inferd.cli.main import main
from inferd.config import NodesConfig
from inferd.errors import ConfigError, InvalidRequest
from inferd.events import NodeChanged
from inferd.nodes.certificate import certificate_for, client_context
from inferd.nodes.listener import MAX_STRANGERS, open_nodes
from inferd.nodes.messages import (
    MAX_FIRST_BYTES,
    PROTOCOL,
    Attach,
    Fetch,
    First,
    Join,
    ModelFile,
    Refused,
    ToNode,
    framed,
    to_node_decoder,
)
from inferd.nodes.tokens import REJOIN_S, TokenRefusedError, Tokens, new_secret, parse_token, token_text
from inferd.worker.messages import HEADER

HERE = NodesConfig(listen="127.0.0.1:0")


async def asked(made: Cluster, first: First | bytes) -> list[ToNode]:
    """What the server says to the first message of a connection; nothing: it closed."""
    reader, writer = await asyncio.open_connection(made.listener.host, made.listener.port, ssl=client_context())
    writer.write(first if isinstance(first, bytes) else framed(first))
    try:
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        return to_node_decoder.decode(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
        return []
    finally:
        writer.close()


def join(secret: str, name: str = "one", **changes: object) -> Join:
    fields: dict[str, object] = {"protocol": PROTOCOL, "version": __version__, "num_cores": 1, "memory_bytes": 1 << 30}
    return Join(secret=secret, name=name, **{**fields, **changes})  # type: ignore[arg-type]


def test_every_machine_that_may_not_join_is_told_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, tiny(), "there") as made:
            secret = parse_token(made.listener.new_token().token).secret
            refused: list[tuple[First, str, str]] = [
                (join("x" * 43), "token", "not one of this server's"),
                (join(secret, protocol=PROTOCOL + 1), "version", "install the same"),
                (join(secret, version="0.0.1"), "version", f"has inferd 0.0.1 and the server {__version__}"),
                (join(secret, "there"), "taken", "a node there has already joined from 127.0.0.1:"),
                (join(secret, "a/b"), "name", "choose another --name"),
                (join(secret, ""), "name", "choose another --name"),
                (join(secret, num_cores=0), "name", "gives no core or no memory"),
                (join(secret, labels={f"l{n}": "v" for n in range(65)}), "name", "more than 64 labels"),
                (Attach("no-key"), "message", "no worker waits"),
                (Fetch("no-key", "0" * 64), "message", "no worker waits for this file"),
            ]
            # The channel of a worker is opened once, and its files have ends.
            await made.until_placed("there")
            ((key, (_, life)),) = made.listener._lives.items()
            life.files = [ModelFile("weights", "/there/weights", 100, "0" * 64)]
            refused += [
                (Attach(key), "message", "no worker waits"),
                (Fetch(key, "1" * 64), "message", "no worker waits for this file"),
                (Fetch(key, "0" * 64, 101), "message", "no worker waits for this file"),
                (Fetch(key, "0" * 64, -1), "message", "no worker waits for this file"),
            ]
            for first, code, words in refused:
                (said,) = await asked(made, first)
                assert isinstance(said, Refused)
                assert said.code == code
                assert words in said.message, said
            told = [e for e in made.witness.events if isinstance(e, NodeChanged) and e.state == "refused"]
            assert len(told) == 8
            assert not any(secret in event.reason for event in told)

            # No message of a node: closed, as soon as that is known.
            for garbage in (
                HEADER.pack(MAX_FIRST_BYTES + 1),
                HEADER.pack(4) + b"\xc1\xc1\xc1\xc1",
                framed(Refused("", "")),
            ):
                assert await asked(made, garbage) == []
            assert made.names == ["there"]

    asyncio.run(scenario())


def test_a_node_with_a_bad_token_ends_with_a_sentence(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, tiny()) as made:
            good = made.listener.new_token()
            secret = parse_token(good.token).secret
            made.listener.new_token(revoke=True)
            other = token_text(hashlib.sha256(b"another certificate").digest(), secret)
            revoked, elsewhere = made.start("one", token=good.token), made.start("two", token=other)
            assert (await revoked.ended(), await elsewhere.ended()) == (1, 1)
            assert "refused this node: the token is not one of this server's, or was revoked" in revoked.said
            assert "its certificate is not the one that the token was made for" in elsewhere.said
            assert secret not in revoked.said + elsewhere.said
            assert made.names == []
            # The secret was not sent to the server with the other certificate.
            assert made.states("two") == []

    asyncio.run(scenario())


def test_strangers_are_limited(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, tiny()) as made:
            made.listener._strangers.update(object() for _ in range(MAX_STRANGERS))  # type: ignore[misc]
            (said,) = await asked(made, b"")
            assert isinstance(said, Refused)
            assert said.code == "full"
            made.listener._strangers.clear()
            await until(lambda: not made.listener._strangers, "none is left")

    asyncio.run(scenario())


def test_a_token_is_kept_as_a_digest_and_expires(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    tokens = Tokens(path)
    secret = tokens.issue(100.0, 50.0)
    assert secret not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    tokens.check(secret, "any", 149.0)
    with pytest.raises(TokenRefusedError, match="has expired; make another one with inferd node token"):
        tokens.check(secret, "any", 150.0)
    with pytest.raises(TokenRefusedError, match="not one of this server's"):
        tokens.check(secret[:-1] + ("A" if secret[-1] != "A" else "B"), "any", 100.0)
    # Another start of the server knows it.
    Tokens(path).check(secret, "any", 149.0)
    assert tokens.revoke_all() == 1
    with pytest.raises(TokenRefusedError):
        Tokens(path).check(secret, "any", 100.0)


def test_a_secret_to_join_again_is_for_its_node_alone_and_the_last_two_are_valid(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens.json")
    first, second, third = (tokens.issue(0.0, REJOIN_S, "one") for _ in range(3))
    other = tokens.issue(0.0, REJOIN_S, "two")
    for secret in (second, third):
        tokens.check(secret, "one", 1.0)
    with pytest.raises(TokenRefusedError, match="not one of"):
        tokens.check(first, "one", 1.0)
    with pytest.raises(TokenRefusedError, match="the secret is that of the node two, not of one"):
        tokens.check(other, "one", 1.0)


@pytest.mark.parametrize("text", ["", "inferd1.a.b", "inferd2." + "a" * 43 + "." + "b" * 43, "x" * 5000])
def test_a_text_that_is_no_token_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(InvalidRequest, match="take the line that inferd node token prints") as refused:
        parse_token(text)
    assert not text or text not in refused.value.message


def test_the_certificate_is_made_once_for_this_user_alone(tmp_path: Path) -> None:
    first = certificate_for(HERE, tmp_path)
    assert certificate_for(HERE, tmp_path).fingerprint == first.fingerprint
    path = tmp_path / "certificate.pem"
    assert path.stat().st_mode & 0o777 == 0o600
    der = ssl.PEM_cert_to_DER_cert("-----BEGIN CERT" + path.read_text().partition("-----BEGIN CERT")[2])
    assert hashlib.sha256(der).digest() == first.fingerprint
    # The operator's own: the same file, under its setting.
    own = NodesConfig(listen="127.0.0.1:0", certificate=str(path))
    assert certificate_for(own, tmp_path / "elsewhere").fingerprint == first.fingerprint


def test_pods_that_start_with_the_server_join_its_first_pod_by_the_operators_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, file = tmp_path / "nodes.pem", tmp_path / "token"
    assert main(["node", "token", "--certificate", str(certificate)]) == 0
    file.write_text(capsys.readouterr().out)
    # An address of loopback that no other process uses, as the port is the one that nodes take by themselves.
    address = f"127.{os.getpid() % 250 + 2}.{os.getpid() // 250 % 250 + 2}.9"
    settings = NodesConfig(listen=f"{address}:8001", certificate=str(certificate), token_file=str(file))

    async def scenario() -> None:
        async with cluster(tmp_path, tiny(), settings=settings) as made:
            made.listener.new_token(revoke=True)  # the operator's token stays
            made.start("inferd-0-1", token=file.read_text().strip(), leader=address)
            await made.until_placed("inferd-0-1")
            (refused,) = await asked(made, join(new_secret()))
            assert isinstance(refused, Refused)
            assert refused.code == "token"

    asyncio.run(scenario())


def test_a_token_in_a_file_that_is_none_or_for_another_certificate_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, file = tmp_path / "nodes.pem", tmp_path / "token"
    settings = NodesConfig(listen="127.0.0.1:0", certificate=str(certificate), token_file=str(file))
    assert main(["node", "token", "--certificate", str(tmp_path / "other.pem")]) == 0
    other = capsys.readouterr().out
    assert main(["node", "token", "--certificate", str(certificate)]) == 0
    for text, problem in ((other, "is for another certificate"), ("secret", "has no token"), (None, "cannot be read")):
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match=rf"nodes\.token_file: .*{problem}") as refused:
            open_nodes(settings, tmp_path, None, None, print)  # type: ignore[arg-type]
        assert text is None or text.strip() not in refused.value.message


def test_files_that_are_none_of_a_certificate_or_of_tokens_are_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"nodes\.certificate: .*wrong\.pem"):
        certificate_for(NodesConfig(certificate=str(wrong)), tmp_path)
    (tmp_path / "certificate.pem").write_text("")  # of the server itself
    with pytest.raises(ConfigError, match=r"certificate\.pem .* cannot be used .*; delete it, and another one is made"):
        certificate_for(HERE, tmp_path)
    (tmp_path / "certificate.pem").unlink()
    (tmp_path / "tokens.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokens\.json .* cannot be read"):
        open_nodes(HERE, tmp_path, None, None, print)  # type: ignore[arg-type]
