"""Clients of an experiment, on plain sockets, so that they can misbehave at any byte."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from tests.experiments.books import Tally

JSON = dict[str, Any]


class Answer:
    """A whole answer."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.body = body

    @property
    def json(self) -> JSON:
        parsed: JSON = json.loads(self.body)
        return parsed

    @property
    def text(self) -> str:
        """What a completion or a chat says."""
        assert self.status == 200, self
        choice = self.json["choices"][0]
        said: str = choice["text"] if "text" in choice else choice["message"]["content"]
        return said

    @property
    def code(self) -> str:
        """The word of an error."""
        code: str = self.json["error"]["code"]
        return code

    def __repr__(self) -> str:
        return f"{self.status} {self.body[:300]!r}"


class _OverUnixSocket(http.client.HTTPConnection):
    """To the control socket, whose path is in the place of the host."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.host)


class Client:
    """Asks a server and keeps books of what came. A port of 0 means that the host is a Unix socket's path."""

    def __init__(self, host: str, port: int, tally: Tally, headers: Mapping[str, str] | None = None) -> None:
        self.host, self.port = host, port
        self.tally = tally
        self.headers = dict(headers or {})

    def with_key(self, key: str) -> Client:
        return Client(self.host, self.port, self.tally, {**self.headers, "authorization": f"Bearer {key}"})

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        seconds: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One request on a connection of its own."""
        kind = http.client.HTTPConnection if self.port else _OverUnixSocket
        connection = kind(self.host, self.port, timeout=seconds)
        try:
            connection.request(
                method, path, _payload(body), {**_content(body, self.port), **self.headers, **(headers or {})}
            )
            response = connection.getresponse()
            answer = Answer(response.status, dict(response.getheaders()), response.read())
        except (OSError, http.client.HTTPException):
            self.tally.cut()
            raise
        finally:
            connection.close()
        self._judge(path, answer)
        return answer

    def get(self, path: str, **options: Any) -> Answer:
        return self.request("GET", path, **options)

    def post(self, path: str, body: object = None, **options: Any) -> Answer:
        return self.request("POST", path, body, **options)

    def complete(self, prompt: str, *, model: str = "tiny", max_tokens: int = 4, **options: Any) -> Answer:
        """POST /v1/completions; ``headers`` and ``seconds`` are the request's, other options its body's."""
        own = {name: options.pop(name) for name in ("headers", "seconds") if name in options}
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, **options}
        return self.post("/v1/completions", body, **own)

    def chat(self, prompt: str, *, model: str = "tiny", max_tokens: int = 4, **options: Any) -> Answer:
        own = {name: options.pop(name) for name in ("headers", "seconds") if name in options}
        messages = [{"role": "user", "content": prompt}]
        return self.post(
            "/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": max_tokens, **options}, **own
        )

    @contextlib.contextmanager
    def stream(self, prompt: str, **options: Any) -> Iterator[Stream]:
        """A streamed completion, read line by line; leaving early closes the connection."""
        opened = Stream(self, prompt, **options)
        try:
            yield opened
        finally:
            opened.leave()

    def _judge(self, path: str, answer: Answer) -> None:
        if answer.status >= 500 and path.startswith("/v1"):
            self.tally.cut()  # it may have cost something
        if answer.status >= 400 and path.startswith(("/v1", "/admin")):
            try:
                error = answer.json["error"]
                if path.endswith(":predict"):  # KServe's dialect
                    error = {"message": error, "code": ""}
                assert isinstance(error["message"], str)
                assert error["message"]
                # What is no request yet has no id: bytes that are no HTTP, headers that are too large.
                assert "x-request-id" in answer.headers or error["code"] in ("invalid_http", "headers_too_large")
            except (ValueError, KeyError, TypeError, AssertionError):
                self.tally.note(f"I7: an error without its shape: {answer!r} {answer.headers}")
        elif answer.status == 200 and path.startswith("/v1") and b'"usage"' in answer.body:
            usage = answer.json.get("usage")
            is_again = answer.headers.get("x-inferd-cache") == "hit" or "idempotent-replayed" in answer.headers
            if usage and not is_again:
                self.tally.used(usage)


class Stream:
    """A streamed answer under way."""

    def __init__(
        self, client: Client, prompt: str, *, model: str = "tiny", seconds: float = 30.0, **options: Any
    ) -> None:
        headers = options.pop("headers", {})
        body = {"model": model, "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, **options}
        self._tally = client.tally
        self.connection = http.client.HTTPConnection(client.host, client.port, timeout=seconds)
        self.connection.request(
            "POST", "/v1/completions", _payload(body), {**_content(body), **client.headers, **headers}
        )
        assert self.connection.sock is not None
        self.socket: socket.socket = self.connection.sock  # http.client gives it away with the answer
        self.response = self.connection.getresponse()
        self.status = self.response.status
        self.headers = {name.lower(): value for name, value in self.response.getheaders()}
        self.error: JSON | None = None
        self.is_whole = False

    def events(self) -> Iterator[JSON]:
        """Every event but the last word. Notes a stream that ends without one."""
        if self.status != 200:
            return
        try:
            while line := self.response.readline():
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    self.is_whole = True
                    return
                if not data or data.startswith(b":"):
                    continue
                event: JSON = json.loads(data)
                if "error" in event:
                    self.error = event["error"]
                    self._tally.cut()
                elif event.get("usage"):
                    self._tally.used(event["usage"])
                yield event
        except (http.client.IncompleteRead, ConnectionError):
            pass
        if self.error is None:
            self._tally.note("I6: a stream ended without [DONE] and without an error")

    def first(self) -> JSON:
        return next(self.events())

    def rest(self) -> str:
        """Read to the end; the text that came."""
        return "".join(
            choice.get("text") or ""
            for event in self.events()
            for choice in event.get("choices", ())
            if "error" not in event
        )

    def leave(self) -> None:
        """Close as a program does that ends: FIN. A thread that still reads is woken, for it holds the connection."""
        with contextlib.suppress(OSError):  # the other end was first
            self.socket.shutdown(socket.SHUT_RDWR)
        self._close()

    def reset(self) -> None:
        """Close as a program does that crashes: RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close()

    def _close(self) -> None:
        if not self.is_whole:
            self._tally.cut()
        self.response.close()
        self.connection.close()
        self.socket.close()


def _payload(body: object) -> bytes | None:
    return body if body is None or isinstance(body, bytes) else json.dumps(body).encode()


def _content(body: object, port: int = 1) -> dict[str, str]:
    """http.client would name a Unix socket's path as the host."""
    host = {} if port else {"host": "localhost"}
    return host if body is None else {"content-type": "application/json", **host}


def exchange(host: str, port: int, sent: bytes, *, seconds: float = 10.0, half_close: bool = False) -> bytes:
    """Send bytes as they are and read until the server closes or says nothing for so long."""
    with socket.create_connection((host, port), timeout=seconds) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while chunk := connection.recv(65536):
                received += chunk
        return received


def head(method: str, path: str, *lines: str, body: bytes = b"") -> bytes:
    """A request's bytes."""
    length = [f"content-length: {len(body)}"] if body else []
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: localhost", *length, *lines, "", ""]).encode() + body
