"""A running server, asked one request at a time over kept connections: its models' fingerprints, and its answers.

A server that is away is waited for, up to a limit; a refusal for lack of room is repeated. Knows HTTP's statuses and the
routes of metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple
from urllib.parse import quote

import msgspec

from inferd import clock
from inferd.benchmark.load import Connection, Exchange, ServerError
from inferd.errors import Unauthenticated, Unavailable

LOOK_S: Final = 10.0  # the longest time for an answer about the server itself
_POLL_S: Final = 0.5
_BUSY: Final = (429, 503)
_MAX_REPEATS: Final = 20
_MAX_PAUSE_S: Final = 5.0

Connect = Callable[[float], Connection]


class ServerGone(Exception):
    """The server stopped answering, and did not come back in time. The message is a sentence."""


class Reply(NamedTuple):
    """An answer with its times, in seconds after the request was sent."""

    status: int
    body: bytes
    first_s: float
    total_s: float
    headers: dict[str, str]


class ServedModel(NamedTuple):
    """What a server says of a model."""

    fingerprint: str  # empty: unknown, or not of one version alone
    is_batch_invariant: bool  # its answers do not depend on the requests computed with them
    tasks: tuple[str, ...]


class _Parameters(msgspec.Struct, frozen=True):
    fingerprint: str = ""
    batch_invariant: bool = False
    tasks: str = ""


class _Metadata(msgspec.Struct, frozen=True):
    versions: tuple[str, ...] = ()
    parameters: _Parameters = _Parameters()


class AskedServer:
    """Holds idle connections. Used from one event loop."""

    def __init__(self, name: str, connect: Connect, *, timeout_s: float, patience_s: float) -> None:
        """``name``: for sentences. ``timeout_s``: of one answer. ``patience_s``: for which a server that is away is
        waited for."""
        self.name = name
        self._connect = connect
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._idle: list[Connection] = []
        self._is_gone = False

    async def model(self, name: str) -> ServedModel:
        """What the server says of a model. Raises Unavailable where it has none of this name, or does not answer;
        Unauthenticated."""
        connection = self._connect(LOOK_S)
        try:
            found = await connection.exchange("GET", f"/v2/models/{quote(name, safe='@')}", b"", {})
            if found.status == 404:
                raise Unavailable(f"{self._capital} does not have the model {name!r}: {_message(found)}")
            if found.status in (401, 403):
                raise Unauthenticated(
                    f"{self._capital} asks for an API key with the scopes models and infer; give it with --api-key or "
                    "INFERD_API_KEY."
                )
            if found.status != 200:
                if name and found.status == 503:
                    return ServedModel("", False, ())  # it was never loaded; the first request loads it
                raise Unavailable(f"{self._capital} does not describe the model {name!r}: {_message(found)}")
            told = msgspec.json.decode(found.body, type=_Metadata)
        except msgspec.DecodeError:
            return ServedModel("", False, ())
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ServerError) as error:
            raise Unavailable(
                f"{self._capital} does not answer ({str(error) or type(error).__name__}); start one with: inferd serve"
            ) from None
        finally:
            connection.close()
        is_one = "@" in name or len(told.versions) < 2
        tasks = tuple(told.parameters.tasks.split(",")) if told.parameters.tasks else ()
        fingerprint = told.parameters.fingerprint if is_one else ""
        return ServedModel(fingerprint, told.parameters.batch_invariant, tasks)

    async def ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """The answer. Raises ServerGone; TimeoutError for an answer that takes longer than the limit."""
        repeats = 0
        while True:
            connection = self._idle.pop() if self._idle else self._connect(self._timeout_s)
            sent = clock.now()
            try:
                found = await connection.exchange(method, path, body, headers)
            except TimeoutError:
                connection.close()
                raise
            except (OSError, asyncio.IncompleteReadError, ServerError) as error:
                connection.close()
                await self._wait_until_back(error)
                repeats += 1
                if repeats > _MAX_REPEATS:
                    raise ServerGone(
                        f"{self._capital} closed the connection {repeats} times at one request; its log has the reason."
                    ) from None
                continue
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)
            if found.status not in _BUSY or repeats >= _MAX_REPEATS:
                return Reply(found.status, found.body, found.first_at - sent, clock.now() - sent, found.headers)
            repeats += 1
            await asyncio.sleep(_pause_s(found))

    async def _wait_until_back(self, error: Exception) -> None:
        """Return when the server is ready. Raises ServerGone."""
        gone = ServerGone(
            f"{self._capital} is gone ({str(error)[:200] or type(error).__name__}) and did not come back within "
            f"{self._patience_s:g} s (--patience)."
        )
        if self._is_gone:
            raise gone
        until = clock.now() + self._patience_s
        while True:
            connection = self._connect(LOOK_S)
            try:
                found = await connection.exchange("GET", "/v2/health/live", b"", {})
                if found.status == 200:
                    return
            except (OSError, asyncio.IncompleteReadError, TimeoutError, ServerError):
                pass  # not yet
            finally:
                connection.close()
            if clock.now() >= until:
                self._is_gone = True
                raise gone
            await asyncio.sleep(min(_POLL_S, max(0.01, until - clock.now())))

    @property
    def _capital(self) -> str:
        return self.name[:1].upper() + self.name[1:]

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _pause_s(found: Exchange) -> float:
    try:
        return min(_MAX_PAUSE_S, max(0.1, float(found.headers.get("retry-after", "1"))))
    except ValueError:
        return 1.0


def _message(found: Exchange) -> str:
    try:
        error = msgspec.json.decode(found.body).get("error")
    except (msgspec.DecodeError, AttributeError):
        return f"status {found.status}"
    return str(error.get("message") if isinstance(error, dict) else error)[:300]
