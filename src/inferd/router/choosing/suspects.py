"""Remote servers that other gateways found dead or slow: hints with an end. Pure: time is an argument.

A suspect is tried last and never excluded, so a wrong hint costs no request. A hint holds for ``HINT_S`` after the
gateway has repeated it, and for ``LONGEST_S`` after it came first. Then this gateway tries the server itself, and its
own breaker decides. So a gateway that cannot reach a server, or that lies, keeps others from it for a short time only.
The same hint counts again when it was absent for ``HINT_S``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

HINT_S: Final = 3.0
LONGEST_S: Final = 10.0
MAX_SUSPECTS: Final = 64
"""Servers of one gateway that are noted for one model."""

_NONE: Final[frozenset[str]] = frozenset()


class Suspects:
    """The suspected servers of one model, by identity, as other gateways told."""

    __slots__ = ("_heard",)

    def __init__(self) -> None:
        self._heard: dict[tuple[str, str], tuple[float, float]] = {}  # gateway, server -> first and last time

    def hear(self, gateway: str, servers: Iterable[str], now: float) -> list[str]:
        """Note the servers that fail at another gateway, a list that it repeats. Returns those that are new in it."""
        new = []
        for server in list(servers)[:MAX_SUSPECTS]:
            first, last = self._heard.get((gateway, server), (now, now))
            if now - last > HINT_S:
                first = now
            if first == now:
                new.append(server)
            self._heard[gateway, server] = (first, now)
        return new

    def now(self, now: float) -> frozenset[str]:
        """The servers that are tried last at ``now``."""
        if not self._heard:
            return _NONE
        self._heard = {key: times for key, times in self._heard.items() if now - times[1] <= HINT_S}
        return frozenset(server for (_, server), (first, _) in self._heard.items() if now - first < LONGEST_S)
