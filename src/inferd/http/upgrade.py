"""A request that offers to go on in another protocol (RFC 9110, section 7.8), and who takes the connection over then.

Knows who has a connection, nothing of the protocols.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol


class Guest(asyncio.Protocol, ABC):
    """Whoever has a client's connection, as the server sees it."""

    __slots__ = ()

    @abstractmethod
    def shut(self) -> None:
        """The server is leaving: finish what is under way, begin nothing."""

    @abstractmethod
    def abort(self) -> None:
        """Cut the connection; what was written and not sent is lost."""

    @abstractmethod
    def look(self, now: float) -> None:
        """About once a second: give up on a client that takes too long."""


class Successor(Guest):
    """Goes on with a connection that HTTP has begun."""

    __slots__ = ()

    @abstractmethod
    def taken(self, transport: asyncio.Transport, send_s: float, gone: Callable[[], None]) -> None:
        """The connection is its own from now on. ``send_s``: seconds a client may take nothing; ``gone`` is to be
        called when the connection is."""


class Take(Protocol):
    def __call__(self, successor: Successor, serving: Coroutine[Any, Any, None]) -> None:
        """Give the connection away, in place of an answer; ``serving`` is what the successor is there for. Raises
        BrokenPipeError when the client has left."""


class Offer(NamedTuple):
    """To speak WebSocket from now on; ``query`` is the request's."""

    take: Take
    query: str
