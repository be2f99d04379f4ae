"""Whether a process of a group is stopped, or all wait for each other, which silence would show only much later."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

LOOK_S = 0.1  # between two looks at the processes of a group
LOOKS = 3  # in a row at which a process is stopped, until it counts as lost
STILL_LOOKS = 5  # in a row at which no rank works, until the group counts as lost
STILL_S = 0.002  # of processor time between two looks: a rank that only looks takes less


def _state(path: str) -> bytes:
    """The letter of a process's or a thread's state in proc(5); empty where the system does not tell."""
    try:
        with open(f"{path}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return b""


def is_stopped(pid: int) -> bool:
    """Whether a signal stopped the process (SIGSTOP, SIGTSTP); False where the system does not tell."""
    return _state(f"/proc/{pid}") == b"T"


def _worked_s(pid: int) -> float | None:
    """Processor time that the process has used; None where the system does not tell."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3)
    except OSError:
        return None


def _is_asleep(pid: int) -> bool:
    """Whether all threads of the process wait, and none of them for a processor or a disk."""
    try:
        return all(_state(f"/proc/{pid}/task/{thread}") == b"S" for thread in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return False


class Stopped:
    """Counts the looks at which a process was stopped."""

    __slots__ = ("_count", "_pid")

    def __init__(self, pid: int) -> None:
        self._pid, self._count = pid, 0

    def is_lost(self) -> bool:
        """Look once: whether it was stopped at the last ``LOOKS`` looks."""
        self._count = self._count + 1 if is_stopped(self._pid) else 0
        return self._count >= LOOKS


class Stillness:
    """Counts the looks at which rank 0 waited in one meeting and no other rank worked: one hangs, or a link is cut.

    A rank that computes uses the processor or waits for one, and so does a transfer: a long step is no stillness.
    """

    __slots__ = ("_count", "_meeting", "_pids", "_worked")

    def __init__(self, pids: Sequence[int]) -> None:
        """``pids``: of the ranks other than 0."""
        self._pids = pids
        self._count = 0
        self._meeting: int | None = None
        self._worked: list[float | None] = [None] * len(pids)

    def is_lost(self, meeting: int | None) -> bool:
        """Look once, while rank 0 waits in ``meeting`` (None: in none)."""
        before, self._worked = self._worked, [_worked_s(pid) for pid in self._pids]
        is_still = meeting is not None and meeting == self._meeting
        for was, is_now in zip(before, self._worked, strict=True):
            is_still = is_still and was is not None and is_now is not None and is_now - was < STILL_S
        is_still = is_still and all(_is_asleep(pid) for pid in self._pids)
        self._meeting = meeting
        self._count = self._count + 1 if is_still else 0
        return self._count >= STILL_LOOKS
