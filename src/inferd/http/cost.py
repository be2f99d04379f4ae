"""The processor cost of a connection's input: per turn of the event loop, and over time.

Costs are estimates, in units of about 0.1 microseconds of a processor. They are counted, not measured, so the same
bytes cost the same on a loaded machine. ``python -m bench.hostile`` measures the turns that result.

A connection spends units for what it sends. It gains units for answers, and by the time that passes. Input that costs
much and asks for little (tiny frames, tiny chunks, cancelled streams) exceeds the budget, and the server closes the
connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

MAX_PER_TURN: Final = 50_000  # of one connection; then other connections run
BURST: Final = 2_000_000  # that a connection may spend beyond its credit
REFILL_PER_S: Final = 500_000.0  # units that a connection regains per second: a twentieth of a processor

# Costs.
READ: Final = 100  # one read of the socket, of any size
FRAME: Final = 5  # one HTTP/2 frame
HEADERS: Final = 20  # one HTTP/2 header block that has to be decoded, besides its bytes
HEADER: Final = 8  # one header field of it
CHUNK: Final = 10  # one piece of an HTTP/1.1 body: a chunk, or what one read brings of a body
STREAM: Final = 200  # opening or cancelling an HTTP/2 stream
TASK: Final = 1_000  # one asyncio task
REFUSAL: Final = 500  # one call that is answered with an error
DECOMPRESSED_BYTE: Final = 10  # one byte of a compressed message, which decompresses to at most a thousand
PROTOBUF_FIELD: Final = 4  # one field of a protobuf message

# Credits.
ANSWER_CREDIT: Final = 30_000  # for an answer
REFUSAL_CREDIT: Final = 3_000  # for an error in answer to a request that was admitted: about what the request cost


class CostBudget:
    """What one connection may still spend: ``BURST`` units, refilled by ``REFILL_PER_S`` units per second."""

    __slots__ = ("_at", "_owed")

    def __init__(self, now: float) -> None:
        self._owed = 0.0  # spent beyond the credit; never more than BURST while the connection stays open
        self._at = now  # of the last refill, in seconds

    def spend(self, spent: int, credit: int, now: Callable[[], float]) -> bool:
        """Subtract ``spent`` units and add ``credit`` units. Return False when the budget is exceeded.

        ``now`` is called only where a refill decides the result, because reading the clock costs time as well.
        """
        owed = self._owed + spent - credit
        if owed <= BURST:
            self._owed = owed if owed > 0 else 0.0
            return True
        at = now()
        self._owed = owed = max(0.0, owed - (at - self._at) * REFILL_PER_S)
        self._at = at
        return owed <= BURST


class TurnQueue:
    """Connections whose remaining input exceeds one turn of the event loop. Each turn runs one of them, in order."""

    __slots__ = ("_call_soon", "_queue")

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """``call_soon`` schedules a callback for the next turn of the event loop."""
        self._call_soon = call_soon
        self._queue: deque[Callable[[], None]] = deque()

    def add(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in a turn of its own, after those that are queued already."""
        if not self._queue:
            self._call_soon(self._run_next)
        self._queue.append(callback)

    def _run_next(self) -> None:
        callback = self._queue.popleft()
        if self._queue:
            self._call_soon(self._run_next)
        callback()
