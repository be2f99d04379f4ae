"""The replicas of one model: which exist, which may get a request now, and how they are added and removed.

One task at a time changes the set of replicas: loading, unloading, replacing, or applying another configuration. It
removes no replica before the replacement is ready, unless memory does not allow both. The pool owns the requests. The
fleet only waits for them, and asks the pool to reassign those of a replica that it removes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from inferd import clock
from inferd.config import ModelConfig, RemoteConfig
from inferd.errors import InferdError, ModelLoadError, Unavailable, UpstreamFailed, from_failure
from inferd.events import Emit, ModelUnloaded, ReplicaChanged
from inferd.router.choosing.health import Health
from inferd.router.replicas.engine_fields import is_same_engine
from inferd.router.replicas.links import Links, missing_role, wanted_roles
from inferd.router.replicas.machines import Machines
from inferd.router.replicas.member import Member
from inferd.router.replicas.pinned_files import PinnedFiles
from inferd.router.replicas.replica import LocalReplica, Replica, ReplicaOwner
from inferd.router.status import Applied, Residency
from inferd.router.ticket import Runner
from inferd.types import Failure, Role
from inferd.worker.spare import SpareWorker
from inferd.worker.supervisor import NoMachineError, Patience

UnloadReason = Literal["asked", "idle", "evicted", "removed"]


SPARE_AFTER_S = 1.0
"""Seconds after a change of the replicas before a spare worker is started, so that its imports do not take the cores
from what was waited for."""

RemoteMaker = Callable[[str, int, RemoteConfig, ReplicaOwner, Emit], Replica]
"""Makes the replica of a remote server, of a model's name, the replica's index, its configuration and its owner."""


class FleetOwner(ReplicaOwner, Protocol):
    """The pool, as the fleet sees it."""

    def reassign(self, replica: Replica) -> None:
        """The replica is removed now: its requests run elsewhere or end."""

    def members_changed(self) -> None:
        """A replica was added or removed, or may get requests again."""


class Fleet:
    """The replicas of one model. ``may_surge``: whether memory allows a second copy of a replica during replacement.

    ``machines`` start workers, ``patience`` has their time limits. ``pin_below``: the folder for the files that workers
    loaded (``pinned_files``); None: none are pinned. ``make_remote`` makes the replica of a remote server, by default a
    ``RemoteReplica``.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        owner: FleetOwner,
        emit: Emit,
        machines: Machines,
        patience: Patience,
        may_surge: Callable[[Member], bool],
        pin_below: Path | None = None,
        make_remote: RemoteMaker | None = None,
    ) -> None:
        self._pin_below = pin_below
        self._make_remote = make_remote or _remote_replica
        self._name = name
        self._config = config
        self._load_config = config  # what the next worker is started with
        self._adapters = dict(config.adapters)  # that every worker is to have
        self._planned_bytes: int | None = None  # memory planned for that worker
        self._need_bytes = 0  # memory that it will take; 0: not known
        self._owner = owner
        self._emit = emit
        self._machines = machines
        self._patience = patience
        self._may_surge = may_surge
        self._members: dict[int, Member] = {}
        self._links = Links()
        self._lock = asyncio.Lock()
        self._change = asyncio.Event()
        self._num_waiting = 0
        self._num_wanted = config.num_at_start
        self._departures: set[asyncio.Task[None]] = set()
        self._wanted: Literal["in", "out"] = "in"
        self._is_stopped = False
        self._is_unloading = False
        self.is_operator_unloaded = False  # the operator unloaded the model, so that no client's request loads it
        self.load_s: float | None = None  # seconds from start to ready, of the last worker
        self._spare = SpareWorker(name, machines.command, patience.stop_s)
        self._spare_timer: asyncio.TimerHandle | None = None
        self.health = Health(name, self._members, config.routing, emit, self.notify)

    # -- members ----------------------------------------------------------------------------

    @property
    def members(self) -> Iterable[Member]:
        """The records of all replicas, those being removed included."""
        return self._members.values()

    @property
    def num_members(self) -> int:
        """The number of all replicas."""
        return len(self._members)

    @property
    def has_remotes(self) -> bool:
        """Whether the model has remote servers, which other gateways may use too."""
        return bool(self._config.upstreams)

    @property
    def num_wanted(self) -> int:
        """The number of local replicas that the model is to have while it is in memory."""
        scaling = self._config.scaling
        if scaling is None:
            return self._config.num_local
        return min(max(self._num_wanted, self._config.num_at_start), self._config.num_local)

    @property
    def is_changing(self) -> bool:
        """Whether a load, an unload, a replacement or another configuration is under way."""
        return self._lock.locked()

    @property
    def locals(self) -> list[Member]:
        """The local replicas, without those being removed."""
        return [m for m in self._members.values() if m.kind == "local" and not m.is_leaving]

    @property
    def remotes(self) -> list[Member]:
        """The remote replicas, without those being removed."""
        return [m for m in self._members.values() if m.kind == "remote" and not m.is_leaving]

    def member_of(self, replica: Runner) -> Member | None:
        """The member of a replica; None: the replica was removed. Its index may belong to another one now."""
        member = self._members.get(replica.index)
        return member if member is not None and member.replica is replica else None

    def available(self, now: float) -> list[Member]:
        """The replicas to which a request may be dispatched now.

        Slow replicas, local ones with an open breaker, and remote ones that fail at another gateway are marked as the
        last resort.
        """
        available = []
        answers = any(m.role != "prefill" and m.replica.is_ready and not m.is_leaving for m in self._members.values())
        for member in self._members.values():
            if member.role == "prefill" and answers:
                continue  # it computes whole requests only while no other replica is ready
            if member.accepts(now):
                member.is_last_resort = False
            elif member.kind == "local" and member.can_take:
                member.is_last_resort = True
            else:
                continue
            available.append(member)
        if len(self._members) > 1:
            self.health.update_ejections(now)
            suspects = self.health.suspects.now(now)
            for member in available:
                if member.is_ejected or (suspects and member.identity in suspects and member.kind == "remote"):
                    member.is_last_resort = True
        return available

    @property
    def residency(self) -> Residency:
        """Whether the workers are in memory."""
        if self._is_unloading:
            return "unloading"
        workers = self.locals
        if not workers:
            return "resident" if self._config.num_local == 0 else "absent"
        return "resident" if any(member.replica.was_ready for member in workers) else "loading"

    @property
    def rss_bytes(self) -> int:
        """Resident memory of all workers on this machine in bytes, by their last reports."""
        return sum(member.rss_bytes for member in self._members.values())

    @property
    def planned_bytes(self) -> int:
        """Memory of this machine that the workers have or were promised."""
        return sum(member.planned_bytes for member in self._members.values())

    @property
    def num_here(self) -> int:
        """The number of workers on this machine, those being removed included."""
        return sum(member.kind == "local" and not member.node for member in self._members.values())

    @property
    def failure(self) -> Failure | None:
        """The failure of the workers, where all have failed and no remote server exists; None otherwise."""
        workers = self.locals
        if workers and not self.remotes and all(member.replica.failure is not None for member in workers):
            return workers[0].replica.failure
        return None

    @property
    def is_settled(self) -> bool:
        """Every replica has been ready, has failed, or was found not to answer."""
        return all(_is_known(member) for member in self._members.values())

    # -- calls from the pool ----------------------------------------------------------------

    def ready(self, member: Member) -> None:
        """Note that a replica is ready."""
        now = clock.now()
        if member.kind == "local" and member.ready_at is None:
            self.load_s = now - member.started_at
        member.ready_at = self.health.ready_since[member.index] = now
        self._want_spare()
        self.notify()

    def notify(self) -> None:
        """Wake the task that waits for a change of the replicas or the end of requests. Called for every request."""
        if self._num_waiting:
            self._change.set()
            self._change = asyncio.Event()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, checked after each ``notify``. Raises Unavailable when the server shuts down first."""
        while not condition():
            if self._is_stopped:
                raise Unavailable("The server is shutting down.", code="shutting_down")
            self._num_waiting += 1
            try:
                await self._change.wait()
            finally:
                self._num_waiting -= 1

    # -- start and stop ---------------------------------------------------------------------

    def start(self) -> None:
        """Start the replicas that the configuration has at startup; does not wait for them."""
        for remote in self._config.upstreams:
            self._add_remote(remote)
        if not self._config.is_on_demand:
            self._add_locals(self.num_wanted)
        self._want_spare()

    def halt(self) -> None:
        """End the tasks that change the set of replicas."""
        self._is_stopped = True
        if self._spare_timer is not None:
            self._spare_timer.cancel()
        self.health.halt()
        self.notify()

    async def stop(self) -> None:
        """Stop all replicas."""
        self.halt()
        await asyncio.gather(self._spare.stop(), *(_stop(member.replica) for member in self._members.values()))
        await asyncio.gather(*self._departures)
        self._links.close()

    # -- changes, one at a time -------------------------------------------------------------

    async def load(self, memory_bytes: int | None = None, need_bytes: int = 0) -> None:
        """Start the workers, if they do not exist, and wait until one is ready, or none has a machine to run on.

        ``memory_bytes``: the limit of memory for each of them, ``need_bytes``: what each will take, 0: not known.
        Raises ModelLoadError; Unavailable.
        """
        self._wanted = "in"
        async with self._lock:
            if self._wanted != "in" or self._config.num_local == 0:
                return
            self.is_operator_unloaded = False
            if self.failure is not None:  # the workers failed earlier: start them again
                await self._retire_locals()
            self._load_config, self._planned_bytes = self._config, memory_bytes
            self._need_bytes = need_bytes
            self._add_locals(self.num_wanted - len(self.locals))
            workers = self.locals
            await self._wait_until(
                lambda: any(w.replica.was_ready for w in workers) or all(_has_stopped_loading(w) for w in workers)
            )
            failure = self.failure
            if failure is not None:
                if self._config.is_on_demand:
                    await self._retire_locals()
                raise from_failure(failure)

    def scale(self, count: int, memory_bytes: int | None = None, need_bytes: int = 0) -> bool:
        """Have ``count`` local replicas, at least one; whether that is begun: False during another change.

        Returns at once. A new replica gets requests when it is ready. A replica that leaves gets no more requests, and
        stops when those in flight have ended: first one that is not ready, then one with the least work.
        ``memory_bytes`` and ``need_bytes`` as of ``load``, for each new one.
        """
        if self._is_stopped or self.is_changing or not self.locals:
            return False
        self._num_wanted = count
        failed = [member for member in self.locals if member.replica.failure is not None]
        usable = [member for member in self.locals if member not in failed]
        missing = self.num_wanted - len(usable)
        if missing > 0:
            self._load_config, self._planned_bytes = self._config, memory_bytes
            self._need_bytes = need_bytes
            self._add_locals(missing)
        usable.sort(key=lambda member: (member.replica.is_ready, member.outstanding, -member.index))
        for member in (*failed, *usable[: max(0, -missing)]):
            member.is_leaving = True
            task = asyncio.get_running_loop().create_task(self._depart(member))
            self._departures.add(task)
            task.add_done_callback(self._departures.discard)
        return True

    async def _depart(self, member: Member) -> None:
        """Remove a replica that is not needed any more; its requests take the time that they take."""
        with contextlib.suppress(Unavailable):  # the server shuts down
            await self._leave(member, None)

    async def vacate(self, node: str) -> None:
        """Move the workers of a node that leaves: each stops when another one is ready elsewhere, and its requests
        have ended. Where no other machine may run one, it stops when its requests have ended."""
        async with self._lock:
            for member in [one for one in self.locals if node == one.node or node in one.rank_nodes]:
                await self._move(member)

    async def _move(self, member: Member) -> None:
        """Replace one worker by one elsewhere, where another machine may run it; let it go in any case."""
        is_replaced = False
        if self._may_place(member):
            with contextlib.suppress(InferdError):
                await self._replace(member, self._config)
                is_replaced = True
        if not is_replaced:
            with contextlib.suppress(Unavailable):
                await self._retire(member)
                self._add_locals(self.num_wanted - len(self.locals))

    def _may_place(self, member: Member) -> bool:
        """Whether another machine may run a worker's replacement. Those that leave take none."""
        replica = member.replica
        assert isinstance(replica, LocalReplica)
        if self._config.placement.nodes == "ray":
            return self._machines.may_add(replica.spot)
        try:
            self._machines.choose(replica.spot, ())
        except NoMachineError:
            return False
        return True

    async def set_adapters(self, wanted: Mapping[str, str]) -> None:
        """Have every worker load and unload adapters until they are these (name -> source); returns when the ready
        ones have. ``LocalReplica.adapters`` tells what came of it."""
        self._adapters = dict(wanted)
        replicas = [member.replica for member in self.locals]
        await asyncio.gather(*(each.set_adapters(wanted) for each in replicas if isinstance(each, LocalReplica)))

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition about requests or replicas. Raises Unavailable when the server shuts down first."""
        await self._wait_until(condition)

    async def wait_settled(self) -> None:
        """Wait until every replica has been ready, has failed, or was found not to answer. Raises Unavailable."""
        await self._wait_until(lambda: self.is_settled)

    async def unload(self, reason: UnloadReason, grace_s: float, *, is_idle: Callable[[], bool]) -> int:
        """Stop the workers when ``is_idle`` is true; returns the bytes that they used.

        Raises Unavailable when the model is not idle after ``grace_s`` seconds; the workers continue then.
        """
        self._wanted = "out"
        async with self._lock:
            if self._wanted != "out":
                return 0
            if not self.locals:
                self.is_operator_unloaded = self.is_operator_unloaded or reason == "asked"
                return 0
            self._is_unloading = True
            try:
                async with asyncio.timeout(grace_s):
                    await self._wait_until(is_idle)
            except TimeoutError:
                raise Unavailable(
                    f"The model {self._name!r} still has work after {grace_s:g} s, so it stays loaded; "
                    "try again later, or raise its drain_s.",
                    code="model_busy",
                ) from None
            else:
                self.is_operator_unloaded = reason == "asked"
                held = await self._retire_locals()
                self._num_wanted = self._config.num_at_start
            finally:
                self._is_unloading = False
                self._owner.members_changed()
            self._emit(ModelUnloaded(model=self._name, reason=reason, freed_bytes=held))
            return held

    async def replace_all(self, config: ModelConfig | None = None) -> None:
        """Replace the workers one after the other. Raises ModelLoadError when a new worker does not load; the old ones
        continue then."""
        async with self._lock:
            for member in self.locals:
                await self._replace(member, config or self._config)

    async def replace_outdated(self) -> int:
        """Replace the workers whose model files changed since they loaded them; how many. Raises ModelLoadError."""
        async with self._lock:
            stale = await self._outdated(self._config)
            for member in stale:
                await self._replace(member, self._config)
        return len(stale)

    async def _outdated(self, config: ModelConfig) -> list[Member]:
        """The workers that loaded other files than the model has now."""
        workers = [w for w in self.locals if w.artifact]
        if not workers:
            return []
        from inferd.registry.identity import identity_of

        found = await asyncio.to_thread(identity_of, config)
        return [w for w in workers if found and w.artifact != found]

    async def apply(self, config: ModelConfig) -> Applied:
        """Make the replicas what another configuration describes; the changes that were made and that failed."""
        done: list[str] = []
        failed: list[str] = []
        async with self._lock:
            old = self._config
            self._apply_in_place(config)
            is_new = not config.is_on_demand and (old.num_local == 0 or old.is_on_demand)
            leaving = self._surplus_remotes()
            arrived = [self._add_remote(remote) for remote in self._missing_remotes()]
            try:
                if self.locals or (config.num_local and is_new and not self.is_operator_unloaded):
                    done += await self._apply_to_locals(config)
                await self._wait_until(lambda: all(_is_known(member) for member in arrived))
            except InferdError as error:
                failed.append(f"{self._name}: {error.message} What served before goes on serving.")
                if not any(member.replica.is_ready for member in self.remotes):
                    return Applied(done=done, failed=failed)
            await asyncio.gather(*(self._retire(member) for member in leaving))
        if arrived or leaving:
            done.append(f"{self._name}: {len(arrived)} remote server(s) added, {len(leaving)} removed")
        return Applied(done=done, failed=failed)

    def _apply_in_place(self, config: ModelConfig) -> None:
        """Apply the settings that need no other replica."""
        old, self._config = self._config, config
        if old.breaker != config.breaker:
            for member in self._members.values():
                member.configure(config.breaker)
        if old.routing != config.routing:
            self.health.configure(config.routing)
        for member in self.locals:
            member.region = config.region or ""
        self._want_spare()

    def _missing_remotes(self) -> list[RemoteConfig]:
        wanted = list(self._config.upstreams)
        for member in self.remotes:
            if isinstance(member.made_from, RemoteConfig) and member.made_from in wanted:
                wanted.remove(member.made_from)
        return wanted

    def _surplus_remotes(self) -> list[Member]:
        wanted, surplus = list(self._config.upstreams), []
        for member in self.remotes:
            if isinstance(member.made_from, RemoteConfig) and member.made_from in wanted:
                wanted.remove(member.made_from)
            else:
                surplus.append(member)
        return surplus

    async def _apply_to_locals(self, config: ModelConfig) -> list[str]:
        """Replace, add and remove workers; returns the changes as sentences. Raises ModelLoadError."""
        changes = []
        workers = self.locals
        outdated = await self._outdated(config)
        surplus_roles = Counter(w.role for w in workers) - wanted_roles(config)
        changed = [w for w in reversed(workers) if _takes(surplus_roles, w.role)]
        stale = [
            w
            for w in workers
            if w in outdated
            or w in changed
            or w.replica.failure is not None
            or not (isinstance(w.made_from, ModelConfig) and is_same_engine(w.made_from, config))
        ]
        wanted = self.num_wanted
        surplus = max(0, len(workers) - wanted)
        leaving = (stale + [w for w in reversed(workers) if w not in stale])[:surplus]
        replaced = [w for w in stale if w not in leaving]
        for member in replaced:
            await self._replace(member, config)
        if replaced:
            why = ", as the model's files are others now" if any(w in outdated for w in replaced) else ""
            changes.append(f"{self._name}: {_replicas(len(replaced))} replaced by new ones{why}")
        missing = wanted - len(workers)
        if missing > 0:
            self._load_config, self._planned_bytes, self._need_bytes = config, None, 0
            await self._wait_loaded(self._add_locals(missing))
        if config.num_local == 0:  # remote servers replace the workers: one of them has to answer first
            await self._wait_until(lambda: all(_is_known(member) for member in self.remotes))
            if not any(member.replica.is_ready for member in self.remotes):
                raise UpstreamFailed(f"No remote server of {self._name!r} answers; its local replicas stay.")
        await asyncio.gather(*(self._retire(member) for member in leaving))
        if missing or leaving:
            changes.append(f"{self._name}: {_replicas(wanted)} instead of {len(workers)}")
        return changes

    async def _replace(self, old: Member, config: ModelConfig) -> None:
        """Replace one worker. Raises ModelLoadError; the old worker, or a new one with its files, serves then."""
        assert isinstance(old.replica, LocalReplica)
        if self._may_surge(old) and self._machines.may_add(old.replica.spot):
            old.replica.spot.is_leaving = True
            self._load_config, self._planned_bytes, self._need_bytes = config, None, 0
            try:
                await self._wait_loaded(self._add_locals(1, instead_of=old), must_be_placed=old.replica.is_ready)
            except InferdError:
                old.replica.spot.is_leaving = False
                if isinstance(old.made_from, ModelConfig):
                    self._load_config = old.made_from
                raise
            await self._retire(old)
            return
        # Memory does not allow both: other replicas serve meanwhile, or requests wait. The new files are checked first,
        # as far as that is possible without loading them, because the old files may have been deleted.
        from inferd.registry.source import is_remote
        from inferd.registry.verified import refuse_early

        if not is_remote(config.source):
            await asyncio.to_thread(refuse_early, config)
        pinned_files = old.replica.pinned_files
        await self._retire(old, unpin=False)
        self._load_config, self._planned_bytes, self._need_bytes = config, None, 0
        failure: ModelLoadError | None = None
        try:
            await self._wait_loaded(self._add_locals(1))
        except ModelLoadError as error:
            failure = error
        if failure is None:
            await pinned_files.close()
            return
        if isinstance(old.made_from, ModelConfig):
            self._load_config = old.made_from
            self._add_local(await pinned_files.config_to_load(), pinned_files, old.role)
        raise failure

    async def _wait_loaded(self, members: Sequence[Member], *, must_be_placed: bool = False) -> None:
        """Wait until all members are ready, or have no machine to run on. Raises ModelLoadError when one has failed, or
        has no machine and ``must_be_placed``, and removes that one."""
        await self._wait_until(lambda: all(m.replica.was_ready or _has_stopped_loading(m) for m in members))
        failed = [m for m in members if m.replica.failure is not None or (must_be_placed and not m.replica.was_ready)]
        reasons = [(member.replica.failure, member.replica.reason) for member in failed]
        await asyncio.gather(*(self._retire(member) for member in failed))
        for failure, reason in reasons:
            raise ModelLoadError(f"No machine may run it: {reason}.") if failure is None else from_failure(failure)

    async def _retire_locals(self) -> int:
        """Stop every worker; returns the bytes that they used."""
        workers = self.locals
        held = 0
        for member in workers:
            if isinstance(member.replica, LocalReplica):
                held += member.replica.measure_rss()
        await asyncio.gather(*(self._retire(member) for member in workers))
        return held

    # -- the spare worker -------------------------------------------------------------------

    @property
    def spare_bytes(self) -> int:
        """Resident memory of the spare worker in bytes; 0: there is none."""
        return self._spare.rss_bytes

    @property
    def spare_pid(self) -> int | None:
        """The process of the spare worker; None: there is none."""
        return self._spare.pid

    def drop_spare(self) -> None:
        """End the spare worker, whose memory is needed."""
        self._spare.drop()

    def _want_spare(self) -> None:
        """Have a spare worker soon, or none, as the replicas and the settings are now."""
        if self._spare_timer is not None:
            self._spare_timer.cancel()
            self._spare_timer = None
        if not self._is_spare_of_use():
            self._spare.drop()
        elif not self._is_stopped:
            self._spare_timer = asyncio.get_running_loop().call_later(SPARE_AFTER_S, self._keep_spare)

    def _is_spare_of_use(self) -> bool:
        """Whether the next replica may start in a spare worker, and one is wanted."""
        scaling = self._config.scaling
        if scaling is None or len(self.locals) >= scaling.max or not self._machines.may_run_here(self._config):
            return False
        return bool(self.locals) if scaling.spare is None else scaling.spare

    def _keep_spare(self) -> None:
        workers = self.locals
        if len(workers) < self._config.num_local and all(self._may_surge(member) for member in workers[:1]):
            self._spare.keep(self._config)

    # -- single replicas --------------------------------------------------------------------

    def _add_locals(self, count: int, instead_of: Member | None = None) -> list[Member]:
        """Add local replicas. ``instead_of``: a member that the one replica will replace."""
        added = []
        for _ in range(count):
            config = self._load_config
            if self._planned_bytes is not None:
                config = msgspec.structs.replace(config, memory_bytes=self._planned_bytes)
            role = missing_role(self._load_config, [m.role for m in self.locals if m is not instead_of])
            added.append(self._add_local(config, PinnedFiles(self._name, config, self._pin_below), role))
        return added

    def _add_local(self, first: ModelConfig, pinned_files: PinnedFiles, role: Role) -> Member:
        """Add a local replica. ``first``: the configuration for its first worker process."""
        first = msgspec.structs.replace(first, adapters=self._adapters)
        spot = self._machines.spot(self._name, lambda: self._config, self._need_bytes, self._spare)
        replica = LocalReplica(
            self._name,
            self._free_index(),
            first,
            self._owner,
            self._emit,
            spot,
            self._patience,
            pinned_files,
            None if self._load_config.roles is None else self._links.add(role),
        )
        return self._add(replica, self._load_config)

    def _add_remote(self, remote: RemoteConfig) -> Member:
        return self._add(self._make_remote(self._name, self._free_index(), remote, self._owner, self._emit), remote)

    def _add(self, replica: Replica, made_from: ModelConfig | RemoteConfig) -> Member:
        member = Member(replica, made_from, self._config.breaker, clock.now())
        self._members[member.index] = member
        replica.start()
        self._owner.members_changed()
        return member

    def _free_index(self) -> int:
        index = 0
        while index in self._members:
            index += 1
        return index

    async def _retire(self, member: Member, *, unpin: bool = True) -> None:
        """Dispatch no more requests to a replica, wait for its requests for at most the model's ``drain_s``, stop and
        remove it.

        ``unpin``: whether its pinned files are deleted.
        """
        await self._leave(member, self._config.drain_s, unpin=unpin)

    async def _leave(self, member: Member, drain_s: float | None, *, unpin: bool = True) -> None:
        """Likewise, with a limit for the wait of its own; None: without one."""
        replica = member.replica
        member.is_leaving = True
        if isinstance(replica, LocalReplica):
            replica.spot.is_leaving = True
        if replica.is_ready:
            self._emit(ReplicaChanged(model=self._name, replica=member.index, state="draining"))
        self._owner.members_changed()
        if replica.num_in_flight:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._wait_until(lambda: not replica.num_in_flight)
            self._owner.reassign(replica)
        await (_stop(replica) if unpin else replica.stop())
        if self._members.get(member.index) is member:
            del self._members[member.index]
        self.health.forget(member)
        self._want_spare()
        self._owner.members_changed()


def _remote_replica(name: str, index: int, config: RemoteConfig, owner: ReplicaOwner, emit: Emit) -> Replica:
    from inferd.router.replicas.remote_replica import RemoteReplica  # not needed where every model is here

    return RemoteReplica(name, index, config, owner, emit)


async def _stop(replica: Replica) -> None:
    await replica.stop()
    if isinstance(replica, LocalReplica):
        await replica.pinned_files.close()


def _is_known(member: Member) -> bool:
    replica = member.replica
    return replica.was_ready or _has_stopped_loading(member) or replica.state in ("unreachable", "stopped")


def _has_stopped_loading(member: Member) -> bool:
    """Whether a replica has failed, or waits for a machine to run on."""
    replica = member.replica
    return replica.failure is not None or (isinstance(replica, LocalReplica) and replica.is_unplaced)


def _takes(roles: Counter[Role], role: Role) -> bool:
    """Whether one more replica of the role is among these; it is taken out of them."""
    roles[role] -= 1
    return roles[role] >= 0


def _replicas(count: int) -> str:
    return f"{count} replica{'s' * (count != 1)}"
