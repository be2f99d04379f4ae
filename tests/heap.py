"""The heap of the test process: what lives to its end is frozen, so that no collection of garbage looks through it.

Thousands of collected tests hold hundreds of megabytes; a full collection would traverse them each time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def freeze_heap() -> None:
    """Free what is garbage, and leave the rest out of every later collection."""
    gc.collect()
    gc.freeze()


def refreeze_heap() -> None:
    """The same for a heap that a test froze meanwhile: what the test left is freed too."""
    gc.unfreeze()
    freeze_heap()


@contextmanager
def thread_seconds() -> Iterator[Callable[[], float]]:
    """What the calling thread has computed since, in seconds: no collection of garbage, which is the whole process's,
    falls into it."""
    was_on = gc.isenabled()
    gc.disable()
    began = time.thread_time()
    try:
        yield lambda: time.thread_time() - began
    finally:
        if was_on:
            gc.enable()
