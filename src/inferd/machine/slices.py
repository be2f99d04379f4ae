"""The scheduler's time slices of a thread, where the system lets a thread choose them (Linux 6.12 and later).

A thread with a small weight can still hold up another one: what runs on a core keeps it for a part of its slice, 2 to 4
ms, before a thread that wakes gets the core. Only threads of one group with the policy ``SCHED_IDLE`` yield at once,
and processes of different sessions are often of different groups (autogroup). A thread with short slices yields soon.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
from typing import Final

SHORTEST_NS: Final = 100_000
"""The shortest slice that Linux knows."""

_SET: Final = {"x86_64": 314, "aarch64": 274}  # numbers of the system call sched_setattr
_ATTRIBUTES: Final = struct.Struct(
    "=IIQiIQQQ"
)  # size, policy, flags, nice, priority, slice in ns, and two of deadlines


def shorten_slices() -> bool:
    """Give the calling thread the shortest slices, and let it preempt no other thread when it wakes (``SCHED_BATCH``).

    A thread with the policy ``SCHED_IDLE`` keeps it, because that is a smaller share.
    A later change of its policy or nice value leaves the slices as they are. False: the system does not support it.
    """
    call = _SET.get(platform.machine())
    if sys.platform != "linux" or call is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    policy = os.SCHED_IDLE if os.sched_getscheduler(0) == os.SCHED_IDLE else os.SCHED_BATCH
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, 0, nice, 0, SHORTEST_NS, 0, 0)
    done: int = ctypes.CDLL(None).syscall(call, 0, wanted, 0)
    return done == 0
