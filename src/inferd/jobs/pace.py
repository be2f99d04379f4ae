"""How many requests of a batch are asked at the same time, so that it takes what is idle. Pure.

The queue's last class already lets every other request go first. What is left to decide is only how deep the batch
fills the queue: deep enough that a model never waits for the next request, and no deeper.
"""

from __future__ import annotations

from typing import Final, NamedTuple

START: Final = 8
_MARGIN: Final = 4


class Load(NamedTuple):
    """What a model has to do now, of all its clients."""

    waiting: int = 0  # in its queue
    in_flight: int = 0  # at its replicas
    together: int = 0  # that its replicas compute together; 0: not known


class Pace:
    """The window of one batch: requests that may be in flight."""

    __slots__ = ("_most", "_window")

    def __init__(self, most: int) -> None:
        self._most = most
        self._window = float(min(START, most))

    @property
    def window(self) -> int:
        return int(self._window)

    def answered(self, load: Load, own: int) -> None:
        """A request was answered while ``own`` others were in flight: grow while the queue is empty, and shrink while
        more waits than a quarter of what is in flight."""
        if load.waiting == 0 and own + 1 >= self.window:
            self._window = min(self._window + 1.0, float(self._most))
        elif load.waiting > max(_MARGIN, load.in_flight // 4):
            self._window = max(self._window - 1.0, 1.0)

    def room(self, load: Load, own: int) -> int:
        """Requests that may be asked now beside ``own`` in flight."""
        most = self.window
        if load.together:
            others = max(0, load.waiting + load.in_flight - own)
            most = min(self._most, max(1, load.together + max(_MARGIN, load.together // 4) - others))
        return max(0, most - own)
