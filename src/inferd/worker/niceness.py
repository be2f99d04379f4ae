"""How much of the cores a worker asks for beside others: by its model's class of priority.

Only batch models yield. Less than the usual share needs no privileges, more would; and a model that is alone must
lose nothing, so every other class keeps the share that the server itself has.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from inferd.types import PriorityClass

NICE: dict[PriorityClass, int] = {"critical": 0, "interactive": 0, "normal": 0, "batch": 10}
_AUTOGROUP = Path("/proc/self/autogroup")


def settle(priority: PriorityClass) -> None:
    """Give this thread, and those it starts from now on, the class's share of contended cores.

    A worker leads a session of its own. Where Linux groups processes by session (autogroup), threads' nice
    values count only within the group, and it is the group's that counts against others.
    """
    by = NICE[priority]
    if not by:
        return
    os.nice(by)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # another system, or one without groups
            _AUTOGROUP.write_text(str(min(os.nice(0), 19)))
