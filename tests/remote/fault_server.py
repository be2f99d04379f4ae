"""A server over a real socket that answers as a test says, well or badly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


class Talk:
    """One request that arrived, and the means to answer it."""

    def __init__(self, server: FaultServer, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.head = head
        self.body = body
        self._writer = writer

    @property
    def path(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self, body: bytes, status: int = 200, kind: str = "application/json", *extra: str) -> None:
        lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(body)}", *extra]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, data: object) -> None:
        await self.chunk(event(data))

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    def reset(self) -> None:
        """A connection that breaks: RST instead of FIN."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()

    async def gone(self) -> None:
        """Wait until the other side has closed."""
        await self.server.lost.wait()


Script = Callable[[Talk], Awaitable[None]]


class FaultServer:
    """``script`` is run for every request but probes, which are answered unless ``probe`` says otherwise."""

    def __init__(self, script: Script, probe: Script | None = None) -> None:
        self.script = script
        self.probe = probe
        self.talks: list[Talk] = []
        self.num_connections = 0
        self.lost = asyncio.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                talk = Talk(self, head, b"", writer)
                talk.body = await reader.readexactly(int(talk.headers.get("content-length", "0")))
                if talk.path.endswith("/models"):
                    await (self.probe or _models)(talk)
                    continue
                self.talks.append(talk)
                task = asyncio.ensure_future(self.script(talk))
                left = asyncio.ensure_future(reader.read(1))
                try:
                    await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
                    has_left = left.done()
                    if not task.done():
                        self.lost.set()
                        return
                    await task
                    if has_left:
                        return
                finally:
                    task.cancel()
                    left.cancel()
                    await asyncio.gather(task, left, return_exceptions=True)  # no error is left for the collector
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the other side left, or the test is over
        finally:
            self.lost.set()
            writer.close()

    @contextlib.asynccontextmanager
    async def running(
        self, host: str = "127.0.0.1", port: int = 0, *, secure: ssl.SSLContext | None = None
    ) -> AsyncIterator[FaultServer]:
        server = await asyncio.start_server(self._serve, host, port, ssl=secure)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            tasks = [task for task in asyncio.all_tasks() if "FaultServer._serve" in repr(task.get_coro())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _models(talk: Talk) -> None:
    await talk.answer(b'{"object":"list","data":[]}')


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def piece(text: str, finish: str | None = None) -> dict[str, object]:
    """A chunk of a streamed chat completion."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}


def told_usage(prompt: int, completion: int) -> dict[str, object]:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": usage}


def completion(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


class Flood:
    """A script: 20 MB of a stream, as fast as they are taken."""

    def __init__(self) -> None:
        self.num_sent = 0
        self._block = event(piece("x" * 10_000))

    @property
    def whole(self) -> bytes:
        return self._block * 2000 + DONE

    async def __call__(self, talk: Talk) -> None:
        await talk.send(CHUNKED)
        for _ in range(2000):
            await talk.chunk(self._block)
            self.num_sent += len(self._block)
        await talk.chunk(DONE)
        await talk.end()

    async def is_held_back(self) -> None:
        """Wait until the client reads no more of it."""
        before = -1
        while before != self.num_sent or not self.num_sent:
            before = self.num_sent
            await asyncio.sleep(0.1)
