"""What a Ray cluster is asked for, and what it gets back: values and pure functions.

A replica needs one reservation. A replica whose machine is lost needs another one at once, on another machine where one
has room: Ray may take half a minute to notice the loss, and would place the actor there again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from inferd.config import ModelConfig
from inferd.config.units import bytes_text

NODE_ID: Final = "ray.io/node-id"
"""Ray's label of each of its machines."""

SPARED_S: Final = 5.0
"""Seconds for which a reservation without a replica is kept: the successor of a replica may take it."""

AVOIDED_S: Final = 60.0
"""Seconds in which a machine that was lost gets a reservation only where no other one has room."""

COMING_S: Final = 20.0
"""Seconds in which a reservation that the cluster has room for counts as coming."""

FIRST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 30.0


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica reserves, in Ray's terms. ``labels``: of the machine."""

    cores: int
    gpus: int = 0
    memory_bytes: int = 0  # 0: none is reserved
    labels: dict[str, str] = {}


class Wanted(NamedTuple):
    """The reservations of one model. ``used``: those that have a replica, which are among ``num``. ``leaving``: those of
    which the replica is removed or replaced."""

    num: int
    needs: Needs
    used: frozenset[str]
    leaving: frozenset[str] = frozenset()


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """The machines of a cluster, as Ray tells them. ``nodes``: the resources and labels of each one that takes actors;
    ``free``: the resources that are free on all of them together. ``draining``: identities of those that are alive and
    take no more actors, because they will end."""

    nodes: list[Machine]
    free: dict[str, float]
    draining: frozenset[str] = frozenset()


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    resources: dict[str, float]
    labels: dict[str, str]


class Reservation(msgspec.Struct, kw_only=True):
    """One reservation, from its request to its end. ``name``: of the node that its actor becomes."""

    name: str
    model: str
    needs: Needs
    asked_at: float
    ray_node: str = ""  # the machine's identity in Ray; empty: it has not joined
    joined_at: float = 0.0
    spared_at: float | None = None  # since when it has had no replica, once it has joined
    is_draining: bool = False  # its machine will end
    end: str | None = None  # why its actor has ended; None: it has not, as far as is known

    @property
    def has_joined(self) -> bool:
        return self.ray_node != ""


class Decision(NamedTuple):
    """``ask``: the needs of new reservations by model, one each. ``give_back``: names."""

    ask: list[tuple[str, Needs]]
    give_back: list[str]


def needs_of(config: ModelConfig, need_bytes: int) -> Needs:
    """What one replica reserves. ``need_bytes``: its planned memory; 0: not known, and memory_bytes counts."""
    labels = dict(config.placement.labels)
    if config.region is not None:
        labels["region"] = config.region
    return Needs(
        cores=config.placement.cores or config.threads or 1,
        gpus=int(config.device.startswith("cuda")),
        memory_bytes=need_bytes or config.memory_bytes or 0,
        labels=labels,
    )


def decide(wanted: Mapping[str, Wanted], reservations: Sequence[Reservation], now: float) -> Decision:
    """One reservation for each replica, on a machine that does not drain. What is asked for and not there yet is given
    back first, then what has had no replica for ``SPARED_S`` seconds; what has a replica never.

    A replica on a draining machine keeps its reservation until it has moved to another one, which is asked for at once.
    A replica that leaves such a machine is moved, or removed: it needs no further one.
    """
    ask: list[tuple[str, Needs]] = []
    give_back: list[str] = []
    none = Wanted(0, Needs(cores=1), frozenset())
    for model in sorted({*wanted, *(one.model for one in reservations)}):
        num, needs, used, leaving = wanted.get(model, none)
        own = [one for one in reservations if one.model == model]
        # Settings may have changed since: what has no replica yet is asked for anew.
        stale = [one for one in own if one.name not in used and (one.is_draining or (one.needs != needs and num > 0))]
        give_back += [one.name for one in stale]
        draining = [one for one in own if one.is_draining and one.name in used]
        num -= sum(one.name in leaving for one in draining)
        own = [one for one in own if one not in stale and one not in draining]
        ask += [(model, needs)] * (num - len(own))
        surplus = len(own) - num
        idle = sorted((one for one in own if one.name not in used), key=lambda one: (one.has_joined, -one.asked_at))
        for one in idle[: max(0, surplus)]:
            if not one.has_joined or (one.spared_at is not None and now - one.spared_at >= SPARED_S):
                give_back.append(one.name)
    return Decision(ask, give_back)


def selectors(needs: Needs, crowded: Collection[str], lost: Collection[str]) -> list[dict[str, str]]:
    """Ray's label selectors for a reservation, the best first: a machine that has no replica of the model and was not
    lost, one that was not lost, any one. ``crowded`` and ``lost``: identities of machines."""
    found: list[dict[str, str]] = []
    for avoided in ({*crowded, *lost}, {*lost}, set[str]()):
        selector = dict(needs.labels)
        if avoided:
            selector[NODE_ID] = f"!in({','.join(sorted(avoided))})"
        if selector not in found:
            found.append(selector)
    return found


def shortage(needs: Needs, room: Room) -> str:
    """Why the cluster cannot hold a replica now, without a full stop; empty: it seems to have room."""
    wanted = _resources(needs)
    labelled = [node for node in room.nodes if needs.labels.items() <= node.labels.items()]
    if not labelled:
        labels = ", ".join(f"{name}={value}" for name, value in needs.labels.items())
        return f"no machine of the Ray cluster has the labels {labels} (ray start --labels)"
    if not any(all(node.resources.get(name, 0) >= value for name, value in wanted.items()) for node in labelled):
        most = {name: max(node.resources.get(name, 0) for node in labelled) for name in wanted}
        return f"no machine of the Ray cluster can hold a replica: it takes {_text(wanted)}, and the most of each that one has is {_text(most)}"
    free = {name: room.free.get(name, 0.0) for name in wanted}
    if any(free[name] < value for name, value in wanted.items()):
        count = len(labelled)
        where = f"{count} machine{'s' * (count != 1)} of the Ray cluster"
        return f"no room: a replica takes {_text(wanted)}, and {_text(free)} is free on the {where}"
    return ""


def without(room: Room, taken: Iterable[Needs]) -> Room:
    """The cluster when these needs are taken from what is free."""
    free = dict(room.free)
    for needs in taken:
        for name, value in _resources(needs).items():
            free[name] = free.get(name, 0.0) - value
    return msgspec.structs.replace(room, free=free)


def retry_delay(failures: int) -> float:
    """Seconds before the next attempt after so many failed ones in a row."""
    return 0.0 if failures == 0 else min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(failures - 1, 10))


def _resources(needs: Needs) -> dict[str, float]:
    wanted = {"CPU": float(needs.cores), "GPU": float(needs.gpus), "memory": float(needs.memory_bytes)}
    return {name: value for name, value in wanted.items() if value}


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(
        f"{bytes_text(int(value))} of memory" if name == "memory" else f"{value:g} {name}"
        for name, value in resources.items()
    )
