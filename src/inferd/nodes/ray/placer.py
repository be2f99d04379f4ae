"""The reservations of a server in a Ray cluster: asked for, watched, given back.

``Placer`` compares what the router's machines want with what there is, and tells the process that talks to Ray
(``driver.py``). That process may end at any time, as Ray ends programs that lose its head: it is started again, and
reservations whose nodes have joined serve on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from inferd import clock
from inferd.errors import ConfigError
from inferd.nodes.listener import NodesListener
from inferd.nodes.ray.messages import (
    REMEDY,
    Ask,
    Connected,
    Ended,
    Failed,
    FromDriver,
    GiveBack,
    Seen,
    ToDriver,
    from_driver_decoder,
    line,
)
from inferd.nodes.ray.reservations import (
    AVOIDED_S,
    COMING_S,
    NODE_ID,
    Needs,
    Reservation,
    Room,
    Wanted,
    decide,
    retry_delay,
    selectors,
    shortage,
    without,
)

DRIVER_COMMAND: Final = (sys.executable, "-P", "-m", "inferd.nodes.ray.driver")
LOOK_S: Final = 0.5
"""Seconds between two looks, where nothing has changed."""

CONNECT_S: Final = 30.0
"""Seconds in which the driver must have reached the cluster, imports included; Ray itself would try for many minutes."""

COUNTED_S: Final = 2.0
"""Seconds in which Ray's reports may not show what was reserved or given back."""

STOP_S: Final = 10.0
_MAX_LINE: Final = 16 << 20

_log = logging.getLogger("inferd.nodes.ray")


class Awaited(NamedTuple):
    """Why a model's replica has no machine yet. ``is_coming``: one was asked for, and the cluster seems to have room."""

    reason: str
    is_coming: bool


class Site(Protocol):
    """The router's machines: the reservations that they want, and what is called when those change."""

    on_wanted: Callable[[], None]

    def wanted(self) -> Mapping[str, Wanted]:
        """What the models have to have."""
        ...

    def notify(self) -> None:
        """Let replicas without a machine look again."""


class Placer:
    """Keeps one reservation for each replica. ``address``: of the cluster. ``command`` starts the driver."""

    def __init__(
        self, address: str, listener: NodesListener, site: Site, command: Sequence[str] = DRIVER_COMMAND
    ) -> None:
        self._address = address
        self._listener = listener
        self._site = site
        self._command = command
        self._reservations: dict[str, Reservation] = {}
        self._lost: dict[str, float] = {}  # when a machine of the cluster was lost, by its identity there
        self._failures: dict[str, tuple[int, float, str]] = {}  # by model: how many in a row, the last one's time, why
        self._room: Room | None = None
        self._room_at = 0.0  # of the last report, also of one that was like the one before
        self._driver: asyncio.subprocess.Process | None = None
        self._driving: asyncio.Task[None] | None = None
        self._driven_at = clock.now()  # when the present driver was started
        self._is_connected = False
        self._problem = ""  # why the cluster is not reached
        self._num_problems = 0
        self._told: dict[str, Awaited] = {}
        self._change = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. The driver is started when a model wants a machine of the cluster."""
        self._site.on_wanted = self._change.set
        self._keeping = asyncio.get_running_loop().create_task(self._keep())
        self._keeping.add_done_callback(_log_defect)

    async def stop(self) -> None:
        """Give everything back. Ray ends what the driver has asked for with the driver."""
        tasks = [task for task in (self._keeping, self._driving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        driver = self._driver
        if driver is not None and driver.stdin is not None:
            driver.stdin.close()
            try:
                await asyncio.wait_for(driver.wait(), STOP_S)
            except TimeoutError:
                driver.kill()
                await driver.wait()

    # -- router.replicas.machines.Reserver ----------------------------------------------------

    def awaited(self, model: str) -> Awaited:
        """Why a replica of the model has no machine yet."""
        if self._problem:
            return Awaited(f"the Ray cluster {self._address} is not reached: {self._problem}", False)
        if not self._is_connected or self._room is None:
            is_new = clock.now() - self._driven_at < COMING_S
            return Awaited(f"the Ray cluster {self._address} is being reached", is_new)
        failures, _, why = self._failures.get(model, (0, 0.0, ""))
        if failures:
            return Awaited(f"Ray started its node, which did not join: {why}", False)
        coming = [one for one in self._reservations.values() if one.model == model and not one.has_joined]
        oldest = min(coming, key=lambda one: one.asked_at, default=None)
        if oldest is None:
            return Awaited("a machine of the Ray cluster is being asked for", True)
        waited_s = clock.now() - oldest.asked_at
        missing = shortage(oldest.needs, self._room)
        if missing and waited_s >= LOOK_S:
            return Awaited(f"{missing}; it starts when there is room", False)
        return Awaited("Ray starts a node for it", waited_s < COMING_S)

    def has_room(self, model: str) -> bool:
        """Whether the cluster seems to have room for another replica of the model."""
        wanted = self._site.wanted().get(model)
        if wanted is None or self._room is None:
            return False
        if self._unused(model, wanted.used):
            return True
        # Those of which Ray's last report may not know yet.
        new = [
            one
            for one in self._reservations.values()
            if one.joined_at >= self._room_at - COUNTED_S or not one.has_joined
        ]
        return not shortage(wanted.needs, without(self._room, (one.needs for one in new)))

    def _unused(self, model: str, used: frozenset[str]) -> list[Reservation]:
        """The model's reservations that have joined, have no replica, and stay."""
        return [
            one
            for one in self._reservations.values()
            if one.model == model and one.has_joined and one.name not in used and not one.is_draining
        ]

    # -- one look ---------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._change.wait(), LOOK_S)
            self._change.clear()
            self._look(clock.now())

    def _look(self, now: float) -> None:
        """Bring the reservations in line with what is wanted."""
        wanted = self._site.wanted()
        used: set[str] = set().union(*(one.used for one in wanted.values()))
        self._follow_nodes(used, now)
        if wanted and self._driving is None:
            self._driving = asyncio.get_running_loop().create_task(self._drive())
            self._driving.add_done_callback(_log_defect)
        if self._is_connected:
            decision = decide(wanted, list(self._reservations.values()), now)
            for name in decision.give_back:
                self._give_back(name)
            for model, needs in decision.ask:
                self._ask(model, needs, wanted[model].leaving, now)
        for model, one in wanted.items():
            self._move_one(model, one.used)
        told = {model: self.awaited(model) for model in wanted}
        if told != self._told:
            self._told = told
            self._site.notify()

    def _follow_nodes(self, used: set[str], now: float) -> None:
        """Note which nodes have joined, have no replica, or are gone."""
        for one in list(self._reservations.values()):
            link = self._listener.link(one.name)
            if link is not None:
                one.joined_at = one.joined_at or now
                one.ray_node = link.labels.get(NODE_ID, one.name)
                one.is_draining = self._room is not None and one.ray_node in self._room.draining
                self._failures.pop(one.model, None)
                if one.name in used:
                    one.spared_at = None
                elif one.spared_at is None:
                    one.spared_at = now
            elif one.has_joined:
                self._lost[one.ray_node] = now
                self._give_back(one.name)
            elif one.end is not None:
                failures = self._failures.get(one.model, (0, 0.0, ""))[0]
                self._failures[one.model] = (failures + 1, now, one.end)
                _log.warning("the node %s for %s did not join: %s", one.name, one.model, one.end)
                self._give_back(one.name)
        self._lost = {node: at for node, at in self._lost.items() if now - at < AVOIDED_S}

    def _move_one(self, model: str, used: frozenset[str]) -> None:
        """Move a replica off a draining machine to a reservation that has joined, one replica after another. Without such
        a reservation it serves on, until its machine ends."""
        links = [
            link
            for one in self._reservations.values()
            if one.model == model and one.is_draining and (link := self._listener.link(one.name)) is not None
        ]
        if links and self._unused(model, used) and all(link.state != "leaving" for link in links):
            links[0].leave("Ray drains its machine")

    def _ask(self, model: str, needs: Needs, leaving: frozenset[str], now: float) -> None:
        failures, failed_at, _ = self._failures.get(model, (0, 0.0, ""))
        if now - failed_at < retry_delay(failures):
            return
        name = f"ray-{secrets.token_hex(6)}"
        try:
            token = self._listener.reserve(name, model)
        except OSError as error:
            self._failures[model] = (failures + 1, now, f"its token cannot be written: {error.strerror}")
            return
        staying = [one for one in self._reservations.values() if one.model == model and one.name not in leaving]
        crowded = {one.ray_node for one in staying if one.has_joined}
        self._reservations[name] = Reservation(name=name, model=model, needs=needs, asked_at=now)
        self._send(
            Ask(
                name=name,
                needs=needs,
                selectors=selectors(needs, crowded, self._lost),
                host=self._listener.host,
                port=self._listener.port,
                token=token,
            )
        )

    def _give_back(self, name: str) -> None:
        self._reservations.pop(name, None)
        self._listener.give_back(name)
        self._send(GiveBack(name))

    # -- the driver -------------------------------------------------------------------------

    def _send(self, message: ToDriver) -> None:
        """Tell the driver; without one the message is of no use."""
        if self._driver is not None and self._driver.stdin is not None and not self._driver.stdin.is_closing():
            self._driver.stdin.write(line(message))

    async def _drive(self) -> None:
        """Keep a driver running."""
        while True:
            reason = await self._one_driver()
            self._driver, self._is_connected, self._room = None, False, None
            self._problem = reason
            self._num_problems += 1
            # What has not joined ended with the driver; what has joined serves until its node is gone.
            for one in [one for one in self._reservations.values() if not one.has_joined]:
                self._give_back(one.name)
            delay = retry_delay(self._num_problems)
            _log.warning("the Ray cluster %s is not reached: %s; tried again in %.0f s", self._address, reason, delay)
            self._change.set()
            await asyncio.sleep(delay)

    async def _one_driver(self) -> str:
        """The life of one driver; why it ended."""
        self._driven_at = clock.now()
        try:
            self._driver = await asyncio.create_subprocess_exec(
                *self._command,
                self._address,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_LINE,
                start_new_session=True,
            )
        except OSError as error:
            return f"the process that talks to it cannot be started: {error.strerror}"
        assert self._driver.stdout is not None
        reason = ""
        try:
            async with asyncio.timeout(CONNECT_S) as limit:
                while data := await self._driver.stdout.readline():
                    message = from_driver_decoder.decode(data)
                    if isinstance(message, Connected):
                        limit.reschedule(None)
                    if isinstance(message, Failed):
                        reason = message.reason
                    else:
                        self._received(message)
                    self._change.set()
        except TimeoutError:
            self._driver.kill()
            reason = f"Ray did not answer within {CONNECT_S:g} s; {REMEDY}"
        code = await self._driver.wait()
        return reason or f"the process that talks to it ended with {code}"

    def _received(self, message: FromDriver) -> None:
        match message:
            case Connected(address):
                _log.info("the Ray cluster at %s places replicas", address)
                self._is_connected, self._problem, self._num_problems = True, "", 0
            case Seen(room):
                self._room, self._room_at = room, clock.now()
            case Ended(name, reason):
                # The next look follows it: the end of the node's connection may be noticed later than this message.
                if (one := self._reservations.get(name)) is not None:
                    one.end = reason


def _log_defect(task: asyncio.Task[None]) -> None:
    """Log a defect of the placer's task, which otherwise shows only when the server stops."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("the placer failed; replicas get no more machines of the Ray cluster", exc_info=error)


def check_installed() -> None:
    """Raises ConfigError where Ray cannot be imported."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "nodes.ray needs the package ray, which is not installed; pip install 'inferd[ray]', or leave it out.",
            param="nodes.ray",
        )
