"""An HTTP server with scripted answers, which can go away at a request and come back at the same port."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[str, bytes], tuple[int, bytes, dict[str, str]]]


def answered(document: Any, status: int = 200, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    return status, json.dumps(document).encode(), {name.replace("_", "-"): value for name, value in headers.items()}


class ScriptedServer:
    """Answers POST by ``script(path, body)``; describes the model ``m``. ``goes_at``: the request at which it closes."""

    def __init__(self, script: Script, *, goes_at: int = 10**9, comes_back: bool = False) -> None:
        self.script = script
        self.goes_at = goes_at
        self.comes_back = comes_back
        self.fingerprint = "fp_1"
        self.is_batch_invariant = True
        self.asked: list[tuple[str, bytes, dict[str, str]]] = []
        self.is_away = False
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with outer._lock:
                    if outer.is_away and outer.comes_back:
                        outer.is_away = False  # it came back just now
                if outer.is_away:
                    self._vanish()
                elif self.path == "/v2/models/m":
                    told: dict[str, object] = {
                        "fingerprint": outer.fingerprint,
                        "tasks": "chat",
                        "batch_invariant": outer.is_batch_invariant,
                    }
                    self._send(*answered({"versions": ["1"], "parameters": told}))
                elif self.path == "/v2/health/live":
                    self._send(*answered({}))
                else:
                    self._send(*answered({"error": "it is not found"}, 404))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                with outer._lock:
                    outer.asked.append((self.path, body, {key.lower(): value for key, value in self.headers.items()}))
                    if len(outer.asked) == outer.goes_at:
                        outer.is_away = True
                if outer.is_away:
                    self._vanish()
                else:
                    self._send(*outer.script(self.path, body))

            def _vanish(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

            def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in {"content-length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):  # the client left
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
