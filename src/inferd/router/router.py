"""QUEUE and ROUTE: every served model by name, and the server's door for work.

Runs in the gateway's event loop. Knows no HTTP and no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inferd.config import Config, ModelConfig
from inferd.errors import InvalidRequest, ModelNotFound, Unavailable
from inferd.events import Emit, RequestRefused, ignore
from inferd.router.direct_prediction import PredictionSlot, find_prediction_slot
from inferd.router.pool import Pool
from inferd.router.replicas.loading import Loading, Plan, plan_model
from inferd.router.replicas.replica import LocalReplica, Replica
from inferd.router.status import Applied, ModelStatus, ReplicaStatus, Unloaded
from inferd.router.stream import Stream
from inferd.types import Chat, Failure, GenerateRequest, Relay, Request, TextPrompt
from inferd.worker.process import WORKER_COMMAND
from inferd.worker.supervisor import Patience

if TYPE_CHECKING:
    from inferd.router.direct_relay import RelaySlot

__all__ = ["ModelStatus", "ReplicaStatus", "Router", "Stream", "Unloaded"]


class Router:
    """Takes requests for its models and ends each exactly once.

    ``command`` starts a worker process, ``patience`` says how long to wait for it and ``plan`` what a model
    takes; tests give others. ``keep_below``: a folder to keep models' files in, as they were loaded (``pinned_files``). Must be made and used inside a running event loop.
    """

    def __init__(
        self,
        config: Config,
        emit: Emit = ignore,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        patience: Patience = Patience(),
        plan: Plan = plan_model,
        keep_below: Path | None = None,
    ) -> None:
        self._keep_below = keep_below
        self._emit = emit
        self._command = command
        self._patience = patience
        self._pools: dict[str, Pool] = {}
        self._leaving: dict[Pool, asyncio.Task[None]] = {}  # removed, and not yet gone
        self._loading = Loading(lambda: (*self._pools.values(), *self._leaving), config.server.memory_bytes, plan)
        self._changing = asyncio.Lock()
        self._draining = False
        self._refusing = False
        self._find_relay_slot: Callable[[Pool, float, str, bytes], RelaySlot | None] | None = None
        for name, model in config.models.items():
            self._pools[name] = self._make(name, model)

    def _make(self, name: str, model: ModelConfig) -> Pool:
        if model.upstreams and self._find_relay_slot is None:
            from inferd.router.direct_relay import find_relay_slot  # not needed where every model is here

            self._find_relay_slot = find_relay_slot
        return Pool(
            name,
            model,
            self._emit,
            command=self._command,
            patience=self._patience,
            demand=self._loading.demand,
            may_surge=self._loading.may_surge,
            on_idle=self._loading.became_idle,
            keep_below=self._keep_below,
        )

    # -- work -------------------------------------------------------------------------------

    def submit(self, request: Request, relay: Relay | None = None) -> Stream:
        """Accept a request; the stream ends it exactly once. While the model loads or restarts it waits.

        ``request`` is a GenerateRequest where a local replica may run it; with a ``relay`` a remote one may.
        Raises ModelNotFound; Overloaded when the queue is full or the deadline cannot be met; Unavailable
        when the server is leaving, every replica fails, or the model could not be loaded.
        """
        pool = self._pool(request.model)
        if self._refusing:
            self._emit(RequestRefused(model=request.model, reason="draining", tenant=request.tenant))
            raise _leaving()
        return pool.submit(request, relay)

    def find_relay_slot(self, model: str, now: float, tenant: str, body: bytes) -> RelaySlot | None:
        """The direct path to a remote server, for a request that could go at once (``express``)."""
        pool = self._pools.get(model)
        if pool is None or self._refusing or self._find_relay_slot is None or _is_shared_out(pool):
            return None
        return self._find_relay_slot(pool, now, tenant, body)

    def find_prediction_slot(self, model: str, class_number: int, now: float) -> PredictionSlot | None:
        """The direct path to a worker that predicts (``errand``); ``class_number``: the place of the request's class."""
        pool = self._pools.get(model)
        if pool is None or self._refusing or _is_shared_out(pool):
            return None
        return find_prediction_slot(pool, class_number, now)

    async def tokenize(
        self, model: str, prompt: Chat | TextPrompt, *, want_strings: bool = False, tenant: str = ""
    ) -> tuple[list[int], list[str] | None]:
        """Token ids of a prompt, and each token's string if wanted. Raises also InvalidRequest."""
        return await self._ready(model).tokenize(prompt, want_strings, tenant)

    async def check(self, requests: list[GenerateRequest]) -> None:
        """Have a worker look at requests of one list, before the first is submitted. Raises what the first bad one is refused
        for. Where no worker is there to look, each request is judged when it is prepared."""
        with contextlib.suppress(Unavailable):
            await self._ready(requests[0].model).check(requests)

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

    def _local_pool(self, model: str) -> Pool:
        pool = self._pool(model)
        if pool.config.num_local == 0 and not pool.fleet.locals:
            raise InvalidRequest(
                f"The model {model!r} runs on remote servers alone, so nothing of it is in this machine's memory; "
                "to serve it no more, take it out of the configuration file.",
                param="model",
                code="model_is_remote",
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

    def model(self, name: str) -> ModelStatus | None:
        """One of ``models``, without a look at the others; None: there is none of this name."""
        pool = self._pools.get(name)
        return pool.status if pool is not None else None

    def load_failures(self) -> dict[str, Failure]:
        """The models that cannot be served and why, in full; for the operator's eyes."""
        return {name: pool.load_failure for name, pool in self._pools.items() if pool.load_failure is not None}

    def replicas(self, model: str) -> Sequence[Replica]:
        return self._pool(model).replicas

    @property
    def draining(self) -> bool:
        """The server is leaving: send no more traffic."""
        return self._draining

    # -- changes while it runs --------------------------------------------------------------

    async def load(self, model: str) -> ModelStatus:
        """Bring a model into memory and wait until each of its replicas is ready or cannot be; those whose files have
        been replaced meanwhile are replaced like in a reload. Raises ModelNotFound; Overloaded, with the plan, when it does not fit; ModelLoadError where none can be; Unavailable."""
        pool = self._pool(model)
        await self._loading.load(pool)
        await pool.fleet.settle()
        await pool.fleet.renew()
        return pool.status

    async def unload(self, model: str) -> Unloaded:
        """Take a model out of memory once what it has is finished. A model with ``load: on_demand`` comes back
        with the next request, any other when it is loaded again. Raises ModelNotFound; InvalidRequest for a model
        that has nothing here; Unavailable when it has work for longer than its drain_s."""
        pool = self._local_pool(model)
        return Unloaded(name=model, freed_bytes=await self._loading.unload(pool, "asked"))

    async def restart(self, model: str) -> None:
        """Another worker in the place of each, one after the other, without a refused request. Raises
        ModelNotFound; InvalidRequest for a model that has nothing here; ModelLoadError, with the old ones serving on."""
        await self._local_pool(model).fleet.replace_all()

    async def apply(self, config: Config) -> Applied:
        """Be what another configuration says, without a dropped request. Returns when it is done. One at a time; the same one twice changes nothing more,
        and tries again what failed. Raises Unavailable when the server is leaving."""
        async with self._changing:
            if self._draining:
                raise _leaving()
            self._loading.configure(config.server.memory_bytes)
            done: list[str] = []
            failed: list[str] = []
            for name in [name for name in self._pools if name not in config.models]:
                pool = self._pools.pop(name)
                self._leaving[pool] = asyncio.get_running_loop().create_task(self._see_off(pool))
                done.append(f"{name}: removed; what it has accepted is finished first")
            added = [name for name in config.models if name not in self._pools]
            for name in added:
                self._pools[name] = self._make(name, config.models[name])
                self._pools[name].start()
            self._pools = {name: self._pools[name] for name in config.models}
            for name in [name for name in self._pools if name not in added]:
                applied = await self._pools[name].configure(config.models[name])
                done += applied.done
                failed += applied.failed
            for name in added:
                pool = self._pools[name]
                await pool.settled.wait()
                failure = pool.load_failure
                if failure is None:
                    done.append(f"{name}: added")
                else:
                    failed.append(f"{name}: added, but {failure.message}")
            return Applied(done=done, failed=failed)

    async def _see_off(self, pool: Pool) -> None:
        try:
            await pool.leave()
        finally:
            del self._leaving[pool]

    # -- life -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start what is to be there from the beginning; it loads in the background."""
        for pool in self._pools.values():
            pool.start()

    async def settled(self) -> None:
        """Wait until every replica has been ready once or has failed for good."""
        for pool in list(self._pools.values()):
            await pool.settled.wait()

    def begin_drain(self) -> None:
        """Say that the server is leaving; requests are still accepted, as balancers learn of it late."""
        self._draining = True

    async def drain(self, grace_s: float) -> bool:
        """Refuse new work and wait for what there is; whether all of it ended in time."""
        self._draining = self._refusing = True
        try:
            async with asyncio.timeout(grace_s):
                for pool in (*self._pools.values(), *self._leaving):
                    await pool.idle.wait()
        except TimeoutError:
            return False
        return True

    async def part(self) -> None:
        """Call off every request that is still alive, with an error that says so, and hear what was computed for it."""
        self._draining = self._refusing = True
        await asyncio.gather(*(pool.part() for pool in (*self._pools.values(), *self._leaving)))

    def abort(self) -> None:
        """Likewise, and end at once what is left."""
        self._draining = self._refusing = True
        for pool in (*self._pools.values(), *self._leaving):
            pool.abort()

    async def stop(self) -> None:
        """Abort what is left and stop every worker. Idempotent."""
        self.abort()
        await self._loading.stop()
        leaving = list(self._leaving.values())
        await asyncio.gather(*(pool.stop() for pool in (*self._pools.values(), *self._leaving)))
        await asyncio.gather(*leaving, return_exceptions=True)


def _is_shared_out(pool: Pool) -> bool:
    """Whether a request for this name may be another version's."""
    return bool(pool.config.versions.weights)


def _leaving() -> Unavailable:
    return Unavailable("The server is shutting down and takes no new work; try another one.", code="shutting_down")
