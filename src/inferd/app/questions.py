"""Asks the server's own models, through the path that requests of clients take, for the golden sets of rollouts.

The gateway here is one of its own: without keys, limits, usage records, caches, metrics and logs of requests. Its
router is the server's, and gets every request as one that takes nothing from those of clients.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec

from inferd.config import Config
from inferd.events import ignore
from inferd.gateway.recorded_exchange import RecordedExchange
from inferd.gateway.server import create_app
from inferd.gateway.upstream import Upstream
from inferd.http.head import RequestHead
from inferd.rollout.copies import taking_nothing
from inferd.rollout.golden import Reply
from inferd.router.stream import Handle
from inferd.tenancy.principal import LOCAL
from inferd.types import JSON, Relay, Request, Sink

LONGEST_S: Final = 300.0
"""For one answer."""

_HEADERS: Final = [(b"content-type", b"application/json")]


class Questions:
    """``gateway`` follows the configuration like every other."""

    def __init__(self, router: Upstream, config: Config) -> None:
        self.gateway = create_app(_Aside(router), config, ignore)

    async def ask(self, path: str, body: JSON) -> Reply:
        """The answer to a request; the status 0: there was none in time."""
        ended = asyncio.Event()
        head = RequestHead("POST", quote(path, safe="/@").encode("ascii"), _HEADERS, "1.1")
        exchange = RecordedExchange(ended.set, head, msgspec.json.encode(body))
        asyncio.get_running_loop().call_soon(self.gateway.serve, exchange, LOCAL)
        try:
            async with asyncio.timeout(LONGEST_S):
                await ended.wait()
        except TimeoutError:
            return Reply(0, b"")
        finally:
            if not ended.is_set():
                exchange.disconnected()
        return Reply(exchange.status, b"".join(exchange.parts))


class _Aside:
    """The router, for requests that take nothing from those of clients."""

    def __init__(self, router: Upstream) -> None:
        self._router = router
        self.check, self.tokenize, self.detokenize = router.check, router.tokenize, router.detokenize
        self.models, self.model, self.adapters = router.models, router.model, router.adapters

    @property
    def draining(self) -> bool:
        return self._router.draining

    def submit(self, request: Request, sink: Sink, relay: Relay | None = None) -> Handle:
        return self._router.submit(taking_nothing(request), sink, relay)


if TYPE_CHECKING:
    _upstream: type[Upstream] = _Aside
