"""Finding a server for the commands that generate text, by URL or as ``inferd status`` does, and sending requests to
it.

The control socket needs no key: the permission to open it allows everything.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

import msgspec

from inferd.app.control_socket import connect
from inferd.benchmark.load import Connection, ServerError, models_of
from inferd.cli.running.control import ANSWER_S, locate
from inferd.errors import Unavailable
from inferd.types import JSON

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_LOOK_S: Final = 2.0
_TEXT_S: Final = 600.0

Answer = Callable[[list[JSON]], Generator[str, None, None]]


class Endpoint(NamedTuple):
    """A running server."""

    name: str  # shown in messages
    url: str
    key: str | None = None
    connect: Callable[[], socket.socket] | None = None  # to its control socket; None: to its URL

    def connection(self, timeout_s: float) -> Connection:
        return Connection(self.url, timeout_s, self.key, connect=self.connect)

    def models(self, timeout_s: float = ANSWER_S) -> list[str]:
        """The names of its models, those that write text first. Raises Unauthenticated, Unavailable."""
        return asyncio.run(models_of(self.connection(timeout_s), self.url))

    def refuse_unknown(self, model: str) -> None:
        """Raises Unavailable where a server of this machine has no such model. One elsewhere may not list its names."""
        if self.connect is not None:
            asyncio.run(_refuse_unknown(self, model))

    def refuse_unavailable(self, model: str) -> None:
        """Raises Unavailable where no replica of the model can answer now, or the server does not answer. A model that
        its first request loads is available."""
        asyncio.run(_refuse_unavailable(self, model))

    def tasks(self, model: str) -> list[str]:
        """What the model does: chat, generate, predict and others. Empty where the server does not report it."""
        return asyncio.run(_tasks(self.connection(ANSWER_S), model))

    def converses(self, model: str) -> bool:
        """Whether the model answers conversations. True for a server that does not report it: its answer will show
        it."""
        tasks = self.tasks(model)
        return not tasks or "chat" in tasks

    def default_model(self) -> str:
        """The first model that answers conversations; where there is none, the first. Raises as ``models``."""
        names = self.models()
        return next((name for name in names if self.converses(name)), names[0])


class _Parameters(msgspec.Struct, frozen=True):
    tasks: str = ""


class _Metadata(msgspec.Struct, frozen=True):
    parameters: _Parameters = _Parameters()


async def _refuse_unknown(endpoint: Endpoint, model: str) -> None:
    connection = endpoint.connection(ANSWER_S)
    try:
        async for _ in connection.lines("GET", f"/v1/models/{quote(model, safe='')}"):
            pass
    except ServerError as error:
        raise _refused(endpoint, error) from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise _broke(endpoint, error) from None
    finally:
        connection.close()


class _Readiness(msgspec.Struct, frozen=True):
    condition: str = ""
    detail: str = ""


async def _refuse_unavailable(endpoint: Endpoint, model: str) -> None:
    connection = endpoint.connection(ANSWER_S)
    try:
        async for _ in connection.lines("GET", f"/v2/models/{quote(model, safe='')}/ready"):
            pass
    except ServerError as error:
        try:
            told = msgspec.json.decode(error.body, type=_Readiness)
        except msgspec.DecodeError:
            return  # another kind of server; only inferd reports this
        if told.condition == "unavailable":
            reason = f" ({told.detail})" if told.detail else ""
            raise Unavailable(
                f"{model} cannot answer at {endpoint.name} now{reason}; try again later, or ask another model with "
                "--model."
            ) from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise _broke(endpoint, error) from None
    finally:
        connection.close()


async def _tasks(connection: Connection, model: str) -> list[str]:
    path = f"/v2/models/{quote(model, safe='')}"
    try:
        body = b"\n".join([line async for line in connection.lines("GET", path)])
        tasks = msgspec.json.decode(body, type=_Metadata).parameters.tasks
    except (OSError, ServerError, asyncio.IncompleteReadError, TimeoutError, msgspec.DecodeError):
        return []  # another kind of server, or a model that is not loaded yet
    finally:
        connection.close()
    return tasks.split(",") if tasks else []


def find_endpoint(url: str | None, port: int | None, key: str | None) -> Endpoint | None:
    """The server at the URL, or with the port, or the only one on this machine; None where none was named and none
    runs.

    Raises InferdError where the one that was named does not answer, or several run.
    """
    if url is not None:
        return Endpoint(f"the server at {url}", url, key)
    try:
        found, path = locate(port, None)
    except Unavailable:
        if port is not None:
            raise
        return _default_endpoint(key)
    return _by_control_socket(found, path)


def _by_control_socket(port: int, path: Path) -> Endpoint:
    opened = functools.partial(connect, path, ANSWER_S)
    return Endpoint(f"the server with port {port}", f"http://127.0.0.1:{port}", connect=opened)


def _default_endpoint(key: str | None) -> Endpoint | None:
    """A server on the usual port: another user's, or one in a container."""
    endpoint = Endpoint(f"the server at {DEFAULT_URL}", DEFAULT_URL, key)
    try:
        endpoint.models(_LOOK_S)
    except Unavailable:
        return None
    return endpoint


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = _Delta()
    text: str | None = None


class _Fault(msgspec.Struct):
    message: str = "the server ended the answer with an error"


class _Chunk(msgspec.Struct):
    choices: Sequence[_Choice] = ()
    error: _Fault | None = None


def answers(endpoint: Endpoint, settings: JSON) -> Answer:
    """Asks for the answer to a conversation, which comes in pieces. ``settings``: of each request, with its model."""

    def answer(messages: list[JSON]) -> Generator[str, None, None]:
        return stream_text(endpoint, "/v1/chat/completions", {**settings, "messages": messages})

    return answer


def stream_text(endpoint: Endpoint, path: str, body: JSON) -> Generator[str, None, None]:
    """The pieces of a text. Raises Unavailable with the server's message."""
    with asyncio.Runner() as runner:
        stream = _pieces(endpoint, path, {**body, "stream": True})
        try:
            while True:
                try:
                    yield runner.run(anext(stream))
                except StopAsyncIteration:
                    return
        finally:
            runner.run(stream.aclose())


async def _pieces(endpoint: Endpoint, path: str, body: JSON) -> AsyncGenerator[str, None]:
    connection = endpoint.connection(_TEXT_S)
    try:
        async for line in connection.lines("POST", path, msgspec.json.encode(body)):
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            chunk = msgspec.json.decode(line[5:], type=_Chunk)
            if chunk.error is not None:
                raise Unavailable(chunk.error.message)
            for choice in chunk.choices:
                piece = choice.delta.content or choice.text
                if piece:
                    yield piece
    except (ServerError, msgspec.DecodeError) as error:
        raise _refused(endpoint, error) from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise _broke(endpoint, error) from None
    finally:
        connection.close()


def _refused(endpoint: Endpoint, error: Exception) -> Unavailable:
    return Unavailable(f"{endpoint.name[:1].upper()}{endpoint.name[1:]} refused: {error}")


def _broke(endpoint: Endpoint, error: Exception) -> Unavailable:
    return Unavailable(f"The connection to {endpoint.name} broke ({type(error).__name__}); check that the server runs.")
