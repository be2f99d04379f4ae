"""Whether a process of a group is stopped, which its own silence would show only much later."""

from __future__ import annotations

LOOK_S = 0.1  # between two looks at the processes of a group
LOOKS = 3  # in a row at which a process is stopped, until it counts as lost


def is_stopped(pid: int) -> bool:
    """Whether a signal stopped the process (SIGSTOP, SIGTSTP); False where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
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
