"""An event loop whose time passes only when nothing else is left to do."""

from __future__ import annotations

import asyncio
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes when there is nothing else to do, and then at once: every run of a script is the same."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__()
        selector: Any = self._selector  # type: ignore[attr-defined]
        look = selector.select

        def select(timeout: float | None = None) -> Any:
            assert timeout is not None, "every task waits for ever"
            self.now += timeout
            return look(0)

        selector.select = select

    def time(self) -> float:
        return self.now
