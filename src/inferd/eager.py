"""Runs a coroutine at once, and makes a task for it only where it first waits.

Most requests are read, checked and queued without waiting. They need no task, which would cost another turn of the
event loop. Python 3.12 has eager tasks; this module works with 3.11 as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


def run_eagerly(coroutine: Coroutine[Any, Any, None], spawn: Spawn) -> asyncio.Task[None] | None:
    """Run a coroutine until it first waits. ``spawn`` makes the task that continues it; None: it has ended.

    Call it from a callback of the event loop, outside of tasks. Until the coroutine first waits there is no current
    task, so code that needs one (``asyncio.timeout``, ``asyncio.wait_for``) comes after ``in_task``. Raises what the
    coroutine raises before it waits.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    # A bare yield (``asyncio.sleep(0)``) waits for the next turn of the loop, in which the task starts anyway.
    return spawn(coroutine if awaited is None else _Rest(coroutine, awaited))


async def in_task() -> None:
    """Continue the calling coroutine in a task of its own, if it has none yet."""
    if asyncio.current_task() is None:
        await asyncio.sleep(0)


class _Rest(Coroutine[Any, Any, None]):
    """The rest of a coroutine that waits for ``awaited``, as a coroutine that a task continues."""

    __slots__ = ("_awaited", "_coroutine", "_is_yielded")

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = awaited
        self._is_yielded = False  # the task has received ``awaited``

    def send(self, value: Any) -> Any:
        if self._is_yielded:
            return self._coroutine.send(value)
        return self._first_awaited()

    def _first_awaited(self) -> Any:
        self._is_yielded = True
        awaited, self._awaited = self._awaited, None
        return awaited

    def throw(self, *error: Any) -> Any:
        if not self._is_yielded:
            awaited = self._first_awaited()
            # A cancelled task cancels what it waits for. This task was cancelled before it received ``awaited``.
            if isinstance(error[0], asyncio.CancelledError) and awaited is not None and awaited.cancel(*error[0].args):
                return awaited
        try:
            return self._coroutine.throw(*error)
        finally:
            del error  # its traceback may hold this frame: a circle that only the collector would free

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        return (yield from self._coroutine.__await__())
