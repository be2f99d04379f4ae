"""Whether a process of a group is stopped, or all wait for each other, which silence would show only much later."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

RANK_COMMAND = (sys.executable, "-P", "-m", "inferd.engine.ranks.rank")
"""Starts a rank. -P: one that is started in a model's folder must not import what lies there."""

EXIT_RANK_LOST = 6
"""Status of a rank that ended because another one was lost, or sent what it must not."""

LOOK_S = 0.1  # between two looks at the processes of a group
LOOKS = 3  # in a row at which a process is stopped, until it counts as lost
STILL_LOOKS = 5  # in a row at which no rank works, until the group counts as lost
UNREAD_LOOKS = 30  # in a row, where a rank on another machine has not read all that was sent to it
MOST_LOOKS = 2  # that one report counts for
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


def _is_asleep(pid: int | str, but_for: int | None = None) -> bool:
    """Whether all threads of the process but one wait, and none of them for a processor or a disk."""
    try:
        return all(
            _state(f"/proc/{pid}/task/{thread}") == b"S"
            for thread in os.listdir(f"/proc/{pid}/task")
            if thread != str(but_for)
        )
    except OSError:
        return False


def asleep_but_for(thread: int) -> bool:
    """Whether all other threads of this process wait, and none of them for a processor or a disk."""
    return _is_asleep("self", thread)


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank on another machine told of its work. ``number``: of the report, 0 before the first one."""

    number: int = 0
    worked_s: float = 0.0  # processor time that it has used
    is_asleep: bool = False
    num_bytes: int = 0  # that reached it
    num_unread: int = 0  # that were sent to it and have not reached it, as far as this rank knows


class Stopped:
    """Counts the looks at which a process was stopped."""

    __slots__ = ("_count", "_pid")

    def __init__(self, pid: int) -> None:
        self._pid, self._count = pid, 0

    def is_lost(self) -> bool:
        """Look once: whether it was stopped at the last ``LOOKS`` looks."""
        self._count = self._count + 1 if is_stopped(self._pid) else 0
        return self._count >= LOOKS


async def until_stopped(pid: int) -> None:
    """Return when a signal has stopped the process."""
    stopped = Stopped(pid)
    while not stopped.is_lost():
        await asyncio.sleep(LOOK_S)


class Stillness:
    """Counts the looks at which rank 0 waited in one meeting and no other rank worked: one hangs, or a link is cut.

    A rank that computes uses the processor or waits for one, and so does a transfer: a long step is no stillness. A
    rank on another machine is judged by its reports. Each tells of the time since the one before it, so a busy machine
    that tells seldom only takes longer to judge. Where such a rank has not read all that was sent to it, the way to it
    may be slow, and the looks must be ``UNREAD_LOOKS``.
    """

    __slots__ = ("_count", "_counts", "_far", "_looks", "_meeting", "_pids", "_reports", "_untold", "_worked")

    def __init__(self, pids: Sequence[int], looks: int = STILL_LOOKS, far: Sequence[Callable[[], Report]] = ()) -> None:
        """``pids``: of the ranks other than 0 on this machine; ``looks``: at which no rank works, until the group is
        lost; ``far``: give the last reports of the ranks on other machines."""
        self._pids, self._looks, self._far = pids, looks, far
        self._meeting: Hashable | None = None
        self._worked: list[float | None] = [None] * len(pids)
        self._reports = [report() for report in far]
        self._untold = [0] * len(far)  # looks since then
        self._count = 0  # looks in this meeting at which no rank was known to work
        self._counts = [0] * len(far)  # of them, those for which each rank on another machine said that it did not

    def is_lost(self, meeting: Hashable | None) -> bool:
        """Look once, while rank 0 waits in ``meeting`` (None: in none)."""
        before, self._worked = self._worked, [_worked_s(pid) for pid in self._pids]
        is_still = meeting is not None and meeting == self._meeting
        for was, is_now in zip(before, self._worked, strict=True):
            is_still = is_still and was is not None and is_now is not None and is_now - was < STILL_S
        is_still = is_still and all(_is_asleep(pid) for pid in self._pids)
        for place, report in enumerate(self._far):
            is_still = self._is_still(place, report()) and is_still
        self._meeting = meeting
        if not is_still:
            self._count, self._counts = 0, [0] * len(self._far)
            return False
        self._count += 1
        is_read = all(report.num_unread == 0 for report in self._reports)
        return min([self._count, *self._counts]) >= (self._looks if is_read else max(self._looks, UNREAD_LOOKS))

    def _is_still(self, place: int, report: Report) -> bool:
        """Whether a rank on another machine is not known to have worked since its last report."""
        last, self._reports[place] = self._reports[place], report
        if report.number == last.number:
            self._untold[place] += 1
            return True
        looks, self._untold[place] = min(self._untold[place] + 1, MOST_LOOKS), 0
        self._counts[place] += looks
        return (
            last.number > 0
            and report.is_asleep
            and report.num_bytes == last.num_bytes
            and report.worked_s - last.worked_s < STILL_S
        )
