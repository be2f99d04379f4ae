"""A remote server that behaves as told: well, or in any of the ways that servers go wrong.

Sockets and threads without a framework, so that every byte can be wrong. Speaks just enough of OpenAI's
completions for a gateway to talk to it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
NUM_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it came."""

    head: bytes
    body: bytes
    arrived_at: float

    @property
    def fields(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed


Behaviour = Callable[[socket.socket, Asked], bool]
"""Answers one request; whether the connection may be used again."""


class Upstream:
    """Listens on a port of its own. ``behaviour`` may be changed at any time."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour: Behaviour = behaviour if behaviour is not None else well
        self.asked: list[Asked] = []
        self.sent_bytes = 0
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    @property
    def source(self) -> str:
        return f"openai:{self.url}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def num_asked(self) -> int:
        return len(self.asked)

    def close(self) -> None:
        """As a machine that is switched off: its port is closed, connections are reset."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            _reset(connection)

    def back(self) -> None:
        """On the same port again."""
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def __enter__(self) -> Upstream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        buffer = b""
        with contextlib.suppress(OSError, ValueError):
            while True:
                while b"\r\n\r\n" not in buffer:
                    received = connection.recv(65536)
                    if not received:
                        return
                    buffer += received
                head, _, buffer = buffer.partition(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
                )
                while len(buffer) < length:
                    buffer += connection.recv(65536)
                body, buffer = buffer[:length], buffer[length:]
                asked = Asked(head, body, time.monotonic())
                if not asked.body:  # a probe that lists the models
                    connection.sendall(answer(b'{"object": "list", "data": []}'))
                    continue
                self.asked.append(asked)
                if not self.behaviour(connection, asked):
                    break
        self._open.discard(connection)
        with contextlib.suppress(OSError):
            connection.close()


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()


# -- what is sent --------------------------------------------------------------------------------


def answer(body: bytes, status: bytes = b"200 OK", kind: bytes = b"application/json", extra: bytes = b"") -> bytes:
    """A whole answer with its length."""
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, kind, extra, len(body), body)


def completion(asked: Asked, num_tokens: int = NUM_TOKENS) -> bytes:
    text = "".join(chr(97 + number % 26) for number in range(num_tokens))
    choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
    if "messages" in asked.fields:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": 1 + num_tokens}
    kind = "chat.completion" if "messages" in asked.fields else "text_completion"
    model = asked.fields["model"]
    return json.dumps(
        {"id": "up-1", "object": kind, "created": 1, "model": model, "choices": [choice], "usage": usage}
    ).encode()


def event(number: int, text: str | None = None, finish: str | None = None) -> bytes:
    said = text if text is not None else chr(97 + number % 26)
    choice = {"index": 0, "text": said, "finish_reason": finish}
    return chunk(
        b"data: %b\n\n"
        % json.dumps(
            {"id": "up-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
        ).encode()
    )


def usage_event(num_tokens: int) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": 1 + num_tokens}
    return chunk(
        b"data: %b\n\n"
        % json.dumps(
            {"id": "up-1", "object": "text_completion", "created": 1, "model": "m", "choices": [], "usage": usage}
        ).encode()
    )


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def end(num_tokens: int) -> bytes:
    return event(num_tokens, "", "length") + usage_event(num_tokens) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


# -- how servers behave --------------------------------------------------------------------------


def well(connection: socket.socket, asked: Asked) -> bool:
    """As it should be."""
    count = int(asked.fields.get("max_tokens") or NUM_TOKENS)
    if asked.fields.get("stream"):
        connection.sendall(EVENTS + b"".join(map(event, range(count))) + end(count))
    else:
        connection.sendall(answer(completion(asked, count)))
    return True


def after(seconds: float) -> Behaviour:
    """Well, but late."""

    def late(connection: socket.socket, asked: Asked) -> bool:
        time.sleep(seconds)
        return well(connection, asked)

    return late


def pacing(seconds: float) -> Behaviour:
    """Well, with so many seconds between tokens."""

    def paced(connection: socket.socket, asked: Asked) -> bool:
        count = int(asked.fields.get("max_tokens") or NUM_TOKENS)
        connection.sendall(EVENTS)
        for number in range(count):
            connection.sendall(event(number))
            time.sleep(seconds)
        connection.sendall(end(count))
        return True

    return paced


def failing(connection: socket.socket, asked: Asked) -> bool:
    connection.sendall(answer(b'{"error": {"message": "no"}}', b"500 Internal Server Error"))
    return True


def busy(connection: socket.socket, asked: Asked) -> bool:
    connection.sendall(
        answer(b'{"error": {"message": "busy"}}', b"503 Service Unavailable", extra=b"retry-after: 1\r\n")
    )
    return True


def silent(connection: socket.socket, asked: Asked) -> bool:
    """Takes the request and says nothing until the other end leaves."""
    connection.recv(1)
    return False


def silent_after_two(connection: socket.socket, asked: Asked) -> bool:
    connection.sendall(EVENTS + event(0) + event(1))
    connection.recv(1)
    return False


def reset_after(num_tokens: int) -> Behaviour:
    def reset(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(EVENTS + b"".join(map(event, range(num_tokens))))
        time.sleep(0.1)  # so that the tokens arrive before the reset, which discards what waits
        _reset(connection)
        return False

    return reset


def raw(sent: bytes) -> Behaviour:
    """These bytes, and the end of the connection."""

    def say(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(sent)
        return False

    return say


def endless_line(connection: socket.socket, asked: Asked) -> bool:
    connection.sendall(EVENTS)
    piece = chunk(b"data: " + b"x" * 65536)
    for _ in range(4096):  # 256 MiB
        connection.sendall(piece)
    return False


def firehose(connection: socket.socket, asked: Asked) -> bool:
    """Tokens for as long as they are taken."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    connection.sendall(EVENTS)
    piece = b"".join(event(number, "x" * 1000) for number in range(50))
    for _ in itertools.count():
        connection.sendall(piece)
        time.sleep(0.002)  # the clients of the experiment run in this process as well
    return False


GARBAGE: dict[str, tuple[bool, Behaviour]] = {
    # name: (streamed, behaviour)
    "bad JSON": (False, raw(answer(b'{"choices": ['))),
    "JSON that is no answer": (False, raw(answer(b"[1, 2]"))),
    "HTML with 200": (False, raw(answer(b"<html>hello</html>", kind=b"text/html"))),
    "not HTTP": (False, raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")),
    "fewer bytes than announced": (False, raw(answer(b'{"id": "1"}').replace(b"length: 11", b"length: 99"))),
    "a length that is none": (False, raw(b"HTTP/1.1 200 OK\r\ncontent-length: ten\r\n\r\n{}")),
    "an empty answer": (False, raw(b"")),
    "a flood of headers": (False, raw(b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 50_000 + b"\r\n")),
    "HTML instead of a stream": (True, raw(answer(b"<html>", kind=b"text/html"))),
    "an event that is no JSON": (True, raw(EVENTS + chunk(b"data: {nonsense\n\n"))),
    "a chunk that is none": (True, raw(EVENTS + b"zz\r\nhello\r\n")),
    "a chunk cut short": (True, raw(EVENTS + event(0)[:20])),
    "a stream without its end": (True, raw(EVENTS + event(0) + event(1) + b"0\r\n\r\n")),
    "an endless line": (True, endless_line),
}
