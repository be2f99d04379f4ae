"""The adapters of one model: their names for clients, what its replicas have loaded, and how they come and go.

The configuration names the adapters that the model is to have. A name that leaves is refused to new requests at once;
the replicas unload it when the last accepted request of that name has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping

import msgspec

from inferd.config import ModelConfig
from inferd.errors import InvalidRequest, Unavailable
from inferd.router.replicas.fleet import Fleet
from inferd.router.replicas.replica import LocalReplica
from inferd.router.status import Applied, ModelStatus
from inferd.types import AdapterState, GenerateRequest, ModelInfo, Request


class PoolAdapters:
    """``num_using`` counts the accepted requests, not ended yet, of an adapter's name."""

    def __init__(self, config: ModelConfig, fleet: Fleet, num_using: Callable[[str], int]) -> None:
        self._wanted = dict(config.adapters)
        self._leaving: dict[str, str] = {}  # no new request gets them; their requests go on
        self._fleet = fleet
        self._num_using = num_using
        self._releasing: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters that clients may name."""
        return tuple(self._wanted)

    async def configure(self, name: str, config: ModelConfig) -> Applied:
        """Have the adapters of another configuration. Returns when the ready replicas have loaded them. ``name``: of
        the model."""
        old, self._wanted = self._wanted, dict(config.adapters)
        gone = {adapter: source for adapter, source in old.items() if adapter not in self._wanted}
        self._leaving = {**self._leaving, **gone}
        for adapter in self._wanted:
            self._leaving.pop(adapter, None)
        await self._fleet.set_adapters({**self._leaving, **self._wanted})
        if gone:
            task = asyncio.get_running_loop().create_task(self._release(gone, config.drain_s))
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)
        done = [f"{name}: adapter {adapter} unloaded" for adapter in gone]
        failed: list[str] = []
        for adapter, source in self._wanted.items():
            failure = self.failure(adapter)
            if failure:
                failed.append(f"{name}: adapter {adapter}: {failure}")
            elif old.get(adapter) != source:
                done.append(f"{name}: adapter {adapter} loaded")
        return Applied(done=done, failed=failed)

    async def _release(self, gone: Mapping[str, str], grace_s: float) -> None:
        """Have the replicas unload adapters when no request uses them, or when these had ``grace_s`` seconds."""
        with contextlib.suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(grace_s):
                await self._fleet.wait_until(lambda: not any(map(self._num_using, gone)))
        for adapter in gone:
            self._leaving.pop(adapter, None)
        await self._fleet.set_adapters({**self._leaving, **self._wanted})

    def halt(self) -> None:
        for task in self._releasing:
            task.cancel()

    # -- what the replicas have ---------------------------------------------------------------

    def _states(self, adapter: str) -> Iterator[AdapterState]:
        """Of the replicas that are ready."""
        for member in self._fleet.locals:
            if member.replica.is_ready and isinstance(member.replica, LocalReplica):
                state = member.replica.adapters.get(adapter)
                if state is not None:
                    yield state

    def state(self, adapter: str) -> AdapterState | None:
        """As a ready replica has it, at best loaded; None: no ready replica was asked for it yet."""
        return max(self._states(adapter), key=lambda state: bool(state.identity), default=None)

    def failure(self, adapter: str) -> str:
        """Why a ready replica could not load the adapter, for the operator; empty: all did."""
        return next((state.failure.message for state in self._states(adapter) if state.failure is not None), "")

    def bound(self, request: Request, adapter: str) -> Request:
        """The request for this adapter. Raises InvalidRequest; Unavailable where no ready replica could load it."""
        if not isinstance(request, GenerateRequest):
            raise InvalidRequest(f"{adapter!r} is an adapter of a model that generates text.", param="model")
        state = self.state(adapter)
        if state is not None and not state.identity:
            raise Unavailable(
                f"The adapter {adapter!r} could not be loaded; the server's log says why.", code="adapter_failed"
            )
        identity = "" if state is None else state.identity
        return msgspec.structs.replace(request, adapter=adapter, adapter_identity=identity)

    def status(self, base: ModelStatus, adapter: str) -> ModelStatus:
        """The status of an adapter as a model of its own, by that of the model that it changes."""
        state = self.state(adapter)
        has_failed = state is not None and not state.identity
        return msgspec.structs.replace(
            base,
            name=adapter,
            parent=base.name,
            state="failed" if has_failed else base.state,
            replicas_ready=0 if has_failed else base.replicas_ready,
            detail=self.failure(adapter),
            info=self.info(base.info, adapter),
            has_remote=False,
            waiting=0,
            waiting_tokens=0,
            in_flight=self._num_using(adapter),
            memory_bytes=0 if state is None else state.num_bytes,
        )

    def info(self, base: ModelInfo | None, adapter: str) -> ModelInfo | None:
        """The properties of an adapter: those of its base, with a fingerprint of both."""
        state = self.state(adapter)
        if base is None or state is None:
            return None
        digest = hashlib.blake2b(f"{base.fingerprint} {state.identity}".encode(), digest_size=6).hexdigest()
        return msgspec.structs.replace(base, name=adapter, source=state.source, fingerprint=f"fp_{digest}", adapters={})
