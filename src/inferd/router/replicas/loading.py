"""Brings models into memory and out of it, within a budget of bytes.

Loads when a request needs a model or the operator asks, unloads what is idle for too long or must make
room, each model's requests waiting meanwhile. What leaves for whom is ``residency``'s to decide; what a
model takes is planned before it is loaded, and measured afterwards.
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
from inferd.router.replicas.member import Member
from inferd.router.replicas.residency import Resident, make_room

RETRY_LOAD_S = 30.0
"""After a load that failed, requests are refused for so long before one of them causes another try."""

ROOM_WAIT_S = 60.0
"""A load waits so long for busy models to become idle."""

_log = logging.getLogger("inferd.router")


class Estimate(Protocol):
    """What planning says of one replica."""

    @property
    def total_bytes(self) -> int: ...


Plan = Callable[..., Estimate | None]
"""``plan(name, config, free_bytes=...)``: None where it cannot be known. Raises ModelLoadError."""


def plan_model(name: str, config: ModelConfig, *, free_bytes: int | None = None) -> Estimate | None:
    from inferd.planning.memory import plan_model  # most servers load everything at the start

    return plan_model(name, config, free_bytes=free_bytes)


class Loading:
    """``pools`` are all that may hold memory, also those that are leaving."""

    def __init__(self, pools: Callable[[], Iterable[Pool]], budget_bytes: int | None, plan: Plan = plan_model) -> None:
        self._pools = pools
        self._budget_bytes = budget_bytes
        self._plan = plan
        self._deciding = asyncio.Lock()
        self._planned: dict[str, int] = {}  # bytes of models that were or are being loaded here
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._freed = asyncio.Event()
        self._is_room_awaited = False

    def configure(self, budget_bytes: int | None) -> None:
        self._budget_bytes = budget_bytes
        self._freed.set()

    # -- asked by pools ---------------------------------------------------------------------

    def demand(self, pool: Pool) -> None:
        """A request waits for the model. One load at a time, however many wait."""
        if pool.name not in self._tasks and pool.availability.may_load_on_demand:
            task = asyncio.get_running_loop().create_task(self._load_on_demand(pool))
            self._tasks[pool.name] = task

    def became_idle(self, pool: Pool) -> None:
        if self._is_room_awaited:
            self._freed.set()
        if pool.config.idle_after_s is not None and pool.name not in self._timers:
            self._watch(pool, pool.config.idle_after_s)

    def may_surge(self, pool: Pool, member: Member) -> bool:
        """Whether a second copy of a replica fits beside the first while it is replaced."""
        budget = self._budget()
        return budget is None or self._used() + member.rss_bytes <= budget

    def _watch(self, pool: Pool, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[pool.name] = loop.call_later(seconds, self._check_idle, pool)

    def _check_idle(self, pool: Pool) -> None:
        """Unload a model that was idle for long enough; look again later at one that was not."""
        self._timers.pop(pool.name, None)
        idle_after_s = pool.config.idle_after_s
        if idle_after_s is None or pool.fleet.residency == "absent" or not pool.is_idle:
            return  # the next end of work begins anew
        left_s = pool.last_used_at + idle_after_s - clock.now()
        if left_s > 0:
            self._watch(pool, left_s)
        elif pool.name not in self._tasks:
            self._tasks[pool.name] = asyncio.get_running_loop().create_task(self._unload_idle(pool))

    async def _unload_idle(self, pool: Pool) -> None:
        try:
            await self.unload(pool, "idle")
        except Unavailable:
            pass  # somebody came
        finally:
            del self._tasks[pool.name]
            if pool.availability.may_load_on_demand and not pool.is_idle:
                self.demand(pool)

    # -- in and out -------------------------------------------------------------------------

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
        """Bring the model into memory and wait until it is ready; nothing where it is. Raises Overloaded, with
        the plan, when it does not fit; ModelLoadError; Unavailable."""
        pool.refuse_loads(None)
        was_operator_unloaded, pool.fleet.is_operator_unloaded = (
            pool.fleet.is_operator_unloaded,
            False,
        )  # from now on requests wait for it
        try:
            bound = await self._reserve(pool) if pool.fleet.residency == "absent" else None
            await pool.fleet.load(bound)
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
        """Let it finish what it has, end its workers; the bytes that are free again. Raises Unavailable when it
        has work for longer than its drain_s."""
        grace_s = pool.config.drain_s if reason == "asked" else 0.0
        freed = await pool.fleet.unload(reason, grace_s, is_idle=lambda: pool.is_idle)
        if pool.fleet.residency == "absent":
            self._planned.pop(pool.name, None)
        self._freed.set()
        return freed

    async def _reserve(self, pool: Pool) -> int | None:
        """Have room for the model; the bytes planned for each replica, None where that is unknown."""
        num_local = pool.config.num_local
        budget = self._budget()
        free = None if budget is None else budget // max(1, num_local)
        estimate = await asyncio.to_thread(self._plan, pool.name, pool.config, free_bytes=free)
        if estimate is None:
            return None
        need = estimate.total_bytes * num_local
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
        return estimate.total_bytes if pool.config.memory_bytes is None else None

    async def _reserve_room(self, pool: Pool, need: int, *, is_last: bool) -> bool:
        """Whether there is room, which is then reserved; who has to leave for it has left."""
        async with self._deciding:
            budget = self._budget()
            if budget is None:
                return True
            residents = [resident for resident in self._residents() if resident.name != pool.name]
            decision = make_room(residents, need, budget)
            if decision.action == "never" or (decision.action == "wait" and is_last):
                held = ", ".join(f"{resident.name} {bytes_text(resident.num_bytes)}" for resident in residents)
                raise Overloaded(
                    f"The model {pool.name!r} takes {bytes_text(need)}, of which {bytes_text(decision.missing_bytes)} are missing: "
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
                    return False  # a request came for it in the last moment
            self._planned[pool.name] = need
            return True

    # -- books ------------------------------------------------------------------------------

    def _residents(self) -> list[Resident]:
        return [
            Resident(
                name=pool.name,
                # What it may come to, or more where the plan was wrong: a cache fills only with time.
                num_bytes=max(pool.fleet.rss_bytes, self._planned.get(pool.name, 0)),
                is_pinned=pool.config.load == "startup" and pool.config.idle_after_s is None,
                is_idle=pool.is_idle and pool.fleet.residency == "resident",
                last_used_at=pool.last_used_at,
                priority=pool.config.priority,
            )
            for pool in self._pools()
            if pool.fleet.rss_bytes or pool.name in self._planned
        ]

    def _used(self) -> int:
        return sum(resident.num_bytes for resident in self._residents())

    def _budget(self) -> int | None:
        """The operator's, else what the machine has beside other programs; None: unknown."""
        if self._budget_bytes is not None:
            return self._budget_bytes
        from inferd.machine.memory import available_bytes

        return available_bytes() + sum(pool.fleet.rss_bytes for pool in self._pools())

    async def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
