"""What a connection costs: within a turn of the event loop, and beside what its requests are good for.

Costs are units of about a tenth of a microsecond of a processor, counted and not measured: the same bytes cost the same on
a loaded machine. ``python -m bench.hostile`` shows how long the turns are that they make.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

TURN: Final = 50_000  # units of one connection, after which others have their turn
BURST: Final = 2_000_000  # units that a connection may cost beyond what it earns
PER_S: Final = 500_000.0  # units by which that is forgiven: a twentieth of a processor

READ: Final = 100  # what came at once, whatever it is
FRAME: Final = 5
HEADERS: Final = 20  # a block that was not known, besides its bytes
HEADER: Final = 8  # each in it
CHUNK: Final = 10  # of a body in HTTP/1.1, or what one read brings of one
STREAM: Final = 200  # its beginning, or that it is given up
TASK: Final = 1_000
REFUSAL: Final = 500
OPENED_BYTE: Final = 10  # of what is compressed: it stands for a thousand at most
FIELD: Final = 4  # of a message in protobuf
ANSWER: Final = 30_000  # earned
REFUSED: Final = 3_000  # earned: what it cost, where a call that was let in is answered with an error


class Account:
    """Costs of one connection that nothing was earned for yet."""

    __slots__ = ("_at", "_owed")

    def __init__(self, now: float) -> None:
        self._owed = 0.0
        self._at = now  # when some was forgiven

    def is_good(self, spent: int, earned: int, now: Callable[[], float]) -> bool:
        """Enter what was spent and earned. False: the connection costs more than it is good for."""
        owed = self._owed + spent - earned
        if owed <= BURST:
            self._owed = owed if owed > 0 else 0.0
            return True
        at = now()
        self._owed = owed = max(0.0, owed - (at - self._at) * PER_S)
        self._at = at
        return owed <= BURST


class Turns:
    """Connections with more to do than fits into a turn of the event loop: each goes on in a turn of its own."""

    __slots__ = ("_line", "_soon")

    def __init__(self, soon: Callable[[Callable[[], None]], object]) -> None:
        """``soon`` calls what it is given in the next turn."""
        self._soon = soon
        self._line: deque[Callable[[], None]] = deque()

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` when those that wait already have had their turns."""
        if not self._line:
            self._soon(self._next)
        self._line.append(go_on)

    def _next(self) -> None:
        go_on = self._line.popleft()
        if self._line:
            self._soon(self._next)
        go_on()
