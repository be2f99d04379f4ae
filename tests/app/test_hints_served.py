"""Two servers on one database: a remote server that fails at one is tried last by the other before it fails there."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
from rich.console import Console
from tests.app.test_gateways_served import report
from tests.http_server import answering
from tests.remote.fault_server import completion
from tests.server_process import Server, running
from tests.worker.watching import until_now

from inferd.cli.running.status import rendered


@dataclass
class Told:
    """What a remote server is told, and what it got."""

    is_broken: bool = False
    num_asked: int = 0


class Remote(BaseHTTPRequestHandler):
    """Answers chats, or fails them while it is broken."""

    protocol_version = "HTTP/1.1"
    told = Told()

    def do_GET(self) -> None:
        self._answer(200, b'{"data": []}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.told.num_asked += 1
        self._answer(*((500, b"{}") if self.told.is_broken else (200, completion("well"))))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def write(file: Path, folder: Path, ports: tuple[int, int], failures: int) -> Path:
    urls = [f"http://127.0.0.1:{port}/v1" for port in ports]
    far = {
        "source": f"openai:{urls[0]}",
        "remotes": [{"url": urls[1]}],
        "breaker": {"failures": failures, "cooldown_s": 60},
        "routing": {"eject_factor": 0},
        "retry": {"budget": 1.0},
    }
    config = {
        "server": {"port": 0},
        "state": {"data_dir": str(folder)},
        "models": {"tiny": {"source": "tiny"}, "far": far},
    }
    file.write_text(json.dumps(config))
    return file


def ask(server: Server) -> None:
    body = {"model": "far", "messages": [{"role": "user", "content": "the same beginning " * 50}]}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text


def counted(server: Server, result: str) -> float:
    """The hints of which the page of metrics says that this became of them."""
    name = f'inferd_hints_total{{result="{result}"}} '
    (line,) = [line for line in httpx.get(server.url + "/metrics").text.splitlines() if line.startswith(name)]
    return float(line.removeprefix(name))


def test_a_server_that_fails_at_one_gateway_is_tried_last_by_the_other(tmp_path: Path) -> None:
    first, second = Told(), Told()

    def asks(server: Server, remote: Told) -> bool:
        """Whether a request through this gateway reaches the remote server."""
        before = remote.num_asked
        ask(server)
        return remote.num_asked > before

    one, two = (answering(type("Of", (Remote,), {"told": told})) for told in (first, second))
    with one as one_port, two as other_port:
        ports = (one_port, other_port)
        file = write(tmp_path / "one.yaml", tmp_path, ports, failures=1)
        other = write(tmp_path / "two.yaml", tmp_path, ports[::-1], failures=1000)  # its own breaker stays closed
        with running(data_dir=tmp_path, file=file) as telling, running(data_dir=tmp_path, file=other) as hearing:
            home = first if asks(telling, first) else second
            assert asks(hearing, home), "the same beginning goes to the same server from both"
            home.is_broken = True
            assert asks(hearing, home), "its own breaker does not know"
            ask(telling)
            until_now(lambda: not asks(hearing, home), "the other gateway has heard of it", 60)
            assert not asks(telling, home)
            until_now(lambda: counted(hearing, "received") > 0, "what was received is counted", 60)
            assert counted(telling, "sent") > 0
            found = report(telling, tmp_path)
            assert found.hints is not None
            assert found.hints.sent > 0
            assert found.hints.unknown == found.hints.unreadable == 0
            shown = io.StringIO()
            Console(file=shown, width=120).print(rendered(found, "here"))
            assert f"hints    {found.hints.sent:,} sent, " in shown.getvalue()
