"""The router: every served model by name. It accepts requests for models and changes which models are served.

The stages QUEUE and ROUTE of a request's life. Runs in the gateway's event loop, without HTTP and torch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from inferd import clock
from inferd.config import Config, ModelConfig
from inferd.config.versions import base_of
from inferd.errors import InvalidRequest, ModelNotFound, Unavailable
from inferd.events import Emit, RequestRefused, ignore
from inferd.router.hints import Hints, adopt_hints, hints_of
from inferd.router.pool import Pool
from inferd.router.replicas.loading import Loading, Plan, plan_model
from inferd.router.replicas.machines import Machines
from inferd.router.replicas.replica import LocalReplica, Replica
from inferd.router.status import Applied, Demand, ModelStatus, ReplicaStatus, Unloaded
from inferd.router.ticket import Ticket
from inferd.types import Chat, Failure, GenerateRequest, ModelInfo, Relay, Request, Sink, TextPrompt
from inferd.worker.process import WORKER_COMMAND
from inferd.worker.supervisor import Patience

__all__ = ["ModelStatus", "ReplicaStatus", "Router", "Unloaded"]


class Router:
    """Accepts requests for its models and ends each exactly once. Must be made and used inside a running event loop.

    ``command`` starts a worker process, ``patience`` has the time limits for it and ``plan`` computes the memory that a
    model needs. ``pin_below`` is the folder for copies of the files that workers loaded (``pinned_files``); None: no
    copies are made.
    """

    def __init__(
        self,
        config: Config,
        emit: Emit = ignore,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        patience: Patience = Patience(),
        plan: Plan = plan_model,
        pin_below: Path | None = None,
    ) -> None:
        self._pin_below = pin_below
        self._emit = emit
        self.machines = Machines(command)
        self._patience = patience
        self._pools: dict[str, Pool] = {}
        self._removing: dict[Pool, asyncio.Task[None]] = {}  # removed from the configuration, still finishing
        self._loading = Loading(
            lambda: (*self._pools.values(), *self._removing), config.server.memory_bytes, plan, self.machines
        )
        self._apply_lock = asyncio.Lock()
        self._draining = False
        self._refusing = False
        self._adapters: dict[str, Pool] = {}  # by the names of adapters
        for name, model in config.models.items():
            self._pools[name] = self._make(name, model)
        self._name_adapters()

    def _make(self, name: str, model: ModelConfig) -> Pool:
        return Pool(
            name,
            model,
            self._emit,
            machines=self.machines,
            patience=self._patience,
            demand=self._loading.demand,
            may_surge=self._loading.may_surge,
            on_idle=self._loading.became_idle,
            pin_below=self._pin_below,
        )

    def _name_adapters(self) -> None:
        """Take the names of adapters from the models' configurations."""
        self._adapters = {
            adapter: pool for pool in self._pools.values() for adapter in pool.config.adapters if pool.config.num_local
        }

    # -- work -------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink, relay: Relay | None = None) -> Ticket:
        """Accept a request. It waits while the model loads or restarts. ``sink`` gets its one end.

        ``request`` is a GenerateRequest or PredictRequest where a local replica may run it. With a ``relay`` a remote
        server may run it. Raises ModelNotFound; Overloaded when the queue is full or the deadline cannot be met;
        Unavailable when the server shuts down, every replica fails, or the model could not be loaded.
        """
        pool = self._pools.get(request.model)
        if pool is None:
            pool = self._adapters.get(request.model) or self._pool(request.model)
            request, relay = pool.adapters.bound(request, request.model), None
        if self._refusing:
            self._emit(RequestRefused(model=request.model, reason="draining", tenant=request.tenant))
            raise _shutting_down()
        return pool.submit(request, sink, relay)

    async def tokenize(
        self, model: str, prompt: Chat | TextPrompt, *, want_strings: bool = False, tenant: str = ""
    ) -> tuple[list[int], list[str] | None]:
        """Token ids of a prompt, and each token's string if wanted. Raises also InvalidRequest."""
        return await self._ready_replica(model).tokenize(prompt, want_strings, tenant)

    async def check(self, requests: list[GenerateRequest]) -> None:
        """Have a worker check the requests of one list before any of them is submitted.

        Raises the error of the first request that cannot be prepared. While no worker is ready nothing is checked:
        each request is then checked when a worker prepares it.
        """
        with contextlib.suppress(Unavailable):
            await self._ready_replica(requests[0].model).check(requests)

    async def detokenize(self, model: str, token_ids: list[int]) -> str:
        """The text of token ids. Raises as ``tokenize``."""
        return await self._ready_replica(model).detokenize(token_ids)

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

    def _ready_replica(self, model: str) -> LocalReplica:
        pool = self._adapters.get(model) or self._pool(model)
        if self._refusing:
            raise _shutting_down()
        return pool.ready_replica()

    # -- state ------------------------------------------------------------------------------

    def models(self) -> list[ModelStatus]:
        """The status of every model, in the order of the configuration, without their adapters."""
        return [pool.status for pool in self._pools.values()]

    def adapters(self) -> list[ModelStatus]:
        """The status of every adapter, which is a model of its own for clients."""
        return [pool.adapters.status(pool.status, name) for name, pool in self._adapters.items()]

    def model(self, name: str) -> ModelStatus | None:
        """The status of one model or adapter; None: there is none of this name."""
        pool = self._pools.get(name)
        if pool is not None:
            return pool.status
        pool = self._adapters.get(name)
        return None if pool is None else pool.adapters.status(pool.status, name)

    def info(self, name: str) -> ModelInfo | None:
        """The properties of a model or an adapter; None: there is none of this name, or it was never loaded."""
        pool = self._pools.get(name)
        if pool is not None:
            return pool.availability.info
        pool = self._adapters.get(name)
        return None if pool is None else pool.adapters.info(pool.availability.info, name)

    def replica_statuses(self, model: str) -> Sequence[ReplicaStatus]:
        """The status of every replica of a model. Raises ModelNotFound."""
        return self._pool(model).replica_statuses

    def load_failures(self) -> dict[str, Failure]:
        """The models that cannot be served, with the full reason, which is for the operator only."""
        return {name: pool.load_failure for name, pool in self._pools.items() if pool.load_failure is not None}

    def replicas(self, model: str) -> Sequence[Replica]:
        """The replicas of a model. Raises ModelNotFound."""
        return self._pool(model).replicas

    @property
    def draining(self) -> bool:
        """Whether the server shuts down, so that balancers should send no more traffic."""
        return self._draining

    # -- other gateways ---------------------------------------------------------------------

    def hints(self) -> Hints:
        """What other gateways are to know about the remote servers, since the last call."""
        return hints_of(self._pools)

    def adopt_hints(self, gateway: str, hints: Hints) -> int:
        """Note the hints of another gateway, by its id; how many concern servers of this one."""
        return adopt_hints(self._pools, gateway, hints, clock.now())

    def num_by_hints(self) -> int:
        """Requests that went to a remote server because of a hint, of the models that there are."""
        return sum((pool.placement.num_by_hints for pool in self._pools.values()), 0)

    # -- changes while it runs --------------------------------------------------------------

    async def load(self, model: str) -> ModelStatus:
        """Load a model into memory and wait until each of its replicas is ready or has failed.

        Workers whose model files have been replaced since they loaded them are replaced as in a reload. Raises
        ModelNotFound; Overloaded, with the memory plan, when the model does not fit; ModelLoadError when no replica can
        load it; Unavailable.
        """
        pool = self._pool(model)
        await self._loading.load(pool)
        await pool.fleet.wait_settled()
        await pool.fleet.replace_outdated()
        return pool.status

    async def unload(self, model: str) -> Unloaded:
        """Unload a model from memory after its requests have ended.

        A model with ``load: on_demand`` is loaded again by the next request, any other model by ``load``. Raises
        ModelNotFound; InvalidRequest for a model without local replicas; Unavailable when requests are still in flight
        after its drain_s.
        """
        pool = self._local_pool(model)
        return Unloaded(name=model, freed_bytes=await self._loading.unload(pool, "asked"))

    async def restart(self, model: str) -> None:
        """Replace the workers of a model one after the other, without refusing requests.

        Raises ModelNotFound; InvalidRequest for a model without local replicas; ModelLoadError when a new worker does
        not load, in which case the old ones continue.
        """
        await self._local_pool(model).fleet.replace_all()

    def demands(self) -> dict[str, Demand]:
        """The load of each model whose number of replicas follows it (``scaling``)."""
        return {name: pool.demand for name, pool in self._pools.items() if pool.config.scaling is not None}

    async def scale(self, model: str, count: int) -> int:
        """Have ``count`` local replicas of a model that is in memory; the number that it is to have now.

        It may be lower where memory is missing, or where another change of the replicas is under way. Raises
        ModelNotFound; ModelLoadError where the memory of a replica cannot be planned.
        """
        return await self._loading.scale(self._pool(model), count)

    async def set_adapters(self, wanted: Mapping[str, Mapping[str, str]]) -> None:
        """Have the adapters of each model (name -> source); models without an entry keep theirs. Returns when the ready
        replicas have loaded them, as far as they can; ``adapter_failure`` says what failed."""
        for model, adapters in wanted.items():
            pool = self._pools.get(model)
            if pool is not None:
                await pool.set_adapters(adapters)
        self._name_adapters()

    def adapter_failure(self, name: str) -> str:
        """Why a ready replica could not load an adapter; empty: all did."""
        pool = self._adapters.get(name)
        return "" if pool is None else pool.adapters.failure(name)

    def unload_idle(self, model: str) -> None:
        """Unload a model that has no requests. Raises ModelNotFound."""
        self._loading.unload_idle(self._pool(model))

    async def vacate(self, node: str) -> None:
        """Move all workers of a node that leaves, without dropping a request; returns when none is there."""
        await asyncio.gather(*(pool.fleet.vacate(node) for pool in (*self._pools.values(), *self._removing)))

    async def apply(self, config: Config) -> Applied:
        """Apply another configuration without dropping a request. Returns when all changes are made.

        Calls are executed one at a time. Applying the same configuration again retries the changes that failed. Raises
        Unavailable when the server shuts down.
        """
        async with self._apply_lock:
            if self._draining:
                raise _shutting_down()
            self._loading.configure(config.server.memory_bytes)
            done: list[str] = []
            failed: list[str] = []
            leaving = [name for name in self._pools if name not in config.models]
            # A version that gives its name to its model serves until the model is that version.
            last = [name for name in leaving if base_of(name) in config.models]
            for name in leaving:
                if name not in last:
                    done.append(self._let_go(name))
            added = [name for name in config.models if name not in self._pools]
            for name in added:
                self._pools[name] = self._make(name, config.models[name])
                self._pools[name].start()
            self._pools = {name: self._pools[name] for name in (*config.models, *last)}
            for name in [name for name in config.models if name not in added]:
                applied = await self._pools[name].configure(config.models[name])
                done += applied.done
                failed += applied.failed
                self._name_adapters()  # when they are loaded
            done += [self._let_go(name) for name in last]
            self._name_adapters()
            for name in added:
                pool = self._pools[name]
                await pool.settled.wait()
                failure = pool.load_failure
                if failure is None:
                    done.append(f"{name}: added")
                else:
                    failed.append(f"{name}: added, but {failure.message}")
            return Applied(done=done, failed=failed)

    def _let_go(self, name: str) -> str:
        """Remove a model from those that are served; a sentence that says so."""
        pool = self._pools.pop(name)
        self._removing[pool] = asyncio.get_running_loop().create_task(self._remove(pool))
        return f"{name}: removed; what it has accepted is finished first"

    async def _remove(self, pool: Pool) -> None:
        try:
            await pool.remove()
        finally:
            del self._removing[pool]

    # -- lifecycle --------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the models that the configuration loads at startup; they load in the background."""
        for pool in self._pools.values():
            pool.start()

    async def settled(self) -> None:
        """Wait until every replica has been ready once, has failed, or was found not to answer."""
        for pool in list(self._pools.values()):
            await pool.settled.wait()

    def begin_drain(self) -> None:
        """Report that the server shuts down. Requests are still accepted, because balancers notice it late."""
        self._draining = True

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests and wait for the accepted ones; whether all ended within ``grace_s`` seconds."""
        self._draining = self._refusing = True
        try:
            async with asyncio.timeout(grace_s):
                for pool in (*self._pools.values(), *self._removing):
                    await pool.idle.wait()
        except TimeoutError:
            return False
        return True

    async def cancel_and_wait(self) -> None:
        """Cancel every request with an error, and wait for their usage, at most ``pool.CANCEL_WAIT_S`` seconds."""
        self._draining = self._refusing = True
        await asyncio.gather(*(pool.cancel_and_wait() for pool in (*self._pools.values(), *self._removing)))

    def abort(self) -> None:
        """Cancel and end every request at once."""
        self._draining = self._refusing = True
        for pool in (*self._pools.values(), *self._removing):
            pool.abort()

    async def stop(self) -> None:
        """Abort the remaining requests and stop every worker. Idempotent."""
        self.abort()
        await self._loading.stop()
        leaving = list(self._removing.values())
        await asyncio.gather(*(pool.stop() for pool in (*self._pools.values(), *self._removing)))
        await asyncio.gather(*leaving, return_exceptions=True)


def _shutting_down() -> Unavailable:
    return Unavailable("The server is shutting down and takes no new work; try another one.", code="shutting_down")
