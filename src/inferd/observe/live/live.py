"""The live numbers of a server: the rings, the feed of events, and the second's tick that fills them.

Used from one thread, the gateway's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from inferd import clock
from inferd.events import Event
from inferd.observe.live.alerts import CHECK_S, Alarms
from inferd.observe.live.feed import Feed, Line
from inferd.observe.live.machine import MachineReader
from inferd.observe.live.rings import Rings
from inferd.observe.live.series import Reader, Series, series_of
from inferd.observe.series import Store


class Tick:
    """One second: its values in the order of the series, and the lines of the feed since the tick before."""

    __slots__ = ("at", "lines", "number", "values")

    def __init__(
        self, number: int, at: float, values: Sequence[tuple[str, float | None]], lines: Sequence[Line]
    ) -> None:
        self.number = number
        self.at = at
        self.values = values
        self.lines = lines


class Live:
    """The recent numbers and events. ``listeners`` are called after every tick."""

    def __init__(
        self,
        store: Store,
        reader: Reader,
        machine: MachineReader,
        models: Iterable[str] = (),
        *,
        now: Callable[[], float] = clock.now,
        wall: Callable[[], float] = clock.wall,
        since_boot: Callable[[], float] = clock.since_boot,
    ) -> None:
        self.rings = Rings()
        self.feed = Feed()
        self.alarms = Alarms(store, self.rings)
        self.series: list[Series] = []
        self.version = 0
        """Grows with every change of the series."""
        self.num_ticks = 0
        self.at = wall()
        """The time of the last tick, in seconds since the epoch."""
        self.listeners: list[Callable[[Tick], None]] = []
        self.models: tuple[str, ...] = ()
        self._reader = reader
        self._machine = machine
        self._now = now
        self._wall = wall
        self._since_boot = since_boot
        self._num_told = 0
        self.configure(models)

    def configure(self, models: Iterable[str]) -> None:
        """Keep the series of these models. Those of a model that stays go on."""
        names = tuple(models)
        if self.version and names == self.models:
            return
        self.models = names
        self._arrange()
        self.feed.keep(frozenset(self.models))

    def _arrange(self) -> None:
        """Have the series of the models and devices of now."""
        self.version += 1
        self._num_machine_series = len(self._machine.series)
        self.series = [*series_of(self.models), *self._machine.series]
        self.rings.configure({series.key: series.is_peak for series in self.series})

    def handle(self, event: Event) -> None:
        """Take an event that may be news."""
        self.feed.handle(event, self._wall())

    def tick(self) -> None:
        """Enter the second that ends now, and tell the listeners of it."""
        now, wall = self._now(), self._wall()
        machine = self._machine.read()
        if len(self._machine.series) != self._num_machine_series:
            self._arrange()
        values = [
            *self._reader.read(self.models, now),
            *((series.key, machine.get(series.id)) for series in self._machine.series),
        ]
        self.feed.tick(now, wall)
        if not self.rings.tick(int(self._since_boot()), values):
            return
        self.at = wall
        self.num_ticks += 1
        if self.num_ticks % CHECK_S == 1:
            self.alarms.check(self.models, now, wall)
        lines = list(self.feed.since(self._num_told))
        self._num_told = self.feed.num_lines
        tick = Tick(self.num_ticks, wall, values, lines)
        for listener in list(self.listeners):
            listener(tick)

    def lines(self, count: int) -> list[Line]:
        """The last lines of the feed that a tick has told."""
        told = list(self.feed.lines)[: len(self.feed.lines) - (self.feed.num_lines - self._num_told)]
        return told[-count:]

    def until_tick_s(self) -> float:
        """Seconds until the next tick: in the middle of a second, so that a timer's delay skips none."""
        return 1 - (self._since_boot() - 0.5) % 1 or 1.0
