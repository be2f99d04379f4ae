"""QUEUE and ROUTE: every served model by name, and the server's door for work.

Runs in the gateway's event loop. Knows no HTTP and no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from inferd.config import Config
from inferd.errors import ModelNotFound, Unavailable
from inferd.events import Emit, RequestRefused, ignore
from inferd.router.pool import Pool
from inferd.router.replica import LocalReplica
from inferd.router.status import ModelStatus
from inferd.router.stream import Stream
from inferd.types import Chat, Failure, Relay, Request, TextPrompt
from inferd.worker.process import WORKER_COMMAND
from inferd.worker.supervisor import Patience

__all__ = ["ModelStatus", "Router", "Stream"]


class Router:
    """Takes requests for its models and ends each exactly once.

    ``command`` starts a worker process and ``patience`` says how long to wait for it; tests give others.
    Must be made and used inside a running event loop.
    """

    def __init__(
        self,
        config: Config,
        emit: Emit = ignore,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        patience: Patience = Patience(),
    ) -> None:
        self._emit = emit
        self._pools = {
            name: Pool(name, model, emit, command=command, patience=patience) for name, model in config.models.items()
        }
        self._draining = False
        self._refusing = False

    # -- work -------------------------------------------------------------------------------

    def submit(self, request: Request, relay: Relay | None = None) -> Stream:
        """Accept a request; the stream ends it exactly once. While the model loads or restarts it waits.

        Raises ModelNotFound; Overloaded when the queue is full; Unavailable when the server is leaving
        or the model could not be loaded.
        """
        pool = self._pool(request.model)
        if self._refusing:
            self._emit(RequestRefused(model=request.model, reason="draining"))
            raise _leaving()
        return pool.submit(request, relay)

    async def tokenize(
        self, model: str, prompt: Chat | TextPrompt, *, want_strings: bool = False
    ) -> tuple[list[int], list[str] | None]:
        """Token ids of a prompt, and each token's string if wanted. Raises also InvalidRequest."""
        return await self._ready(model).tokenize(prompt, want_strings)

    async def detokenize(self, model: str, token_ids: list[int]) -> str:
        return await self._ready(model).detokenize(token_ids)

    def _pool(self, model: str) -> Pool:
        pool = self._pools.get(model)
        if pool is None:
            raise ModelNotFound(
                f"The model {model[:64]!r} does not exist; this server has: {', '.join(self._pools) or 'no model'}.",
                param="model",
            )
        return pool

    def _ready(self, model: str) -> LocalReplica:
        pool = self._pool(model)
        if self._refusing:
            raise _leaving()
        return pool.ready_replica()

    # -- state ------------------------------------------------------------------------------

    def models(self) -> list[ModelStatus]:
        return [pool.status for pool in self._pools.values()]

    def load_failures(self) -> dict[str, Failure]:
        """The models that cannot be served and why, in full; for the operator's eyes."""
        return {name: pool.load_failure for name, pool in self._pools.items() if pool.load_failure is not None}

    def replicas(self, model: str) -> Sequence[LocalReplica]:
        return self._pool(model).replicas

    @property
    def draining(self) -> bool:
        """The server is leaving: send no more traffic."""
        return self._draining

    # -- life -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every worker; they load in the background."""
        for pool in self._pools.values():
            pool.start()

    async def settled(self) -> None:
        """Wait until every replica has been ready once or has failed for good."""
        for pool in self._pools.values():
            await pool.settled.wait()

    def begin_drain(self) -> None:
        """Say that the server is leaving; requests are still accepted, as balancers learn of it late."""
        self._draining = True

    async def drain(self, grace_s: float) -> bool:
        """Refuse new work and wait for what there is; whether all of it ended in time."""
        self._draining = self._refusing = True
        try:
            async with asyncio.timeout(grace_s):
                for pool in self._pools.values():
                    await pool.idle.wait()
        except TimeoutError:
            return False
        return True

    def abort(self) -> None:
        """End every request that is still alive with an error that says so."""
        self._draining = self._refusing = True
        for pool in self._pools.values():
            pool.abort()

    async def stop(self) -> None:
        """Abort what is left and stop every worker. Idempotent."""
        self.abort()
        await asyncio.gather(*(pool.stop() for pool in self._pools.values()))


def _leaving() -> Unavailable:
    return Unavailable("The server is shutting down and takes no new work; try another one.", code="shutting_down")
