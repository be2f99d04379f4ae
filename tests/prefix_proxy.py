"""Reverse proxies that serve a server below the path /llm/: nginx and Caddy as docs/console.md sets them up, and a small
one that tells the server nothing of the path."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.http_server import answering
from tests.ports import free_port

PREFIX = "/llm/"
KINDS = ("plain", "nginx", "caddy")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "console.md"


@contextlib.contextmanager
def below_path(kind: str, port: int, folder: Path) -> Iterator[str]:
    """The address of the server with this port, below the path. Skips the test where the proxy is not installed."""
    if kind == "plain":
        with _plain(port) as url:
            yield url
        return
    program = shutil.which(kind) or shutil.which(kind, path="/usr/sbin")
    if program is None:
        pytest.skip(f"{kind} is not installed")
    own = free_port()
    file = folder / kind
    text = re.search(rf"{kind}.*?\n```\w+\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.IGNORECASE)
    assert text is not None, f"docs/console.md has no configuration of {kind}"
    site = text[1].replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    if kind == "nginx":
        temporary = "".join(
            f"{name}_temp_path {folder};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        user = "user root;" if os.getuid() == 0 else ""
        file.write_text(
            f"daemon off; {user} pid {folder}/pid; error_log stderr; events {{}}\n"
            f"http {{ access_log off; {temporary} server {{ listen 127.0.0.1:{own}; {site} }} }}"
        )
        command = [program, "-e", "stderr", "-c", str(file)]
    else:
        site = site.replace("example.com", f"http://127.0.0.1:{own}")
        file.write_text(f"{{\n    admin off\n    auto_https off\n}}\n{site}")
        command = [program, "run", "--adapter", "caddyfile", "--config", str(file)]
    env = {**os.environ, "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "HOME": str(folder)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        try:
            url = f"http://127.0.0.1:{own}{PREFIX}"
            _await(url + "health/live", process, folder / "log")
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        assert process.poll() is None, log.read_text(encoding="utf-8")
        time.sleep(0.05)
    raise AssertionError("the proxy did not answer: " + log.read_text(encoding="utf-8"))


@contextlib.contextmanager
def _plain(port: int) -> Iterator[str]:
    with answering(type("Handler", (_Relay,), {"port": port})) as own:
        yield f"http://127.0.0.1:{own}{PREFIX}"


class _Relay(BaseHTTPRequestHandler):
    port = 0
    protocol_version = "HTTP/1.1"

    def _relay(self) -> None:
        if not self.path.startswith(PREFIX):
            self.send_error(404, "outside of the prefix")
            return
        length = int(self.headers.get("content-length") or 0)
        upstream = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        body = self.rfile.read(length) if length else None
        upstream.request(self.command, self.path[len(PREFIX) - 1 :], body, headers)
        answer = upstream.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            while piece := answer.read1(65536):
                self.wfile.write(piece)
        except OSError:
            pass  # the browser left
        finally:
            upstream.close()

    def __getattr__(self, name: str) -> Any:
        if name in ("do_GET", "do_POST", "do_DELETE"):
            return self._relay
        raise AttributeError(name)
