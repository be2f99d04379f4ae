"""No core dumps: the memory of a gateway or a worker holds prompts, answers and keys."""

from __future__ import annotations

import resource
import sys
from typing import Final

# One byte: too little for a file, and the one limit that Linux also keeps where dumps go to a program (core(5)).
LIMIT_BYTES: Final = 1 if sys.platform == "linux" else 0


def forbid_dumps() -> None:
    """For this process and those that it starts. The hard limit stays: ``prlimit --core`` allows dumps of a process
    that runs. The process stays dumpable otherwise, as debuggers and profilers of its user need that."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    limit = LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(LIMIT_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (limit, hard))
