"""Loads models into memory and unloads them, within a budget of bytes.

A model is loaded when a request needs it or the operator asks for it. It is unloaded when it is idle for too long, or
when another model needs its memory. Requests for a model wait while it loads. ``residency`` decides which models are
unloaded for another one. The memory of a model is planned before it is loaded, and measured afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from inferd import clock
from inferd.config import ModelConfig
from inferd.config.units import bytes_text
from inferd.errors import InferdError, InternalError, ModelLoadError, Overloaded, Unavailable
from inferd.router.pool import Pool
from inferd.router.replicas.fleet import UnloadReason
from inferd.router.replicas.machines import Machines
from inferd.router.replicas.member import Member
from inferd.router.replicas.residency import Resident, make_room

RETRY_LOAD_S = 30.0
"""Seconds after a failed load in which requests are refused; later ones cause another load."""

ROOM_WAIT_S = 60.0
"""Seconds that a load waits for busy models to become idle."""

_log = logging.getLogger("inferd.router")


class Estimate(Protocol):
    """The planned memory of one replica."""

    @property
    def total_bytes(self) -> int:
        """The memory of one replica in bytes."""
        ...

    @property
    def here_bytes(self) -> int:
        """Of that the part on this machine, where the replica begins on it."""
        ...


Plan = Callable[..., Estimate | None]
"""``plan(name, config, free_bytes=...)``: the planned memory of one replica, None where it cannot be known. Raises
ModelLoadError."""


def plan_model(name: str, config: ModelConfig, *, free_bytes: int | None = None) -> Estimate | None:
    """The planned memory of one replica (``planning.memory.plan_model``). Raises ModelLoadError."""
    from inferd.planning.memory import plan_model  # most servers load everything at the start

    return plan_model(name, config, free_bytes=free_bytes)


class Loading:
    """Loads and unloads the models of one server. ``pools``: all pools that may use memory, also those being removed.

    ``budget_bytes`` is the operator's limit; None: the memory that other programs leave free. The budget is of this
    machine's memory; ``machines`` count the memory of nodes.
    """

    def __init__(
        self, pools: Callable[[], Iterable[Pool]], budget_bytes: int | None, plan: Plan, machines: Machines
    ) -> None:
        self._pools = pools
        self._machines = machines
        machines.free_here = self._free_here
        self._budget_bytes = budget_bytes
        self._plan = plan
        self._deciding = asyncio.Lock()
        self._planned: dict[str, int] = {}  # bytes of models that were or are being loaded here
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._freed = asyncio.Event()
        self._is_room_awaited = False

    def configure(self, budget_bytes: int | None) -> None:
        """Set another limit of memory, and check again whether waiting loads fit."""
        self._budget_bytes = budget_bytes
        self._freed.set()

    # -- called by pools --------------------------------------------------------------------

    def demand(self, pool: Pool) -> None:
        """Load the model for a request that waits. Further calls during the load have no effect."""
        if pool.name not in self._tasks and pool.availability.may_load_on_demand:
            task = asyncio.get_running_loop().create_task(self._load_on_demand(pool))
            self._tasks[pool.name] = task

    def became_idle(self, pool: Pool) -> None:
        """Note that a model has no requests any more."""
        if self._is_room_awaited:
            self._freed.set()
        idle_after_s = _idle_after_s(pool.config)
        if idle_after_s is not None and pool.name not in self._timers:
            self._watch(pool, idle_after_s)

    def may_surge(self, pool: Pool, member: Member) -> bool:
        """Whether a second copy of a replica fits into memory while the first is replaced."""
        budget = self._budget()
        return budget is None or self._used() + member.rss_bytes <= budget

    def _watch(self, pool: Pool, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[pool.name] = loop.call_later(seconds, self._check_idle, pool)

    def _check_idle(self, pool: Pool) -> None:
        """Unload a model that was idle for ``idle_after_s``; check again later otherwise."""
        self._timers.pop(pool.name, None)
        idle_after_s = _idle_after_s(pool.config)
        if idle_after_s is None or pool.fleet.residency == "absent" or not pool.is_idle:
            return  # became_idle starts the timer again
        left_s = pool.last_used_at + idle_after_s - clock.now()
        if left_s > 0:
            self._watch(pool, left_s)
        else:
            self.unload_idle(pool)

    def unload_idle(self, pool: Pool) -> None:
        """Unload a model unless it gets a request or is being loaded or unloaded; returns at once."""
        if pool.name not in self._tasks and pool.fleet.residency == "resident":
            self._tasks[pool.name] = asyncio.get_running_loop().create_task(self._unload_idle(pool))

    async def _unload_idle(self, pool: Pool) -> None:
        try:
            await self.unload(pool, "idle")
        except Unavailable:
            pass  # a request arrived
        finally:
            del self._tasks[pool.name]
            if pool.availability.may_load_on_demand and not pool.is_idle:
                self.demand(pool)

    # -- loading and unloading --------------------------------------------------------------

    async def _load_on_demand(self, pool: Pool) -> None:
        try:
            await self.load(pool)
        except InferdError as error:
            _log.warning("%s could not be loaded: %s", pool.name, error.message)
        except Exception:
            _log.exception("loading %s failed", pool.name)
            self._refuse(pool, InternalError("The model could not be loaded; the server's log has the details."))
        finally:
            del self._tasks[pool.name]

    async def load(self, pool: Pool) -> None:
        """Load the model into memory and wait until a replica is ready. Has no effect where it is loaded.

        Raises Overloaded, with the memory plan, when it does not fit; ModelLoadError; Unavailable.
        """
        pool.refuse_loads(None)
        was_operator_unloaded = pool.fleet.is_operator_unloaded
        pool.fleet.is_operator_unloaded = False  # from now on requests wait for the model
        try:
            bound, need_bytes = await self._reserve(pool) if pool.fleet.residency == "absent" else (None, 0)
            await pool.fleet.load(bound, need_bytes)
        except ModelLoadError:
            code = "model_failed"
            message = f"The model {pool.name!r} could not be loaded; the server's log says why."
            self._refuse(pool, Unavailable(message, code=code, retry_after_s=RETRY_LOAD_S))
            raise
        except Overloaded as error:
            self._refuse(pool, error)
            raise
        finally:
            if pool.fleet.residency == "absent":
                self._planned.pop(pool.name, None)
                pool.fleet.is_operator_unloaded = was_operator_unloaded
        if pool.is_idle:
            self.became_idle(pool)

    def _refuse(self, pool: Pool, error: InferdError) -> None:
        pool.refuse_loads(error)
        asyncio.get_running_loop().call_later(RETRY_LOAD_S, pool.refuse_loads, None)

    async def unload(self, pool: Pool, reason: UnloadReason) -> int:
        """Wait for the model's requests and stop its workers; returns the bytes that were freed.

        Raises Unavailable when requests are still in flight after the model's drain_s.
        """
        grace_s = pool.config.drain_s if reason == "asked" else 0.0
        freed = await pool.fleet.unload(reason, grace_s, is_idle=lambda: pool.is_idle)
        if pool.fleet.residency == "absent":
            self._planned.pop(pool.name, None)
        self._freed.set()
        return freed

    async def _reserve(self, pool: Pool) -> tuple[int | None, int]:
        """Reserve memory for the model. Returns the limit of memory for each replica, None where it has none, and the
        memory that each will take, 0 where that is not known."""
        estimate = await self._estimate(pool)
        if estimate is None:
            return None, 0
        need = estimate.here_bytes * self._num_here(pool, estimate.here_bytes)
        bound = estimate.total_bytes if pool.config.memory_bytes is None else None
        if not need:
            return bound, estimate.total_bytes
        give_up_at = clock.now() + ROOM_WAIT_S
        while not await self._reserve_room(pool, need, is_last=clock.now() >= give_up_at):
            self._is_room_awaited = True
            self._freed.clear()
            try:
                async with asyncio.timeout(max(0.0, give_up_at - clock.now())):
                    await self._freed.wait()
            except TimeoutError:
                continue
            finally:
                self._is_room_awaited = False
        return bound, estimate.total_bytes

    def _num_here(self, pool: Pool, each_bytes: int) -> int:
        """How many of a model's first replicas this machine must have memory for: all, if they fit without unloading
        another model; else those that nodes have no room for."""
        config, budget = pool.config, self._budget()
        count = config.num_at_start
        on_nodes = min(count, self._machines.room_on_nodes(pool.name, config, each_bytes))
        if not self._machines.may_run_here(config):
            return 0
        if budget is None or not on_nodes or self._used() + each_bytes * count <= budget:
            return count
        return count - on_nodes

    def _free_here(self, model: str) -> int | None:
        """The memory of this machine that a model may still take, beside what its workers here have; None: any."""
        budget = self._budget()
        if budget is None:
            return None
        others = sum(resident.num_bytes for resident in self._residents() if resident.name != model)
        own = sum(pool.fleet.planned_bytes for pool in self._pools() if pool.name == model)
        return budget - others - own

    async def _estimate(self, pool: Pool) -> Estimate | None:
        """The planned memory of one replica, if as many as the model may have share the budget. Raises
        ModelLoadError."""
        budget = self._budget()
        free = None if budget is None else budget // max(1, pool.config.num_local)
        return await asyncio.to_thread(self._plan, pool.name, pool.config, free_bytes=free)

    async def scale(self, pool: Pool, count: int) -> int:
        """Have ``count`` replicas of a model that is in memory, or as many more as memory allows; the number that it
        is to have now.

        Reserves the memory of new replicas first, and unloads no other model for them. Returns at once: the replicas
        load, and drain, in the background. Raises ModelLoadError where the memory of a replica cannot be planned.
        """
        fleet, present = pool.fleet, len(pool.fleet.locals)
        if count <= present:
            if fleet.scale(count):
                self._release(pool, count)
            return fleet.num_wanted
        estimate = await self._estimate(pool)
        async with self._deciding:
            present = len(fleet.locals)
            rss_bytes = max((member.rss_bytes for member in fleet.locals), default=0)
            each = max(rss_bytes, 0 if estimate is None else estimate.total_bytes)
            if not each or count <= present:
                return present
            # Those that leave still hold their memory.
            self._planned[pool.name] = max(self._planned.get(pool.name, 0), each * fleet.num_here)
            budget = self._budget()
            # The first new replica starts in the spare worker, whose memory is then the replica's.
            room = count if budget is None else max(0, budget + fleet.spare_bytes - self._used()) // each
            if not self._machines.may_run_here(pool.config):
                room = 0
            room += self._machines.room_on_nodes(pool.name, pool.config, each)
            allowed = min(count, present + room)
            if allowed > present:
                bound = estimate.total_bytes if estimate is not None and pool.config.memory_bytes is None else None
                if not fleet.scale(allowed, bound, each):
                    return present
                self._planned[pool.name] = each * fleet.num_here
            return allowed

    def _release(self, pool: Pool, count: int) -> None:
        """Plan for fewer replicas. Until those that leave have stopped, their measured memory counts."""
        planned = self._planned.get(pool.name)
        if planned is not None:
            staying = sum(not member.node for member in pool.fleet.locals)
            self._planned[pool.name] = planned * staying // max(1, staying, pool.fleet.num_here)
        self._freed.set()

    async def _reserve_room(self, pool: Pool, need: int, *, is_last: bool) -> bool:
        """Whether ``need`` bytes were reserved; other models were unloaded for that where necessary.

        False: busy models must become idle first. Raises Overloaded where the memory is too small even then, and with
        ``is_last`` in place of returning False.
        """
        async with self._deciding:
            budget = self._budget()
            if budget is None:
                return True
            residents = [resident for resident in self._residents() if resident.name != pool.name]
            decision = make_room(residents, need, budget)
            spare_bytes = self._spare_bytes()
            if decision.action != "fits" and spare_bytes:  # they are the first that leave
                for other in self._pools():
                    other.fleet.drop_spare()
                budget += spare_bytes
                decision = make_room(residents, need, budget)
            if decision.action == "never" or (decision.action == "wait" and is_last):
                held = ", ".join(f"{resident.name} {bytes_text(resident.num_bytes)}" for resident in residents)
                raise Overloaded(
                    f"The model {pool.name!r} takes {bytes_text(need)}, of which "
                    f"{bytes_text(decision.missing_bytes)} are missing: "
                    f"{bytes_text(budget)} may be used, and in memory are {held or 'no other models'}. "
                    "Unload one of them, or raise server.memory_bytes.",
                    code="insufficient_memory",
                    retry_after_s=RETRY_LOAD_S,
                )
            if decision.action == "wait":
                return False
            by_name = {other.name: other for other in self._pools()}
            for name in decision.evict:
                try:
                    await self.unload(by_name[name], "evicted")
                except Unavailable:
                    return False  # a request for that model has arrived meanwhile
            self._planned[pool.name] = need
            return True

    # -- accounting -------------------------------------------------------------------------

    def _residents(self) -> list[Resident]:
        return [
            Resident(
                name=pool.name,
                # At least the planned bytes, as caches fill only with time; more where the plan was too low.
                num_bytes=max(pool.fleet.rss_bytes, pool.fleet.planned_bytes, self._planned.get(pool.name, 0)),
                is_pinned=not pool.config.is_on_demand and pool.config.idle_after_s is None,
                is_idle=pool.is_idle and pool.fleet.residency == "resident",
                last_used_at=pool.last_used_at,
                priority=pool.config.priority,
            )
            for pool in self._pools()
            if pool.fleet.rss_bytes or pool.fleet.planned_bytes or pool.name in self._planned
        ]

    def _used(self) -> int:
        return sum(resident.num_bytes for resident in self._residents())

    def _budget(self) -> int | None:
        """The operator's limit in bytes; without one the memory that other programs leave free."""
        if self._budget_bytes is not None:
            return self._budget_bytes - self._spare_bytes()
        from inferd.machine.memory import available_bytes

        return available_bytes() + sum(pool.fleet.rss_bytes for pool in self._pools())

    def _spare_bytes(self) -> int:
        """Memory of the spare workers, which are no part of any model's."""
        return sum(pool.fleet.spare_bytes for pool in self._pools())

    async def stop(self) -> None:
        """Cancel loads, unloads and timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _idle_after_s(config: ModelConfig) -> float | None:
    """Seconds without a request after which a model is unloaded; None: never, or scaling decides."""
    return config.idle_after_s if config.scaling is None else None
