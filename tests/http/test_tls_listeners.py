"""Listeners over TLS: every public client comes in, certificates change under load, and a bad one changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import httpx
import openai
import pytest
import uvloop
from tests.app.test_replaced_files import inferd
from tests.certificates import made_certificate
from tests.gateway.grpc.messages import asking
from tests.gateway.grpc.running import unary
from tests.gateway.twice import MODEL
from tests.predict.live import serving

from inferd.app.change import needs_restart
from inferd.config import Config, ServerConfig, TlsConfig
from inferd.errors import ConfigError, InferdError
from inferd.http.exchange import Exchange
from inferd.http.listener import HttpServer
from inferd.http.tls import Tls, certificate_of

LARGE = [float(number % 100) for number in range(40_000)]


class ResponseWriter:
    """Answers each request at once."""

    def serve(self, exchange: Exchange) -> None:
        exchange.answer(200, (), b"ok")

    def refuse(self, exchange: Exchange, error: InferdError) -> None:
        raise AssertionError(error)


def question(values: list[float]) -> dict[str, object]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(values) // 2, 2], "data": values}]}


def places(folder: Path, name: str) -> tuple[Path, Path]:
    (folder / name).mkdir()
    certificate = made_certificate(folder / name, name)
    return certificate, certificate.with_name("key.pem")


def put(folder: Path, certificate: Path, key: Path) -> None:
    """In the place of what is shown."""
    for file, name in ((certificate, "cert.pem"), (key, "key.pem")):
        shutil.copy(file, folder / "new")
        (folder / "new").replace(folder / name)


def test_clients_come_in_over_tls_and_a_certificate_is_replaced_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    (tmp_path / "twice.py").write_text(MODEL)
    first, second = places(tmp_path, "first"), places(tmp_path, "second")
    put(tmp_path, *first)
    both = tmp_path / "both.pem"
    both.write_bytes(first[0].read_bytes() + second[0].read_bytes())
    tls = {"certificate": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem")}
    model = {"source": f"{tmp_path / 'twice.py'}:Model", "allow_code": True}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path, {"twice": model}, tls=tls, grpc_port=0))
        trusting = ssl.create_default_context(cafile=str(both))
        client = stack.enter_context(httpx.Client(base_url=server.url, verify=trusting, timeout=30))
        place = urlsplit(server.url)
        assert place.scheme == "https"
        for values in ([1.0, 2.0], LARGE):
            answer = client.post("/v2/models/twice/infer", json=question(values))
            assert answer.json()["outputs"][0]["data"] == [2 * value for value in values]
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health/live")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(server.url + "/health/live")
        if curl := shutil.which("curl"):
            words = [curl, "-sS", "--fail", "--cacert", str(first[0]), server.url + "/health/ready"]
            subprocess.run(words, check=True, capture_output=True, timeout=30)
        theirs = openai.DefaultHttpxClient(verify=trusting)
        sdk = stack.enter_context(openai.OpenAI(base_url=server.url + "/v1", api_key="none", http_client=theirs))
        assert [one.id for one in sdk.models.list()] == ["twice"]

        credentials = grpc.ssl_channel_credentials(both.read_bytes())
        channel = stack.enter_context(grpc.secure_channel(server.grpc, credentials))
        assert unary(channel, "ServerReady").ready
        assert len(unary(channel, "ModelInfer", asking(*LARGE)).raw_output_contents[0]) == 4 * len(LARGE)

        failures: list[object] = []
        is_over = threading.Event()

        def asks() -> None:
            with httpx.Client(base_url=server.url, verify=trusting, timeout=30) as mine:
                while not is_over.is_set():
                    anew = httpx.post(server.url + "/v2/models/twice/infer", json=question([1, 2]), verify=trusting)
                    kept = mine.post("/v2/models/twice/infer", json=question([1, 2]))
                    failures.extend(one.text for one in (anew, kept) if one.status_code != 200)

        clients = threading.Thread(target=asks)
        clients.start()
        try:
            here = (place.hostname or "", place.port or 0)
            assert ssl.get_server_certificate(here) == first[0].read_text()
            put(tmp_path, *second)
            assert ssl.get_server_certificate(here) == first[0].read_text(), "no connection since the replacement"
            code, said = inferd("reload")
            assert (code, "server.tls: new connections" in said) == (0, True), said
            assert ssl.get_server_certificate(here) == second[0].read_text()
            assert inferd("reload") == (0, "Reloaded; nothing changed.\n")
            put(tmp_path, first[0], second[1])
            code, said = inferd("reload")
            assert (code, "does not belong to the certificate" in said) == (1, True), said
            assert ssl.get_server_certificate(here) == second[0].read_text()
            assert client.get("/health/ready").status_code == 200
        finally:
            is_over.set()
            clients.join()
        assert not failures
        with grpc.secure_channel(server.grpc, credentials) as other:
            assert unary(other, "ServerReady").ready
        assert unary(channel, "ServerReady").ready


def test_a_certificate_that_cannot_be_used_is_refused_with_the_file_and_the_remedy(tmp_path: Path) -> None:
    (certificate, key), (_, other_key) = places(tmp_path, "one"), places(tmp_path, "other")
    locked, garbage = tmp_path / "locked.pem", tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    words = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(words, check=True, capture_output=True)
    whole = tmp_path / "whole.pem"
    whole.write_bytes(certificate.read_bytes() + key.read_bytes())
    assert certificate_of(TlsConfig()) is None
    assert certificate_of(TlsConfig(certificate=str(whole))) is not None
    for config, said in (
        (TlsConfig(certificate=str(tmp_path / "none.pem")), "none.pem cannot be read"),
        (TlsConfig(certificate=str(certificate), key=str(tmp_path / "none.pem")), "none.pem cannot be read"),
        (TlsConfig(certificate=str(certificate), key=str(other_key)), "does not belong to the certificate"),
        (TlsConfig(certificate=str(certificate), key=str(locked)), "has a password"),
        (TlsConfig(certificate=str(garbage), key=str(key)), "no certificate chain and key in PEM form"),
        (TlsConfig(certificate=str(certificate)), "no certificate chain and key in PEM form"),
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            certificate_of(config)
        assert (refused.value.param or "").startswith("server.tls.")


def test_a_server_with_a_bad_certificate_neither_listens_nor_passes_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "state"))
    file = tmp_path / "inferd.yaml"
    file.write_text(
        f"server: {{port: 0, tls: {{certificate: {tmp_path / 'none.pem'}}}}}\nmodels: {{m: {{source: demo}}}}\n"
    )
    for words in (("check", str(file)), ("serve", str(file))):
        code, said = inferd(*words)
        assert (code, "none.pem cannot be read" in said) == (1, True), said
    file.write_text("server: {tls: {key: k.pem}}\nmodels: {m: {source: demo}}\n")
    code, said = inferd("check", str(file))
    assert (code, "name the certificate's file, or leave server.tls.key out" in said) == (1, True), said


def test_tls_begins_and_ends_with_a_restart() -> None:
    plain, secure, other = (Config(server=ServerConfig(tls=TlsConfig(certificate=one))) for one in (None, "a", "b"))
    assert "needs a restart" in "".join(needs_restart(plain, secure))
    assert "needs a restart" in "".join(needs_restart(secure, plain))
    assert not needs_restart(secure, other)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_above_the_limit_gets_the_refusal_over_tls_as_well(
    tmp_path: Path, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    certificate, key = places(tmp_path, "one")
    found = certificate_of(TlsConfig(certificate=str(certificate), key=str(key)))
    assert found is not None
    trusting = ssl.create_default_context(cafile=str(certificate))
    trusting.set_alpn_protocols(["h2", "http/1.1"])

    async def main() -> None:
        config = ServerConfig(port=0, max_connections=1)
        async with HttpServer(ResponseWriter(), config, tls=Tls(found).listening("http/1.1")).running() as server:
            reader, first = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting)
            assert first.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
            first.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            other, second = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting)
            async with asyncio.timeout(20):
                assert (await other.read()).startswith(b"HTTP/1.1 503")
            for writer in (first, second):
                writer.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())
