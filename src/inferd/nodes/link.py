"""The server's side of one node: its connection, its beats, the workers on it.

The router's machines place workers here (``router/replicas/machines.py``). The node is gone when its connection is, or
when ``pulse.py`` says so. Then every worker on it is lost at once, and their requests run elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Literal, Protocol

from inferd import clock
from inferd.nodes.frames import Connection
from inferd.nodes.life import NodeLife, RankLife
from inferd.nodes.messages import (
    Beat,
    Exited,
    FromNode,
    Join,
    Leaving,
    NotStarted,
    Preparing,
    Released,
    Renewed,
    Welcome,
    framed,
    from_node_decoder,
)
from inferd.nodes.pulse import BEAT_S, SILENT_S, Acknowledgements, Pulse, Verdict
from inferd.worker.messages import FromWorker, Load

NodeState = Literal["ready", "late", "leaving"]

_OFFSETS: Final = 50
"""Beats from which the difference of the clocks is taken: the one that travelled the least time counts."""


class LinkOwner(Protocol):
    """The listener, as its nodes see it."""

    def node_changed(self, link: Link, reason: str) -> None:
        """The node reached another state."""

    def node_leaves(self, link: Link) -> None:
        """The node is to stop: move its workers, then release it."""

    def node_gone(self, link: Link, reason: str) -> None:
        """The node is gone; its lives were ended. Called exactly once."""

    def life_launched(self, link: Link, life: NodeLife) -> None:
        """A worker is to be started on the node."""

    def life_ended(self, life: NodeLife) -> None:
        """A worker's life is over."""


class Link(Connection[FromNode]):
    """One node. ``address``: where it connected from. ``reserved_for``: the model that alone may use it; empty: any."""

    def __init__(self, join: Join, address: str, owner: LinkOwner, reserved_for: str = "") -> None:
        super().__init__(from_node_decoder)
        self.name = join.name
        self.version = join.version
        self.num_cores = join.num_cores
        self.memory_bytes = join.memory_bytes
        self.num_gpus = join.num_gpus
        self.labels: Mapping[str, str] = join.labels
        self.address = address
        self.reserved_for = reserved_for
        self.state: NodeState = "ready"
        self.joined_at = clock.wall()
        self.renewed_at = self.joined_at
        self.num_sent = 0  # bytes, of all its connections
        self.num_received = 0
        self._owner = owner
        self._lives: dict[int, NodeLife] = {}
        self._numbers = itertools.count(1)
        self._pulse = Pulse(clock.now())
        self._offsets: deque[float] = deque([0.0], maxlen=_OFFSETS)
        self._has_beaten = False
        self._acknowledgements: Acknowledgements | None = None
        self._channels: dict[int, Acknowledgements] = {}
        self._counted: dict[int, tuple[int, int]] = {}  # bytes that were added to the sums, by life; 0: of the link
        self._timer: asyncio.TimerHandle | None = None
        self._is_gone = False
        self.may_end = False  # nothing of it is needed any more, so its end is no fault

    # -- router.replicas.machines.Node --------------------------------------------------------

    @property
    def takes_replicas(self) -> bool:
        return self.state == "ready" and not self._is_gone

    @property
    def clock_offset_s(self) -> float:
        return max(self._offsets)

    @property
    def num_lives(self) -> int:
        """Workers on the node."""
        return len(self._lives)

    @property
    def silent_s(self) -> float:
        """Seconds since its last beat."""
        return self._pulse.silent_s

    def launch(
        self, name: str, load: Load, on_messages: Callable[[list[FromWorker]], None], on_writable: Callable[[], None]
    ) -> NodeLife:
        number = next(self._numbers)
        life = self._lives[number] = NodeLife(self, number, name, load, on_messages, on_writable)
        self._owner.life_launched(self, life)
        return life

    def launch_rank(
        self, name: str, load: Load, rank: int, on_messages: Callable[[list[FromWorker]], None]
    ) -> RankLife:
        """Start a rank there, for a group whose rank 0 is on the server's machine."""
        number = next(self._numbers)
        life = RankLife(self, number, name, load, on_messages, rank)
        self._lives[number] = life
        self._owner.life_launched(self, life)
        return life

    # -- the connection ---------------------------------------------------------------------

    def begin(self, transport: asyncio.Transport, secret: str) -> None:
        """Take over the connection of a machine that was let in. ``secret``: with which it may join again."""
        self.transport = transport
        transport.set_protocol(self)
        self._acknowledgements = _acknowledgements_of(transport)
        self.write(framed(Welcome(secret)))
        self._tick()

    def renew(self, secret: str) -> None:
        """Give the node another secret."""
        self.renewed_at = clock.wall()
        self.write(framed(Renewed(secret)))

    def leave(self, reason: str) -> None:
        """Have the workers moved off the node, and let it end then. Idempotent."""
        if self.state != "leaving":
            self._change("leaving", reason)
            self._owner.node_leaves(self)

    def release(self) -> None:
        """Let the node end: nothing of it is needed any more."""
        self.may_end = True
        self.write(framed(Released()))

    def handle(self, message: FromNode) -> None:
        match message:
            case Beat(at):
                self._pulse.beat()
                if not self._has_beaten:
                    self._has_beaten = True
                    self._offsets.clear()
                self._offsets.append(at - clock.now())
                if self.state == "late":
                    self._change("ready", "it is heard again")
            case Exited(number, status):
                if (life := self._lives.get(number)) is not None:
                    life.exited(status)
            case NotStarted(number, failure):
                if (life := self._lives.get(number)) is not None:
                    life.not_started(failure)
            case Preparing(number, phase, done, total):
                if (life := self._lives.get(number)) is not None:
                    life.preparing(phase, done, total)
            case Leaving():
                self.leave("it was asked to stop")

    def attach(self, life: NodeLife, transport: asyncio.Transport) -> None:
        """The channel of a worker is open."""
        self._channels[life.number] = _acknowledgements_of(transport)
        life.attached(transport)

    def life_ended(self, life: NodeLife) -> None:
        self._lives.pop(life.number, None)
        channel = self._channels.pop(life.number, None)
        if channel is not None:
            self._count(life.number, channel)
            self._counted.pop(life.number, None)
            channel.close()
        self._owner.life_ended(life)

    def closed(self, error: Exception | None) -> None:
        self.lose(f"its connection ended{'' if error is None else f' ({error})'}")

    def lose(self, reason: str) -> None:
        """The node is gone: every worker on it is lost."""
        if self._is_gone:
            return
        self._is_gone = True
        if self._timer is not None:
            self._timer.cancel()
        self.count_bytes()
        self.abort()
        for life in list(self._lives.values()):
            life.machine_lost(f"its node {self.name} is gone: {reason}")
        if self._acknowledgements is not None:
            self._acknowledgements.close()
        self._owner.node_gone(self, reason)

    # -- beats ------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._tick)
        self.write(framed(Beat(clock.now())))
        unacknowledged_s = None if self._acknowledgements is None else self._acknowledgements.read()[0]
        verdict: Verdict = self._pulse.look(clock.now(), unacknowledged_s)
        if verdict == "gone":
            is_cut_off = unacknowledged_s is not None and unacknowledged_s >= SILENT_S
            said = ", and its machine acknowledges nothing" if is_cut_off else ""
            self.lose(f"no beat for {self._pulse.silent_s:.1f} s{said}")
        elif verdict == "late" and self.state == "ready":
            self._change("late", f"no beat for {self._pulse.silent_s:.1f} s, and its machine answers")

    def _change(self, state: NodeState, reason: str) -> None:
        self.state = state
        self._owner.node_changed(self, reason)

    # -- bytes ------------------------------------------------------------------------------

    def count_bytes(self) -> None:
        """Bring ``num_sent`` and ``num_received`` up to date."""
        if self._acknowledgements is not None:
            self._count(0, self._acknowledgements)
        for number, channel in self._channels.items():
            self._count(number, channel)

    def _count(self, number: int, connection: Acknowledgements) -> None:
        _, sent, received = connection.read()
        before = self._counted.get(number, (0, 0))
        self.num_sent += max(0, sent - before[0])
        self.num_received += max(0, received - before[1])
        self._counted[number] = (max(sent, before[0]), max(received, before[1]))


def _acknowledgements_of(transport: asyncio.Transport) -> Acknowledgements:
    return Acknowledgements(transport.get_extra_info("socket").fileno())
