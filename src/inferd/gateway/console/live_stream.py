"""The stream of live numbers: one encoding of every second, written to all viewers that may see the same.

A viewer that does not read keeps no more than ``MAX_PENDING`` frames. Then they are dropped, and the viewer gets a
snapshot when it reads again. Knows server-sent events and visibility. Does not know where the numbers come from.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from inferd.errors import InferdError, Overloaded
from inferd.observe.live.feed import Line
from inferd.observe.live.live import Live, Tick
from inferd.observe.live.rings import RESOLUTIONS, as_json, number
from inferd.observe.live.series import Series

MAX_PENDING: Final = 8
RETRY_MS: Final = 2000  # after which a browser connects again
CHECK_TICKS: Final = 5  # seconds between two checks that a viewer may still see this
SNAPSHOT_LINES: Final = 100
SERIES_AT_ONCE: Final = 4  # that a snapshot encodes in one turn of the event loop

_LAST: Final = 1 << 62  # the number of a frame that no snapshot replaces
_encode: Final = msgspec.json.Encoder().encode


class Sight(NamedTuple):
    """What a key may see."""

    models: frozenset[str] | None  # None: every model, and the events of the whole server
    has_details: bool  # of events: they may name files and hosts


Look = Callable[[], Sight]
"""What a viewer may see now. Raises InferdError where it may see nothing any more."""


class View:
    """The part of the numbers that viewers of one sight get, and its encodings."""

    def __init__(self, live: Live, sight: Sight) -> None:
        self._live = live
        self._sight = sight
        models = sight.models
        self.series: list[Series] = [s for s in live.series if models is None or not s.model or s.model in models]
        self._keys = frozenset(series.key for series in self.series)
        self._snapshot: tuple[int, list[bytes]] = (-1, [])
        self._encoding = asyncio.Lock()
        self.viewers: set[Viewer] = set()

    @property
    def num_ticks(self) -> int:
        return self._live.num_ticks

    def _lines(self, lines: Sequence[Line]) -> list[Line]:
        models, has_details = self._sight
        return [
            line if has_details else msgspec.structs.replace(line, detail="")
            for line in lines
            if models is None or line.model in models
        ]

    def tick(self, tick: Tick) -> bytes:
        """The frames of a second."""
        keys = self._keys
        values = ",".join([number(value) for key, value in tick.values if key in keys])
        frame = f'event: tick\ndata: {{"at":{tick.at:.3f},"values":[{values}]}}\n\n'.encode()
        return b"".join([frame, *[_frame(b"event", _encode(line)) for line in self._lines(tick.lines)]])

    async def snapshot(self, since: int) -> tuple[int, list[bytes]]:
        """The frame with everything, in pieces, and the number of its last tick, which is ``since`` or later.

        Viewers that begin in the same second share it. Other requests are served while it is encoded.
        """
        async with self._encoding:
            if self._snapshot[0] < since:
                self._snapshot = await self._encode_snapshot()
            return self._snapshot

    async def _encode_snapshot(self) -> tuple[int, list[bytes]]:
        live = self._live
        num_ticks, second = live.num_ticks, live.rings.second or 0
        head = _encode(
            {
                "at": round(live.at, 3),
                "step_s": RESOLUTIONS[0].step_s,
                # ``at``: when the last slot began.
                "resolutions": [
                    {"step_s": step, "length": length, "at": round(live.at - second % step, 3)}
                    for step, length in RESOLUTIONS
                ],
                "series": self.series,
                "events": self._lines(live.lines(SNAPSHOT_LINES)),
            }
        )
        copies: list[tuple[str, list[array[float]]]] = [
            (series.key, [live.rings.values(series.key, place) for place in range(len(RESOLUTIONS))])
            for series in self.series
        ]
        pieces = [b'retry: %d\nevent: snapshot\ndata: %b,"values":{' % (RETRY_MS, head[:-1])]
        for begin in range(0, len(copies), SERIES_AT_ONCE):
            await asyncio.sleep(0)
            texts = [
                f"{_encode(key).decode()}:[{','.join(map(as_json, rings))}]"
                for key, rings in copies[begin : begin + SERIES_AT_ONCE]
            ]
            pieces.append(("," * (begin > 0) + ",".join(texts)).encode())
        return num_ticks, [*pieces, b"}}\n\n"]


class Viewer:
    """One open stream."""

    __slots__ = ("_is_over", "_news", "_pending", "look", "needs_snapshot", "view")

    def __init__(self, view: View, look: Look) -> None:
        self.view = view
        self.look = look
        self.needs_snapshot = True
        self._pending: deque[tuple[int, bytes]] = deque()
        self._news = asyncio.Event()
        self._is_over = False

    def put(self, tick: int, frame: bytes) -> None:
        """Send the frame of a tick. Where too many wait, all are dropped in favour of a later snapshot."""
        if self.needs_snapshot:
            return
        if len(self._pending) >= MAX_PENDING:
            self._pending.clear()
            self.needs_snapshot = True
            return
        self._pending.append((tick, frame))
        self._news.set()

    def move(self, view: View) -> None:
        """Show another view: tell the client, then send its snapshot."""
        self.view.viewers.discard(self)
        view.viewers.add(self)
        self.view = view
        self._pending.append((_LAST, b'event: series\ndata: {"reason":"The series changed."}\n\n'))
        self.needs_snapshot = True
        self._news.set()

    def end(self, frame: bytes) -> None:
        """End the stream after a last frame."""
        self.view.viewers.discard(self)
        self._pending.append((_LAST, frame))
        self._is_over = True
        self._news.set()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The frames, or pieces of them, as they are written. Does not go on while the connection's buffer is full."""
        while True:
            while self._pending:
                yield self._pending.popleft()[1]
            if self._is_over:
                return
            if self.needs_snapshot:
                self.needs_snapshot = False
                last, pieces = await self.view.snapshot(self.view.num_ticks)
                while self._pending and self._pending[0][0] <= last:
                    self._pending.popleft()
                for piece in pieces:
                    yield piece
            elif not self._pending:
                self._news.clear()
                await self._news.wait()


class LiveStream:
    """All viewers of one server."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._version = live.version  # of the series that the views have
        self._views: dict[Sight, View] = {}
        self._is_closed = False
        live.listeners.append(self._tick)

    @property
    def live(self) -> Live:
        return self._live

    @property
    def num_viewers(self) -> int:
        return sum(len(view.viewers) for view in self._views.values())

    def open(self, look: Look, max_viewers: int) -> AsyncGenerator[bytes, None]:
        """The frames of a new viewer. Raises Overloaded when there are too many viewers, and what ``look`` raises."""
        if self.num_viewers >= max_viewers:
            raise Overloaded(
                f"There are {max_viewers} viewers of the live numbers already; close one, or raise "
                "server.console_viewers.",
                code="too_many_viewers",
                retry_after_s=10.0,
            )
        return self._frames(look, look())

    async def _frames(self, look: Look, sight: Sight) -> AsyncGenerator[bytes, None]:
        if self._is_closed:
            return
        self._follow_series()
        viewer = Viewer(self._view(sight), look)
        viewer.view.viewers.add(viewer)
        frames = viewer.frames()
        try:
            async for frame in frames:
                yield frame
        finally:
            viewer.view.viewers.discard(viewer)
            await frames.aclose()

    def close(self) -> None:
        """End every stream, because the server stops. Idempotent."""
        self._is_closed = True
        for viewer in self._viewers():
            viewer.end(_frame(b"end", b'{"reason":"The server stops.","code":"stopping"}'))

    def _view(self, sight: Sight) -> View:
        found = self._views.get(sight)
        if found is None:
            found = self._views[sight] = View(self._live, sight)
        return found

    def _viewers(self) -> list[Viewer]:
        return [viewer for view in self._views.values() for viewer in view.viewers]

    def _tick(self, tick: Tick) -> None:
        self._follow_series()
        if tick.number % CHECK_TICKS == 0:
            self._look_again(self._viewers())
        for sight, view in list(self._views.items()):
            if view.viewers:
                frame = view.tick(tick)
                for viewer in view.viewers:
                    viewer.put(tick.number, frame)
            else:
                del self._views[sight]

    def _follow_series(self) -> None:
        """Show every viewer the series of now."""
        if self._version != self._live.version:
            self._version = self._live.version
            viewers, self._views = self._viewers(), {}
            self._look_again(viewers)

    def _look_again(self, viewers: Sequence[Viewer]) -> None:
        """Give every viewer the view that it may have now."""
        for viewer in viewers:
            try:
                view = self._view(viewer.look())
            except InferdError as error:
                viewer.end(_frame(b"end", _encode({"reason": error.message, "code": error.code})))
            else:
                if view is not viewer.view:
                    viewer.move(view)


def _frame(event: bytes, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event, data)
