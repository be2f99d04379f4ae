"""A load generator: raw HTTP/1.1 over asyncio streams, one connection per client, server-sent events.

It uses no HTTP library, so that the server is measured and not the client. It knows the OpenAI completion routes and
nothing of inferd: any server with these routes can be measured.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from inferd import clock
from inferd.benchmark.dataset import Query
from inferd.benchmark.stats import Record
from inferd.errors import Unauthenticated, Unavailable

OnRecord = Callable[[Record], None]
_MAX_HEADERS = 64 * 1024
_MAX_LINE = 1 << 20
_JSON_HEADERS: Mapping[str, str] = {"Content-Type": "application/json"}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta is not None and (self.delta.content or self.delta.reasoning_content)))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    tasks: list[str] | None = None  # only inferd has this field


class _Models(msgspec.Struct):
    data: list[_Model]


_chunk = msgspec.json.Decoder(_Chunk)


class ServerError(Exception):
    """The server's answer was an error, or was not valid. ``status`` and ``body``: the error's."""

    def __init__(self, message: str, status: int | None = None, body: bytes = b"") -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class Exchange(NamedTuple):
    """A whole answer."""

    status: int
    headers: dict[str, str]  # with lower-case names and values
    body: bytes
    first_at: float  # when the first part of the body arrived


class Connection:
    """One keep-alive HTTP connection. One request at a time."""

    def __init__(
        self,
        url: str,
        timeout_s: float,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        connect: Callable[[], socket.socket] | None = None,
    ) -> None:
        """``connect`` opens the connection when it does not go to the URL's host."""
        self._connect = connect
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        self._host = parts.hostname or "127.0.0.1"
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        given = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in (given | dict(headers or {})).items())
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def lines(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[bytes]:
        """The response body, line by line as it arrives. Raises ServerError or OSError."""
        async with asyncio.timeout(self._timeout_s):
            is_reused = self._streams is not None
            try:
                status, headers = await self._ask(method, path, body)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.close()
                if not is_reused:
                    raise
                status, headers = await self._ask(method, path, body)  # the server closed an idle connection
            assert self._streams is not None
            reader = self._streams[0]
            is_done = False
            try:
                rest = b""
                failed = b""
                async for piece in _body(reader, headers):
                    if status != 200:
                        failed += piece
                        continue
                    *complete, rest = (rest + piece).split(b"\n")
                    for line in complete:
                        yield line
                if status != 200:
                    raise ServerError(f"{status}: {_message(failed)}", status, failed)
                if rest:
                    yield rest
                is_done = True
            finally:
                if not is_done or headers.get("connection") == "close" or _is_endless(headers):
                    self.close()

    async def exchange(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Exchange:
        """The whole answer to a request with these headers besides the connection's own. An answer of any status is
        one. Raises OSError, asyncio.IncompleteReadError, TimeoutError, ServerError for what is no HTTP."""
        async with asyncio.timeout(self._timeout_s):
            is_reused = self._streams is not None
            try:
                status, answered = await self._ask(method, path, body, headers)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.close()
                if not is_reused:
                    raise
                status, answered = await self._ask(method, path, body, headers)
            assert self._streams is not None
            is_done = False
            first_at: float | None = None
            pieces: list[bytes] = []
            try:
                async for piece in _body(self._streams[0], answered):
                    if first_at is None:
                        first_at = clock.now()
                    pieces.append(piece)
                is_done = True
            finally:
                if not is_done or answered.get("connection") == "close" or _is_endless(answered):
                    self.close()
            return Exchange(status, answered, b"".join(pieces), clock.now() if first_at is None else first_at)

    async def _ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] = _JSON_HEADERS
    ) -> tuple[int, dict[str, str]]:
        if self._streams is None:
            self._streams = await self._opened()
        reader, writer = self._streams
        fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        writer.write(
            f"{method} {self._base}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{self._fields}"
            f"{fields}Content-Length: {len(body)}\r\n\r\n".encode("latin-1")
            + body
        )
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        if len(head) > _MAX_HEADERS:
            raise ServerError("the response's headers are larger than 64 KiB")
        first, *rest = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise ServerError(f"{first[:60]!r} is no HTTP response")
        answered = {
            name.strip().lower(): value.strip().lower() for name, _, value in (f.partition(":") for f in rest if f)
        }
        return int(words[1]), answered

    async def _opened(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._connect is not None:
            made = self._connect()
            made.setblocking(False)
            return await asyncio.open_unix_connection(sock=made, limit=_MAX_LINE)
        context = ssl.create_default_context() if self._is_tls else None
        return await asyncio.open_connection(self._host, self._port, ssl=context, limit=_MAX_LINE)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _is_endless(headers: dict[str, str]) -> bool:
    return "chunked" not in headers.get("transfer-encoding", "") and "content-length" not in headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            piece = await reader.readexactly(size + 2)
            yield piece[:-2]
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass  # trailers
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(65536):
            yield piece


def _message(body: bytes) -> str:
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:200].decode("utf-8", "replace")
    error = found.get("error", found) if isinstance(found, dict) else found
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The server under test."""

    url: str
    model: str
    api_key: str | None = None
    timeout_s: float = 600.0
    ignore_eos: bool = True
    temperature: float = 0.0
    headers: dict[str, str] = {}

    def connect(self) -> Connection:
        return Connection(self.url, self.timeout_s, self.api_key, self.headers)


async def find_model(url: str, api_key: str | None = None, timeout_s: float = 10.0) -> str:
    """The name of the first model of the server at ``url`` that writes text. Raises Unauthenticated, Unavailable."""
    return (await models_of(Connection(url, timeout_s, api_key), url))[0]


async def models_of(connection: Connection, url: str) -> list[str]:
    """The names of a server's models, generating ones first. Closes the connection.

    Raises Unauthenticated; Unavailable where the server does not answer or lists none.
    """
    try:
        body = b"\n".join([line async for line in connection.lines("GET", "/v1/models")])
        listed = msgspec.json.decode(body, type=_Models).data
        if not listed:
            raise Unavailable(f"The server at {url} lists no model at /v1/models; name one with --model.")
        writes = {model.id: model.tasks is None or "generate" in model.tasks for model in listed}
        return sorted(writes, key=lambda name: not writes[name])
    except (OSError, ServerError, asyncio.IncompleteReadError, TimeoutError) as error:
        if isinstance(error, ServerError) and error.status in (401, 403):
            raise Unauthenticated(
                f"The server at {url} asks for an API key that may list models; give it with --api-key or "
                "INFERD_API_KEY."
            ) from None
        raise Unavailable(
            f"No server answers at {url} ({str(error) or type(error).__name__}); start one with: inferd serve"
        ) from None
    except msgspec.DecodeError:
        raise Unavailable(f"The server at {url} lists no model at /v1/models; name one with --model.") from None
    finally:
        connection.close()


async def ask(connection: Connection, target: Target, query: Query, began: float) -> Record:
    """Send one request and measure its answer; every failure is a record with its sentence."""
    body: dict[str, object] = {
        "model": target.model,
        "max_tokens": query.max_tokens,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= {"messages": query.messages} if query.messages is not None else {"prompt": query.prompt}
    if target.ignore_eos:
        body["ignore_eos"] = True
    payload = msgspec.json.encode(body)
    sent = clock.now()
    first: float | None = None
    last = sent
    gaps: list[float] = []
    usage: _Usage | None = None
    error: str | None = None
    pieces = 0
    try:
        async for line in connection.lines("POST", query.path, payload):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                continue
            now = clock.now()
            chunk = _chunk.decode(data)
            if chunk.error is not None:
                error = _message(data)
            usage = chunk.usage or usage
            if any(choice.has_text for choice in chunk.choices):
                pieces += 1
                if first is None:
                    first = now
                else:
                    gaps.append(now - last)
                last = now
        if error is None and usage is None and not pieces:
            error = "the answer was empty"
    except ServerError as failure:
        error = str(failure)
    except TimeoutError:
        error = f"no complete answer within {target.timeout_s:g} s"
    except (OSError, asyncio.IncompleteReadError) as failure:
        error = f"the connection broke ({type(failure).__name__})"
    except (msgspec.DecodeError, ValueError, asyncio.LimitOverrunError) as failure:
        error = f"the answer was not understood ({failure})"
    return Record(
        sent_at=sent - began,
        ended_at=clock.now() - began,
        first_at=None if first is None else first - began,
        gaps_s=tuple(gaps),
        prompt_tokens=usage.prompt_tokens if usage else 0,
        output_tokens=usage.completion_tokens if usage else pieces,
        error=error,
    )


async def closed_loop(target: Target, queries: Sequence[Query], clients: int, on_record: OnRecord) -> list[Record]:
    """``clients`` clients, each sending its next request when its last is answered."""
    records: list[Record] = []
    source = iter(queries)
    began = clock.now()

    async def client() -> None:
        connection = target.connect()
        try:
            for query in source:
                records.append(await ask(connection, target, query, began))
                on_record(records[-1])
        finally:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(queries))):
            group.create_task(client())
    return records


async def open_loop(
    target: Target, queries: Sequence[Query], rate: float, on_record: OnRecord, seed: int = 0
) -> list[Record]:
    """Requests arrive on their own clock, ``rate`` per second (a Poisson process), answered or not."""
    rng = random.Random(seed)
    records: list[Record] = []
    idle: list[Connection] = []
    began = clock.now()

    async def one(query: Query) -> None:
        connection = idle.pop() if idle else target.connect()
        records.append(await ask(connection, target, query, began))
        idle.append(connection)
        on_record(records[-1])

    due = began
    async with asyncio.TaskGroup() as group:
        for query in queries:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - clock.now()))
            group.create_task(one(query))
    for connection in idle:
        connection.close()
    return records
