"""The HTTP/1.1 Upgrade of a connection to another protocol (RFC 9110, section 7.8).

Defines what the server requires of any client connection, and how a connection passes from HTTP/1.1 to the protocol
that replaces it. Knows no protocol itself; ``websocket.py`` implements one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol


def address_of(transport: asyncio.BaseTransport) -> str:
    """The client's address without its port; empty for a Unix socket."""
    found: object = transport.get_extra_info("peername")
    return str(found[0]) if isinstance(found, tuple) and found else ""


class ClientConnection(asyncio.Protocol, ABC):
    """One connection of a client, in any protocol: what a server needs to time it out and to shut it down."""

    __slots__ = ()

    @abstractmethod
    def shut_down(self) -> None:
        """Begin a graceful shutdown: finish the requests in progress and accept no new ones."""

    @abstractmethod
    def abort(self) -> None:
        """Close the connection at once. Bytes that were written but not sent are lost."""

    @abstractmethod
    def check_timeouts(self, now: float) -> None:
        """Close the connection if its client exceeded a time limit. The server calls this about once a second.

        ``now``: the time of ``inferd.clock``, in seconds.
        """


class UpgradedConnection(ClientConnection):
    """A client connection that began as HTTP/1.1 and now speaks another protocol."""

    __slots__ = ()

    @abstractmethod
    def start(self, transport: asyncio.Transport, send_s: float, on_closed: Callable[[], None]) -> None:
        """Take over ``transport``, and answer the client's request for the upgrade.

        ``send_s``: seconds without progress after which a blocked write is a timeout. ``on_closed`` is to be called
        once when the connection is closed.
        """


class Upgrade(Protocol):
    """The function that replaces HTTP/1.1 on a connection."""

    def __call__(self, upgraded: UpgradedConnection, serving: Coroutine[Any, Any, None]) -> None:
        """Pass the connection to ``upgraded`` in place of an answer, and run ``serving`` as a task of the server.

        Raises BrokenPipeError when the client has disconnected.
        """


class UpgradeOffer(NamedTuple):
    """A request's offer to continue with WebSocket. ``query`` is the query of the request's target."""

    upgrade: Upgrade
    query: str
