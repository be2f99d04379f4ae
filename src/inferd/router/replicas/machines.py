"""The machines that may run the workers of local replicas: this one, and the nodes that joined the server.

Every replica has a spot. When a worker is to be started, the spot keeps its machine, or takes the one that ``choose``
finds: where the model has the fewest replicas, so that one machine's end leaves the others. What runs is never moved. A
spot whose machine is gone takes another one at its next start.

``choose`` is a pure function of the machines as they are. Knows no socket: a ``Node`` starts workers on its machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from inferd.config import ModelConfig
from inferd.config.units import bytes_text
from inferd.machine.placement import usable_cores
from inferd.nodes.group import GroupLife
from inferd.nodes.life import RankLife
from inferd.nodes.ray.reservations import Wanted, needs_of
from inferd.worker.environment import environment_for
from inferd.worker.messages import FromWorker, Load
from inferd.worker.process import Life, WorkerProcess
from inferd.worker.spare import SpareWorker
from inferd.worker.supervisor import NoMachineError

HERE: Final = ""
"""The name of this machine."""

LOOK_AGAIN_S: Final = 5.0
"""Seconds after which a spot without a machine looks again: memory of this machine may be free without an event."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as the choice sees it."""

    name: str  # empty: this machine
    num_cores: int
    free_bytes: int | None  # memory that no replica has or was promised; None: not counted
    num_replicas: int = 0  # of all models
    num_of_model: int = 0  # replicas of the model that is to be placed
    num_gpus: int = 0
    labels: Mapping[str, str] = {}
    is_reserved: bool = False  # for one replica of the model that is to be placed


class Node(Protocol):
    """Another machine, which joined the server."""

    @property
    def name(self) -> str: ...
    @property
    def num_cores(self) -> int: ...
    @property
    def memory_bytes(self) -> int:
        """The memory that it gives."""
        ...

    @property
    def num_gpus(self) -> int: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def reserved_for(self) -> str:
        """The model that alone may have a replica on it, one; empty: any."""
        ...

    @property
    def takes_replicas(self) -> bool:
        """Whether workers may be started there: it is heard, and does not leave."""
        ...

    def launch(
        self, name: str, load: Load, on_messages: Callable[[list[FromWorker]], None], on_writable: Callable[[], None]
    ) -> Life:
        """Start a worker there that loads the model."""
        ...

    def launch_rank(
        self, name: str, load: Load, rank: int, on_messages: Callable[[list[FromWorker]], None]
    ) -> RankLife:
        """Start a rank there of a replica whose rank 0 is on this machine."""
        ...


class Reserver(Protocol):
    """A cluster that reserves machines for replicas (``nodes/ray/placer.py``)."""

    def awaited(self, model: str) -> tuple[str, bool]:
        """Why a replica of the model has no machine yet, and whether one is coming."""
        ...

    def has_room(self, model: str) -> bool:
        """Whether the cluster seems to have room for another replica of the model."""
        ...


def allows(model: ModelConfig, machine: Machine) -> bool:
    """Whether a model's settings let it run on a machine. A model of a region runs on nodes labelled with it alone."""
    placement = model.placement
    if machine.name == HERE:
        return placement.nodes in ("any", "local") and not placement.labels
    if model.roles is not None:  # blocks are handed over through sockets of this machine
        return False
    if machine.is_reserved != (placement.nodes == "ray"):
        return False
    is_there = model.region is None or machine.labels.get("region") == model.region
    has_device = machine.num_gpus >= model.least_gpus
    has_labels = placement.labels.items() <= machine.labels.items()
    return placement.nodes != "local" and is_there and has_device and has_labels


def has_room(machine: Machine, need_bytes: int) -> bool:
    """Whether the memory suffices. A need of 0 is not known, and fits where there is any memory. A machine that is
    reserved for one replica has room for that one."""
    if machine.is_reserved:
        return machine.num_replicas == 0
    return machine.free_bytes is None or machine.free_bytes >= max(need_bytes, 1)


def choose(machines: Sequence[Machine], model: ModelConfig, need_bytes: int, avoid: Collection[str] = ()) -> Machine:
    """The machine for another replica. ``avoid``: where the model did not load.

    The order: fewest replicas of the model, so that they are spread; this machine, where no network is between; fewest
    replicas for each core; the most free memory; the name. Raises NoMachineError, which says what is missing.
    """
    allowed = [machine for machine in machines if allows(model, machine)]
    fit = [machine for machine in allowed if has_room(machine, need_bytes) and machine.name not in avoid]
    if fit:
        return min(fit, key=_rank)
    if not allowed:
        labels = ", ".join(f"{name}={value}" for name, value in model.placement.labels.items())
        raise NoMachineError(f"no node{f' with {labels}' if labels else ''} has joined; it starts when one does")
    names = ", ".join(_shown(machine) for machine in allowed)
    if all(machine.name in avoid for machine in allowed):
        raise NoMachineError(f"it does not load on {names}")
    raise NoMachineError(f"a replica takes {bytes_text(need_bytes)}, and no machine has so much free ({names})")


def choose_for_ranks(machines: Sequence[Machine], model: ModelConfig, need_bytes: int) -> list[str]:
    """The nodes for the ranks of a replica that are not on this machine, in the order of the ranks.

    Each machine has an equal part of the replica, ``need_bytes`` in all. The order: fewest replicas for each core, the
    most free memory, the name. Raises NoMachineError, which says what is missing, where not all of them have a place.
    """
    count, each = model.parallel.machines, -(-need_bytes // model.parallel.machines)
    (here,) = (machine for machine in machines if machine.name == HERE)
    if not has_room(here, each):
        raise NoMachineError(f"a part of a replica takes {bytes_text(each)}, and {_shown(here)} has less free")
    allowed = [machine for machine in machines if machine.name != HERE and allows_ranks(model, machine)]
    fit = [machine for machine in allowed if has_room(machine, each)]
    if len(fit) >= count - 1:
        return [machine.name for machine in sorted(fit, key=_rank)[: count - 1]]
    labels = ", ".join(f"{name}={value}" for name, value in model.placement.labels.items())
    wanted = f"{count - 1} node{'s' if count > 2 else ''}{f' with {labels}' if labels else ''}"
    reason = f"its ranks need {wanted} beside this machine, and {len(allowed) or 'none'} joined"
    if len(fit) < len(allowed):
        names = ", ".join(_shown(machine) for machine in allowed)
        reason += f"; a part of a replica takes {bytes_text(each)}, and free are {names}"
    raise NoMachineError(f"{reason}; it starts when they are there")


def allows_ranks(model: ModelConfig, node: Machine) -> bool:
    """Whether a model's settings let ranks of a replica that begins on this machine run on a node."""
    is_there = model.region is None or node.labels.get("region") == model.region
    return is_there and not node.is_reserved and model.placement.labels.items() <= node.labels.items()


def _rank(machine: Machine) -> tuple[int, bool, float, int, str]:
    crowd = machine.num_replicas / max(1, machine.num_cores)
    return machine.num_of_model, machine.name != HERE, crowd, -(machine.free_bytes or 0), machine.name


def _shown(machine: Machine) -> str:
    free = "" if machine.free_bytes is None else f" {bytes_text(max(0, machine.free_bytes))}"
    return f"{machine.name or 'this machine'}{free}"


class Spot:
    """Where the workers of one replica run: the supervisor's ``Place``.

    ``config`` gives the model's settings of now. ``need_bytes``: the memory planned for a worker; 0: not known.
    ``rss_bytes`` gives what the worker has taken. ``spare``: where a worker on this machine may start.
    """

    def __init__(
        self,
        machines: Machines,
        model: str,
        config: Callable[[], ModelConfig],
        need_bytes: int,
        spare: SpareWorker | None = None,
    ) -> None:
        self._machines = machines
        self.model = model
        self.config = config
        self.need_bytes = need_bytes
        self.spare = spare
        self.rss_bytes: Callable[[], int] = _nothing
        self.machine: str | None = None  # None: it has no machine now
        self.others: tuple[str, ...] = ()  # the nodes with its ranks that are not on ``machine``
        self.is_leaving = False  # its replica is removed, or replaced, so another one need not keep away from it
        self._failed_on: set[str] = set()  # where the model did not load

    @property
    def node(self) -> str:
        """The name of the node that it is on; empty: this machine, or none."""
        return self.machine or HERE

    @property
    def taken_bytes(self) -> int:
        """The memory that it has, or was promised, on each of its machines."""
        return max(-(-self.need_bytes // (1 + len(self.others))), self.rss_bytes())

    def is_on(self, machine: str) -> bool:
        """Whether a part of the replica is on the machine."""
        return self.machine == machine or machine in self.others

    def launch(
        self, name: str, load: Load, on_messages: Callable[[list[FromWorker]], None], on_writable: Callable[[], None]
    ) -> Life:
        """Start a worker on its machine, which is chosen where it has none. Raises OSError; NoMachineError."""
        return self._machines.launch(self, name, load, on_messages, on_writable)

    def may_move(self) -> bool:
        """Whether another machine may load what this one did not. That machine is chosen by the next ``launch``. A
        replica on several machines begins on this one in any case."""
        if self.machine is None or self.others:
            return False
        self._failed_on.add(self.machine)
        try:
            self._machines.choose(self, self._failed_on)
        except NoMachineError:
            self._failed_on.clear()  # a later try may begin anywhere
            return False
        self.machine = None
        return True

    @property
    def avoided(self) -> Collection[str]:
        """The machines where the model did not load."""
        return self._failed_on

    def loaded(self) -> None:
        """Note that the model was loaded."""
        self._failed_on.clear()

    async def wait_for_change(self) -> None:
        """Wait until a machine joined or memory may have become free."""
        await self._machines.wait_for_change()

    def leave(self) -> None:
        """Give the place back; the replica is removed."""
        self._machines.remove_spot(self)


class Machines:
    """All machines, and the spots on them. ``command`` starts a worker here.

    ``free_here``: the memory of this machine that a model may still take, None where it is not counted.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self._nodes: dict[str, Node] = {}
        self._spots: list[Spot] = []
        self._change = asyncio.Event()
        self.free_here: Callable[[str], int | None] = lambda model: None
        self.reserver: Reserver | None = None
        self.on_wanted: Callable[[], None] = lambda: None  # called when ``wanted`` or the nodes may have changed

    # -- nodes ------------------------------------------------------------------------------

    @property
    def nodes(self) -> Mapping[str, Node]:
        """The nodes by their names."""
        return self._nodes

    def add_node(self, node: Node) -> None:
        """A machine joined."""
        self._nodes[node.name] = node
        self.notify()
        self.on_wanted()

    def remove_node(self, node: Node) -> None:
        """A machine is gone: what ran there takes another one."""
        if self._nodes.get(node.name) is node:
            del self._nodes[node.name]
            for spot in self._spots:
                if spot.is_on(node.name):
                    spot.machine, spot.others = None, ()
            self.on_wanted()

    def notify(self) -> None:
        """Wake the spots that have no machine."""
        self._change.set()
        self._change = asyncio.Event()

    async def wait_for_change(self) -> None:
        """Wait for ``notify``, at most ``LOOK_AGAIN_S`` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._change.wait(), LOOK_AGAIN_S)

    # -- spots ------------------------------------------------------------------------------

    def spot(
        self, model: str, config: Callable[[], ModelConfig], need_bytes: int, spare: SpareWorker | None = None
    ) -> Spot:
        """A spot for a new replica. It takes a machine when its first worker is started."""
        spot = Spot(self, model, config, need_bytes, spare)
        self._spots.append(spot)
        self.on_wanted()
        return spot

    def remove_spot(self, spot: Spot) -> None:
        """The replica is gone. Idempotent."""
        if spot in self._spots:
            self._spots.remove(spot)
            self.notify()
            self.on_wanted()

    def spots_on(self, node: str) -> list[Spot]:
        """The spots on a node."""
        return [spot for spot in self._spots if spot.is_on(node)]

    def choose(self, spot: Spot, avoid: Collection[str]) -> str:
        """The name of the machine for a spot, which has rank 0 where there are several. Raises NoMachineError."""
        config = spot.config()
        if config.parallel.machines > 1:
            choose_for_ranks(self.machines(spot.model, spot), config, spot.need_bytes)
            return HERE
        machines = self.machines(spot.model, spot)
        if config.placement.nodes == "ray" and self.reserver is not None and not avoid:
            machines = [machine for machine in machines if allows(config, machine) and has_room(machine, 0)]
            if not machines:
                reason, is_coming = self.reserver.awaited(spot.model)
                raise NoMachineError(reason, is_coming=is_coming)
        return choose(machines, config, spot.need_bytes, avoid).name

    def wanted(self) -> dict[str, Wanted]:
        """The reservations that the models want, one for each replica that has one or waits for it."""
        found: dict[str, Wanted] = {}
        for model, spots in self._by_model().items():
            used = frozenset(spot.node for spot in spots if self._is_reserved(spot.node))
            config = spots[-1].config()
            waiting = sum(spot.machine is None for spot in spots) if config.placement.nodes == "ray" else 0
            if used or waiting:
                needs = needs_of(config, max(spot.need_bytes for spot in spots))
                leaving = frozenset(spot.node for spot in spots if spot.is_leaving)
                found[model] = Wanted(len(used) + waiting, needs, used, leaving)
        return found

    def may_add(self, spot: Spot) -> bool:
        """Whether there may be a machine for another replica beside a spot's."""
        if spot.config().placement.nodes != "ray" or self.reserver is None:
            return True
        return self.reserver.has_room(spot.model)

    def _by_model(self) -> dict[str, list[Spot]]:
        found: dict[str, list[Spot]] = {}
        for spot in self._spots:
            found.setdefault(spot.model, []).append(spot)
        return found

    def _is_reserved(self, node: str) -> bool:
        return node in self._nodes and bool(self._nodes[node].reserved_for)

    def launch(
        self,
        spot: Spot,
        name: str,
        load: Load,
        on_messages: Callable[[list[FromWorker]], None],
        on_writable: Callable[[], None],
    ) -> Life:
        """Start a worker for a spot, or all ranks of a group. Raises OSError; NoMachineError."""
        if load.model.parallel.machines > 1:
            spot.machine, spot.others = None, ()
            spot.others = tuple(
                choose_for_ranks(self.machines(spot.model, spot), load.model, spot.need_bytes),
            )
            spot.machine = HERE
            nodes = [self._nodes[node] for node in spot.others]

            def start(changed: Load) -> Life:
                return self._start_here(spot, name, changed, on_messages, on_writable)

            return GroupLife(name, load, nodes, start, on_messages)
        if spot.machine is None:
            spot.machine = self.choose(spot, spot.avoided)
        node = self._nodes.get(spot.machine)
        if node is not None:
            return node.launch(name, load, on_messages, on_writable)
        return self._start_here(spot, name, load, on_messages, on_writable)

    def _start_here(
        self,
        spot: Spot,
        name: str,
        load: Load,
        on_messages: Callable[[list[FromWorker]], None],
        on_writable: Callable[[], None],
    ) -> Life:
        """Start a worker on this machine. Raises OSError."""
        environment = environment_for(load.model, os.environ)
        process = None if spot.spare is None else spot.spare.take(environment, on_messages, on_writable)
        if process is None:
            process = WorkerProcess(self.command, name, environment, on_messages, on_writable)
        process.send(load)
        return process

    def machines(self, model: str, without: Spot | None = None) -> list[Machine]:
        """The machines that take replicas, as the choice for a model sees them. ``without``: a spot that is to be
        placed."""
        here = Machine(name=HERE, num_cores=len(usable_cores()), free_bytes=self.free_here(model))
        found = [self._with_spots(here, model, without)]
        for node in self._nodes.values():
            if node.takes_replicas and node.reserved_for in ("", model):
                taken = sum(spot.taken_bytes for spot in self.spots_on(node.name) if spot is not without)
                machine = Machine(
                    name=node.name,
                    num_cores=node.num_cores,
                    free_bytes=node.memory_bytes - taken,
                    num_gpus=node.num_gpus,
                    labels=node.labels,
                    is_reserved=bool(node.reserved_for),
                )
                found.append(self._with_spots(machine, model, without))
        return found

    def _with_spots(self, machine: Machine, model: str, without: Spot | None) -> Machine:
        spots = [spot for spot in self._spots if spot.is_on(machine.name) and spot is not without]
        num_of_model = sum(spot.model == model and not spot.is_leaving for spot in spots)
        return msgspec.structs.replace(machine, num_replicas=len(spots), num_of_model=num_of_model)

    def room_on_nodes(self, model: str, config: ModelConfig, each_bytes: int) -> int:
        """How many more replicas of so many bytes the nodes have memory for. A Ray cluster is asked for any number: it
        may start machines for them."""
        if config.placement.nodes == "ray":
            return config.num_local
        if config.parallel.machines > 1:  # each begins on this machine
            return 0
        return sum(
            (machine.free_bytes or 0) // max(1, each_bytes)
            for machine in self.machines(model)
            if machine.name != HERE and allows(config, machine) and has_room(machine, each_bytes)
        )

    def may_run_here(self, config: ModelConfig) -> bool:
        """Whether a model's settings let it run on this machine, or begin on it."""
        return config.parallel.machines > 1 or allows(config, Machine(name=HERE, num_cores=1, free_bytes=None))


def _nothing() -> int:
    return 0
