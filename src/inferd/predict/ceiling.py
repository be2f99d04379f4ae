"""A ceiling on the memory that a process allocates while a model is loaded and tried.

A few bytes of a file can request a terabyte. The kernel would grant it, and kill a process later. Below a ceiling the
allocation fails at once, and the error can name the limit. Only Linux counts written memory apart from mapped memory,
so other systems have no ceiling. Knows no library.
"""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from inferd.config import ModelConfig
from inferd.config.units import bytes_text
from inferd.machine.memory import available_bytes, rss_bytes

_SLACK_BYTES: Final = 256 << 20  # stacks of threads and arenas that are set aside and not touched
_REFUSED: Final = re.compile(r"(?i)failed to allocate memory(?:.* of size (\d+))?|bad_alloc|cannot allocate memory")


class Ceiling:
    """``num_bytes``: what may be allocated beside the memory in use. ``limit``: the name of the limit for messages."""

    def __init__(self, num_bytes: int, limit: str) -> None:
        self.num_bytes = num_bytes
        self.limit = limit

    def sentence(self, reason: str) -> str | None:
        """The error for a failed allocation; None for any other error of a library."""
        found = _REFUSED.search(reason)
        if found is None:
            return None
        size = f"{bytes_text(int(found[1]))} of memory at once" if found[1] else "more memory"
        return f"it asks for {size}, and {self.limit} leaves it {bytes_text(self.num_bytes)}"


@contextlib.contextmanager
def memory_ceiling(config: ModelConfig, *, is_kept: bool = True) -> Iterator[Ceiling]:
    """A ceiling for the context: the rest of the model's memory_bytes, or the memory of the machine. Without
    ``is_kept`` it is not enforced: the libraries of a GPU reserve more than there is."""
    if config.memory_bytes is not None:
        ceiling = Ceiling(
            max(config.memory_bytes - rss_bytes(), 0), f"memory_bytes = {bytes_text(config.memory_bytes)}"
        )
    else:
        ceiling = Ceiling(available_bytes(), "the machine's free memory")
    held = _data_bytes()
    if held is None or not is_kept:
        yield ceiling
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = held + ceiling.num_bytes + _SLACK_BYTES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY:
        wanted = min(wanted, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    try:
        yield ceiling
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int | None:
    """What counts against the limit now: private memory that may be written to. None where the system does not say."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None
