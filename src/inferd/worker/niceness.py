"""The share of contended cores that a worker gets, by its model's priority class.

Only workers of batch models get a smaller share, which needs no privileges. A larger share would need privileges. Every
other class keeps the server's own share, so that a model that runs alone loses nothing.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from inferd.types import PriorityClass

NICE: dict[PriorityClass, int] = {"critical": 0, "interactive": 0, "normal": 0, "batch": 10}
_AUTOGROUP = Path("/proc/self/autogroup")


def set_niceness(priority: PriorityClass) -> None:
    """Give this thread, and those it starts from now on, the class's share of contended cores.

    A worker leads a session of its own. Where Linux groups processes by session (autogroup), the nice values of threads
    count only within the group, and the group's own value counts against other groups.
    """
    by = NICE[priority]
    if not by:
        return
    os.nice(by)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # another system, or one without groups
            _AUTOGROUP.write_text(str(min(os.nice(0), 19)))
